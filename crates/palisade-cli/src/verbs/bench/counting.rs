//! `Counting`: an engine that counts the renewals of the one behind it, and how long they take.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use palisade::core::dyn_engine::{Layer, SharedEngine};
use palisade::core::engine::Renewal;
use palisade::core::ticket::Lease;

/// What was renewed.
#[derive(Debug, Default, Clone)]
pub(super) struct Counted {
    /// How long each call took, in nanoseconds.
    pub(super) calls: Vec<u64>,
    /// Leases in all calls.
    pub(super) leases: u64,
    /// Leases that were not held afterwards.
    pub(super) failed: u64,
}

pub(super) struct Counting {
    inner: SharedEngine,
    counted: Arc<Mutex<Counted>>,
}

impl Counting {
    pub(super) fn new(inner: SharedEngine) -> Self {
        let counted = Arc::default();
        Self { inner, counted }
    }

    pub(super) fn counted(&self) -> Arc<Mutex<Counted>> {
        Arc::clone(&self.counted)
    }
}

impl Layer for Counting {
    fn inner(&self) -> &SharedEngine {
        &self.inner
    }

    async fn renew(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        let began = Instant::now();
        let renewals = self.inner.renew(leases, within).await;
        let held = |renewal: &&Renewal| matches!(renewal, Renewal::Held(_));
        let kept = renewals.iter().filter(held).count();
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        counted.calls.push(began.elapsed().as_nanos() as u64);
        counted.leases += renewals.len() as u64;
        counted.failed += (renewals.len() - kept) as u64;
        renewals
    }
}
