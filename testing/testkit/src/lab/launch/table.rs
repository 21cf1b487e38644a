//! The table of engines: their names, what they need, and how they start.

use std::path::Path;

use super::Error;
use super::engines::{consul, etcd, postgres, redis, redis_sets, zookeeper};
use super::find::{CONSUL, ETCD, ETCD35, PGBOUNCER, POSTGRES, Part, REDIS, VALKEY, ZOOKEEPER};
use super::running::Parts;

/// An engine that can be started.
pub struct Recipe {
    /// Its name in tests and in `palisade-testkit up`.
    pub name: &'static str,
    /// A description.
    pub about: &'static str,
    /// The programs that it needs.
    pub(super) parts: &'static [Part],
    /// Starts it in a directory, with further settings.
    pub(super) start: fn(&Path, &[&str]) -> Result<Parts, String>,
}

/// All of them.
pub const ENGINES: &[Recipe] = &[
    recipe("redis", "one Redis", &[REDIS], |f, s| {
        redis::one(&REDIS, f, s)
    }),
    recipe("redis5", "five Redis, for Redlock", &[REDIS], redis::five),
    recipe(
        "redis-sentinel",
        "Redis master, replica and 3 sentinels",
        &[REDIS],
        redis_sets::sentinel,
    ),
    recipe(
        "redis-cluster",
        "Redis Cluster of 3 masters",
        &[REDIS],
        |f, s| redis_sets::cluster(0, f, s),
    ),
    recipe(
        "redis-cluster-replica",
        "the same, and a replica of the first",
        &[REDIS],
        |f, s| redis_sets::cluster(1, f, s),
    ),
    recipe("valkey", "one Valkey", &[VALKEY], |f, s| {
        redis::one(&VALKEY, f, s)
    }),
    recipe("etcd", "etcd of the distribution", &[ETCD], |f, s| {
        etcd::start(&ETCD, 1, f, s)
    }),
    recipe("etcd3", "the same, 3 members", &[ETCD], |f, s| {
        etcd::start(&ETCD, 3, f, s)
    }),
    recipe("etcd35", "etcd 3.5", &[ETCD35], |f, s| {
        etcd::start(&ETCD35, 1, f, s)
    }),
    recipe("etcd35x3", "etcd 3.5, 3 members", &[ETCD35], |f, s| {
        etcd::start(&ETCD35, 3, f, s)
    }),
    recipe("zookeeper", "one ZooKeeper", &[ZOOKEEPER], |f, s| {
        zookeeper::start(1, f, s)
    }),
    recipe(
        "zookeeper3",
        "ZooKeeper, 3 servers",
        &[ZOOKEEPER],
        |f, s| zookeeper::start(3, f, s),
    ),
    recipe("consul", "one Consul server", &[CONSUL], |f, s| {
        consul::start(1, f, s)
    }),
    recipe("consul3", "Consul, 3 servers", &[CONSUL], |f, s| {
        consul::start(3, f, s)
    }),
    recipe("postgres", "one PostgreSQL", &[POSTGRES], postgres::one),
    recipe(
        "postgres-pair",
        "PostgreSQL and a standby",
        &[POSTGRES],
        postgres::pair,
    ),
    recipe(
        "pgbouncer",
        "pgbouncer in transaction mode before a PostgreSQL",
        &[POSTGRES, PGBOUNCER],
        postgres::pooled,
    ),
];

const fn recipe(
    name: &'static str,
    about: &'static str,
    parts: &'static [Part],
    start: fn(&Path, &[&str]) -> Result<Parts, String>,
) -> Recipe {
    Recipe {
        name,
        about,
        parts,
        start,
    }
}

/// The engine of that name.
///
/// # Errors
/// `Failed` if there is none.
pub fn recipe_of(name: &str) -> Result<&'static Recipe, Error> {
    let found = ENGINES.iter().find(|recipe| recipe.name == name);
    found.ok_or_else(|| {
        let known: Vec<&str> = ENGINES.iter().map(|recipe| recipe.name).collect();
        let known = known.join(", ");
        Error::Failed(format!("no engine is called {name:?}; known are {known}"))
    })
}

impl Recipe {
    /// Installs what is missing, without starting anything.
    ///
    /// # Errors
    /// `Missing` if it is not available.
    pub fn fetch(&self) -> Result<(), Error> {
        let get = |part: &Part| part.get().map(drop).map_err(Error::Missing);
        self.parts.iter().try_for_each(get)
    }

    /// Where its programs are, without installing anything; the error names a missing one.
    ///
    /// # Errors
    /// A message about the first missing program.
    pub fn installed(&self) -> Result<String, String> {
        let found: Result<Vec<String>, String> = self.parts.iter().map(Part::found).collect();
        found.map(|parts| parts.join(", "))
    }
}
