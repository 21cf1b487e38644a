//! `Keeper`: the only code that renews, for every engine, and that leaves in the background.
//!
//! One thread per client, apart from the caller's runtime, so that a blocked or ended runtime
//! neither costs a lease nor keeps a released place. Holds and waiting claims register here;
//! the thread ([`keeping`](super::keeping)) renews their leases, many with one call, tells their
//! pulses when one is over, and leaves what was dropped.
//!
//! Registering and forgetting take one short mutex and wake nobody, unless something is due
//! earlier than the thread would look by itself.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use super::claim::ClaimId;
use super::clock::BootTime;
use super::engine::Engine;
use super::error::{Error, Kind, Result};
use super::events::{Event, Observers};
use super::keeping;
use super::pulse::{LossReason, Pulse};
use super::sync::{Mutex, Runtime};
use super::ticket::{Armed, LeaseId, Ticket};

/// The handle that clients and holds share. When the last one is dropped the thread leaves what
/// is still to be left, and ends.
pub(crate) struct Keeper(Arc<Shared>);

pub(super) struct Shared {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) observers: Observers,
    /// How long one request may take.
    pub(super) timeout: Duration,
    pub(super) state: Mutex<State>,
    /// Wakes the thread.
    pub(super) wake: Notify,
    /// Told whenever nothing is left to be left.
    pub(super) drained: Notify,
}

pub(super) struct State {
    pub(super) leases: HashMap<LeaseId, Kept>,
    /// Claims whose enter is under way: an audit must not take them for strangers.
    /// `true` when an alarm came before the answer did.
    pub(super) entering: HashMap<ClaimId, bool>,
    /// Tickets to be left in the background.
    pub(super) leaving: Vec<Departure>,
    /// Claims whose leave is under way, and those that were left since an audit was asked for: a
    /// list may still have them, and they are no strangers.
    pub(super) parting: HashSet<ClaimId>,
    pub(super) parted: HashSet<ClaimId>,
    /// How many audits are under way.
    pub(super) auditing: usize,
    /// How many background leaves are under way.
    pub(super) departing: usize,
    /// When the thread looks next by itself.
    pub(super) looks_at: BootTime,
    /// When it stops looking by itself, having nothing to keep.
    pub(super) dozes_at: Option<BootTime>,
    pub(super) running: bool,
    pub(super) closing: bool,
}

/// A lease under care.
pub(super) struct Kept {
    /// The one ticket of an own lease.
    pub(super) ticket: Option<Ticket>,
    pub(super) armed: Armed,
    pub(super) due: BootTime,
    /// One renewal is in flight per lease, because some engines' answers carry no request id.
    pub(super) renewing: bool,
    /// Whether it is to end by itself: its one claim holds, and asked for no renewal.
    pub(super) ending: bool,
    pub(super) claims: HashMap<ClaimId, Arc<Pulse>>,
}

impl Kept {
    /// When it is to be renewed next.
    pub(super) fn next_renewal(&self) -> BootTime {
        match self.renewing || self.ending {
            true => BootTime::NEVER,
            false => self.due,
        }
    }

    /// Ends every claim on it.
    pub(super) fn lose(&self, reason: LossReason, observers: &Observers) {
        self.claims
            .values()
            .for_each(|pulse| lose(pulse, reason, observers));
    }
}

/// Ends one claim, and tells if it was a hold.
pub(super) fn lose(pulse: &Pulse, reason: LossReason, observers: &Observers) {
    if pulse.lose(reason) && pulse.is_granted() {
        let name = pulse.name();
        observers.tell(|engine| Event::Lost {
            engine,
            name,
            reason,
        });
    }
}

/// A ticket to be left, and how long it is worth trying: after its ttl it is gone anyway.
pub(super) struct Departure {
    pub(super) ticket: Ticket,
    /// Until then it is kept, and renewed.
    pub(super) not_before: BootTime,
    pub(super) give_up: BootTime,
}

/// A third of the ttl: two renewals may fail before the lease is in danger.
pub(super) fn renewal_due(armed: Armed) -> BootTime {
    armed.sent + armed.ttl / 3
}

impl Keeper {
    pub(crate) fn new(engine: Arc<dyn Engine>, timeout: Duration) -> Self {
        Self(Arc::new(Shared {
            observers: Observers::new(&engine.describe()),
            engine,
            timeout,
            state: Mutex::new(State {
                leases: HashMap::new(),
                entering: HashMap::new(),
                leaving: Vec::new(),
                parting: HashSet::new(),
                parted: HashSet::new(),
                auditing: 0,
                departing: 0,
                looks_at: BootTime::NEVER,
                dozes_at: None,
                running: false,
                closing: false,
            }),
            wake: Notify::new(),
            drained: Notify::new(),
        }))
    }

    pub(crate) fn engine(&self) -> &Arc<dyn Engine> {
        &self.0.engine
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
            Error::new(Kind::Denied, "keeper", message).because(error)
        };
        let runtime = Runtime::new().map_err(failed)?;
        let shared = Arc::clone(&self.0);
        // Listening begins before anything can enter: an alarm in between would be lost, and an
        // eviction told only by the next renewal.
        let alarms = runtime.enter(|| shared.engine.alarms());
        let keeping = async move {
            let ended = Ended(Arc::clone(&shared));
            keeping::keep(shared, alarms).await;
            drop(ended);
        };
        runtime.spawn("palisade-keeper", keeping).map_err(failed)?;
        state.running = true;
        Ok(())
    }

    /// Says that a claim's enter is under way.
    pub(crate) fn entering(&self, claim: ClaimId) {
        self.0.state.lock().entering.insert(claim, false);
    }

    /// Takes a claim that has a place under care, and returns its life sign.
    pub(crate) fn watch_over(&self, ticket: &Ticket, armed: Armed) -> Arc<Pulse> {
        let mut state = self.0.state.lock();
        let alarmed = state.entering.remove(&ticket.claim) == Some(true);
        if !state.running {
            // The thread has ended since the claim began: nobody would renew it, nobody tell.
            let pulse = Pulse::new(ticket.name.clone(), armed);
            pulse.lose(LossReason::Expired);
            return Arc::new(pulse);
        }
        let own = ticket.has_own_lease();
        let kept = state.leases.entry(ticket.lease).or_insert_with(|| Kept {
            ticket: own.then(|| ticket.clone()),
            armed,
            due: renewal_due(armed),
            renewing: false,
            ending: false,
            claims: HashMap::new(),
        });
        if armed.sent > kept.armed.sent {
            kept.armed = armed;
        }
        let pulse = Arc::new(Pulse::new(ticket.name.clone(), kept.armed));
        kept.claims.insert(ticket.claim, Arc::clone(&pulse));
        if alarmed {
            kept.due = BootTime::PAST;
        }
        let due = kept.due.min(pulse.deadline());
        if due < state.looks_at {
            self.0.wake.notify_one();
        }
        pulse
    }

    /// Tells the keeper what the engine counted for a grant, so that renewals carry the
    /// incarnation; or that there are to be no more of them.
    pub(crate) fn granted(&self, ticket: &Ticket, renewed: bool) {
        if let Some(kept) = self.0.state.lock().leases.get_mut(&ticket.lease) {
            kept.ticket = kept.ticket.take().map(|_| ticket.clone());
            // A lease that others share is theirs too.
            kept.ending = !renewed && ticket.has_own_lease();
        }
    }

    /// Stops renewing for a claim, before its place is left. A shared lease goes on living.
    pub(crate) fn forget(&self, ticket: &Ticket) {
        self.0.state.lock().forget(ticket);
    }

    /// Stops renewing for a claim whose place is being left from now on, until it is forgotten.
    pub(crate) fn part_with(&self, ticket: &Ticket) {
        let mut state = self.0.state.lock();
        state.forget(ticket);
        state.parting.insert(ticket.claim);
    }

    /// Leaves in the background, not before `not_before`; until then it goes on renewing.
    /// Never blocks, never spawns, needs no runtime.
    pub(crate) fn leave_later(&self, ticket: Ticket, not_before: BootTime, ttl: Duration) {
        let mut state = self.0.state.lock();
        let now = BootTime::now();
        if not_before <= now {
            state.forget(&ticket);
        }
        // Without the thread there is no one to do it, and the ttl ends it.
        if state.running {
            let give_up = now.max(not_before) + ttl;
            state.leaving.push(Departure {
                ticket,
                not_before,
                give_up,
            });
            self.0.wake.notify_one();
        }
    }

    /// Waits until nothing is left to be left.
    pub(crate) async fn drain(&self) {
        loop {
            let drained = self.0.drained.notified();
            {
                let state = self.0.state.lock();
                if !state.running || (state.leaving.is_empty() && state.departing == 0) {
                    return;
                }
            }
            drained.await;
        }
    }
}

impl Keeper {
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

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.state.lock().closing = true;
        self.0.wake.notify_one();
    }
}

/// Whatever ends the thread, a panic in an engine included, its holds are told at once: nobody
/// renews them any more.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.running = false;
        state
            .leases
            .drain()
            .for_each(|(_, kept)| kept.lose(LossReason::Expired, &self.0.observers));
        state.leaving.clear();
        state.departing = 0;
        self.0.drained.notify_waiters();
    }
}
