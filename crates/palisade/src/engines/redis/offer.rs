//! What `connect` knows of this engine before it is opened.

use std::time::Duration;

use crate::core::capability::{Capability, Class, Permits, Tokens, TtlRange};
use crate::core::card::{Card, Offer};

/// The engine's own options.
pub(super) const OPTIONS: &[&str] = &[
    "password_file",
    "replicas",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "user",
];

pub(super) const CAPABILITY: Capability = Capability {
    class: Class::C,
    shared: true,
    permits: Permits::Weighted,
    resize: false,
    fair: true,
    waiters_visible: true,
    tokens: Tokens::Floored,
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
pub(crate) const OFFER: Offer = Offer {
    card: Card {
        name: "redis",
        schemes: &["redis", "rediss"],
        needs: "a Redis server, 6.2 or newer, or Valkey",
        example: "redis://localhost",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(super::open(url, settings)),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| Box::pin(super::baseline::open(url, settings))),
};
