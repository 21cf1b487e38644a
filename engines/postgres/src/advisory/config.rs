//! The options of advisory locks, what they can do, and how a URL becomes an engine.

use std::sync::Arc;
use std::time::Duration;

use super::super::config::CAPABILITY as TABLE;
use super::super::connect::Server;
use super::super::pooler::{Between, no_session_locks};
use super::super::schema::Schema;
use super::AdvisoryEngine;
use super::keys::Keys;
use super::registry::Registry;
use palisade_core::engine::{
    EndsWith, EngineFactory, EngineInfo, Permits, Settings, SharedEngine, TtlRange, Url,
    config_error,
};
use palisade_core::{Capability, Result};

/// The engine's own options.
pub(in super::super) const OPTIONS: &[&str] = &[
    "key",
    "max_connections",
    "password_file",
    "pooler",
    "schema",
    "tls",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "user",
];

/// The most connections for claims: a good part of a server's default limit (100), but not all of
/// it.
const MAX_CONNECTIONS: usize = 50;

pub(super) const CAPABILITY: Capability = {
    let mut can = TABLE;
    can.permits = Permits::None;
    can.resize = false;
    can.fair = false;
    can.waiters_visible = false;
    can.detached = false;
    can.ends_with = EndsWith::Process;
    can.ttl = TtlRange {
        min: Duration::from_millis(500),
        // The kernel ends the session of a client that is gone within 15 s, and not before 12 s; a
        // longer ttl would outlive it.
        max: Duration::from_secs(12),
        step: Duration::from_millis(1),
    };
    can.reentrant_session = true;
    can.queue = false;
    can
};

/// What `connect` knows of it.
pub const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "postgres+advisory",
        schemes: &["postgres+advisory", "postgresql+advisory"],
        needs: "a PostgreSQL server, 14 or newer, with no pooler in between",
        example: "postgres+advisory://user@localhost/database",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(async move { open(url, &settings) }),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| Box::pin(super::super::baseline::sessions(url, settings))),
};

/// What a URL says of the locks.
pub(super) struct Config {
    pub(super) server: Server,
    pub(super) schema: Schema,
    pub(super) keys: Keys,
    /// The user declared that no pooler shares sessions.
    pub(super) trusted: bool,
    pub(super) max_connections: usize,
}

/// Opens the engine; nothing is sent before the first verb.
///
/// # Errors
/// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for a URL or option that can't be used.
pub fn open(mut url: Url, settings: &Settings) -> Result<SharedEngine> {
    let schema = Schema::take(&mut url)?;
    let keys = Keys::new(url.take("key").as_deref(), &settings.namespace)?;
    let between = Between::take(&mut url)?;
    if between == Some(Between::Pooler) {
        return Err(no_session_locks("connect"));
    }
    let max_connections = match url.take("max_connections").map(|text| text.parse()) {
        None => MAX_CONNECTIONS,
        Some(Ok(count @ 1..=10_000)) => count,
        Some(_) => {
            let message = "option max_connections must be a whole number, 1 to 10000";
            return Err(config_error(message));
        }
    };
    let config = Config {
        server: Server::take(&mut url, settings)?,
        schema,
        keys,
        trusted: between == Some(Between::Nothing),
        max_connections,
    };
    url.finish(OPTIONS)?;
    let shown = config.server.shown(&url.scheme);
    let registry = Registry::new(config, settings);
    Ok(Arc::new(AdvisoryEngine { registry, shown }))
}
