//! `Part`: a program that engines need, and where it comes from.
//!
//! What an environment variable names wins; then what is installed or unpacked already; then it
//! is installed. What was found or refused once stays so for the life of the process.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::install;

/// A program, or for PostgreSQL the folder of its programs, for ZooKeeper a classpath.
#[derive(Debug)]
pub(crate) struct Part {
    name: &'static str,
    /// The environment variable that names it.
    variable: &'static str,
    /// Looks where it is when installed; without it, on `PATH` by its name.
    look: Option<fn() -> Option<PathBuf>>,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// Packages of the distribution.
    Packages(&'static [&'static str]),
    /// One package of another Debian suite, unpacked only.
    Suite {
        suite: &'static str,
        package: &'static str,
        /// The program in it.
        program: &'static str,
        /// The name of that program's file, to which the other name is linked.
        really: &'static str,
        /// Packages of the distribution with libraries that it links.
        libraries: &'static [&'static str],
    },
}

/// A program of the distribution's packages.
const fn packaged(
    name: &'static str,
    variable: &'static str,
    packages: &'static [&'static str],
) -> Part {
    Part {
        name,
        variable,
        look: None,
        source: Source::Packages(packages),
    }
}

pub(crate) const REDIS: Part = packaged("redis-server", "PALISADE_TEST_REDIS", &["redis-server"]);

pub(crate) const VALKEY: Part = Part {
    name: "valkey-server",
    variable: "PALISADE_TEST_VALKEY",
    look: None,
    // The later suite's package wants a newer libc. In this one the server is a tool: it goes by
    // the name that it is called with.
    source: Source::Suite {
        suite: "bookworm-backports",
        package: "valkey-tools",
        program: "usr/bin/valkey-server",
        really: "valkey-check-rdb",
        libraries: &["libatomic1", "libjemalloc2", "liblzf1"],
    },
};

pub(crate) const ETCD: Part = packaged("etcd", "PALISADE_TEST_ETCD", &["etcd-server"]);

pub(crate) const ETCDCTL: Part = packaged("etcdctl", "PALISADE_TEST_ETCDCTL", &["etcd-client"]);

pub(crate) const ETCD35: Part = Part {
    name: "etcd 3.5",
    variable: "PALISADE_TEST_ETCD35",
    look: Some(|| None),
    source: Source::Suite {
        suite: "trixie",
        package: "etcd-server",
        program: "usr/bin/etcd",
        really: "etcd",
        libraries: &[],
    },
};

pub(crate) const ZOOKEEPER: Part = Part {
    name: "zookeeper.jar and java",
    variable: "PALISADE_TEST_ZOOKEEPER",
    look: Some(|| {
        // The last is for TLS alone; the package of the first lacks it in its own list.
        let jars = ["zookeeper.jar", "slf4j-simple.jar", "netty-codec.jar"];
        let jars = jars.map(|jar| Path::new("/usr/share/java").join(jar));
        on_path("java")?;
        let there = jars.iter().all(|jar| jar.exists());
        there.then(|| PathBuf::from(jars.map(|jar| jar.display().to_string()).join(":")))
    }),
    source: Source::Packages(&[
        "libzookeeper-java",
        "libslf4j-java",
        "libnetty-java",
        "default-jre-headless",
    ]),
};

/// Not an engine: the Java client whose locks are in use beside ours.
pub(crate) const CURATOR: Part = Part {
    name: "Curator's jars and javac",
    variable: "PALISADE_TEST_CURATOR",
    look: Some(|| {
        let jars = [
            "curator-recipes.jar",
            "curator-framework.jar",
            "curator-client.jar",
            "zookeeper.jar",
            "zookeeper-jute.jar",
            "guava.jar",
            "slf4j-simple.jar",
        ];
        let jars = jars.map(|jar| Path::new("/usr/share/java").join(jar));
        on_path("javac")?;
        let there = jars.iter().all(|jar| jar.exists());
        there.then(|| PathBuf::from(jars.map(|jar| jar.display().to_string()).join(":")))
    }),
    source: Source::Packages(&[
        "libcurator-recipes-java",
        "libcurator-framework-java",
        "libcurator-client-java",
        "libslf4j-java",
    ]),
};

pub(crate) const CONSUL: Part = Part {
    name: "consul",
    variable: "PALISADE_TEST_CONSUL",
    look: None,
    source: Source::Suite {
        suite: "bullseye",
        package: "consul",
        program: "usr/bin/consul",
        really: "consul",
        libraries: &[],
    },
};

pub(crate) const POSTGRES: Part = Part {
    name: "PostgreSQL",
    variable: "PALISADE_TEST_POSTGRES_BIN",
    look: Some(|| {
        let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter();
        let installed = versions
            .flatten()
            .flatten()
            .map(|entry| entry.path().join("bin"));
        let newest = installed
            .filter(|bin| bin.join("postgres").exists())
            .max_by_key(|bin| version(bin));
        newest.or_else(|| on_path("postgres")?.parent().map(Path::to_owned))
    }),
    source: Source::Packages(&["postgresql"]),
};

pub(crate) const PGBOUNCER: Part = packaged("pgbouncer", "PALISADE_TEST_PGBOUNCER", &["pgbouncer"]);

/// Not an engine: what makes packets vanish.
pub(crate) const IPTABLES: Part = packaged("iptables", "PALISADE_TEST_IPTABLES", &["iptables"]);

/// Not engines: a browser and what drives it, for the dashboard; it has no letters of its own.
pub(crate) const CHROMIUM: Part = packaged(
    "chromium",
    "PALISADE_TEST_CHROMIUM",
    &["chromium", "fonts-liberation"],
);
pub(crate) const CHROMEDRIVER: Part = packaged(
    "chromedriver",
    "PALISADE_TEST_CHROMEDRIVER",
    &["chromium-driver"],
);

/// Not an engine: what scrapes a gateway.
pub(crate) const PROMETHEUS: Part =
    packaged("prometheus", "PALISADE_TEST_PROMETHEUS", &["prometheus"]);

/// What was found or refused.
static KNOWN: Mutex<Option<HashMap<&'static str, Result<PathBuf, String>>>> = Mutex::new(None);

impl Part {
    /// The program, installed if it must be.
    pub(crate) fn get(&self) -> Result<PathBuf, String> {
        if let Some(named) = self.named() {
            return named;
        }
        // Held while it is installed: others of this process wait for that.
        let mut known = KNOWN.lock();
        let known = known.get_or_insert_default();
        if let Some(known) = known.get(self.name) {
            return known.clone();
        }
        let got = self.install();
        known.insert(self.name, got.clone());
        got
    }

    /// Where it is now, as a sentence; the error says how it would come.
    pub(crate) fn found(&self) -> Result<String, String> {
        if let Some(named) = self.named() {
            return named.map(|path| format!("{} ({})", path.display(), self.variable));
        }
        let known = self.present();
        known.map(|path| path.display().to_string()).ok_or_else(|| {
            let from = match self.source {
                Source::Packages(packages) => packages.join(" "),
                Source::Suite { suite, package, .. } => format!("{package} of {suite}"),
            };
            format!("{} is not installed (package {from})", self.name)
        })
    }

    fn named(&self) -> Option<Result<PathBuf, String>> {
        let path = PathBuf::from(std::env::var_os(self.variable).filter(|it| !it.is_empty())?);
        // A classpath has several.
        let first = path.to_string_lossy().split(':').next().map(PathBuf::from);
        Some(if first.is_some_and(|first| first.exists()) {
            Ok(path)
        } else {
            Err(format!("{}: there is no {}", self.variable, path.display()))
        })
    }

    fn present(&self) -> Option<PathBuf> {
        let found = self.look.map_or_else(|| on_path(self.name), |look| look());
        found.or_else(|| match self.source {
            Source::Packages(_) => None,
            Source::Suite {
                suite,
                package,
                program,
                ..
            } => {
                let program = install::place(suite, package).ok()?.join(program);
                program.exists().then_some(program)
            }
        })
    }

    fn install(&self) -> Result<PathBuf, String> {
        if let Some(present) = self.present() {
            return Ok(present);
        }
        match self.source {
            Source::Packages(packages) => install::packages(packages, || self.present().is_some()),
            Source::Suite {
                suite,
                package,
                program,
                really,
                libraries,
            } => install::libraries(libraries)
                .and_then(|()| install::unpack(suite, package, (program, really))),
        }
        .map_err(|why| format!("{} can't be had: {why}", self.name))?;
        self.present()
            .ok_or_else(|| format!("{} is not in its package", self.name))
    }
}

fn version(bin: &Path) -> u32 {
    let name = bin.parent().and_then(Path::file_name);
    name.and_then(|name| name.to_str()?.parse().ok())
        .unwrap_or(0)
}

/// The program on `PATH`, or among the system's own, which are not on everyone's.
pub(super) fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .map(|folder| folder.join(program))
        .find(|path| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok())
}
