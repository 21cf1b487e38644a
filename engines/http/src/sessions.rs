//! `Sessions`: the sessions of this client, one for each ttl, and the claims in each.
//!
//! Invariant: a claim is in the table from before its enter is sent until it is known to be over,
//! so that a leave finds its session. A claim that was left before it was entered is remembered as
//! such. A session that its gateway no longer knows is not used for new claims; its claims are not
//! known to be over before their own deadlines.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use reqwest::header::HeaderValue;
use tokio::sync::broadcast;

use palisade_core::BootTime;
use palisade_core::engine::{Alarm, Claim, ClaimId, LeaseStart, Ticket};
use palisade_kit::shared_sessions::Maker;
use palisade_kit::tombstones::Tombstones;

/// A session at one gateway.
pub(super) struct Session {
    /// Secret, and never shown.
    pub(super) secret: HeaderValue,
    pub(super) ttl: Duration,
    /// The URL of its gateway.
    pub(super) base: Arc<str>,
    /// When the last request that it answered was sent; it lives for a ttl from then on.
    heard: AtomicU64,
    unknown: AtomicBool,
    avoided: AtomicBool,
}

impl Session {
    pub(super) fn new(secret: &str, ttl: Duration, base: Arc<str>, sent: BootTime) -> Self {
        let mut secret = HeaderValue::from_str(secret)
            // Hex digits are always valid; no gateway knows an empty secret.
            .unwrap_or_else(|_| HeaderValue::from_static(""));
        secret.set_sensitive(true);
        Self {
            secret,
            ttl,
            base,
            heard: AtomicU64::new(sent.as_nanos()),
            unknown: AtomicBool::new(false),
            avoided: AtomicBool::new(false),
        }
    }

    /// Records that a request sent at `sent` was answered.
    pub(super) fn answered(&self, sent: BootTime) {
        self.heard.fetch_max(sent.as_nanos(), Ordering::AcqRel);
        self.avoided.store(false, Ordering::Release);
    }

    /// Records that its gateway does not know it, or that it was ended.
    pub(super) fn is_unknown(&self) {
        self.unknown.store(true, Ordering::Release);
    }

    /// Records that its gateway fails or is draining: new claims go elsewhere if they can.
    pub(super) fn avoid(&self) {
        self.avoided.store(true, Ordering::Release);
    }

    pub(super) fn is_avoided(&self) -> bool {
        self.avoided.load(Ordering::Acquire)
    }

    /// The earliest time at which its gateway ends it, unless it receives another request.
    fn ends(&self) -> BootTime {
        BootTime::from_nanos(self.heard.load(Ordering::Acquire)) + self.ttl
    }

    /// Whether it can no longer be used.
    pub(super) fn is_over(&self) -> bool {
        self.unknown.load(Ordering::Acquire) || self.ends().has_passed()
    }

    /// Whether a new claim may use it. Not shortly before its end, because the request takes time.
    fn takes(&self, ttl: Duration) -> bool {
        self.ttl == ttl
            && !self.is_over()
            && !self.is_avoided()
            && self.ends().remaining() > ttl / 2
    }

    /// The longest wait of one of its requests: no longer than its gateway allows, and short enough
    /// to notice a gateway that has stalled.
    pub(super) fn longest_wait(&self) -> Duration {
        (self.ttl / 3).min(Duration::from_secs(2))
    }
}

/// A claim and its state.
#[derive(Clone)]
pub(super) struct Member {
    pub(super) session: Arc<Session>,
    /// As in the first request.
    pub(super) queue: bool,
    /// The gateway's id of the claim; `None` before its reply.
    known_as: Option<ClaimId>,
    /// 0 until it is granted.
    pub(super) sequence: u64,
    /// When its lease ends, as far as the gateway has promised.
    pub(super) ends: BootTime,
    /// Whether a request for it is unanswered.
    pub(super) in_doubt: bool,
}

impl Member {
    /// Whether `ticket` is another incarnation of it.
    pub(super) fn is_other(&self, ticket: &Ticket) -> bool {
        let known = ticket.sequence != 0 && self.sequence != 0;
        known && ticket.sequence != self.sequence
    }
}

/// Where a claim is entered.
pub(super) enum Entry {
    In(Member),
    /// Nowhere: it was left before.
    Left,
    /// No session of its ttl is open.
    NoSession,
}

#[derive(Default)]
struct Table {
    sessions: Vec<Arc<Session>>,
    members: HashMap<ClaimId, Member>,
    tombstones: Tombstones,
}

pub(super) struct Sessions {
    table: Mutex<Table>,
    /// Newly opened sessions, for those who listen to their events.
    opened: broadcast::Sender<Arc<Session>>,
    alarms: broadcast::Sender<Alarm>,
    pub(super) maker: Maker,
}

impl Default for Sessions {
    fn default() -> Self {
        Self {
            table: Mutex::default(),
            opened: broadcast::channel(64).0,
            alarms: broadcast::channel(64).0,
            maker: Maker::default(),
        }
    }
}

/// Our id of the claim that a ticket is about, which is its id within the session.
pub(super) fn own_id(ticket: &Ticket) -> ClaimId {
    let own = ticket.native.as_ref().and_then(|id| id.parse().ok());
    own.unwrap_or(ticket.claim)
}

impl Sessions {
    /// A session that accepts new claims of this ttl.
    pub(super) fn find(&self, ttl: Duration) -> Option<Arc<Session>> {
        let table = self.table.lock();
        let found = table.sessions.iter().find(|session| session.takes(ttl));
        found.cloned()
    }

    /// Adds a new session, and forgets those that are over, with their claims.
    pub(super) fn add(&self, session: Session) -> Arc<Session> {
        let session = Arc::new(session);
        let mut table = self.table.lock();
        table
            .members
            .retain(|_, member| !(member.session.is_over() && member.ends.has_passed()));
        table.sessions.retain(|session| !session.is_over());
        table.sessions.push(Arc::clone(&session));
        // Nobody listening is no error.
        let _ = self.opened.send(Arc::clone(&session));
        session
    }

    /// Adds a claim that is about to be entered: in its own session if it was entered before, else
    /// in the one that was `opened` for it or in another of its ttl.
    ///
    /// A claim in doubt stays in its session, where a retry finds it. It moves only if that gateway
    /// is down and the client `has_others`. What it may have left behind expires after its ttl, and
    /// nobody relies on it.
    pub(super) fn enter(
        &self,
        claim: &Claim,
        opened: Option<Arc<Session>>,
        has_others: bool,
    ) -> Entry {
        let mut table = self.table.lock();
        if table.tombstones.has(claim.id, BootTime::now()) {
            return Entry::Left;
        }
        if let Some(member) = table.members.get(&claim.id) {
            let moves = member.session.is_avoided() && (!member.in_doubt || has_others);
            if !member.session.is_over() && !moves {
                return Entry::In(member.clone());
            }
        }
        let takes = |session: &&Arc<Session>| session.takes(claim.ttl);
        let found = || table.sessions.iter().find(takes).cloned();
        let Some(session) = opened.or_else(found) else {
            return Entry::NoSession;
        };
        // Its own session may just have become usable again.
        let own = table.members.get(&claim.id);
        if let Some(member) = own.filter(|member| Arc::ptr_eq(&member.session, &session)) {
            return Entry::In(member.clone());
        }
        let member = Member {
            session,
            queue: claim.queue,
            known_as: None,
            sequence: 0,
            ends: BootTime::PAST,
            in_doubt: false,
        };
        table.members.insert(claim.id, member.clone());
        Entry::In(member)
    }

    /// Records what a gateway reports about a claim in the line.
    pub(super) fn stands(
        &self,
        claim: ClaimId,
        known_as: Option<ClaimId>,
        sequence: Option<u64>,
        armed: Option<LeaseStart>,
    ) {
        if let Some(member) = self.table.lock().members.get_mut(&claim) {
            member.known_as = known_as.or(member.known_as);
            member.sequence = sequence.unwrap_or(member.sequence);
            if let Some(armed) = armed {
                member.ends = member.ends.max(armed.sent + armed.ttl);
            }
        }
    }

    /// Records that a request for a claim was not answered.
    pub(super) fn doubt(&self, claim: ClaimId) {
        if let Some(member) = self.table.lock().members.get_mut(&claim) {
            member.in_doubt = true;
        }
    }

    pub(super) fn member(&self, claim: ClaimId) -> Option<Member> {
        self.table.lock().members.get(&claim).cloned()
    }

    /// Forgets a claim that is over, or was never entered.
    pub(super) fn forget(&self, claim: ClaimId) {
        self.table.lock().members.remove(&claim);
    }

    /// Forgets a claim that was left, and remembers that it was left.
    pub(super) fn bury(&self, claim: ClaimId, ttl: Duration) {
        let mut table = self.table.lock();
        let ttl = match table.members.remove(&claim) {
            Some(member) => member.session.ttl.max(ttl),
            None => ttl,
        };
        table.tombstones.add(claim, BootTime::now(), ttl);
    }

    /// The alarms for the claims of a session, or for one of them. The keeper may still know a
    /// claim by the id of its request.
    pub(super) fn alarms(&self, session: &Arc<Session>, claim: Option<ClaimId>) -> Vec<Alarm> {
        let table = self.table.lock();
        let chosen = table.members.iter().filter(|(id, member)| {
            Arc::ptr_eq(&member.session, session) && claim.is_none_or(|claim| claim == **id)
        });
        let ids = chosen.flat_map(|(id, member)| [Some(*id), member.known_as]);
        ids.flatten().map(|id| Alarm::Lease(id.into())).collect()
    }

    /// Raises an alarm about one claim. Nobody listening is no error.
    pub(super) fn alarm(&self, session: &Arc<Session>, claim: ClaimId) {
        for alarm in self.alarms(session, Some(claim)) {
            let _ = self.alarms.send(alarm);
        }
    }

    /// The alarms that are raised here.
    pub(super) fn raised(&self) -> broadcast::Receiver<Alarm> {
        self.alarms.subscribe()
    }

    /// The current sessions, and those that are opened from now on.
    pub(super) fn listen(&self) -> (Vec<Arc<Session>>, broadcast::Receiver<Arc<Session>>) {
        let table = self.table.lock();
        (table.sessions.clone(), self.opened.subscribe())
    }

    /// Removes all sessions, and returns those that are alive.
    pub(super) fn close(&self) -> Vec<Arc<Session>> {
        let mut sessions = std::mem::take(&mut self.table.lock().sessions);
        sessions.retain(|session| !session.is_over());
        sessions
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::Name;
    use palisade_core::engine::Ask;
    use palisade_core::report::Owner;

    const TTL: Duration = Duration::from_secs(30);

    fn opened(sessions: &Sessions, sent: BootTime) -> Arc<Session> {
        sessions.add(Session::new("ab", TTL, "http://g".into(), sent))
    }

    #[test]
    fn claims_of_one_ttl_share_a_session_while_it_lives() {
        let sessions = Sessions::default();
        let now = BootTime::now();
        let old = opened(&sessions, BootTime::PAST);
        assert!(sessions.find(TTL).is_none(), "over");
        old.answered(now);
        let found = sessions.find(TTL).unwrap();
        assert!(Arc::ptr_eq(&found, &old), "heard of since");
        assert!(sessions.find(TTL * 2).is_none(), "another ttl");
        old.avoid();
        assert!(sessions.find(TTL).is_none(), "drains");
        let new = opened(&sessions, now);
        new.is_unknown();
        assert!(sessions.find(TTL).is_none(), "unknown to its gateway");
        assert!(!format!("{:?}", new.secret).contains("ab"));
    }

    fn claim() -> Claim {
        Claim {
            id: ClaimId::random(),
            name: Name::new("x").unwrap(),
            ask: Ask::Whole,
            ttl: TTL,
            queue: true,
            owner: Owner::here("me", None),
            value: None,
            renewed: true,
            at_least: Duration::ZERO,
        }
    }

    /// The session that the claim is entered in.
    fn entered(sessions: &Sessions, claim: &Claim, has_others: bool) -> Option<Arc<Session>> {
        match sessions.enter(claim, None, has_others) {
            Entry::In(member) => Some(member.session),
            Entry::Left | Entry::NoSession => None,
        }
    }

    #[test]
    fn a_claim_in_doubt_moves_only_to_another_gateway() {
        let (sessions, claim) = (Sessions::default(), claim());
        assert!(matches!(
            sessions.enter(&claim, None, true),
            Entry::NoSession
        ));
        let old = opened(&sessions, BootTime::now());
        assert!(entered(&sessions, &claim, false).is_some());
        sessions.doubt(claim.id);
        old.avoid();
        let new = opened(&sessions, BootTime::now());
        let stays = entered(&sessions, &claim, false).unwrap();
        assert!(Arc::ptr_eq(&stays, &old), "a retry finds it there");
        let moved = entered(&sessions, &claim, true).unwrap();
        assert!(Arc::ptr_eq(&moved, &new));
        assert!(!sessions.member(claim.id).unwrap().in_doubt);
        new.avoid();
        let other = Arc::new(Session::new(
            "cd",
            TTL / 2,
            "http://g".into(),
            BootTime::now(),
        ));
        let entry = sessions.enter(&claim, Some(Arc::clone(&other)), true);
        assert!(matches!(entry, Entry::In(member) if Arc::ptr_eq(&member.session, &other)));
    }

    #[test]
    fn a_claim_that_was_left_is_not_entered_and_another_incarnation_is_told() {
        let (sessions, entering) = (Sessions::default(), claim());
        let claim = entering.id;
        let session = opened(&sessions, BootTime::now());
        entered(&sessions, &entering, false).unwrap();
        let known = ClaimId::random();
        sessions.stands(claim, Some(known), Some(7), None);
        let member = sessions.member(claim).unwrap();
        let mut ticket = Ticket {
            native: Some(claim.to_string().into()),
            ..Ticket::own(entering.name.clone(), known)
        };
        assert_eq!(own_id(&ticket), claim);
        assert!(!member.is_other(&ticket));
        ticket.sequence = 6;
        assert!(member.is_other(&ticket));
        assert_eq!(sessions.alarms(&session, Some(claim)).len(), 2);
        sessions.bury(claim, TTL);
        assert!(matches!(
            sessions.enter(&entering, None, false),
            Entry::Left
        ));
        assert!(sessions.alarms(&session, None).is_empty());
    }
}
