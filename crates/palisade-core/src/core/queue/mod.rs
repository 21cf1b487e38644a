//! `Queue`: work for many consumers, where each message has one consumer at a time.
//!
//! push → (ready) → claim → (claimed: a lease, a token) → done | fail → (delayed) → … → dead
//! letter. The keeper renews a claim like a hold, and reports its loss. **Delivery is at least
//! once**: if a consumer is paused, partitioned or killed after the effect and before `done`, the
//! effect happens again. It is exactly once where effect and `done` are one step (a transaction, a
//! script), or where the effect is a fenced write under the message's id.
//!
//! # One number decides who may have a message
//!
//! Each message has a time from which it may be claimed, `due`, on the store's own clock. A ready
//! message is due since its push. A delayed message, or one that waits for its next attempt, is due
//! later. A claimed message is due when its lease ends. A message that must not be claimed at all
//! (behind another of its key, or a dead letter) is never due. So a claim is one step, "the first n
//! that are due", and an ended lease needs no sweeper. Every claim takes a new token, and `done`,
//! `fail` and renewals compare it: a consumer that was replaced is refused, however late and in
//! whatever order its requests arrive. Every end of a claim removes its token.
//!
//! # Failures and their consequences
//!
//! - *A consumer is paused past its lease.* Its message is due and goes to another consumer with a
//!   greater token. The paused consumer's keeper reports the loss no later than its own deadline
//!   (counted from before the claim was sent, on a clock that runs during suspend), which is before
//!   the store's. Its late `done` and its late fenced write are refused.
//! - *The lease has ended and nobody has claimed since.* A late `done` is accepted: the token still
//!   stands, so nobody else has had the message.
//! - *The reply of a claim is lost.* The claim carries a random batch id. When it is repeated with
//!   that id, the store answers with the same messages and a new lease. A claim that is dropped or
//!   given up is left by its batch id in the background; its lease ends at the latest.
//! - *The reply of a `done` is lost.* The request is repeated. If the message is gone and our
//!   deadline has not passed, nobody else can have had it, so our first request was applied. After
//!   the deadline the result is an error with the outcome "maybe applied".
//! - *Clocks differ.* Only the store's clock decides what is due and when a lease ends. Only the
//!   consumer's boot clock decides how long the consumer relies on its claim. The two are never
//!   compared.
//! - *A message kills its consumer.* Attempts are counted by the claim and not by the failure: a
//!   message that was claimed as often as allowed becomes a dead letter at the next claim.
//! - *Order within a key.* Only the first message of a key is ever due; the others are not due
//!   until it is gone. It keeps its place while it is claimed, delayed, waiting for its next
//!   attempt, or a dead letter: **a failing message blocks its key** until it is done, retried or
//!   dropped by an operator. So two messages of a key are never claimed at the same time. The store
//!   serialises pushes and ends of one key; other keys are not affected.
//! - *The same id again.* An id is a duplicate while its message is in the queue, and for
//!   [`DEDUPLICATED`] after its push. Nothing is stored, and the first message's id is returned.
//! - *Durability.* `push` returns when the store has the message as durably as it can.
//!
//! A store implements [`QueueStore`] beside its engine (`engines/…/queue.rs`); to the keeper it is
//! a [`Leasing`](super::leasing::Leasing). This file has the handle, `message` one claimed message.

mod message;
mod report;
mod retries;
mod store;

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};

pub use self::message::{Failed, Message};
pub use self::report::{MessageReport, MessageState, QueueReport};
pub use self::retries::Retries;
pub use self::store::{
    Delivery, Draft, FullReport, Pick, Pushed, QueueStore, Receipt, Settlement, SharedQueueStore,
    Take, Taken,
};
use super::capability::Capability;
use super::claim::ClaimId;
use super::clock::BootTime;
use super::error::{Error, ErrorKind, Outcome, Result};
use super::events::Stall;
use super::keeper::Keeper;
use super::name::Name;
use super::owner::Owner;
use super::ticket::{LeaseStart, Ticket};
use super::token::Era;
use super::wait::{Backoff, Patience, Retry, Tries, recheck_at};

/// The least time for which an id is remembered after its push: longer than a sender retries
/// automatically, short enough that ids don't accumulate.
pub const DEDUPLICATED: Duration = Duration::from_secs(24 * 3600);

/// The largest body. Store larger content elsewhere, and push a reference to it.
pub const MAX_BODY: usize = 16 * 1024 * 1024;

/// The largest number of messages in one claim, and in one push.
pub const MAX_BATCH: usize = 1024;

/// The keeper of a client's messages.
pub(crate) type QueueKeeper = Keeper<dyn QueueStore>;

/// A queue of one name. Made by [`Client::queue`](crate::Client::queue); cheap to clone.
///
/// ```
/// # #[cfg(feature = "file-queue")]
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// # let url = format!("file:{}", directory.path().display());
/// let mail = palisade::connect(&*url).await?.queue("mail");
/// mail.push("to: ann").await?;
///
/// let message = mail.next().await?;
/// assert_eq!(message.body(), b"to: ann");
/// // Send it: dropped at once if the message is lost to another consumer.
/// message.run(async { /* … */ }).await?;
/// message.done().await
/// # }
/// # #[cfg(not(feature = "file-queue"))] fn main() {}
/// ```
#[derive(Clone)]
pub struct Queue {
    pub(super) keeper: Option<Arc<QueueKeeper>>,
    pub(super) name: Name,
    pub(super) era: Era,
    pub(super) owner: Arc<Owner>,
    pub(super) ttl: Duration,
    pub(super) capability: Capability,
    pub(super) retries: Retries,
    /// The first invalid argument; returned when the queue is used.
    pub(super) refused: Option<Error>,
}

impl Queue {
    /// A queue whose name and options are checked when it is used.
    pub(crate) fn new(
        keeper: Result<Arc<QueueKeeper>>,
        name: Result<Name>,
        capability: Capability,
        (era, owner, ttl): (Era, Arc<Owner>, Duration),
    ) -> Self {
        let mut refused = None;
        let mut noted = |error| {
            refused.get_or_insert(error);
        };
        let name = name.map_err(&mut noted).ok();
        let keeper = keeper.map_err(&mut noted).ok();
        Self {
            keeper,
            name: name.unwrap_or_else(Name::refused),
            era,
            owner,
            ttl,
            capability,
            retries: Retries::default(),
            refused,
        }
    }

    /// The name.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Sets how long a claim lasts without renewal: after that the message of a consumer that hangs
    /// or is partitioned goes to another. The keeper renews claims, so this does not limit the
    /// work.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        match self.capability.explicit_ttl(ttl) {
            Ok(ttl) => self.ttl = ttl,
            Err(error) => self.refuse(error),
        }
        self
    }

    /// Sets how often a message is tried, and the delays between attempts.
    #[must_use]
    pub fn retries(mut self, retries: Retries) -> Self {
        if let Err(error) = retries.check() {
            self.refuse(error);
        }
        self.retries = retries;
        self
    }

    fn refuse(&mut self, error: Error) {
        self.refused.get_or_insert(error);
    }

    pub(super) fn keeper(&self) -> Result<&Arc<QueueKeeper>> {
        match (&self.refused, &self.keeper) {
            (None, Some(keeper)) => Ok(keeper),
            (Some(refused), _) => Err(refused.clone()),
            (None, None) => Err(Error::new(ErrorKind::Internal, "queue", "no store (bug)")),
        }
    }

    fn store(&self) -> Result<&SharedQueueStore> {
        Ok(self.keeper()?.store())
    }

    /// Adds a message. Returns when the store has it as durably as it can.
    ///
    /// # Errors
    /// Before any I/O: [`ErrorKind::InvalidName`] for an invalid name, key or id,
    /// [`ErrorKind::InvalidArgument`] for a body above [`MAX_BODY`], [`ErrorKind::Unsupported`] on
    /// an engine without queues. Then those of the engine. After one with the outcome "maybe
    /// applied", a message with an [id](Draft::id) can be pushed again.
    pub async fn push(&self, draft: impl Into<Draft>) -> Result<Pushed> {
        let mut pushed = self.push_all([draft.into()]).await?;
        pushed.pop().ok_or_else(|| unexpected_reply("push"))
    }

    /// Adds messages in this order: all of them or none.
    ///
    /// # Errors
    /// As [`Queue::push`].
    pub async fn push_all(&self, drafts: impl IntoIterator<Item = Draft>) -> Result<Vec<Pushed>> {
        let store = self.store()?;
        let drafts: Vec<Draft> = drafts.into_iter().collect();
        for draft in &drafts {
            draft.check()?;
        }
        match drafts.len() {
            0 => return Ok(Vec::new()),
            1..=MAX_BATCH => {}
            more => {
                let message = format!("a push takes at most {MAX_BATCH} messages, not {more}");
                return Err(Error::new(ErrorKind::InvalidArgument, "push", message));
            }
        }
        store.push(self.name.clone(), drafts).await
    }

    /// Claims up to `count` messages that are ready now; the result may be empty.
    ///
    /// # Cancellation
    /// A call that is dropped at any await leaves no message claimed. The claim is left at once if
    /// the engine answers, and expires with its ttl if it doesn't.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn claim(&self, count: usize) -> Result<Vec<Message>> {
        let mut messages = self.take(count, Patience::NoWait).await?;
        messages.iter_mut().for_each(Message::hand_out);
        Ok(messages)
    }

    /// Waits for a message, even while the engine can't be reached.
    ///
    /// # Cancellation
    /// As [`Queue::claim`].
    ///
    /// # Errors
    /// Those of [`Queue::push`], except for an engine that can't be reached.
    pub async fn next(&self) -> Result<Message> {
        let message = self.next_within(Patience::Forever).await?;
        message.ok_or_else(|| unexpected_reply("claim"))
    }

    /// Waits for a message while patience lasts; `None` if it ended first.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn next_within(&self, patience: Patience) -> Result<Option<Message>> {
        let mut messages = self.take(1, patience).await?;
        messages.iter_mut().for_each(Message::hand_out);
        Ok(messages.pop())
    }

    /// A stream of messages, claimed up to `ahead` at a time. When the stream is dropped, claimed
    /// messages that it has not yielded are returned at once, and their attempt does not count.
    ///
    /// The stream ends after an error, but waits for an engine that can't be reached.
    pub fn messages(&self, ahead: usize) -> impl Stream<Item = Result<Message>> + Send + 'static {
        let start = Some((self.clone(), VecDeque::new()));
        stream::unfold(start, move |state| async move {
            let (queue, mut claimed): (Self, VecDeque<Message>) = state?;
            loop {
                if let Some(mut message) = claimed.pop_front() {
                    // Its lease may have ended while it was buffered.
                    if message.is_valid() {
                        message.hand_out();
                        return Some((Ok(message), Some((queue, claimed))));
                    }
                    continue;
                }
                match queue.take(ahead, Patience::Forever).await {
                    Ok(messages) => claimed.extend(messages),
                    Err(error) => return Some((Err(error), None)),
                }
            }
        })
        .boxed()
    }

    /// Settles several messages as done with one request. Returns the ids of those that had been
    /// lost before.
    ///
    /// # Errors
    /// As [`Message::done`].
    pub async fn done_all(&self, messages: Vec<Message>) -> Result<Vec<String>> {
        if messages.iter().any(|message| message.queue() != &self.name) {
            let message = "a message belongs to another queue";
            return Err(Error::new(ErrorKind::InvalidArgument, "done", message));
        }
        let lost = message::settle("done", messages, Settlement::Done).await?;
        Ok(lost.iter().map(|lost| lost.id().to_owned()).collect())
    }

    /// The number of messages in each state; `None` if there is no such queue.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn report(&self) -> Result<Option<QueueReport>> {
        let scope = super::report::Scope::Line(self.name.clone());
        Ok(self.store()?.survey(scope).await?.pop())
    }

    /// Lists messages in order, without their bodies; only dead letters if `dead`.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn list(&self, dead: bool, limit: usize) -> Result<Vec<MessageReport>> {
        let store = self.store()?;
        store.list(self.name.clone(), dead, limit).await
    }

    /// One message with its body, by its id.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn read(&self, id: &str) -> Result<Option<FullReport>> {
        self.store()?.read(self.name.clone(), id.to_owned()).await
    }

    /// Makes dead letters, or one message that is delayed or waits for its next attempt, ready now
    /// with no attempts counted. Returns how many.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn retry(&self, pick: Pick) -> Result<u64> {
        self.store()?.retry(self.name.clone(), pick).await
    }

    /// Removes messages without handling them. Claimed messages are skipped unless `force`: then
    /// the consumer learns of it at its next renewal, and the next message of the key may be
    /// handled meanwhile. Returns how many.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn drop_messages(&self, pick: Pick, force: bool) -> Result<u64> {
        self.store()?.discard(self.name.clone(), pick, force).await
    }

    /// The store of the queue, if it has this type.
    #[allow(dead_code, reason = "each engine has its own, or none")]
    pub fn store_as<S: Any>(&self) -> Result<Option<&S>> {
        Ok(self.store()?.as_any().downcast_ref())
    }

    /// Claims ready messages, and waits for some as long as patience allows.
    async fn take(&self, count: usize, patience: Patience) -> Result<Vec<Message>> {
        if count == 0 || count > MAX_BATCH {
            let message = format!("a claim takes 1 to {MAX_BATCH} messages, not {count}");
            return Err(Error::new(ErrorKind::InvalidArgument, "claim", message));
        }
        let keeper = self.keeper()?;
        keeper.start()?;
        let sleeper = (patience != Patience::NoWait).then(|| Sleeper {
            keeper: Arc::clone(keeper),
            id: ClaimId::random(),
        });
        let mut stall = Stall::default();
        let on = (keeper.observers(), &self.name);
        let mut tries = Tries::new(patience, Retry::default(), &mut stall, on);
        loop {
            let asleep = sleeper.as_ref().map(|sleeper| sleeper.id);
            let taking = self.take_once(keeper, count, asleep, &mut tries);
            let (messages, next) = taking.await?;
            tries.answered();
            if !messages.is_empty() {
                return Ok(messages);
            }
            if next == Some(Duration::ZERO) {
                // Only messages that became dead letters were found.
                continue;
            }
            let Some(sleeper) = sleeper.as_ref().filter(|_| !tries.deadline.has_passed()) else {
                return Ok(messages);
            };
            let mut until = recheck_at(tries.deadline);
            if let Some(next) = next {
                until = until.min(BootTime::now() + next);
            }
            let slept = keeper.store().sleep(sleeper.id, until);
            match tries.bound("claim", slept).await {
                Ok(()) => tries.backoff = Backoff::new(Retry::default()),
                Err(error) if error.is_transient() && tries.again_after(&error).await => {}
                Err(error) => return Err(error.with("queue", &self.name)),
            }
        }
    }

    /// One claim, repeated with the same batch id while there is no answer.
    async fn take_once(
        &self,
        keeper: &Arc<QueueKeeper>,
        count: usize,
        sleeper: Option<ClaimId>,
        tries: &mut Tries<'_>,
    ) -> Result<(Vec<Message>, Option<Duration>)> {
        let batch = ClaimId::random();
        let mut taking = Taking {
            keeper: Arc::clone(keeper),
            ticket: Ticket::own(self.name.clone(), batch),
            ttl: self.ttl,
            maybe: true,
        };
        let mut again = false;
        let (sent, taken) = loop {
            let take = Take {
                queue: self.name.clone(),
                batch,
                again,
                count,
                ttl: self.ttl,
                attempts: self.retries.attempts,
                owner: self.owner.asking_now().to_json(),
                sleeper,
            };
            let sent = BootTime::now();
            match tries.bound("claim", keeper.store().take(take)).await {
                Ok(taken) => break (sent, taken),
                Err(error) => {
                    again |= error.outcome() == Outcome::MaybeApplied;
                    taking.maybe = again;
                    if !error.is_transient() || !tries.again_after(&error).await {
                        return Err(error.with("queue", &self.name));
                    }
                    // From here on, a drop may have to leave a claim.
                    taking.maybe = true;
                }
            }
        };
        let lease = LeaseStart {
            sent,
            ttl: self.ttl,
        };
        let messages: Vec<Result<Message>> = taken
            .messages
            .into_iter()
            .map(|delivery| Message::new(self, keeper, delivery, lease))
            .collect();
        // From here on, each message is left on its own.
        taking.maybe = false;
        let mut messages = messages.into_iter().collect::<Result<Vec<_>>>()?;
        // If the reply took longer than the lease, dropping the messages leaves them.
        messages.retain(Message::is_valid);
        Ok((messages, taken.next))
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue")
            .field("name", &self.name)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

/// A claim in flight. When it is dropped, whatever it may have claimed is left.
struct Taking {
    keeper: Arc<QueueKeeper>,
    /// Its claim id is the batch id.
    ticket: Ticket,
    ttl: Duration,
    maybe: bool,
}

impl Drop for Taking {
    fn drop(&mut self) {
        if self.maybe {
            let ticket = self.ticket.clone();
            self.keeper.leave_later(ticket, BootTime::PAST, self.ttl);
        }
    }
}

/// A consumer that waits for messages; its store forgets it when it is dropped.
struct Sleeper {
    keeper: Arc<QueueKeeper>,
    id: ClaimId,
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.keeper.store().forget(self.id);
    }
}

/// The error for an answer that no store should give.
fn unexpected_reply(operation: &'static str) -> Error {
    Error::new(ErrorKind::Internal, operation, "no answer (bug)").maybe_applied()
}
