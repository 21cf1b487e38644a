//! Work queues in the database of the locks: rows of `message`, claimed by `FOR UPDATE SKIP LOCKED`
//! (`queue.sql`), one statement per verb; and steps of the user's own transaction.
//!
//! A consumer that finds nothing registers as a sleeper, claims once more, and is notified by the
//! next push. Consumers that are awake are not notified, because notifications delay commits.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Transaction};

use super::client::Client;
use super::statements::{Parameters, Verb, like};
use super::{error, from_micros, micros, notify, signed};
use palisade_core::engine::{
    Alarm, Audited, BoxStream, ClaimId, Lease, LeaseId, LeaseStart, Leasing, Left, Renewal, Ticket,
};
use palisade_core::queue::{
    DEDUPLICATED, Delivery, Draft, FullReport, Message, MessageReport, MessageState, Pick, Pushed,
    Queue, QueueReport, QueueStore, Receipt, Settlement, Take, Taken,
};
use palisade_core::report::{Owner, Scope};
use palisade_core::{BootTime, Error, ErrorKind, Name, Result};
use palisade_kit::push::Waiter;

/// The SQLSTATE of a step in the user's transaction whose message another consumer has by now.
pub(super) const LOST: &str = "PFQ01";

/// How long a sleeper is registered before it registers again; the server keeps it for three times
/// as long.
const ASLEEP: Duration = Duration::from_secs(5);

/// The queues of one namespace.
pub(super) struct PostgresQueues {
    client: Arc<Client>,
    sleepers: Mutex<HashMap<ClaimId, Asleep>>,
}

/// A registered sleeper.
#[derive(Clone)]
struct Asleep {
    name: ClaimId,
    waiter: Arc<Waiter>,
    since: BootTime,
}

impl PostgresQueues {
    pub(super) fn new(client: Arc<Client>) -> Self {
        Self {
            client,
            sleepers: Mutex::default(),
        }
    }

    async fn claim(&self, take: &Take) -> Result<Taken> {
        let batch = take.batch.to_string();
        let count = i32::try_from(take.count).unwrap_or(i32::MAX);
        let attempts = i32::try_from(take.attempts).unwrap_or(i32::MAX);
        let (namespace, queue) = (&self.client.namespace, take.queue.as_str());
        let parameters: Parameters<'_> = &[
            namespace,
            &queue,
            &batch,
            &take.again,
            &count,
            &micros(take.ttl),
            &attempts,
            &take.owner,
        ];
        let rows = self.client.ask("claim", Verb::QueueClaim, parameters);
        let mut taken = Taken::default();
        for row in rows.await? {
            let dead: bool = cell(&row, 6)?;
            if dead {
                // There may be more behind it.
                taken.next = Some(Duration::ZERO);
                continue;
            }
            taken.messages.push(Delivery {
                number: cell::<i64>(&row, 0)?.unsigned_abs(),
                id: cell(&row, 1)?,
                key: cell(&row, 2)?,
                sequence: cell::<i64>(&row, 3)?.unsigned_abs(),
                attempt: cell::<i32>(&row, 4)?.unsigned_abs(),
                body: cell(&row, 5)?,
            });
        }
        taken.messages.sort_by_key(|delivery| delivery.number);
        Ok(taken)
    }

    /// Registers a sleeper, unless it is registered already; returns when the next message is due.
    async fn fall_asleep(
        &self,
        queue: &Name,
        sleeper: ClaimId,
    ) -> Result<Option<Option<Duration>>> {
        let known = self.sleepers.lock().get(&sleeper).cloned();
        let fresh = |asleep: &Asleep| BootTime::now().saturating_since(asleep.since) < ASLEEP;
        if known.as_ref().is_some_and(fresh) || !self.client.listen().await? {
            return Ok(None);
        }
        let name = ClaimId::random();
        let asleep = Asleep {
            name,
            waiter: self.client.hub.waiter(name),
            since: BootTime::now(),
        };
        self.rouse(sleeper);
        self.sleepers.lock().insert(sleeper, asleep);
        let before = known.map(|known| known.name.to_string());
        let (namespace, queue) = (&self.client.namespace, queue.as_str());
        let (name, mailbox) = (name.to_string(), self.client.channel());
        let parameters: Parameters<'_> = &[namespace, &queue, &name, &before, &mailbox];
        let asked = self.client.numbers("claim", Verb::QueueSleep, parameters);
        match asked.await {
            Ok(next) => Ok(Some(next.first().map(|next| from_micros(*next)))),
            Err(error) => {
                self.rouse(sleeper);
                Err(error)
            }
        }
    }

    /// Forgets that a sleeper is registered.
    fn rouse(&self, sleeper: ClaimId) {
        if let Some(asleep) = self.sleepers.lock().remove(&sleeper) {
            self.client.hub.forget(asleep.name);
        }
    }

    async fn settled(&self, receipts: &[Receipt], how: Settlement) -> Result<Vec<bool>> {
        let numbers: Vec<i64> = receipts.iter().map(|r| signed(r.number)).collect();
        let tokens: Vec<i64> = receipts.iter().map(|r| signed(r.sequence)).collect();
        let ended = match how {
            Settlement::Done => {
                let keyed = receipts.iter().any(|receipt| receipt.keyed);
                let parameters: Parameters<'_> = &[&numbers, &tokens, &keyed];
                let asked = self.client.numbers("done", Verb::QueueDone, parameters);
                asked.await?
            }
            Settlement::Retry { after, why } => {
                let after = Some(micros(after));
                self.put_back(&numbers, &tokens, after, false, Some(&why))
                    .await?
            }
            Settlement::Dead { why } => {
                self.put_back(&numbers, &tokens, None, false, Some(&why))
                    .await?
            }
            Settlement::Release => {
                self.put_back(&numbers, &tokens, Some(0), true, None)
                    .await?
            }
        };
        let ended = |number| ended.contains(number);
        Ok(numbers.iter().map(ended).collect())
    }

    async fn put_back(
        &self,
        numbers: &Vec<i64>,
        tokens: &Vec<i64>,
        after: Option<i64>,
        untried: bool,
        why: Option<&str>,
    ) -> Result<Vec<i64>> {
        let parameters: Parameters<'_> = &[numbers, tokens, &after, &untried, &why];
        let asked = self.client.numbers("fail", Verb::QueueReturn, parameters);
        asked.await
    }

    /// The parameters for an operator's selection.
    fn picked(pick: &Pick) -> (&'static str, Option<i64>, Option<&str>) {
        match pick {
            Pick::All => ("all", None, None),
            Pick::Dead => ("dead", None, None),
            Pick::Id(id) => ("id", Pick::number(id).map(signed), Some(id)),
        }
    }
}

impl Leasing for PostgresQueues {
    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<'_, Vec<Renewal>> {
        Box::pin(async move {
            let sent = BootTime::now();
            let by = Instant::now() + within;
            let tickets = leases.iter().filter_map(|lease| lease.ticket.as_ref());
            let receipts: Vec<Receipt> = tickets.filter_map(Receipt::of).collect();
            if receipts.len() != leases.len() {
                // This store never issued such leases.
                return leases.iter().map(|_| Renewal::Lost).collect();
            }
            let numbers: Vec<i64> = receipts.iter().map(|r| signed(r.number)).collect();
            let tokens: Vec<i64> = receipts.iter().map(|r| signed(r.sequence)).collect();
            let parameters: Parameters<'_> = &[&numbers, &tokens];
            let renewals = self.client.renewals(Verb::QueueRenew, parameters, by).await;
            match renewals {
                Ok(ttls) if ttls.len() == leases.len() => ttls
                    .into_iter()
                    .map(|ttl| match ttl {
                        1.. => Renewal::Held(LeaseStart {
                            sent,
                            ttl: from_micros(ttl),
                        }),
                        0 => Renewal::Lost,
                        _ => Renewal::Unknown(locked()),
                    })
                    .collect(),
                Ok(_) => {
                    let error = error::unreadable::<()>("renew").err();
                    let unknown = || Renewal::Unknown(error.clone().unwrap_or_else(locked));
                    leases.iter().map(|_| unknown()).collect()
                }
                Err(error) => {
                    let unknown = || Renewal::Unknown(error.clone());
                    leases.iter().map(|_| unknown()).collect()
                }
            }
        })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<'_, Result<Left>> {
        Box::pin(async move {
            let left = if let Some(receipt) = Receipt::of(&ticket) {
                let (number, token) = (signed(receipt.number), signed(receipt.sequence));
                self.put_back(&vec![number], &vec![token], Some(0), !receipt.seen, None)
                    .await?
                    .len()
            } else {
                let (namespace, queue) = (&self.client.namespace, ticket.name.as_str());
                let batch = ticket.claim.to_string();
                let parameters: Parameters<'_> = &[namespace, &queue, &batch];
                let asked = self.client.numbers("leave", Verb::QueueLeave, parameters);
                asked.await?.first().map_or(0, |left| *left as usize)
            };
            Ok(Left::of(left > 0))
        })
    }

    fn audit(&self, _: LeaseId) -> BoxFuture<'_, Result<Vec<Audited>>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        notify::alarms(&self.client)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.client.close() })
    }
}

impl QueueStore for PostgresQueues {
    fn push(&self, queue: Name, drafts: Vec<Draft>) -> BoxFuture<'_, Result<Vec<Pushed>>> {
        Box::pin(async move {
            let columns = Columns::of(&self.client, &queue, &drafts);
            let parameters = columns.parameters();
            let asked = self.client.ask("push", Verb::QueuePush, &parameters);
            pushed(drafts.iter().map(|draft| draft.id.clone()), &asked.await?)
        })
    }

    fn take(&self, take: Take) -> BoxFuture<'_, Result<Taken>> {
        Box::pin(async move {
            let taken = self.claim(&take).await?;
            let Some(sleeper) = take.sleeper else {
                return Ok(taken);
            };
            if !taken.messages.is_empty() || taken.next.is_some() {
                return Ok(taken);
            }
            let next = match self.fall_asleep(&take.queue, sleeper).await? {
                // Nothing has changed since it was registered, or it would have been woken.
                None => return Ok(taken),
                Some(next) => next,
            };
            // Claims what was pushed before it was registered.
            let mut taken = self.claim(&take).await?;
            taken.next = taken.next.or(next);
            Ok(taken)
        })
    }

    fn sleep(&self, sleeper: ClaimId, until: BootTime) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let asleep = self.sleepers.lock().get(&sleeper).cloned();
            let Some(asleep) = asleep else {
                // Without NOTIFY it polls.
                tokio::time::sleep(until.remaining()).await;
                return Ok(());
            };
            let woken = asleep.waiter.woken.notified();
            if tokio::time::timeout(until.remaining(), woken).await.is_ok() {
                self.rouse(sleeper);
            }
            Ok(())
        })
    }

    fn forget(&self, sleeper: ClaimId) {
        self.rouse(sleeper);
    }

    fn settle(
        &self,
        _: Name,
        receipts: Vec<Receipt>,
        how: Settlement,
    ) -> BoxFuture<'_, Result<Vec<bool>>> {
        Box::pin(async move { self.settled(&receipts, how).await })
    }

    fn extend(&self, ticket: Ticket, ttl: Duration) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            let Some(receipt) = Receipt::of(&ticket) else {
                return Ok(false);
            };
            let (number, token) = (signed(receipt.number), signed(receipt.sequence));
            let parameters: Parameters<'_> = &[&number, &token, &micros(ttl)];
            let asked = self.client.numbers("extend", Verb::QueueExtend, parameters);
            Ok(asked.await?.first() == Some(&1))
        })
    }

    fn survey(&self, scope: Scope) -> BoxFuture<'_, Result<Vec<QueueReport>>> {
        Box::pin(async move {
            let (verb, name) = match &scope {
                Scope::Prefix(prefix) => (Verb::QueueSurveyPrefix, like(prefix)),
                Scope::Line(name) => (Verb::QueueSurveyLine, name.as_str().to_owned()),
            };
            let parameters: Parameters<'_> = &[&self.client.namespace, &name];
            let mut reports: Vec<QueueReport> = Vec::new();
            for row in self.client.ask("survey", verb, parameters).await? {
                let name: String = cell(&row, 0)?;
                if reports.last().is_none_or(|report| report.name != name) {
                    reports.push(QueueReport::empty(name));
                }
                let Some(report) = reports.last_mut() else {
                    continue;
                };
                // A queue without messages has a row without a state.
                let count = cell::<i64>(&row, 2)?.unsigned_abs();
                let oldest = cell::<Option<i64>>(&row, 3)?.map_or(Duration::ZERO, from_micros);
                report.add(MessageState::of(&cell::<String>(&row, 1)?), count, oldest);
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
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let (namespace, queue) = (&self.client.namespace, queue.as_str());
            let parameters: Parameters<'_> = &[namespace, &queue, &dead, &limit];
            let rows = self.client.ask("list", Verb::QueueList, parameters).await?;
            rows.iter().map(report).collect()
        })
    }

    fn read(&self, queue: Name, id: String) -> BoxFuture<'_, Result<Option<FullReport>>> {
        Box::pin(async move {
            let (namespace, queue) = (&self.client.namespace, queue.as_str());
            let number = Pick::number(&id).map(signed);
            let parameters: Parameters<'_> = &[namespace, &queue, &number, &id];
            let rows = self.client.ask("read", Verb::QueueRead, parameters).await?;
            let Some(row) = rows.first() else {
                return Ok(None);
            };
            Ok(Some((report(row)?, cell(row, 11)?)))
        })
    }

    fn retry(&self, queue: Name, pick: Pick) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let (which, number, id) = Self::picked(&pick);
            let (namespace, queue) = (&self.client.namespace, queue.as_str());
            let parameters: Parameters<'_> = &[namespace, &queue, &which, &number, &id];
            let asked = self.client.numbers("retry", Verb::QueueRetry, parameters);
            Ok(asked.await?.first().map_or(0, |count| count.unsigned_abs()))
        })
    }

    fn discard(&self, queue: Name, pick: Pick, force: bool) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let (which, number, id) = Self::picked(&pick);
            let (namespace, queue) = (&self.client.namespace, queue.as_str());
            let parameters: Parameters<'_> = &[namespace, &queue, &which, &number, &id, &force];
            let mut all = 0;
            loop {
                let asked = self.client.numbers("drop", Verb::QueueDiscard, parameters);
                match asked.await?.first() {
                    Some(&count @ 1..) => all += count.unsigned_abs(),
                    _ => return Ok(all),
                }
            }
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Drafts as array parameters.
struct Columns<'a> {
    namespace: &'a str,
    queue: &'a str,
    ids: Vec<Option<&'a str>>,
    keys: Vec<Option<&'a str>>,
    delays: Vec<i64>,
    bodies: Vec<&'a [u8]>,
    remembered: i64,
}

impl<'a> Columns<'a> {
    fn of(client: &'a Client, queue: &'a Name, drafts: &'a [Draft]) -> Self {
        Self {
            namespace: &client.namespace,
            queue: queue.as_str(),
            ids: drafts.iter().map(|draft| draft.id.as_deref()).collect(),
            keys: drafts.iter().map(|draft| draft.key.as_deref()).collect(),
            delays: drafts.iter().map(|draft| micros(draft.delay)).collect(),
            bodies: drafts.iter().map(|draft| &*draft.body).collect(),
            remembered: micros(DEDUPLICATED),
        }
    }

    fn parameters(&self) -> [&(dyn ToSql + Sync); 7] {
        [
            &self.namespace,
            &self.queue,
            &self.ids,
            &self.keys,
            &self.delays,
            &self.bodies,
            &self.remembered,
        ]
    }
}

/// The results for drafts with these ids.
fn pushed(ids: impl Iterator<Item = Option<String>>, rows: &[Row]) -> Result<Vec<Pushed>> {
    ids.zip(rows)
        .map(|(id, row)| {
            let number = cell::<i64>(row, 0)?.unsigned_abs();
            Ok(Pushed::new(id, number, cell(row, 1)?))
        })
        .collect()
}

fn report(row: &Row) -> Result<MessageReport> {
    let state = MessageState::of(&cell::<String>(row, 3)?);
    let number = cell::<i64>(row, 0)?.unsigned_abs();
    let owner: Option<String> = cell(row, 8)?;
    let token = cell::<i64>(row, 7)?.unsigned_abs();
    let claimed = state == MessageState::Claimed;
    Ok({
        let mut message = MessageReport::new(cell(row, 1)?, number, state);
        message.key = cell(row, 2)?;
        message.attempts = cell::<i32>(row, 4)?.unsigned_abs();
        message.pushed = cell::<i64>(row, 5)?.unsigned_abs();
        message.changes_in = cell::<Option<i64>>(row, 6)?.map(from_micros);
        message.sequence = claimed.then_some(token);
        message.owner = owner
            .filter(|_| claimed)
            .and_then(|owner| Owner::from_json(owner.as_bytes()));
        message.why = cell(row, 9)?;
        message.size = cell::<i64>(row, 10)?.unsigned_abs();
        message
    })
}

fn cell<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a Row, at: usize) -> Result<T> {
    row.try_get(at)
        .map_or_else(|_| error::unreadable("queue"), Ok)
}

/// The error for a message whose row is locked by a transaction that is about to end its claim.
fn locked() -> Error {
    let message = "a transaction that has not ended keeps the message locked";
    Error::new(ErrorKind::Unreachable, "renew", message)
}

/// Extensions for messages of `postgres://`.
pub trait PostgresMessage {
    /// Ends the message in `transaction`, in the queue's own database, together with its effect:
    /// **both happen exactly once or not at all**. The transaction fails if the message was lost to
    /// another consumer. From this call until the transaction ends nobody else can claim the
    /// message, however long that takes.
    ///
    /// After a commit, call [`Message::settled`]. After a rollback, drop the message, and it is
    /// ready again.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when another consumer has claimed it since; [`ErrorKind::Unsupported`]
    /// for a message of another engine, and for one with a key above READ COMMITTED; errors of the
    /// server.
    fn done_in(&self, transaction: &Transaction<'_>) -> impl Future<Output = Result<()>> + Send;
}

impl PostgresMessage for Message {
    async fn done_in(&self, transaction: &Transaction<'_>) -> Result<()> {
        let Some(store) = self.store::<PostgresQueues>() else {
            return Err(other_engine("done"));
        };
        self.part();
        let receipt = self.receipt();
        let (number, token) = (signed(receipt.number), signed(receipt.sequence));
        let schema = store.client.schema.quoted();
        let sql = format!("SELECT {schema}.queue_done_or_fail($1, $2)");
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&number, Type::INT8), (&token, Type::INT8)];
        let asked = transaction.client().query_typed(&sql, &parameters);
        match asked.await {
            Ok(_) => Ok(()),
            Err(error) => Err(error::failed("done", &error).with("id", self.id())),
        }
    }
}

/// Extensions for queues of `postgres://`.
pub trait PostgresQueue {
    /// Pushes in `transaction`, in the queue's own database: the message exists once it commits,
    /// and never if it does not. The first call on a new database creates the tables before that,
    /// on the queue's own connection.
    ///
    /// # Errors
    /// As [`Queue::push`]; [`ErrorKind::Unsupported`] for a queue of another engine, and for a
    /// message with a key above READ COMMITTED.
    fn push_in(
        &self,
        transaction: &Transaction<'_>,
        draft: impl Into<Draft> + Send,
    ) -> impl Future<Output = Result<Pushed>> + Send;
}

impl PostgresQueue for Queue {
    async fn push_in(
        &self,
        transaction: &Transaction<'_>,
        draft: impl Into<Draft> + Send,
    ) -> Result<Pushed> {
        let Some(store) = self.store_as::<PostgresQueues>()? else {
            return Err(other_engine("push"));
        };
        let drafts = [draft.into()];
        drafts[0].check()?;
        store.client.ensure_schema().await?;
        let columns = Columns::of(&store.client, self.name(), &drafts);
        let values = columns.parameters();
        let types = [
            Type::TEXT,
            Type::TEXT,
            Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT8_ARRAY,
            Type::BYTEA_ARRAY,
            Type::INT8,
        ];
        let parameters: Vec<_> = values.into_iter().zip(types).collect();
        let schema = store.client.schema.quoted();
        let sql = format!("SELECT * FROM {schema}.queue_push($1, $2, $3, $4, $5, $6, $7)");
        let asked = transaction.client().query_typed(&sql, &parameters).await;
        let rows = asked.map_err(|error| error::failed("push", &error))?;
        let id = drafts[0].id.clone();
        let first = pushed(std::iter::once(id), &rows)?.pop();
        first.map_or_else(|| error::unreadable("push"), Ok)
    }
}

fn other_engine(operation: &'static str) -> Error {
    let message = "only queues of postgres:// have a part in a transaction of PostgreSQL";
    Error::new(ErrorKind::Unsupported, operation, message)
}
