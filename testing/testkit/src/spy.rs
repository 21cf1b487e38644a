//! `Spy`: an engine around an engine that records calls and, on request, loses them.
//!
//! With it a case simulates network faults on an engine that has none: replies that are lost,
//! renewals that go unanswered, requests that arrive after their future was dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use palisade::engine::{
    Amended, Amendment, Audited, Claim, Entered, Layer, Lease, LeaseId, Left, Place, Renewal,
    SharedEngine, Ticket,
};
use palisade::report::{LineReport, Scope};
use palisade::{BootTime, Capability, Error, ErrorKind, Eviction, Name, Result};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, watch};

/// The recorded calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// `enter`
    Enter,
    /// `wait`
    Wait,
    /// `renew`, once for each lease
    Renew,
    /// `amend`
    Amend,
    /// `leave`
    Leave,
    /// `audit`
    Audit,
    /// `survey`
    Survey,
    /// `evict`
    Evict,
    /// `resize`
    Resize,
}

/// A recorded call.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Which verb.
    pub verb: Verb,
    /// The lease or claim that it concerned.
    pub about: Option<u128>,
    /// When it began.
    pub at: BootTime,
}

/// What happens to calls of `enter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enters {
    /// They are answered.
    Answered,
    /// The next one is applied, but its reply is lost: the engine seems unreachable.
    ReplyLost,
    /// The next one is applied, and answered only after this long.
    ReplyDelayed(Duration),
    /// They are applied, and never answered.
    Hang,
    /// They are applied only after [`Spy::deliver`], even if nobody waits for them any more.
    Late,
}

/// An engine that is observed and disturbed. See the module documentation.
pub struct Spy {
    inner: SharedEngine,
    capability: Capability,
    calls: Mutex<Vec<Call>>,
    enters: Mutex<Enters>,
    renewals_lost: AtomicU32,
    late: Arc<Semaphore>,
    applied: watch::Sender<u32>,
    changed: Notify,
    cut: watch::Sender<bool>,
}

impl Spy {
    /// Observes `inner` without disturbing it.
    pub fn new(inner: SharedEngine) -> Self {
        let capability = inner.capability();
        Self::with_capability(inner, capability)
    }

    /// Observes `inner` but reports another capability.
    pub fn with_capability(inner: SharedEngine, capability: Capability) -> Self {
        Self {
            inner,
            capability,
            calls: Mutex::default(),
            enters: Mutex::new(Enters::Answered),
            renewals_lost: AtomicU32::new(0),
            late: Arc::new(Semaphore::new(0)),
            applied: watch::channel(0).0,
            changed: Notify::new(),
            cut: watch::channel(false).0,
        }
    }

    /// Shares its outages with every spy that has the same switch.
    #[must_use]
    pub fn with_switch(self, cut: watch::Sender<bool>) -> Self {
        Self { cut, ..self }
    }

    /// Cuts the engine off, or makes it reachable again.
    pub fn set_cut(&self, cut: bool) {
        self.cut.send_replace(cut);
    }

    fn is_cut(&self) -> bool {
        *self.cut.borrow()
    }

    /// Records a call, and fails at once while the engine is cut off.
    fn ask(&self, verb: Verb, about: Option<u128>) -> Result<()> {
        self.saw(verb, about);
        if self.is_cut() {
            return Err(unreachable());
        }
        Ok(())
    }

    fn has_applied(&self) {
        self.applied.send_modify(|count| *count += 1);
    }

    /// Sets what happens to calls of `enter` from now on.
    pub fn set_enters(&self, enters: Enters) {
        *self.enters.lock() = enters;
    }

    /// Leaves the next `count` calls of `renew` unanswered, for all of their leases.
    pub fn lose_renewals(&self, count: u32) {
        self.renewals_lost.store(count, Ordering::SeqCst);
    }

    /// Lets one late `enter` arrive.
    pub fn deliver(&self) {
        self.late.add_permits(1);
    }

    /// Waits until `count` enters were applied.
    pub async fn applied(&self, count: u32) {
        let mut applied = self.applied.subscribe();
        // The sender lives as long as `self`.
        let _ = applied.wait_for(|seen| *seen >= count).await;
    }

    /// Waits until `count` calls of `verb` were made.
    pub async fn called(&self, verb: Verb, count: usize) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.calls(verb).len() >= count {
                return;
            }
            changed.await;
        }
    }

    /// The calls of `verb`, in order.
    pub fn calls(&self, verb: Verb) -> Vec<Call> {
        let calls = self.calls.lock();
        calls.iter().filter(|c| c.verb == verb).copied().collect()
    }

    /// The number of all calls.
    pub fn total(&self) -> usize {
        self.calls.lock().len()
    }

    fn saw(&self, verb: Verb, about: Option<u128>) {
        self.calls.lock().push(Call {
            verb,
            about,
            at: BootTime::now(),
        });
        self.changed.notify_waiters();
    }
}

fn unreachable() -> Error {
    Error::new(ErrorKind::Unreachable, "request", "the engine is cut off")
}

fn lost(operation: &'static str) -> Error {
    Error::new(ErrorKind::Unreachable, operation, "the answer was lost").maybe_applied()
}

impl Layer for Spy {
    fn inner(&self) -> &SharedEngine {
        &self.inner
    }

    fn capability(&self) -> Capability {
        self.capability
    }

    async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        let once = |enters: Enters| matches!(enters, Enters::ReplyLost | Enters::ReplyDelayed(_));
        let enters = *self.enters.lock();
        if once(enters) {
            self.set_enters(Enters::Answered);
        }
        self.ask(Verb::Enter, Some(claim.id.0))?;
        if enters == Enters::Late {
            let (gate, inner) = (Arc::clone(&self.late), Arc::clone(&self.inner));
            let applied = self.applied.clone();
            // A request in flight is applied whether or not anyone still waits for its answer.
            let arrival = tokio::spawn(async move {
                if let Ok(permit) = gate.acquire().await {
                    permit.forget();
                }
                let entered = inner.enter(claim).await;
                applied.send_modify(|count| *count += 1);
                entered
            });
            return arrival.await.unwrap_or_else(|_| Err(lost("enter")));
        }
        let entered = self.inner.enter(claim).await;
        self.has_applied();
        match enters {
            Enters::Answered | Enters::Late => {}
            Enters::ReplyLost => return entered.and_then(|_| Err(lost("enter"))),
            Enters::ReplyDelayed(delay) => tokio::time::sleep(delay).await,
            Enters::Hang => std::future::pending().await,
        }
        entered
    }

    async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        self.saw(Verb::Wait, Some(ticket.claim.0));
        let mut cut = self.cut.subscribe();
        tokio::select! {
            biased;
            _ = cut.wait_for(|cut| *cut) => Err(unreachable()),
            place = self.inner.wait(ticket, until) => place,
        }
    }

    async fn renew(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        for lease in &leases {
            self.saw(Verb::Renew, Some(lease.id.0));
        }
        let one_less = |left: u32| match left {
            u32::MAX => Some(left),
            _ => left.checked_sub(1),
        };
        let is_lost = self
            .renewals_lost
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less)
            .is_ok();
        if is_lost || self.is_cut() {
            let unknown = |_| Renewal::Unknown(lost("renew"));
            return leases.into_iter().map(unknown).collect();
        }
        self.inner.renew(leases, within).await
    }

    async fn amend(&self, ticket: Ticket, amendment: Amendment) -> Result<Amended> {
        self.ask(Verb::Amend, Some(ticket.claim.0))?;
        self.inner.amend(ticket, amendment).await
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        self.ask(Verb::Leave, Some(ticket.claim.0))?;
        self.inner.leave(ticket).await
    }

    async fn audit(&self, lease: LeaseId) -> Result<Vec<Audited>> {
        self.ask(Verb::Audit, Some(lease.0))?;
        self.inner.audit(lease).await
    }

    async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        self.ask(Verb::Survey, None)?;
        self.inner.survey(scope).await
    }

    async fn evict(&self, name: Name, id: String, eviction: Eviction) -> Result<bool> {
        self.ask(Verb::Evict, None)?;
        self.inner.evict(name, id, eviction).await
    }

    async fn resize(&self, name: Name, capacity: u32) -> Result<bool> {
        self.ask(Verb::Resize, None)?;
        self.inner.resize(name, capacity).await
    }
}
