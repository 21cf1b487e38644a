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
    /// Looks where it is when installed.
    look: fn() -> Option<PathBuf>,
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

pub(crate) const REDIS: Part = Part {
    name: "redis-server",
    variable: "PALISADE_TEST_REDIS",
    look: || on_path("redis-server"),
    source: Source::Packages(&["redis-server"]),
};

pub(crate) const VALKEY: Part = Part {
    name: "valkey-server",
    variable: "PALISADE_TEST_VALKEY",
    look: || on_path("valkey-server"),
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

pub(crate) const ETCD: Part = Part {
    name: "etcd",
    variable: "PALISADE_TEST_ETCD",
    look: || on_path("etcd"),
    source: Source::Packages(&["etcd-server"]),
};

pub(crate) const ETCDCTL: Part = Part {
    name: "etcdctl",
    variable: "PALISADE_TEST_ETCDCTL",
    look: || on_path("etcdctl"),
    source: Source::Packages(&["etcd-client"]),
};

pub(crate) const ETCD35: Part = Part {
    name: "etcd 3.5",
    variable: "PALISADE_TEST_ETCD35",
    look: || None,
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
    look: || {
        let jars = ["zookeeper.jar", "slf4j-simple.jar"];
        let jars = jars.map(|jar| Path::new("/usr/share/java").join(jar));
        on_path("java")?;
        let there = jars.iter().all(|jar| jar.exists());
        there.then(|| PathBuf::from(jars.map(|jar| jar.display().to_string()).join(":")))
    },
    source: Source::Packages(&["libzookeeper-java", "libslf4j-java", "default-jre-headless"]),
};

pub(crate) const CONSUL: Part = Part {
    name: "consul",
    variable: "PALISADE_TEST_CONSUL",
    look: || on_path("consul"),
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
    look: || {
        let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter();
        let installed = versions
            .flatten()
            .flatten()
            .map(|entry| entry.path().join("bin"));
        let newest = installed
            .filter(|bin| bin.join("postgres").exists())
            .max_by_key(|bin| version(bin));
        newest.or_else(|| on_path("postgres")?.parent().map(Path::to_owned))
    },
    source: Source::Packages(&["postgresql"]),
};

pub(crate) const PGBOUNCER: Part = Part {
    name: "pgbouncer",
    variable: "PALISADE_TEST_PGBOUNCER",
    look: || on_path("pgbouncer"),
    source: Source::Packages(&["pgbouncer"]),
};

/// Not an engine: what makes packets vanish.
pub(crate) const IPTABLES: Part = Part {
    name: "iptables",
    variable: "PALISADE_TEST_IPTABLES",
    look: || on_path("iptables"),
    source: Source::Packages(&["iptables"]),
};

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
        Some(match first.is_some_and(|first| first.exists()) {
            true => Ok(path),
            false => Err(format!("{}: there is no {}", self.variable, path.display())),
        })
    }

    fn present(&self) -> Option<PathBuf> {
        (self.look)().or_else(|| match self.source {
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
