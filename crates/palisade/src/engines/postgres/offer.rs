//! What `connect` knows of the lease table before it is opened, and its options.

use std::time::Duration;

use crate::core::capability::{Capability, Class, Permits, Tokens, TtlRange};
use crate::core::registry::{EngineFactory, EngineInfo};

/// The engine's own options.
pub(super) const OPTIONS: &[&str] = &[
    "layout",
    "listen_url",
    "password_file",
    "pooler",
    "schema",
    "tls",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "user",
];

pub(super) const CAPABILITY: Capability = Capability {
    class: Class::B,
    shared: true,
    permits: Permits::Weighted,
    resize: true,
    fair: true,
    waiters_visible: true,
    tokens: Tokens::Durable,
    early_loss: true,
    detached: true,
    ttl: TtlRange {
        min: Duration::from_millis(100),
        max: Duration::from_secs(24 * 60 * 60),
        step: Duration::from_millis(1),
    },
    reentrant_session: false,
};

/// What `connect` knows of it.
pub(crate) const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "postgres",
        schemes: &["postgres", "postgresql"],
        needs: "a PostgreSQL database, 12 or newer; a transaction pooler may stand in between",
        example: "postgres://user@localhost/database",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(async move { super::open(url, &settings) }),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| Box::pin(super::baseline::open(url, settings))),
};
