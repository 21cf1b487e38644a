//! `Keeper`: the only code that renews, for every engine, and that leaves in the background.
//!
//! Each client has one keeper thread, separate from the caller's runtime, so that a blocked or
//! ended runtime neither loses a lease nor delays a release. Holds and waiting claims register
//! here. The thread ([`task`]) renews their leases in batches, notifies their validities of losses,
//! and leaves places that were dropped. Its state is the [`ledger`]. The keeper only needs
//! [`Leasing`] of its store: messages of queues have a keeper of their own. Deadlines do not depend
//! on the thread alone: the [`timer`] of the process sees to them, too.
//!
//! Registering and forgetting take one short mutex, and wake the thread only if something is due
//! before its next check.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::sync::Notify;

use self::ledger::{Departure, Ledger, Lost};
use self::timer::{Timed, timer};
use super::claim::ClaimId;
use super::clock::BootTime;
use super::dyn_engine::{DynEngine, SharedEngine};
use super::engine::Engine;
use super::error::{Error, ErrorKind, Result};
use super::events::{Event, Observers};
use super::leasing::Leasing;
use super::sync::{Mutex, Runtime, spawn};
use super::ticket::{Lease, LeaseStart, Ticket};
use super::validity::{Loss, LossReason, Validity};

mod ledger;
mod task;
mod timer;

/// Needed to construct a lease for renewal, so that no other code can renew.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RenewalPermit(());

#[doc(hidden)]
impl Lease {
    /// A lease that an engine's test renews itself.
    pub fn in_a_test(ticket: &Ticket) -> Self {
        let own = ticket.has_own_lease().then(|| ticket.clone());
        Self::new(ticket.lease, own, RenewalPermit(()))
    }
}

/// The handle that clients and holds share. When the last one is dropped, the thread completes the
/// pending leaves and ends.
pub(crate) struct Keeper<S: Leasing + ?Sized = dyn DynEngine>(Arc<Shared<S>>);

struct Shared<S: Leasing + ?Sized> {
    store: Arc<S>,
    observers: Arc<Observers>,
    /// How long one request may take.
    timeout: Duration,
    state: Mutex<State>,
    /// Wakes the thread.
    wake: Notify,
    /// Notified whenever no leave is pending.
    drained: Notify,
    /// Shared by all keepers of one connection: the last one closes it.
    users: Mutex<Option<Arc<()>>>,
}

struct State {
    ledger: Ledger,
    running: bool,
    closing: bool,
}

impl Keeper {
    pub(crate) fn new(engine: SharedEngine, timeout: Duration) -> Self {
        let observers = Arc::new(Observers::new(&DynEngine::describe(&*engine)));
        Self::sharing(engine, timeout, observers, Arc::default())
    }

    /// A keeper for a layered form of this one's engine. Existing claims stay with this keeper.
    pub(crate) fn layered<E: Engine>(&self, layer: impl FnOnce(SharedEngine) -> E) -> Self {
        self.beside(Arc::new(layer(Arc::clone(&self.0.store))))
    }

    pub(crate) fn engine(&self) -> &SharedEngine {
        &self.0.store
    }
}

impl<S: Leasing + ?Sized> Keeper<S> {
    /// A keeper for another store on the same connection, with the same observers.
    pub(crate) fn beside<T: Leasing + ?Sized>(&self, store: Arc<T>) -> Keeper<T> {
        // Only a keeper that has ended has given up its share.
        let users = self.0.users.lock().clone().unwrap_or_default();
        Keeper::sharing(store, self.0.timeout, Arc::clone(&self.0.observers), users)
    }

    fn sharing(
        store: Arc<S>,
        timeout: Duration,
        observers: Arc<Observers>,
        users: Arc<()>,
    ) -> Self {
        Self(Arc::new(Shared {
            observers,
            store,
            timeout,
            users: Mutex::new(Some(users)),
            state: Mutex::new(State {
                ledger: Ledger::new(timeout),
                running: false,
                closing: false,
            }),
            wake: Notify::new(),
            drained: Notify::new(),
        }))
    }

    pub(crate) fn store(&self) -> &Arc<S> {
        &self.0.store
    }

    pub(crate) fn observers(&self) -> &Observers {
        &self.0.observers
    }

    /// Starts the thread unless it is running. No claim may enter before.
    pub(crate) fn start(&self) -> Result<()> {
        let mut state = self.0.state.lock();
        if state.running {
            return Ok(());
        }
        let failed = |error: std::io::Error| {
            let message =
                "the keeper's thread can't be started; are limits on threads or memory reached?";
            Error::new(ErrorKind::Denied, "keeper", message).because(error)
        };
        let runtime = Runtime::new().map_err(failed)?;
        let shared = Arc::clone(&self.0);
        // Subscribe before anything can enter: an alarm in between would be lost, and an eviction
        // would be noticed only by the next renewal.
        let alarms = runtime.enter(|| shared.store.alarms());
        let keeping = async move {
            let ended = Ended(Arc::clone(&shared));
            task::keep(shared, alarms).await;
            drop(ended);
        };
        runtime.spawn("palisade-keeper", keeping).map_err(failed)?;
        state.running = true;
        timer().add(timed(&self.0));
        Ok(())
    }

    /// Records that a claim's enter is in flight.
    pub(crate) fn entering(&self, claim: ClaimId) {
        self.0.state.lock().ledger.entering(claim);
    }

    /// Records that the engine assigned another id to a claim whose enter is in flight.
    pub(crate) fn known_as(&self, asked: ClaimId, known: ClaimId) {
        self.0.state.lock().ledger.known_as(asked, known);
    }

    /// Registers a claim that has a place, and returns its validity.
    pub(crate) fn watch_over(&self, ticket: &Ticket, armed: LeaseStart) -> Arc<Validity> {
        let mut state = self.0.state.lock();
        let now = BootTime::now();
        if !state.running {
            // The thread has ended since the claim began, so nobody would renew it or report its
            // loss.
            state.ledger.forget(ticket);
            let validity = Validity::new(ticket.name.clone(), armed, now);
            validity.lose(LossReason::Expired, Some(thread_ended()));
            return Arc::new(validity);
        }
        let (validity, too_late) = state.ledger.watch_over(ticket, armed, now);
        drop(state);
        if too_late {
            self.0.wake.notify_one();
        }
        timer().mind(validity.deadline());
        validity
    }

    /// Records the sequence of a grant, so that renewals carry the incarnation. `renewed` is
    /// `false` for a hold that is not to be renewed.
    pub(crate) fn granted(&self, ticket: &Ticket, renewed: bool) {
        self.0.state.lock().ledger.granted(ticket, renewed);
    }

    /// Records a lease that its owner extended. Returns whether it was still valid.
    pub(crate) fn extended(&self, ticket: &Ticket, armed: LeaseStart) -> bool {
        let extended = self.0.state.lock().ledger.extended(ticket, armed);
        self.0.wake.notify_one();
        extended
    }

    /// Stops renewing for a claim, before its place is left. A shared lease stays alive.
    pub(crate) fn forget(&self, ticket: &Ticket) {
        self.0.state.lock().ledger.forget(ticket);
    }

    /// Stops renewing for a claim whose leave begins now; it stays known until it is forgotten.
    pub(crate) fn part_with(&self, ticket: &Ticket) {
        self.0.state.lock().ledger.part_with(ticket);
    }

    /// Leaves in the background, not before `not_before`; until then the claim is still renewed.
    /// Never blocks, never spawns, needs no runtime.
    pub(crate) fn leave_later(&self, ticket: Ticket, not_before: BootTime, ttl: Duration) {
        let mut state = self.0.state.lock();
        let now = BootTime::now();
        // Without the thread nobody would leave it; it ends with its ttl.
        if !state.running {
            state.ledger.forget(&ticket);
            return;
        }
        let give_up = now.max(not_before) + ttl;
        let departure = Departure {
            ticket,
            not_before,
            give_up,
        };
        state.ledger.leave_later(departure, now);
        drop(state);
        self.0.wake.notify_one();
    }

    /// Ends a claim whose loss was noticed before the thread did, and reports the loss.
    pub(crate) fn lose(&self, validity: &Arc<Validity>, reason: LossReason) {
        let mut lost = Lost::default();
        lost.lose(validity, reason, None);
        self.0.tell(lost);
    }

    /// Ends a claim whose deadline has passed, and reports the loss, if nobody has done so yet.
    pub(crate) fn notice(&self, validity: &Arc<Validity>) {
        if validity.is_valid() || validity.loss().is_some() {
            return;
        }
        let mut lost = Lost::default();
        // The ledger knows what was behind it. The caller must not wait for a thread that holds it.
        if let Some(mut state) = self.0.state.try_lock() {
            state.ledger.expire(BootTime::now(), &mut lost);
        }
        lost.lose(validity, LossReason::Expired, None);
        self.0.tell(lost);
    }

    /// Resolves when a claim is lost; never otherwise. Every poll looks at the clock.
    pub(crate) async fn lost(&self, validity: &Arc<Validity>) -> Loss {
        let mut told = pin!(validity.told());
        poll_fn(|context| {
            loop {
                self.notice(validity);
                if let Some(loss) = validity.loss() {
                    return Poll::Ready(loss.clone());
                }
                ready!(told.as_mut().poll(context));
                // Subscribe again before the next look.
                told.set(validity.told());
            }
        })
        .await
    }

    /// Runs `work` to its end, or drops it unfinished when the claim is lost. Returns `None` on a
    /// loss, even if that was noticed only at the end.
    pub(crate) async fn run<T>(
        &self,
        validity: &Arc<Validity>,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let done = tokio::select! {
            biased;
            _ = self.lost(validity) => None,
            done = work => Some(done),
        };
        done.filter(|_| validity.is_valid())
    }

    /// Waits until no leave is pending.
    pub(crate) async fn drain(&self) {
        loop {
            let drained = self.0.drained.notified();
            {
                let state = self.0.state.lock();
                if !state.running || state.ledger.is_drained() {
                    return;
                }
            }
            drained.await;
        }
    }

    /// Ends the thread and waits for it, so that the engine's own cleanup on drop is complete when
    /// this returns.
    pub(crate) async fn end(self) {
        self.0.state.lock().closing = true;
        self.0.wake.notify_one();
        loop {
            let ended = self.0.drained.notified();
            if !self.0.state.lock().running {
                break;
            }
            ended.await;
        }
        // The thread has reported its end, and drops its `Arc` next.
        while Arc::strong_count(&self.0) > 1 {
            tokio::task::yield_now().await;
        }
    }
}

impl<S: Leasing + ?Sized> Drop for Keeper<S> {
    fn drop(&mut self) {
        self.0.state.lock().closing = true;
        self.0.wake.notify_one();
    }
}

impl<S: Leasing + ?Sized> Shared<S> {
    /// Reports losses to those who wait for them, and to the observers if it was a hold. No lock
    /// may be held, since a callback may drop holds.
    fn tell(&self, lost: Lost) {
        lost.tell();
        self.report(&lost);
    }

    fn report(&self, lost: &Lost) {
        for validity in &lost.0 {
            if let Some(loss) = validity.loss()
                && validity.is_granted()
            {
                self.observers.tell(|engine| Event::Lost {
                    engine,
                    name: validity.name(),
                    reason: loss.reason,
                    why: loss.why(),
                });
            }
        }
    }
}

impl<S: Leasing + ?Sized> Timed for Shared<S> {
    fn expire(self: Arc<Self>) -> BootTime {
        let mut lost = Lost::default();
        let mut state = self.state.lock();
        state.ledger.expire(BootTime::now(), &mut lost);
        let next = state.ledger.next_deadline();
        drop(state);
        lost.tell();
        let held = |validity: &Arc<Validity>| validity.is_granted();
        if lost.0.iter().any(held) && self.observers.any() {
            // An observer may be slow. This also keeps the keeper from ending before it is told.
            let (shared, lost) = (Arc::clone(&self), Arc::new(lost));
            let reported = Arc::clone(&lost);
            if spawn("palisade-losses", move || shared.report(&reported)).is_err() {
                self.report(&lost);
            }
        }
        if let Some(last) = Arc::into_inner(self) {
            // The keeper has ended meanwhile. Dropping an engine may take time.
            let _ = spawn("palisade-end", move || drop(last));
        }
        next
    }
}

fn timed<S: Leasing + ?Sized>(shared: &Arc<Shared<S>>) -> Weak<dyn Timed> {
    let shared: Weak<Shared<S>> = Arc::downgrade(shared);
    shared
}

/// Reports all holds as lost when the thread ends for any reason, including a panic in an engine:
/// nobody renews them any more.
struct Ended<S: Leasing + ?Sized>(Arc<Shared<S>>);

impl<S: Leasing + ?Sized> Drop for Ended<S> {
    fn drop(&mut self) {
        let mut lost = Lost::default();
        let mut state = self.0.state.lock();
        state.running = false;
        state.ledger.end(&thread_ended(), &mut lost);
        drop(state);
        timer().remove(&timed(&self.0));
        self.0.tell(lost);
        self.0.drained.notify_waiters();
    }
}

fn thread_ended() -> Error {
    let message = "the renewal thread has ended, with its client or because of a bug";
    Error::new(ErrorKind::Internal, "renew", message)
}
