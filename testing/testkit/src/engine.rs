//! `EngineUnderTest`: a name, and how to get a URL and a client.
//!
//! Its site (a temporary directory, a server) lives as long as the run and is shared by all trials
//! of one process; each trial has its own random namespace.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use palisade::Client;
use palisade::engine::BoxFuture;

/// Creates a client from a URL.
pub type Connect = fn(String) -> BoxFuture<palisade::Result<Client>>;

/// Connects through `palisade::connect`.
pub const CONNECT: Connect = |url| Box::pin(async move { palisade::connect(&url).await });

/// An engine under test.
#[derive(Clone, Copy)]
pub struct EngineUnderTest {
    /// The prefix of its trials: `file::enter/…`.
    pub name: &'static str,
    /// Starts or finds it; the error says what is missing on this machine.
    pub start: fn() -> Result<Site, String>,
    /// Creates a client from the site's URL.
    pub connect: Connect,
    /// Whether it needs installed programs, and so must be selected by name.
    pub installed: bool,
}

impl EngineUnderTest {
    /// An engine that `palisade::connect` knows and that needs nothing installed.
    pub const fn new(name: &'static str, start: fn() -> Result<Site, String>) -> Self {
        Self {
            name,
            start,
            connect: CONNECT,
            installed: false,
        }
    }

    /// The same engine with its own way to connect.
    #[must_use]
    pub const fn connecting(self, connect: Connect) -> Self {
        Self { connect, ..self }
    }
}

impl fmt::Debug for EngineUnderTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The location and properties of an engine for one run.
#[derive(Clone)]
pub struct Site {
    /// Its URL, without `namespace`.
    pub url: String,
    /// Whether other processes reach it through the same URL.
    pub processes: bool,
    /// How soon the death of a holder is noticed; `None` if its lease must end first.
    pub notices_death: Option<Duration>,
    /// How many times its ttl a lease may last without renewal.
    pub lasts: u32,
    /// How late the engine notices the end of a lease.
    pub late: Duration,
    /// Whether a claim that does not queue waits for an overdue holder's lease to end before it
    /// answers busy.
    pub watches_overdue: bool,
    /// Whether a leader that was stopped may take away leases that are alive when it continues.
    pub takes_away: bool,
    /// Whether a gateway promises how long a lease lasts: at most a ttl, and less while the gateway
    /// has not renewed its own.
    pub promised: bool,
    /// How to cut off this site, which no other trial may share.
    pub cut_off: Option<Arc<dyn CutOff>>,
    /// How to cause outages of its server, if it has one.
    pub outages: Option<Arc<dyn Outages>>,
    /// A value that must live as long as the site.
    pub keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl Site {
    /// A site that other processes can't reach and that can't be cut off.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            processes: false,
            notices_death: None,
            lasts: 1,
            late: Duration::ZERO,
            watches_overdue: false,
            takes_away: false,
            promised: false,
            cut_off: None,
            outages: None,
            keep: None,
        }
    }

    /// Keeps `thing` alive as long as the site.
    #[must_use]
    pub fn keeping(self, thing: impl Any + Send + Sync) -> Self {
        Self {
            keep: Some(Arc::new(thing)),
            ..self
        }
    }

    /// Its URL with a random namespace, so that trials and runs share an engine.
    pub fn fresh_url(&self) -> String {
        let namespace = format!("t{:016x}", rand::random::<u64>());
        with_option(&self.url, "namespace", &namespace)
    }
}

impl fmt::Debug for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.url.split(':').next().unwrap_or("?"))
    }
}

/// A URL with an added option.
pub(crate) fn with_option(url: &str, option: &str, value: &str) -> String {
    let joint = if url.contains('?') { '&' } else { '?' };
    format!("{url}{joint}{option}={value}")
}

/// Cuts an engine off from its clients.
pub trait CutOff: Send + Sync {
    /// Stops answering requests.
    fn begin(&self);
    /// Answers requests again.
    fn end(&self);
}

/// The outages of an engine's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outage {
    /// It is stopped (SIGSTOP), and continued later.
    Stop,
    /// It is killed, and started again with its data.
    Kill,
    /// Connections are reset, and new ones refused.
    Cut,
    /// Packets vanish: nothing is answered, nothing refused.
    Blackhole,
}

/// Begins and ends outages of an engine's server.
pub trait Outages: Send + Sync {
    /// Whether it can do this.
    fn can(&self, outage: Outage) -> bool;
    /// Begins the outage. Blocks until it is in effect.
    ///
    /// # Errors
    /// A message if that failed.
    fn begin(&self, outage: Outage) -> Result<(), String>;
    /// Ends the outage. Blocks until the engine answers again.
    ///
    /// # Errors
    /// A message if that failed.
    fn end(&self, outage: Outage) -> Result<(), String>;
}

/// The engines of `table` that `PALISADE_TEST_ENGINES` names (a comma-separated list), by default
/// all that need no installed programs.
///
/// # Errors
/// A message if a name is not in the table.
pub fn chosen(
    table: &[EngineUnderTest],
    names: Option<&str>,
) -> Result<Vec<EngineUnderTest>, String> {
    let Some(names) = names else {
        return Ok(table.iter().filter(|e| !e.installed).copied().collect());
    };
    let unknown = |name: &str| {
        let known: Vec<_> = table.iter().map(|engine| engine.name).collect();
        let known = known.join(", ");
        format!("PALISADE_TEST_ENGINES: no engine is called {name:?}; known are {known}")
    };
    let names = names.split(',').map(str::trim);
    names
        .filter(|name| !name.is_empty())
        .map(|name| named(table, name).ok_or_else(|| unknown(name)))
        .collect()
}

/// The engine of that name.
pub fn named(table: &[EngineUnderTest], name: &str) -> Option<EngineUnderTest> {
    table.iter().find(|engine| engine.name == name).copied()
}
