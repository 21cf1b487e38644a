//! `EngineInfo`: what is known of an engine before connecting. `EngineFactory`: that, and how to
//! open the engine.
//!
//! Each engine has one `FACTORY`, and `connect` lists them all. The command's advice, its list of
//! schemes and the docs are generated from the registry, so that they always match the engines.

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
    /// Its common name: `redis`.
    pub name: &'static str,
    /// The schemes of its URLs.
    pub schemes: &'static [&'static str],
    /// What it requires, in a few words: `a Redis or Valkey server, 6.2 or newer`.
    pub needs: &'static str,
    /// A URL to start from.
    pub example: &'static str,
    /// Its capability when no options are set.
    pub capability: Capability,
    /// Its own options, in addition to the common ones.
    pub options: &'static [&'static str],
}

/// An engine's description, and how to open it.
#[derive(Clone, Copy)]
pub struct EngineFactory {
    /// The description.
    pub info: EngineInfo,
    /// Connects to the engine.
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

/// Opens something from a URL, whose common options were removed and parsed into `Settings`.
pub type Opener<T> = fn(Url, Settings) -> BoxFuture<Result<Arc<T>>>;
