//! What `connect` knows of advisory locks before they are opened, and their options.

use std::time::Duration;

use crate::core::capability::{Capability, Class, Permits, Tokens, TtlRange};
use crate::core::registry::{EngineFactory, EngineInfo};

/// The engine's own options.
pub(super) const OPTIONS: &[&str] = &[
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

/// How many connections claims have at most: a good part of what a server gives by default (100),
/// and not all of it.
pub(super) const MAX_CONNECTIONS: usize = 50;

pub(super) const CAPABILITY: Capability = Capability {
    class: Class::B,
    shared: true,
    permits: Permits::None,
    resize: false,
    fair: false,
    waiters_visible: false,
    tokens: Tokens::Durable,
    early_loss: true,
    detached: false,
    ttl: TtlRange {
        min: Duration::from_millis(500),
        // A session whose client is gone is ended within 15 s by the kernel, and not before 12 s:
        // a longer ttl would outlive it.
        max: Duration::from_secs(12),
        step: Duration::from_millis(1),
    },
    reentrant_session: true,
};

/// What `connect` knows of it.
pub(crate) const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "postgres+advisory",
        schemes: &["postgres+advisory", "postgresql+advisory"],
        needs: "a PostgreSQL server, 14 or newer, with no pooler in between",
        example: "postgres+advisory://user@localhost/database",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(async move { super::open(url, &settings) }),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| Box::pin(super::baseline::open(url, settings))),
};
