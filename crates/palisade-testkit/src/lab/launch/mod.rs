//! Real engines for tests: found or installed, started on loopback, hurt, and cleaned away.
//!
//! [`need`] is what a test calls. [`table`](mod@table) lists the engines by name, `find` and
//! `install` get their programs, [`node`] is one server with the cruel verbs, [`running`] a whole
//! engine, `folder` what is left behind by none of them: servers and their folder go away however
//! the process that started them ends.

pub mod apiserver;
mod engines;
pub(crate) mod find;
mod folder;
pub mod gateway;
mod install;
pub mod node;
mod ports;
pub mod proc;
pub mod running;
pub mod table;
pub mod up;
pub mod wire;

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub(in crate::lab) use folder::Folder;
pub use node::Node;
pub use running::Running;

/// Fails a test instead of skipping it when an engine can't be had; so does `CI`.
pub const REQUIRE: &str = "PALISADE_TEST_REQUIRE";

/// Names a file to which every skipped test adds a line of JSON.
pub const SKIPPED: &str = "PALISADE_TEST_SKIPPED";

/// Why there is no engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Its programs can't be had on this machine.
    Missing(String),
    /// It is there, and does not do what it should.
    Failed(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(why) | Self::Failed(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Error {}

/// Starts the engine called `name` in [`table`](mod@table), installing what is missing.
///
/// # Errors
/// `Missing` when its programs can't be had, `Failed` when it does not start; that one ends with
/// the tails of its logs.
pub fn start(name: &str) -> Result<Running, Error> {
    start_with(name, &[])
}

/// Starts an engine with further settings in its own form: arguments for its servers, for
/// ZooKeeper lines of its configuration.
///
/// # Errors
/// As [`start`].
pub fn start_with(name: &str, settings: &[&str]) -> Result<Running, Error> {
    let recipe = table::recipe_of(name)?;
    recipe.fetch()?;
    Running::start(recipe, settings).map_err(Error::Failed)
}

/// The engine for a test; `None` when it can't be had here, with the reason printed and added to
/// the file that [`SKIPPED`] names.
///
/// # Panics
/// When it does not start, and when it can't be had although [`REQUIRE`] or `CI` is set.
pub fn need(name: &str) -> Option<Running> {
    match start(name) {
        Ok(running) => Some(running),
        Err(Error::Failed(why)) => panic!("{name} does not start: {why}"),
        Err(Error::Missing(why)) => {
            assert!(!required(), "{name} is required, but: {why}");
            skip(name, &why);
            None
        }
    }
}

/// A tool of an engine for a test, for interoperation; `None` when it can't be had here, as with
/// [`need`].
///
/// # Panics
/// When it can't be had although [`REQUIRE`] or `CI` is set, or is not known.
pub fn need_tool(name: &str) -> Option<PathBuf> {
    let got = match name {
        "chromedriver" => find::CHROMEDRIVER.get(),
        "chromium" => find::CHROMIUM.get(),
        "curator" => find::CURATOR.get(),
        "etcd" => find::ETCD.get(),
        "etcdctl" => find::ETCDCTL.get(),
        "iptables" => find::IPTABLES.get(),
        "prometheus" => find::PROMETHEUS.get(),
        _ => panic!("no tool is called {name:?}"),
    };
    match got {
        Ok(path) => Some(path),
        Err(why) => {
            assert!(!required(), "{name} is required, but: {why}");
            skip(name, &why);
            None
        }
    }
}

/// A port for a server of the test's own: nobody listens on it, and no outgoing connection gets it.
///
/// # Panics
/// When there is none.
pub fn free_port() -> u16 {
    ports::free().unwrap_or_else(|why| panic!("{why}"))
}

/// Whether an engine that can't be had fails a test.
fn required() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0");
    set("CI") || set(REQUIRE)
}

/// Says that a test is skipped, and why.
pub fn skip(engine: &str, why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("?");
    eprintln!("skipped: {test} needs {engine}: {why}");
    let Some(path) = std::env::var_os(SKIPPED).filter(|path| !path.is_empty()) else {
        return;
    };
    let row = serde_json::json!({ "test": test, "engine": engine, "why": why });
    // One write to a file opened for appending: rows of several processes do not mix.
    let file = OpenOptions::new().create(true).append(true).open(&path);
    if let Err(error) = file.and_then(|mut file| file.write_all(format!("{row}\n").as_bytes())) {
        eprintln!("{}: {error}", path.display());
    }
}

/// Looks until `look` succeeds or `limit` has passed; the last refusal is the error.
///
/// # Errors
/// What `look` said last.
pub fn until<T>(limit: Duration, mut look: impl FnMut() -> Result<T, String>) -> Result<T, String> {
    let end = Instant::now() + limit;
    let mut pause = Duration::from_millis(2);
    loop {
        match look() {
            Ok(found) => return Ok(found),
            Err(why) if Instant::now() >= end => {
                return Err(format!("not within {} s: {why}", limit.as_secs()));
            }
            Err(_) => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}
