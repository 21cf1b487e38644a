//! `EngineUnderTest`: a name, and a way to get a URL and a client.
//!
//! Its site (a temporary directory, a server) lives as long as the run and is the same for all
//! trials of one process; trials keep apart by their own random namespace.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use palisade::Client;
use palisade::engine::BoxFuture;

/// How a URL becomes a client.
pub type Connect = fn(String) -> BoxFuture<palisade::Result<Client>>;

/// Through `palisade::connect`.
pub const CONNECT: Connect = |url| Box::pin(async move { palisade::connect(&url).await });

/// An engine under test.
#[derive(Clone, Copy)]
pub struct EngineUnderTest {
    /// What trials are called after: `file::enter/…`.
    pub name: &'static str,
    /// Starts or finds it; the error says what is missing on this machine.
    pub start: fn() -> Result<Site, String>,
    /// Makes a client of the site's URL.
    pub connect: Connect,
    /// Whether it needs something installed, and so must be asked for by name.
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

    /// The same with a way to connect of its own.
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

/// Where an engine is, for one run.
#[derive(Clone)]
pub struct Site {
    /// Its URL, without `namespace`.
    pub url: String,
    /// Whether other processes reach it through the same URL.
    pub processes: bool,
    /// How soon the death of a holder is noticed; `None` when its ttl must end first.
    pub notices_death: Option<Duration>,
    /// How many times its ttl a lease can last without renewal.
    pub lasts: u32,
    /// How late a lease is found to be over.
    pub late: Duration,
    /// Whether a claim that does not wait watches a holder that should be gone, for its lease,
    /// before it says busy.
    pub watches_overdue: bool,
    /// Whether a gateway promises how long a lease lasts: a ttl at the most, and less while it
    /// has not renewed its own.
    pub promised: bool,
    /// How to cut off this site, which no other trial uses.
    pub cut_off: Option<Arc<dyn CutOff>>,
    /// What can be done to its server, if it has one.
    pub outages: Option<Arc<dyn Outages>>,
    /// What must live as long as the site.
    pub keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl Site {
    /// A site that other processes don't reach and that nothing cuts off.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            processes: false,
            notices_death: None,
            lasts: 1,
            late: Duration::ZERO,
            watches_overdue: false,
            promised: false,
            cut_off: None,
            outages: None,
            keep: None,
        }
    }

    /// Lets `thing` live as long as the site.
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

/// A URL with another option.
pub(crate) fn with_option(url: &str, option: &str, value: &str) -> String {
    let joint = if url.contains('?') { '&' } else { '?' };
    format!("{url}{joint}{option}={value}")
}

/// Cuts an engine off from its clients.
pub trait CutOff: Send + Sync {
    /// No request is answered from here on.
    fn begin(&self);
    /// Requests are answered again.
    fn end(&self);
}

/// What can happen to an engine's server.
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
    /// Begins. Blocks until it is so.
    ///
    /// # Errors
    /// A sentence when it could not be done.
    fn begin(&self, outage: Outage) -> Result<(), String>;
    /// Ends it. Blocks until the engine answers again.
    ///
    /// # Errors
    /// A sentence when it could not be done.
    fn end(&self, outage: Outage) -> Result<(), String>;
}

/// The engines of `table` that `PALISADE_TEST_ENGINES` names (a comma list), by default all that
/// need nothing installed.
///
/// # Errors
/// A sentence when a name is not in the table.
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
