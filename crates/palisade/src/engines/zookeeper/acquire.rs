//! `enter` and `wait`. A place is a znode. Creating it and reading who is ahead take one round
//! trip, because a session's requests are executed in order. A waiter watches the nearest place
//! that excludes it, and reads the line again when that changes.

use std::sync::Arc;

use super::error;
use super::keys::{Keys, Record};
use super::proto::{Answer, Lives, Request, code};
use super::session::Session;
use super::snapshot::{Ahead, Snapshot};
use super::watches::Watched;
use super::{Inner, notify};
use crate::core::claim::{Ask, Claim};
use crate::core::clock::BootTime;
use crate::core::engine::{Entered, Place};
use crate::core::error::{Error, ErrorKind, Outcome, Result};
use crate::core::line::capacity_mismatch;
use crate::core::sync::sleep_until;
use crate::core::ticket::Ticket;
use crate::core::wait::look_by;

/// A claim of this client, from its enter to its leave.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) session: Arc<Session>,
    pub(super) line: Arc<str>,
    pub(super) ask: Ask,
    /// Its znode; `None` until a create was answered.
    pub(super) node: Option<Node>,
    /// The place whose change may grant it.
    pub(super) ahead: Option<Ahead>,
    /// Whether an operator evicts it.
    pub(super) evicted: bool,
    /// Whether it belongs to an agent, so that other agents check whether it is renewed.
    pub(super) is_agents: bool,
}

/// The znode of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    /// The name of the child of the line.
    pub(super) name: String,
    /// The czxid of the claim's first znode.
    pub(super) token: i64,
}

impl Node {
    pub(super) fn sequence(&self) -> u64 {
        u64::try_from(self.token).unwrap_or(0)
    }
}

/// How often an enter is repeated because its session has ended.
const SESSIONS: usize = 3;

/// How often the parents of a line are created again: an empty container can be removed at any
/// time.
const PARENTS: usize = 8;

pub(super) async fn enter(engine: &Arc<Inner>, claim: &Claim) -> Result<Entered> {
    let line: Arc<str> = engine.keys.line(&claim.name)?.into();
    for _ in 0..SESSIONS {
        let before = engine.known(claim.id);
        let again = before.as_ref().filter(|known| known.session.is_usable());
        let session = match again {
            Some(known) => Arc::clone(&known.session),
            None => engine.client.for_ttl(claim.ttl).await?,
        };
        let known = Known {
            session: Arc::clone(&session),
            line: Arc::clone(&line),
            ask: again.map_or(claim.ask, |known| known.ask),
            node: again.and_then(|known| known.node.clone()),
            ahead: None,
            evicted: again.is_some_and(|known| known.evicted),
            is_agents: claim.owner.agent.is_some(),
        };
        // Recorded before anything is sent, so that a leave finds the place of an enter that was
        // dropped.
        engine.known.lock().insert(claim.id, known);
        let entry = Entry {
            engine,
            claim,
            line: &line,
            session: &session,
        };
        let entered = entry.enter(before.is_some()).await;
        let taken = match &entered {
            // A session that has ended has no znodes.
            Err(error) if error.kind() == ErrorKind::Lost => continue,
            Ok(entered) => !matches!(entered, Entered::Busy),
            Err(error) => error.outcome() != Outcome::NotApplied,
        };
        if !taken {
            // An earlier copy may still be in flight; without one the claim is forgotten.
            let mut known = engine.known.lock();
            match before {
                Some(before) => known.insert(claim.id, before),
                None => known.remove(claim.id),
            }
        }
        return entered;
    }
    let message = "sessions end as soon as they begin; does somebody close them?";
    Err(Error::new(ErrorKind::Unreachable, "enter", message).maybe_applied())
}

/// One attempt of a claim on one session.
struct Entry<'a> {
    engine: &'a Arc<Inner>,
    claim: &'a Claim,
    line: &'a str,
    session: &'a Arc<Session>,
}

impl Entry<'_> {
    async fn call(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let client = &self.engine.client;
        client.call(self.session, "enter", requests).await
    }

    async fn enter(&self, tried: bool) -> Result<Entered> {
        if tried && let Some((node, names)) = self.find().await? {
            return self.place(node, &names, true).await;
        }
        // A claim that does not queue reads first, so that it writes only if it may hold.
        if !self.claim.queue {
            match self.names().await? {
                Some(names) if !Snapshot::new(&names).has_room(self.claim.ask)? => {
                    return Ok(Entered::Busy);
                }
                _ => {}
            }
        }
        let crowded = self.claim.queue
            && self.claim.ask == Ask::Whole
            && self
                .engine
                .known
                .lock()
                .has_others(self.line, self.claim.id);
        let (node, names) = self.create(!crowded).await?;
        if let Some(names) = names {
            return self.place(node, &names, self.claim.queue).await;
        }
        // Any place ahead excludes it, so if one of this client is ahead, the line need not be
        // read.
        let own = self.engine.known.lock().ahead_of(self.line, &node);
        match own {
            Some(ahead) => Ok(self.placed(node, Some(Ahead::Child(ahead)))),
            None => {
                let names = self.names().await?.unwrap_or_default();
                self.place(node, &names, true).await
            }
        }
    }

    /// The children of the line, after a `sync` with the leader; `None` when the line does not
    /// exist.
    async fn names(&self) -> Result<Option<Vec<String>>> {
        let requests = vec![
            Request::sync(self.line),
            Request::children(self.line, false),
        ];
        let answers = self.call(requests).await?;
        children(&answers)
    }

    /// The place that an earlier copy of this enter has taken. Requests sent before the connection
    /// broke have been executed or dropped: the server closes the old connection before it accepts
    /// the session on another one. A znode of an earlier session is not ours although it has our
    /// name (CURATOR-498, CURATOR-604), so it is deleted.
    async fn find(&self) -> Result<Option<(Node, Vec<String>)>> {
        let Some(names) = self.names().await? else {
            return Ok(None);
        };
        let known = self
            .engine
            .known(self.claim.id)
            .and_then(|known| known.node);
        for name in Snapshot::new(&names).nodes_of(self.claim.id) {
            let path = format!("{}/{name}", self.line);
            let answers = self.call(vec![Request::exists(&path)]).await?;
            let Some(stat) = answers.first().and_then(|answer| answer.stat().ok()) else {
                continue;
            };
            if stat.owner == self.session.id() {
                let token = match known.filter(|node| node.name == name) {
                    Some(node) => node.token,
                    None => stat.created,
                };
                return Ok(Some((Node { name, token }, names)));
            }
            self.call(vec![Request::delete(&path)]).await?;
        }
        Ok(None)
    }

    /// Takes the last place, and with `list` also reads the line.
    async fn create(&self, list: bool) -> Result<(Node, Option<Vec<String>>)> {
        let (engine, acl) = (self.engine, &self.engine.client.acl);
        let ticket = engine.keys.ticket(self.claim.id, self.claim.ask);
        let (path, data) = (
            format!("{}/{ticket}", self.line),
            Record::new(self.claim).json(),
        );
        let mut take = vec![Request::create(
            &path,
            &data,
            acl,
            Lives::EphemeralSequential,
        )];
        take.extend(list.then(|| Request::children(self.line, false)));
        let mut requests = take.clone();
        for _ in 0..PARENTS {
            let mut answers = self.call(requests).await?;
            let listed = if list { answers.pop() } else { None };
            let Some((created, parents)) = answers.split_last() else {
                return Err(unexpected());
            };
            match created.created() {
                Ok((path, stat)) => {
                    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
                    let token = stat.created;
                    let node = Node { name, token };
                    self.engine.update(self.claim.id, |known| {
                        known.node = Some(node.clone());
                        known.ask = self.claim.ask;
                    });
                    let listed = listed.map(|listed| listed.children()).transpose();
                    let listed =
                        listed.map_err(|refused| error::refused("enter", refused).maybe_applied());
                    return Ok((node, listed?.map(|(names, _)| names)));
                }
                Err(refused) if refused.is(code::NO_NODE) => {
                    if let Some(denied) = parents.iter().find(|made| made.error == code::NO_AUTH) {
                        let refused = denied.done().err().unwrap_or(refused);
                        return Err(error::refused("enter", refused));
                    }
                    let parents = Keys::parents(self.line);
                    let make = |path| Request::create(path, &[], acl, Lives::Container);
                    requests = parents.map(make).chain(take.clone()).collect();
                }
                Err(refused) => return Err(error::refused("enter", refused)),
            }
        }
        let message = "the nodes above the line are removed as soon as they are created";
        Err(Error::new(ErrorKind::Unreachable, "enter", message))
    }

    /// The result for a claim whose znode exists, from the line as it was read.
    async fn place(&self, node: Node, names: &[String], queue: bool) -> Result<Entered> {
        let snapshot = Snapshot::new(names);
        let Some(at) = snapshot.find(&node.name) else {
            let message = "the place was removed while the request was in flight";
            return Err(Error::new(ErrorKind::Unreachable, "enter", message).maybe_applied());
        };
        if let Some((live, asked)) = snapshot.line.seats[at].extra.misfit {
            self.give_back(&node).await?;
            return Err(capacity_mismatch(live, asked));
        }
        let ahead = snapshot.ahead_of(at);
        if ahead.is_some() && !queue {
            self.give_back(&node).await?;
            return Ok(Entered::Busy);
        }
        Ok(self.placed(node, ahead))
    }

    /// Records the claim's place and what it waits for.
    fn placed(&self, node: Node, ahead: Option<Ahead>) -> Entered {
        let sequence = node.sequence();
        let place = match ahead {
            None => Place::Held { sequence },
            Some(_) => Place::Waiting,
        };
        let native = format!("{}/{}", self.line, node.name);
        self.engine.update(self.claim.id, |known| {
            (known.node, known.ahead) = (Some(node), ahead);
        });
        notify::guard(self.engine, self.claim.id);
        Entered::In {
            ticket: Ticket {
                lease: self.session.lease(),
                sequence,
                native: Some(native.into()),
                ..Ticket::own(self.claim.name.clone(), self.claim.id)
            },
            // Every write that a majority accepted renews the session, including the one for this
            // place.
            armed: self.session.armed(),
            place,
        }
    }

    async fn give_back(&self, node: &Node) -> Result<()> {
        let path = format!("{}/{}", self.line, node.name);
        let given = self.call(vec![Request::delete(&path)]).await;
        // Without a reply the place may still exist.
        given.map(drop).map_err(Error::maybe_applied)
    }
}

/// The children in the last answer; `None` when the znode does not exist.
pub(super) fn children(answers: &[Answer]) -> Result<Option<Vec<String>>> {
    match answers.last().ok_or_else(unexpected)?.children() {
        Ok((names, _)) => Ok(Some(names)),
        Err(refused) if refused.is(code::NO_NODE) => Ok(None),
        Err(refused) => Err(error::refused("read", refused)),
    }
}

pub(super) fn unexpected() -> Error {
    Error::new(ErrorKind::Internal, "call", "answers are missing (bug)").maybe_applied()
}

/// Sleeps until the place may have changed, then reads the line. A change after the last read fires
/// the watch. A change before the watch was set is found when it is set.
pub(super) async fn wait(engine: &Inner, ticket: &Ticket, until: BootTime) -> Result<Place> {
    let known = engine.known(ticket.claim);
    let Some((known, node)) = known.and_then(|known| Some((known.clone(), known.node?))) else {
        return Ok(Place::Gone);
    };
    if ticket.sequence != 0 && node.sequence() != ticket.sequence {
        return Ok(Place::Gone);
    }
    let ahead = known.ahead.clone().filter(|_| !until.has_passed());
    let waiter = Waiter {
        engine,
        ticket,
        known: &known,
        node: &node,
    };
    match waiter.wait(ahead, until).await {
        // The session has ended, and with it the place.
        Err(error) if error.kind() == ErrorKind::Lost => Ok(Place::Gone),
        waited => waited,
    }
}

/// One waiting claim.
struct Waiter<'a> {
    engine: &'a Inner,
    ticket: &'a Ticket,
    known: &'a Known,
    node: &'a Node,
}

impl Waiter<'_> {
    async fn call(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let client = &self.engine.client;
        client.call(&self.known.session, "wait", requests).await
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.known.line)
    }

    async fn wait(&self, mut ahead: Option<Ahead>, until: BootTime) -> Result<Place> {
        loop {
            let seen = match ahead.take() {
                // From the enter, or from an earlier read.
                Some(ahead) => Err(ahead),
                None => {
                    let look = Request::children(&self.known.line, false);
                    self.place(children(&self.call(vec![look]).await?)?)
                }
            };
            match seen {
                Ok(place) => return Ok(place),
                Err(_) if until.has_passed() => return Ok(Place::Waiting),
                Err(Ahead::Child(name)) => {
                    if let Some(place) = self.sleep_on(&name, until).await? {
                        return Ok(place);
                    }
                }
                Err(Ahead::Anyone) => {
                    let fired = self
                        .known
                        .session
                        .watch(&self.known.line, Watched::Children);
                    let look = Request::children(&self.known.line, true);
                    if let Ok(place) = self.place(children(&self.call(vec![look]).await?)?) {
                        return Ok(place);
                    }
                    tokio::select! {
                        _ = fired => {}
                        () = sleep_until(look_by(until)) => {}
                    }
                }
            }
        }
    }

    /// Sleeps until the place ahead changes, or until `until`, when it returns that the claim still
    /// waits.
    async fn sleep_on(&self, name: &str, until: BootTime) -> Result<Option<Place>> {
        let ahead = self.path(name);
        let mut fired = self.known.session.watch(&ahead, Watched::Node);
        let answers = self.call(vec![Request::data(&ahead, true)]).await?;
        // It was gone before the watch was set.
        if answers.iter().any(|answer| answer.error != 0) {
            return Ok(None);
        }
        loop {
            tokio::select! {
                _ = &mut fired => return Ok(None),
                () = sleep_until(look_by(until)) => {}
            }
            // Two `exists` are cheaper than reading the whole line. No watch reports the end of the
            // claim's own znode.
            let own = Request::exists(&self.path(&self.node.name));
            let answers = self.call(vec![own, Request::exists(&ahead)]).await?;
            let [own, ahead] = answers.as_slice() else {
                return Err(unexpected());
            };
            match (own.error, ahead.error) {
                (code::NO_NODE, _) => return Ok(Some(Place::Gone)),
                (_, 0) if until.has_passed() => return Ok(Some(Place::Waiting)),
                (_, 0) => {}
                _ => return Ok(None),
            }
        }
    }

    /// The claim's place in the line that was read, or the place that it waits for. Only a read
    /// that contains its own znode counts.
    fn place(&self, names: Option<Vec<String>>) -> std::result::Result<Place, Ahead> {
        let snapshot = Snapshot::new(&names.unwrap_or_default());
        let Some(at) = snapshot.find(&self.node.name) else {
            return Ok(Place::Gone);
        };
        let ahead = snapshot.ahead_of(at);
        self.engine.update(self.ticket.claim, |known| {
            known.ahead.clone_from(&ahead);
        });
        let sequence = self.node.sequence();
        ahead.map_or(Ok(Place::Held { sequence }), Err)
    }
}
