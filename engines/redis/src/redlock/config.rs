//! What a `redlock:` URL says, what the engine can do, and how it is opened.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;

use super::RedlockEngine;
use super::acquire::Waiting;
use super::node::Node;
use crate::config::{Access, database};
use crate::connection::Server;
use crate::keys::Keys;
use palisade_core::engine::{
    EngineFactory, EngineInfo, Permits, Settings, SharedEngine, Tokens, TtlRange, Url,
    config_error, rounded,
};
use palisade_core::{Capability, Guarantee, Result};
use palisade_kit::{Host, typed_config};

/// The engine's own options.
const OPTIONS: &[&str] = &[
    "max_ttl",
    "node_timeout",
    "password_file",
    "restart_guard",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "user",
];

/// With fewer than three, none may fail.
const FEWEST: usize = 3;

/// More would cost every lock as many requests, without making it safer.
const MOST: usize = 64;

/// The longest ttl in use, unless the URL sets another. A restarted server does not vote for this
/// long.
const MAX_TTL: Duration = Duration::from_secs(60);

pub(super) const CAPABILITY: Capability = {
    let mut can = Capability::FULL;
    can.class = Guarantee::Timed;
    can.shared = false;
    can.permits = Permits::Slots;
    can.resize = false;
    can.fair = false;
    can.waiters_visible = false;
    can.tokens = Tokens::Floored;
    can.ttl = TtlRange {
        max: MAX_TTL,
        ..Capability::FULL.ttl
    };
    can
};

/// What `connect` knows of it.
pub const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "redlock",
        schemes: &["redlock", "rediss+redlock"],
        needs: "three or more Redis servers, 6.2 or newer, that know nothing of each other",
        example: "redlock://redis1,redis2,redis3",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(open(url, settings)),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| Box::pin(super::baseline::open(url, settings))),
};

/// What a URL says.
pub(super) struct Options {
    pub(super) servers: Vec<Server>,
    max_ttl: Duration,
    node_timeout: Option<Duration>,
    guarded: bool,
}

typed_config! {
    /// Redis servers that know nothing of each other, as `palisade::connect` takes them.
    Redlock
    /// Three or more servers: `name`, `name:port` or `[address]:port` each.
    hosts of "redlock"
    durations {
        /// The longest ttl in use.
        max_ttl
        /// How long one server is waited for.
        node_timeout
    }
    login { user }
    tls { |url| url.scheme = "rediss+redlock".to_owned() }
}

impl Redlock {
    /// Lets a server vote right after it has restarted, though it may have forgotten a lock.
    pub fn without_restart_guard(mut self) -> Self {
        self.0.set("restart_guard", "off");
        self
    }
}

impl Options {
    pub(super) fn take(mut url: Url, settings: &Settings) -> Result<Self> {
        let encrypted = url.scheme == "rediss+redlock";
        let access = Access::take(&mut url, encrypted, settings.connect_timeout)?;
        let max_ttl = url.take_duration("max_ttl")?.unwrap_or(MAX_TTL);
        let longest = Capability::FULL.ttl;
        if max_ttl < longest.min || max_ttl > longest.max {
            let message = format!(
                "max_ttl must be {} to {}",
                rounded(longest.min),
                rounded(longest.max)
            );
            return Err(config_error(message));
        }
        let node_timeout = url.take_duration("node_timeout")?;
        let guarded = match url.take("restart_guard").as_deref() {
            None | Some("on") => true,
            Some("off") => false,
            Some(_) => return Err(config_error("restart_guard must be on or off")),
        };
        url.finish(OPTIONS)?;
        let hosts = Host::all(&url, 6379)?;
        if hosts.len() < FEWEST || hosts.len() > MOST {
            return Err(config_error(format!(
                "redlock: takes {FEWEST} to {MOST} servers that know nothing of each other, not {}; for one server use redis:",
                hosts.len()
            )));
        }
        if let Some(twice) = (1..hosts.len()).find(|at| hosts[..*at].contains(&hosts[*at])) {
            let message = format!("{} is named twice; each server votes once", hosts[twice]);
            return Err(config_error(message));
        }
        let db = database(&url.path)?;
        Ok(Self {
            servers: hosts.into_iter().map(|host| access.to(host, db)).collect(),
            max_ttl,
            node_timeout,
            guarded,
        })
    }
}

/// Connects.
///
/// # Errors
/// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for what can't be used; [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable) when no majority of the
/// servers answers; [`ErrorKind::Denied`](palisade_core::ErrorKind::Denied) and [`ErrorKind::Unusable`](palisade_core::ErrorKind::Unusable) from one of them.
async fn open(url: Url, settings: Settings) -> Result<SharedEngine> {
    let shown = url.shown();
    let options = Options::take(url, &settings)?;
    let keys = Keys::new(&settings.namespace)?;
    let capability = {
        let mut can = CAPABILITY;
        can.ttl = TtlRange {
            max: options.max_ttl,
            ..CAPABILITY.ttl
        };
        can
    };
    let channel = format!("{:032x}", rand::random::<u128>());
    let count = options.servers.len();
    let waiting = Arc::new(Waiting::new(count));
    let run_ids = Arc::new(Mutex::new(vec![None; count]));
    let guard = options.guarded.then_some(options.max_ttl);
    let nodes = options.servers.into_iter().enumerate().map(|(at, server)| {
        let waiting = Arc::clone(&waiting);
        let freed = Arc::new(move |key: &str| waiting.freed(key, at));
        let hub = channel.clone();
        Arc::new(Node::new(
            at, server, &settings, &keys, hub, freed, guard, &run_ids,
        ))
    });
    let engine = Arc::new(super::Redlock {
        nodes: nodes.collect(),
        quorum: count / 2 + 1,
        keys,
        waiting,
        left: Default::default(),
        under_way: Default::default(),
        seen: Default::default(),
        channel,
        capability,
        node_timeout: options.node_timeout,
        default_ttl: settings.ttl.unwrap_or_else(|| capability.default_ttl()),
        shown,
    });
    greet(&engine, settings.connect_timeout).await?;
    Ok(Arc::new(RedlockEngine(engine)))
}

/// A server that is up answers long before this; the error of a slower one is reported when it is
/// asked to vote.
const STRAGGLERS: Duration = Duration::from_millis(250);

/// Connects to a majority of the servers, and to others that are not much slower, so that a wrong
/// address or login is reported now.
async fn greet(engine: &Arc<super::Redlock>, connect_timeout: Duration) -> Result<()> {
    let connecting = engine.nodes.iter().map(|node| async move {
        let connected = node.link().await;
        connected.map(drop).map_err(|error| node.blame(&error))
    });
    let mut connecting: FuturesUnordered<_> = connecting.collect();
    // Attempts have their own timeouts; this bounds those that come after a majority.
    let patience = tokio::time::sleep(connect_timeout * 2);
    tokio::pin!(patience);
    let (mut up, mut down) = (0, Vec::new());
    loop {
        tokio::select! {
            biased;
            connected = connecting.next() => match connected {
                None => break,
                Some(Ok(())) => {
                    up += 1;
                    if up == engine.quorum {
                        let soon = tokio::time::Instant::now() + STRAGGLERS;
                        patience.as_mut().reset(soon);
                    }
                }
                // An error that needs a fix by the user is reported even if a majority answers.
                Some(Err(error)) if !error.is_transient() => return Err(error),
                Some(Err(error)) => down.push(error),
            },
            () = &mut patience => break,
        }
    }
    if up >= engine.quorum {
        Ok(())
    } else {
        let unknown = engine.nodes.len() - up - down.len();
        Err(engine.no_majority("connect", unknown, &mut [], &down))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::ErrorKind;

    fn options(text: &str) -> Result<Options> {
        let mut url = Url::parse(text)?;
        let settings = url.take_settings()?;
        Options::take(url, &settings)
    }

    #[test]
    fn options_are_read() {
        let read = options("redlock://a,b:7,c/2?max_ttl=10s&node_timeout=80ms&restart_guard=off");
        let read = read.unwrap();
        assert_eq!(read.servers.len(), 3);
        assert_eq!(read.servers[1].host.to_string(), "b:7");
        assert_eq!(read.servers[2].db, 2);
        assert_eq!(read.max_ttl, Duration::from_secs(10));
        assert_eq!(read.node_timeout, Some(Duration::from_millis(80)));
        assert!(!read.guarded);
    }

    #[test]
    fn bad_options_are_refused_without_repeating_them() {
        for bad in [
            "redlock://a",
            "redlock://a,b",
            "redlock://a,b,a",
            "redlock://a,b,a:6379",
            "redlock://a,b,c?max_ttl=25h",
            "redlock://a,b,c?restart_guard=hunter2",
            "redlock://a,b,c?node_timeout=hunter2",
            "redlock://a,b,c/hunter2",
            "redlock://a,b,c?replicas=1",
        ] {
            let error = options(bad).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
