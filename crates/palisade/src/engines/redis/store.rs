//! `Store`: what the verbs share, and the one way in which a request is made.
//!
//! A request is made once. Only what the server says it did not run (an unknown script) is asked
//! again; everything else is the caller's to decide.

use std::time::Duration;

use redis::{Cmd, FromRedisValue, RedisResult, Value};

use super::Target;
use super::fault::{fault, is_broken, is_no_script};
use super::hub::Hub;
use super::keys::{Keys, LineKeys};
use super::scripts::Script;
use super::wire::Wire;
use crate::core::claim::ClaimId;
use crate::core::error::{Error, Kind, Result};
use crate::engines::remote::{Link, Links, timed};

pub(super) struct Store {
    pub(super) links: Links<Wire>,
    pub(super) hub: std::sync::Arc<Hub>,
    pub(super) keys: Keys,
    pub(super) target: Target,
    pub(super) timeout: Duration,
}

impl Store {
    /// The connection of this runtime. One that is known to have ended is made anew: a request
    /// on it would fail, and nobody could tell whether it was applied.
    pub(super) async fn link(&self) -> Result<Link<Wire>> {
        let link = self.links.get().await?;
        if !link.connection.is_over() {
            return Ok(link);
        }
        self.links.broken(&link).await;
        self.links.get().await
    }

    /// Makes one request, bounded in time.
    pub(super) async fn ask<T: FromRedisValue>(
        &self,
        operation: &'static str,
        link: &Link<Wire>,
        command: &Cmd,
    ) -> Result<RedisResult<T>> {
        self.ask_within(self.timeout, operation, link, command)
            .await
    }

    async fn ask_within<T: FromRedisValue>(
        &self,
        limit: Duration,
        operation: &'static str,
        link: &Link<Wire>,
        command: &Cmd,
    ) -> Result<RedisResult<T>> {
        let mut connection = link.connection.connection.clone();
        let answer = command.query_async::<T>(&mut connection);
        match timed(operation, limit, answer).await {
            Ok(answer) => {
                if answer.as_ref().is_err_and(is_broken) {
                    self.links.broken(link).await;
                }
                Ok(answer)
            }
            Err(late) => {
                // Replies are told apart by their order alone: on a connection that lost one,
                // every later reply would be taken for another's.
                self.links.broken(link).await;
                Err(late)
            }
        }
    }

    /// Runs a script on the lines `lines`.
    pub(super) async fn run<T: FromRedisValue>(
        &self,
        link: &Link<Wire>,
        script: Script,
        lines: &[&LineKeys],
        arguments: impl Fn(&mut Cmd),
    ) -> Result<T> {
        self.run_within(self.timeout, link, script, lines, arguments)
            .await
    }

    /// Runs a script, and waits no longer than `limit` for it.
    pub(super) async fn run_within<T: FromRedisValue>(
        &self,
        limit: Duration,
        link: &Link<Wire>,
        script: Script,
        lines: &[&LineKeys],
        arguments: impl Fn(&mut Cmd),
    ) -> Result<T> {
        let operation = script.operation();
        let command = |how: &str, which: &str| {
            let mut command = redis::cmd(how);
            command.arg(which).arg(lines.len() * 2);
            for line in lines {
                command.arg(&line.key).arg(&line.state);
            }
            arguments(&mut command);
            command
        };
        let by_hash = command("EVALSHA", link.connection.hash(script));
        let mut answer = self.ask_within(limit, operation, link, &by_hash).await?;
        if answer.as_ref().is_err_and(is_no_script) {
            let in_full = command("EVAL", script.source());
            answer = self.ask_within(limit, operation, link, &in_full).await?;
        }
        answer.map_err(|error| fault(operation, &error))
    }

    /// Makes a script write something even when it only confirms a grant, so that
    /// [`Store::replicated`] covers the grant.
    pub(super) fn mark_replicated(&self, command: &mut Cmd) {
        if self.target.replicas > 0 {
            command.arg(1);
        }
    }

    /// Waits until enough replicas have what was written on this connection.
    ///
    /// # Errors
    /// [`Kind::Unreachable`] when they have not, in half the time that a request may take.
    pub(super) async fn replicated(
        &self,
        operation: &'static str,
        link: &Link<Wire>,
    ) -> Result<()> {
        let wanted = self.target.replicas;
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
                let message = format!("only {have} of {wanted} replicas have it");
                Err(Error::new(Kind::Unreachable, operation, message).maybe_applied())
            }
            Err(error) => Err(fault(operation, &error).maybe_applied()),
        }
    }
}

impl Store {
    /// What follows `id` in an answer. Another id says that the connection has lost a reply, and
    /// that this one is for somebody else.
    pub(super) async fn addressed<'a>(
        &self,
        operation: &'static str,
        link: &Link<Wire>,
        id: ClaimId,
        answer: &'a str,
    ) -> Result<&'a str> {
        let for_us = answer
            .split_once(' ')
            .filter(|(whom, _)| whom.parse() == Ok(id));
        match for_us {
            Some((_, rest)) => Ok(rest),
            None => {
                self.links.broken(link).await;
                let message = "an answer for another request came";
                Err(Error::new(Kind::Unreachable, operation, message).maybe_applied())
            }
        }
    }

    /// What follows the first of `claims` in an answer: a word for each of them.
    pub(super) async fn each_addressed(
        &self,
        operation: &'static str,
        link: &Link<Wire>,
        mut claims: impl ExactSizeIterator<Item = ClaimId>,
        mut answers: Vec<String>,
    ) -> Result<Vec<String>> {
        if answers.len() != claims.len() + 1 {
            return Err(nonsense(operation));
        }
        let whom = answers.remove(0) + " ";
        if let Some(first) = claims.next() {
            self.addressed(operation, link, first, &whom).await?;
        }
        Ok(answers)
    }
}

/// An answer that nobody could have given.
pub(super) fn nonsense(operation: &'static str) -> Error {
    let message = "the server's answer makes no sense";
    Error::new(Kind::Unusable, operation, message).maybe_applied()
}

/// The answer of a script that is not as it should be.
pub(super) fn garbled(operation: &'static str, answer: &Value) -> Error {
    let kind = match answer {
        Value::Array(items) => format!("a list of {}", items.len()),
        _ => "something else".to_owned(),
    };
    let message = format!("the server's answer makes no sense ({kind})");
    Error::new(Kind::Unusable, operation, message).maybe_applied()
}
