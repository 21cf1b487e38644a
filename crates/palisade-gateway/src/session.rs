//! `Session`: the claims of one client, which it keeps alive by naming them.
//!
//! A session is identified by the hash of its secret and belongs to the principal that opened it.
//! It ends, with all its claims, when its client has sent nothing for a ttl. Code that ends it
//! closes it first: a request that arrives too late is refused, and gets no promise.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use palisade::engine::ClaimId;
use palisade::{BootTime, Client};
use parking_lot::Mutex;
use ring::digest::{Context, SHA256};
use tokio::sync::{Notify, broadcast, oneshot};

use crate::access::{Principal, hash, hex};
use crate::claim::{Asked, Claim, Order, Stage};
use crate::limits::Counted;
use crate::problem::Problem;

/// How many events of a session are buffered for a slow reader; beyond that it sees a gap, which a
/// keep-alive fills.
const EVENTS: usize = 64;

/// No request waits longer, whatever its ttl: load balancers cut connections after a minute.
const LONGEST_WAIT: Duration = Duration::from_secs(50);

/// A change of a claim, for its session's events.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) id: String,
    pub(crate) state: &'static str,
}

/// See the module's documentation.
pub(crate) struct Session {
    /// The public id; it grants no access.
    pub(crate) id: String,
    pub(crate) principal: Arc<Principal>,
    pub(crate) ttl: Duration,
    pub(crate) key: [u8; 32],
    secret: String,
    /// The client of this session: its agents belong to this session only.
    pub(crate) client: Client,
    end: Mutex<End>,
    closed: Notify,
    claims: Mutex<Claims>,
    pub(crate) changes: broadcast::Sender<Change>,
}

/// When a session ends.
struct End {
    at: BootTime,
    /// Whether it has ended; then nothing extends it.
    closed: bool,
}

/// The claims of a session.
#[derive(Default)]
struct Claims {
    /// Those that are in a line, or possibly so, by their clients' ids.
    live: HashMap<String, Arc<Claim>>,
    /// Those that are over, by the hashes of their ids. While one is remembered, a delayed copy of a
    /// request does not revive it. There may be very many, so each is small.
    over: HashMap<Digest, Over>,
    /// When they may be forgotten, the earliest first.
    forget: VecDeque<(BootTime, Digest)>,
}

type Digest = [u8; 16];

/// A claim of a session.
#[derive(Clone)]
pub(crate) enum Known {
    Live(Arc<Claim>),
    Over(Stage),
}

/// How a claim ended: most have nothing to tell.
enum Ending {
    Released,
    Busy,
    Told(Box<Stage>),
}

/// What is remembered of a claim that is over.
struct Over {
    how: Ending,
    /// `None` if it was released before it arrived: any request for it is over.
    asked: Option<Digest>,
    _counted: Counted,
}

impl Session {
    pub(crate) fn new(
        secret: String,
        principal: &Arc<Principal>,
        ttl: Duration,
        client: &Client,
    ) -> Self {
        Self {
            id: hex(&hash(&format!("id {secret}"))[..8]),
            principal: Arc::clone(principal),
            ttl,
            key: hash(&secret),
            secret,
            client: client.with_own_agents(),
            end: Mutex::new(End {
                at: BootTime::now() + ttl,
                closed: false,
            }),
            closed: Notify::new(),
            claims: Mutex::default(),
            changes: broadcast::channel(EVENTS).0,
        }
    }

    /// Extends the session, unless it has ended.
    pub(crate) fn extend(&self, arrival: BootTime) -> Result<BootTime, Problem> {
        let mut end = self.end.lock();
        if end.closed || end.at.has_passed() {
            return Err(Problem::no_session());
        }
        end.at = end.at.max(arrival + self.ttl);
        Ok(end.at)
    }

    pub(crate) fn has_ended(&self) -> bool {
        let end = self.end.lock();
        end.closed || end.at.has_passed()
    }

    /// How long it lasts if its client sends nothing.
    pub(crate) fn remaining(&self) -> Duration {
        self.end.lock().at.remaining()
    }

    /// Closes it; returns whether it was open.
    pub(crate) fn close(&self) -> bool {
        let was_open = !std::mem::replace(&mut self.end.lock().closed, true);
        // One task waits for this, and it keeps the session in memory.
        self.closed.notify_one();
        was_open
    }

    /// Resolves when its client has sent nothing for a ttl, or it was closed.
    pub(crate) async fn expired(&self) {
        loop {
            let left = {
                let end = self.end.lock();
                if end.closed {
                    return;
                }
                end.at.remaining()
            };
            if left.is_zero() {
                return;
            }
            let _ = tokio::time::timeout(left, self.closed.notified()).await;
        }
    }

    /// The longest that a request may wait, so that a grant never arrives expired.
    pub(crate) fn longest_wait(&self) -> Duration {
        (self.ttl / 3).min(LONGEST_WAIT)
    }

    /// Promises a claim: how long the client may rely on it, counted from `arrival`.
    pub(crate) fn promise(&self, claim: &Claim, arrival: BootTime) -> Duration {
        claim.promise(arrival, self.margin())
    }

    /// The margin that the library takes of a ttl.
    pub(crate) fn margin(&self) -> Duration {
        (self.ttl / 10)
            .max(Duration::from_millis(50))
            .min(self.ttl / 3)
    }

    /// The engine's id of a claim. It does not reveal the secret, and differs in each session.
    pub(crate) fn claim_id(&self, id: &str) -> ClaimId {
        let mut context = Context::new(&SHA256);
        context.update(self.secret.as_bytes());
        context.update(b"\0");
        context.update(id.as_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&context.finish().as_ref()[..16]);
        ClaimId(u128::from_be_bytes(bytes))
    }

    pub(crate) fn claim(&self, id: &str) -> Option<Known> {
        self.claims.lock().get(id)
    }

    /// The claim with this id, or the one that `start` creates.
    ///
    /// # Errors
    /// When the id belongs to another claim, when the session has ended, and those of `start`.
    pub(crate) fn claim_or_start(
        &self,
        id: &str,
        asked: &Asked,
        start: impl FnOnce() -> Result<Arc<Claim>, Problem>,
    ) -> Result<Known, Problem> {
        let mut claims = self.claims.lock();
        claims.forget_old();
        match claims.get_for(id, asked) {
            Some(Some(known)) => Ok(known),
            Some(None) => Err(Problem::id_reused(
                "this id stands for another claim of this session",
            )),
            // Code that ends the session closes it before it reads the claims.
            None if self.has_ended() => Err(Problem::no_session()),
            None => {
                let started = start()?;
                claims.live.insert(id.to_owned(), Arc::clone(&started));
                Ok(Known::Live(started))
            }
        }
    }

    /// Remembers that a claim is over.
    pub(crate) fn bury(&self, claim: &Claim, stage: &Stage, counted: Counted) {
        let over = Over {
            how: Ending::of(stage),
            asked: Some(digest_of(&claim.asked)),
            _counted: counted,
        };
        let mut claims = self.claims.lock();
        claims.live.remove(&claim.id);
        claims.remember(digest(&claim.id), over, self.ttl);
    }

    /// Remembers a release that arrived before its claim, unless the claim has arrived by now.
    pub(crate) fn left_before(&self, id: &str, counted: Counted) {
        let over = Over {
            how: Ending::Released,
            asked: None,
            _counted: counted,
        };
        let mut claims = self.claims.lock();
        if claims.get(id).is_none() {
            claims.remember(digest(id), over, self.ttl);
        }
    }

    /// Records that an operator took away a claim, given by the engine's id: the next request
    /// learns of it, even if the library does not know yet.
    pub(crate) fn taken(&self, id: ClaimId, stage: &Stage) {
        let mut live = self.live().into_iter();
        if let Some(claim) = live.find(|claim| claim.claim == id)
            && claim.take(stage)
        {
            let (id, state) = (claim.id.clone(), stage.word());
            // Nobody may be reading.
            let _ = self.changes.send(Change { id, state });
        }
    }

    /// The claims that are in a line, or may be.
    pub(crate) fn live(&self) -> Vec<Arc<Claim>> {
        self.claims.lock().live.values().cloned().collect()
    }

    /// Gives everything up, or waits until it has expired: no claim lasts longer than its session.
    pub(crate) async fn end_all(&self, expired: bool) {
        let claims = self.live();
        let released = claims.iter().map(|claim| async {
            if !expired {
                let (answer, answered) = oneshot::channel();
                claim.order(Order::Release(answer));
                let _ = answered.await;
            }
            claim.over().await;
        });
        futures_util::future::join_all(released).await;
    }
}

impl Claims {
    fn get(&self, id: &str) -> Option<Known> {
        if let Some(claim) = self.live.get(id) {
            return Some(Known::Live(Arc::clone(claim)));
        }
        let over = self.over.get(&digest(id))?;
        Some(Known::Over(over.how.stage()))
    }

    /// The claim with this id; `Some(None)` if it was requested differently.
    fn get_for(&self, id: &str, asked: &Asked) -> Option<Option<Known>> {
        if let Some(claim) = self.live.get(id) {
            let same = claim.asked == *asked;
            return Some(same.then(|| Known::Live(Arc::clone(claim))));
        }
        let over = self.over.get(&digest(id))?;
        let same = over.asked.is_none_or(|known| known == digest_of(asked));
        Some(same.then(|| Known::Over(over.how.stage())))
    }

    /// Remembers a claim that is over for `ttl`.
    fn remember(&mut self, id: Digest, over: Over, ttl: Duration) {
        self.forget_old();
        self.forget.push_back((BootTime::now() + ttl, id));
        self.over.insert(id, over);
    }

    /// Forgets claims that have been over for a ttl.
    fn forget_old(&mut self) {
        while let Some((until, id)) = self.forget.front()
            && until.has_passed()
        {
            self.over.remove(id);
            self.forget.pop_front();
        }
        // After a burst, so that a long session does not keep its memory.
        if self.over.capacity() > 1024 && self.over.len() < self.over.capacity() / 8 {
            self.over.shrink_to(2 * self.over.len());
            self.forget.shrink_to(2 * self.forget.len());
        }
    }
}

impl Ending {
    fn of(stage: &Stage) -> Self {
        match stage {
            Stage::Released => Self::Released,
            Stage::Busy => Self::Busy,
            told => Self::Told(Box::new(told.clone())),
        }
    }

    fn stage(&self) -> Stage {
        match self {
            Self::Released => Stage::Released,
            Self::Busy => Stage::Busy,
            Self::Told(told) => Stage::clone(told),
        }
    }
}

/// A short hash.
fn digest(text: &str) -> Digest {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash(text)[..16]);
    bytes
}

/// A short hash that distinguishes a request from a different one.
fn digest_of(asked: &Asked) -> Digest {
    digest(&format!("{asked:?}"))
}
