//! `Registry`: the claims of one client, and its sessions.
//!
//! Each claim has a session to itself, and a session that becomes free is reused for the next
//! claim. There are at most `max_connections` sessions. When all are in use, a new claim waits for
//! one in order of arrival, and fails after the request timeout. Requests that belong to no claim
//! share one session per runtime and are pipelined. Work that must go on while the caller's runtime
//! is blocked runs on the keeper's runtime.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore, broadcast};

use super::super::connect::Server;
use super::super::connection::{Listener, Notice};
use super::super::error::{self, failed};
use super::super::notify;
use super::super::schema::Schema;
use super::claim::LocalClaim;
use super::config::Config;
use super::keys::{Key, Keys};
use super::owner_record::{Fresh, record_fresh};
use super::session::{Blanks, Session};
use palisade_core::engine::{Alarm, ClaimId, Place, Settings, no_connection, rounded};
use palisade_core::{BootTime, Error, ErrorKind, Result};
use palisade_kit::tombstones::Tombstones;
use palisade_kit::{Link, Pause, PerRuntime, timed};

/// How many free sessions are kept for good, and for how long the rest are kept. A client that
/// takes many locks at once tends to do so again, and connecting costs far more than a lock.
const SPARE: usize = 2;
const LINGER: Duration = Duration::from_secs(3);

/// How long a claim that was left before it arrived is remembered. Only this client enters its
/// claims, and none of its requests is in flight for longer.
const DEPARTED: Duration = Duration::from_secs(300);

/// A session that has been free for this long has its idle timeout turned off. It is much shorter
/// than the shortest ttl, and long enough that a client that locks in a loop never pays for it.
const TIDY: Duration = Duration::from_millis(50);

pub(super) struct Registry {
    pub(super) server: Server,
    pub(super) schema: Schema,
    pub(super) keys: Keys,
    pub(super) namespace: String,
    pub(super) timeout: Duration,
    connect_timeout: Duration,
    connector: Connector,
    /// One permit for each session of a claim.
    permits: Arc<Semaphore>,
    max_connections: usize,
    /// For requests that belong to no claim.
    shared: PerRuntime<Arc<Session>>,
    /// How often in a row the server had no connection left for a claim, and the pause after that.
    refused: Mutex<(u32, Option<Pause>)>,
    /// The keeper's runtime.
    home: Mutex<Option<Handle>>,
    spare: Mutex<Spares>,
    claims: Mutex<HashMap<ClaimId, Arc<LocalClaim>>>,
    /// At most one claim of this client waits at the server for each lock.
    turns: Mutex<HashMap<Key, Weak<Turn>>>,
    departed: Mutex<Tombstones>,
    /// When the last request was sent that the server answered.
    pub(super) answered: Mutex<BootTime>,
    pub(super) fresh: Fresh,
    pub(super) alarms: broadcast::Sender<Alarm>,
}

/// The right to wait for one lock at the server.
pub(super) type Turn = tokio::sync::Mutex<()>;

/// Sessions without a claim, and since when they are free.
#[derive(Default)]
struct Spares {
    free: Vec<(Arc<Session>, BootTime)>,
    /// Whether a task looks after them.
    tidied: bool,
}

/// How a session is made.
#[derive(Clone)]
struct Connector {
    server: Server,
    schema: Schema,
    blanks: Arc<Blanks>,
    trusted: bool,
    ready: Arc<OnceCell<()>>,
    listener: Listener,
}

impl Connector {
    async fn connect(&self) -> Result<Arc<Session>> {
        let listener = Arc::clone(&self.listener);
        let connected = Session::connect(&self.server, &self.blanks, self.trusted, listener);
        let session = connected.await?;
        let client = &session.connection.client;
        self.ready
            .get_or_try_init(|| self.schema.ensure(client))
            .await?;
        Ok(Arc::new(session))
    }
}

impl Registry {
    pub(super) fn new(config: Config, settings: &Settings) -> Arc<Self> {
        Arc::new_cyclic(|registry: &Weak<Self>| {
            let registry = registry.clone();
            let connector = Connector {
                server: config.server.clone(),
                schema: config.schema.clone(),
                blanks: Arc::new(Blanks {
                    schema: config.schema.quoted(),
                    key: config.keys.sql(),
                }),
                trusted: config.trusted,
                ready: Arc::default(),
                listener: Arc::new(move |notice| {
                    if let Some(registry) = registry.upgrade() {
                        registry.hear(&notice);
                    }
                }),
            };
            let shared = connector.clone();
            Self {
                server: config.server,
                schema: config.schema,
                keys: config.keys,
                namespace: settings.namespace.clone(),
                timeout: settings.timeout,
                connect_timeout: settings.connect_timeout,
                connector,
                permits: Arc::new(Semaphore::new(config.max_connections)),
                max_connections: config.max_connections,
                shared: PerRuntime::new(settings.connect_timeout, move || {
                    let shared = shared.clone();
                    Box::pin(async move { shared.connect().await })
                })
                .full_if(error::is_full),
                refused: Mutex::default(),
                home: Mutex::default(),
                spare: Mutex::default(),
                claims: Mutex::default(),
                turns: Mutex::default(),
                departed: Mutex::default(),
                answered: Mutex::new(BootTime::PAST),
                fresh: Fresh::default(),
                alarms: broadcast::channel(256).0,
            }
        })
    }

    /// Makes the current runtime, which is the keeper's, the home of background work.
    pub(super) fn settle_here(&self) {
        *self.home.lock() = Handle::try_current().ok();
    }

    /// Where background work runs: the keeper's runtime, or the caller's before there is a keeper.
    pub(super) fn home(&self) -> Handle {
        let home = self.home.lock().clone();
        home.unwrap_or_else(Handle::current)
    }

    /// A permit for one more session of a claim.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`], not applied, when none is returned in time.
    pub(super) async fn permit(&self) -> Result<OwnedSemaphorePermit> {
        let permit = Arc::clone(&self.permits).acquire_owned();
        match tokio::time::timeout(self.timeout, permit).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => {
                let message = format!(
                    "all {} connections of this client are in use, one for each lock that is held or waited for; raise max_connections=, or use postgres:// for many locks",
                    self.max_connections
                );
                Err(Error::new(ErrorKind::Unreachable, "enter", message))
            }
        }
    }

    /// A free session, or a new one.
    ///
    /// # Errors
    /// As connecting, not applied; [`ErrorKind::Unsupported`] behind a pooler.
    pub(super) async fn session(&self) -> Result<Arc<Session>> {
        while let Some((session, since)) = self.spare.lock().free.pop() {
            if !session.is_over() && !session.usable_until(since).has_passed() {
                return Ok(session);
            }
        }
        if let Some(why) = self.refused.lock().1.as_ref().and_then(Pause::refusal) {
            return Err(why);
        }
        let limit = self.connect_timeout;
        let connected = tokio::time::timeout(limit, self.connector.connect()).await;
        let connected = connected.unwrap_or_else(|_| {
            let message = format!("no connection within {}", rounded(limit));
            Err(no_connection(message))
        });
        let mut refused = self.refused.lock();
        *refused = match &connected {
            Err(why) if error::is_full(why) => {
                let pause = Pause::after(refused.0, why.clone(), true);
                (refused.0 + 1, Some(pause))
            }
            _ => (0, None),
        };
        connected
    }

    /// This runtime's session for requests that belong to no claim.
    pub(super) async fn shared(&self) -> Result<Link<Arc<Session>>> {
        let link = self.shared.get().await?;
        if !link.connection.is_over() {
            return Ok(link);
        }
        self.shared.broken(&link).await;
        self.shared.get().await
    }

    /// Waits for the reply to a request on a shared session. A session whose reply is late is
    /// dropped, because a new one is cheap.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`], maybe applied; what the server refuses.
    pub(super) async fn answer<T>(
        &self,
        operation: &'static str,
        limit: Duration,
        link: &Link<Arc<Session>>,
        asked: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        let answer = timed(operation, limit, asked).await;
        if answer.is_err() || link.connection.is_over() {
            self.shared.broken(link).await;
        }
        answer?.map_err(|error| failed(operation, &error))
    }

    /// Handles a notice on a session of a claim: an eviction, or the end of the connection.
    fn hear(&self, notice: &Notice<'_>) {
        match notice {
            Notice::Text(text) => {
                if let Some(("e", id, _)) = notify::parse(text)
                    && let Some(claim) = self.claim(id)
                {
                    claim.state.lock().evicted = true;
                    self.alarm(id);
                }
            }
            Notice::End => {
                let is_over = |claim: &&Arc<LocalClaim>| {
                    claim.session().is_some_and(|session| session.is_over())
                };
                let over: Vec<_> = self
                    .claims
                    .lock()
                    .values()
                    .filter(is_over)
                    .cloned()
                    .collect();
                for claim in over {
                    claim.moved(Place::Gone);
                    self.remove(claim.claim.id, 0);
                    self.alarm(claim.claim.id);
                }
            }
        }
    }

    pub(super) fn alarm(&self, claim: ClaimId) {
        // Nobody listening is no error.
        let _ = self.alarms.send(Alarm::Lease(claim.into()));
    }

    /// Keeps a session whose lock was released for the next claim.
    pub(super) fn spare(self: &Arc<Self>, session: Arc<Session>) {
        if session.is_over() {
            return;
        }
        let mut spare = self.spare.lock();
        spare.free.push((session, BootTime::now()));
        if !std::mem::replace(&mut spare.tidied, true) {
            let registry = Arc::downgrade(self);
            self.home().spawn(async move {
                loop {
                    tokio::time::sleep(TIDY).await;
                    match registry.upgrade() {
                        Some(registry) if registry.tidy().await => {}
                        _ => return,
                    }
                }
            });
        }
    }

    /// Ends sessions that have been free for a while, except [`SPARE`], whose idle timeout is
    /// turned off. Returns whether there is more to do.
    async fn tidy(&self) -> bool {
        let restless = |session: &Session, since| session.usable_until(since) < BootTime::NEVER;
        loop {
            let session = {
                let mut spare = self.spare.lock();
                // Claims reuse the last ones first, so the first ones are the longest idle.
                let mut index = 0;
                spare.free.retain(|(session, since)| {
                    index += 1;
                    let end = (*since + LINGER).min(session.usable_until(*since));
                    index <= SPARE || !end.has_passed()
                });
                let due = |(session, since): &(Arc<Session>, BootTime)| {
                    restless(session, *since) && (*since + TIDY).has_passed()
                };
                match spare.free.iter().take(SPARE).position(due) {
                    Some(at) => spare.free.remove(at).0,
                    None => {
                        let more = |(session, since): &(Arc<Session>, _)| restless(session, *since);
                        spare.tidied = spare.free.len() > SPARE || spare.free.iter().any(more);
                        return spare.tidied;
                    }
                }
            };
            // A session that does not answer is dropped.
            let rests = tokio::time::timeout(self.timeout, session.rest()).await;
            if matches!(rests, Ok(Ok(()))) {
                self.spare.lock().free.insert(0, (session, BootTime::now()));
            }
        }
    }

    /// The lock that the waiters for `key` take turns with.
    pub(super) fn turn(&self, key: &Key) -> Arc<Turn> {
        let mut turns = self.turns.lock();
        if let Some(turn) = turns.get(key).and_then(Weak::upgrade) {
            return turn;
        }
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::new(Turn::default());
        turns.insert(key.clone(), Arc::downgrade(&turn));
        turn
    }

    /// Has the owner record of a claim written, if the claim still holds after a while.
    pub(super) fn note(self: &Arc<Self>, claim: &Arc<LocalClaim>) {
        self.fresh.claims.lock().push(Arc::downgrade(claim));
        if !self.fresh.recording.swap(true, Ordering::SeqCst) {
            self.home().spawn(record_fresh(Arc::downgrade(self)));
        }
    }

    pub(super) fn insert(&self, claim: Arc<LocalClaim>) {
        self.claims.lock().insert(claim.claim.id, claim);
    }

    pub(super) fn claim(&self, claim: ClaimId) -> Option<Arc<LocalClaim>> {
        self.claims.lock().get(&claim).cloned()
    }

    /// Removes a claim if its incarnation matches.
    pub(super) fn remove(&self, claim: ClaimId, sequence: u64) -> Option<Arc<LocalClaim>> {
        let mut claims = self.claims.lock();
        let now = claims.get(&claim)?.sequence();
        let same = sequence == 0 || now == 0 || now == sequence;
        if same { claims.remove(&claim) } else { None }
    }

    /// The claims that hold.
    pub(super) fn holders(&self) -> Vec<Arc<LocalClaim>> {
        let claims = self.claims.lock();
        let holds = |claim: &&Arc<LocalClaim>| matches!(claim.place(), Place::Held { .. });
        claims.values().filter(holds).cloned().collect()
    }

    /// Remembers that a claim was left.
    pub(super) fn depart(&self, claim: ClaimId) {
        self.departed.lock().add(claim, BootTime::now(), DEPARTED);
    }

    pub(super) fn has_departed(&self, claim: ClaimId) -> bool {
        self.departed.lock().has(claim, BootTime::now())
    }

    pub(super) fn close(&self) {
        self.spare.lock().free.clear();
        self.shared.close();
        self.claims.lock().clear();
    }
}
