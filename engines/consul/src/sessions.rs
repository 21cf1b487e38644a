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

use super::client::Committed;
use super::keys::Line;
use super::kv::{Op, Record, session_text};
use super::snapshot::{Spot, Watch};
use palisade_core::engine::{Claim, ClaimId, Entered, LeaseId, LeaseStart, Place, Ticket};
use palisade_core::{BootTime, Name, Outcome, Result};

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
    pub(super) session_text: Arc<str>,
    pub(super) stage: Stage,
    /// When its last write was sent.
    tried: BootTime,
    pub(super) watch: Option<Watch>,
    /// The ModifyIndex at which it closed the gate, while it waits for the readers to leave.
    pub(super) closed: Option<u64>,
    /// Whether another claim wrote for it, and that was not reported to it yet.
    by_another: bool,
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
    pub(super) fn new(claim: Arc<Claim>, session: u128, session_text: Arc<str>) -> Self {
        Self {
            claim,
            session,
            session_text,
            stage: Stage::Waiting,
            tried: BootTime::PAST,
            watch: None,
            closed: None,
            by_another: false,
            waited: false,
            amended: false,
            evicted: false,
            changed: Arc::default(),
            answered: Arc::default(),
        }
    }

    /// The operation that locks a key for it.
    pub(super) fn lock(&self, key: &str, flags: u64) -> Op {
        Op::claim(key, &self.session_text, flags, &Record::of(&self.claim))
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
    text: Arc<str>,
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

#[derive(Default)]
pub(super) struct Sessions(Mutex<State>);

impl Sessions {
    pub(super) fn member(&self, claim: ClaimId) -> Option<Member> {
        self.0.lock().members.get(&claim).cloned()
    }

    /// Assigns a claim to the session that was `made` for it, or to one of its ttl that is free for
    /// its name; `None` when there is none, or when the claim has a session already.
    pub(super) fn join(
        &self,
        claim: &Arc<Claim>,
        made: Option<(u128, LeaseStart)>,
    ) -> Option<Member> {
        let (state, now) = (&mut *self.0.lock(), BootTime::now());
        if state.members.contains_key(&claim.id) {
            return None;
        }
        let id = if let Some((id, armed)) = made {
            let session = Session {
                text: session_text(id).into(),
                armed,
                names: HashSet::new(),
                doubts: HashMap::new(),
                idle_since: now,
                cleared: Some(state.suspicions),
            };
            state.sessions.insert(id, session);
            id
        } else {
            let fits = |session: &Session| {
                session.armed.ttl == claim.ttl
                    // A session that was not renewed for that long may be about to end.
                    && now.saturating_since(session.armed.sent) < claim.ttl * 2 / 3
                    && !session.names.contains(&claim.name)
                    && !session.doubts.contains_key(&claim.name)
            };
            let sessions = state.sessions.iter();
            let sessions = sessions.filter(|(_, session)| fits(session));
            // The most used one, so that the others can end.
            *sessions.max_by_key(|(_, session)| session.names.len())?.0
        };
        let session = state.sessions.get_mut(&id)?;
        session.names.insert(claim.name.clone());
        let member = Member::new(Arc::clone(claim), id, Arc::clone(&session.text));
        state.members.insert(claim.id, member.clone());
        Some(member)
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
            (member.stage, member.by_another) = (stage, another);
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

    /// Records the outcome of a write of the first of `members`, which put them at this spot.
    pub(super) fn written(
        &self,
        line: &Line,
        spot: Spot,
        members: &[Member],
        written: &Result<Committed>,
    ) {
        let (pairs, failed) = match written {
            Ok(Committed::Done(pairs)) => (&pairs[..], Stage::Waiting),
            Err(error) if error.outcome() != Outcome::NotApplied => (&[][..], Stage::Unknown),
            Ok(Committed::Refused(_)) | Err(_) => (&[][..], Stage::Waiting),
        };
        for (at, member) in members.iter().enumerate() {
            let claim = member.claim.id;
            let key = spot.key(line, claim, &member.session_text);
            match pairs.iter().rev().find(|pair| pair.key == key) {
                None => self.settle(claim, failed, at > 0),
                Some(pair) if spot == Spot::Gate => self.closed(claim, pair.modify_index),
                Some(pair) => self.settle(claim, Stage::Held(pair.modify_index), at > 0),
            }
        }
    }

    /// The sequence of a claim that another claim's write granted, if that was not reported yet.
    pub(super) fn tell(&self, claim: ClaimId) -> Option<u64> {
        let mut state = self.0.lock();
        let member = state.members.get_mut(&claim)?;
        match member.stage {
            Stage::Held(sequence) if std::mem::take(&mut member.by_another) => Some(sequence),
            _ => None,
        }
    }

    /// The answer to an enter of a claim, which holds with a sequence, or waits.
    pub(super) fn entered(&self, member: &Member, held: Option<u64>) -> Entered {
        // A session that has ended meanwhile gets a lease that is over.
        let armed = self.armed(member.session).unwrap_or(LeaseStart {
            sent: BootTime::PAST,
            ttl: member.claim.ttl,
        });
        Entered::In {
            ticket: Ticket {
                sequence: held.unwrap_or(0),
                ..member.ticket()
            },
            armed,
            place: held.map_or(Place::Waiting, |sequence| Place::Held { sequence }),
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

    fn armed(&self, session: u128) -> Option<LeaseStart> {
        Some(self.0.lock().sessions.get(&session)?.armed)
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use palisade_core::engine::Ask;
    use palisade_core::engine::unreachable;
    use palisade_core::report::Owner;

    fn claim() -> Arc<Claim> {
        Arc::new(Claim {
            id: ClaimId::random(),
            name: Name::new("x").unwrap(),
            ask: Ask::Whole,
            ttl: Duration::from_secs(9),
            renewed: true,
            at_least: Duration::ZERO,
            queue: true,
            owner: Owner::here("me", None),
            value: None,
        })
    }

    fn made(id: u128) -> Option<(u128, LeaseStart)> {
        let (sent, ttl) = (BootTime::now(), Duration::from_secs(9));
        Some((id, LeaseStart { sent, ttl }))
    }

    #[test]
    fn a_claim_has_one_session_and_a_session_one_claim_of_a_name() {
        let (sessions, first, second) = (Sessions::default(), claim(), claim());
        assert!(sessions.join(&first, None).is_none(), "there is none");
        assert_eq!(sessions.join(&first, made(7)).unwrap().session, 7);
        assert!(sessions.join(&second, None).is_none(), "the name is taken");
        assert_eq!(sessions.join(&second, made(8)).unwrap().session, 8);
        // A write of it may still arrive, so the name stays taken on its session.
        assert!(matches!(sessions.begin(second.id, 0), Begun::For(_)));
        sessions.forget(second.id);
        assert!(sessions.join(&second, None).is_none(), "in doubt");
        assert_eq!(sessions.join(&second, made(9)).unwrap().session, 9);
        sessions.forget(second.id);
        assert!(sessions.join(&first, None).is_none(), "it has one");
        assert_eq!(sessions.join(&second, None).unwrap().session, 9);
    }

    #[test]
    fn a_claim_holds_waits_or_is_in_doubt_after_its_write() {
        let (sessions, claim) = (Sessions::default(), claim());
        let member = sessions.join(&claim, made(7)).unwrap();
        let line = Line {
            lock: "ns/x".to_owned(),
        };
        let lost = || unreachable("enter", "no answer");
        let pair = json!({ "Key": "ns/x", "ModifyIndex": 5 });
        let done = vec![serde_json::from_value(pair).unwrap()];
        for (written, stage) in [
            (Err(lost()), Stage::Waiting),
            (Ok(Committed::Refused(Vec::new())), Stage::Waiting),
            (Err(lost().maybe_applied()), Stage::Unknown),
            (Ok(Committed::Done(done)), Stage::Held(5)),
        ] {
            let members = std::slice::from_ref(&member);
            sessions.written(&line, Spot::Whole, members, &written);
            let now = sessions.member(claim.id).unwrap().stage;
            assert_eq!(now, stage, "{written:?}");
        }
        assert_eq!(sessions.tell(claim.id), None, "it wrote itself");
    }
}
