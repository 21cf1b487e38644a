//! `Part`: a program that engines need, and where it comes from.
//!
//! An environment variable takes precedence; then what is installed or unpacked already; else it is
//! installed. The result is cached for the life of the process.

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
    /// Finds it where it is installed; by default on `PATH` by its name.
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
        /// The path of the program in the package.
        program: &'static str,
        /// The real name of that program's file, to which the other name is linked.
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
    // The package of a later suite needs a newer libc. In this suite the server is one of the
    // tools, which behave according to the name that they are called by.
    source: Source::Suite {
        suite: "bookworm-backports",
        package: "valkey-tools",
        program: "usr/bin/valkey-server",
        really: "valkey-check-rdb",
        libraries: &["libatomic1", "libjemalloc2", "liblzf1"],
    },
};

/// Not an engine: the driver of a page's example, for the distribution's own Python.
pub(crate) const PSYCOPG: Part = Part {
    name: "psycopg",
    variable: "PALISADE_TEST_PSYCOPG",
    look: Some(|| {
        let driver = PathBuf::from("/usr/lib/python3/dist-packages/psycopg");
        driver.exists().then_some(driver)
    }),
    source: Source::Packages(&["python3-psycopg"]),
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
        // The last one is only for TLS; the first one's package omits it from its class path.
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

/// Not an engine: the Java client whose locks are tested together with ours.
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

/// Not an engine: drops packets.
pub(crate) const IPTABLES: Part = packaged("iptables", "PALISADE_TEST_IPTABLES", &["iptables"]);

/// Not engines: a browser and its driver, for the dashboard; the browser needs a font package.
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

/// Not an engine: scrapes a gateway.
pub(crate) const PROMETHEUS: Part =
    packaged("prometheus", "PALISADE_TEST_PROMETHEUS", &["prometheus"]);

/// The cached results.
static KNOWN: Mutex<Option<HashMap<&'static str, Result<PathBuf, String>>>> = Mutex::new(None);

impl Part {
    /// The program; installs it if necessary.
    pub(crate) fn get(&self) -> Result<PathBuf, String> {
        if let Some(named) = self.named() {
            return named;
        }
        // Locked during an installation, so that other tests of this process wait for it.
        let mut known = KNOWN.lock();
        let known = known.get_or_insert_default();
        if let Some(known) = known.get(self.name) {
            return known.clone();
        }
        let got = self.install();
        known.insert(self.name, got.clone());
        got
    }

    /// Where it is now, as a sentence; the error says how it would be installed.
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
        // A class path has several entries.
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

/// The program on `PATH`, or in the system's own directories, which are not on everyone's `PATH`.
pub(super) fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .map(|folder| folder.join(program))
        .find(|path| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok())
}
