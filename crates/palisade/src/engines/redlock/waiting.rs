//! `Waiting`: the waiting claims of this client, and the lines that they listen to.
//!
//! A waiting claim has nothing on the servers. Its lease is kept here and ends unless it is
//! renewed. While an attempt is in flight, the lease counts from the start of the attempt, because
//! the servers count from then. A line with waiters is subscribed to at every server, and
//! unsubscribed some time after its last waiter has gone.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use tokio::sync::{Mutex as AsyncMutex, Notify, watch};

use super::Redlock;
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::engine::Renewal;
use crate::core::ticket::LeaseStart;
use crate::engines::redis::keys::LineKeys;
use crate::engines::redis::notify::FREE;

/// How long a line stays subscribed after its last waiter, because its waiters often return soon.
const LINGERING: Duration = Duration::from_secs(10);

/// A claim that waits.
pub(super) struct Waiter {
    pub(super) claim: Arc<Claim>,
    pub(super) keys: LineKeys,
    pub(super) line: Arc<LineWatch>,
    /// Notified when its stage has changed; the messages of servers go to [`LineWatch`].
    pub(super) bell: Notify,
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
        self.bell.notify_one();
    }

    pub(super) fn due(&self) -> BootTime {
        self.state.lock().due
    }

    /// How many servers have notified since the last attempt began that the line is free.
    pub(super) fn told(&self) -> usize {
        let (state, now) = (self.state.lock(), self.line.rung.borrow());
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
        state.told.clone_from(&self.line.rung.borrow());
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

/// A subscribed connection, and whether it has ended.
type Heard = (MultiplexedConnection, watch::Receiver<bool>);

/// The notifications of one line.
pub(super) struct LineWatch {
    channel: String,
    /// How many times each node has notified that the line is free.
    rung: watch::Sender<Vec<u64>>,
    /// The connection to each node that is subscribed.
    heard_on: Mutex<Vec<Option<Heard>>>,
    /// Only one waiting claim of this client tries at a time.
    pub(super) turn: Arc<AsyncMutex<Turn>>,
    /// How many claims of this client wait for the line or are about to ask for it.
    users: AtomicU64,
    idle_since: AtomicU64,
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
        self.told.clone_from(&line.rung.borrow());
    }
}

impl LineWatch {
    fn new(key: &str, nodes: usize) -> Self {
        Self {
            channel: format!("{FREE}{key}"),
            rung: watch::Sender::new(vec![0; nodes]),
            heard_on: Mutex::new(vec![None; nodes]),
            turn: Arc::new(AsyncMutex::new(Turn {
                began: BootTime::PAST,
                told: vec![0; nodes],
                due: BootTime::PAST,
                is_full: false,
            })),
            users: AtomicU64::new(0),
            idle_since: AtomicU64::new(0),
        }
    }

    pub(super) fn rings(&self) -> watch::Receiver<Vec<u64>> {
        self.rung.subscribe()
    }

    fn is_heard(&self, at: usize) -> bool {
        let heard = self.heard_on.lock();
        heard[at].as_ref().is_some_and(|(_, over)| !*over.borrow())
    }
}

pub(super) struct Waiting {
    nodes: usize,
    claims: Mutex<HashMap<ClaimId, Arc<Waiter>>>,
    lines: Mutex<HashMap<String, Arc<LineWatch>>>,
    /// Serializes SUBSCRIBE and UNSUBSCRIBE, so that the last one sent for a channel is the right
    /// one.
    subscribing: AsyncMutex<()>,
}

impl Waiting {
    pub(super) fn new(nodes: usize) -> Self {
        Self {
            nodes,
            claims: Mutex::default(),
            lines: Mutex::default(),
            subscribing: AsyncMutex::default(),
        }
    }

    /// A node has notified that the line of this key is free there.
    pub(super) fn ring(&self, key: &str, at: usize) {
        let line = self.lines.lock().get(key).cloned();
        if let Some(line) = line {
            line.rung.send_modify(|rung| rung[at] += 1);
        }
    }

    pub(super) fn get(&self, claim: ClaimId) -> Option<Arc<Waiter>> {
        self.claims.lock().get(&claim).cloned()
    }

    /// Registers a claim that is about to ask for the line.
    pub(super) fn approach(&self, keys: &LineKeys) -> Approach<'_> {
        let (line, others) = self.use_line(keys);
        Approach {
            waiting: self,
            line,
            key: keys.key.clone(),
            others: others > 0,
        }
    }

    /// Adds a user to a line, and returns how many others it had.
    fn use_line(&self, keys: &LineKeys) -> (Arc<LineWatch>, u64) {
        let mut lines = self.lines.lock();
        let made = || Arc::new(LineWatch::new(&keys.key, self.nodes));
        let line = lines.entry(keys.key.clone()).or_insert_with(made);
        let others = line.users.fetch_add(1, Ordering::Relaxed);
        (Arc::clone(line), others)
    }

    /// Adds a waiting claim.
    pub(super) fn add(
        &self,
        claim: &Arc<Claim>,
        keys: &LineKeys,
        armed: LeaseStart,
    ) -> Arc<Waiter> {
        let (line, _) = self.use_line(keys);
        let told = line.rung.borrow().clone();
        let waiter = Arc::new(Waiter {
            claim: Arc::clone(claim),
            keys: keys.clone(),
            line,
            bell: Notify::new(),
            state: Mutex::new(State {
                armed,
                trying: None,
                due: BootTime::PAST,
                told,
                splits: 0,
                stage: Stage::Waiting,
            }),
        });
        let before = self.claims.lock().insert(claim.id, Arc::clone(&waiter));
        self.gone(before);
        waiter
    }

    /// Removes a claim that no longer waits.
    pub(super) fn forget(&self, claim: ClaimId) -> Option<Arc<Waiter>> {
        let waiter = self.claims.lock().remove(&claim);
        self.gone(waiter.clone());
        waiter
    }

    fn gone(&self, waiter: Option<Arc<Waiter>>) {
        if let Some(waiter) = waiter {
            let now = BootTime::now().as_nanos();
            waiter.line.idle_since.store(now, Ordering::Relaxed);
            waiter.line.users.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Subscribes to the line at every server that can be reached within `limit`. Where that fails,
    /// periodic attempts find out.
    pub(super) async fn listen(&self, engine: &Redlock, line: &LineWatch, limit: Duration) {
        if (0..self.nodes).all(|at| line.is_heard(at)) {
            return;
        }
        let subscribe = async {
            let _turn = self.subscribing.lock().await;
            self.unsubscribe_idle().await;
            let nodes = engine.nodes.iter().filter(|node| !line.is_heard(node.at));
            join_all(nodes.map(|node| async {
                let Ok(link) = node.link().await else {
                    return;
                };
                let connection = &link.connection;
                if connection.subscribe(line.channel.clone()).await.is_ok() {
                    let heard = (connection.multiplexed.clone(), connection.over());
                    line.heard_on.lock()[node.at] = Some(heard);
                }
            }))
            .await;
        };
        // An unresponsive server must not delay the subscriptions to the others.
        let _ = tokio::time::timeout(limit, subscribe).await;
    }

    /// Unsubscribes from lines that have had no users for [`LINGERING`].
    async fn unsubscribe_idle(&self) {
        let now = BootTime::now();
        let idle = |line: &LineWatch| {
            let since = BootTime::from_nanos(line.idle_since.load(Ordering::Relaxed));
            line.users.load(Ordering::Relaxed) == 0 && now.saturating_since(since) > LINGERING
        };
        let idle: Vec<_> = {
            let mut lines = self.lines.lock();
            lines.extract_if(|_, line| idle(line)).collect()
        };
        for (_, line) in idle {
            let heard = std::mem::take(&mut *line.heard_on.lock());
            for (mut connection, over) in heard.into_iter().flatten() {
                if !*over.borrow() {
                    // A message that still arrives finds no waiter.
                    let _ = connection.unsubscribe(&line.channel).await;
                }
            }
        }
    }
}

/// A claim that is about to ask for a line.
pub(super) struct Approach<'a> {
    waiting: &'a Waiting,
    line: Arc<LineWatch>,
    key: String,
    /// Whether other claims of this client already ask or wait for it.
    pub(super) others: bool,
}

impl Drop for Approach<'_> {
    fn drop(&mut self) {
        let mut lines = self.waiting.lines.lock();
        let now = BootTime::now().as_nanos();
        self.line.idle_since.store(now, Ordering::Relaxed);
        let last = self.line.users.fetch_sub(1, Ordering::Relaxed) == 1;
        // A line that was never subscribed to need not linger.
        if last && self.line.heard_on.lock().iter().all(Option::is_none) {
            lines.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::claim::Ask;
    use crate::core::name::Name;
    use crate::core::owner::Owner;
    use crate::engines::redis::keys::Keys;

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
        let waiter = waiting.add(&claim, &keys, armed);
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
        let mut rings = waiter.line.rings();
        waiting.ring("ns:a", 1);
        waiting.ring("ns:b", 1);
        assert_eq!(*rings.borrow_and_update(), [0, 1, 0]);
        assert_eq!(waiter.line.users.load(Ordering::Relaxed), 1);
        waiting.add(&waiter.claim, &waiter.keys, waiter.state.lock().armed);
        assert_eq!(
            waiter.line.users.load(Ordering::Relaxed),
            1,
            "the same claim"
        );
        waiting.forget(waiter.claim.id);
        assert_eq!(waiter.line.users.load(Ordering::Relaxed), 0);
    }
}
