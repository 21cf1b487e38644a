//! `Node`: one of the independent servers. A vote is an exclusive claim as in `redis:`, with a
//! token proposed by the client.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::Cmd;

use crate::client::{Client, Script, Servers, unexpected_reply};
use crate::connection::{Connection, Freed, Role, Server};
use crate::keys::{Keys, LineKeys};
use crate::notify::FREE;
use crate::watched;
use palisade_core::engine::{ClaimId, Settings, config_error};
use palisade_core::{BootTime, Error, Outcome, Result};
use palisade_kit::push::PushHub;
use palisade_kit::{Host, Link, PerRuntime};

pub(super) struct Node {
    pub(super) at: usize,
    host: Host,
    pub(super) client: Arc<Client>,
    /// A server that has been up for less than this may have forgotten a vote.
    pub(super) guard: Option<Duration>,
}

/// The `run_id` of each node's server, as far as it is known.
type RunIds = Arc<Mutex<Vec<Option<String>>>>;

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
        let (to, pushes, run_ids) = (server.clone(), Arc::clone(&hub), Arc::clone(run_ids));
        let links = PerRuntime::new(settings.connect_timeout, move || {
            let role = Role::Voter(Arc::clone(&freed));
            let (run_ids, host) = (Arc::clone(&run_ids), to.host.clone());
            let opening = Connection::open(to.clone(), Arc::clone(&pushes), role);
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
            servers: Servers::One { server, links },
            hub,
            keys: keys.clone(),
            replicas: 0,
            timeout: settings.timeout,
            watches: watched::Watches::default(),
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
        self.client.link(None).await
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

    /// When the server at the end of this connection votes again, if it does not vote now: it
    /// restarted recently, and may have forgotten a vote that has not expired yet.
    pub(super) fn abstains(&self, link: &Link<Connection>) -> Option<BootTime> {
        self.guard
            .zip(link.connection.identity())
            .map(|(guard, identity)| identity.started + guard)
            .filter(|votes| !votes.has_passed())
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
            command.arg(id.to_string()).arg(&which);
            if let Doubt::Try(proposal) = doubt {
                command.arg(proposal);
            }
        };
        let (client, reply_to) = (&self.client, format!("{id} {which}"));
        let answer = client.run_for(&mut link, Script::Retract, keys, &reply_to, arguments);
        match answer.await?.as_str() {
            "left" => Ok(Retracted::Left),
            "absent" => Ok(Retracted::Absent),
            "other" => Ok(Retracted::Other),
            _ => Err(unexpected_reply("leave")),
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
        let arguments = |command: &mut Cmd| {
            command.arg(id.to_string()).arg(token);
        };
        let (client, reply_to) = (&self.client, format!("{id} {token}"));
        let answer = client.run_for(&mut link, Script::Raise, keys, &reply_to, arguments);
        let answer = answer.await?;
        if answer == "absent" {
            return Ok(None);
        }
        let left = answer
            .strip_prefix("held ")
            .and_then(|left| left.parse().ok());
        let left: u64 = left.ok_or_else(|| unexpected_reply("enter"))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::ErrorKind;

    #[test]
    fn a_server_votes_once() {
        let host = Host::all(&palisade_core::engine::Url::parse("x://h").unwrap(), 1);
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
}
