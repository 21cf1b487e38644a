//! `Session`: the claims of one client, which it keeps alive by naming them.
//!
//! A session is known by the hash of its secret and belongs to the principal who opened it. It
//! ends, and with it all its claims, when its client has not been heard of for a ttl.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use palisade::BootTime;
use palisade::engine::ClaimId;
use parking_lot::Mutex;
use ring::digest::{Context, SHA256};
use serde_json::json;
use tokio::sync::{broadcast, oneshot};

use crate::access::{Principal, hash, hex, secret};
use crate::audit::Audit;
use crate::claim::{Claim, Order, Stage};
use crate::config::Limits;
use crate::problem::Problem;

/// How many events of a session are kept for a reader that is slow; after that it has gaps, which
/// a keep-alive fills.
const EVENTS: usize = 64;

/// A change of a claim, for its session's events.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) id: String,
    pub(crate) state: &'static str,
}

/// See the module's text.
pub(crate) struct Session {
    /// Public: it opens nothing.
    pub(crate) id: String,
    pub(crate) principal: Arc<Principal>,
    pub(crate) ttl: Duration,
    key: [u8; 32],
    secret: String,
    end: Mutex<BootTime>,
    pub(crate) claims: Mutex<HashMap<String, Arc<Claim>>>,
    pub(crate) changes: broadcast::Sender<Change>,
}

impl Session {
    /// Moves the end of the session, and of those of its claims that a request names.
    pub(crate) fn extend(&self, arrival: BootTime) -> BootTime {
        let mut end = self.end.lock();
        *end = (*end).max(arrival + self.ttl);
        *end
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.end.lock().has_passed()
    }

    /// The longest that a request may wait, so that a grant never arrives expired.
    pub(crate) fn longest_wait(&self) -> Duration {
        (self.ttl / 3).min(LONGEST_WAIT)
    }

    /// Until when the client may believe in a claim, counted from `arrival`.
    pub(crate) fn promise(&self, claim: &Claim, arrival: BootTime) -> Duration {
        let margin = (self.ttl / 10)
            .max(Duration::from_millis(50))
            .min(self.ttl / 3);
        let by_session = claim
            .until()
            .saturating_since(arrival)
            .saturating_sub(margin);
        let by_engine = claim.deadline().saturating_since(arrival);
        by_session.min(by_engine)
    }

    /// The engine's id of a claim. It tells nobody the secret, and is another in each session.
    pub(crate) fn claim_id(&self, id: &str) -> ClaimId {
        let mut context = Context::new(&SHA256);
        context.update(self.secret.as_bytes());
        context.update(b"\0");
        context.update(id.as_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&context.finish().as_ref()[..16]);
        ClaimId(u128::from_be_bytes(bytes))
    }

    pub(crate) fn claim(&self, id: &str) -> Option<Arc<Claim>> {
        self.claims.lock().get(id).cloned()
    }

    /// Forgets claims that have been over for a ttl: until then a delayed copy revives nothing.
    pub(crate) fn prune(&self) {
        let ttl = self.ttl;
        self.claims.lock().retain(|_, claim| {
            let over = *claim.over_since.lock();
            over.is_none_or(|since| !(since + ttl).has_passed())
        });
    }

    /// How many of its claims are in a line, or may be.
    pub(crate) fn live(&self) -> usize {
        let claims = self.claims.lock();
        claims
            .values()
            .filter(|claim| !claim.stage().is_over())
            .count()
    }

    /// Releases everything.
    async fn release_all(&self) {
        let claims: Vec<_> = self.claims.lock().values().cloned().collect();
        let released = claims.iter().map(|claim| async {
            let (answer, answered) = oneshot::channel();
            claim.order(Order::Release(answer)).await;
            let _ = answered.await;
            claim.over().await;
        });
        futures_util::future::join_all(released).await;
    }
}

/// No request waits longer, whatever its ttl: balancers cut after a minute.
const LONGEST_WAIT: Duration = Duration::from_secs(50);

/// The sessions of this gateway.
pub(crate) struct Sessions {
    by_key: Mutex<HashMap<[u8; 32], Arc<Session>>>,
    limits: Limits,
    audit: Audit,
    /// What each principal has now.
    counts: Mutex<HashMap<String, Counts>>,
    draining: AtomicBool,
    frozen: AtomicBool,
}

impl Sessions {
    pub(crate) fn new(limits: Limits, audit: Audit) -> Self {
        Self {
            by_key: Mutex::default(),
            limits,
            audit,
            counts: Mutex::default(),
            draining: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
        }
    }

    /// Opens a session, or answers with the one that this secret has opened already.
    pub(crate) fn open(
        self: &Arc<Self>,
        principal: &Arc<Principal>,
        ttl: Duration,
        chosen: Option<String>,
    ) -> Result<(Arc<Session>, String), Problem> {
        if self.is_draining() {
            return Err(Problem::draining());
        }
        let secret = chosen.unwrap_or_else(secret);
        let key = hash(&secret);
        let mut sessions = self.by_key.lock();
        if let Some(known) = sessions.get(&key).filter(|known| !known.has_ended()) {
            if known.principal.name != principal.name || known.ttl != ttl {
                let detail = "this secret has opened another session; choose 256 random bits";
                return Err(Problem::new(
                    hyper::StatusCode::CONFLICT,
                    "id_reused",
                    detail,
                ));
            }
            return Ok((Arc::clone(known), secret));
        }
        let own = |session: &&Arc<Session>| session.principal.name == principal.name;
        if sessions.values().filter(own).count() >= self.limits.sessions {
            return Err(Problem::too_many("sessions", self.limits.sessions));
        }
        let session = Arc::new(Session {
            id: hex(&hash(&format!("id {secret}"))[..8]),
            principal: Arc::clone(principal),
            ttl,
            key,
            secret: secret.clone(),
            end: Mutex::new(BootTime::now() + ttl),
            claims: Mutex::default(),
            changes: broadcast::channel(EVENTS).0,
        });
        sessions.insert(key, Arc::clone(&session));
        tokio::spawn(Arc::clone(self).watch_over(Arc::clone(&session)));
        Ok((session, secret))
    }

    /// Ends a session whose client was not heard of.
    async fn watch_over(self: Arc<Self>, session: Arc<Session>) {
        loop {
            let left = session.end.lock().remaining();
            if left.is_zero() {
                break;
            }
            tokio::time::sleep(left).await;
        }
        self.end(&session, "expired").await;
    }

    /// The session of this secret, if it is this principal's.
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

    /// Ends a session and releases all that it has.
    pub(crate) async fn end(&self, session: &Session, why: &str) {
        if self.by_key.lock().remove(&session.key).is_none() {
            return;
        }
        *session.end.lock() = BootTime::PAST;
        let claims = session.live();
        session.release_all().await;
        let (id, principal) = (&session.id, &session.principal.name);
        let details = json!({"session": id, "principal": principal, "why": why, "claims": claims});
        self.audit.tell("session_ended", details);
    }

    /// Counts a claim until the answer is dropped; refuses a principal that has too many.
    pub(crate) fn count_claim(&self, principal: &Principal) -> Result<Counted, Problem> {
        let mut counts = self.counts.lock();
        let count = &counts.entry(principal.name.clone()).or_default().claims;
        Counted::below(count, self.limits.claims)
            .ok_or_else(|| Problem::too_many("claims", self.limits.claims))
    }

    /// Counts a request that waits until the answer is dropped.
    pub(crate) fn count_waiting(&self, principal: &Principal) -> Result<Counted, Problem> {
        let mut counts = self.counts.lock();
        let count = &counts.entry(principal.name.clone()).or_default().waiting;
        Counted::below(count, self.limits.waiting)
            .ok_or_else(|| Problem::too_many("waiting requests", self.limits.waiting))
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Opens no more sessions.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Extends nothing any more: everything ends with the last promise.
    pub(crate) fn freeze(&self) {
        self.frozen.store(true, Ordering::Release);
    }

    /// Keeps a session alive that a request has arrived from. Answers until when its claims may
    /// be kept; `None` when nothing is extended any more.
    pub(crate) fn extend(&self, session: &Session, arrival: BootTime) -> Option<BootTime> {
        (!self.frozen.load(Ordering::Acquire)).then(|| session.extend(arrival))
    }

    /// How many claims are in a line, or may be.
    pub(crate) fn live(&self) -> usize {
        let sessions = self.by_key.lock();
        sessions.values().map(|session| session.live()).sum()
    }

    /// How many sessions there are.
    pub(crate) fn count(&self) -> usize {
        self.by_key.lock().len()
    }
}

#[derive(Default)]
struct Counts {
    claims: Arc<AtomicUsize>,
    waiting: Arc<AtomicUsize>,
}

/// Something that is counted until this is dropped.
pub(crate) struct Counted(Arc<AtomicUsize>);

impl Counted {
    /// One more, unless there are `limit`. The caller holds the lock of all counts.
    fn below(count: &Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        if count.load(Ordering::Acquire) >= limit {
            return None;
        }
        count.fetch_add(1, Ordering::AcqRel);
        Some(Self(Arc::clone(count)))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Tells a session's readers of a change.
pub(crate) fn tell(changes: &broadcast::Sender<Change>, claim: &Claim, stage: &Stage) {
    // Nobody may be reading.
    let _ = changes.send(Change {
        id: claim.id.clone(),
        state: stage.word(),
    });
}
