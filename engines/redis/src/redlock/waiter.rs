//! `Waiter`: a waiting claim of this client, and the notifications of its line.
//!
//! A waiting claim has nothing on the servers. Its lease is kept here and ends unless it is
//! renewed. While an attempt is in flight, the lease counts from the start of the attempt, because
//! the servers count from then.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use tokio::sync::{Mutex as AsyncMutex, Notify, watch};

use crate::keys::LineKeys;
use crate::notify::FREE;
use palisade_core::BootTime;
use palisade_core::engine::{Claim, LeaseStart, Renewal};

/// A claim that waits.
pub(super) struct Waiter {
    pub(super) claim: Arc<Claim>,
    pub(super) keys: LineKeys,
    pub(super) line: Arc<LineWatch>,
    /// Notified when its stage has changed; the messages of servers go to [`LineWatch`].
    pub(super) changed: Notify,
    state: Mutex<State>,
}

struct State {
    armed: LeaseStart,
    /// The start of the attempt in flight.
    trying: Option<BootTime>,
    /// When it tries even without a notification.
    due: BootTime,
    /// The servers' notification counts when the last attempt began.
    told: Vec<u64>,
    /// How many attempts failed because of split votes.
    splits: u32,
    stage: Stage,
}

/// The stage of a waiting claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Waiting,
    Held(u64),
    Evicted,
    Gone,
}

impl Waiter {
    pub(super) fn new(
        claim: &Arc<Claim>,
        keys: &LineKeys,
        line: Arc<LineWatch>,
        armed: LeaseStart,
    ) -> Self {
        let told = line.freed.borrow().clone();
        Self {
            claim: Arc::clone(claim),
            keys: keys.clone(),
            line,
            changed: Notify::new(),
            state: Mutex::new(State {
                armed,
                trying: None,
                due: BootTime::PAST,
                told,
                splits: 0,
                stage: Stage::Waiting,
            }),
        }
    }

    /// The current stage; `Gone` once its lease has ended.
    pub(super) fn stage(&self) -> Stage {
        let mut state = self.state.lock();
        let ended = (state.armed.sent + state.armed.ttl).has_passed();
        if ended && !matches!(state.stage, Stage::Held(_)) {
            state.stage = Stage::Gone;
        }
        state.stage
    }

    pub(super) fn set(&self, stage: Stage) {
        self.state.lock().stage = stage;
        self.changed.notify_one();
    }

    pub(super) fn due(&self) -> BootTime {
        self.state.lock().due
    }

    /// How many servers have notified since the last attempt began that the line is free.
    pub(super) fn told(&self) -> usize {
        let (state, now) = (self.state.lock(), self.line.freed.borrow());
        let told = state.told.iter().zip(now.iter());
        told.filter(|(before, now)| now > before).count()
    }

    /// Whether it should try now.
    pub(super) fn is_due(&self, quorum: usize) -> bool {
        self.due().has_passed() || self.told() >= quorum
    }

    /// An attempt begins.
    pub(super) fn tries(&self) {
        let mut state = self.state.lock();
        state.trying = Some(BootTime::now());
        state.told.clone_from(&self.line.freed.borrow());
    }

    /// Whether nothing of it can be on the servers or in flight to them.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.trying.is_none() && !matches!(state.stage, Stage::Held(_))
    }

    /// An attempt has ended; the next one is due at `due`.
    pub(super) fn tried(&self, due: BootTime) {
        let mut state = self.state.lock();
        (state.trying, state.due) = (None, due);
    }

    /// Adopts the result of an attempt by another claim of this client.
    pub(super) fn spared(&self, turn: &Turn) {
        let mut state = self.state.lock();
        state.told.clone_from(&turn.told);
        state.due = turn.due;
    }

    /// Counts another attempt with split votes, and returns their number.
    pub(super) fn split(&self) -> u32 {
        let mut state = self.state.lock();
        state.splits += 1;
        state.splits
    }

    /// Renews its local lease.
    pub(super) fn renew(&self) -> Renewal {
        match self.stage() {
            Stage::Gone => Renewal::Lost,
            Stage::Evicted => Renewal::Evicted,
            Stage::Waiting | Stage::Held(_) => {
                let mut state = self.state.lock();
                let sent = state.trying.unwrap_or_else(BootTime::now);
                state.armed.sent = state.armed.sent.max(sent);
                Renewal::Held(LeaseStart {
                    sent,
                    ..state.armed
                })
            }
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let now = BootTime::now().as_nanos();
        self.line.idle_since.store(now, Ordering::Relaxed);
    }
}

/// A subscribed connection, and whether it has ended.
type Subscription = (MultiplexedConnection, watch::Receiver<bool>);

/// One for each claim of this client that asks or waits for a line.
pub(super) type User = Arc<()>;

/// The notifications of one line.
pub(super) struct LineWatch {
    pub(super) users: User,
    pub(super) channel: String,
    /// How many times each node has notified that the line is free.
    pub(super) freed: watch::Sender<Vec<u64>>,
    /// The connection to each node that is subscribed.
    pub(super) subscriptions: Mutex<Vec<Option<Subscription>>>,
    /// Only one waiting claim of this client tries at a time.
    pub(super) turn: Arc<AsyncMutex<Turn>>,
    /// When its last waiter left.
    pub(super) idle_since: AtomicU64,
}

/// The last attempt of any waiting claim of this client.
pub(super) struct Turn {
    pub(super) began: BootTime,
    /// The servers' notification counts when it began.
    told: Vec<u64>,
    /// When the next attempt is due.
    pub(super) due: BootTime,
    /// Whether it left nothing for other claims of this client.
    pub(super) is_full: bool,
}

impl Turn {
    /// An attempt begins.
    pub(super) fn begin(&mut self, line: &LineWatch) {
        self.began = BootTime::now();
        self.told.clone_from(&line.freed.borrow());
    }
}

impl LineWatch {
    pub(super) fn new(key: &str, nodes: usize) -> Self {
        Self {
            users: User::default(),
            channel: format!("{FREE}{key}"),
            freed: watch::Sender::new(vec![0; nodes]),
            subscriptions: Mutex::new(vec![None; nodes]),
            turn: Arc::new(AsyncMutex::new(Turn {
                began: BootTime::PAST,
                told: vec![0; nodes],
                due: BootTime::PAST,
                is_full: false,
            })),
            idle_since: AtomicU64::new(0),
        }
    }

    /// Whether any server may send notifications of it.
    pub(super) fn was_subscribed(&self) -> bool {
        self.subscriptions.lock().iter().any(Option::is_some)
    }

    /// Whether its notifications from a node arrive.
    pub(super) fn is_subscribed(&self, at: usize) -> bool {
        let subscriptions = self.subscriptions.lock();
        subscriptions[at]
            .as_ref()
            .is_some_and(|(_, over)| !*over.borrow())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::acquire::Waiting;
    use super::*;
    use crate::keys::Keys;
    use palisade_core::Name;
    use palisade_core::engine::{Ask, ClaimId};
    use palisade_core::report::Owner;

    fn waiting(ttl: Duration) -> (Waiting, Arc<Waiter>) {
        let name = Name::new("a").unwrap();
        let keys = Keys::new("ns").unwrap().line(&name).unwrap();
        let claim = Arc::new(Claim {
            id: ClaimId::random(),
            name,
            ask: Ask::Whole,
            ttl,
            queue: true,
            owner: Owner::here("me", None),
            value: None,
            renewed: true,
            at_least: Duration::ZERO,
        });
        let waiting = Waiting::new(3);
        let armed = LeaseStart {
            sent: BootTime::now(),
            ttl,
        };
        let asks = waiting.approach(&keys.key);
        let waiter = Arc::new(Waiter::new(&claim, &keys, asks.line, armed));
        waiting.add(Arc::clone(&waiter), asks.user);
        (waiting, waiter)
    }

    #[test]
    fn a_renewal_during_a_try_counts_from_its_beginning() {
        let (_, waiter) = waiting(Duration::from_secs(9));
        waiter.tries();
        let began = BootTime::now();
        std::thread::sleep(Duration::from_millis(5));
        let Renewal::Held(armed) = waiter.renew() else {
            panic!("lost");
        };
        assert!(armed.sent <= began, "the servers count from the try");
        waiter.tried(BootTime::NEVER);
        let Renewal::Held(armed) = waiter.renew() else {
            panic!("lost");
        };
        assert!(armed.sent > began);
    }

    #[test]
    fn a_waiting_lease_ends_and_a_line_is_shared_and_counted() {
        let (waiting, waiter) = waiting(Duration::ZERO);
        assert_eq!(waiter.stage(), Stage::Gone);
        assert!(matches!(waiter.renew(), Renewal::Lost));
        let mut freed = waiter.line.freed.subscribe();
        waiting.freed("ns:a", 1);
        waiting.freed("ns:b", 1);
        assert_eq!(*freed.borrow_and_update(), [0, 1, 0]);
        let others = || waiting.approach("ns:a").others;
        assert!(others(), "it waits");
        // Its last attempt, which is still ending, waits for nothing.
        waiting.forget(waiter.claim.id);
        assert!(!others(), "nobody is left");
    }
}
