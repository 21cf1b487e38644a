//! Work queues in the server of the locks: one script per verb (`lua/work.lua` describes the
//! layout), with all keys of a queue in one hash slot; and a user's effect that is atomic with
//! `done`.
//!
//! What Redis forgets (a restart without persistence, a failover to a lagging replica, eviction of
//! keys) a queue forgets too, and `check` warns of it. With `replicas=` a push returns once they
//! have it.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, try_join_all};
use redis::{Cmd, RedisResult, Value};

use super::client::{Client, EFFECT, Script, unexpected_reply};
use super::connection::Connection;
use super::error::fault;
use super::keys::LineKeys;
use super::notify;
use palisade_core::engine::{
    Alarm, Audited, BoxStream, ClaimId, Lease, LeaseId, Leasing, Left, Renewal, Ticket,
};
use palisade_core::queue::{
    DEDUPLICATED, Delivery, Draft, FullReport, MAX_BODY, Message, MessageReport, MessageState,
    Pick, Pushed, QueueReport, QueueStore, Receipt, Settlement, Take, Taken,
};
use palisade_core::report::{Owner, Scope};
use palisade_core::{BootTime, Error, ErrorKind, Name, Result};
use palisade_kit::replies::LISTING;
use palisade_kit::{Link, renew_by_queue, timed};

/// How many keys one SCAN call visits.
const STEP: usize = 2000;

/// How many fields `work_claim.lua` and `work_show.lua` return per message.
const CLAIMED: usize = 6;
const SHOWN: usize = 12;

/// The most that one claimed message takes in a reply: its body and its words.
const MESSAGE: usize = MAX_BODY + (64 << 10);

/// The queues of one namespace.
pub(super) struct RedisQueues {
    client: Arc<Client>,
}

impl RedisQueues {
    pub(super) fn new(client: Arc<Client>) -> Self {
        Self { client }
    }

    async fn link(&self, keys: &LineKeys) -> Result<Link<Connection>> {
        let link = self.client.link(Some(keys)).await?;
        link.connection.load_work().await;
        Ok(link)
    }

    /// Runs a script on a queue; returns its reply without the word that identifies it.
    async fn run(
        &self,
        link: &mut Link<Connection>,
        script: Script,
        keys: &LineKeys,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<Vec<Value>> {
        let more = LISTING;
        self.run_expecting(more, link, script, keys, arguments)
            .await
    }

    /// The same, for a reply of messages.
    async fn run_expecting(
        &self,
        more: usize,
        link: &mut Link<Connection>,
        script: Script,
        keys: &LineKeys,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<Vec<Value>> {
        let word = ClaimId::random();
        let arguments = |command: &mut Cmd| {
            command.arg(word.to_string());
            arguments(command);
        };
        let client = &self.client;
        let ran = client.run_expecting(more, link, script, keys, arguments);
        let mut answer: Vec<Value> = ran.await?;
        let is_ours = answer.first().and_then(text) == Some(word.to_string());
        if !is_ours {
            return Err(self.client.misled(script.operation(), link).await);
        }
        answer.remove(0);
        Ok(answer)
    }

    /// The same, with a connection that is looked up here.
    async fn ask(
        &self,
        script: Script,
        queue: &Name,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<Vec<Value>> {
        let keys = self.client.keys.queue(queue)?;
        let mut link = self.link(&keys).await?;
        self.run(&mut link, script, &keys, arguments).await
    }

    async fn settled(
        &self,
        queue: &Name,
        receipts: &[Receipt],
        (word, after, why): (&str, Duration, &str),
    ) -> Result<Vec<bool>> {
        let add = |command: &mut Cmd| {
            command.arg(word).arg(micros(after)).arg(why);
            for receipt in receipts {
                command.arg(receipt.number).arg(receipt.sequence);
            }
        };
        let answer = self.ask(Script::WorkSettle, queue, add).await?;
        Ok(answer
            .iter()
            .map(|one| text(one).as_deref() == Some("1"))
            .collect())
    }

    /// The queues on one server whose names begin with `prefix`.
    async fn found(&self, link: &Link<Connection>, prefix: &str) -> Result<Vec<Name>> {
        let mut found = Vec::new();
        let mut cursor = 0u64;
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH");
            scan.arg(self.client.keys.queue_pattern(prefix));
            scan.arg("COUNT").arg(STEP).arg("TYPE").arg("hash");
            let step: RedisResult<(u64, Vec<Vec<u8>>)> =
                self.client.ask("survey", link, &scan).await?;
            let (next, keys) = step.map_err(|error| fault("survey", &error))?;
            let names = keys.into_iter().filter_map(|key| {
                let key = String::from_utf8(key).ok()?;
                self.client.keys.queue_of(&key)
            });
            found.extend(names.filter(|name| name.as_str().starts_with(prefix)));
            cursor = next;
            if cursor == 0 {
                return Ok(found);
            }
        }
    }

    async fn report(&self, name: &Name) -> Result<QueueReport> {
        let add = |command: &mut Cmd| {
            command.arg("count");
        };
        let answer = self.ask(Script::WorkShow, name, add).await?;
        let number = |at: usize| answer.get(at).and_then(number::<u64>);
        let mut report = QueueReport::empty(name.as_str());
        let unreadable = || unexpected_reply("survey");
        report.ready = number(0).ok_or_else(unreadable)?;
        report.delayed = number(1).ok_or_else(unreadable)?;
        report.claimed = number(2).ok_or_else(unreadable)?;
        report.blocked = number(3).ok_or_else(unreadable)?;
        report.dead = number(4).ok_or_else(unreadable)?;
        let since = number(5).map(Duration::from_micros);
        report.oldest = since.filter(|_| report.ready > 0);
        Ok(report)
    }

    async fn operate(&self, queue: &Name, does: &str, pick: &Pick, force: bool) -> Result<u64> {
        let (which, id) = match pick {
            Pick::All => ("all", ""),
            Pick::Dead => ("dead", ""),
            Pick::Id(id) => ("id", id.as_str()),
        };
        let add = |command: &mut Cmd| {
            command.arg(does).arg(which).arg(id).arg(u8::from(force));
        };
        let answer = self.ask(Script::WorkOperate, queue, add).await?;
        let count = answer.first().and_then(number);
        count.ok_or_else(|| unexpected_reply("operate"))
    }

    async fn renewed(
        &self,
        queue: &Name,
        receipts: &[Receipt],
        ttl: Option<Duration>,
    ) -> Result<Vec<Option<Duration>>> {
        let ttl = ttl.map_or_else(String::new, |ttl| micros(ttl).to_string());
        let add = |command: &mut Cmd| {
            command.arg(&ttl);
            for receipt in receipts {
                command.arg(receipt.number).arg(receipt.sequence);
            }
        };
        let answer = self.ask(Script::WorkRenew, queue, add).await?;
        let ttl = |one: &Value| {
            number(one)
                .filter(|ttl| *ttl > 0)
                .map(Duration::from_micros)
        };
        Ok(answer.iter().map(ttl).collect())
    }
}

impl Leasing for RedisQueues {
    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<'_, Vec<Renewal>> {
        Box::pin(async move {
            renew_by_queue(&leases, |queue, receipts| async move {
                let renewed = timed("renew", within, self.renewed(&queue, &receipts, None)).await;
                let renewed = renewed.and_then(|renewed| renewed);
                renewed.map_err(Error::maybe_applied)
            })
            .await
        })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<'_, Result<Left>> {
        Box::pin(async move {
            let left = match Receipt::of(&ticket) {
                Some(receipt) => {
                    let how = if receipt.seen { "again" } else { "untried" };
                    let how = (how, Duration::ZERO, "");
                    let settled = self.settled(&ticket.name, &[receipt], how).await?;
                    settled.first() == Some(&true)
                }
                None => {
                    let add = |command: &mut Cmd| {
                        command.arg(ticket.claim.to_string());
                    };
                    let answer = self.ask(Script::WorkLeave, &ticket.name, add).await?;
                    answer.first().and_then(number::<u64>).unwrap_or(0) > 0
                }
            };
            Ok(Left::of(left))
        })
    }

    fn audit(&self, _: LeaseId) -> BoxFuture<'_, Result<Vec<Audited>>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        notify::alarms(&self.client)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.client.servers.close() })
    }
}

impl QueueStore for RedisQueues {
    fn push(&self, queue: Name, drafts: Vec<Draft>) -> BoxFuture<'_, Result<Vec<Pushed>>> {
        Box::pin(async move {
            let keys = self.client.keys.queue(&queue)?;
            let mut link = self.link(&keys).await?;
            let add = |command: &mut Cmd| {
                command.arg(micros(DEDUPLICATED));
                for draft in &drafts {
                    let word = |text: &Option<String>| text.clone().unwrap_or_default();
                    command.arg(micros(draft.delay)).arg(word(&draft.id));
                    command.arg(word(&draft.key)).arg(&draft.body);
                }
            };
            let ran = self.run(&mut link, Script::WorkPush, &keys, add);
            let answer = ran.await?;
            self.client.replicated("push", &link).await?;
            let (rows, _) = answer.as_chunks::<2>();
            let pushed = drafts.iter().zip(rows).map(|(draft, [of, duplicate])| {
                let number = number(of).ok_or_else(|| unexpected_reply("push"))?;
                let duplicate = text(duplicate).as_deref() == Some("1");
                Ok(Pushed::new(draft.id.clone(), number, duplicate))
            });
            pushed.collect()
        })
    }

    fn take(&self, take: Take) -> BoxFuture<'_, Result<Taken>> {
        Box::pin(async move {
            let keys = self.client.keys.queue(&take.queue)?;
            let mut link = self.link(&keys).await?;
            let mut sleeper = String::new();
            if let Some(id) = take.sleeper {
                // The sleeper is registered here first, so that the message that wakes it finds it.
                self.client.receive_grants(&link).await?;
                self.client.hub.waiter(id);
                sleeper = format!("{} {id}", self.client.hub.channel);
            }
            let add = |command: &mut Cmd| {
                command
                    .arg(take.batch.to_string())
                    .arg(u8::from(take.again));
                command
                    .arg(take.count)
                    .arg(micros(take.ttl))
                    .arg(take.attempts);
                command.arg(&take.owner).arg(&sleeper);
            };
            let more = take.count.saturating_mul(MESSAGE);
            let answer = self.run_expecting(more, &mut link, Script::WorkClaim, &keys, add);
            let answer = answer.await?;
            let (next, messages) = answer
                .split_first()
                .ok_or_else(|| unexpected_reply("claim"))?;
            let (rows, _) = messages.as_chunks::<CLAIMED>();
            let mut messages = Vec::with_capacity(rows.len());
            for [of, id, key, token, attempt, body] in rows {
                let unreadable = || unexpected_reply("claim");
                messages.push(Delivery {
                    number: number(of).ok_or_else(unreadable)?,
                    id: text(id).filter(|id| !id.is_empty()),
                    key: text(key).filter(|key| !key.is_empty()),
                    sequence: number(token).ok_or_else(unreadable)?,
                    attempt: number(attempt).ok_or_else(unreadable)?,
                    body: bytes(body).ok_or_else(unreadable)?.to_vec(),
                });
            }
            messages.sort_by_key(|delivery: &Delivery| delivery.number);
            Ok(Taken {
                messages,
                next: number(next).map(Duration::from_micros),
            })
        })
    }

    fn sleep(&self, sleeper: ClaimId, until: BootTime) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let waiter = self.client.hub.waiter(sleeper);
            let _ = tokio::time::timeout(until.remaining(), waiter.woken.notified()).await;
            Ok(())
        })
    }

    fn forget(&self, sleeper: ClaimId) {
        self.client.hub.forget(sleeper);
    }

    fn settle(
        &self,
        queue: Name,
        receipts: Vec<Receipt>,
        how: Settlement,
    ) -> BoxFuture<'_, Result<Vec<bool>>> {
        Box::pin(async move {
            let how = match &how {
                Settlement::Done => ("done", Duration::ZERO, ""),
                Settlement::Retry { after, why } => ("again", *after, why.as_str()),
                Settlement::Dead { why } => ("dead", Duration::ZERO, why.as_str()),
                Settlement::Release => ("untried", Duration::ZERO, ""),
            };
            self.settled(&queue, &receipts, how).await
        })
    }

    fn extend(&self, ticket: Ticket, ttl: Duration) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            let Some(receipt) = Receipt::of(&ticket) else {
                return Ok(false);
            };
            let renewed = self.renewed(&ticket.name, &[receipt], Some(ttl)).await?;
            Ok(renewed.first().is_some_and(Option::is_some))
        })
    }

    fn survey(&self, scope: Scope) -> BoxFuture<'_, Result<Vec<QueueReport>>> {
        Box::pin(async move {
            let mut names = match &scope {
                Scope::Line(name) => vec![name.clone()],
                Scope::Prefix(prefix) => {
                    let links = self.client.links().await?;
                    let found = links.iter().map(|link| self.found(link, prefix));
                    try_join_all(found).await?.into_iter().flatten().collect()
                }
            };
            // A queue that migrates during the scan may be found twice.
            names.sort_unstable();
            names.dedup();
            let mut reports = Vec::with_capacity(names.len());
            for name in names {
                reports.push(self.report(&name).await?);
            }
            Ok(reports)
        })
    }

    fn list(
        &self,
        queue: Name,
        dead: bool,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<MessageReport>>> {
        Box::pin(async move {
            if limit == 0 {
                return Ok(Vec::new());
            }
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let add = |command: &mut Cmd| {
                command.arg("list").arg(u8::from(dead)).arg(limit);
            };
            let answer = self.ask(Script::WorkShow, &queue, add).await?;
            let (rows, _) = answer.as_chunks::<SHOWN>();
            let shown = rows
                .iter()
                .map(|row| Ok(shown(row).ok_or_else(|| unexpected_reply("list"))?.0));
            shown.collect()
        })
    }

    fn read(&self, queue: Name, id: String) -> BoxFuture<'_, Result<Option<FullReport>>> {
        Box::pin(async move {
            let add = |command: &mut Cmd| {
                command.arg("read").arg(&id);
            };
            let answer = self.ask(Script::WorkShow, &queue, add).await?;
            let (rows, _) = answer.as_chunks::<SHOWN>();
            let row = rows.first();
            row.map(|row| shown(row).ok_or_else(|| unexpected_reply("read")))
                .transpose()
        })
    }

    fn retry(&self, queue: Name, pick: Pick) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { self.operate(&queue, "retry", &pick, false).await })
    }

    fn discard(&self, queue: Name, pick: Pick, force: bool) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { self.operate(&queue, "drop", &pick, force).await })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn shown(row: &[Value; SHOWN]) -> Option<FullReport> {
    let [
        of,
        id,
        key,
        state,
        attempts,
        pushed,
        changes,
        token,
        owner,
        why,
        size,
        body,
    ] = row;
    let some = |value: &Value| text(value).filter(|text| !text.is_empty());
    let state = MessageState::of(&text(state)?);
    let claimed = state == MessageState::Claimed;
    let owner = some(owner).and_then(|owner| Owner::from_json(owner.as_bytes()));
    let report = {
        let mut message = MessageReport::new(some(id), number(of)?, state);
        message.key = some(key);
        message.attempts = number(attempts)?;
        message.pushed = number::<u64>(pushed)? / 1000;
        message.changes_in = number(changes).map(Duration::from_micros);
        message.sequence = number(token).filter(|_| claimed);
        message.owner = owner.filter(|_| claimed);
        message.why = some(why);
        message.size = number(size)?;
        message
    };
    Some((report, bytes(body)?.to_vec()))
}

fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.as_bytes()),
        _ => None,
    }
}

fn text(value: &Value) -> Option<String> {
    Some(String::from_utf8_lossy(bytes(value)?).into_owned())
}

fn number<T: std::str::FromStr>(value: &Value) -> Option<T> {
    std::str::from_utf8(bytes(value)?).ok()?.parse().ok()
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// An effect on the server of a queue, in Lua, with its keys and arguments. It sees them as `KEYS`
/// and `ARGV`, and its return value is returned. In a Cluster the keys must be in the slot of the
/// queue: see [`RedisMessage::hash_tag`].
///
/// It must check everything that it may refuse before it writes, because Redis does not roll back.
#[derive(Debug, Clone, Default)]
pub struct Effect {
    code: String,
    keys: Vec<Vec<u8>>,
    arguments: Vec<Vec<u8>>,
}

impl Effect {
    /// This Lua, as the body of a function.
    pub fn new(code: impl Into<String>) -> Self {
        Self {
            code: code.into(),
            ..Self::default()
        }
    }

    /// Adds a key that it touches.
    #[must_use]
    pub fn key(mut self, key: impl Into<Vec<u8>>) -> Self {
        self.keys.push(key.into());
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<Vec<u8>>) -> Self {
        self.arguments.push(argument.into());
        self
    }
}

/// Extensions for messages of `redis:`.
pub trait RedisMessage: Sized {
    /// Runs `effect` on the queue's own server and ends the message, in one script: **both happen
    /// exactly once or not at all**, as far as the server keeps its data. Nothing happens if the
    /// message was lost to another consumer.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when another consumer has claimed it since; [`ErrorKind::Unsupported`]
    /// for a message of another engine; errors of the server. After an error that says "maybe
    /// applied" the message comes again only if it was not applied.
    fn done_with(self, effect: Effect) -> impl Future<Output = Result<Value>> + Send;

    /// The hash tag that the keys of an effect must contain in a Cluster, braces included.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a message of another engine.
    fn hash_tag(&self) -> Result<String>;
}

impl RedisMessage for Message {
    async fn done_with(self, effect: Effect) -> Result<Value> {
        let store = self.store::<RedisQueues>().ok_or_else(other_engine)?;
        let keys = store.client.keys.queue(self.queue())?;
        let link = store.client.link(Some(&keys)).await?;
        self.part();
        let (receipt, word) = (self.receipt(), ClaimId::random().to_string());
        let mut command = redis::cmd("EVAL");
        command.arg([EFFECT.0, &effect.code, EFFECT.1].concat());
        command
            .arg(2 + effect.keys.len())
            .arg(&keys.key)
            .arg(&keys.state);
        command.arg(&effect.keys).arg(&word);
        command.arg(receipt.number).arg(receipt.sequence);
        command.arg(&effect.arguments);
        let answer: RedisResult<Vec<Value>> = store.client.ask("done", &link, &command).await?;
        let mut answer = answer.map_err(|error| fault("done", &error).with("id", self.id()))?;
        if answer.first().and_then(text).as_ref() != Some(&word) {
            return Err(store.client.misled("done", &link).await);
        }
        if answer.get(1).and_then(text).as_deref() != Some("1") {
            return Err(self.lost_error("done"));
        }
        self.settled();
        Ok(answer
            .pop()
            .filter(|_| answer.len() > 1)
            .unwrap_or(Value::Nil))
    }

    fn hash_tag(&self) -> Result<String> {
        let store = self.store::<RedisQueues>().ok_or_else(other_engine)?;
        let key = store.client.keys.queue(self.queue())?.key;
        let tag = key.find('{').zip(key.find('}'));
        Ok(tag.map_or_else(String::new, |(from, to)| key[from..=to].to_owned()))
    }
}

fn other_engine() -> Error {
    let message = "only messages of redis: can be done together with an effect in a script";
    Error::new(ErrorKind::Unsupported, "done", message)
}
