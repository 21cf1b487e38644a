//! `Lines`: what this process last saw of each Lease. `Members`: its claims that hold or wait.
//!
//! The remembered Lease may be outdated, which a conditional write finds out. It saves reads, and
//! it is the basis of expiry: a holder has expired when its record has not changed for its duration
//! since *we* first saw it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedMutexGuard};
use tokio::time::timeout;

use super::lease::{Decision, Lease, Seen, decide};
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::error::Result;
use crate::core::ticket::{LeaseStart, Ticket};
use crate::engines::kit::tombstones::Tombstones;

/// The most unused lines that are remembered.
const IDLE_LINES: usize = 1024;

/// How long a writer waits for another writer of this process. Concurrent writes would only refuse
/// each other, but a writer whose runtime is blocked must not delay a renewal.
const TURN: Duration = Duration::from_millis(300);

/// The lines that this process knows.
#[derive(Default)]
pub(super) struct Lines(Mutex<HashMap<String, Arc<Line>>>);

impl Lines {
    pub(super) fn get(&self, key: &str) -> Arc<Line> {
        let mut lines = self.0.lock();
        if let Some(line) = lines.get(key) {
            return Arc::clone(line);
        }
        if lines.len() >= IDLE_LINES {
            lines.retain(|_, line| Arc::strong_count(line) > 1 || !line.is_free());
        }
        let line = Arc::new(Line::new(key));
        lines.insert(key.to_owned(), Arc::clone(&line));
        line
    }
}

/// One line.
pub(super) struct Line {
    pub(super) key: String,
    state: Mutex<State>,
    /// Notified at every change that is seen.
    pub(super) changed: Notify,
    turn: Arc<AsyncMutex<()>>,
    /// Only one read at a time, shared by all who need one.
    pub(super) reading: AsyncMutex<()>,
    pub(super) waiters: AtomicUsize,
    pub(super) watched: AtomicBool,
}

#[derive(Default)]
struct State {
    lease: Option<Arc<Lease>>,
    /// When the request that showed it was sent; `None` before the first.
    asked: Option<BootTime>,
    seen: Seen,
}

/// A Lease as it was last seen; `None` when there was none.
pub(super) type Snapshot = Option<Arc<Lease>>;

impl Line {
    fn new(key: &str) -> Self {
        Self {
            key: key.to_owned(),
            state: Mutex::default(),
            changed: Notify::new(),
            turn: Arc::default(),
            reading: AsyncMutex::default(),
            waiters: AtomicUsize::new(0),
            watched: AtomicBool::new(false),
        }
    }

    fn is_free(&self) -> bool {
        let state = self.state.lock();
        let lease = state.lease.as_ref();
        lease.is_none_or(|lease| lease.view().holders.is_empty())
    }

    /// Waits for the turn to write, at most [`TURN`] and at most `limit`.
    pub(super) async fn turn(&self, limit: Duration) -> Option<OwnedMutexGuard<()>> {
        let turn = Arc::clone(&self.turn).lock_owned();
        timeout(TURN.min(limit), turn).await.ok()
    }

    /// What was last seen, if the request for it was sent at `since` or later.
    pub(super) fn known(&self, since: BootTime) -> Option<Snapshot> {
        let state = self.state.lock();
        let fresh = state.asked.is_some_and(|asked| asked >= since);
        fresh.then(|| state.lease.clone())
    }

    /// Marks a write as in flight: unless it is settled, the next writer reads first.
    pub(super) fn doubt(&self) -> Doubtful<'_> {
        Doubtful(Some(self))
    }

    /// Records the reply to a request that was sent at `asked`.
    pub(super) fn saw(&self, lease: Option<Lease>, asked: BootTime) -> Snapshot {
        self.take_in(lease, asked, None)
    }

    /// Records the result of one of our writes with this stamp.
    pub(super) fn wrote(&self, lease: Lease, stamp: &str, sent: BootTime) -> Snapshot {
        self.take_in(Some(lease), sent, Some((stamp, sent)))
    }

    fn take_in(
        &self,
        lease: Option<Lease>,
        asked: BootTime,
        own: Option<(&str, BootTime)>,
    ) -> Snapshot {
        let lease = lease.map(Arc::new);
        let mut state = self.state.lock();
        state.seen.look(lease.as_deref(), BootTime::now(), own);
        state.lease.clone_from(&lease);
        // A reply may be overtaken by one to a later request.
        state.asked = state.asked.max(Some(asked));
        drop(state);
        self.changed.notify_waiters();
        lease
    }

    /// Records a watch event, unless something newer is known, because a watch may lag.
    pub(super) fn heard(&self, lease: Lease, deleted: bool) {
        let version = |lease: &Lease| lease.version().ok();
        let mut state = self.state.lock();
        let known = state.lease.as_deref().and_then(version);
        if state.asked.is_none() || known.is_some_and(|known| Some(known) >= version(&lease)) {
            return;
        }
        let lease = (!deleted).then(|| Arc::new(lease));
        state.seen.look(lease.as_deref(), BootTime::now(), None);
        state.lease = lease;
        drop(state);
        self.changed.notify_waiters();
    }

    /// What a claim can do on the line as it was last seen.
    pub(super) fn decide(
        &self,
        snapshot: &Snapshot,
        claim: &Claim,
        adopts: bool,
        stamp: &str,
        server: i64,
    ) -> Result<Decision> {
        let state = self.state.lock();
        decide(
            snapshot.as_deref(),
            &state.seen,
            claim,
            adopts,
            stamp,
            server,
        )
    }

    /// Whether a holder has expired, by what we have seen of it.
    pub(super) fn has_ended(&self, holder: &super::lease::Holder) -> bool {
        self.state.lock().seen.ends(holder).has_passed()
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
            line.state.lock().asked = None;
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
#[derive(Clone)]
pub(super) struct Member {
    pub(super) claim: Arc<Claim>,
    pub(super) stage: Stage,
    pub(super) armed: LeaseStart,
    pub(super) evicted: bool,
    pub(super) doubt: Option<Doubt>,
    /// Whether the caller was told that it waits.
    pub(super) waits: bool,
    changed: Arc<Notify>,
}

impl Member {
    pub(super) fn ticket(&self) -> Ticket {
        let own = Ticket::own(self.claim.name.clone(), self.claim.id);
        let sequence = match self.stage {
            Stage::Held(sequence) => sequence,
            Stage::Waiting | Stage::Writing => 0,
        };
        Ticket { sequence, ..own }
    }

    /// Whether it was not renewed for its ttl.
    pub(super) fn has_ended(&self) -> bool {
        (self.armed.sent + self.armed.ttl).has_passed()
    }
}

/// The claims of this process.
#[derive(Default)]
pub(super) struct Members {
    table: Mutex<HashMap<ClaimId, Member>>,
    left: Mutex<Tombstones>,
}

impl Members {
    /// The claim if it is known, otherwise a new one that waits. `None` when it was left.
    pub(super) fn join(&self, claim: &Arc<Claim>) -> Option<Member> {
        let mut table = self.table.lock();
        if self.left.lock().has(claim.id, BootTime::now()) {
            return None;
        }
        let member = table.entry(claim.id).or_insert_with(|| Member {
            claim: Arc::clone(claim),
            stage: Stage::Waiting,
            armed: LeaseStart {
                sent: BootTime::now(),
                ttl: claim.ttl,
            },
            evicted: false,
            doubt: None,
            waits: false,
            changed: Arc::default(),
        });
        Some(member.clone())
    }

    pub(super) fn get(&self, claim: ClaimId) -> Option<Member> {
        self.table.lock().get(&claim).cloned()
    }

    /// Changes a claim; `false` when it is unknown.
    pub(super) fn change(&self, claim: ClaimId, change: impl FnOnce(&mut Member)) -> bool {
        let mut table = self.table.lock();
        let Some(member) = table.get_mut(&claim) else {
            return false;
        };
        change(member);
        member.changed.notify_waiters();
        true
    }

    /// The claim once none of its writes is in flight, or its current state after `limit`.
    pub(super) async fn settled(&self, claim: ClaimId, limit: Duration) -> Option<Member> {
        let until = BootTime::now() + limit;
        loop {
            let member = self.get(claim)?;
            let mut changed = std::pin::pin!(member.changed.notified());
            changed.as_mut().enable();
            // Read again, because it may have changed before we listened.
            let member = self.get(claim)?;
            if member.stage != Stage::Writing || until.has_passed() {
                return Some(member);
            }
            let _ = timeout(until.remaining(), changed).await;
        }
    }

    /// Waits for a change of a claim.
    pub(super) async fn changed(&self, claim: ClaimId) {
        if let Some(member) = self.get(claim) {
            member.changed.notified().await;
        }
    }

    /// Removes a claim.
    pub(super) fn forget(&self, claim: ClaimId) {
        let gone = self.table.lock().remove(&claim);
        if let Some(member) = gone {
            member.changed.notify_waiters();
        }
    }

    /// Remembers that a claim was left, so that an enter in flight finds out.
    pub(super) fn bury(&self, claim: ClaimId, lasts: Duration) {
        self.left.lock().add(claim, BootTime::now(), lasts);
    }
}
