//! `enter` and `wait`. A place is a znode. Creating it and reading who is ahead take one round
//! trip, because a session's requests are executed in order. A waiter watches the nearest place
//! that excludes it, and reads the line again when that changes.

use std::sync::Arc;

use super::error;
use super::keys::{Keys, Record};
use super::proto::{Answer, Lives, Reply, Request, code};
use super::session::Session;
use super::snapshot::{Ahead, Snapshot};
use super::watches::Watched;
use super::{Inner, notify};
use palisade_core::engine::sync::sleep_until;
use palisade_core::engine::{Ask, Claim, Entered, Place, Ticket, capacity_mismatch, look_by};
use palisade_core::{BootTime, Error, ErrorKind, Outcome, Result};

/// A claim of this client, from its enter to its leave.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) session: Arc<Session>,
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
    /// The znode that was created.
    pub(super) fn of(created: &Reply) -> Self {
        Self {
            name: created
                .path
                .rsplit('/')
                .next()
                .unwrap_or_default()
                .to_owned(),
            token: created.stat.created,
        }
    }

    pub(super) fn sequence(&self) -> u64 {
        u64::try_from(self.token).unwrap_or(0)
    }
}

/// How many sessions an enter tries, in case they end.
const SESSIONS: usize = 3;

/// How often the parents of a line are created again: an empty container can be removed at any
/// time.
const PARENTS: usize = 8;

pub(super) async fn enter(engine: &Arc<Inner>, claim: &Claim) -> Result<Entered> {
    for _ in 0..SESSIONS {
        match attempt(engine, claim).await {
            // A session that has ended has no znodes.
            Err(error) if error.kind() == ErrorKind::Lost => {}
            entered => return entered,
        }
    }
    let message = "sessions end as soon as they begin; does somebody close them?";
    Err(Error::new(ErrorKind::Unreachable, "enter", message).maybe_applied())
}

/// Takes the last place on one session.
async fn attempt(engine: &Arc<Inner>, claim: &Claim) -> Result<Entered> {
    let line: Arc<str> = engine.keys.line(&claim.name)?.into();
    let path = format!("{line}/{}", engine.keys.ticket(claim.id, claim.ask));
    let before = engine.known(&line, claim.id);
    let known = match before.clone().filter(|known| known.session.is_usable()) {
        Some(known) => Known {
            ahead: None,
            ..known
        },
        None => Known {
            session: match engine.client.for_ttl(claim.ttl).await {
                Ok(session) => session,
                // Maybe applied, so that the caller leaves: only a leave forgets the earlier copy.
                Err(error) if before.is_some() => return Err(error.maybe_applied()),
                Err(error) => return Err(error),
            },
            node: None,
            ahead: None,
            evicted: false,
            is_agents: claim.owner.agent.is_some(),
        },
    };
    let session = Arc::clone(&known.session);
    // Recorded before anything is sent, so that a leave finds the place of an enter that was
    // dropped.
    engine.remember(&line, claim.id, known);
    let entered = async {
        let entry = Entry {
            engine,
            claim,
            line: &line,
            session,
        };
        if (before.is_some() || !claim.queue)
            && let Some(entered) = entry.look(before.is_some()).await?
        {
            return Ok(entered);
        }
        let crowded = claim.queue && claim.ask == Ask::Whole && engine.has_others(&line, claim.id);
        let take = || {
            let create = Request::Create {
                path: path.clone(),
                data: Record::new(claim).json(),
                acl: engine.client.acl,
                lives: Lives::EphemeralSequential,
            };
            let list = (!crowded).then(|| Request::Children(line.to_string(), false));
            [create].into_iter().chain(list).collect()
        };
        let mut answers = entry.call(take()).await?;
        if is_orphan(&answers) {
            answers = entry.call_with_parents(take).await?;
        }
        let listed = if crowded { None } else { answers.pop() };
        let created = answers.pop().ok_or_else(error::missing)?;
        let created = created.map_err(|refused| error::refused("enter", refused))?;
        let node = Node::of(&created);
        // Recorded at once, so that a leave deletes it without a list, which may be denied.
        engine.update(&line, claim.id, |known| known.node = Some(node.clone()));
        let listed = listed.transpose();
        let listed = listed.map_err(|refused| error::refused("enter", refused).maybe_applied())?;
        let names = listed.map(|listed| listed.names);
        entry.place(node, names, claim.queue).await
    };
    let entered = entered.await;
    let taken = match &entered {
        Ok(entered) => !matches!(entered, Entered::Busy),
        Err(error) => error.kind() == ErrorKind::Lost || error.outcome() != Outcome::NotApplied,
    };
    match before {
        _ if taken => {}
        // An earlier copy may still be in flight; without one the claim is forgotten.
        Some(before) => engine.remember(&line, claim.id, before),
        None => engine.forget(&line, claim.id),
    }
    entered
}

/// Whether the znode above the one to create does not exist.
fn is_orphan(answers: &[Answer]) -> bool {
    matches!(answers.first(), Some(Err(refused)) if refused.is(code::NO_NODE))
}

/// One attempt of a claim on one session.
struct Entry<'a> {
    engine: &'a Arc<Inner>,
    claim: &'a Claim,
    line: &'a str,
    session: Arc<Session>,
}

impl Entry<'_> {
    async fn call(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        self.session
            .call("enter", self.engine.client.timeout, requests)
            .await
    }

    async fn names(&self) -> Result<Option<Vec<String>>> {
        names(self.engine, &self.session, "enter", self.line).await
    }

    /// The result if no new place is needed: an earlier copy (`tried`) has taken one, or a claim
    /// that does not queue finds no room. So such a claim writes only if it may hold.
    async fn look(&self, tried: bool) -> Result<Option<Entered>> {
        if tried && let Some((node, names)) = self.find().await? {
            return self.place(node, Some(names), true).await.map(Some);
        }
        let full = !self.claim.queue
            && match self.names().await? {
                Some(names) => !Snapshot::new(&names).has_room(self.claim.ask)?,
                None => false,
            };
        Ok(full.then_some(Entered::Busy))
    }

    /// The place that an earlier copy of this enter has taken. Requests sent before the connection
    /// broke have been executed or dropped: the server closes the old connection before it accepts
    /// the session on another one. A znode of an earlier session is not ours although it has our
    /// name (CURATOR-498, CURATOR-604), so it is deleted.
    async fn find(&self) -> Result<Option<(Node, Vec<String>)>> {
        let Some(names) = self.names().await? else {
            return Ok(None);
        };
        let known = self.engine.known(self.line, self.claim.id);
        let known = known.and_then(|known| known.node);
        for name in Snapshot::new(&names).nodes_of(self.claim.id) {
            let path = format!("{}/{name}", self.line);
            let mut answers = self.call(vec![Request::Exists(path.clone())]).await?;
            let Some(Ok(Reply { stat, .. })) = answers.pop() else {
                continue;
            };
            if stat.owner == self.session.id() {
                let token = match known.filter(|node| node.name == name) {
                    Some(node) => node.token,
                    None => stat.created,
                };
                return Ok(Some((Node { name, token }, names)));
            }
            self.call(vec![Request::Delete(path)]).await?;
        }
        Ok(None)
    }

    /// Sends `take` again, after requests that create the znodes above.
    async fn call_with_parents(&self, take: impl Fn() -> Vec<Request>) -> Result<Vec<Answer>> {
        for _ in 0..PARENTS {
            let create = |path: &str| Request::Create {
                path: path.to_owned(),
                data: Vec::new(),
                acl: self.engine.client.acl,
                lives: Lives::Container,
            };
            let mut requests: Vec<Request> = Keys::parents(self.line).map(create).collect();
            let parents = requests.len();
            requests.extend(take());
            let mut made = self.call(requests).await?;
            let answers = made.split_off(parents.min(made.len()));
            if !is_orphan(&answers) {
                return Ok(answers);
            }
            let mut refused = made.into_iter().filter_map(Answer::err);
            if let Some(denied) = refused.find(|refused| refused.is(code::NO_AUTH)) {
                return Err(error::refused("enter", denied));
            }
        }
        let message = "the nodes above the line are removed as soon as they are created";
        Err(Error::new(ErrorKind::Unreachable, "enter", message))
    }

    /// The result for a claim whose znode exists, from the line as it was read. If it was not read,
    /// there may be a znode of this client ahead.
    async fn place(&self, node: Node, names: Option<Vec<String>>, queue: bool) -> Result<Entered> {
        let (engine, claim) = (self.engine, self.claim);
        let own = match names {
            Some(_) => None,
            None => engine.own_before(self.line, &node),
        };
        let ahead = match own {
            // Any place ahead excludes it, so the line need not be read.
            Some(name) => Some(Ahead::Child(name)),
            None => {
                let names = match names {
                    Some(names) => names,
                    None => {
                        let names = self.names().await.map_err(Error::maybe_applied)?;
                        names.unwrap_or_default()
                    }
                };
                let snapshot = Snapshot::new(&names);
                let Some(at) = snapshot.find(&node.name) else {
                    let message = "the place was removed while the request was in flight";
                    let error = Error::new(ErrorKind::Unreachable, "enter", message);
                    return Err(error.maybe_applied());
                };
                if let Some((live, asked)) = snapshot.line.seats[at].extra.misfit {
                    self.give_back(&node).await?;
                    return Err(capacity_mismatch(live, asked));
                }
                snapshot.ahead_of(at)
            }
        };
        if ahead.is_some() && !queue {
            self.give_back(&node).await?;
            return Ok(Entered::Busy);
        }
        let sequence = node.sequence();
        let place = match ahead {
            None => Place::Held { sequence },
            Some(_) => Place::Waiting,
        };
        let native = format!("{}/{}", self.line, node.name);
        engine.update(self.line, claim.id, |known| {
            (known.node, known.ahead) = (Some(node), ahead);
        });
        let guard = notify::guard(Arc::downgrade(engine), self.line.into(), claim.id);
        engine.client.thread.spawn(guard);
        Ok(Entered::In {
            ticket: Ticket {
                lease: self.session.lease(),
                sequence,
                native: Some(native.into()),
                ..Ticket::own(claim.name.clone(), claim.id)
            },
            // Every write that a majority accepted renews the session, including the one for this
            // place.
            armed: self.session.armed(),
            place,
        })
    }

    async fn give_back(&self, node: &Node) -> Result<()> {
        let path = format!("{}/{}", self.line, node.name);
        let given = self.call(vec![Request::Delete(path)]).await;
        // Without a reply the place may still exist.
        given.map(drop).map_err(Error::maybe_applied)
    }
}

/// The children of the line, after a `sync` with the leader; `None` when the line does not exist.
pub(super) async fn names(
    engine: &Inner,
    session: &Session,
    operation: &'static str,
    line: &str,
) -> Result<Option<Vec<String>>> {
    let sync = Request::Sync(line.to_owned());
    let list = Request::Children(line.to_owned(), false);
    let answers = session.call(operation, engine.client.timeout, vec![sync, list]);
    children(answers.await?)
}

/// The children in the last answer; `None` when the znode does not exist.
pub(super) fn children(mut answers: Vec<Answer>) -> Result<Option<Vec<String>>> {
    match answers.pop().ok_or_else(error::missing)? {
        Ok(listed) => Ok(Some(listed.names)),
        Err(refused) if refused.is(code::NO_NODE) => Ok(None),
        Err(refused) => Err(error::refused("read", refused)),
    }
}

/// Sleeps until the place may have changed, then reads the line. A change after the last read fires
/// the watch. A change before the watch was set is found when it is set.
pub(super) async fn wait(engine: &Inner, ticket: &Ticket, until: BootTime) -> Result<Place> {
    let line = engine.keys.line(&ticket.name)?;
    let known = engine.known(&line, ticket.claim);
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
        line: &line,
        session: &known.session,
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
    line: &'a str,
    session: &'a Session,
    node: &'a Node,
}

impl Waiter<'_> {
    async fn call(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        self.session
            .call("wait", self.engine.client.timeout, requests)
            .await
    }

    async fn list(&self, watch: bool) -> Result<Option<Vec<String>>> {
        let look = Request::Children(self.line.to_owned(), watch);
        children(self.call(vec![look]).await?)
    }

    async fn wait(&self, mut ahead: Option<Ahead>, until: BootTime) -> Result<Place> {
        loop {
            let seen = match ahead.take() {
                // From the enter, or from an earlier read.
                Some(ahead) => Err(ahead),
                None => self.place(self.list(false).await?),
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
                    let fired = self.session.watch(self.line, Watched::Children);
                    if let Ok(place) = self.place(self.list(true).await?) {
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
        let path = |name: &str| format!("{}/{name}", self.line);
        let mut fired = self.session.watch(&path(name), Watched::Node);
        let answers = self.call(vec![Request::Data(path(name), true)]).await?;
        // It was gone before the watch was set.
        if answers.iter().any(Answer::is_err) {
            return Ok(None);
        }
        loop {
            tokio::select! {
                _ = &mut fired => return Ok(None),
                () = sleep_until(look_by(until)) => {}
            }
            // Two `exists` are cheaper than reading the whole line. No watch reports the end of the
            // claim's own znode.
            let own = Request::Exists(path(&self.node.name));
            let answers = self.call(vec![own, Request::Exists(path(name))]).await?;
            let [own, ahead] = answers.as_slice() else {
                return Err(error::missing());
            };
            match (own, ahead) {
                (Err(refused), _) if refused.is(code::NO_NODE) => return Ok(Some(Place::Gone)),
                (_, Ok(_)) if until.has_passed() => return Ok(Some(Place::Waiting)),
                (_, Ok(_)) => {}
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
        self.engine.update(self.line, self.ticket.claim, |known| {
            known.ahead.clone_from(&ahead);
        });
        let sequence = self.node.sequence();
        ahead.map_or(Ok(Place::Held { sequence }), Err)
    }
}
