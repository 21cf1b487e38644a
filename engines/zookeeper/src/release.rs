//! `leave`, `amend` and `evict`. A znode's name is its incarnation: it contains the claim and the
//! sequence, and no other znode ever has this name.
//!
//! Znodes can't be renamed, and their names contain the weight. A claim that reduces its weight
//! gets another znode with the same sequence, and the old one is deleted atomically. A claim that
//! increases its weight must be sure that nobody else holds at that moment. Either somebody waits
//! behind it: then nobody can have been granted since, and the transaction checks that they still
//! wait. Or a second znode at the end of the line shows that nobody else is in it.

use std::sync::Arc;

use super::acquire::{Node, children, names};
use super::error;
use super::keys::{Child, Record};
use super::proto::{ANY, Answer, Lives, Request, code};
use super::session::Session;
use super::snapshot::{Place, Snapshot};
use super::{Inner, inspect, notify};
use palisade_core::engine::{Amended, Amendment, Ask, ClaimId, Left, Ticket};
use palisade_core::{Error, ErrorKind, Eviction, Name, Outcome, Result};
use palisade_kit::cas::Retry;

/// How often a change is retried because the line has changed in between.
const TRIES: u32 = 16;

pub(super) async fn leave(engine: &Inner, ticket: &Ticket) -> Result<Left> {
    let line = engine.keys.line(&ticket.name)?;
    let known = engine.known(&line, ticket.claim);
    let node = known.as_ref().and_then(|known| known.node.as_ref());
    if let Some(node) = node
        && ticket.sequence != 0
        && node.sequence() != ticket.sequence
    {
        return Ok(Left::Absent);
    }
    let mut left = false;
    if let Some(known) = &known {
        // First, because the list that finds the others may be denied.
        if let Some(node) = node {
            let path = format!("{line}/{}", node.name);
            left = delete(engine, Some(&known.session), &path).await?;
        }
        // An enter was not answered, or two copies were sent.
        if node.is_none() || ticket.in_doubt {
            left |= leave_all(engine, &known.session, &line, ticket.claim).await?;
        }
    } else if let Some(path) = &ticket.native {
        left = delete(engine, None, path).await?;
    }
    engine.forget(&line, ticket.claim);
    Ok(Left::of(left))
}

/// Deletes all znodes of the claim. The request follows their creates on the same session, so none
/// can appear later.
async fn leave_all(engine: &Inner, session: &Session, line: &str, claim: ClaimId) -> Result<bool> {
    let names = match names(engine, session, "leave", line).await {
        // They were deleted with their session.
        Err(error) if error.kind() == ErrorKind::Lost => return Ok(false),
        names => names?.unwrap_or_default(),
    };
    let mut left = false;
    for name in Snapshot::new(&names).nodes_of(claim) {
        left |= delete(engine, Some(session), &format!("{line}/{name}")).await?;
    }
    Ok(left)
}

/// Deletes a znode, and returns whether it existed. The znodes of a session that has ended are
/// gone, or soon will be; they are deleted through another session. An unanswered request is
/// retried once.
async fn delete(engine: &Inner, session: Option<&Session>, path: &str) -> Result<bool> {
    let client = &engine.client;
    let mut session = session.filter(|session| session.is_usable());
    let mut maybe = false;
    for last in [false, true] {
        let requests = vec![Request::Delete(path.to_owned())];
        let answers = match session {
            Some(session) => session.call("leave", client.timeout, requests).await,
            None => client.read("leave", &requests).await,
        };
        match answers {
            Ok(mut answers) => {
                return match answers.pop().ok_or_else(error::missing)? {
                    Ok(_) => Ok(true),
                    // If it is gone by now, the first copy was applied.
                    Err(refused) if refused.is(code::NO_NODE) => Ok(maybe),
                    Err(refused) => Err(error::refused("leave", refused)),
                };
            }
            Err(error) if error.kind() == ErrorKind::Lost && !last => session = None,
            Err(error) if error.is_transient() && !last => {
                maybe |= error.outcome() == Outcome::MaybeApplied;
            }
            Err(error) => return Err(error.maybe_applied()),
        }
    }
    Ok(maybe)
}

pub(super) async fn amend(
    engine: &Arc<Inner>,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    let line = engine.keys.line(&ticket.name)?;
    let mut retry = Retry::times(TRIES);
    loop {
        let known = engine.known(&line, ticket.claim);
        let Some((known, node)) = known.and_then(|known| Some((known.clone(), known.node?))) else {
            return Ok(Amended::Gone);
        };
        if node.sequence() != ticket.sequence {
            return Ok(Amended::Gone);
        }
        let amending = Amending {
            engine,
            ticket,
            line: &line,
            session: &known.session,
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
    line: &'a str,
    session: &'a Session,
    node: &'a Node,
}

impl Amending<'_> {
    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.line)
    }

    async fn ask(&self, request: Request) -> Result<Answer> {
        let timeout = self.engine.client.timeout;
        self.session.ask("amend", timeout, request).await
    }

    /// The claim's record and its version; `None` when its znode is gone.
    async fn record(&self) -> Result<Option<(Record, i32)>> {
        let read = Request::Data(self.path(&self.node.name), false);
        let found = match self.ask(read).await? {
            Ok(found) => found,
            Err(refused) if refused.is(code::NO_NODE) => return Ok(None),
            Err(refused) => return Err(error::refused("amend", refused)),
        };
        let Some(record) = Record::read(&found.data) else {
            let message = "the record of this place can't be read; was it changed by hand?";
            return Err(Error::new(ErrorKind::Unusable, "amend", message));
        };
        Ok(Some((record, found.stat.version)))
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
        match self
            .ask(Request::SetData(path, record.json(), version))
            .await?
        {
            Ok(_) => Ok(Some(Amended::Done)),
            Err(refused) if refused.is(code::NO_NODE) => Ok(Some(Amended::Gone)),
            Err(refused) if refused.is(code::BAD_VERSION) => Ok(None),
            Err(refused) => Err(error::refused("amend", refused)),
        }
    }

    async fn reweigh(&self, ask: Ask) -> Result<Option<Amended>> {
        // After a `sync`: a follower may not know yet that another reader is gone, and would refuse
        // an upgrade needlessly.
        let names = names(self.engine, self.session, "amend", self.line).await?;
        let mut snapshot = Snapshot::new(&names.unwrap_or_default());
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
        let new = self.create(&name, record, Lives::Ephemeral);
        let old = Request::Delete(self.path(&self.node.name));
        let waits = waits.map(|path| Request::Check(path, ANY));
        let steps = waits.into_iter().chain([new, old]).collect();
        match self.ask(Request::Multi(steps)).await? {
            Ok(_) => {
                self.moved(name);
                Ok(Some(Amended::Done))
            }
            Err(refused) if refused.is(code::NO_NODE) => Ok(None),
            Err(refused) => Err(error::refused("amend", refused)),
        }
    }

    fn create(&self, name: &str, record: &Record, lives: Lives) -> Request {
        Request::Create {
            path: self.path(name),
            data: record.json(),
            acl: self.engine.client.acl,
            lives,
        }
    }

    /// Takes a second place, and keeps it if only our own are ahead.
    async fn second_node(&self, ask: Ask, record: &Record) -> Result<Option<Amended>> {
        let (engine, timeout) = (self.engine, self.engine.client.timeout);
        let ticket = engine.keys.ticket(self.ticket.claim, ask);
        let take = self.create(&ticket, record, Lives::EphemeralSequential);
        let list = Request::Children(self.line.to_owned(), false);
        let answers = self.session.call("amend", timeout, vec![take, list]);
        let mut answers = answers.await?;
        let listed = answers.split_off(1.min(answers.len()));
        let created = answers.pop().ok_or_else(error::missing)?;
        let created = created.map_err(|refused| error::refused("amend", refused))?;
        let name = Node::of(&created).name;
        let listed = children(listed).map_err(Error::maybe_applied)?;
        let snapshot = Snapshot::new(&listed.unwrap_or_default());
        let at = snapshot.find(&name).unwrap_or(0);
        let is_own = |place: &Place| place.child.claim == Some(self.ticket.claim);
        let mut ahead = snapshot.line.seats[..at].iter();
        // The old znode must be among them: it holds for both until it is deleted.
        let alone = snapshot.find(&self.node.name).is_some_and(|own| own < at)
            && ahead.all(|seat| is_own(&seat.extra));
        if !alone {
            let _ = self.ask(Request::Delete(created.path)).await?;
            return Ok(None);
        }
        let old = self.path(&self.node.name);
        self.moved(name);
        // Without a reply it goes with the claim: a leave in doubt deletes both.
        let _ = self.ask(Request::Delete(old)).await?;
        Ok(Some(Amended::Done))
    }

    /// Records the claim's new znode.
    fn moved(&self, name: String) {
        let (token, claim) = (self.node.token, self.ticket.claim);
        self.engine.update(self.line, claim, |known| {
            known.node = Some(Node { name, token });
        });
        let guard = notify::guard(Arc::downgrade(self.engine), self.line.into(), claim);
        self.engine.client.thread.spawn(guard);
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
            (Eviction::Remove, _) => Request::Delete(path),
            (Eviction::Mark, Some(record)) if place.child.claim.is_some() => {
                let record = Record {
                    evicted: true,
                    ..record
                };
                Request::SetData(path, record.json(), place.version)
            }
            (Eviction::Mark, _) => {
                let message = "a ticket of another tool can't be asked to let go; take it away by \
                               force";
                return Err(Error::new(ErrorKind::Unsupported, "evict", message));
            }
        };
        let session = engine.client.any().await?;
        match session.ask("evict", engine.client.timeout, write).await? {
            Ok(_) => return Ok(true),
            Err(refused) if refused.is(code::NO_NODE) || refused.is(code::BAD_VERSION) => {}
            Err(refused) => return Err(error::refused("evict", refused)),
        }
        retry.or_busy("evict").await?;
    }
}
