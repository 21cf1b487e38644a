//! `Counting`: an engine that counts the renewals of the one behind it, and how long they take.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use palisade::core::claim::Claim;
use palisade::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Entered, Eviction, Left, Place,
    Renewal,
};
use palisade::core::ticket::{Lease, LeaseId, Ticket};
use palisade::{BootTime, Capability, Checkup, Engine, LineReport, Name, Result, Scope};

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
    inner: Arc<dyn Engine>,
    counted: Arc<Mutex<Counted>>,
}

impl Counting {
    pub(super) fn new(inner: Arc<dyn Engine>) -> Self {
        let counted = Arc::default();
        Self { inner, counted }
    }

    pub(super) fn counted(&self) -> Arc<Mutex<Counted>> {
        Arc::clone(&self.counted)
    }
}

#[deny(clippy::missing_trait_methods)]
impl Engine for Counting {
    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<Vec<Renewal>> {
        let began = Instant::now();
        let renew = self.inner.renew(leases, within);
        let counted = self.counted();
        Box::pin(async move {
            let renewals = renew.await;
            let held = |renewal: &&Renewal| matches!(renewal, Renewal::Held(_));
            let kept = renewals.iter().filter(held).count();
            let mut counted = counted.lock().unwrap_or_else(PoisonError::into_inner);
            counted.calls.push(began.elapsed().as_nanos() as u64);
            counted.leases += renewals.len() as u64;
            counted.failed += (renewals.len() - kept) as u64;
            renewals
        })
    }

    fn capability(&self) -> Capability {
        self.inner.capability()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        self.inner.enter(claim)
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        self.inner.wait(ticket, until)
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        self.inner.amend(ticket, amendment)
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        self.inner.leave(ticket)
    }

    fn audit(&self, lease: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        self.inner.audit(lease)
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        self.inner.alarms()
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        self.inner.survey(scope)
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        self.inner.watch(scope)
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        self.inner.evict(name, id, eviction)
    }

    fn resize(&self, name: Name, capacity: u32) -> BoxFuture<Result<bool>> {
        self.inner.resize(name, capacity)
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        self.inner.check()
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.inner.key(ticket)
    }

    fn close(&self) -> BoxFuture<()> {
        self.inner.close()
    }
}
