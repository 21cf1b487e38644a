//! `LocalQueue`: the waiting claims of this client, and which of them are in the server's line.
//!
//! A line is one row, so each claim in it makes every update of the row more expensive, and each
//! waiting claim polls: 2,000 waiters of one process once cost the holder its renewals. Nobody can
//! overtake in a line, so a claim behind [`AHEAD`] waiting claims of its own client can't be
//! granted before them. It waits here instead, costs the server nothing, and enters when one of
//! them has gone. A claim that others may wait for meanwhile, because its agent holds something or
//! runs inside a hold, passes at once: held back, it would be in no line that is surveyed, and its
//! deadlock could not be found.
//!
//! Invariant: a claim is local, or it may be in the server's line; never both.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use palisade_core::engine::{Claim, ClaimId, LeaseStart, may_block};
use palisade_core::{BootTime, Name};

/// How many waiting claims of one client may be in the server's line of one name, besides those
/// that pass.
const AHEAD: usize = 16;

/// The waiting claims of one client.
#[derive(Default)]
pub(super) struct LocalQueue(Mutex<HashMap<Name, Waiting>>);

/// The waiting claims on one name.
#[derive(Default)]
struct Waiting {
    remote: HashMap<ClaimId, Remote>,
    /// In order of arrival.
    local: BTreeMap<u64, Local>,
    /// The position of each claim in `local`.
    numbers: HashMap<ClaimId, u64>,
    last: u64,
}

/// A claim that may be in the server's line.
enum Remote {
    /// Its enter was sent at this time; no reply is known.
    Entering(Arc<Claim>, BootTime),
    /// It waits in the server's line.
    InLine,
    /// It was left, and the server may not know that yet.
    Leaving,
}

/// A claim that waits locally, and what wakes it when it may enter.
struct Local {
    claim: Arc<Claim>,
    turn: Arc<Notify>,
}

/// What a waiting claim does next.
pub(super) enum Next {
    /// It enters the server's line.
    Enter(Arc<Claim>),
    /// It waits here until it is notified.
    Stay(Arc<Notify>),
    /// It is in the server's line.
    InLine,
}

/// Where a claim was when it was left.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Was {
    Local,
    Entering,
    Elsewhere,
}

impl Waiting {
    fn has_room(&self) -> bool {
        let counts = |remote: &&Remote| !matches!(remote, Remote::Leaving);
        self.remote.values().filter(counts).count() < AHEAD
    }

    /// Wakes the first local claim if it may enter.
    fn wake_next(&self) {
        if let Some((_, first)) = self.local.first_key_value()
            && self.has_room()
        {
            first.turn.notify_one();
        }
    }

    fn local(&self, claim: ClaimId) -> Option<&Local> {
        self.local.get(self.numbers.get(&claim)?)
    }

    fn remove_local(&mut self, claim: ClaimId) -> Option<Local> {
        self.local.remove(&self.numbers.remove(&claim)?)
    }
}

impl LocalQueue {
    fn with<T>(&self, name: &Name, act: impl FnOnce(&mut Waiting) -> T) -> T {
        let mut lines = self.0.lock();
        let waiting = lines.entry(name.clone()).or_default();
        let answer = act(waiting);
        waiting.wake_next();
        if waiting.remote.is_empty() && waiting.local.is_empty() {
            lines.remove(name);
        }
        answer
    }

    /// Whether a claim enters the server's line now; otherwise it waits here from now on.
    pub(super) fn admit(&self, claim: &Arc<Claim>) -> bool {
        self.with(&claim.name, |waiting| {
            if waiting.remote.contains_key(&claim.id) {
                return true;
            }
            let passes = claim.owner.agent.as_ref().is_some_and(may_block);
            if passes || waiting.local.is_empty() && waiting.has_room() {
                // It may have been held back before its agent came to hold something.
                waiting.remove_local(claim.id);
                let entering = Remote::Entering(Arc::clone(claim), BootTime::now());
                waiting.remote.insert(claim.id, entering);
                return true;
            }
            if waiting.local(claim.id).is_none() {
                let local = Local {
                    claim: Arc::clone(claim),
                    turn: Arc::default(),
                };
                waiting.last += 1;
                waiting.numbers.insert(claim.id, waiting.last);
                waiting.local.insert(waiting.last, local);
            }
            false
        })
    }

    /// What a waiting claim does next. Any claim that asks while there is room may enter, so one
    /// that no longer asks blocks nobody.
    pub(super) fn next(&self, name: &Name, claim: ClaimId) -> Next {
        self.with(name, |waiting| {
            if let Some(Remote::Entering(claim, _)) = waiting.remote.get(&claim) {
                return Next::Enter(Arc::clone(claim));
            }
            if !waiting.has_room()
                && let Some(local) = waiting.local(claim)
            {
                return Next::Stay(Arc::clone(&local.turn));
            }
            let Some(Local { claim, .. }) = waiting.remove_local(claim) else {
                return Next::InLine;
            };
            let entering = Remote::Entering(Arc::clone(&claim), BootTime::now());
            waiting.remote.insert(claim.id, entering);
            Next::Enter(claim)
        })
    }

    /// Records that a claim waits in the server's line.
    pub(super) fn is_in_line(&self, name: &Name, claim: ClaimId) {
        self.with(name, |waiting| {
            if let Some(remote @ Remote::Entering(..)) = waiting.remote.get_mut(&claim) {
                *remote = Remote::InLine;
            }
        });
    }

    /// Records that a claim no longer waits.
    pub(super) fn is_over(&self, name: &Name, claim: ClaimId) {
        self.with(name, |waiting| waiting.remote.remove(&claim));
    }

    /// Removes a claim that is being left, and returns where it was. One whose enter may be in
    /// flight is remembered until the server knows that it was left ([`LocalQueue::is_over`]).
    pub(super) fn leave(&self, name: &Name, claim: ClaimId) -> Was {
        self.with(name, |waiting| {
            if waiting.remove_local(claim).is_some() {
                return Was::Local;
            }
            match waiting.remote.get_mut(&claim) {
                Some(remote @ (Remote::Entering(..) | Remote::Leaving)) => {
                    *remote = Remote::Leaving;
                    Was::Entering
                }
                Some(Remote::InLine) => {
                    waiting.remote.remove(&claim);
                    Was::Elsewhere
                }
                None => Was::Elsewhere,
            }
        })
    }

    /// The lease of a claim that is not in the server's line yet. It starts now for a local claim,
    /// and at the time of the request while its enter is in flight.
    pub(super) fn armed(&self, name: &Name, claim: ClaimId) -> Option<LeaseStart> {
        self.with(name, |waiting| {
            if let Some(Remote::Entering(claim, sent)) = waiting.remote.get(&claim) {
                let (sent, ttl) = (*sent, claim.ttl);
                return Some(LeaseStart { sent, ttl });
            }
            let (sent, ttl) = (BootTime::now(), waiting.local(claim)?.claim.ttl);
            Some(LeaseStart { sent, ttl })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use palisade_core::engine::Ask;
    use palisade_core::report::{Agent, Owner};

    fn claim(name: &Name) -> Arc<Claim> {
        Arc::new(Claim {
            id: ClaimId::random(),
            name: name.clone(),
            ask: Ask::Whole,
            ttl: Duration::from_secs(30),
            queue: true,
            owner: Owner::here("o", None),
            value: None,
            renewed: true,
            at_least: Duration::ZERO,
        })
    }

    #[tokio::test]
    async fn a_crowd_waits_here_and_enters_one_by_one_in_its_order() {
        let (queue, name) = (LocalQueue::default(), Name::new("n").unwrap());
        let claims: Vec<_> = (0..AHEAD + 3).map(|_| claim(&name)).collect();
        for (at, claim) in claims.iter().enumerate() {
            assert_eq!(queue.admit(claim), at < AHEAD, "{at}");
            // Admitting it again changes nothing.
            assert_eq!(queue.admit(claim), at < AHEAD, "{at}");
        }
        // One whose agent has come to hold something passes; then it is in the line like others.
        let mut busy = Claim::clone(claims.last().unwrap());
        busy.owner.agent = Some(Agent {
            holds: vec!["other".into()],
            ..Agent::default()
        });
        let busy = Arc::new(busy);
        assert!(queue.admit(&busy) && queue.admit(&busy));
        assert_eq!(queue.leave(&name, busy.id), Was::Entering);
        queue.is_over(&name, busy.id);
        assert!(!queue.admit(claims.last().unwrap()));
        let [first, second, third] = [0, 1, 2].map(|at| claims[AHEAD + at].id);
        let Next::Stay(turn) = queue.next(&name, second) else {
            panic!("there is no room");
        };
        assert_eq!(queue.leave(&name, first), Was::Local);
        queue.is_in_line(&name, claims[0].id);
        assert!(queue.armed(&name, claims[0].id).is_none(), "the server's");
        assert!(queue.armed(&name, third).is_some());
        queue.is_over(&name, claims[0].id);
        turn.notified().await;
        assert!(matches!(queue.next(&name, second), Next::Enter(_)));
        assert!(matches!(queue.next(&name, second), Next::Enter(_)));
        assert!(matches!(queue.next(&name, third), Next::Stay(_)));
        // A claim that is left while its enter is in flight is in doubt until the server knows, but
        // it blocks nobody.
        assert_eq!(queue.leave(&name, second), Was::Entering);
        assert_eq!(queue.leave(&name, second), Was::Entering);
        assert!(matches!(queue.next(&name, third), Next::Enter(_)));
        for claim in &claims {
            queue.is_over(&name, claim.id);
        }
        assert!(queue.0.lock().is_empty(), "something is kept");
    }
}
