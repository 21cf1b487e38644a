//! `Waiting`: the claims of this client that wait, and the lines that they listen for.
//!
//! A waiting claim has nothing on the servers. Its lease is kept here: it ends unless it is renewed,
//! and while a try is under way it counts from the beginning of that try, because that is when the
//! servers began to count. A line that somebody waits for is subscribed to at every server; a line
//! that nobody has waited for lately no longer.

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

/// How long a line that nobody waits for stays subscribed: whoever waited for it once often waits
/// again soon.
const LINGERING: Duration = Duration::from_secs(10);

/// A claim that waits.
pub(super) struct Waiter {
    pub(super) claim: Arc<Claim>,
    pub(super) keys: LineKeys,
    pub(super) line: Arc<LineWatch>,
    /// Rung when its place has changed by other means than a message.
    pub(super) bell: Notify,
    state: Mutex<State>,
}

struct State {
    armed: LeaseStart,
    /// Since when a try is under way.
    trying: Option<BootTime>,
    /// When to try by itself.
    due: BootTime,
    /// What the servers had told when the last try began.
    told: Vec<u64>,
    /// How many tries have failed because votes were split.
    splits: u32,
    stage: Stage,
}

/// What has become of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Waiting,
    Held(u64),
    Evicted,
    Gone,
}

impl Waiter {
    /// Where it stands; its lease may have ended.
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

    /// How many servers have told since the last try began that the line is free.
    pub(super) fn told(&self) -> usize {
        let (state, now) = (self.state.lock(), self.line.rung.borrow());
        let told = state.told.iter().zip(now.iter());
        told.filter(|(before, now)| now > before).count()
    }

    /// Whether it should try now.
    pub(super) fn is_due(&self, quorum: usize) -> bool {
        self.due().has_passed() || self.told() >= quorum
    }

    /// A try begins.
    pub(super) fn tries(&self) {
        let mut state = self.state.lock();
        state.trying = Some(BootTime::now());
        state.told.clone_from(&self.line.rung.borrow());
    }

    /// Whether nothing of it can be on the servers, or be under way to them.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.trying.is_none() && !matches!(state.stage, Stage::Held(_))
    }

    /// A try has ended, and the next is due then.
    pub(super) fn tried(&self, due: BootTime) {
        let mut state = self.state.lock();
        (state.trying, state.due) = (None, due);
    }

    /// Another claim of this client has tried meanwhile, which says as much as a try of its own.
    pub(super) fn spared(&self, turn: &Turn) {
        let mut state = self.state.lock();
        state.told.clone_from(&turn.told);
        state.due = turn.due;
    }

    /// How often votes were split, this time included.
    pub(super) fn split(&self) -> u32 {
        let mut state = self.state.lock();
        state.splits += 1;
        state.splits
    }

    /// Renews it here.
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

/// A connection that is subscribed, and whether it is over.
type Heard = (MultiplexedConnection, watch::Receiver<bool>);

/// The messages of one line.
pub(super) struct LineWatch {
    channel: String,
    /// How often each node has said that the line has become free.
    rung: watch::Sender<Vec<u64>>,
    /// The connection to each node that hears them.
    heard_on: Mutex<Vec<Option<Heard>>>,
    /// One waiting claim of this client tries at a time.
    pub(super) turn: Arc<AsyncMutex<Turn>>,
    /// How many claims of this client wait for it or are about to ask for it.
    users: AtomicU64,
    idle_since: AtomicU64,
}

/// The last try of a waiting claim of this client.
pub(super) struct Turn {
    pub(super) began: BootTime,
    /// What the servers had told when it began.
    told: Vec<u64>,
    /// When the next is due.
    pub(super) due: BootTime,
    /// Whether it has left nothing for others of this client.
    pub(super) is_full: bool,
}

impl Turn {
    /// A try begins.
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
    /// Subscribing and unsubscribing, one at a time: the last word on a channel must be right.
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

    /// A node has said that the line of this key is free there.
    pub(super) fn ring(&self, key: &str, at: usize) {
        let line = self.lines.lock().get(key).cloned();
        if let Some(line) = line {
            line.rung.send_modify(|rung| rung[at] += 1);
        }
    }

    pub(super) fn get(&self, claim: ClaimId) -> Option<Arc<Waiter>> {
        self.claims.lock().get(&claim).cloned()
    }

    /// A claim is about to ask for this line.
    pub(super) fn approach(&self, keys: &LineKeys) -> Approach<'_> {
        let (line, others) = self.use_line(keys);
        Approach {
            waiting: self,
            line,
            key: keys.key.clone(),
            others: others > 0,
        }
    }

    /// One more uses a line; says how many others do.
    fn use_line(&self, keys: &LineKeys) -> (Arc<LineWatch>, u64) {
        let mut lines = self.lines.lock();
        let made = || Arc::new(LineWatch::new(&keys.key, self.nodes));
        let line = lines.entry(keys.key.clone()).or_insert_with(made);
        let others = line.users.fetch_add(1, Ordering::Relaxed);
        (Arc::clone(line), others)
    }

    /// A claim waits from here on.
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

    /// A claim waits no longer.
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

    /// Listens for messages of the line at every server that can be asked, `limit` at the longest. What
    /// can't be heard is found by trying now and then.
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
        // A silent server must not keep the others from being heard.
        let _ = tokio::time::timeout(limit, subscribe).await;
    }

    /// Ends the subscriptions of lines that nobody has waited for lately.
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
                    // What is still heard of it finds nobody.
                    let _ = connection.unsubscribe(&line.channel).await;
                }
            }
        }
    }
}

/// A claim that asks for a line for the first time.
pub(super) struct Approach<'a> {
    waiting: &'a Waiting,
    line: Arc<LineWatch>,
    key: String,
    /// Whether others of this client ask or wait already.
    pub(super) others: bool,
}

impl Drop for Approach<'_> {
    fn drop(&mut self) {
        let mut lines = self.waiting.lines.lock();
        let now = BootTime::now().as_nanos();
        self.line.idle_since.store(now, Ordering::Relaxed);
        let last = self.line.users.fetch_sub(1, Ordering::Relaxed) == 1;
        // What nobody ever listened for has nothing to linger for.
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
