//! `Client`: the servers, the Lua scripts, and the single code path for requests.
//!
//! There is a single server, the master that Sentinel names, or the masters of a Cluster.
//! A request is about one line and is sent once. Many tasks share a connection, and their requests
//! are pipelined. The client retries only what the server says it did not run: an unknown script,
//! or a redirect of a Cluster. Whether to retry anything else is up to the caller.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, FromRedisValue, RedisError, RedisResult, Value};

use super::cluster::{Cluster, MOVING, REDIRECTS, Redirect};
use super::connection::{Connection, Server};
use super::error::{fault, is_broken, is_no_script};
use super::keys::{Keys, LineKeys};
use super::sentinel::Sentinel;
use super::watched::Watches;
use palisade_core::{BootTime, Error, ErrorKind, Result};
use palisade_kit::push::PushHub;
use palisade_kit::replies::LISTING;
use palisade_kit::{Host, Link, PerRuntime, timed};

/// A script, one per verb; its index in [`SOURCES`], then in [`WORK`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Script {
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
pub(crate) const SOURCES: [&str; 12] = [
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
pub(crate) const OF_ONE_SERVER: usize = 9;

/// The scripts of work queues, in the order of [`Script`], after [`SOURCES`]. They are loaded when
/// a queue is first used.
pub(crate) const WORK: [&str; 7] = [
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
    pub(crate) const fn operation(self) -> &'static str {
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

    pub(crate) const fn source(self) -> &'static str {
        match (self as usize).checked_sub(SOURCES.len()) {
            None => SOURCES[self as usize],
            Some(at) => WORK[at],
        }
    }
}

/// Which server a line is on; the verbs need not know.
pub(crate) enum Servers {
    One {
        server: Server,
        links: PerRuntime<Connection>,
    },
    Sentinel(Sentinel),
    Cluster(Cluster),
}

pub(crate) struct Client {
    pub(crate) servers: Servers,
    pub(crate) hub: Arc<PushHub>,
    pub(crate) keys: Keys,
    /// How many replicas must have a grant before it counts.
    pub(crate) replicas: u32,
    pub(crate) timeout: Duration,
    /// The watches of this client.
    pub(crate) watches: Watches,
}

impl Client {
    /// A connection to the server that owns the line, or to any server.
    pub(crate) async fn link(&self, line: Option<&LineKeys>) -> Result<Link<Connection>> {
        let links = match &self.servers {
            Servers::One { links, .. } => links,
            Servers::Sentinel(sentinel) => &sentinel.links,
            Servers::Cluster(cluster) => return cluster.link(line).await,
        };
        live(links).await
    }

    /// A connection to each server that has lines.
    pub(super) async fn links(&self) -> Result<Vec<Link<Connection>>> {
        match &self.servers {
            Servers::Cluster(cluster) => cluster.all().await,
            _ => Ok(vec![self.link(None).await?]),
        }
    }

    /// Runs a script whose reply begins with `reply_to`, and returns the rest of the reply.
    pub(crate) async fn run_for(
        &self,
        link: &mut Link<Connection>,
        script: Script,
        line: &LineKeys,
        reply_to: &str,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<String> {
        let arguments = |command: &mut Cmd| {
            arguments(command);
            // Makes the script write something even when it only confirms a grant, so that
            // [`Client::replicated`] covers the grant.
            if self.replicas > 0 && matches!(script, Script::Enter | Script::Look) {
                command.arg(1);
            }
        };
        let answer: String = self.run(link, script, line, arguments).await?;
        match addressed(reply_to, &answer) {
            Some(rest) => Ok(rest.to_owned()),
            None => Err(self.misled(script.operation(), link).await),
        }
    }

    /// Runs a script on a line. If the line has moved to another server, `link` is the connection
    /// to that one afterwards.
    pub(crate) async fn run<T: FromRedisValue>(
        &self,
        link: &mut Link<Connection>,
        script: Script,
        line: &LineKeys,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<T> {
        let more = room(script.operation());
        self.run_expecting(more, link, script, line, arguments)
            .await
    }

    /// As [`Client::run`], for a reply that may have `more` bytes than usual.
    pub(super) async fn run_expecting<T: FromRedisValue>(
        &self,
        more: usize,
        link: &mut Link<Connection>,
        script: Script,
        line: &LineKeys,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<T> {
        let command = |how: &str, which: &str| {
            let mut command = redis::cmd(how);
            command.arg(which).arg(2).arg(&line.key).arg(&line.state);
            arguments(&mut command);
            command
        };
        let (operation, start) = (script.operation(), BootTime::now());
        let by_hash = command("EVALSHA", link.connection.hash(script));
        let mut answer = self.ask_for(more, operation, link, &by_hash).await?;
        if answer.as_ref().is_err_and(is_no_script) {
            let in_full = command("EVAL", script.source());
            answer = self.ask_for(more, operation, link, &in_full).await?;
        }
        match answer {
            Ok(answer) => Ok(answer),
            Err(error) if matches!(self.servers, Servers::Cluster(_)) => {
                let in_full = command("EVAL", script.source());
                self.redirected((more, operation), link, &in_full, error, start)
                    .await
            }
            Err(error) => Err(fault(operation, &error)),
        }
    }

    /// Waits for a subscription, and drops a connection that broke.
    pub(super) async fn subscribed(
        &self,
        link: &Link<Connection>,
        subscribing: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let error = match timed("subscribe", self.timeout, subscribing).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) | Err(error) => error,
        };
        if error.kind() == ErrorKind::Unreachable {
            self.servers.broken(link).await;
        }
        // Nothing but the subscription has been sent yet.
        Err(error.not_applied())
    }

    /// Sends a request that a server of a Cluster refused with `error` again, as long as its line
    /// is on another server.
    async fn redirected<T: FromRedisValue>(
        &self,
        (more, operation): (usize, &'static str),
        link: &mut Link<Connection>,
        command: &Cmd,
        mut error: RedisError,
        start: BootTime,
    ) -> Result<T> {
        let (mut redirects, mut moving) = (0, false);
        loop {
            let late = BootTime::now().saturating_since(start) >= self.timeout;
            let redirect = match &self.servers {
                Servers::Cluster(cluster) if redirects < REDIRECTS && !late => {
                    cluster.redirect(&error).await?
                }
                _ => None,
            };
            match redirect {
                None => return Err(fault(operation, &error)),
                Some(Redirect::Again) => tokio::time::sleep(MOVING).await,
                Some(Redirect::To { there, asking }) => {
                    (*link, moving) = (there, asking);
                    redirects += 1;
                }
            }
            let answer = if moving {
                self.ask_moving(more, operation, link, command).await?
            } else {
                self.ask_for(more, operation, link, command).await?
            };
            match answer {
                Ok(answer) => return Ok(answer),
                Err(again) => error = again,
            }
        }
    }

    /// Sends one request, with a timeout.
    pub(crate) async fn ask<T: FromRedisValue>(
        &self,
        operation: &'static str,
        link: &Link<Connection>,
        command: &Cmd,
    ) -> Result<RedisResult<T>> {
        self.ask_for(room(operation), operation, link, command)
            .await
    }

    /// As [`Client::ask`], for a reply that may have `more` bytes than usual.
    async fn ask_for<T: FromRedisValue>(
        &self,
        more: usize,
        operation: &'static str,
        link: &Link<Connection>,
        command: &Cmd,
    ) -> Result<RedisResult<T>> {
        let _room = link.connection.expect(more);
        let mut connection = link.connection.multiplexed.clone();
        let answer = command.query_async::<T>(&mut connection);
        let answer = timed(operation, self.timeout, answer).await;
        self.judged(operation, link, answer).await
    }

    /// As [`Client::ask`], for a slot that is being migrated to this server.
    async fn ask_moving<T: FromRedisValue>(
        &self,
        more: usize,
        operation: &'static str,
        link: &Link<Connection>,
        command: &Cmd,
    ) -> Result<RedisResult<T>> {
        let _room = link.connection.expect(more);
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
        let answer = timed(operation, self.timeout, answer).await;
        self.judged(operation, link, answer).await
    }

    /// The answer to a request, if it counts. Drops the connection if it broke, if the answer did
    /// not come in time, or if its server is no longer the master.
    pub(super) async fn judged<T>(
        &self,
        operation: &'static str,
        link: &Link<Connection>,
        answer: Result<RedisResult<T>>,
    ) -> Result<RedisResult<T>> {
        let counts = self.servers.counts(link);
        // Replies are matched to requests by order alone. On a connection that lost one, every
        // later reply would go to the wrong request.
        let broke = |answer: &RedisResult<T>| answer.as_ref().is_err_and(is_broken);
        if !counts || answer.as_ref().map_or(true, broke) {
            self.servers.broken(link).await;
        }
        if let Ok(Err(_)) = &answer
            && let Some(error) = link.connection.too_large(operation)
        {
            return Err(error);
        }
        if answer.is_ok() && !counts {
            let message = "the master was switched, so the old one's reply does not count";
            let error = Error::new(ErrorKind::Unreachable, operation, message);
            return Err(error.maybe_applied());
        }
        answer
    }

    /// The error for a reply that belongs to another request: the connection has lost a reply.
    pub(crate) async fn misled(&self, operation: &'static str, link: &Link<Connection>) -> Error {
        self.servers.broken(link).await;
        let message = "received the reply to another request";
        Error::new(ErrorKind::Unreachable, operation, message).maybe_applied()
    }

    /// Waits until enough replicas have acknowledged what was written on this connection.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] if they have not within half of the request timeout.
    pub(crate) async fn replicated(
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

impl Servers {
    /// The servers that have lines.
    pub(super) async fn masters(&self) -> Result<Vec<Server>> {
        match self {
            Self::One { server, .. } => Ok(vec![server.clone()]),
            Self::Sentinel(sentinel) => Ok(vec![sentinel.master().await?]),
            Self::Cluster(cluster) => cluster.masters().await,
        }
    }

    /// Drops a connection.
    pub(crate) async fn broken(&self, link: &Link<Connection>) {
        match self {
            Self::One { links, .. } => links.broken(link).await,
            Self::Sentinel(sentinel) => sentinel.links.broken(link).await,
            Self::Cluster(cluster) => cluster.broken(link).await,
        }
    }

    /// Whether replies from this connection's server count. A deposed master may not yet know that
    /// it was replaced.
    pub(super) fn counts(&self, link: &Link<Connection>) -> bool {
        match self {
            Self::Sentinel(sentinel) => sentinel.is_master(link.connection.host()),
            Self::One { .. } | Self::Cluster(_) => true,
        }
    }

    pub(super) fn sentinel(&self) -> Option<&Sentinel> {
        match self {
            Self::Sentinel(sentinel) => Some(sentinel),
            Self::One { .. } | Self::Cluster(_) => None,
        }
    }

    /// The hosts of the URL, and whether connections to them are encrypted.
    pub(super) fn named(&self) -> (Vec<Host>, bool) {
        match self {
            Self::One { server, .. } => (vec![server.host.clone()], server.tls.is_some()),
            Self::Sentinel(sentinel) => sentinel.named(),
            Self::Cluster(cluster) => cluster.named(),
        }
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        match self {
            Self::One { links, .. } => links.connect_timeout(),
            Self::Sentinel(sentinel) => sentinel.links.connect_timeout(),
            Self::Cluster(cluster) => cluster.connect_timeout(),
        }
    }

    pub(crate) fn close(&self) {
        match self {
            Self::One { links, .. } => links.close(),
            Self::Sentinel(sentinel) => sentinel.close(),
            Self::Cluster(cluster) => cluster.close(),
        }
    }
}

/// The largest value that Redis takes, which a fenced resource may be.
const VALUE: usize = 512 << 20;

/// How much more than a reply to a lock's verb the reply to this operation may have.
fn room(operation: &str) -> usize {
    match operation {
        "survey" | "done" => LISTING,
        "fence" => VALUE,
        _ => 0,
    }
}

/// This runtime's connection. One that is known to have ended is replaced first: the outcome of a
/// request on it would be unknown.
pub(super) async fn live(links: &PerRuntime<Connection>) -> Result<Link<Connection>> {
    let link = links.get().await?;
    if !link.connection.is_over() {
        return Ok(link);
    }
    links.broken(&link).await;
    links.get().await
}

/// The rest of a reply that begins with `reply_to`.
pub(super) fn addressed<'a>(reply_to: &str, answer: &'a str) -> Option<&'a str> {
    answer.strip_prefix(reply_to)?.strip_prefix(' ')
}

/// The error for a reply that can't be parsed.
pub(crate) fn unexpected_reply(operation: &'static str) -> Error {
    let message = "unexpected reply from the server";
    Error::new(ErrorKind::Unusable, operation, message).maybe_applied()
}

/// The error for a script's reply of the wrong shape.
pub(crate) fn garbled(operation: &'static str, answer: &Value) -> Error {
    let kind = match answer {
        Value::Array(items) => format!("a list of {}", items.len()),
        _ => "something else".to_owned(),
    };
    let message = format!("unexpected reply from the server ({kind})");
    Error::new(ErrorKind::Unusable, operation, message).maybe_applied()
}
