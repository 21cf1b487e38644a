//! `Lines`: what this process last saw of each Lease. `Members`: its claims that hold or wait.
//!
//! The remembered Lease may be outdated, which a conditional write finds out. It saves reads, and
//! it is the basis of expiry: a holder has expired when its record has not changed for its duration
//! since *we* first saw it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedMutexGuard};
use tokio::time::timeout;

use super::keys::Keys;
use super::lease::{Holder, Lease};
use palisade_core::engine::{Claim, ClaimId, LeaseStart, Ticket};
use palisade_core::{BootTime, Name, Result};
use palisade_kit::tombstones::Tombstones;

/// The most unused lines that are remembered.
const IDLE_LINES: usize = 1024;

/// How long a writer waits for another writer of this process. Concurrent writes would only refuse
/// each other, but a writer whose runtime is blocked must not delay a renewal.
const TURN: Duration = Duration::from_millis(300);

/// The lines that this process knows.
#[derive(Default)]
pub(super) struct Lines(Mutex<HashMap<Name, Arc<Line>>>);

impl Lines {
    /// # Errors
    /// As [`Keys::lease`].
    pub(super) fn get(&self, keys: &Keys, name: &Name) -> Result<Arc<Line>> {
        let mut lines = self.0.lock();
        if let Some(line) = lines.get(name) {
            return Ok(Arc::clone(line));
        }
        if lines.len() >= IDLE_LINES {
            lines.retain(|_, line| Arc::strong_count(line) > 1 || !line.is_free());
        }
        let line = Arc::new(Line::new(keys.lease(name)?));
        lines.insert(name.clone(), Arc::clone(&line));
        Ok(line)
    }
}

/// One line.
pub(super) struct Line {
    /// The name of its Lease.
    pub(super) key: String,
    pub(super) seen: Mutex<Seen>,
    /// Notified at every change that is seen.
    pub(super) changed: Notify,
    turn: Arc<AsyncMutex<()>>,
    /// Only one read at a time, shared by all who need one.
    pub(super) reading: AsyncMutex<()>,
    pub(super) waiters: AtomicUsize,
    pub(super) watched: AtomicBool,
}

/// A Lease as it was last seen; `None` when there was none.
pub(super) type Snapshot = Option<Arc<Lease>>;

/// What was last seen of a line.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) lease: Snapshot,
    /// When the request that showed it was sent; `None` before the first.
    pub(super) asked: Option<BootTime>,
    /// The last stamp of each holder, and when it was first seen by our own clock.
    stamps: HashMap<String, (String, BootTime)>,
}

impl Seen {
    /// When a holder's lease ends if it is not renewed.
    pub(super) fn ends(&self, holder: &Holder) -> BootTime {
        match self.stamps.get(&holder.id) {
            Some((stamp, first)) if *stamp == holder.stamp => *first + holder.ttl,
            _ => BootTime::NEVER,
        }
    }
}

/// The right to write to a line.
pub(super) type Turn = OwnedMutexGuard<()>;

impl Line {
    fn new(key: String) -> Self {
        Self {
            key,
            seen: Mutex::default(),
            changed: Notify::new(),
            turn: Arc::default(),
            reading: AsyncMutex::default(),
            waiters: AtomicUsize::new(0),
            watched: AtomicBool::new(false),
        }
    }

    fn is_free(&self) -> bool {
        let seen = self.seen.lock();
        let lease = seen.lease.as_ref();
        lease.is_none_or(|lease| lease.view().holders.is_empty())
    }

    /// Waits for the turn to write, at most [`TURN`] and at most `limit`.
    pub(super) async fn turn(&self, limit: Duration) -> Option<Turn> {
        let turn = Arc::clone(&self.turn).lock_owned();
        timeout(TURN.min(limit), turn).await.ok()
    }

    /// The turn to write, if nobody has it.
    pub(super) fn free_turn(&self) -> Option<Turn> {
        Arc::clone(&self.turn).try_lock_owned().ok()
    }

    /// What was last seen, if the request for it was sent at `since` or later.
    pub(super) fn known(&self, since: BootTime) -> Option<Snapshot> {
        let seen = self.seen.lock();
        let fresh = seen.asked.is_some_and(|asked| asked >= since);
        fresh.then(|| seen.lease.clone())
    }

    /// Marks a write as in flight: unless it is settled, the next writer reads first.
    pub(super) fn doubt(&self) -> Doubtful<'_> {
        Doubtful(Some(self))
    }

    /// Records the reply to a request that was sent at `asked`.
    pub(super) fn saw(&self, lease: Option<Lease>, asked: BootTime) -> Snapshot {
        self.look(self.seen.lock(), lease, Some(asked), None)
    }

    /// Records the result of one of our writes with this stamp.
    pub(super) fn wrote(&self, lease: Lease, stamp: &str, sent: BootTime) -> Snapshot {
        self.look(
            self.seen.lock(),
            Some(lease),
            Some(sent),
            Some((stamp, sent)),
        )
    }

    /// Records what a Lease shows. It is called after the reply, so a holder's own lease began no
    /// later than now. `own` is a stamp that we wrote, and when that was sent.
    fn look(
        &self,
        mut seen: MutexGuard<'_, Seen>,
        lease: Option<Lease>,
        asked: Option<BootTime>,
        own: Option<(&str, BootTime)>,
    ) -> Snapshot {
        let (lease, now) = (lease.map(Arc::new), BootTime::now());
        let mut before = std::mem::take(&mut seen.stamps);
        for holder in lease.iter().flat_map(|lease| lease.view().holders) {
            let known = before.remove(&holder.id);
            let known = known.filter(|(stamp, _)| *stamp == holder.stamp);
            let first = match (known, own) {
                (Some((_, first)), _) => first,
                (None, Some((stamp, sent))) if holder.stamp == stamp => sent,
                (None, _) => now,
            };
            seen.stamps.insert(holder.id, (holder.stamp, first));
        }
        seen.lease.clone_from(&lease);
        // A reply may be overtaken by one to a later request.
        seen.asked = seen.asked.max(asked);
        drop(seen);
        self.changed.notify_waiters();
        lease
    }

    /// Records a watch event, unless something newer is known, because a watch may lag.
    pub(super) fn heard(&self, lease: Lease, deleted: bool) {
        let version = |lease: &Lease| lease.version().ok();
        let seen = self.seen.lock();
        let known = seen.lease.as_deref().and_then(version);
        if seen.asked.is_some() && known.is_none_or(|known| Some(known) < version(&lease)) {
            self.look(seen, (!deleted).then_some(lease), None, None);
        }
    }

    /// Whether a holder has expired, by what we have seen of it.
    pub(super) fn has_ended(&self, holder: &Holder) -> bool {
        self.seen.lock().ends(holder).has_passed()
    }
}

/// Invalidates what was seen of a line when dropped, unless [`Doubtful::settle`] is called.
pub(super) struct Doubtful<'a>(Option<&'a Line>);

impl Doubtful<'_> {
    pub(super) fn settle(mut self) {
        self.0 = None;
    }
}

impl Drop for Doubtful<'_> {
    fn drop(&mut self) {
        if let Some(line) = self.0 {
            line.seen.lock().asked = None;
        }
    }
}

/// Counts as a waiter of a line until it is dropped.
pub(super) struct Waits<'a>(&'a Line);

impl<'a> Waits<'a> {
    pub(super) fn on(line: &'a Line) -> Self {
        line.waiters.fetch_add(1, Ordering::Relaxed);
        Self(line)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The progress of a claim of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It has nothing in the store.
    Waiting,
    /// Its acquiring write is in flight.
    Writing,
    Held(u64),
}

/// A write that may still be applied: the Lease, and the resourceVersion that it is conditional on.
pub(super) type Doubt = (String, String);

/// A claim of this process.
pub(super) struct Member {
    pub(super) claim: Arc<Claim>,
    pub(super) state: Mutex<State>,
    pub(super) changed: Notify,
}

#[derive(Clone)]
pub(super) struct State {
    pub(super) stage: Stage,
    pub(super) armed: LeaseStart,
    pub(super) evicted: bool,
    pub(super) doubt: Option<Doubt>,
    /// Whether the caller was told that it waits.
    pub(super) waits: bool,
    /// Whether it is no longer a claim of this process.
    pub(super) left: bool,
}

impl Member {
    /// Its state now.
    pub(super) fn state(&self) -> State {
        self.state.lock().clone()
    }

    /// Changes its state.
    pub(super) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
        self.changed.notify_waiters();
    }

    pub(super) fn ticket(&self) -> Ticket {
        let sequence = match self.state().stage {
            Stage::Held(sequence) => sequence,
            Stage::Waiting | Stage::Writing => 0,
        };
        let own = Ticket::own(self.claim.name.clone(), self.claim.id);
        Ticket { sequence, ..own }
    }

    /// Whether it was not renewed for its ttl.
    pub(super) fn has_ended(&self) -> bool {
        let armed = self.state().armed;
        (armed.sent + armed.ttl).has_passed()
    }
}

/// The claims of this process.
#[derive(Default)]
pub(super) struct Members {
    table: Mutex<HashMap<ClaimId, Arc<Member>>>,
    left: Mutex<Tombstones>,
}

impl Members {
    /// The claim if it is known, otherwise a new one that waits. `None` when it was left.
    pub(super) fn join(&self, claim: &Arc<Claim>) -> Option<Arc<Member>> {
        let mut table = self.table.lock();
        let now = BootTime::now();
        if self.left.lock().has(claim.id, now) {
            return None;
        }
        let member = table.entry(claim.id).or_insert_with(|| {
            Arc::new(Member {
                claim: Arc::clone(claim),
                state: Mutex::new(State {
                    stage: Stage::Waiting,
                    armed: LeaseStart {
                        sent: now,
                        ttl: claim.ttl,
                    },
                    evicted: false,
                    doubt: None,
                    waits: false,
                    left: false,
                }),
                changed: Notify::new(),
            })
        });
        Some(Arc::clone(member))
    }

    pub(super) fn get(&self, claim: ClaimId) -> Option<Arc<Member>> {
        self.table.lock().get(&claim).cloned()
    }

    /// The claim once none of its writes is in flight, or as it is after `limit`.
    pub(super) async fn settled(&self, claim: ClaimId, limit: Duration) -> Option<Arc<Member>> {
        let until = BootTime::now() + limit;
        loop {
            let member = self.get(claim)?;
            let mut changed = std::pin::pin!(member.changed.notified());
            // Before the state is read, because it may change in between.
            changed.as_mut().enable();
            let state = member.state();
            if state.left {
                return None;
            }
            if state.stage != Stage::Writing || until.has_passed() {
                return Some(Arc::clone(&member));
            }
            let _ = timeout(until.remaining(), changed).await;
        }
    }

    /// Removes a claim.
    pub(super) fn forget(&self, claim: ClaimId) {
        let mut table = self.table.lock();
        if let Some(member) = table.remove(&claim) {
            member.change(|state| state.left = true);
        }
    }

    /// Remembers that a claim was left, so that an enter in flight finds out.
    pub(super) fn bury(&self, claim: ClaimId, lasts: Duration) {
        self.left.lock().add(claim, BootTime::now(), lasts);
    }
}
