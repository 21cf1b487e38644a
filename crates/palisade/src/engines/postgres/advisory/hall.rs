//! `Hall`: the claims of one client, its connections, and where these live.
//!
//! Each claim has a connection to itself; one that is free again is used for the next claim.
//! Whatever must go on while the caller's runtime is blocked is done at home: in the keeper's.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::broadcast;

use super::super::fault;
use super::super::mail::{Heard, Mail};
use super::super::pooler::{self, Between};
use super::super::schema::Schema;
use super::super::server::Server;
use super::chair::Chair;
use super::key::Keys;
use super::own::Own;
use super::statement::Statements;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::engine::{Alarm, Place};
use crate::core::error::{Error, Kind, Result};
use crate::core::url::Settings;

/// How many free connections are kept for the next claims, and how many for a moment: whoever
/// takes many locks at once takes them again.
const SPARE: usize = 2;
const BURST: usize = 64;

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
    statements: Arc<Statements>,
    /// Known not to be a pooler.
    direct: AtomicBool,
    /// The schema is there.
    ready: AtomicBool,
    /// The keeper's runtime.
    home: Mutex<Option<Handle>>,
    spare: Mutex<Spares>,
    chairs: Mutex<HashMap<ClaimId, Arc<Chair>>>,
    departed: Mutex<HashMap<ClaimId, BootTime>>,
    /// When something was sent that the server has answered, for those who wait.
    pub(super) answered: tokio::sync::Mutex<BootTime>,
    pub(super) alarms: broadcast::Sender<Alarm>,
}

impl Hall {
    pub(super) fn new(
        server: Server,
        schema: Schema,
        keys: Keys,
        between: Option<Between>,
        settings: &Settings,
    ) -> Self {
        Self {
            statements: Arc::new(Statements::new(schema.quoted(), keys.sql())),
            server,
            schema,
            keys,
            namespace: settings.namespace.clone(),
            timeout: settings.timeout,
            connect_timeout: settings.connect_timeout,
            direct: AtomicBool::new(between == Some(Between::Nothing)),
            ready: AtomicBool::new(false),
            home: Mutex::default(),
            spare: Mutex::default(),
            chairs: Mutex::default(),
            departed: Mutex::default(),
            answered: tokio::sync::Mutex::new(BootTime::PAST),
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

    /// A connection that no claim has.
    ///
    /// # Errors
    /// As connecting, not applied; [`Kind::Unsupported`] behind a transaction pooler.
    pub(super) async fn connection(self: &Arc<Self>) -> Result<Arc<Own>> {
        while let Some((own, since)) = self.spare.lock().free.pop() {
            if !own.client.is_closed() && !own.usable_until(since).has_passed() {
                return Ok(own);
            }
        }
        let limit = self.connect_timeout;
        let connected = tokio::time::timeout(limit, self.connect()).await;
        connected.unwrap_or_else(|_| {
            let message = format!("no connection within {limit:?}");
            Err(Error::new(Kind::Unreachable, "connect", message))
        })
    }

    async fn connect(self: &Arc<Self>) -> Result<Arc<Own>> {
        let mail = Arc::new(Mail::default());
        let (client, wire, at) = self.server.connect_wire(Arc::clone(&mail)).await?;
        if !self.direct.load(Ordering::Relaxed) {
            refuse_pooler(pooler::probe(&self.server, &client).await?)?;
            self.direct.store(true, Ordering::Relaxed);
        }
        if !self.ready.load(Ordering::Relaxed) {
            self.schema.ensure(&client).await?;
            self.ready.store(true, Ordering::Relaxed);
        }
        let own = Own::begin(client, wire, mail, Arc::clone(&self.statements), at).await?;
        let own = Arc::new(own);
        self.watch_over(&own);
        Ok(own)
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
        chairs.values().find(|chair| chair.own.pid == pid).cloned()
    }

    pub(super) fn alarm(&self, claim: ClaimId) {
        // Nobody listening is no error.
        let _ = self.alarms.send(Alarm::Lease(claim.into()));
    }

    /// Keeps a connection whose lock is given back for the next claim.
    pub(super) fn spare(self: &Arc<Self>, own: Arc<Own>) {
        let mut spare = self.spare.lock();
        if spare.free.len() >= BURST || own.client.is_closed() {
            return;
        }
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

    /// Ends free sessions that nobody has taken for a while if there are many, and lets the
    /// others rest; says whether there is more to do.
    async fn tidy(&self) -> bool {
        let restless =
            |(own, since): &(Arc<Own>, BootTime)| own.usable_until(*since) < BootTime::NEVER;
        loop {
            let (own, _) = {
                let mut spare = self.spare.lock();
                let many = spare.free.len() > SPARE;
                let due = |free: &(Arc<Own>, BootTime)| {
                    (free.1 + TIDY).has_passed() && (many || restless(free))
                };
                let Some(at) = spare.free.iter().position(due) else {
                    spare.tidied = many || spare.free.iter().any(restless);
                    return spare.tidied;
                };
                let free = spare.free.remove(at);
                if many {
                    continue;
                }
                free
            };
            // One that does not answer is dropped.
            let rests = tokio::time::timeout(self.timeout, own.rest()).await;
            let mut spare = self.spare.lock();
            if matches!(rests, Ok(Ok(()))) && spare.free.len() < SPARE {
                spare.free.push((own, BootTime::now()));
            }
        }
    }

    pub(super) fn seat(&self, chair: Arc<Chair>) {
        self.chairs.lock().insert(chair.claim.id, chair);
    }

    pub(super) fn chair(&self, claim: ClaimId) -> Option<Arc<Chair>> {
        self.chairs.lock().get(&claim).cloned()
    }

    /// Takes a claim out if the incarnation matches.
    pub(super) fn unseat(&self, claim: ClaimId, counted: u64) -> Option<Arc<Chair>> {
        let mut chairs = self.chairs.lock();
        let chair = chairs.get(&claim)?;
        let same = counted == 0 || chair.counted() == 0 || chair.counted() == counted;
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
        self.chairs.lock().clear();
    }
}

/// Session locks can't work where sessions are taken apart.
fn refuse_pooler(between: Between) -> Result<()> {
    match between {
        Between::Nothing => Ok(()),
        Between::Pooler => Err(Error::new(
            Kind::Unsupported,
            "connect",
            "a transaction pooler stands in between, and advisory locks belong to sessions; name the server itself, or use postgres://",
        )),
    }
}

/// The failure of what was asked for a claim.
pub(super) fn failed(operation: &'static str, error: &tokio_postgres::Error) -> Error {
    fault::reading(operation, error)
}
