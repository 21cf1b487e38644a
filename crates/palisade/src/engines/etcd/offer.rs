//! What `connect` knows of this engine before it is opened.

use std::time::Duration;

use super::LONGEST_TTL;
use crate::core::capability::{Capability, Class, Permits, Tokens, TtlRange};
use crate::core::error::{Error, Kind, Result};
use crate::core::registry::{EngineFactory, EngineInfo};
use crate::core::url::Url;
use crate::engines::remote;

/// The options beside the common ones.
pub(super) const OPTIONS: &[&str] = remote::OPTIONS;

pub(super) const CAPABILITY: Capability = Capability {
    class: Class::A,
    shared: true,
    permits: Permits::Weighted,
    resize: true,
    fair: true,
    waiters_visible: true,
    tokens: Tokens::Durable,
    early_loss: true,
    detached: true,
    // At the usual election timeout of 1 s etcd grants nothing shorter than 2 s, and whole
    // seconds only.
    ttl: TtlRange {
        min: Duration::from_secs(2),
        max: LONGEST_TTL,
        step: Duration::from_secs(1),
    },
    reentrant_session: false,
};

/// What `connect` knows of it.
pub(crate) const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "etcd",
        schemes: &["etcd", "etcds"],
        needs: "an etcd cluster, 3.4 or newer",
        example: "etcd://localhost:2379",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(async move { super::open(url, &settings).await }),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, settings| {
        Box::pin(async move { super::baseline::open(url, &settings).await })
    }),
};

/// etcd has no databases to choose from; a path would be a mistake that goes unnoticed.
pub(super) fn refuse_path(url: &Url) -> Result<()> {
    match url.path.trim_matches('/').is_empty() {
        true => Ok(()),
        false => Err(Error::new(
            Kind::Config,
            "connect",
            format!(
                "{}: takes no path; choose where keys are kept with namespace=",
                url.scheme
            ),
        )),
    }
}
