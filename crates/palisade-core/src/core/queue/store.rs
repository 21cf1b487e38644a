//! `QueueStore`: what palisade requires of an engine that has queues.
//!
//! Every method is one atomic step of the store. The store's clock alone decides what is due and
//! which leases have ended; the documentation of [`super`] lists the failures that each must
//! tolerate.

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
/// Its tickets ([`Leasing`]) are claimed messages, identified by a [`Receipt`]. A ticket without
/// one stands for everything that was claimed under a batch id; the keeper leaves it when a claim
/// was given up.
/// - A message that is left is ready at once; the attempt counts, unless nobody saw the message.
/// - A batch that is left before its claim arrived is remembered if that claim can still arrive.
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

    /// Sleeps until there may be a message for a sleeper of [`QueueStore::take`], at most until
    /// `until`.
    fn sleep(&self, sleeper: ClaimId, until: BootTime) -> BoxFuture<'_, Result<()>>;

    /// Forgets a sleeper. Best effort.
    fn forget(&self, sleeper: ClaimId);

    /// Ends claims in one way, and returns for each whether it was still valid. The next message of
    /// a key becomes due when the first is gone.
    fn settle(
        &self,
        queue: Name,
        receipts: Vec<Receipt>,
        how: Settlement,
    ) -> BoxFuture<'_, Result<Vec<bool>>>;

    /// Sets another ttl for a claim from now on; `false` if the claim has ended.
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

    /// Makes messages ready that are neither claimed nor behind another, with no attempts counted.
    fn retry(&self, queue: Name, pick: Pick) -> BoxFuture<'_, Result<u64>>;

    /// Removes messages and forgets their ids; claimed ones only by force.
    fn discard(&self, queue: Name, pick: Pick, force: bool) -> BoxFuture<'_, Result<u64>>;

    /// The store itself, for the engine's own steps that end a claim together with an effect.
    fn as_any(&self) -> &dyn Any;
}

/// A message to push.
///
/// ```
/// use palisade::queue::Draft;
/// let draft = Draft::new("charge 9.90").key("customer-17").id("order-4711");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Draft {
    /// The content.
    pub body: Vec<u8>,
    /// Messages of the same key are handled one at a time, in the order of their pushes.
    pub key: Option<String>,
    /// The sender's own id: a message that is pushed twice is stored once.
    pub id: Option<String>,
    /// How long it is delayed.
    pub delay: Duration,
}

impl Draft {
    /// A message with this content.
    pub fn new(body: impl Into<Vec<u8>>) -> Self {
        Self {
            body: body.into(),
            ..Self::default()
        }
    }

    /// Sets its key. Messages of the same key are handled strictly one after another, and one that
    /// fails blocks those behind it.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Sets its id, so that pushing it again stores nothing; see
    /// [`DEDUPLICATED`](super::DEDUPLICATED). An id must not start with `@`.
    #[must_use]
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Delays it. A message with a key also delays those behind it.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Whether a queue takes it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) with what is wrong.
    pub fn check(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::new(ErrorKind::InvalidArgument, "push", message));
        if self.body.len() > MAX_BODY {
            return refuse(format!(
                "a message has at most {MAX_BODY} bytes, this one has {}; store it elsewhere and \
                 push a reference",
                self.body.len()
            ));
        }
        if self.delay > LONGEST_DELAY {
            return refuse("the delay must be at most ten years".to_owned());
        }
        for text in [&self.key, &self.id].into_iter().flatten() {
            Name::new(text)?;
        }
        if self.id.as_ref().is_some_and(|id| id.starts_with('@')) {
            return refuse("ids that begin with @ are reserved".to_owned());
        }
        Ok(())
    }
}

/// Keeps the stores' times far from overflow.
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

/// The result of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pushed {
    /// The message's id: the sender's, or `@` and its number.
    pub id: String,
    /// Whether the id was known already, so that nothing was stored.
    pub duplicate: bool,
}

impl Pushed {
    /// The result for a draft that is message `number`.
    pub fn new(id: Option<String>, number: u64, duplicate: bool) -> Self {
        Self {
            id: id_of(id, number),
            duplicate,
        }
    }
}

/// A message's id for people: the sender's, or one made from its number.
pub(super) fn id_of(id: Option<String>, number: u64) -> String {
    id.unwrap_or_else(|| format!("@{number}"))
}

/// The parameters of a claim.
#[derive(Debug, Clone)]
pub struct Take {
    /// The queue.
    pub queue: Name,
    /// The id of this claim.
    pub batch: ClaimId,
    /// Whether an earlier copy of it may have been applied.
    pub again: bool,
    /// The largest number of messages to claim.
    pub count: usize,
    /// How long they are claimed without renewal.
    pub ttl: Duration,
    /// How often a message may be claimed.
    pub attempts: u32,
    /// The consumer's owner record as JSON, for people.
    pub owner: String,
    /// The sleeper to wake later if there is no message.
    pub sleeper: Option<ClaimId>,
}

/// The result of a claim.
#[derive(Debug, Clone, Default)]
pub struct Taken {
    /// The messages.
    pub messages: Vec<Delivery>,
    /// The time until there may be a message, if known; zero means now.
    pub next: Option<Duration>,
}

/// A claimed message, as the store returns it.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// Its number: greater than that of every message pushed before it.
    pub number: u64,
    /// The sender's id.
    pub id: Option<String>,
    /// Its key.
    pub key: Option<String>,
    /// The sequence of this claim: the token without the era.
    pub sequence: u64,
    /// How often it was claimed, including this claim.
    pub attempt: u32,
    /// The content.
    pub body: Vec<u8>,
}

/// Identifies a claim of a message to its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt {
    /// The message.
    pub number: u64,
    /// The sequence of the claim.
    pub sequence: u64,
    /// Whether it has a key.
    pub keyed: bool,
    /// Whether the user has seen it.
    pub seen: bool,
}

impl Receipt {
    /// The receipt in a ticket; `None` for a ticket that stands for a batch.
    pub fn of(ticket: &Ticket) -> Option<Self> {
        let mut words = ticket.native.as_deref()?.split(' ');
        Some(Self {
            number: u64::from_str(words.next()?).ok()?,
            sequence: ticket.sequence,
            keyed: words.next()? == "key",
            seen: words.next()? == "seen",
        })
    }

    /// The text form that a ticket carries.
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
    /// It is tried again.
    Retry {
        /// The delay before that.
        after: Duration,
        /// The reason of the failure, for people.
        why: String,
    },
    /// It becomes a dead letter.
    Dead {
        /// The reason of the failure, for people.
        why: String,
    },
    /// Nobody has tried it: it is ready again, and the claim does not count.
    Release,
}

/// The messages that an operator selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pick {
    /// The message with this id.
    Id(String),
    /// All dead letters.
    Dead,
    /// All messages.
    All,
}

impl Pick {
    /// The number in an id that palisade assigned.
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
