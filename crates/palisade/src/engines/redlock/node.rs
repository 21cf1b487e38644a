//! `Node`: one of the independent servers. A vote is an exclusive claim as in `redis:`, with a
//! token proposed by the client. This module asks for votes and retracts them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use redis::Cmd;

use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::unix_time;
use crate::core::error::{Error, ErrorKind, Outcome, Result, config_error};
use crate::core::url::Settings;
use crate::engines::kit::push::PushHub;
use crate::engines::kit::{Host, Link, PerRuntime};
use crate::engines::redis::client::{Client, Script, nonsense};
use crate::engines::redis::connection::{Connection, Freed, Role, Server};
use crate::engines::redis::keys::{Keys, LineKeys};
use crate::engines::redis::notify::FREE;
use crate::engines::redis::servers::{One, Servers};

/// The key outlives the lease by this many milliseconds: the server counts whole milliseconds.
const ROUNDING: u64 = 2;

pub(super) struct Node {
    pub(super) at: usize,
    host: Host,
    pub(super) client: Arc<Client>,
    /// A server that has been up for less than this may have forgotten a vote.
    guard: Option<Duration>,
}

/// The `run_id` of each node's server, as far as it is known.
type RunIds = Arc<Mutex<Vec<Option<String>>>>;

/// One attempt of a claim, the same for all nodes.
pub(super) struct Ballot {
    pub(super) id: ClaimId,
    pub(super) keys: LineKeys,
    /// The proposed token; it also identifies the attempt.
    pub(super) proposal: u64,
    pub(super) ttl: Duration,
    /// The connection on which each node was asked; 0 before the request, and after the reply.
    pub(super) asked_on: Vec<AtomicU64>,
    /// Set before the votes are retracted: requests that were not sent by then are not sent at all.
    pub(super) given_up: AtomicBool,
    /// Weight and capacity, and the claim's record, as `vote.lua` takes them.
    ask: String,
    record: String,
}

impl Ballot {
    pub(super) fn new(
        claim: &Claim,
        keys: LineKeys,
        channel: &str,
        permit: Option<u32>,
        proposal: u64,
        nodes: usize,
    ) -> Self {
        let (weight, capacity) = claim.ask.numbers();
        let ttl = claim.ttl.as_millis() as u64;
        let permit = permit.map_or_else(String::new, |permit| format!("@{permit} "));
        let owner = claim.owner.to_json();
        let mut record = format!(" {ttl} 0 {channel} {permit}{owner}");
        if let Some(value) = &claim.value {
            record.push('\n');
            record.push_str(value);
        }
        Self {
            id: claim.id,
            keys,
            proposal,
            ttl: claim.ttl,
            asked_on: (0..nodes).map(|_| AtomicU64::new(0)).collect(),
            given_up: AtomicBool::new(false),
            ask: format!("{weight} {capacity} {}", ttl + ROUNDING),
            record,
        }
    }
}

/// The answer of one server.
#[derive(Debug)]
pub(super) enum Vote {
    /// The claim has this server's vote.
    Held {
        /// The token that the server counted for it.
        token: u64,
        /// The time left on it there.
        left: Duration,
        /// The permits that others hold there.
        permits: Vec<u32>,
    },
    /// Another claim has it.
    Busy {
        /// When that may change.
        due: Duration,
        permits: Vec<u32>,
    },
    /// The claim was left before the request for a vote arrived.
    Left,
    /// The line has another capacity on that server.
    Mismatch(u32),
    /// The server did not vote, or the outcome is unknown.
    Failed(Error),
}

impl Vote {
    /// Parses the reply of `vote.lua`.
    fn read(answer: &str, ttl: Duration) -> Option<Self> {
        let mut words = answer.split(' ');
        let word = words.next()?;
        let mut number = || {
            words
                .next()
                .map_or(Some(None), |w| w.parse().ok().map(Some))
        };
        let vote = match word {
            "held" => {
                let (token, left) = (number()??, number()?);
                let _due: Option<u64> = number()?;
                Self::Held {
                    token,
                    left: left.map_or(ttl, |left| Duration::from_micros(left).min(ttl)),
                    permits: permits(words.next()),
                }
            }
            "busy" => Self::Busy {
                due: Duration::from_micros(number()??),
                permits: permits(words.next()),
            },
            "left" => Self::Left,
            "mismatch" => Self::Mismatch(u32::try_from(number()??).ok()?),
            _ => return None,
        };
        Some(vote)
    }

    /// Whether the server may have a vote for the claim.
    pub(super) fn may_hold(&self) -> bool {
        match self {
            Self::Held { .. } => true,
            Self::Failed(error) => error.outcome() == Outcome::MaybeApplied,
            Self::Busy { .. } | Self::Left | Self::Mismatch(_) => false,
        }
    }
}

fn permits(words: Option<&str>) -> Vec<u32> {
    let words = words.unwrap_or_default().split(',');
    words.filter_map(|word| word.parse().ok()).collect()
}

/// Which requests for a vote may still be in flight when the vote is retracted. The server refuses
/// them when they arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    No,
    /// Those of one attempt; the claim may try again.
    Try(u64),
    /// All requests of the claim.
    Claim,
    /// None if the retraction goes out on this connection, on which requests keep their order;
    /// otherwise all requests of the claim.
    Unless(u64),
}

/// The result of a retraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retracted {
    Left,
    Absent,
    /// The claim is there, with another token.
    Other,
}

impl Node {
    #[allow(clippy::too_many_arguments)] // All of it is what makes a node, once.
    pub(super) fn new(
        at: usize,
        server: Server,
        settings: &Settings,
        keys: &Keys,
        channel: String,
        freed: Freed,
        guard: Option<Duration>,
        run_ids: &RunIds,
    ) -> Self {
        let hub = Arc::new(PushHub::named(channel));
        let (to, ear, run_ids) = (server.clone(), Arc::clone(&hub), Arc::clone(run_ids));
        let links = PerRuntime::new(settings.connect_timeout, move || {
            let role = Role::Voter(Arc::clone(&freed));
            let (run_ids, host) = (Arc::clone(&run_ids), to.host.clone());
            let opening = Connection::open(to.clone(), Arc::clone(&ear), role);
            Box::pin(async move {
                let connection = opening.await?;
                if let Some(identity) = connection.identity() {
                    votes_once(&run_ids, at, &host, &identity.run_id)?;
                }
                Ok(connection)
            })
        });
        let host = server.host.clone();
        let links = links.to(&host);
        let client = Client {
            servers: Servers::One(One { server, links }),
            hub,
            keys: keys.clone(),
            replicas: 0,
            timeout: settings.timeout,
        };
        Self {
            at,
            host,
            client: Arc::new(client),
            guard,
        }
    }

    pub(super) fn host(&self) -> &Host {
        &self.host
    }

    pub(super) async fn link(&self) -> Result<Link<Connection>> {
        self.client.servers.link(None).await
    }

    /// The same error with the node's host in its message.
    pub(super) fn blame(&self, error: &Error) -> Error {
        let (host, said) = (self.host().to_string(), error.message());
        let message = if said.contains(&host) {
            said.to_owned()
        } else {
            format!("{host}: {said}")
        };
        let blamed = Error::new(error.kind(), error.operation(), message);
        match error.outcome() {
            Outcome::MaybeApplied => blamed.maybe_applied(),
            Outcome::NotApplied => blamed,
        }
    }

    /// The connection to vote on. A server that restarted recently may have forgotten a vote, so it
    /// does not vote until that vote must have expired.
    ///
    /// # Errors
    /// Never applied: no vote was asked for yet.
    async fn voter(&self) -> Result<Link<Connection>> {
        let link = self.link().await?;
        let identity = link.connection.identity();
        if let (Some(guard), Some(identity)) = (self.guard, identity) {
            let votes = identity.started + guard;
            if !votes.has_passed() {
                let message = format!(
                    "{} restarted recently and may have forgotten locks; it votes in {:.0?} (see restart_guard=)",
                    self.host(),
                    votes.remaining()
                );
                return Err(Error::new(ErrorKind::Unreachable, "enter", message));
            }
        }
        Ok(link)
    }

    /// Runs a script whose reply begins with the claim's id and `which`, the request that it
    /// answers. On a connection that lost a reply, every later reply would go to the wrong request.
    async fn run(
        &self,
        link: &mut Link<Connection>,
        script: Script,
        keys: &LineKeys,
        id: ClaimId,
        which: &str,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<String> {
        let answer = self
            .client
            .run_for(link, script, keys, id, arguments)
            .await?;
        let rest = answer
            .strip_prefix(which)
            .and_then(|rest| rest.strip_prefix(' '));
        match rest {
            Some(rest) => Ok(rest.to_owned()),
            None => Err(self.client.misled(script.operation(), link).await),
        }
    }

    /// Asks for the vote of this server.
    pub(super) async fn vote(&self, ballot: &Ballot) -> Vote {
        let mut link = match self.voter().await {
            Ok(link) => link,
            Err(error) => return Vote::Failed(error),
        };
        let asked_on = &ballot.asked_on[self.at];
        asked_on.store(link.generation(), Ordering::SeqCst);
        // Either this load sees that the attempt was given up, or the retraction sees that the
        // request was sent.
        if ballot.given_up.load(Ordering::SeqCst) {
            asked_on.store(0, Ordering::SeqCst);
            let message = "the attempt was given up before it was sent";
            return Vote::Failed(Error::new(ErrorKind::Unreachable, "enter", message));
        }
        let which = ballot.proposal.to_string();
        let arguments = |command: &mut Cmd| {
            command.arg(&ballot.ask).arg(&ballot.record);
            command.arg(&which);
        };
        let (keys, id) = (&ballot.keys, ballot.id);
        let asked = self.run(&mut link, Script::Vote, keys, id, &which, arguments);
        let vote = match asked.await {
            Ok(answer) => {
                Vote::read(&answer, ballot.ttl).unwrap_or_else(|| Vote::Failed(nonsense("enter")))
            }
            Err(error) => Vote::Failed(error),
        };
        let known = match &vote {
            Vote::Failed(error) => error.outcome() == Outcome::NotApplied,
            _ => true,
        };
        if known {
            asked_on.store(0, Ordering::SeqCst);
        }
        vote
    }

    /// Retracts a vote: the one with the token `count`, or any if `count` is 0.
    pub(super) async fn retract(
        &self,
        keys: &LineKeys,
        id: ClaimId,
        count: u64,
        doubt: Doubt,
    ) -> Result<Retracted> {
        let mut link = self.link().await?;
        let mark = match doubt {
            Doubt::No => "",
            Doubt::Unless(asked_on) if asked_on == link.generation() => "",
            _ => "?",
        };
        let which = format!("{count}{mark}");
        let arguments = |command: &mut Cmd| {
            command.arg(&which);
            if let Doubt::Try(proposal) = doubt {
                command.arg(proposal);
            }
        };
        let answer = self.run(&mut link, Script::Retract, keys, id, &which, arguments);
        match answer.await?.as_str() {
            "left" => Ok(Retracted::Left),
            "absent" => Ok(Retracted::Absent),
            "other" => Ok(Retracted::Other),
            _ => Err(nonsense("leave")),
        }
    }

    /// Notifies waiters that a line is free.
    pub(super) async fn tell(&self, keys: &LineKeys) -> Result<()> {
        let link = self.link().await?;
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(format!("{FREE}{}", keys.key)).arg("");
        // A waiter that misses the message finds out when it tries again.
        let _told: redis::RedisResult<i64> = self.client.ask("evict", &link, &publish).await?;
        Ok(())
    }

    /// Raises the line's last token and sets the token of the claim's vote. Returns the time left
    /// on the vote; `None` when the claim has no vote here.
    pub(super) async fn raise(
        &self,
        keys: &LineKeys,
        id: ClaimId,
        token: u64,
    ) -> Result<Option<Duration>> {
        let mut link = self.link().await?;
        let which = token.to_string();
        let arguments = |command: &mut Cmd| {
            command.arg(&which);
        };
        let answer = self.run(&mut link, Script::Raise, keys, id, &which, arguments);
        let answer = answer.await?;
        if answer == "absent" {
            return Ok(None);
        }
        let left = answer
            .strip_prefix("held ")
            .and_then(|left| left.parse().ok());
        let left: u64 = left.ok_or_else(|| nonsense("enter"))?;
        Ok(Some(Duration::from_micros(left)))
    }
}

/// Refuses a server that is another node already, because it would vote twice.
fn votes_once(run_ids: &RunIds, at: usize, host: &Host, run_id: &str) -> Result<()> {
    let mut run_ids = run_ids.lock();
    let same = run_ids
        .iter()
        .position(|known| known.as_deref() == Some(run_id));
    if let Some(other) = same.filter(|other| *other != at) {
        let message = format!(
            "{host} is the same server as host {} of the URL, and would vote twice; name each server once",
            other + 1
        );
        return Err(config_error(message));
    }
    run_ids[at] = Some(run_id.to_owned());
    Ok(())
}

/// The wall clock in microseconds since 1970, the floor of tokens.
pub(super) fn clock() -> u64 {
    unix_time().as_micros() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read() {
        let ttl = Duration::from_secs(9);
        let held = |answer: &str| match Vote::read(answer, ttl) {
            Some(Vote::Held {
                token,
                left,
                permits,
            }) => (token, left.as_millis(), permits),
            other => panic!("{answer}: {other:?}"),
        };
        assert_eq!(held("held 7"), (7, 9000, vec![]));
        assert_eq!(held("held 7 2000 0 "), (7, 2, vec![]));
        assert_eq!(held("held 7 2000 0 3,1"), (7, 2, vec![3, 1]));
        assert!(matches!(
            Vote::read("busy 5000 2", ttl),
            Some(Vote::Busy { due, permits }) if due.as_millis() == 5 && permits == [2]
        ));
        assert!(matches!(
            Vote::read("mismatch 3", ttl),
            Some(Vote::Mismatch(3))
        ));
        for bad in ["", "held", "held x", "busy", "busy x", "mismatch", "gone"] {
            assert!(Vote::read(bad, ttl).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_server_votes_once() {
        let host = Host::all(&crate::core::url::Url::parse("x://h").unwrap(), 1);
        let host = host.unwrap().remove(0);
        let known: RunIds = Arc::new(Mutex::new(vec![None; 3]));
        votes_once(&known, 0, &host, "a").unwrap();
        votes_once(&known, 0, &host, "a").unwrap();
        let twice = votes_once(&known, 2, &host, "a").unwrap_err();
        assert_eq!(twice.kind(), ErrorKind::Config);
        // After a restart it has another `run_id`.
        votes_once(&known, 0, &host, "b").unwrap();
        votes_once(&known, 2, &host, "a").unwrap();
    }

    #[test]
    fn only_what_is_known_not_to_hold_need_not_be_given_back() {
        let failed = || Error::new(ErrorKind::Unreachable, "enter", "x");
        assert!(!Vote::Failed(failed()).may_hold());
        assert!(Vote::Failed(failed().maybe_applied()).may_hold());
        assert!(!Vote::Left.may_hold());
    }
}
