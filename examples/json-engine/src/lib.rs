//! An engine that keeps the lines of a namespace in one JSON file: `json:/path/to/folder`.
//!
//! A small engine for `docs/adding-an-engine.md`, not one to use. It polls where a real engine is
//! told, and nothing of it survives a lost disk.

mod store;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use palisade::engine::{
    Alarm, Amended, Amendment, Audited, BoxStream, Claim, ClaimId, Engine, Entered, Lease, LeaseId,
    LeaseStart, Left, Line, Place, Renewal, Seat, Ticket, Tokens, Url,
};
use palisade::report::{Checkup, LineReport, Scope};
use palisade::{BootTime, Capability, Client, Error, ErrorKind, Eviction, Guarantee, Name, Result};

use store::{Extra, State, Store};

/// How often the file is looked at by those who wait for a change of it.
const LOOK: Duration = Duration::from_millis(20);

/// A client of the folder that the URL names.
///
/// # Errors
/// `Config` for a host, no path, or an option that it does not have.
pub async fn connect(url: &str) -> Result<Client> {
    let mut url = Url::parse(url)?;
    let settings = url.take_settings()?;
    url.finish(&[])?;
    if !url.hosts.is_empty() || url.path.is_empty() {
        let message = "json: takes the path of a folder, as in json:/var/lib/locks";
        return Err(Error::new(ErrorKind::Config, "connect", message));
    }
    let file = format!("{}.json", settings.namespace);
    let path = Path::new(&url.path).join(file);
    let store = Store { path };
    Client::new(Arc::new(JsonEngine { store }), &settings)
}

struct JsonEngine {
    store: Store,
}

impl JsonEngine {
    /// One verb on one line: atomic, and followed by a settled line.
    async fn change<T>(
        &self,
        operation: &'static str,
        name: &str,
        verb: impl FnOnce(&mut State, &mut Line<Extra>, BootTime) -> T,
    ) -> Result<T> {
        let verb = |state: &mut State| {
            let now = BootTime::now();
            let mut line = state.take(name, now);
            let done = verb(state, &mut line, now);
            state.put(name, line, now);
            done
        };
        self.store.change(operation, verb).await
    }

    /// Yields when `number` of the file has changed since it was last looked at.
    fn changes(&self, number: fn(&State) -> u64) -> BoxStream<Result<()>> {
        // Now, and not when the stream is first asked: changes until then count.
        let first = self.store.read("watch").ok().map(|state| number(&state));
        let look = move |(store, mut last): (Store, Option<u64>)| async move {
            loop {
                match store.read("watch").map(|state| number(&state)) {
                    Err(error) => return Some((Err(error), (store, last))),
                    Ok(now) if last.is_some_and(|last| last != now) => {
                        return Some((Ok(()), (store, Some(now))));
                    }
                    Ok(now) => last = Some(now),
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        stream::unfold((self.store.clone(), first), look).boxed()
    }
}

impl Engine for JsonEngine {
    fn capability(&self) -> Capability {
        let mut can = Capability::FULL;
        can.class = Guarantee::Timed;
        can.tokens = Tokens::Floored;
        can.ttl.min = Duration::from_millis(300);
        can
    }

    fn describe(&self) -> String {
        format!("json:{}", self.store.path.display())
    }

    async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        // Before the request: whatever it takes, the lease lasts at least this long.
        let sent = BootTime::now();
        let enter = |state: &mut State, line: &mut Line<Extra>, now| {
            if state.is_buried(claim.id, now) {
                return Ok(Entered::Busy);
            }
            // The same claim again has the place that it has.
            if line.seat(claim.id).is_none() {
                line.push(Seat {
                    id: claim.id,
                    ask: claim.ask,
                    sequence: 0,
                    expires: now + claim.ttl,
                    ttl: claim.ttl,
                    evicted: false,
                    extra: Extra {
                        owner: claim.owner.clone(),
                        value: claim.value.clone(),
                    },
                })?;
                state.settle(line, now);
            }
            let Some(seat) = line.seat(claim.id) else {
                return Ok(Entered::Busy);
            };
            if !claim.queue && !seat.is_held() {
                line.remove(claim.id, 0);
                return Ok(Entered::Busy);
            }
            let left = seat.expires.saturating_since(now);
            Ok(Entered::In {
                ticket: Ticket {
                    sequence: seat.sequence,
                    ..Ticket::own(claim.name.clone(), claim.id)
                },
                armed: LeaseStart { sent, ttl: left },
                place: seat.place(),
            })
        };
        self.change("enter", claim.name.as_str(), enter).await?
    }

    async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        let place = |line: &Line<Extra>| line.seat(ticket.claim).map_or(Place::Gone, Seat::place);
        let name = ticket.name.as_str();
        loop {
            let line = self.store.read("wait")?.take(name, BootTime::now());
            if place(&line) != Place::Waiting || until.has_passed() {
                // A read decides nothing: what it saw must be so in the file.
                let look = |_: &mut State, line: &mut Line<Extra>, _| place(line);
                return self.change("wait", name, look).await;
            }
            tokio::time::sleep(LOOK.min(until.remaining())).await;
        }
    }

    async fn renew(&self, leases: Vec<Lease>, _within: Duration) -> Vec<Renewal> {
        let mut answers = Vec::new();
        for ticket in leases.into_iter().filter_map(|lease| lease.ticket) {
            let sent = BootTime::now();
            let renew = |_: &mut State, line: &mut Line<Extra>, now: BootTime| match line
                .incarnation_mut(ticket.claim, ticket.sequence)
            {
                None => Renewal::Lost,
                Some(seat) if seat.evicted => Renewal::Evicted,
                Some(seat) => {
                    seat.expires = now + seat.ttl;
                    Renewal::Held(LeaseStart {
                        sent,
                        ttl: seat.ttl,
                    })
                }
            };
            let answer = self.change("renew", ticket.name.as_str(), renew).await;
            answers.push(answer.unwrap_or_else(Renewal::Unknown));
        }
        answers
    }

    async fn amend(&self, ticket: Ticket, amendment: Amendment) -> Result<Amended> {
        let amend = |_: &mut State, line: &mut Line<Extra>, _| match amendment {
            Amendment::Ask(ask) => line.reweigh(ticket.claim, ticket.sequence, ask),
            Amendment::Value(value) => match line.incarnation_mut(ticket.claim, ticket.sequence) {
                None => Amended::Gone,
                Some(seat) => {
                    seat.extra.value = Some(value);
                    Amended::Done
                }
            },
        };
        self.change("amend", ticket.name.as_str(), amend).await
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        let leave = |state: &mut State, line: &mut Line<Extra>, now| {
            let left = line.remove(ticket.claim, ticket.sequence);
            // A request for it may still be under way: it must not come true afterwards.
            if ticket.in_doubt || (left.is_none() && ticket.sequence == 0) {
                state.bury(ticket.claim, now);
            }
            left.map_or(Left::Absent, |_| Left::Done)
        };
        self.change("leave", ticket.name.as_str(), leave).await
    }

    async fn audit(&self, _: LeaseId) -> Result<Vec<Audited>> {
        Ok(Vec::new()) // Every ticket has a lease of its own.
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        // Only evictions need one: whatever else ends a lease, its renewal finds out in time.
        let evictions = self.changes(|state| state.evictions);
        evictions.map(|_| Alarm::All).boxed()
    }

    async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        let survey = |state: &mut State| {
            let now = BootTime::now();
            let names = state.names().into_iter();
            let names: Vec<String> = names.filter(|name| scope.includes(name)).collect();
            let reports = names.into_iter().map(|name| {
                let line = state.take(&name, now);
                let who = |extra: &Extra| (Some(extra.owner.clone()), extra.value.clone());
                let report = line.report(&name, now, who);
                state.put(&name, line, now);
                report
            });
            let shown = |report: &LineReport| !report.holders.is_empty();
            reports.filter(shown).collect()
        };
        self.store.change("survey", survey).await
    }

    fn watch(&self, _: Scope) -> BoxStream<Result<()>> {
        self.changes(|state| state.version) // A hint too many does no harm.
    }

    async fn evict(&self, name: Name, id: String, eviction: Eviction) -> Result<bool> {
        let evict = |state: &mut State, line: &mut Line<Extra>, _| {
            let Ok(claim) = id.parse::<ClaimId>() else {
                return false;
            };
            let found = match eviction {
                Eviction::Mark => line
                    .seat_mut(claim)
                    .map(|seat| seat.evicted = true)
                    .is_some(),
                Eviction::Remove => line.remove(claim, 0).is_some(),
            };
            state.evictions += u64::from(found);
            found
        };
        self.change("evict", name.as_str(), evict).await
    }

    async fn resize(&self, name: Name, capacity: u32) -> Result<bool> {
        let resize = |_: &mut State, line: &mut Line<Extra>, _| line.resize(capacity);
        self.change("resize", name.as_str(), resize).await?
    }

    fn queues(&self) -> Option<palisade::queue::SharedQueueStore> {
        None
    }

    async fn check(&self) -> Result<Checkup> {
        Ok(Checkup::default())
    }

    fn key(&self, _: &Ticket) -> Option<String> {
        None
    }

    async fn close(&self) {}
}
