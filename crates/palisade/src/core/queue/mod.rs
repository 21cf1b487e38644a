//! `Queue`: work for many consumers, each message in the hands of one of them at a time.
//!
//! push → (ready) → claim → (claimed: a lease, a token) → done | fail → (delayed) → … → dead letter.
//! A claim is kept alive by the keeper, as a hold is, and told when it is lost. **Delivery is at
//! least once**: whoever is paused, cut off or killed after the effect and before `done` makes it
//! happen again. It is exactly once where effect and `done` are one step (a transaction, a script),
//! or where the effect is a fenced write under the message's id.
//!
//! # One number decides who may have a message
//!
//! Each message has a time from which it may be claimed, `due`, on the store's own clock. A ready
//! one is due since it was pushed; one that is delayed, or waits for its next try, is due later; a
//! claimed one is due when its lease ends; one that must not be claimed at all (behind another of
//! its key, or a dead letter) is due never. So a claim is one step, "the first n that are due", and
//! a lease that ended needs nobody to find it. A claim takes a new token, and `done`, `fail` and a
//! renewal compare it: whoever was replaced is refused, however late and in whatever order
//! requests arrive. Every end of a claim takes the token away.
//!
//! # What can go wrong, and what then
//!
//! - *A consumer is paused past its lease.* Its message is due and goes to another with a greater
//!   token. Its keeper tells it no later than its own deadline (counted from before the claim was
//!   sent, on the clock that runs on in suspend), which is before the store's. Its late `done` and
//!   its late fenced write are refused.
//! - *The lease has ended and nobody has claimed since.* A late `done` is accepted: the token still
//!   stands, so that nobody else has had the message.
//! - *The reply of a claim is lost.* The claim carries a random batch id; asked again with it, the
//!   store answers with the same messages and a new lease. A claim that is dropped or given up is
//!   left by its batch id in the background; at the latest its lease ends.
//! - *The reply of a `done` is lost.* It is asked again. If the message is gone and our deadline
//!   has not passed, nobody else can have had it: it was our first request. Later than that it is
//!   an error that says "maybe applied".
//! - *Clocks differ.* The store's clock alone decides what is due and when a lease ends; the
//!   consumer's boot clock alone decides what it believes. Neither is compared with the other.
//! - *A message kills its consumer.* Attempts are counted by the claim and not by the failure: a
//!   message that was claimed as often as allowed becomes a dead letter at the next claim.
//! - *Order within a key.* Only the first of a key is ever due; the others are due never, until it
//!   is gone. It keeps its place while it is claimed, delayed, waits for its next try, or is a dead
//!   letter: **a failing message blocks its key** until it is done, retried or dropped by an
//!   operator. So two messages of a key are never claimed at the same time. Pushes and ends of one
//!   key go one after another in the store; other keys don't notice.
//! - *The same id again.* An id that was pushed is a duplicate while its message is in the queue,
//!   and for [`DEDUPLICATED`] after the push. Nothing is stored, and the first one's id is told.
//! - *A message that nobody may lose.* `push` returns when the store has it as durably as it can.
//!
//! A store implements [`QueueStore`] beside its engine (`engines/…/queue.rs`); the keeper knows it
//! as a [`Leasing`](super::leasing::Leasing). This file is the handle; `message` is one claim in
//! the user's hands.

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
use super::keeper::Keeper;
use super::name::Name;
use super::owner::Owner;
use super::ticket::{LeaseStart, Ticket};
use super::token::Era;
use super::wait::{Backoff, Patience, Retry, recheck_at};

/// How long an id is remembered after it was pushed, at least: longer than a sender goes on trying
/// by itself, short enough that ids don't pile up.
pub const DEDUPLICATED: Duration = Duration::from_secs(24 * 3600);

/// The longest message. What is larger belongs elsewhere, and its place into the message.
pub const MAX_BODY: usize = 16 * 1024 * 1024;

/// The most messages of one claim, and of one push.
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
    /// The first thing that was wrong with what was asked for; told when it is used.
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

    /// Sets how long a claimed message is kept from others without renewal: after so long the
    /// message of a consumer that hangs or is cut off goes to another. The keeper renews it, so
    /// that it is no limit on the work.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        match self.capability.explicit_ttl(ttl) {
            Ok(ttl) => self.ttl = ttl,
            Err(error) => self.refuse(error),
        }
        self
    }

    /// Sets how often a message is tried and how long it waits in between.
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

    /// Adds a message. It returns when the store has it as durably as it can.
    ///
    /// # Errors
    /// Before any I/O: [`ErrorKind::InvalidName`] for a name, a key or an id that can't be,
    /// [`ErrorKind::InvalidArgument`] for a body above [`MAX_BODY`],
    /// [`ErrorKind::Unsupported`] on an engine without queues. Then those of the engine: after
    /// one that says "maybe applied", a message with an [id](Draft::id) can be pushed again.
    pub async fn push(&self, draft: impl Into<Draft>) -> Result<Pushed> {
        let mut pushed = self.push_all([draft.into()]).await?;
        pushed.pop().ok_or_else(|| nonsense("push"))
    }

    /// Adds messages, in this order: all of them or none.
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
                let message = format!("a push is for {MAX_BATCH} messages at most, not {more}");
                return Err(Error::new(ErrorKind::InvalidArgument, "push", message));
            }
        }
        store.push(self.name.clone(), drafts).await
    }

    /// Claims up to `count` messages that are ready now; none is no error.
    ///
    /// # Cancellation
    /// Dropped at any await it leaves no message claimed: at once if the engine answers, by the
    /// ttl if it doesn't.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn claim(&self, count: usize) -> Result<Vec<Message>> {
        let mut messages = self.take(count, Patience::NoWait).await?;
        messages.iter_mut().for_each(Message::hand_out);
        Ok(messages)
    }

    /// Waits for a message. An engine that can't be reached is waited for, too.
    ///
    /// # Cancellation
    /// As [`Queue::claim`].
    ///
    /// # Errors
    /// Those of [`Queue::push`], but for an engine that can't be reached.
    pub async fn next(&self) -> Result<Message> {
        let message = self.next_within(Patience::Forever).await?;
        message.ok_or_else(|| nonsense("claim"))
    }

    /// The same while patience lasts; `None` when it ended first.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn next_within(&self, patience: Patience) -> Result<Option<Message>> {
        let mut messages = self.take(1, patience).await?;
        messages.iter_mut().for_each(Message::hand_out);
        Ok(messages.pop())
    }

    /// The messages as they come, claimed up to `ahead` at a time. Those that were claimed and not
    /// handed out when the stream is dropped go back at once, and have not been tried.
    ///
    /// It ends after an error; an engine that can't be reached is waited for.
    pub fn messages(&self, ahead: usize) -> impl Stream<Item = Result<Message>> + Send + 'static {
        let start = Some((self.clone(), VecDeque::new()));
        stream::unfold(start, move |state| async move {
            let (queue, mut claimed): (Self, VecDeque<Message>) = state?;
            loop {
                if let Some(mut message) = claimed.pop_front() {
                    // It may have waited here past its lease.
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

    /// Settles several messages with one request: their work is done. Answers with the ids of those
    /// that had been lost before, to others.
    ///
    /// # Errors
    /// As [`Message::done`].
    pub async fn done_all(&self, messages: Vec<Message>) -> Result<Vec<String>> {
        if messages.iter().any(|message| message.queue() != &self.name) {
            let message = "the messages are of another queue";
            return Err(Error::new(ErrorKind::InvalidArgument, "done", message));
        }
        let lost = message::settle("done", messages, Settlement::Done).await?;
        Ok(lost.iter().map(|lost| lost.id().to_owned()).collect())
    }

    /// How many messages are in which state; `None` when there is no such queue.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn report(&self) -> Result<Option<QueueReport>> {
        let scope = super::report::Scope::Line(self.name.clone());
        Ok(self.store()?.survey(scope).await?.pop())
    }

    /// The messages, the first ones first, without their bodies; only dead letters if `dead`.
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

    /// Makes dead letters, or one message that is delayed or waits for its next try, ready now, as
    /// if they had not been tried. Answers how many.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn retry(&self, pick: Pick) -> Result<u64> {
        self.store()?.retry(self.name.clone(), pick).await
    }

    /// Removes messages unhandled. Those in the hands of a consumer are left alone unless `force`:
    /// it is told at its next renewal, and the next of the key may be handled meanwhile. Answers
    /// how many.
    ///
    /// # Errors
    /// Those of [`Queue::push`].
    pub async fn drop_messages(&self, pick: Pick, force: bool) -> Result<u64> {
        self.store()?.discard(self.name.clone(), pick, force).await
    }

    /// The store that it is in, if it is of this kind.
    #[allow(dead_code, reason = "each engine has its own, or none")]
    pub(crate) fn store_as<S: Any>(&self) -> Result<Option<&S>> {
        Ok(self.store()?.as_any().downcast_ref())
    }

    /// Claims what is ready, and waits for it as patience allows.
    async fn take(&self, count: usize, patience: Patience) -> Result<Vec<Message>> {
        if count == 0 || count > MAX_BATCH {
            let message = format!("a claim is for 1 to {MAX_BATCH} messages, not {count}");
            return Err(Error::new(ErrorKind::InvalidArgument, "claim", message));
        }
        let keeper = self.keeper()?;
        keeper.start()?;
        let deadline = patience.deadline();
        let sleeper = (patience != Patience::NoWait).then(|| Sleeper {
            keeper: Arc::clone(keeper),
            id: ClaimId::random(),
        });
        let mut backoff = Backoff::new(Retry::default());
        loop {
            let asleep = sleeper.as_ref().map(|sleeper| sleeper.id);
            let taking = self.take_once(keeper, count, asleep, patience, deadline, &mut backoff);
            let (messages, next) = taking.await?;
            if !messages.is_empty() {
                return Ok(messages);
            }
            if next == Some(Duration::ZERO) {
                // Only dead letters were found.
                continue;
            }
            let Some(sleeper) = sleeper.as_ref().filter(|_| !deadline.has_passed()) else {
                return Ok(messages);
            };
            let mut until = recheck_at(deadline);
            if let Some(next) = next {
                until = until.min(BootTime::now() + next);
            }
            let slept = keeper.store().sleep(sleeper.id, until);
            match patience.bound(deadline, "claim", slept).await {
                Ok(()) => backoff = Backoff::new(Retry::default()),
                Err(error) if error.is_transient() && backoff.sleep(deadline).await => {}
                Err(error) => return Err(error.with("queue", &self.name)),
            }
        }
    }

    /// One claim, asked again with the same batch id while nobody answers.
    async fn take_once(
        &self,
        keeper: &Arc<QueueKeeper>,
        count: usize,
        sleeper: Option<ClaimId>,
        patience: Patience,
        deadline: BootTime,
        backoff: &mut Backoff,
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
            match patience
                .bound(deadline, "claim", keeper.store().take(take))
                .await
            {
                Ok(taken) => break (sent, taken),
                Err(error) => {
                    again |= error.outcome() == Outcome::MaybeApplied;
                    taking.maybe = again;
                    if !error.is_transient() || !backoff.sleep(deadline).await {
                        return Err(error.with("queue", &self.name));
                    }
                    // From here on a drop may leave something.
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
        // From here on each message is left by itself.
        taking.maybe = false;
        let mut messages = messages.into_iter().collect::<Result<Vec<_>>>()?;
        // A reply that took longer than the lease: dropped, they are left.
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

/// A claim under way; what it may have claimed is left when it is dropped.
struct Taking {
    keeper: Arc<QueueKeeper>,
    /// Named by the batch.
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

/// Somebody who waits for messages; forgotten when it is dropped.
struct Sleeper {
    keeper: Arc<QueueKeeper>,
    id: ClaimId,
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.keeper.store().forget(self.id);
    }
}

/// An answer that no store gives.
fn nonsense(operation: &'static str) -> Error {
    Error::new(ErrorKind::Internal, operation, "no answer (bug)").maybe_applied()
}
