//! What `connect` knows of this engine before it is opened.

use std::time::Duration;

use crate::core::capability::{Capability, Class, Permits, Tokens, TtlRange};
use crate::core::card::{Card, Offer};

/// The engine's own options.
pub(super) const OPTIONS: &[&str] = &["allow_network_fs"];

pub(super) const CAPABILITY: Capability = Capability {
    class: Class::B,
    shared: true,
    permits: Permits::Weighted,
    resize: false,
    fair: true,
    waiters_visible: true,
    tokens: Tokens::Durable,
    early_loss: true,
    detached: false,
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
        name: "file",
        schemes: &["file"],
        needs: "a directory on a local disk; the locks of all processes of one machine",
        example: "file:",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(async move { super::open(url, &settings).await }),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, _| Box::pin(async move { super::baseline::open_baseline(url) })),
};
