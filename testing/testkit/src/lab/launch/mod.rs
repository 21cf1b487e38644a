//! Real engines for tests: found or installed, started on loopback, disturbed, and removed.
//!
//! Tests call [`need`]. [`table`](mod@table) lists the engines by name, `find` and `install`
//! provide their programs, [`node`] is one server that can be stopped and killed, [`running`] a
//! whole engine. `folder` ensures that servers and their data are removed however the process that
//! started them ends.

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

/// Makes a test fail instead of being skipped if an engine is not available; so does `CI`.
pub const REQUIRE: &str = "PALISADE_TEST_REQUIRE";

/// Names a file to which every skipped test appends a line of JSON.
pub const SKIPPED: &str = "PALISADE_TEST_SKIPPED";

/// Why an engine is not available.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Its programs are not available on this machine.
    Missing(String),
    /// It is installed but does not work.
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

/// Starts the engine called `name` in [`table`](mod@table), and installs what is missing.
///
/// # Errors
/// `Missing` if its programs are not available; `Failed`, with the tails of its logs, if it does
/// not start.
pub fn start(name: &str) -> Result<Running, Error> {
    start_with(name, &[])
}

/// Starts an engine with further settings in its own form: arguments for its servers, or lines of
/// the configuration for ZooKeeper.
///
/// # Errors
/// As [`start`].
pub fn start_with(name: &str, settings: &[&str]) -> Result<Running, Error> {
    let recipe = table::recipe_of(name)?;
    recipe.fetch()?;
    Running::start(recipe, settings).map_err(Error::Failed)
}

/// The engine for a test; `None` if it is not available here. The reason is printed and appended to
/// the file that [`SKIPPED`] names.
///
/// # Panics
/// If it does not start, or if it is not available although [`REQUIRE`] or `CI` is set.
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

/// An engine's tool for an interoperability test; `None` if it is not available, as with [`need`].
///
/// # Panics
/// If it is not available although [`REQUIRE`] or `CI` is set, or if the name is unknown.
pub fn need_tool(name: &str) -> Option<PathBuf> {
    let got = match name {
        "chromedriver" => find::CHROMEDRIVER.get(),
        "chromium" => find::CHROMIUM.get(),
        "curator" => find::CURATOR.get(),
        "etcd" => find::ETCD.get(),
        "etcdctl" => find::ETCDCTL.get(),
        "iptables" => find::IPTABLES.get(),
        "prometheus" => find::PROMETHEUS.get(),
        "psycopg" => find::PSYCOPG.get(),
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

/// A port for a test's own server: nobody listens on it, and no outgoing connection uses it.
///
/// # Panics
/// If there is none.
pub fn free_port() -> u16 {
    ports::free().unwrap_or_else(|why| panic!("{why}"))
}

/// Whether an unavailable engine fails a test.
fn required() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0");
    set("CI") || set(REQUIRE)
}

/// Reports that a test is skipped, and why.
pub fn skip(engine: &str, why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("?");
    eprintln!("skipped: {test} needs {engine}: {why}");
    let Some(path) = std::env::var_os(SKIPPED).filter(|path| !path.is_empty()) else {
        return;
    };
    let row = serde_json::json!({ "test": test, "engine": engine, "why": why });
    // One write to a file opened for appending, so that rows of several processes don't mix.
    let file = OpenOptions::new().create(true).append(true).open(&path);
    if let Err(error) = file.and_then(|mut file| file.write_all(format!("{row}\n").as_bytes())) {
        eprintln!("{}: {error}", path.display());
    }
}

/// Calls `look` until it succeeds or `limit` has passed; returns the last error.
///
/// # Errors
/// The last error of `look`.
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
