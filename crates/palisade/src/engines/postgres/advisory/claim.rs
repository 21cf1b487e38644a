//! `LocalClaim`: a claim of this client, where it stands, and the session that it has to itself.
//!
//! Of the claims of one client that wait for the same lock only the first has a session, on which
//! the server lets it wait; the others wait here for their turn.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::keys::Key;
use super::session::Session;
use super::statements::{Statement, Verb};
use crate::core::claim::{Ask, Claim};
use crate::core::clock::BootTime;
use crate::core::engine::Place;
use crate::core::sync;

/// A claim that waits or holds.
pub(super) struct LocalClaim {
    pub(super) claim: Arc<Claim>,
    /// What its name is locked by.
    pub(super) key: Key,
    /// Its session, and its part of `max_connections`; from its turn on if it waits.
    session: OnceLock<(Arc<Session>, OwnedSemaphorePermit)>,
    place: watch::Sender<Place>,
    pub(super) state: Mutex<State>,
}

/// What changes while a claim is here.
pub(super) struct State {
    pub(super) ask: Ask,
    pub(super) value: Option<String>,
    pub(super) evicted: bool,
    /// When it took its place, or got what it waited for.
    pub(super) since: BootTime,
    /// When it is known not to have had the lock yet: whatever is granted is granted later.
    pub(super) waited: BootTime,
    /// Until when a claim that waits is wanted.
    wanted: BootTime,
}

impl LocalClaim {
    /// `sent` is before the lock was asked for.
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
        // A second one would be dropped, and be none.
        let _ = self.session.set((session, permit));
    }

    /// Its session, which every claim has that holds.
    pub(super) fn session(&self) -> Option<&Arc<Session>> {
        self.session.get().map(|(session, _)| session)
    }

    /// Where it stands; a connection that ended has taken the lock with it.
    pub(super) fn place(&self) -> Place {
        if self.session().is_some_and(|session| session.is_over()) {
            return Place::Gone;
        }
        *self.place.borrow()
    }

    /// Returns when it stands where `fits`.
    pub(super) async fn until(&self, fits: impl Fn(Place) -> bool) {
        let mut place = self.place.subscribe();
        // The sender lives in here.
        let _ = place.wait_for(|place| fits(*place)).await;
    }

    pub(super) fn sequence(&self) -> u64 {
        match *self.place.borrow() {
            Place::Held { sequence } => sequence,
            _ => 0,
        }
    }

    /// Says what became of it.
    pub(super) fn moved(&self, place: Place) {
        self.state.lock().since = BootTime::now();
        self.place.send_replace(place);
    }

    /// Keeps a claim that waits wanted for another ttl.
    pub(super) fn want(&self) {
        self.state.lock().wanted = BootTime::now() + self.claim.ttl;
    }

    /// Returns when nobody has renewed it for a ttl.
    pub(super) async fn outlived(&self) {
        loop {
            let until = self.state.lock().wanted;
            if until.has_passed() {
                return;
            }
            sync::sleep_until(until).await;
        }
    }

    /// A statement about its lock.
    pub(super) fn statement(&self, verb: Verb) -> Statement {
        statement(verb, self.state.lock().ask)
    }
}

/// A statement about the lock that `ask` is for.
pub(super) fn statement(verb: Verb, ask: Ask) -> Statement {
    Statement {
        shared: matches!(ask, Ask::Part { .. }),
        ..verb.into()
    }
}
