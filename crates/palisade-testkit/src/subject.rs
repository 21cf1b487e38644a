//! `Subject`: an engine under test, and the one table of those that palisade ships.
//!
//! A subject is a name and a way to get a URL. Its site (a temporary directory, a server) lives
//! as long as the run and is the same for all trials of one process; trials keep apart by their
//! own random namespace.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use palisade::Client;
use palisade::core::engine::BoxFuture;

use crate::hurt::Servers;
use crate::launch;
use crate::proxy::Protocol;
use crate::sites;

/// How a subject's URL becomes a client.
pub type Connect = fn(String) -> BoxFuture<palisade::Result<Client>>;

/// Through `palisade::connect`.
pub const CONNECT: Connect = |url| Box::pin(async move { palisade::connect(&url).await });

/// An engine under test.
#[derive(Clone, Copy)]
pub struct Subject {
    /// What trials are called after: `file::enter/…`.
    pub name: &'static str,
    /// Starts or finds it; the error says what is missing on this machine.
    pub start: fn() -> Result<Site, String>,
    /// Makes a client of the site's URL.
    pub connect: Connect,
    /// Whether it needs something installed, and so must be asked for by name.
    pub installed: bool,
}

impl Subject {
    /// An engine behind a server, which is started for the run.
    pub const fn served(name: &'static str, start: fn() -> Result<Site, String>) -> Self {
        Self {
            installed: true,
            ..Self::new(name, start)
        }
    }

    /// An engine that `palisade::connect` knows and that needs nothing installed.
    pub const fn new(name: &'static str, start: fn() -> Result<Site, String>) -> Self {
        Self {
            name,
            start,
            connect: CONNECT,
            installed: false,
        }
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Where a subject is, for one run.
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
    /// How to cut it off, if that is possible.
    pub outage: Option<Arc<dyn Outage>>,
    /// How to hurt its server, if it has one.
    pub hurt: Option<Arc<dyn Hurt>>,
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
            outage: None,
            hurt: None,
            keep: None,
        }
    }
}

impl fmt::Debug for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.url.split(':').next().unwrap_or("?"))
    }
}

/// Cuts an engine off from its clients.
pub trait Outage: Send + Sync {
    /// No request is answered from here on.
    fn begin(&self);
    /// Requests are answered again.
    fn end(&self);
}

/// What can be done to an engine's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Harm {
    /// It is stopped (SIGSTOP), and goes on later.
    Stop,
    /// It is killed, and started again with its data.
    Kill,
    /// Connections are reset, and new ones refused.
    Cut,
    /// Packets vanish: nothing is answered, nothing refused.
    Blackhole,
}

/// Hurts an engine's server and heals it.
pub trait Hurt: Send + Sync {
    /// Whether it can do this.
    fn can(&self, harm: Harm) -> bool;
    /// Begins. Blocks until it is so.
    ///
    /// # Errors
    /// A sentence when it could not be done.
    fn begin(&self, harm: Harm) -> Result<(), String>;
    /// Ends it. Blocks until the engine answers again.
    ///
    /// # Errors
    /// A sentence when it could not be done.
    fn end(&self, harm: Harm) -> Result<(), String>;
}

/// The engines that palisade ships.
pub const SUBJECTS: &[Subject] = &[
    Subject::new("memory", memory),
    Subject::new("file", file),
    Subject::served("etcd", || served("etcd", &[]).map(twice_a_second)),
    Subject::served("etcd3", || served("etcd3", &[]).map(twice_a_second)),
    // Behind fault proxies, to be cut off from its clients.
    Subject::served("etcd3-proxied", || {
        proxied("etcd3", Protocol::Grpc).map(twice_a_second)
    }),
    Subject::served("etcd35", || served("etcd35", &[]).map(twice_a_second)),
    Subject::served("etcd35x3", || served("etcd35x3", &[]).map(twice_a_second)),
    Subject::served("consul", || served("consul", &[]).map(twice)),
    Subject::served("consul3", || served("consul3", &[]).map(twice)),
    // Behind a fault proxy, to be cut off from its clients.
    Subject::served("consul-proxied", || {
        proxied("consul", Protocol::Http1).map(twice)
    }),
    Subject::served("redis", || proxied("redis", Protocol::Resp)),
    Subject::served("valkey", || served("valkey", &[])),
    Subject::served("postgres", sites::table),
    Subject::served("postgres+advisory", sites::advisory),
    Subject::served("postgres-pooled", sites::pooled),
];

fn memory() -> Result<Site, String> {
    Ok(Site::new("memory:"))
}

fn file() -> Result<Site, String> {
    let dir = tempfile::Builder::new()
        .prefix("palisade-file-")
        .tempdir()
        .map_err(|error| format!("no temporary directory: {error}"))?;
    Ok(Site {
        processes: true,
        // The kernel tells of a death at once; the rest is scheduling on a busy machine.
        notices_death: Some(Duration::from_millis(50)),
        url: format!("file:{}", dir.path().display()),
        ..Site::new("")
    }
    .keeping(dir))
}

/// Starts what the launcher calls `name`, with further settings.
fn served(name: &str, settings: &[&str]) -> Result<Site, String> {
    let running = launch::start_with(name, settings).map_err(|error| error.to_string())?;
    Ok(Site::of(Servers::new(running)))
}

/// Consul keeps a session for up to twice its ttl.
fn twice(site: Site) -> Site {
    Site { lasts: 2, ..site }
}

/// etcd looks for leases that are over twice a second.
fn twice_a_second(site: Site) -> Site {
    Site {
        late: Duration::from_millis(500),
        ..site
    }
}

/// The same behind fault proxies.
fn proxied(name: &str, protocol: Protocol) -> Result<Site, String> {
    let running = launch::start(name).map_err(|error| error.to_string())?;
    Ok(Site::of(Servers::proxied(running, protocol)?))
}

impl Site {
    /// A site of servers, which live as long as it.
    fn of(servers: Servers) -> Self {
        Self {
            processes: true,
            url: servers.url(),
            hurt: Some(Arc::new(servers)),
            ..Self::new("")
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
}

/// The subjects that `PALISADE_TEST_ENGINES` names (a comma list), by default all that need
/// nothing installed.
///
/// # Errors
/// A sentence when a name is not in the table.
pub fn chosen(table: &[Subject], names: Option<&str>) -> Result<Vec<Subject>, String> {
    let Some(names) = names else {
        return Ok(table.iter().filter(|s| !s.installed).copied().collect());
    };
    names
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty())
        .map(|name| {
            table
                .iter()
                .find(|subject| subject.name == name)
                .copied()
                .ok_or_else(|| {
                    let known = table.iter().map(|s| s.name).collect::<Vec<_>>().join(", ");
                    format!(
                        "PALISADE_TEST_ENGINES: no engine is called {name:?}; known are {known}"
                    )
                })
        })
        .collect()
}
