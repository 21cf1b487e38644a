//! `Client`: what the verbs share, the Lua scripts, and the single code path for requests.
//!
//! A request is about one line and is sent once. Many tasks share a connection, and their requests
//! are pipelined. The client retries only what the server says it did not run: an unknown script,
//! or a redirect of a Cluster. Whether to retry anything else is up to the caller.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, FromRedisValue, RedisResult, Value};

use super::cluster::{MOVING, REDIRECTS, Redirect};
use super::connection::Connection;
use super::error::{fault, is_broken, is_no_script};
use super::keys::{Keys, LineKeys};
use super::servers::Servers;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::error::{Error, ErrorKind, Result};
use crate::engines::kit::push::PushHub;
use crate::engines::kit::{Link, timed};

/// A script, one per verb; its index in [`SOURCES`], then in [`WORK`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engines) enum Script {
    Enter,
    Look,
    Renew,
    Amend,
    Leave,
    Survey,
    Evict,
    Resize,
    Fence,
    Vote,
    Retract,
    Raise,
    WorkPush,
    WorkClaim,
    WorkRenew,
    WorkSettle,
    WorkLeave,
    WorkShow,
    WorkOperate,
}

macro_rules! source {
    ($($file:literal),*) => {
        concat!(include_str!("lua/head.lua"), $(include_str!(concat!("lua/", $file, ".lua"))),*)
    };
}

/// In the order of [`Script`]. Each source is the shared code, then the verb. The most frequent
/// verbs have a fast path for the simple case in front (see docs/benchmarks.md).
pub(in crate::engines) const SOURCES: [&str; 12] = [
    source!("enter_free", "line", "enter"),
    source!("line", "look"),
    source!("renew_whole", "line", "renew"),
    source!("line", "amend"),
    source!("leave_free", "line", "leave"),
    source!("line", "survey"),
    source!("line", "evict"),
    source!("line", "resize"),
    source!("fence"),
    source!("vote_free", "line", "vote"),
    source!("retract_free", "line", "retract"),
    source!("line", "raise"),
];

/// How many of [`SOURCES`] a single server needs; the rest are for the servers of `redlock:`.
pub(in crate::engines) const OF_ONE_SERVER: usize = 9;

/// The scripts of work queues, in the order of [`Script`], after [`SOURCES`]. They are loaded when
/// a queue is first used.
pub(in crate::engines) const WORK: [&str; 7] = [
    source!("work", "work_push"),
    source!("work", "work_claim"),
    source!("work", "work_renew"),
    source!("work", "work_settle"),
    source!("work", "work_leave"),
    source!("work", "work_show"),
    source!("work", "work_operate"),
];

/// The code before and after a user's effect, which runs atomically with the end of its claim.
pub(super) const EFFECT: (&str, &str) = (
    source!("work", "work_effect"),
    include_str!("lua/work_effect_end.lua"),
);

impl Script {
    /// The operation that errors name.
    pub(in crate::engines) const fn operation(self) -> &'static str {
        match self {
            Self::Enter => "enter",
            Self::Look => "wait",
            Self::Renew => "renew",
            Self::Amend => "amend",
            Self::Leave => "leave",
            Self::Survey => "survey",
            Self::Evict => "evict",
            Self::Resize => "resize",
            Self::Fence => "fence",
            Self::Vote | Self::Raise => "enter",
            Self::Retract => "leave",
            Self::WorkPush => "push",
            Self::WorkClaim => "claim",
            Self::WorkRenew => "renew",
            Self::WorkSettle => "done",
            Self::WorkLeave => "leave",
            Self::WorkShow => "survey",
            Self::WorkOperate => "operate",
        }
    }

    pub(in crate::engines) const fn source(self) -> &'static str {
        match (self as usize).checked_sub(SOURCES.len()) {
            None => SOURCES[self as usize],
            Some(at) => WORK[at],
        }
    }
}

pub(in crate::engines) struct Client {
    pub(in crate::engines) servers: Servers,
    pub(in crate::engines) hub: Arc<PushHub>,
    pub(in crate::engines) keys: Keys,
    /// How many replicas must have a grant before it counts.
    pub(in crate::engines) replicas: u32,
    pub(in crate::engines) timeout: Duration,
}

impl Client {
    /// A connection to the server that owns the line.
    pub(in crate::engines) async fn link_to(&self, line: &LineKeys) -> Result<Link<Connection>> {
        self.servers.link(Some(line)).await
    }

    /// Sends one request, with a timeout.
    pub(in crate::engines) async fn ask<T: FromRedisValue>(
        &self,
        operation: &'static str,
        link: &Link<Connection>,
        command: &Cmd,
    ) -> Result<RedisResult<T>> {
        let mut connection = link.connection.multiplexed.clone();
        let answer = command.query_async::<T>(&mut connection);
        self.answered(operation, link, answer).await
    }

    /// As [`Client::ask`], for a slot that is being migrated to this server.
    async fn ask_moving<T: FromRedisValue>(
        &self,
        operation: &'static str,
        link: &Link<Connection>,
        command: &Cmd,
    ) -> Result<RedisResult<T>> {
        let mut connection = link.connection.multiplexed.clone();
        // `ASKING` applies only to the next command on the connection, so both go in one pipeline.
        let mut both = redis::pipe();
        both.ignore_errors()
            .cmd("ASKING")
            .add_command(command.clone());
        let answer = async {
            let answers: Vec<RedisResult<Value>> = both.query_async(&mut connection).await?;
            let last = answers.into_iter().next_back();
            let last = last.unwrap_or(Ok(Value::Nil))?;
            Ok(redis::from_redis_value(last)?)
        };
        self.answered(operation, link, answer).await
    }

    async fn answered<T>(
        &self,
        operation: &'static str,
        link: &Link<Connection>,
        answer: impl Future<Output = RedisResult<T>>,
    ) -> Result<RedisResult<T>> {
        match timed(operation, self.timeout, answer).await {
            Ok(answer) => {
                if answer.as_ref().is_err_and(is_broken) {
                    self.servers.broken(link).await;
                }
                if !self.servers.counts(link) {
                    self.servers.broken(link).await;
                    let message = "the master was switched, so the old one's reply does not count";
                    let error = Error::new(ErrorKind::Unreachable, operation, message);
                    return Err(error.maybe_applied());
                }
                Ok(answer)
            }
            Err(late) => {
                // Replies are matched to requests by order alone. On a connection that lost one,
                // every later reply would go to the wrong request.
                self.servers.broken(link).await;
                Err(late)
            }
        }
    }

    /// Runs a script on a line. If the line has moved to another server, `link` is the connection
    /// to that one afterwards.
    pub(in crate::engines) async fn run<T: FromRedisValue>(
        &self,
        link: &mut Link<Connection>,
        script: Script,
        line: &LineKeys,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<T> {
        let operation = script.operation();
        let cluster = self.servers.cluster();
        let command = |how: &str, which: &str| {
            let mut command = redis::cmd(how);
            command.arg(which).arg(2).arg(&line.key).arg(&line.state);
            arguments(&mut command);
            command
        };
        let start = BootTime::now();
        let (mut redirects, mut moving) = (0, false);
        loop {
            let ask = async |command: &Cmd, link: &Link<Connection>| {
                if moving {
                    self.ask_moving(operation, link, command).await
                } else {
                    self.ask(operation, link, command).await
                }
            };
            let by_hash = command("EVALSHA", link.connection.hash(script));
            let mut answer = ask(&by_hash, link).await?;
            if answer.as_ref().is_err_and(is_no_script) {
                let in_full = command("EVAL", script.source());
                answer = ask(&in_full, link).await?;
            }
            let error = match answer {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let late = BootTime::now().saturating_since(start) >= self.timeout;
            let redirect = match cluster {
                Some(cluster) if redirects < REDIRECTS && !late => cluster.redirect(&error).await?,
                _ => None,
            };
            match redirect {
                None => return Err(fault(operation, &error)),
                Some(Redirect::Again) => {
                    tokio::time::sleep(MOVING).await;
                    continue;
                }
                Some(Redirect::Moved(there)) => (*link, moving) = (there, false),
                Some(Redirect::Ask(there)) => (*link, moving) = (there, true),
            }
            redirects += 1;
        }
    }

    /// Runs a script whose reply begins with the id of its claim, and returns the rest of the
    /// reply.
    pub(in crate::engines) async fn run_for(
        &self,
        link: &mut Link<Connection>,
        script: Script,
        line: &LineKeys,
        id: ClaimId,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<String> {
        let arguments = |command: &mut Cmd| {
            command.arg(id.to_string());
            arguments(command);
            // Makes the script write something even when it only confirms a grant, so that
            // [`Client::replicated`] covers the grant.
            if self.replicas > 0 && matches!(script, Script::Enter | Script::Look) {
                command.arg(1);
            }
        };
        let answer: String = self.run(link, script, line, arguments).await?;
        match addressed(id, &answer) {
            Some(rest) => Ok(rest.to_owned()),
            None => Err(self.misled(script.operation(), link).await),
        }
    }

    /// The error for a reply that belongs to another request: the connection has lost a reply.
    pub(in crate::engines) async fn misled(
        &self,
        operation: &'static str,
        link: &Link<Connection>,
    ) -> Error {
        self.servers.broken(link).await;
        let message = "received the reply to another request";
        Error::new(ErrorKind::Unreachable, operation, message).maybe_applied()
    }

    /// Waits until enough replicas have acknowledged what was written on this connection.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] if they have not within half of the request timeout.
    pub(in crate::engines) async fn replicated(
        &self,
        operation: &'static str,
        link: &Link<Connection>,
    ) -> Result<()> {
        let wanted = self.replicas;
        if wanted == 0 {
            return Ok(());
        }
        let mut wait = redis::cmd("WAIT");
        let limit = (self.timeout / 2).as_millis().max(1) as u64;
        wait.arg(wanted).arg(limit);
        let have: RedisResult<u32> = self.ask(operation, link, &wait).await?;
        match have {
            Ok(have) if have >= wanted => Ok(()),
            Ok(have) => {
                let message = format!("only {have} of {wanted} replicas have acknowledged it");
                Err(Error::new(ErrorKind::Unreachable, operation, message).maybe_applied())
            }
            Err(error) => Err(fault(operation, &error).maybe_applied()),
        }
    }
}

/// The rest of a reply after `id`, if the reply begins with it.
pub(in crate::engines) fn addressed(id: ClaimId, answer: &str) -> Option<&str> {
    let (whom, rest) = answer.split_once(' ')?;
    (whom.parse() == Ok(id)).then_some(rest)
}

/// The error for a reply that can't be parsed.
pub(in crate::engines) fn nonsense(operation: &'static str) -> Error {
    let message = "unexpected reply from the server";
    Error::new(ErrorKind::Unusable, operation, message).maybe_applied()
}

/// The error for a script's reply of the wrong shape.
pub(in crate::engines) fn garbled(operation: &'static str, answer: &Value) -> Error {
    let kind = match answer {
        Value::Array(items) => format!("a list of {}", items.len()),
        _ => "something else".to_owned(),
    };
    let message = format!("unexpected reply from the server ({kind})");
    Error::new(ErrorKind::Unusable, operation, message).maybe_applied()
}
