//! An active rule, and the guard that its injector keeps.
//!
//! The fault lasts as long as the guard. Ending it wakes whatever waits because of it: held and
//! delayed messages continue at once, and a black hole lets later bytes through.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

use super::Shared;
use super::rule::{Place, Rule, fraction};

#[derive(Default)]
struct Count {
    matched: u64,
    hits: u64,
}

/// An injected rule, as the pumps see it.
pub(super) struct Live {
    pub(super) id: u64,
    pub(super) rule: Rule,
    count: Mutex<Count>,
    hit: Condvar,
    hits: watch::Sender<u64>,
    ended: watch::Sender<bool>,
}

impl Live {
    pub(super) fn new(id: u64, rule: Rule) -> Live {
        Live {
            id,
            rule,
            count: Mutex::default(),
            hit: Condvar::new(),
            hits: watch::Sender::new(0),
            ended: watch::Sender::new(false),
        }
    }

    /// Counts a message that met the conditions, and returns whether it is hit.
    pub(super) fn take(&self, seed: u64, place: &Place) -> bool {
        if self.has_ended() {
            return false;
        }
        let when = &self.rule.when;
        let mut count = self.count.lock();
        count.matched += 1;
        let spared = count.matched <= when.skip
            || when.times.is_some_and(|times| count.hits >= times)
            || when
                .chance
                .is_some_and(|p| fraction(place.draw(seed, self.id, 0)) >= p);
        if spared {
            return false;
        }
        count.hits += 1;
        self.hits.send_replace(count.hits);
        self.hit.notify_all();
        true
    }

    pub(super) fn has_ended(&self) -> bool {
        *self.ended.borrow()
    }

    pub(super) fn end(&self) {
        self.ended.send_replace(true);
    }

    pub(super) async fn ended(&self) {
        // The sender lives in `self`, so waiting can't fail.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }
}

/// Keeps a fault alive; dropping it ends the fault.
#[must_use = "the fault ends when its guard is dropped"]
pub struct Guard {
    pub(super) live: Arc<Live>,
    pub(super) shared: Arc<Shared>,
}

impl Guard {
    /// How many messages the rule has hit.
    pub fn hits(&self) -> u64 {
        self.live.count.lock().hits
    }

    /// Waits for the first hit; returns at once if there was one. Works on any runtime.
    pub async fn fired(&self) {
        self.hit_times(1).await;
    }

    /// Waits until the rule has hit `n` messages.
    pub async fn hit_times(&self, n: u64) {
        // The sender lives in `self.live`, so waiting can't fail.
        let _ = self.live.hits.subscribe().wait_for(|hits| *hits >= n).await;
    }

    /// Waits for the first hit without a runtime; `false` if `limit` has passed.
    pub fn fired_within(&self, limit: Duration) -> bool {
        let mut count = self.live.count.lock();
        self.live
            .hit
            .wait_while_for(&mut count, |count| count.hits == 0, limit);
        count.hits > 0
    }

    /// Releases held messages and ends the fault. The guard still reports its hits.
    pub fn release(&self) {
        self.live.end();
        self.shared.rules.lock().retain(|it| it.id != self.live.id);
        self.shared.changed();
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.release();
    }
}
