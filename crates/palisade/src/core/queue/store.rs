//! `QueueStore`: what palisade asks of an engine that has queues, and what it answers.
//!
//! Every verb is one atomic step of the store. What is due, what has ended and what is free is
//! decided by the store's clock alone; see the text of [`super`] for what each must bear.

use std::any::Any;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::MAX_BODY;
use super::report::{MessageReport, QueueReport};
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::leasing::Leasing;
use crate::core::name::Name;
use crate::core::report::Scope;
use crate::core::ticket::Ticket;

/// One message with its body.
pub type FullReport = (MessageReport, Vec<u8>);

/// A store that all handles of a client share.
pub type SharedQueueStore = Arc<dyn QueueStore>;

/// A store of queues.
///
/// Its tickets ([`Leasing`]) are claimed messages, named by a [`Receipt`], or, without one, all
/// that was claimed under a batch id, which the keeper leaves when a claim was given up.
/// - A message that is left is ready at once; the try counts, unless nobody saw it.
/// - A batch that is left before it came is remembered where it can still come.
pub trait QueueStore: Leasing {
    /// Adds messages in this order, all or none, durably.
    ///
    /// # Behavior
    /// - An id that is in the queue, or was pushed within
    ///   [`DEDUPLICATED`](super::DEDUPLICATED), is a duplicate.
    /// - A message behind another of its key is not due until that one is gone.
    /// - A consumer that sleeps is woken for each message that is due.
    fn push(&self, queue: Name, drafts: Vec<Draft>) -> BoxFuture<'_, Result<Vec<Pushed>>>;

    /// Claims the first messages that are due.
    ///
    /// # Behavior
    /// - Each gets a token greater than that of any claim before in the queue.
    /// - A message that was claimed as often as allowed becomes a dead letter instead.
    /// - `again` answers with what the same batch has claimed before, on a new lease, and then
    ///   with nothing else.
    /// - With nothing to claim and a sleeper, that one is woken by the next push.
    fn take(&self, take: Take) -> BoxFuture<'_, Result<Taken>>;

    /// Sleeps until something may be there for a sleeper of [`QueueStore::take`], `until` at the
    /// longest.
    fn sleep(&self, sleeper: ClaimId, until: BootTime) -> BoxFuture<'_, Result<()>>;

    /// Forgets a sleeper. Best effort.
    fn forget(&self, sleeper: ClaimId);

    /// Ends claims in one way, and says for each whether it was still in force. The next of a key
    /// becomes due if its first is gone.
    fn settle(
        &self,
        queue: Name,
        receipts: Vec<Receipt>,
        how: Settlement,
    ) -> BoxFuture<'_, Result<Vec<bool>>>;

    /// Gives a claim another ttl from now on; `false` when it is over.
    fn extend(&self, ticket: Ticket, ttl: Duration) -> BoxFuture<'_, Result<bool>>;

    /// The queues that were ever pushed to, sorted by name.
    fn survey(&self, scope: Scope) -> BoxFuture<'_, Result<Vec<QueueReport>>>;

    /// The first messages of a queue, in the order of their pushes.
    fn list(
        &self,
        queue: Name,
        dead: bool,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<MessageReport>>>;

    /// One message by its id.
    fn read(&self, queue: Name, id: String) -> BoxFuture<'_, Result<Option<FullReport>>>;

    /// Makes messages that are not claimed and not behind another ready, with no tries counted.
    fn retry(&self, queue: Name, pick: Pick) -> BoxFuture<'_, Result<u64>>;

    /// Removes messages and forgets their ids; claimed ones only by force.
    fn discard(&self, queue: Name, pick: Pick, force: bool) -> BoxFuture<'_, Result<u64>>;

    /// The store itself, for steps of the engine's own that end a claim together with an effect.
    fn as_any(&self) -> &dyn Any;
}

/// A message to be pushed.
///
/// ```
/// use palisade::queue::Draft;
/// let draft = Draft::new("charge 9.90").key("customer-17").id("order-4711");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Draft {
    /// What it says.
    pub body: Vec<u8>,
    /// Messages of the same key are handled one at a time, in the order of their pushes.
    pub key: Option<String>,
    /// The sender's own name for it: pushed twice, it is stored once.
    pub id: Option<String>,
    /// How long it is kept back.
    pub delay: Duration,
}

impl Draft {
    /// A message that says this.
    pub fn new(body: impl Into<Vec<u8>>) -> Self {
        Self {
            body: body.into(),
            ..Self::default()
        }
    }

    /// Orders it among the messages of the same key: they are handled strictly one after another,
    /// and one that fails blocks those behind it.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Names it, so that pushing it again stores it once; see
    /// [`DEDUPLICATED`](super::DEDUPLICATED). An id does not begin with `@`.
    #[must_use]
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Keeps it back for so long. One with a key keeps those behind it back, too.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::new(ErrorKind::InvalidArgument, "push", message));
        if self.body.len() > MAX_BODY {
            return refuse(format!(
                "a message has at most {MAX_BODY} bytes, this one has {}; store it elsewhere and \
                 push where it is",
                self.body.len()
            ));
        }
        if self.delay > LONGEST_DELAY {
            return refuse("a delay is ten years at the longest".to_owned());
        }
        for text in [&self.key, &self.id].into_iter().flatten() {
            Name::new(text)?;
        }
        if self.id.as_ref().is_some_and(|id| id.starts_with('@')) {
            return refuse("ids that begin with @ are those that palisade gives".to_owned());
        }
        Ok(())
    }
}

/// Times of stores stay far from their bounds.
const LONGEST_DELAY: Duration = Duration::from_secs(10 * 366 * 24 * 3600);

impl From<&str> for Draft {
    fn from(body: &str) -> Self {
        Self::new(body)
    }
}

impl From<String> for Draft {
    fn from(body: String) -> Self {
        Self::new(body)
    }
}

impl From<&[u8]> for Draft {
    fn from(body: &[u8]) -> Self {
        Self::new(body)
    }
}

impl From<Vec<u8>> for Draft {
    fn from(body: Vec<u8>) -> Self {
        Self::new(body)
    }
}

/// What became of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pushed {
    /// The message's id: the sender's, or `@` and its number.
    pub id: String,
    /// Whether it was there before, so that nothing was stored.
    pub duplicate: bool,
}

impl Pushed {
    /// What a store answers for a draft that is message `number`.
    pub fn new(id: Option<String>, number: u64, duplicate: bool) -> Self {
        Self {
            id: id_of(id, number),
            duplicate,
        }
    }
}

/// What people call a message: the sender's id, or its number.
pub(super) fn id_of(id: Option<String>, number: u64) -> String {
    id.unwrap_or_else(|| format!("@{number}"))
}

/// What a claim asks for.
#[derive(Debug, Clone)]
pub struct Take {
    /// The queue.
    pub queue: Name,
    /// Names this claim.
    pub batch: ClaimId,
    /// Whether an earlier copy of it may have been applied.
    pub again: bool,
    /// How many messages at the most.
    pub count: usize,
    /// How long they are kept without renewal.
    pub ttl: Duration,
    /// How often a message may be claimed.
    pub attempts: u32,
    /// Who claims, for people: JSON.
    pub owner: String,
    /// Who sleeps if there is nothing.
    pub sleeper: Option<ClaimId>,
}

/// What a claim got.
#[derive(Debug, Clone, Default)]
pub struct Taken {
    /// The messages.
    pub messages: Vec<Delivery>,
    /// When something may be there next, as far as it is known: zero is now.
    pub next: Option<Duration>,
}

/// A claimed message, as the store has it.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// Its number: greater than those of all before it in the store.
    pub number: u64,
    /// The sender's name for it.
    pub id: Option<String>,
    /// Its key.
    pub key: Option<String>,
    /// What the store counted for this claim: the token before the era is added.
    pub sequence: u64,
    /// The how-manieth claim of it this is.
    pub attempt: u32,
    /// What it says.
    pub body: Vec<u8>,
}

/// What names a claim of a message to its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt {
    /// The message.
    pub number: u64,
    /// What was counted for the claim.
    pub sequence: u64,
    /// Whether it has a key.
    pub keyed: bool,
    /// Whether somebody has had it in hand.
    pub seen: bool,
}

impl Receipt {
    /// The receipt that a ticket carries; `None` for one that stands for a batch.
    pub fn of(ticket: &Ticket) -> Option<Self> {
        let mut words = ticket.native.as_deref()?.split(' ');
        Some(Self {
            number: u64::from_str(words.next()?).ok()?,
            sequence: ticket.sequence,
            keyed: words.next()? == "key",
            seen: words.next()? == "seen",
        })
    }

    /// As a ticket carries it.
    pub(super) fn native(&self) -> Arc<str> {
        let keyed = if self.keyed { "key" } else { "-" };
        let seen = if self.seen { "seen" } else { "-" };
        format!("{} {keyed} {seen}", self.number).into()
    }
}

/// How a claim ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settlement {
    /// The work is done: the message is removed.
    Done,
    /// It is to be tried again.
    Retry {
        /// After so long.
        after: Duration,
        /// What went wrong, for people.
        why: String,
    },
    /// It is a dead letter.
    Dead {
        /// What went wrong, for people.
        why: String,
    },
    /// Nobody has tried it: it is ready again, and the claim does not count.
    Release,
}

/// Which messages an operator means.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pick {
    /// The one with this id.
    Id(String),
    /// All dead letters.
    Dead,
    /// All of them.
    All,
}

impl Pick {
    /// The number that an id which palisade gave stands for.
    pub fn number(id: &str) -> Option<u64> {
        id.strip_prefix('@')?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_carries_its_receipt() {
        let ticket = Ticket::own(Name::new("q").unwrap(), ClaimId::random());
        assert_eq!(Receipt::of(&ticket), None, "a batch");
        for (keyed, seen) in [(true, true), (false, true), (true, false)] {
            let receipt = Receipt {
                number: 17,
                sequence: 9,
                keyed,
                seen,
            };
            let ticket = Ticket {
                native: Some(receipt.native()),
                sequence: 9,
                ..ticket.clone()
            };
            assert_eq!(Receipt::of(&ticket), Some(receipt));
        }
    }

    #[test]
    fn drafts_that_no_store_could_keep_are_refused() {
        let kind = |draft: Draft| draft.check().unwrap_err().kind();
        assert_eq!(kind(Draft::new("").key("")), ErrorKind::InvalidName);
        assert_eq!(kind(Draft::new("").id("a\nb")), ErrorKind::InvalidName);
        assert_eq!(kind(Draft::new("").id("@1")), ErrorKind::InvalidArgument);
        let large = vec![0; MAX_BODY + 1];
        assert_eq!(kind(Draft::new(large)), ErrorKind::InvalidArgument);
        let late = Draft::new("").delay(Duration::MAX);
        assert_eq!(kind(late), ErrorKind::InvalidArgument);
        assert!(Draft::new("").key("é").id("a@b").check().is_ok());
    }
}
