//! `Keeper`: the only code that renews, for every engine, and that leaves in the background.
//!
//! One thread per client, apart from the caller's runtime, so that a blocked or ended runtime
//! neither costs a lease nor keeps a released place. Holds and waiting claims register here;
//! the thread ([`task`]) renews their leases, many with one call, tells their validities when one is
//! over, and leaves what was dropped. What is known of them is the [`ledger`]. All it asks of the
//! other side is [`Leasing`]: the messages of queues are kept in the same way, by a keeper of
//! their own.
//!
//! Registering and forgetting take one short mutex and wake nobody, unless something is due
//! earlier than the thread would look by itself.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use self::ledger::{Departure, Ledger, Lost};
use super::claim::ClaimId;
use super::clock::BootTime;
use super::dyn_engine::{DynEngine, SharedEngine};
use super::engine::Engine;
use super::error::{Error, ErrorKind, Result};
use super::events::{Event, Observers};
use super::leasing::Leasing;
use super::sync::{Mutex, Runtime};
use super::ticket::{Lease, LeaseStart, Ticket};
use super::validity::{LossReason, Validity};

mod ledger;
mod task;

/// What a lease to be renewed is made with, so that no other code can renew.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RenewalPermit(());

#[doc(hidden)]
impl Lease {
    /// A lease that a test of an engine renews by itself.
    pub fn in_a_test(ticket: &Ticket) -> Self {
        let own = ticket.has_own_lease().then(|| ticket.clone());
        Self::new(ticket.lease, own, RenewalPermit(()))
    }
}

/// The handle that clients and holds share. When the last one is dropped the thread leaves what
/// is still to be left, and ends.
pub(crate) struct Keeper<S: Leasing + ?Sized = dyn DynEngine>(Arc<Shared<S>>);

struct Shared<S: Leasing + ?Sized> {
    store: Arc<S>,
    observers: Arc<Observers>,
    /// How long one request may take.
    timeout: Duration,
    state: Mutex<State>,
    /// Wakes the thread.
    wake: Notify,
    /// Told whenever nothing is left to be left.
    drained: Notify,
    /// One share for each keeper of the same connection: the last one closes it.
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

    /// A keeper of what `layer` makes of this one's engine. Claims that are here stay here.
    pub(crate) fn layered<E: Engine>(&self, layer: impl FnOnce(SharedEngine) -> E) -> Self {
        self.beside(Arc::new(layer(Arc::clone(&self.0.store))))
    }

    pub(crate) fn engine(&self) -> &SharedEngine {
        &self.0.store
    }
}

impl<S: Leasing + ?Sized> Keeper<S> {
    /// A keeper of something else on the same connection, with the same observers.
    pub(crate) fn beside<T: Leasing + ?Sized>(&self, store: Arc<T>) -> Keeper<T> {
        // Only a keeper that has ended has given its share away.
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

    /// Starts the thread unless it runs. Nothing may enter before.
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
        // Listening begins before anything can enter: an alarm in between would be lost, and an
        // eviction told only by the next renewal.
        let alarms = runtime.enter(|| shared.store.alarms());
        let keeping = async move {
            let ended = Ended(Arc::clone(&shared));
            task::keep(shared, alarms).await;
            drop(ended);
        };
        runtime.spawn("palisade-keeper", keeping).map_err(failed)?;
        state.running = true;
        Ok(())
    }

    /// Says that a claim's enter is under way.
    pub(crate) fn entering(&self, claim: ClaimId) {
        self.0.state.lock().ledger.entering(claim);
    }

    /// Says that the engine calls a claim whose enter was under way by another id.
    pub(crate) fn known_as(&self, asked: ClaimId, known: ClaimId) {
        self.0.state.lock().ledger.known_as(asked, known);
    }

    /// Takes a claim that has a place under care, and returns its life sign.
    pub(crate) fn watch_over(&self, ticket: &Ticket, armed: LeaseStart) -> Arc<Validity> {
        let mut state = self.0.state.lock();
        let now = BootTime::now();
        if !state.running {
            // The thread has ended since the claim began: nobody would renew it, nobody tell.
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
        validity
    }

    /// Tells the keeper what the engine counted for a grant, so that renewals carry the
    /// incarnation; or that there are to be no more of them.
    pub(crate) fn granted(&self, ticket: &Ticket, renewed: bool) {
        self.0.state.lock().ledger.granted(ticket, renewed);
    }

    /// Takes a lease that its owner has made longer. Says whether it was still in force.
    pub(crate) fn extended(&self, ticket: &Ticket, armed: LeaseStart) -> bool {
        let extended = self.0.state.lock().ledger.extended(ticket, armed);
        self.0.wake.notify_one();
        extended
    }

    /// Stops renewing for a claim, before its place is left. A shared lease goes on living.
    pub(crate) fn forget(&self, ticket: &Ticket) {
        self.0.state.lock().ledger.forget(ticket);
    }

    /// Stops renewing for a claim whose place is being left from now on, until it is forgotten.
    pub(crate) fn part_with(&self, ticket: &Ticket) {
        self.0.state.lock().ledger.part_with(ticket);
    }

    /// Leaves in the background, not before `not_before`; until then it goes on renewing.
    /// Never blocks, never spawns, needs no runtime.
    pub(crate) fn leave_later(&self, ticket: Ticket, not_before: BootTime, ttl: Duration) {
        let mut state = self.0.state.lock();
        let now = BootTime::now();
        // Without the thread there is no one to do it, and the ttl ends it.
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

    /// Ends a claim that was found lost before the thread has told, and tells.
    pub(crate) fn lose(&self, validity: &Arc<Validity>, reason: LossReason) {
        let mut lost = Lost::default();
        lost.lose(validity, reason, None);
        self.0.tell(lost);
    }

    /// Waits until nothing is left to be left.
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

    /// Ends the thread and waits for that, so that whatever the engine cleans up when it is
    /// dropped is done when this returns.
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
        // The thread has said that it is over, and drops its share next.
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
    /// Tells who was lost: those who wait for it, and the observers if it was a hold. No lock may
    /// be held, since whoever is told may drop holds.
    fn tell(&self, lost: Lost) {
        for validity in lost.0 {
            validity.tell();
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

/// Whatever ends the thread, a panic in an engine included, its holds are told at once: nobody
/// renews them any more.
struct Ended<S: Leasing + ?Sized>(Arc<Shared<S>>);

impl<S: Leasing + ?Sized> Drop for Ended<S> {
    fn drop(&mut self) {
        let mut lost = Lost::default();
        let mut state = self.0.state.lock();
        state.running = false;
        state.ledger.end(&thread_ended(), &mut lost);
        drop(state);
        self.0.tell(lost);
        self.0.drained.notify_waiters();
    }
}

fn thread_ended() -> Error {
    let message = "the thread that renews has ended, with its client or by a defect";
    Error::new(ErrorKind::Internal, "renew", message)
}
