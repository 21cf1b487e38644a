//! `Book`: which sessions this client has, and which of its claims hangs on which.
//!
//! One session per ttl, and one more for every further claim on a name that another claim of this
//! client stands on: a session that has a lock would be given it again. A session whose outcome
//! on a name is not known is never used for that name again, and the audit looks there.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::wire::session_text;
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::name::Name;
use crate::core::ticket::{LeaseId, LeaseStart, Ticket};

/// How far a claim is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It has nothing in the store.
    Waiting,
    /// A write that would give it the lock is under way.
    Trying,
    /// Such a write was not answered, and may still arrive.
    Unknown,
    /// It holds, and this was counted.
    Held(u64),
}

/// What a waiting claim sleeps on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Watched {
    /// What is below the lock, or the lock itself.
    pub(super) tree: bool,
    pub(super) index: u64,
}

/// One claim of this client.
#[derive(Clone)]
pub(super) struct Seat {
    pub(super) claim: Arc<Claim>,
    pub(super) session: u128,
    pub(super) stage: Stage,
    /// When its last write was sent.
    tried: BootTime,
    pub(super) watched: Option<Watched>,
    /// The index at which it closed the gate, while it waits for the readers to go.
    pub(super) closed: Option<u64>,
    /// Whether it holds by a write of another claim, and has not been told.
    given: bool,
    /// Whether it was told that it waits.
    pub(super) waited: bool,
    /// Whether it may say something else than at first.
    pub(super) amended: bool,
    /// Whether an operator takes it away, as far as is known here.
    pub(super) evicted: bool,
    /// Rung when it is taken away.
    pub(super) bell: Arc<Notify>,
    /// Rung when a write of it was answered.
    answered: Arc<Notify>,
    /// Rung when another claim wrote for it.
    pub(super) gift: Arc<Notify>,
}

/// Whether a write for a claim can be sent.
pub(super) enum Begun {
    /// For these: the claim, and others of its kind that wait.
    For(Vec<Seat>),
    /// Another claim writes for it, or has.
    Settled,
    /// It was left meanwhile.
    Gone,
}

impl Seat {
    pub(super) fn session_text(&self) -> String {
        session_text(self.session)
    }

    pub(super) fn ticket(&self) -> Ticket {
        Ticket {
            lease: LeaseId(self.session),
            sequence: match self.stage {
                Stage::Held(sequence) => sequence,
                Stage::Waiting | Stage::Trying | Stage::Unknown => 0,
            },
            ..Ticket::own(self.claim.name.clone(), self.claim.id)
        }
    }
}

struct Session {
    armed: LeaseStart,
    /// The names that claims of this client stand on with it.
    names: HashSet<Name>,
    /// The names on which a write of it may still arrive, and for which claim.
    doubts: HashMap<Name, ClaimId>,
    idle_since: BootTime,
    /// The last suspicion that was looked into; `None` when there is one of its own.
    cleared: Option<u64>,
}

#[derive(Default)]
struct State {
    sessions: HashMap<u128, Session>,
    /// How often the store may have got another history, in which sessions have more than the
    /// book knows.
    suspicions: u64,
    seats: HashMap<ClaimId, Seat>,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Book(Mutex<State>);

impl Book {
    pub(super) fn seat(&self, claim: ClaimId) -> Option<Seat> {
        self.0.lock().seats.get(&claim).cloned()
    }

    /// Seats a claim on a session of its ttl that is free for its name; `None` when there is none.
    pub(super) fn sit(&self, claim: &Arc<Claim>) -> Option<Seat> {
        let mut state = self.0.lock();
        let now = BootTime::now();
        let free = |session: &Session| {
            session.armed.ttl == claim.ttl
                // One that the keeper has not renewed for so long may be about to end.
                && now.saturating_since(session.armed.sent) < claim.ttl * 2 / 3
                && !session.names.contains(&claim.name)
                && !session.doubts.contains_key(&claim.name)
        };
        let sessions = state.sessions.iter().filter(|(_, session)| free(session));
        // The one in use most, so that the others can end.
        let (id, _) = sessions.max_by_key(|(_, session)| session.names.len())?;
        let id = *id;
        Some(state.seat_on(id, claim))
    }

    /// Adds a session, and seats the claim that it was made for.
    pub(super) fn sit_on(&self, id: u128, armed: LeaseStart, claim: &Arc<Claim>) -> Seat {
        let mut state = self.0.lock();
        let session = Session {
            armed,
            names: HashSet::new(),
            doubts: HashMap::new(),
            idle_since: BootTime::now(),
            cleared: Some(state.suspicions),
        };
        state.sessions.insert(id, session);
        state.seat_on(id, claim)
    }

    /// Changes a seat; `None` when it is gone.
    pub(super) fn change<T>(
        &self,
        claim: ClaimId,
        change: impl FnOnce(&mut Seat) -> T,
    ) -> Option<T> {
        self.0.lock().seats.get_mut(&claim).map(change)
    }

    /// Says that a write is sent for a claim, and with it for so many others that wait for the
    /// same on the same line.
    pub(super) fn begin(&self, claim: ClaimId, others: usize) -> Begun {
        let mut state = self.0.lock();
        let Some(first) = state.seats.get(&claim) else {
            return Begun::Gone;
        };
        if first.stage != Stage::Waiting {
            return Begun::Settled;
        }
        let asked = Arc::clone(&first.claim);
        let alike = |seat: &&Seat| {
            let other = &seat.claim;
            other.id != claim
                && seat.stage == Stage::Waiting
                && !seat.evicted
                && (other.ask, &other.name) == (asked.ask, &asked.name)
        };
        let others = match others {
            0 => Vec::new(),
            most => {
                let alike = state.seats.values().filter(alike);
                alike.take(most).map(|seat| seat.claim.id).collect()
            }
        };
        let now = BootTime::now();
        let begin = |claim: ClaimId| {
            let seat = state.seats.get_mut(&claim)?;
            (seat.stage, seat.tried) = (Stage::Trying, now);
            Some(seat.clone())
        };
        Begun::For(
            [claim]
                .into_iter()
                .chain(others)
                .filter_map(begin)
                .collect(),
        )
    }

    /// Says what became of the write that another claim sent for a seat.
    pub(super) fn give(&self, claim: ClaimId, stage: Stage) {
        self.change(claim, |seat| {
            (seat.stage, seat.given) = (stage, matches!(stage, Stage::Held(_)));
            seat.answered.notify_waiters();
            if stage != Stage::Waiting {
                seat.gift.notify_waiters();
            }
        });
    }

    /// What was counted for a claim that another one wrote for; once.
    pub(super) fn unwrap_gift(&self, claim: ClaimId) -> Option<u64> {
        let unwrap = |seat: &mut Seat| match seat.stage {
            Stage::Held(sequence) => std::mem::take(&mut seat.given).then_some(sequence),
            _ => None,
        };
        self.change(claim, unwrap).flatten()
    }

    /// Says what became of the write that was under way for a seat.
    pub(super) fn settle(&self, claim: ClaimId, stage: Stage) {
        self.change(claim, |seat| {
            seat.stage = stage;
            seat.answered.notify_waiters();
        });
    }

    /// The seat once nothing is under way for it. A write that is older than `timeout` is answered
    /// by nobody: its runtime has ended.
    pub(super) async fn settled(&self, claim: ClaimId, timeout: Duration) -> Option<Seat> {
        let seat = self.seat(claim)?;
        if seat.stage != Stage::Trying {
            return Some(seat);
        }
        let settled = async {
            loop {
                let seat = self.seat(claim)?;
                let rung = seat.answered.notified();
                match self.seat(claim)? {
                    seat if seat.stage != Stage::Trying => return Some(seat),
                    _ => rung.await,
                }
            }
        };
        let limit = seat.tried + timeout + Duration::from_millis(50);
        match tokio::time::timeout(limit.remaining(), settled).await {
            Ok(seat) => seat,
            Err(_) => {
                self.settle(claim, Stage::Unknown);
                self.seat(claim)
            }
        }
    }

    /// Removes a seat, and remembers the doubt if a write of it may still arrive, or if it keeps
    /// a gate closed.
    pub(super) fn forget(&self, claim: ClaimId) {
        let mut state = self.0.lock();
        let Some(seat) = state.seats.remove(&claim) else {
            return;
        };
        seat.bell.notify_waiters();
        seat.answered.notify_waiters();
        state.free(&seat);
    }

    pub(super) fn armed(&self, session: u128) -> Option<LeaseStart> {
        let state = self.0.lock();
        state.sessions.get(&session).map(|session| session.armed)
    }

    /// Says that a session was renewed.
    pub(super) fn renewed(&self, session: u128, sent: BootTime) -> Option<LeaseStart> {
        let mut state = self.0.lock();
        let session = state.sessions.get_mut(&session)?;
        session.armed.sent = session.armed.sent.max(sent);
        Some(LeaseStart {
            sent,
            ttl: session.armed.ttl,
        })
    }

    /// Says that a session is over.
    pub(super) fn ended(&self, session: u128) {
        let mut state = self.0.lock();
        state.sessions.remove(&session);
        for seat in state.seats.values().filter(|seat| seat.session == session) {
            seat.bell.notify_waiters();
        }
    }

    /// Takes a session out if it has been idle for its ttl and another idle one is there.
    pub(super) fn retire(&self, session: u128) -> bool {
        let mut state = self.0.lock();
        let now = BootTime::now();
        let Some(one) = state.sessions.get(&session) else {
            return false;
        };
        let idle = |session: &Session| session.names.is_empty() && session.doubts.is_empty();
        let (ttl, mut others) = (one.armed.ttl, state.sessions.iter());
        let over = idle(one)
            && now.saturating_since(one.idle_since) > ttl
            && others.any(|(id, other)| *id != session && other.armed.ttl == ttl && idle(other));
        if over {
            state.sessions.remove(&session);
        }
        over
    }

    /// The seats on a session, and its doubts.
    pub(super) fn on(&self, session: u128) -> (Vec<Seat>, Vec<(Name, ClaimId)>) {
        let state = self.0.lock();
        let seats = state.seats.values().filter(|seat| seat.session == session);
        let doubts = state.sessions.get(&session).map(|session| &session.doubts);
        let doubts = doubts.into_iter().flatten();
        (
            seats.cloned().collect(),
            doubts.map(|(name, claim)| (name.clone(), *claim)).collect(),
        )
    }

    /// Says that sessions, or this one, may have more in the store than the book knows.
    pub(super) fn suspect(&self, session: Option<u128>) {
        let mut state = self.0.lock();
        match session {
            None => state.suspicions += 1,
            Some(one) => {
                if let Some(one) = state.sessions.get_mut(&one) {
                    one.cleared = None;
                }
            }
        }
    }

    /// The suspicion about a session that is to be looked into.
    pub(super) fn suspicion(&self, session: u128) -> Option<u64> {
        let state = self.0.lock();
        let session = state.sessions.get(&session)?;
        (session.cleared != Some(state.suspicions)).then_some(state.suspicions)
    }

    /// Says that a suspicion about a session was looked into.
    pub(super) fn cleared(&self, session: u128, suspicion: u64) {
        if let Some(session) = self.0.lock().sessions.get_mut(&session) {
            session.cleared = Some(suspicion);
        }
    }

    /// Takes all sessions out.
    pub(super) fn close(&self) -> Vec<u128> {
        let mut state = self.0.lock();
        state.seats.clear();
        state.sessions.drain().map(|(id, _)| id).collect()
    }

    /// How long a session of this age is sure to live.
    pub(super) fn is_due(&self, session: u128) -> bool {
        self.armed(session)
            .is_none_or(|armed| (armed.sent + armed.ttl).has_passed())
    }
}

impl State {
    fn seat_on(&mut self, id: u128, claim: &Arc<Claim>) -> Seat {
        let seat = Seat {
            claim: Arc::clone(claim),
            session: id,
            stage: Stage::Waiting,
            tried: BootTime::PAST,
            watched: None,
            closed: None,
            given: false,
            waited: false,
            amended: false,
            evicted: false,
            bell: Arc::default(),
            answered: Arc::default(),
            gift: Arc::default(),
        };
        if let Some(session) = self.sessions.get_mut(&id) {
            session.names.insert(claim.name.clone());
        }
        self.seats.insert(claim.id, seat.clone());
        seat
    }

    fn free(&mut self, seat: &Seat) {
        if let Some(session) = self.sessions.get_mut(&seat.session) {
            session.names.remove(&seat.claim.name);
            session.idle_since = BootTime::now();
            let closed = seat.stage == Stage::Waiting && seat.closed.is_some();
            if closed || matches!(seat.stage, Stage::Trying | Stage::Unknown) {
                session
                    .doubts
                    .insert(seat.claim.name.clone(), seat.claim.id);
            }
        }
    }
}

/// For a wait that is bounded both by the caller and by how long one query may sleep.
pub(super) fn nap(until: BootTime, most: Duration) -> Duration {
    until.remaining().min(most)
}
