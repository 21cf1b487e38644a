//! `Hall`: the claims of one client, its connections, and where these live.
//!
//! Each claim has a connection to itself; one that is free again is used for the next claim. There
//! are at most `max_connections` of them: whoever comes when all are in use waits for one, in
//! turn, and is told after a request's time. What is asked for no claim is asked on one connection
//! per runtime beside them, many questions at once.
//! Whatever must go on while the caller's runtime is blocked is done at home: in the keeper's.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast};

use super::super::fault;
use super::super::mail::Heard;
use super::super::schema::Schema;
use super::super::server::Server;
use super::chair::Chair;
use super::key::{Key, Keys};
use super::own::Own;
use super::statement::Statements;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::engine::{Alarm, Place};
use crate::core::error::{Error, Kind, Result};
use crate::core::url::Settings;
use crate::engines::remote::{Link, Links, timed};

/// How many free connections are kept for the next claims, and for how long the others are:
/// whoever takes many locks at once takes them again, and a connection costs far more than a lock.
const SPARE: usize = 2;
const LINGER: Duration = Duration::from_secs(3);

/// How long a claim that was left before it arrived is remembered. Only this client enters its
/// claims, and a request of ours can't be under way for longer.
const DEPARTED: Duration = Duration::from_secs(300);

/// A free session that nobody takes for so long is told not to end when it is idle. Much shorter
/// than the shortest ttl, and long enough that whoever locks again and again never meets it.
const TIDY: Duration = Duration::from_millis(50);

/// Connections that no claim has, each with the time since when.
#[derive(Default)]
struct Spares {
    free: Vec<(Arc<Own>, BootTime)>,
    /// A task looks after them.
    tidied: bool,
}

pub(super) struct Hall {
    pub(super) server: Server,
    pub(super) schema: Schema,
    pub(super) keys: Keys,
    pub(super) namespace: String,
    pub(super) timeout: Duration,
    connect_timeout: Duration,
    connector: Connector,
    /// One for each connection that a claim has.
    places: Arc<Semaphore>,
    max_connections: usize,
    /// For questions that are no claim's.
    desks: Links<Arc<Own>>,
    /// The keeper's runtime.
    home: Mutex<Option<Handle>>,
    spare: Mutex<Spares>,
    chairs: Mutex<HashMap<ClaimId, Arc<Chair>>>,
    /// Who waits for a lock at the server, one at a time for each.
    turns: Mutex<HashMap<Key, Weak<Turn>>>,
    departed: Mutex<HashMap<ClaimId, BootTime>>,
    /// When something was sent that the server has answered, for those who wait.
    pub(super) answered: Mutex<BootTime>,
    pub(super) alarms: broadcast::Sender<Alarm>,
}

/// The right to wait for one lock at the server, in turn.
pub(super) type Turn = tokio::sync::Mutex<()>;

/// How a session is made.
#[derive(Clone)]
struct Connector {
    server: Server,
    schema: Schema,
    statements: Arc<Statements>,
    /// Nothing takes sessions apart: it was said so.
    trusted: bool,
    /// The schema is there.
    ready: Arc<AtomicBool>,
}

impl Connector {
    async fn connect(&self) -> Result<Arc<Own>> {
        let own = Own::connect(&self.server, &self.statements, self.trusted).await?;
        if !self.ready.load(Ordering::Relaxed) {
            self.schema.ensure(&own.client).await?;
            self.ready.store(true, Ordering::Relaxed);
        }
        Ok(Arc::new(own))
    }
}

/// How a hall is set up.
pub(super) struct Plan {
    pub(super) server: Server,
    pub(super) schema: Schema,
    pub(super) keys: Keys,
    /// Nothing takes sessions apart: it was said so.
    pub(super) trusted: bool,
    pub(super) max_connections: usize,
}

impl Hall {
    pub(super) fn new(plan: Plan, settings: &Settings) -> Self {
        let connector = Connector {
            server: plan.server.clone(),
            schema: plan.schema.clone(),
            statements: Arc::new(Statements::new(plan.schema.quoted(), plan.keys.sql())),
            trusted: plan.trusted,
            ready: Arc::default(),
        };
        let desk = connector.clone();
        Self {
            server: plan.server,
            schema: plan.schema,
            keys: plan.keys,
            namespace: settings.namespace.clone(),
            timeout: settings.timeout,
            connect_timeout: settings.connect_timeout,
            connector,
            places: Arc::new(Semaphore::new(plan.max_connections)),
            max_connections: plan.max_connections,
            desks: Links::new(settings.connect_timeout, move || {
                let desk = desk.clone();
                Box::pin(async move { desk.connect().await })
            }),
            home: Mutex::default(),
            spare: Mutex::default(),
            chairs: Mutex::default(),
            turns: Mutex::default(),
            departed: Mutex::default(),
            answered: Mutex::new(BootTime::PAST),
            alarms: broadcast::channel(256).0,
        }
    }

    /// The runtime that is asked here is the keeper's.
    pub(super) fn settle_here(&self) {
        *self.home.lock() = Handle::try_current().ok();
    }

    /// Where connections live: with the keeper, or before there is one with the caller.
    pub(super) fn home(&self) -> Handle {
        let home = self.home.lock().clone();
        home.unwrap_or_else(Handle::current)
    }

    /// The right to one more connection for a claim.
    ///
    /// # Errors
    /// [`Kind::Unreachable`], not applied, when none is given back in time.
    pub(super) async fn place(&self) -> Result<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.places).acquire_owned();
        match tokio::time::timeout(self.timeout, place).await {
            Ok(Ok(place)) => Ok(place),
            _ => {
                let message = format!(
                    "all {} connections of this client are in use, one for each lock that is held or waited for; raise max_connections=, or use postgres:// for many locks",
                    self.max_connections
                );
                Err(Error::new(Kind::Unreachable, "enter", message))
            }
        }
    }

    /// A connection that no claim has.
    ///
    /// # Errors
    /// As connecting, not applied; [`Kind::Unsupported`] behind a pooler.
    pub(super) async fn connection(self: &Arc<Self>) -> Result<Arc<Own>> {
        while let Some((own, since)) = self.spare.lock().free.pop() {
            if !own.client.is_closed() && !own.usable_until(since).has_passed() {
                return Ok(own);
            }
        }
        let limit = self.connect_timeout;
        let connected = tokio::time::timeout(limit, self.connector.connect()).await;
        let own = connected.unwrap_or_else(|_| {
            let message = format!("no connection within {limit:?}");
            Err(Error::new(Kind::Unreachable, "connect", message))
        })?;
        self.watch_over(&own);
        Ok(own)
    }

    /// The connection of this runtime for questions that are no claim's.
    ///
    /// # Errors
    /// As connecting.
    pub(super) async fn desk(&self) -> Result<Link<Arc<Own>>> {
        let desk = self.desks.get().await?;
        if !desk.connection.client.is_closed() {
            return Ok(desk);
        }
        self.desks.broken(&desk).await;
        self.desks.get().await
    }

    /// Waits for the answer to a question that was asked at `desk`; a desk that is late is given
    /// up, since another costs little.
    ///
    /// # Errors
    /// [`Kind::Unreachable`], maybe applied; what the server refuses.
    pub(super) async fn answer<T>(
        &self,
        operation: &'static str,
        limit: Duration,
        desk: &Link<Arc<Own>>,
        asked: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        let answer = match timed(operation, limit, asked).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) if !desk.connection.client.is_closed() => {
                return Err(failed(operation, &error));
            }
            Ok(Err(error)) => Err(failed(operation, &error)),
            Err(late) => Err(late),
        };
        self.desks.broken(desk).await;
        answer
    }

    /// Passes on what is said on a connection, its end and evictions: at home, for the keeper.
    fn watch_over(self: &Arc<Self>, own: &Arc<Own>) {
        let (hall, pid) = (Arc::downgrade(self), own.pid);
        let mut heard = own.mail.listen();
        self.home().spawn(async move {
            loop {
                let news = heard.recv().await;
                let Some(hall) = hall.upgrade() else { return };
                let chair = hall.chair_of(pid);
                match news {
                    Ok(Heard::Evicted(claim)) => {
                        if let Some(chair) = chair.filter(|chair| chair.claim.id == claim) {
                            chair.mark();
                            hall.alarm(claim);
                        }
                    }
                    Ok(Heard::End) | Err(_) => {
                        if let Some(chair) = chair {
                            chair.place.send_replace(Place::Gone);
                            hall.unseat(chair.claim.id, 0);
                            hall.alarm(chair.claim.id);
                        }
                        return;
                    }
                }
            }
        });
    }

    fn chair_of(&self, pid: i32) -> Option<Arc<Chair>> {
        let chairs = self.chairs.lock();
        chairs
            .values()
            .find(|chair| chair.pid() == Some(pid))
            .cloned()
    }

    pub(super) fn alarm(&self, claim: ClaimId) {
        // Nobody listening is no error.
        let _ = self.alarms.send(Alarm::Lease(claim.into()));
    }

    /// Keeps a connection whose lock is given back for the next claim.
    pub(super) fn spare(self: &Arc<Self>, own: Arc<Own>) {
        if own.client.is_closed() {
            return;
        }
        let mut spare = self.spare.lock();
        spare.free.push((own, BootTime::now()));
        if !std::mem::replace(&mut spare.tidied, true) {
            let hall = Arc::downgrade(self);
            self.home().spawn(async move {
                loop {
                    tokio::time::sleep(TIDY).await;
                    match hall.upgrade() {
                        Some(hall) if hall.tidy().await => {}
                        _ => return,
                    }
                }
            });
        }
    }

    /// Ends free sessions that nobody has taken for a while, but for a few, and lets these rest;
    /// says whether there is more to do.
    async fn tidy(&self) -> bool {
        let restless = |own: &Own, since| own.usable_until(since) < BootTime::NEVER;
        loop {
            let own = {
                let mut spare = self.spare.lock();
                // The last ones are taken first.
                let mut index = 0;
                spare.free.retain(|(own, since)| {
                    index += 1;
                    index <= SPARE || !(*since + LINGER).min(own.usable_until(*since)).has_passed()
                });
                let due = |(own, since): &(Arc<Own>, BootTime)| {
                    restless(own, *since) && (*since + TIDY).has_passed()
                };
                match spare.free.iter().take(SPARE).position(due) {
                    Some(at) => spare.free.remove(at).0,
                    None => {
                        let all = &spare.free;
                        spare.tidied = all.len() > SPARE
                            || all.iter().any(|(own, since)| restless(own, *since));
                        return spare.tidied;
                    }
                }
            };
            // One that does not answer is dropped.
            let rests = tokio::time::timeout(self.timeout, own.rest()).await;
            if matches!(rests, Ok(Ok(()))) {
                self.spare.lock().free.insert(0, (own, BootTime::now()));
            }
        }
    }

    /// What those who wait for `key` take turns at.
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

    pub(super) fn seat(&self, chair: Arc<Chair>) {
        self.chairs.lock().insert(chair.claim.id, chair);
    }

    pub(super) fn chair(&self, claim: ClaimId) -> Option<Arc<Chair>> {
        self.chairs.lock().get(&claim).cloned()
    }

    /// Takes a claim out if the incarnation matches.
    pub(super) fn unseat(&self, claim: ClaimId, sequence: u64) -> Option<Arc<Chair>> {
        let mut chairs = self.chairs.lock();
        let chair = chairs.get(&claim)?;
        let same = sequence == 0 || chair.sequence() == 0 || chair.sequence() == sequence;
        if same { chairs.remove(&claim) } else { None }
    }

    /// The claims that hold.
    pub(super) fn holders(&self) -> Vec<Arc<Chair>> {
        let chairs = self.chairs.lock();
        let holds = |chair: &&Arc<Chair>| matches!(chair.stands(), Place::Held { .. });
        chairs.values().filter(holds).cloned().collect()
    }

    pub(super) fn depart(&self, claim: ClaimId) {
        let now = BootTime::now();
        let mut departed = self.departed.lock();
        departed.retain(|_, until| *until > now);
        departed.insert(claim, now + DEPARTED);
    }

    pub(super) fn has_departed(&self, claim: ClaimId) -> bool {
        let departed = self.departed.lock();
        departed
            .get(&claim)
            .is_some_and(|until| !until.has_passed())
    }

    pub(super) fn close(&self) {
        self.spare.lock().free.clear();
        self.desks.close();
        self.chairs.lock().clear();
    }
}

/// The failure of what was asked for a claim.
pub(super) fn failed(operation: &'static str, error: &tokio_postgres::Error) -> Error {
    fault::reading(operation, error)
}
