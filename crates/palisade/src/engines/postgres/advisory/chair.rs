//! `Chair`: a claim of this client and the connection that it has to itself.
//!
//! Of the claims of one client that wait for the same lock only the first has a connection, on
//! which the server lets it wait; the others wait here for their turn.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::key::Key;
use super::own::Own;
use super::statement::Verb;
use crate::core::claim::{Ask, Claim};
use crate::core::clock::BootTime;
use crate::core::engine::Place;
use crate::core::sync;

/// A claim that waits or holds.
pub(super) struct Chair {
    pub(super) claim: Arc<Claim>,
    /// What its name is locked by.
    pub(super) key: Key,
    /// Its connection, and its part of `max_connections`; from its turn on if it waits.
    session: OnceLock<(Arc<Own>, OwnedSemaphorePermit)>,
    pub(super) place: watch::Sender<Place>,
    pub(super) ask: Mutex<Ask>,
    pub(super) value: Mutex<Option<String>>,
    evicted: AtomicBool,
    /// When it took its place, or got what it waited for.
    since: Mutex<BootTime>,
    /// When it is known not to have had the lock yet.
    waited: Mutex<BootTime>,
    /// Until when a claim that waits is wanted.
    wanted: Mutex<BootTime>,
}

impl Chair {
    /// `sent` is before the lock was asked for.
    pub(super) fn new(claim: Arc<Claim>, key: Key, place: Place, sent: BootTime) -> Arc<Self> {
        Arc::new(Self {
            key,
            session: OnceLock::new(),
            place: watch::Sender::new(place),
            ask: Mutex::new(claim.ask),
            value: Mutex::new(claim.value.clone()),
            evicted: AtomicBool::new(false),
            since: Mutex::new(BootTime::now()),
            waited: Mutex::new(sent),
            wanted: Mutex::new(BootTime::now() + claim.ttl),
            claim,
        })
    }

    /// Gives it a connection, once.
    pub(super) fn settle(&self, own: Arc<Own>, permit: OwnedSemaphorePermit) {
        // A second one would be dropped, and be none.
        let _ = self.session.set((own, permit));
    }

    /// Its connection, which every claim has that holds.
    pub(super) fn own(&self) -> Option<&Arc<Own>> {
        self.session.get().map(|(own, _)| own)
    }

    /// The process that serves it.
    pub(super) fn pid(&self) -> Option<i32> {
        self.own().map(|own| own.pid)
    }

    /// Where it stands; a connection that ended has taken the lock with it.
    pub(super) fn stands(&self) -> Place {
        match self.own().is_some_and(|own| own.client.is_closed()) {
            true => Place::Gone,
            false => *self.place.borrow(),
        }
    }

    /// Returns when it is over.
    pub(super) async fn gone(&self) {
        let mut place = self.place.subscribe();
        // The sender lives in here.
        let _ = place.wait_for(|place| *place == Place::Gone).await;
    }

    pub(super) fn sequence(&self) -> u64 {
        match *self.place.borrow() {
            Place::Held { sequence } => sequence,
            _ => 0,
        }
    }

    /// Says what became of it.
    pub(super) fn moved(&self, place: Place) {
        *self.since.lock() = BootTime::now();
        self.place.send_replace(place);
    }

    pub(super) fn since(&self) -> BootTime {
        *self.since.lock()
    }

    /// Says that it still waited at `when`: whatever is granted is granted later.
    pub(super) fn waited(&self, when: BootTime) {
        *self.waited.lock() = when;
    }

    /// When it is known not to have had the lock yet.
    pub(super) fn known_to_wait(&self) -> BootTime {
        *self.waited.lock()
    }

    /// Keeps a claim that waits wanted for another ttl.
    pub(super) fn want(&self) {
        *self.wanted.lock() = BootTime::now() + self.claim.ttl;
    }

    /// Returns when nobody has renewed it for a ttl.
    pub(super) async fn outlived(&self) {
        loop {
            let until = *self.wanted.lock();
            if until.has_passed() {
                return;
            }
            sync::sleep_until(until).await;
        }
    }

    pub(super) fn mark(&self) {
        self.evicted.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_marked(&self) -> bool {
        self.evicted.load(Ordering::Relaxed)
    }

    pub(super) fn unlock(&self) -> Verb {
        match *self.ask.lock() {
            Ask::Whole => Verb::Unlock,
            Ask::Part { .. } => Verb::UnlockShared,
        }
    }
}

/// How to take what `ask` is for: at once, or waiting.
pub(super) fn taking(ask: Ask, wait: bool) -> Verb {
    match (ask, wait) {
        (Ask::Whole, false) => Verb::Try,
        (Ask::Whole, true) => Verb::Block,
        (Ask::Part { .. }, false) => Verb::TryShared,
        (Ask::Part { .. }, true) => Verb::BlockShared,
    }
}
