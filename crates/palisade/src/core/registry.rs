//! `EngineInfo`: what is known of an engine before it is connected to. `EngineFactory`: that, and
//! how to open the engine.
//!
//! Each engine has one `FACTORY`, and `connect` has the list of them. The command's advice, its
//! list of schemes and the docs are made from the registry, so that they always say what the
//! engines do.

use std::sync::Arc;

#[cfg(feature = "baseline")]
use super::baseline::Baseline;
use super::capability::Capability;
use super::dyn_engine::DynEngine;
use super::engine::BoxFuture;
use super::error::Result;
use super::url::{Settings, Url};

/// The static description of an engine.
#[derive(Debug, Clone, Copy)]
pub struct EngineInfo {
    /// What people call it: `redis`.
    pub name: &'static str,
    /// The schemes of its URLs.
    pub schemes: &'static [&'static str],
    /// What must be there to use it, in a few words: `a Redis or Valkey server, 6.2 or newer`.
    pub needs: &'static str,
    /// A URL to start from.
    pub example: &'static str,
    /// What it can do with no options set.
    pub capability: Capability,
    /// The options of its own, beside the common ones.
    pub options: &'static [&'static str],
}

/// An engine's description, and how to open it.
#[derive(Clone, Copy)]
pub struct EngineFactory {
    /// The description.
    pub info: EngineInfo,
    /// Connects.
    pub open: Opener<dyn DynEngine>,
    /// Connects for the raw operations that `bench` compares with.
    #[cfg(feature = "baseline")]
    pub baseline: Option<Opener<dyn Baseline>>,
}

impl std::fmt::Debug for EngineFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("EngineFactory")
            .field(&self.info.name)
            .finish()
    }
}

/// From a URL without its common options, and those, to what is behind it.
pub type Opener<T> = fn(Url, Settings) -> BoxFuture<Result<Arc<T>>>;
