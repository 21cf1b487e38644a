//! `memory:` — lines of this process, kept in a map. The readable reference for engines.
//!
//! One mutex makes every call atomic. `memory:` is one store per process, `memory:NAME` another;
//! clients of the same store exclude each other. Nothing survives the process (class C): its tokens
//! are a counter with the clock as its lower bound.

#[cfg(feature = "baseline")]
mod baseline;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::{Notify, broadcast};

use crate::core::alarms;
use crate::core::capability::{Capability, EndsWith, Guarantee, Tokens};
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::{BootTime, unix_time};
use crate::core::dyn_engine::SharedEngine;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxStream, Engine, Entered, Eviction, Left, Place, Renewal,
};
use crate::core::error::{Result, config_error};
use crate::core::line::{Line, Seat};
use crate::core::name::Name;
use crate::core::queue::SharedQueueStore;
use crate::core::registry::{EngineFactory, EngineInfo};
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::sync::{self, Mutex};
use crate::core::ticket::{Lease, LeaseId, LeaseStart, Ticket};
use crate::core::tombstones::Tombstones;
use crate::core::url::{Settings, Url};

/// How long a claim that was left before it arrived is remembered: far longer than a request can be
/// in flight, short enough that the memory use stays small.
const TOMBSTONE: Duration = Duration::from_secs(300);

/// The engine's entry in the registry.
pub const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "memory",
        schemes: &["memory"],
        needs: "nothing; the locks of one process, for tests and examples",
        example: "memory:",
        capability: CAPABILITY,
        options: &[],
    },
    open: |url, settings| Box::pin(async move { open(url, &settings) }),
    #[cfg(feature = "baseline")]
    baseline: Some(|_, _| Box::pin(async { Ok(Arc::new(baseline::Keys::default()) as _) })),
};

const CAPABILITY: Capability = Capability {
    class: Guarantee::Timed,
    tokens: Tokens::Floored,
    ends_with: EndsWith::Process,
    ..Capability::FULL
};

static STORES: LazyLock<RwLock<HashMap<String, Arc<Store>>>> = LazyLock::new(Default::default);

/// Opens the store that the URL's path names.
///
/// # Errors
/// [`ErrorKind::Config`](crate::ErrorKind::Config) for a host or an option, since it has none.
pub fn open(url: Url, settings: &Settings) -> Result<SharedEngine> {
    url.finish(&[])?;
    if !url.hosts.is_empty() {
        return Err(config_error("memory: has no host; use memory:NAME"));
    }
    let store = Arc::clone(STORES.write().entry(url.path).or_default());
    Ok(Arc::new(MemoryEngine {
        store,
        namespace: settings.namespace.clone(),
    }))
}

/// A namespace of one store of this process.
struct MemoryEngine {
    store: Arc<Store>,
    namespace: String,
}

/// Namespace and name.
type Key = (String, Name);

struct Store {
    state: Mutex<State>,
    changes: broadcast::Sender<Key>,
    alarms: broadcast::Sender<Alarm>,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            changes: broadcast::channel(64).0,
            alarms: broadcast::channel(64).0,
        }
    }
}

#[derive(Default)]
struct State {
    lines: HashMap<Key, Line<Extra>>,
    tombstones: Tombstones,
    last_sequence: u64,
}

/// A seat's own data.
struct Extra {
    claim: Arc<Claim>,
    value: Option<String>,
    /// Notified when the seat is granted or removed.
    woken: Arc<Notify>,
}

impl State {
    fn line(&mut self, key: &Key) -> &mut Line<Extra> {
        self.lines.entry(key.clone()).or_default()
    }

    /// Removes expired seats, grants those that have come to the front, and notifies both.
    fn settle(&mut self, key: &Key, now: BootTime) {
        let Some(line) = self.lines.get_mut(key) else {
            return;
        };
        for expired in line.seats.iter().filter(|seat| seat.expires <= now) {
            expired.extra.woken.notify_one();
        }
        let last = &mut self.last_sequence;
        for granted in line.settle(now, || count_on(last)) {
            if let Some(seat) = line.seat(granted) {
                seat.extra.woken.notify_one();
            }
        }
        if line.seats.is_empty() {
            self.lines.remove(key);
        }
    }

    fn place(&self, key: &Key, claim: ClaimId) -> Place {
        let seat = self.lines.get(key).and_then(|line| line.seat(claim));
        seat.map_or(Place::Gone, Seat::place)
    }
}

/// The next sequence: never lower, and above that of an earlier process if the clock is correct.
fn count_on(last: &mut u64) -> u64 {
    let micros = unix_time().as_micros() as u64;
    *last = micros.max(*last + 1);
    *last
}

impl MemoryEngine {
    fn key_of(&self, name: &Name) -> Key {
        (self.namespace.clone(), name.clone())
    }

    /// Runs one change atomically, and settles the line before and after it.
    fn change<T>(&self, name: &Name, verb: impl FnOnce(&mut State, &Key, BootTime) -> T) -> T {
        self.store.change(&self.key_of(name), verb)
    }
}

impl Store {
    fn change<T>(&self, key: &Key, verb: impl FnOnce(&mut State, &Key, BootTime) -> T) -> T {
        let mut state = self.state.lock();
        let now = BootTime::now();
        state.settle(key, now);
        let done = verb(&mut state, key, now);
        state.settle(key, now);
        drop(state);
        // It is no error if nobody listens.
        let _ = self.changes.send(key.clone());
        done
    }

    /// What wakes a waiting claim, and when the first lease that blocks it ends; `None` if the
    /// claim does not wait.
    fn blocked(&self, key: &Key, claim: ClaimId) -> Option<(Arc<Notify>, BootTime)> {
        let mut state = self.state.lock();
        state.settle(key, BootTime::now());
        let line = state.lines.get(key)?;
        let seat = line.seat(claim).filter(|seat| !seat.is_held())?;
        let due = line
            .blockers(claim)
            .iter()
            .map(|blocker| blocker.expires)
            .min()?;
        Some((Arc::clone(&seat.extra.woken), due))
    }
}

impl Engine for MemoryEngine {
    fn capability(&self) -> Capability {
        CAPABILITY
    }

    fn describe(&self) -> String {
        "memory:".to_owned()
    }

    async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        self.change(&claim.name, |state, key, now| {
            if state.tombstones.has(claim.id, now) {
                return Ok(Entered::Busy);
            }
            if state.line(key).seat(claim.id).is_none() {
                state.line(key).push(Seat {
                    id: claim.id,
                    ask: claim.ask,
                    sequence: 0,
                    expires: now + claim.ttl,
                    ttl: claim.ttl,
                    evicted: false,
                    extra: Extra {
                        claim: Arc::clone(&claim),
                        value: claim.value.clone(),
                        woken: Arc::new(Notify::new()),
                    },
                })?;
                state.settle(key, now);
            }
            let line = state.line(key);
            let Some(seat) = line.seat(claim.id) else {
                return Ok(Entered::Busy);
            };
            if !claim.queue && !seat.is_held() {
                line.remove(claim.id, 0);
                return Ok(Entered::Busy);
            }
            let (place, sequence) = (seat.place(), seat.sequence);
            // Entering again extends nothing, so the lease start carries only the remaining time.
            let left = seat.expires.saturating_since(now);
            let ticket = Ticket {
                sequence,
                ..Ticket::own(claim.name.clone(), claim.id)
            };
            Ok(Entered::In {
                ticket,
                armed: LeaseStart {
                    sent: now,
                    ttl: left,
                },
                place,
            })
        })
    }

    async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        let key = self.key_of(&ticket.name);
        if let Some((woken, due)) = self.store.blocked(&key, ticket.claim) {
            tokio::select! {
                () = woken.notified() => {}
                () = sync::sleep_until(due.min(until)) => {}
            }
        }
        let mut state = self.store.state.lock();
        state.settle(&key, BootTime::now());
        Ok(state.place(&key, ticket.claim))
    }

    async fn renew(&self, leases: Vec<Lease>, _within: Duration) -> Vec<Renewal> {
        let renew = |lease: Lease| {
            let Some(ticket) = lease.ticket else {
                return Renewal::Lost;
            };
            let key = self.key_of(&ticket.name);
            let mut state = self.store.state.lock();
            let now = BootTime::now();
            state.settle(&key, now);
            let seat = state
                .lines
                .get_mut(&key)
                .and_then(|line| line.incarnation_mut(ticket.claim, ticket.sequence));
            match seat {
                None => Renewal::Lost,
                Some(seat) if seat.evicted => Renewal::Evicted,
                Some(seat) => {
                    seat.expires = now + seat.ttl;
                    Renewal::Held(LeaseStart {
                        sent: now,
                        ttl: seat.ttl,
                    })
                }
            }
        };
        leases.into_iter().map(renew).collect()
    }

    async fn amend(&self, ticket: Ticket, amendment: Amendment) -> Result<Amended> {
        self.change(&ticket.name, |state, key, _| {
            let line = state.line(key);
            let amended = match amendment {
                Amendment::Ask(ask) => line.reweigh(ticket.claim, ticket.sequence, ask),
                Amendment::Value(value) => match line.seat_mut(ticket.claim) {
                    Some(seat) if seat.sequence == ticket.sequence => {
                        seat.extra.value = Some(value);
                        Amended::Done
                    }
                    _ => Amended::Gone,
                },
            };
            Ok(amended)
        })
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        self.change(&ticket.name, |state, key, now| {
            let left = state.line(key).remove(ticket.claim, ticket.sequence);
            if ticket.in_doubt || (left.is_none() && ticket.sequence == 0) {
                state.tombstones.add(ticket.claim, now, TOMBSTONE);
            }
            Ok(match left {
                Some(_) => Left::Done,
                None => Left::Absent,
            })
        })
    }

    async fn audit(&self, _: LeaseId) -> Result<Vec<Audited>> {
        Ok(Vec::new())
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        alarms::alarms(self.store.alarms.subscribe())
    }

    async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        let mut state = self.store.state.lock();
        let now = BootTime::now();
        let mut keys: Vec<Key> = state.lines.keys().cloned().collect();
        keys.retain(|(space, name)| *space == self.namespace && scope.includes(name.as_str()));
        keys.sort();
        let reports = keys.iter().filter_map(|key| {
            state.settle(key, now);
            let line = state.lines.get(key)?;
            Some(line.report(key.1.as_str(), now, |extra| {
                (Some(extra.claim.owner.clone()), extra.value.clone())
            }))
        });
        Ok(reports.collect())
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        let namespace = self.namespace.clone();
        alarms::hints(
            self.store.changes.subscribe(),
            move |changed| match changed {
                Some((space, name)) if space != namespace || !scope.includes(name.as_str()) => None,
                _ => Some(Ok(())),
            },
        )
    }

    async fn evict(&self, name: Name, id: String, eviction: Eviction) -> Result<bool> {
        self.change(&name, |state, key, _| {
            let Ok(claim) = id.parse::<ClaimId>() else {
                return Ok(false);
            };
            let line = state.line(key);
            match eviction {
                Eviction::Mark => {
                    let Some(seat) = line.seat_mut(claim) else {
                        return Ok(false);
                    };
                    seat.evicted = true;
                }
                Eviction::Remove => {
                    let Some(seat) = line.remove(claim, 0) else {
                        return Ok(false);
                    };
                    seat.extra.woken.notify_one();
                }
            }
            let _ = self.store.alarms.send(Alarm::Lease(claim.into()));
            Ok(true)
        })
    }

    async fn resize(&self, name: Name, capacity: u32) -> Result<bool> {
        self.change(&name, |state, key, _| state.line(key).resize(capacity))
    }

    fn queues(&self) -> Option<SharedQueueStore> {
        None
    }

    async fn check(&self) -> Result<Checkup> {
        Ok(Checkup::default())
    }

    fn key(&self, _ticket: &Ticket) -> Option<String> {
        None
    }

    async fn close(&self) {}
}
