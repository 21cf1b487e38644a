//! `Message`: a claimed message, owned by the user.
//!
//! As with a hold, loss is a signal on it, reported before another consumer can have the message. A
//! message ends in one of four ways, each of which consumes it: [`Message::done`],
//! [`Message::fail`], [`Message::bury`], [`Message::release`]. Dropping it has the same effect as
//! the end of its lease: the message is ready again, and the attempt counts.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::retries::Retries;
use super::store::{Delivery, Receipt, Settlement, id_of};
use super::{Queue, QueueKeeper, unexpected_reply};
use crate::core::capability::Capability;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::duration::rounded;
use crate::core::error::{Error, ErrorKind, Outcome, Result};
use crate::core::name::Name;
use crate::core::ticket::{LeaseStart, Ticket};
use crate::core::token::Token;
use crate::core::validity::{Loss, LossReason, Validity};
use crate::core::wait::{Backoff, Retry};

/// The longest reason of a failure that is stored: a line for people, not a log.
const LONGEST_WHY: usize = 2000;

/// A claimed message: no other consumer has it while this lives and [`Message::is_valid`].
#[must_use = "dropping the message gives it back"]
pub struct Message {
    keeper: Arc<QueueKeeper>,
    ticket: Ticket,
    receipt: Receipt,
    token: Token,
    validity: Arc<Validity>,
    ttl: Duration,
    capability: Capability,
    retries: Retries,
    id: String,
    key: Option<String>,
    attempt: u32,
    body: Vec<u8>,
    /// Cleared when no claim needs to be left.
    taken: bool,
}

/// The fate of a message that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failed {
    /// It is tried again.
    Again {
        /// The delay before the next attempt.
        after: Duration,
    },
    /// This was the last attempt: it is a dead letter.
    Dead,
}

impl Message {
    pub(super) fn new(
        queue: &Queue,
        keeper: &Arc<QueueKeeper>,
        delivery: Delivery,
        lease: LeaseStart,
    ) -> Result<Self> {
        let receipt = Receipt {
            number: delivery.number,
            sequence: delivery.sequence,
            keyed: delivery.key.is_some(),
            seen: false,
        };
        let ticket = Ticket {
            sequence: delivery.sequence,
            native: Some(receipt.native()),
            ..Ticket::own(queue.name.clone(), ClaimId::random())
        };
        let validity = keeper.watch_over(&ticket, lease);
        validity.grant();
        let message = Self {
            keeper: Arc::clone(keeper),
            ticket,
            receipt,
            // Replaced below; from here on, dropping the message leaves it.
            token: Token(0),
            validity,
            ttl: queue.ttl,
            capability: queue.capability,
            retries: queue.retries,
            id: id_of(delivery.id, delivery.number),
            key: delivery.key,
            attempt: delivery.attempt,
            body: delivery.body,
            taken: true,
        };
        let token = queue.era.stamp(delivery.sequence)?;
        Ok(Self::with_token(message, token))
    }

    fn with_token(mut self, token: Token) -> Self {
        self.token = token;
        self
    }

    /// Marks it as seen by the user: from here on the attempt counts.
    pub(super) fn hand_out(&mut self) {
        self.receipt.seen = true;
        self.ticket.native = Some(self.receipt.native());
    }

    /// The queue that it comes from.
    pub fn queue(&self) -> &Name {
        &self.ticket.name
    }

    /// The content.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// The sender's id, or `@` and its number. It is the same at every attempt, so it can serve as
    /// an idempotency key.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its key, if it has one.
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// The number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The fencing token of this claim: strictly greater for every later claim of the queue. Pass
    /// it to the store with every write.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Identifies this claim to its store, for steps that end it together with an effect.
    pub fn receipt(&self) -> Receipt {
        self.receipt
    }

    /// Whether the claim is valid now. Costs nanoseconds. The process can be paused right after the
    /// answer; then only a fenced store refuses its late writes.
    pub fn is_valid(&self) -> bool {
        self.validity.is_valid()
    }

    /// The end of the claim's validity without a further renewal; in the past once it is lost.
    pub fn deadline(&self) -> BootTime {
        self.validity.deadline()
    }

    /// How long the claim lasts without renewal.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Resolves when it is lost, and never otherwise.
    ///
    /// # Cancellation
    /// Can be dropped and called again; a loss is not forgotten.
    pub async fn lost(&self) -> Loss {
        self.keeper.lost(&self.validity).await
    }

    /// Runs `work` while the claim is valid, and drops it unfinished when the claim is lost.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when the claim was lost before the work completed.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let done = self.keeper.run(&self.validity, work).await;
        done.ok_or_else(|| self.lost_error("run"))
    }

    /// Extends the ttl, counted from now: for work that may prevent this process from renewing.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a ttl outside the engine's range, or shorter than the
    /// current one; [`ErrorKind::Lost`] when the claim is lost; those of the engine.
    pub async fn extend(&mut self, ttl: Duration) -> Result<()> {
        let ttl = self.capability.explicit_ttl(ttl)?;
        if ttl < self.ttl {
            let message = format!("the ttl is {} and can only be extended", rounded(self.ttl));
            return Err(Error::new(ErrorKind::InvalidArgument, "extend", message));
        }
        let sent = BootTime::now();
        let store = self.keeper.store();
        let extended = store.extend(self.ticket.clone(), ttl).await?;
        let lease = LeaseStart { sent, ttl };
        if extended && self.keeper.extended(&self.ticket, lease) {
            self.ttl = ttl;
            return Ok(());
        }
        Err(self.lost_error("extend"))
    }

    /// Reports that the work is done: the message is removed.
    ///
    /// # Cancellation
    /// If it is dropped, the message may be done or ready again.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when another consumer has claimed it since: the work may have been done
    /// twice. [`ErrorKind::Unreachable`], maybe applied, when the engine did not answer while the
    /// claim was valid.
    pub async fn done(self) -> Result<()> {
        self.end("done", Settlement::Done).await
    }

    /// Reports that this attempt failed, and why. The message is tried again after a delay, or
    /// becomes a dead letter if this was the last attempt; see
    /// [`Queue::retries`](super::Queue::retries).
    ///
    /// # Errors
    /// As [`Message::done`].
    pub async fn fail(self, why: impl Into<String>) -> Result<Failed> {
        let why = shortened(why.into());
        let (failed, how) = match self.retries.after(self.attempt) {
            Some(after) => (Failed::Again { after }, Settlement::Retry { after, why }),
            None => (Failed::Dead, Settlement::Dead { why }),
        };
        self.end("fail", how).await?;
        Ok(failed)
    }

    /// Makes it a dead letter at once, because no further attempt would help.
    ///
    /// # Errors
    /// As [`Message::done`].
    pub async fn bury(self, why: impl Into<String>) -> Result<()> {
        let why = shortened(why.into());
        self.end("bury", Settlement::Dead { why }).await
    }

    /// Returns it untried: it is ready at once, and this claim does not count as an attempt.
    ///
    /// # Errors
    /// As [`Message::done`].
    pub async fn release(self) -> Result<()> {
        self.end("release", Settlement::Release).await
    }

    /// Reports that the user's own step, one transaction with the effect, has ended the claim.
    /// Without this call, dropping the message sends a needless request to the store.
    pub fn settled(mut self) {
        self.taken = false;
    }

    /// The store of the message, if it has this type.
    #[allow(dead_code, reason = "each engine has its own, or none")]
    pub fn store<S: Any>(&self) -> Option<&S> {
        self.keeper.store().as_any().downcast_ref()
    }

    /// Stops renewing, because the user's own step is about to end the claim.
    #[allow(dead_code, reason = "each engine has its own, or none")]
    pub fn part(&self) {
        self.keeper.part_with(&self.ticket);
    }

    async fn end(self, operation: &'static str, how: Settlement) -> Result<()> {
        match settle(operation, vec![self], how).await?.first() {
            None => Ok(()),
            Some(lost) => Err(lost.lost_error(operation)),
        }
    }

    /// The error of an operation on a message that was lost, with the reason.
    #[doc(hidden)]
    pub fn lost_error(&self, operation: &'static str) -> Error {
        let why = match self.validity.loss() {
            Some(loss) => loss.to_string(),
            // Noticed by the clock or the store, before the keeper reported it.
            None => LossReason::Expired.to_string(),
        };
        let message = format!("the message was lost, another consumer may have it: {why}");
        Error::new(ErrorKind::Lost, operation, message)
            .with("queue", self.queue())
            .with("id", &self.id)
            .with("token", self.token)
    }
}

/// Ends messages of one queue in the same way. Returns those that had been lost before.
pub(super) async fn settle(
    operation: &'static str,
    mut messages: Vec<Message>,
    how: Settlement,
) -> Result<Vec<Message>> {
    let Some(first) = messages.first() else {
        return Ok(messages);
    };
    let (keeper, queue) = (Arc::clone(&first.keeper), first.queue().clone());
    // Stop renewing first: a settled message must not be renewed.
    for message in &messages {
        message.keeper.part_with(&message.ticket);
    }
    let valid = messages.iter().filter(|message| message.is_valid());
    let deadline = valid.map(Message::deadline).min();
    let mut backoff = Backoff::new(Retry::default());
    let mut doubt = false;
    let settled = loop {
        let receipts = messages.iter().map(Message::receipt).collect();
        let asked = keeper.store().settle(queue.clone(), receipts, how.clone());
        match asked.await {
            Ok(settled) => break settled,
            Err(error) => {
                doubt |= error.outcome() == Outcome::MaybeApplied;
                let deadline = deadline.unwrap_or(BootTime::PAST);
                if !error.is_transient() || !backoff.sleep(deadline).await {
                    let error = error.with("queue", &queue);
                    return Err(if doubt { error.maybe_applied() } else { error });
                }
            }
        }
    };
    if settled.len() != messages.len() {
        return Err(unexpected_reply(operation));
    }
    let mut settled = settled.into_iter();
    messages.retain_mut(|message| {
        message.taken = false;
        let ended = settled.next() == Some(true);
        // While the claim was valid nobody else can have had the message. So an earlier copy of the
        // request was applied, and its answer was lost.
        let ours = ended || doubt && message.validity.is_valid();
        !ours
    });
    Ok(messages)
}

/// Limits the reason to one short text.
fn shortened(mut why: String) -> String {
    if why.len() > LONGEST_WHY {
        let end = (0..=LONGEST_WHY).rev().find(|at| why.is_char_boundary(*at));
        why.truncate(end.unwrap_or(0));
        why.push('…');
    }
    // Not every store can keep NUL.
    why.replace('\0', "\u{fffd}")
}

impl Drop for Message {
    fn drop(&mut self) {
        if self.taken {
            let ticket = self.ticket.clone();
            self.keeper.leave_later(ticket, BootTime::PAST, self.ttl);
        } else {
            self.keeper.forget(&self.ticket);
        }
    }
}

impl fmt::Debug for Message {
    /// Omits the body, which may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("queue", self.queue())
            .field("id", &self.id)
            .field("attempt", &self.attempt)
            .field("token", &self.token.0)
            .field("valid", &self.is_valid())
            .finish_non_exhaustive()
    }
}
