//! `LocalClaim`: a claim of this client, its place, and its own session.
//!
//! Of the claims of one client that wait for the same lock, only the first has a session, on which
//! it waits at the server. The others wait here for their turn.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::keys::Key;
use super::session::{Session, Statement, Verb};
use palisade_core::BootTime;
use palisade_core::engine::{Ask, Claim, Place, sync};

/// A claim that waits or holds.
pub(super) struct LocalClaim {
    pub(super) claim: Arc<Claim>,
    /// The key of the advisory lock.
    pub(super) key: Key,
    /// Its session, and its permit out of `max_connections`. A waiting claim has them only once it
    /// is its turn.
    session: OnceLock<(Arc<Session>, OwnedSemaphorePermit)>,
    place: watch::Sender<Place>,
    pub(super) state: Mutex<State>,
}

/// The mutable state of a claim.
pub(super) struct State {
    pub(super) ask: Ask,
    pub(super) value: Option<String>,
    pub(super) evicted: bool,
    /// When it took its place, or was granted.
    pub(super) since: BootTime,
    /// A time at which it did not have the lock yet, so any grant is later.
    pub(super) waited: BootTime,
    /// A waiting claim is abandoned after this time unless it is renewed.
    wanted: BootTime,
}

impl LocalClaim {
    /// `sent` is a time before the lock was requested.
    pub(super) fn new(claim: Arc<Claim>, key: Key, place: Place, sent: BootTime) -> Arc<Self> {
        let now = BootTime::now();
        Arc::new(Self {
            key,
            session: OnceLock::new(),
            place: watch::Sender::new(place),
            state: Mutex::new(State {
                ask: claim.ask,
                value: claim.value.clone(),
                evicted: false,
                since: now,
                waited: sent,
                wanted: now + claim.ttl,
            }),
            claim,
        })
    }

    /// Gives it a session, once.
    pub(super) fn settle(&self, session: Arc<Session>, permit: OwnedSemaphorePermit) {
        // A second session would be dropped.
        let _ = self.session.set((session, permit));
    }

    /// Its session; every holder has one.
    pub(super) fn session(&self) -> Option<&Arc<Session>> {
        self.session.get().map(|(session, _)| session)
    }

    /// Its place. The lock is lost when the connection has ended.
    pub(super) fn place(&self) -> Place {
        if self.session().is_some_and(|session| session.is_over()) {
            return Place::Gone;
        }
        *self.place.borrow()
    }

    /// Waits until its place satisfies `fits`.
    pub(super) async fn until(&self, fits: impl Fn(Place) -> bool) {
        let mut place = self.place.subscribe();
        // Never fails, because `self` owns the sender.
        let _ = place.wait_for(|place| fits(*place)).await;
    }

    pub(super) fn sequence(&self) -> u64 {
        match *self.place.borrow() {
            Place::Held { sequence } => sequence,
            _ => 0,
        }
    }

    /// Changes its place.
    pub(super) fn moved(&self, place: Place) {
        self.state.lock().since = BootTime::now();
        self.place.send_replace(place);
    }

    /// Renews a waiting claim for another ttl.
    pub(super) fn want(&self) {
        self.state.lock().wanted = BootTime::now() + self.claim.ttl;
    }

    /// Waits until nobody has renewed it for a ttl.
    pub(super) async fn outlived(&self) {
        loop {
            let until = self.state.lock().wanted;
            if until.has_passed() {
                return;
            }
            sync::sleep_until(until).await;
        }
    }

    pub(super) fn statement(&self, verb: Verb) -> Statement {
        statement(verb, self.state.lock().ask)
    }
}

/// A statement for the lock that `ask` needs, shared or exclusive.
pub(super) fn statement(verb: Verb, ask: Ask) -> Statement {
    Statement {
        shared: matches!(ask, Ask::Part { .. }),
        ..verb.into()
    }
}
