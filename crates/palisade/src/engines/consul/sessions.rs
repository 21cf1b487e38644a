//! `Sessions`: the sessions of this client, and the claims on each.
//!
//! There is one session per ttl, and one more for each further claim on a name that another claim
//! of this client uses, because Consul grants a lock again to the session that holds it. A session
//! whose write on a name was never answered is not used for that name again, and the audit checks
//! that name.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::kv::{Op, Record, session_text};
use super::snapshot::Watch;
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::name::Name;
use crate::core::ticket::{LeaseId, LeaseStart, Ticket};

/// The progress of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It has nothing in the store, except perhaps a gate that it closed.
    Waiting,
    /// A write that would grant it the lock is in flight.
    Trying,
    /// Such a write was not answered, and may still arrive.
    Unknown,
    /// It holds, with this sequence.
    Held(u64),
}

/// A claim of this client, on its session.
#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) claim: Arc<Claim>,
    pub(super) session: u128,
    pub(super) stage: Stage,
    /// When its last write was sent.
    tried: BootTime,
    pub(super) watch: Option<Watch>,
    /// The ModifyIndex at which it closed the gate, while it waits for the readers to leave.
    pub(super) closed: Option<u64>,
    /// Whether its grant was reported to it; another claim may have written for it.
    told: bool,
    /// Whether it was reported to be waiting.
    pub(super) waited: bool,
    /// Whether its value may have been amended.
    pub(super) amended: bool,
    /// Whether an operator evicts it, as far as this client knows.
    pub(super) evicted: bool,
    /// Notified when it is removed, or when another claim wrote for it.
    pub(super) changed: Arc<Notify>,
    /// Notified when its write was answered.
    answered: Arc<Notify>,
}

impl Member {
    pub(super) fn new(claim: Arc<Claim>, session: u128) -> Self {
        Self {
            claim,
            session,
            stage: Stage::Waiting,
            tried: BootTime::PAST,
            watch: None,
            closed: None,
            told: false,
            waited: false,
            amended: false,
            evicted: false,
            changed: Arc::default(),
            answered: Arc::default(),
        }
    }

    pub(super) fn session_text(&self) -> String {
        session_text(self.session)
    }

    /// The operation that locks a key for it.
    pub(super) fn lock(&self, key: &str, flags: u64) -> Op {
        Op::claim(key, &self.session_text(), flags, &Record::of(&self.claim))
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

/// Whether a write for a claim can be sent.
pub(super) enum Begun {
    /// For these: the claim, and others that wait for the same.
    For(Vec<Member>),
    /// Another claim writes for it, or has done so.
    Settled,
    /// It was left meanwhile.
    Gone,
}

struct Session {
    armed: LeaseStart,
    /// The names that claims of this client use it for.
    names: HashSet<Name>,
    /// The names on which one of its writes may still arrive, and for which claim.
    doubts: HashMap<Name, ClaimId>,
    idle_since: BootTime,
    /// The last suspicion that was examined; `None` when the session itself is suspected.
    cleared: Option<u64>,
}

impl Session {
    fn is_idle(&self) -> bool {
        self.names.is_empty() && self.doubts.is_empty()
    }
}

#[derive(Default)]
struct State {
    sessions: HashMap<u128, Session>,
    members: HashMap<ClaimId, Member>,
    /// How often the store may have got another history, in which sessions have more than is known
    /// here.
    suspicions: u64,
}

impl State {
    fn join(&mut self, id: u128, claim: &Arc<Claim>) -> Member {
        let member = Member::new(Arc::clone(claim), id);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.names.insert(claim.name.clone());
        }
        self.members.insert(claim.id, member.clone());
        member
    }
}

#[derive(Default)]
pub(super) struct Sessions(Mutex<State>);

impl Sessions {
    pub(super) fn member(&self, claim: ClaimId) -> Option<Member> {
        self.0.lock().members.get(&claim).cloned()
    }

    /// Assigns a claim to a session of its ttl that is free for its name; `None` when there is
    /// none.
    pub(super) fn join(&self, claim: &Arc<Claim>) -> Option<Member> {
        let mut state = self.0.lock();
        let now = BootTime::now();
        let free = |session: &Session| {
            session.armed.ttl == claim.ttl
                // A session that was not renewed for that long may be about to end.
                && now.saturating_since(session.armed.sent) < claim.ttl * 2 / 3
                && !session.names.contains(&claim.name)
                && !session.doubts.contains_key(&claim.name)
        };
        let sessions = state.sessions.iter().filter(|(_, session)| free(session));
        // The most used one, so that the others can end.
        let id = *sessions.max_by_key(|(_, session)| session.names.len())?.0;
        Some(state.join(id, claim))
    }

    /// Adds a session, and assigns the claim to it that it was created for.
    pub(super) fn add(&self, id: u128, armed: LeaseStart, claim: &Arc<Claim>) -> Member {
        let mut state = self.0.lock();
        let session = Session {
            armed,
            names: HashSet::new(),
            doubts: HashMap::new(),
            idle_since: BootTime::now(),
            cleared: Some(state.suspicions),
        };
        state.sessions.insert(id, session);
        state.join(id, claim)
    }

    /// Changes a claim's entry, if it exists.
    pub(super) fn change(&self, claim: ClaimId, change: impl FnOnce(&mut Member)) {
        self.0.lock().members.get_mut(&claim).map(change);
    }

    /// Marks a claim as trying, and with it up to `others` claims that wait for the same on the
    /// same line.
    pub(super) fn begin(&self, claim: ClaimId, others: usize) -> Begun {
        let mut state = self.0.lock();
        let Some(first) = state.members.get(&claim) else {
            return Begun::Gone;
        };
        if first.stage != Stage::Waiting {
            return Begun::Settled;
        }
        let mut begun = vec![claim];
        if others > 0 {
            let alike = |member: &&Member| {
                member.claim.id != claim
                    && member.stage == Stage::Waiting
                    && !member.evicted
                    && member.claim.ask == first.claim.ask
                    && member.claim.name == first.claim.name
            };
            let others = state.members.values().filter(alike).take(others);
            begun.extend(others.map(|member| member.claim.id));
        }
        let now = BootTime::now();
        let begin = |claim: ClaimId| {
            let member = state.members.get_mut(&claim)?;
            (member.stage, member.tried) = (Stage::Trying, now);
            Some(member.clone())
        };
        Begun::For(begun.into_iter().filter_map(begin).collect())
    }

    /// Records the outcome of a claim's write, and notifies the claim if `another` claim sent the
    /// write.
    pub(super) fn settle(&self, claim: ClaimId, stage: Stage, another: bool) {
        self.change(claim, |member| {
            (member.stage, member.told) = (stage, false);
            member.answered.notify_waiters();
            if another && stage != Stage::Waiting {
                member.changed.notify_waiters();
            }
        });
    }

    /// Records that a claim keeps the gate closed. It reads again before it waits.
    pub(super) fn closed(&self, claim: ClaimId, index: u64) {
        self.change(claim, |member| {
            (member.closed, member.watch) = (Some(index), None);
        });
        self.settle(claim, Stage::Waiting, false);
    }

    /// The sequence of a claim whose grant was not reported yet; returned once.
    pub(super) fn tell(&self, claim: ClaimId) -> Option<u64> {
        match self.0.lock().members.get_mut(&claim)? {
            Member {
                stage: Stage::Held(sequence),
                told,
                ..
            } if !*told => {
                *told = true;
                Some(*sequence)
            }
            _ => None,
        }
    }

    /// The claim, once no write is in flight for it. A write older than `timeout` will not be
    /// answered, because its runtime has ended.
    pub(super) async fn settled(&self, claim: ClaimId, timeout: Duration) -> Option<Member> {
        loop {
            let member = self.member(claim)?;
            let answered = member.answered.notified();
            let member = self.member(claim)?;
            if member.stage != Stage::Trying {
                return Some(member);
            }
            let limit = member.tried + timeout + Duration::from_millis(50);
            let answer = tokio::time::timeout(limit.remaining(), answered).await;
            if answer.is_err() {
                self.change(claim, |member| {
                    if member.stage == Stage::Trying && limit.has_passed() {
                        member.stage = Stage::Unknown;
                    }
                });
            }
        }
    }

    /// Removes a claim. The name is in doubt if one of its writes may still arrive, or if it keeps
    /// a gate closed.
    pub(super) fn forget(&self, claim: ClaimId) {
        let mut state = self.0.lock();
        let Some(member) = state.members.remove(&claim) else {
            return;
        };
        member.changed.notify_waiters();
        member.answered.notify_waiters();
        if let Some(session) = state.sessions.get_mut(&member.session) {
            let name = &member.claim.name;
            session.names.remove(name);
            session.idle_since = BootTime::now();
            let in_doubt = match member.stage {
                Stage::Waiting => member.closed.is_some(),
                Stage::Trying | Stage::Unknown => true,
                Stage::Held(_) => false,
            };
            if in_doubt {
                session.doubts.insert(name.clone(), claim);
            }
        }
    }

    pub(super) fn armed(&self, session: u128) -> Option<LeaseStart> {
        let state = self.0.lock();
        state.sessions.get(&session).map(|session| session.armed)
    }

    /// Whether a session may have ended because it was not renewed for its whole ttl.
    pub(super) fn is_due(&self, session: u128) -> bool {
        let armed = self.armed(session);
        armed.is_none_or(|armed| (armed.sent + armed.ttl).has_passed())
    }

    /// Records a renewal.
    pub(super) fn renewed(&self, session: u128, sent: BootTime) -> Option<LeaseStart> {
        let mut state = self.0.lock();
        let armed = &mut state.sessions.get_mut(&session)?.armed;
        armed.sent = armed.sent.max(sent);
        Some(LeaseStart { sent, ..*armed })
    }

    /// Removes a session that has ended.
    pub(super) fn ended(&self, session: u128) {
        let mut state = self.0.lock();
        state.sessions.remove(&session);
        for member in state.members.values() {
            if member.session == session {
                member.changed.notify_waiters();
            }
        }
    }

    /// Removes a session that has been idle for its ttl, if there is another idle one.
    pub(super) fn retire(&self, session: u128) -> bool {
        let mut state = self.0.lock();
        let Some(one) = state.sessions.get(&session) else {
            return false;
        };
        let ttl = one.armed.ttl;
        let spare = |(id, other): (&u128, &Session)| {
            *id != session && other.armed.ttl == ttl && other.is_idle()
        };
        let over = one.is_idle()
            && (one.idle_since + ttl).has_passed()
            && state.sessions.iter().any(spare);
        if over {
            state.sessions.remove(&session);
        }
        over
    }

    /// The claims on a session, and the names in doubt.
    pub(super) fn on(&self, session: u128) -> (Vec<Member>, Vec<(Name, ClaimId)>) {
        let state = self.0.lock();
        let members = state.members.values();
        let members = members.filter(|member| member.session == session);
        let doubts = state.sessions.get(&session).map(|session| &session.doubts);
        let doubts = doubts.into_iter().flatten();
        let doubts = doubts.map(|(name, claim)| (name.clone(), *claim)).collect();
        (members.cloned().collect(), doubts)
    }

    /// Records that all sessions, or this one, may have more in the store than is known here.
    pub(super) fn suspect(&self, session: Option<u128>) {
        let mut state = self.0.lock();
        match session {
            None => state.suspicions += 1,
            Some(id) => {
                if let Some(session) = state.sessions.get_mut(&id) {
                    session.cleared = None;
                }
            }
        }
    }

    /// The suspicion about a session that is still to be examined.
    pub(super) fn suspicion(&self, session: u128) -> Option<u64> {
        let state = self.0.lock();
        let session = state.sessions.get(&session)?;
        (session.cleared != Some(state.suspicions)).then_some(state.suspicions)
    }

    /// Records that a suspicion about a session was examined.
    pub(super) fn cleared(&self, session: u128, suspicion: u64) {
        if let Some(session) = self.0.lock().sessions.get_mut(&session) {
            session.cleared = Some(suspicion);
        }
    }

    /// Removes all sessions.
    pub(super) fn close(&self) -> Vec<u128> {
        let mut state = self.0.lock();
        state.members.clear();
        state.sessions.drain().map(|(id, _)| id).collect()
    }
}
