//! `Message`: a claimed message in the user's hands.
//!
//! As with a hold, loss is a signal on it, and told before another consumer can have it. It ends in
//! one of four ways, each of which consumes it: [`Message::done`], [`Message::fail`],
//! [`Message::bury`], [`Message::release`]. Dropped, it is as if its lease had ended: ready again,
//! and the try counts.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::retries::Retries;
use super::store::{Delivery, Receipt, Settlement, id_of};
use super::{Queue, QueueKeeper, nonsense};
use crate::core::capability::Capability;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::error::{Error, ErrorKind, Outcome, Result};
use crate::core::name::Name;
use crate::core::ticket::{LeaseStart, Ticket};
use crate::core::token::Token;
use crate::core::validity::{Loss, LossReason, Validity};
use crate::core::wait::{Backoff, Retry};

/// What is told of a failure at the most: a line for people, not a log.
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
    /// Cleared when there is nothing left to leave.
    taken: bool,
}

/// What became of a message that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failed {
    /// It is tried again.
    Again {
        /// After so long.
        after: Duration,
    },
    /// It was its last try: it is a dead letter.
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
            // Replaced below; from here on a drop leaves it.
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

    /// From here on a try counts.
    pub(super) fn hand_out(&mut self) {
        self.receipt.seen = true;
        self.ticket.native = Some(self.receipt.native());
    }

    /// The queue that it is from.
    pub fn queue(&self) -> &Name {
        &self.ticket.name
    }

    /// What it says.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// The sender's id for it, or `@` and its number. The same at every try: what an effect is
    /// keyed by that must happen once.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its key, if it has one.
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// The how-manieth try this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The fencing token of this claim: strictly greater for every later claim of the queue. Give
    /// it to the storage with every write.
    pub fn token(&self) -> Token {
        self.token
    }

    /// What names this claim to its store, for steps that end it together with an effect.
    pub fn receipt(&self) -> Receipt {
        self.receipt
    }

    /// Whether it is ours now. Costs nanoseconds. A pause can come right after the answer; what a
    /// late consumer writes is for the token to refuse.
    pub fn is_valid(&self) -> bool {
        self.validity.is_valid()
    }

    /// Until when it is ours without a further renewal; in the past when it is lost.
    pub fn deadline(&self) -> BootTime {
        self.validity.deadline()
    }

    /// How long it is ours without renewal.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Resolves when it is lost, and never otherwise.
    ///
    /// # Cancellation
    /// Can be dropped and called again; a loss is remembered.
    pub async fn lost(&self) -> Loss {
        self.validity.lost().await
    }

    /// Does `work` while the message is ours, and drops it unfinished at the moment of a loss.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when it was lost before the work was done.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let done = self.validity.run(work).await;
        done.ok_or_else(|| self.lost_error("run"))
    }

    /// Gives it a longer ttl, counted from now: for work that may keep this process from renewing.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a ttl that the engine can't keep, or below the present
    /// one; [`ErrorKind::Lost`] when it is lost; those of the engine.
    pub async fn extend(&mut self, ttl: Duration) -> Result<()> {
        let ttl = self.capability.explicit_ttl(ttl)?;
        if ttl < self.ttl {
            let message = format!("the ttl is {:?} and can only be made longer", self.ttl);
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

    /// Says that the work is done: the message is removed.
    ///
    /// # Cancellation
    /// Dropped half-way, it may be done or given back.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when another consumer has had it since: the work may have been done
    /// twice. [`ErrorKind::Unreachable`], maybe applied, when the engine did not answer while the
    /// message was ours.
    pub async fn done(self) -> Result<()> {
        self.end("done", Settlement::Done).await
    }

    /// Says that this try failed, and why. It is tried again after a while, or is a dead letter if
    /// it was the last try; see [`Queue::retries`](super::Queue::retries).
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

    /// Makes it a dead letter at once: no further try would help.
    ///
    /// # Errors
    /// As [`Message::done`].
    pub async fn bury(self, why: impl Into<String>) -> Result<()> {
        let why = shortened(why.into());
        self.end("bury", Settlement::Dead { why }).await
    }

    /// Gives it back untried: it is ready at once, and this claim does not count.
    ///
    /// # Errors
    /// As [`Message::done`].
    pub async fn release(self) -> Result<()> {
        self.end("release", Settlement::Release).await
    }

    /// Says that it was ended by a step of the user's own, as one transaction with the effect:
    /// nothing is left to do. Without this, dropping it asks the store in vain.
    pub fn settled(mut self) {
        self.taken = false;
    }

    /// The store that it is from, if it is of this kind.
    #[allow(dead_code, reason = "each engine has its own, or none")]
    pub(crate) fn store<S: Any>(&self) -> Option<&S> {
        self.keeper.store().as_any().downcast_ref()
    }

    /// Stops renewing, because a step of the user's own is about to end the claim.
    #[allow(dead_code, reason = "each engine has its own, or none")]
    pub(crate) fn part(&self) {
        self.keeper.part_with(&self.ticket);
    }

    async fn end(self, operation: &'static str, how: Settlement) -> Result<()> {
        match settle(operation, vec![self], how).await?.first() {
            None => Ok(()),
            Some(lost) => Err(lost.lost_error(operation)),
        }
    }

    pub(crate) fn lost_error(&self, operation: &'static str) -> Error {
        let why = match self.validity.loss() {
            Some(loss) => loss.to_string(),
            // Found by the clock or the store, before the keeper could tell.
            None => LossReason::Expired.to_string(),
        };
        let message = format!("the message was lost, another consumer may have it: {why}");
        Error::new(ErrorKind::Lost, operation, message)
            .with("queue", self.queue())
            .with("id", &self.id)
            .with("token", self.token)
    }
}

/// Ends messages of one queue in one way; answers with those that had been lost before.
pub(super) async fn settle(
    operation: &'static str,
    mut messages: Vec<Message>,
    how: Settlement,
) -> Result<Vec<Message>> {
    let Some(first) = messages.first() else {
        return Ok(messages);
    };
    let (keeper, queue) = (Arc::clone(&first.keeper), first.queue().clone());
    // Renewal stops first: a message that is gone is not renewed.
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
        return Err(nonsense(operation));
    }
    let mut settled = settled.into_iter();
    messages.retain_mut(|message| {
        message.taken = false;
        let ended = settled.next() == Some(true);
        // Nobody else can have had it while it was ours: an earlier copy of the request was
        // applied, and its answer was lost.
        let ours = ended || doubt && message.validity.is_valid();
        !ours
    });
    Ok(messages)
}

/// A line for people.
fn shortened(mut why: String) -> String {
    if why.len() > LONGEST_WHY {
        let end = (0..=LONGEST_WHY).rev().find(|at| why.is_char_boundary(*at));
        why.truncate(end.unwrap_or(0));
        why.push('…');
    }
    // No store need bear them.
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
    /// Without the body, which may be secret.
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
