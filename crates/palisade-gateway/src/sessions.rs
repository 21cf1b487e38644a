//! `Sessions`: all sessions of this gateway, and how it drains.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use palisade::engine::ClaimId;
use palisade::{BootTime, Client};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::json;

use crate::access::{Principal, hash, secret};
use crate::audit::Audit;
use crate::claim::{Order, Stage};
use crate::limits::Counters;
use crate::problem::Problem;
use crate::session::Session;

/// The most ended sessions of a principal that are remembered, some 100 bytes each; of more, the
/// oldest are forgotten.
const REMEMBERED: usize = 10_000;
/// How long claims that only wait may take to leave their lines when the gateway ends at once.
const LEAVE_TIME: Duration = Duration::from_secs(1);

/// The reason for the end of a session whose client sent nothing: its holds are lost.
const EXPIRED: &str = "expired";

/// See the module's documentation.
pub(crate) struct Sessions {
    by_key: Mutex<HashMap<[u8; 32], Arc<Session>>>,
    ended: Mutex<Ended>,
    pub(crate) counters: Counters,
    audit: Audit,
    draining: AtomicBool,
    frozen: AtomicBool,
}

/// Ended sessions, and until when they are remembered, which is for a ttl: a delayed copy of the
/// request that opened one must not open another.
#[derive(Default)]
struct Ended {
    until: HashMap<[u8; 32], BootTime>,
    /// In the order of their ends.
    of: HashMap<String, VecDeque<[u8; 32]>>,
}

/// A hold that stays when a gateway ends at once.
#[derive(Debug, Clone, Serialize)]
pub struct Stays {
    /// The lock.
    pub name: String,
    /// The engine's id of the claim.
    pub claim: String,
    /// The principal that it belongs to.
    pub principal: String,
    /// When its lease ends at the latest, as RFC 3339.
    pub until: String,
}

impl Sessions {
    pub(crate) fn new(counters: Counters, audit: Audit) -> Self {
        Self {
            by_key: Mutex::default(),
            ended: Mutex::default(),
            counters,
            audit,
            draining: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
        }
    }

    /// Opens a session, or returns the one that this secret has already opened.
    pub(crate) fn open(
        self: &Arc<Self>,
        principal: &Arc<Principal>,
        client: &Client,
        ttl: Duration,
        chosen: Option<String>,
    ) -> Result<(Arc<Session>, String), Problem> {
        let secret = chosen.unwrap_or_else(secret);
        let key = hash(&secret);
        let mut sessions = self.by_key.lock();
        if let Some(known) = sessions.get(&key) {
            if known.has_ended() {
                return Err(Problem::no_session());
            }
            if known.principal.name != principal.name || known.ttl != ttl {
                return Err(Problem::id_reused(
                    "this secret has opened another session; choose 256 random bits",
                ));
            }
            return Ok((Arc::clone(known), secret));
        }
        let remembered = self.ended.lock().until.get(&key).copied();
        if remembered.is_some_and(|until| !until.has_passed()) {
            return Err(Problem::no_session());
        }
        if self.is_draining() {
            return Err(Problem::draining());
        }
        let own = |session: &&Arc<Session>| session.principal.name == principal.name;
        self.counters
            .check_sessions(sessions.values().filter(own).count())?;
        let session = Arc::new(Session::new(secret.clone(), principal, ttl, client));
        sessions.insert(session.key, Arc::clone(&session));
        let (all, watched) = (Arc::clone(self), Arc::clone(&session));
        tokio::spawn(async move {
            watched.expired().await;
            all.end(&watched, EXPIRED).await;
        });
        Ok((session, secret))
    }

    /// The session of this secret, if it belongs to this principal.
    pub(crate) fn find(
        &self,
        principal: &Principal,
        secret: &str,
    ) -> Result<Arc<Session>, Problem> {
        let sessions = self.by_key.lock();
        sessions
            .get(&hash(secret))
            .filter(|session| session.principal.name == principal.name && !session.has_ended())
            .cloned()
            .ok_or_else(Problem::no_session)
    }

    /// Ends a session and releases all its claims. Once begun it must be finished: don't call it
    /// where the request may be dropped.
    pub(crate) async fn end(&self, session: &Arc<Session>, why: &str) {
        if !session.close() {
            return;
        }
        let claims = session.live().len();
        session.end_all(why == EXPIRED).await;
        self.remember(session);
        self.by_key.lock().remove(&session.key);
        let (id, principal) = (&session.id, &session.principal.name);
        let details = json!({"session": id, "principal": principal, "why": why, "claims": claims});
        self.audit.tell("session_ended", details);
    }

    fn remember(&self, session: &Session) {
        let mut ended = self.ended.lock();
        let Ended { until, of } = &mut *ended;
        let own = of.entry(session.principal.name.clone()).or_default();
        // Not in order of time, since their ttls differ.
        while let Some(oldest) = own.front()
            && (own.len() >= REMEMBERED || until.get(oldest).is_none_or(|end| end.has_passed()))
        {
            until.remove(oldest);
            own.pop_front();
        }
        own.push_back(session.key);
        until.insert(session.key, BootTime::now() + session.ttl);
    }

    /// Records that an operator took away a claim, given by the engine's id.
    pub(crate) fn taken(&self, id: ClaimId, stage: &Stage) {
        let sessions: Vec<_> = self.by_key.lock().values().cloned().collect();
        sessions.iter().for_each(|session| session.taken(id, stage));
    }

    /// Ends all remaining sessions.
    pub(crate) async fn end_all(&self, why: &str) {
        let left: Vec<_> = self.by_key.lock().values().cloned().collect();
        futures_util::future::join_all(left.iter().map(|session| self.end(session, why))).await;
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Opens no more sessions.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Stops extending: everything ends with the last promise.
    pub(crate) fn freeze(&self) {
        self.frozen.store(true, Ordering::Release);
    }

    /// Ends without waiting for anybody: nothing is promised any more, claims that only wait leave
    /// their lines, and the rest is left to its leases, since clients rely on it.
    pub(crate) async fn leave_at_once(&self) -> Vec<Stays> {
        self.drain();
        self.freeze();
        let sessions: Vec<_> = self.by_key.lock().values().cloned().collect();
        let live = || {
            let all = sessions.iter();
            all.flat_map(|session| {
                session
                    .live()
                    .into_iter()
                    .map(move |claim| (session, claim))
            })
        };
        let left = live().filter(|(_, claim)| !claim.is_held());
        let left = left.map(|(_, claim)| async move {
            claim.order(Order::GiveUp);
            claim.settled(BootTime::now() + LEAVE_TIME).await;
        });
        futures_util::future::join_all(left).await;
        let stay = live().filter_map(|(session, claim)| {
            let until = claim.believed_until(session.margin())?;
            let until = SystemTime::now() + until.remaining();
            Some(Stays {
                name: claim.asked.name.to_string(),
                claim: claim.claim.to_string(),
                principal: session.principal.name.clone(),
                until: humantime::format_rfc3339_millis(until).to_string(),
            })
        });
        stay.collect()
    }

    /// Keeps alive a session that has sent a request. Returns until when its claims may be kept;
    /// `None` if nothing is extended any more.
    ///
    /// # Errors
    /// When the session has ended.
    pub(crate) fn extend(
        &self,
        session: &Session,
        arrival: BootTime,
    ) -> Result<Option<BootTime>, Problem> {
        if !self.frozen.load(Ordering::Acquire) {
            return session.extend(arrival).map(Some);
        }
        if session.has_ended() {
            Err(Problem::no_session())
        } else {
            Ok(None)
        }
    }

    /// Whether a session may make a new claim: while draining, only a session that holds something.
    pub(crate) fn may_claim(&self, session: &Session) -> bool {
        !self.is_draining() || session.live().iter().any(|claim| claim.is_held())
    }

    /// How many claims are in a line, or may be.
    pub(crate) fn live(&self) -> usize {
        let sessions: Vec<_> = self.by_key.lock().values().cloned().collect();
        sessions.iter().map(|session| session.live().len()).sum()
    }

    /// The sessions of this principal, or all of them if it may see everything; at most this many.
    pub(crate) fn seen_by(&self, principal: &Principal, count: usize) -> Vec<Arc<Session>> {
        let all = principal.may_see("");
        let sessions = self.by_key.lock();
        let seen = |session: &&Arc<Session>| all || session.principal.name == principal.name;
        let mut seen: Vec<_> = sessions.values().filter(seen).cloned().collect();
        seen.sort_by(|one, other| one.id.cmp(&other.id));
        seen.truncate(count);
        seen
    }

    /// How many sessions there are.
    pub(crate) fn count(&self) -> usize {
        self.by_key.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Access;
    use crate::access::Door;
    use crate::config::Limits;

    /// Whatever its ttl was.
    #[tokio::test]
    async fn a_session_that_was_closed_is_not_kept() {
        let client = palisade::connect("memory:").await.unwrap();
        let audit = Audit::to(std::io::sink());
        let sessions = Arc::new(Sessions::new(Counters::new(Limits::default()), audit));
        let local = Access::local(None, true)
            .principal(Door::Port, None)
            .unwrap();
        let day = Duration::from_secs(24 * 3600);
        let (session, secret) = sessions.open(&local, &client, day, None).unwrap();
        tokio::task::yield_now().await;
        sessions.end(&session, "closed").await;
        assert!(sessions.find(&local, &secret).is_err());
        let kept = Arc::downgrade(&session);
        drop(session);
        let until = BootTime::now() + Duration::from_secs(20);
        while kept.strong_count() > 0 {
            assert!(!until.has_passed(), "it stays until its ttl has passed");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // A copy of the request that opened it opens no other.
        assert!(sessions.open(&local, &client, day, Some(secret)).is_err());
        for _ in 0..REMEMBERED + 10 {
            let (session, _) = sessions.open(&local, &client, day, None).unwrap();
            sessions.end(&session, "closed").await;
        }
        let ended = sessions.ended.lock();
        assert_eq!(
            (ended.until.len(), ended.of["local"].len()),
            (REMEMBERED, REMEMBERED)
        );
    }
}
