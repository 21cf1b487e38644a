//! `leave`, `amend` and `evict`. A znode's name is its incarnation: it contains the claim and the
//! sequence, and no other znode ever has this name.
//!
//! Znodes can't be renamed, and their names contain the weight. A claim that reduces its weight
//! gets another znode with the same sequence, and the old one is deleted atomically. A claim that
//! increases its weight must be sure that nobody else holds at that moment. Either somebody waits
//! behind it: then nobody can have been granted since, and the transaction checks that they still
//! wait. Or a second znode at the end of the line shows that nobody else is in it.

use super::acquire::{Known, Node, children, unexpected};
use super::error;
use super::keys::{Child, Record};
use super::proto::{ANY, Answer, Lives, Request, code};
use super::snapshot::{Place, Snapshot};
use super::{Inner, inspect, notify};
use std::sync::Arc;

use crate::core::claim::{Ask, ClaimId};
use crate::core::engine::{Amended, Amendment, Eviction, Left};
use crate::core::error::{Error, ErrorKind, Outcome, Result};
use crate::core::name::Name;
use crate::core::ticket::Ticket;
use crate::engines::kit::cas::Retry;

/// How often a change is retried because the line has changed in between.
const TRIES: u32 = 16;

pub(super) async fn leave(engine: &Inner, ticket: &Ticket) -> Result<Left> {
    let known = engine.known(ticket.claim);
    let node = known.as_ref().and_then(|known| known.node.as_ref());
    if let Some(node) = node
        && ticket.sequence != 0
        && node.sequence() != ticket.sequence
    {
        return Ok(Left::Absent);
    }
    let left = match (&known, node) {
        (Some(known), Some(node)) if !ticket.in_doubt => {
            let path = format!("{}/{}", known.line, node.name);
            delete(engine, Some(known), &path).await?
        }
        // An enter was not answered, or two copies were sent.
        (Some(known), _) => leave_all(engine, known, ticket.claim).await?,
        (None, _) => match &ticket.native {
            Some(path) => delete(engine, None, path).await?,
            None => false,
        },
    };
    engine.known.lock().remove(ticket.claim);
    Ok(Left::of(left))
}

/// Deletes all znodes of the claim. The request follows their creates on the same session, so none
/// can appear later.
async fn leave_all(engine: &Inner, known: &Known, claim: ClaimId) -> Result<bool> {
    let requests = vec![
        Request::sync(&known.line),
        Request::children(&known.line, false),
    ];
    let answers = match call(engine, known, "leave", &requests).await {
        // They were deleted with their session.
        Err(error) if error.kind() == ErrorKind::Lost => return Ok(false),
        answers => answers?,
    };
    let names = children(&answers)?.unwrap_or_default();
    let mut left = false;
    for name in Snapshot::new(&names).nodes_of(claim) {
        let path = format!("{}/{name}", known.line);
        left |= delete(engine, Some(known), &path).await?;
    }
    Ok(left)
}

/// Deletes a znode, and returns whether it existed. The znodes of a session that has ended are
/// gone, or soon will be; they are deleted through another session. An unanswered request is
/// retried once.
async fn delete(engine: &Inner, known: Option<&Known>, path: &str) -> Result<bool> {
    let mut known = known.filter(|known| known.session.is_usable());
    let mut maybe = false;
    for last in [false, true] {
        let requests = vec![Request::delete(path)];
        let answers = match known {
            Some(known) => call(engine, known, "leave", &requests).await,
            None => engine.client.read("leave", &requests).await,
        };
        match answers {
            Ok(answers) => {
                let answer = answers.first().ok_or_else(unexpected)?;
                return match answer.done() {
                    Ok(()) => Ok(true),
                    // If it is gone by now, the first copy was applied.
                    Err(refused) if refused.is(code::NO_NODE) => Ok(maybe),
                    Err(refused) => Err(error::refused("leave", refused)),
                };
            }
            Err(error) if error.kind() == ErrorKind::Lost && !last => known = None,
            Err(error) if error.is_transient() && !last => {
                maybe |= error.outcome() == Outcome::MaybeApplied;
            }
            Err(error) => return Err(error.maybe_applied()),
        }
    }
    Ok(maybe)
}

async fn call(
    engine: &Inner,
    known: &Known,
    operation: &'static str,
    requests: &[Request],
) -> Result<Vec<Answer>> {
    let client = &engine.client;
    client
        .call(&known.session, operation, requests.to_vec())
        .await
}

pub(super) async fn amend(
    engine: &Arc<Inner>,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    let mut retry = Retry::times(TRIES);
    loop {
        let known = engine.known(ticket.claim);
        let Some((known, node)) = known.and_then(|known| Some((known.clone(), known.node?))) else {
            return Ok(Amended::Gone);
        };
        if node.sequence() != ticket.sequence {
            return Ok(Amended::Gone);
        }
        let amending = Amending {
            engine,
            ticket,
            known: &known,
            node: &node,
        };
        let amended = match amendment {
            Amendment::Value(value) => amending.set_value(value).await,
            Amendment::Ask(ask) => amending.reweigh(*ask).await,
        };
        match amended {
            Ok(Some(amended)) => return Ok(amended),
            Ok(None) => retry.or_busy("amend").await?,
            Err(error) if error.kind() == ErrorKind::Lost => return Ok(Amended::Gone),
            Err(error) => return Err(error),
        }
    }
}

/// One change of one claim; its methods return `None` to be tried again.
struct Amending<'a> {
    engine: &'a Arc<Inner>,
    ticket: &'a Ticket,
    known: &'a Known,
    node: &'a Node,
}

impl Amending<'_> {
    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.known.line)
    }

    async fn call(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        call(self.engine, self.known, "amend", &requests).await
    }

    /// The claim's record and its version; `None` when its znode is gone.
    async fn record(&self) -> Result<Option<(Record, i32)>> {
        let read = Request::data(&self.path(&self.node.name), false);
        let answers = self.call(vec![read]).await?;
        let (data, stat) = match answers.first().ok_or_else(unexpected)?.data() {
            Ok(found) => found,
            Err(refused) if refused.is(code::NO_NODE) => return Ok(None),
            Err(refused) => return Err(error::refused("amend", refused)),
        };
        let Some(record) = Record::read(&data) else {
            let message = "the record of this place can't be read; was it changed by hand?";
            return Err(Error::new(ErrorKind::Unusable, "amend", message));
        };
        Ok(Some((record, stat.version)))
    }

    async fn set_value(&self, value: &str) -> Result<Option<Amended>> {
        let Some((record, version)) = self.record().await? else {
            return Ok(Some(Amended::Gone));
        };
        let record = Record {
            value: Some(value.to_owned()),
            ..record
        };
        let path = self.path(&self.node.name);
        let set = Request::set_data(&path, &record.json(), version);
        let answers = self.call(vec![set]).await?;
        match answers.first().ok_or_else(unexpected)?.done() {
            Ok(()) => Ok(Some(Amended::Done)),
            Err(refused) if refused.is(code::NO_NODE) => Ok(Some(Amended::Gone)),
            Err(refused) if refused.is(code::BAD_VERSION) => Ok(None),
            Err(refused) => Err(error::refused("amend", refused)),
        }
    }

    /// The children of the line after a `sync` with the leader: a follower may not know yet that
    /// another reader is gone, and would refuse an upgrade needlessly.
    async fn names(&self) -> Result<Vec<String>> {
        let requests = vec![
            Request::sync(&self.known.line),
            Request::children(&self.known.line, false),
        ];
        let answers = self.call(requests).await?;
        Ok(children(&answers)?.unwrap_or_default())
    }

    async fn reweigh(&self, ask: Ask) -> Result<Option<Amended>> {
        let mut snapshot = Snapshot::new(&self.names().await?);
        snapshot.settle();
        let Some(at) = snapshot.find(&self.node.name) else {
            return Ok(Some(Amended::Gone));
        };
        let line = &mut snapshot.line;
        let (id, sequence) = (line.seats[at].id, line.seats[at].sequence);
        let before = line.seats[at].ask;
        match line.reweigh(id, sequence, ask) {
            Amended::Done => {}
            refused => return Ok(Some(refused)),
        }
        let Some((record, _)) = self.record().await? else {
            return Ok(Some(Amended::Gone));
        };
        let record = Record {
            token: Some(self.node.token),
            ..record
        };
        let is_lighter = match (before, ask) {
            (Ask::Whole, _) => true,
            (Ask::Part { weight: old, .. }, Ask::Part { weight: new, .. }) => new <= old,
            (Ask::Part { .. }, Ask::Whole) => false,
        };
        let waits = line.seats.iter().find(|seat| !seat.is_held());
        let waits = waits.map(|seat| self.path(&seat.extra.child.name));
        if is_lighter || waits.is_some() {
            let waits = waits.filter(|_| !is_lighter);
            return self.replace(ask, &record, waits).await;
        }
        self.second_node(ask, &record).await
    }

    /// Replaces the claim's znode, provided that `waits` still waits behind it.
    async fn replace(
        &self,
        ask: Ask,
        record: &Record,
        waits: Option<String>,
    ) -> Result<Option<Amended>> {
        let keys = &self.engine.keys;
        let Some(Child { sequence, .. }) = Child::read(&self.node.name) else {
            return Ok(Some(Amended::Gone));
        };
        let name = format!("{}{sequence:010}", keys.ticket(self.ticket.claim, ask));
        if name == self.node.name {
            return Ok(Some(Amended::Done));
        }
        let acl = &self.engine.client.acl;
        let new = Request::create(&self.path(&name), &record.json(), acl, Lives::Ephemeral);
        let old = Request::delete(&self.path(&self.node.name));
        let waits = waits.as_deref().map(|path| Request::check(path, ANY));
        let steps: Vec<Request> = waits.into_iter().chain([new, old]).collect();
        let answers = self.call(vec![Request::multi(&steps)]).await?;
        match answers.first().ok_or_else(unexpected)?.multi() {
            Ok(()) => {
                self.moved(name, ask);
                Ok(Some(Amended::Done))
            }
            Err(refused) if refused.is(code::NO_NODE) => Ok(None),
            Err(refused) => Err(error::refused("amend", refused)),
        }
    }

    /// Takes a second place, and keeps it if only our own are ahead.
    async fn second_node(&self, ask: Ask, record: &Record) -> Result<Option<Amended>> {
        let ticket = self.engine.keys.ticket(self.ticket.claim, ask);
        let (path, acl) = (self.path(&ticket), &self.engine.client.acl);
        let data = record.json();
        let take = Request::create(&path, &data, acl, Lives::EphemeralSequential);
        let requests = vec![take, Request::children(&self.known.line, false)];
        let answers = self.call(requests).await?;
        let created = answers.first().ok_or_else(unexpected)?.created();
        let (path, _) = created.map_err(|refused| error::refused("amend", refused))?;
        let name = path.rsplit('/').next().unwrap_or_default().to_owned();
        let snapshot = Snapshot::new(&children(&answers)?.unwrap_or_default());
        let at = snapshot.find(&name).unwrap_or(0);
        let is_own = |place: &Place| place.child.claim == Some(self.ticket.claim);
        let mut ahead = snapshot.line.seats[..at].iter();
        // The old znode must be among them: it holds for both until it is deleted.
        let alone = snapshot.find(&self.node.name).is_some_and(|own| own < at)
            && ahead.all(|seat| is_own(&seat.extra));
        if !alone {
            self.call(vec![Request::delete(&path)]).await?;
            return Ok(None);
        }
        let old = self.path(&self.node.name);
        self.moved(name, ask);
        // Without a reply it goes with the claim: a leave in doubt deletes both.
        self.call(vec![Request::delete(&old)]).await?;
        Ok(Some(Amended::Done))
    }

    /// Records the claim's new znode.
    fn moved(&self, name: String, ask: Ask) {
        let token = self.node.token;
        self.engine.update(self.ticket.claim, |known| {
            known.node = Some(Node { name, token });
            known.ask = ask;
        });
        notify::guard(self.engine, self.ticket.claim);
    }
}

pub(super) async fn evict(
    engine: &Inner,
    name: &Name,
    id: &str,
    eviction: Eviction,
) -> Result<bool> {
    let line = engine.keys.line(name)?;
    let mut retry = Retry::times(TRIES);
    loop {
        let found = inspect::read_lines(engine, "evict", vec![line.clone()]).await?;
        let seats = found.into_iter().flat_map(|(_, found)| found.line.seats);
        let mut places = seats.map(|seat| seat.extra);
        let Some(place) = places.find(|place| place.child.id() == id) else {
            return Ok(false);
        };
        let path = format!("{line}/{}", place.child.name);
        let write = match (eviction, place.record) {
            (Eviction::Remove, _) => Request::delete(&path),
            (Eviction::Mark, Some(record)) if place.child.claim.is_some() => {
                let record = Record {
                    evicted: true,
                    ..record
                };
                Request::set_data(&path, &record.json(), place.version)
            }
            (Eviction::Mark, _) => {
                let message = "a ticket of another tool can't be asked to let go; take it away by \
                               force";
                return Err(Error::new(ErrorKind::Unsupported, "evict", message));
            }
        };
        let session = engine.client.any().await?;
        let answers = engine.client.call(&session, "evict", vec![write]).await?;
        match answers.first().ok_or_else(unexpected)?.done() {
            Ok(()) => return Ok(true),
            Err(refused) if refused.is(code::NO_NODE) || refused.is(code::BAD_VERSION) => {}
            Err(refused) => return Err(error::refused("evict", refused)),
        }
        retry.or_busy("evict").await?;
    }
}
