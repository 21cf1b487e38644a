//! What a store reports about its queues, for people and for the command.

use std::time::Duration;

use crate::core::owner::Owner;

/// The number of messages of a queue in each state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueReport {
    /// The name, without the namespace.
    pub name: String,
    /// Messages that can be claimed now.
    pub ready: u64,
    /// Messages that are delayed, by their sender or after a failure.
    pub delayed: u64,
    /// Messages that a consumer has claimed.
    pub claimed: u64,
    /// Messages that wait behind another of their key.
    pub blocked: u64,
    /// Dead letters.
    pub dead: u64,
    /// How long the oldest message that is ready has waited: since it was pushed, or since the delay
    /// ended that its sender gave it.
    pub oldest: Option<Duration>,
}

impl QueueReport {
    /// A queue without messages.
    pub fn empty(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Adds messages in one state; `oldest` is for ready messages.
    pub fn add(&mut self, state: MessageState, count: u64, oldest: Duration) {
        let field = match state {
            MessageState::Ready => &mut self.ready,
            MessageState::Delayed => &mut self.delayed,
            MessageState::Claimed => &mut self.claimed,
            MessageState::Blocked => &mut self.blocked,
            MessageState::Dead => &mut self.dead,
        };
        *field += count;
        if state == MessageState::Ready && count > 0 {
            self.oldest = Some(oldest);
        }
    }

    /// The number of all messages.
    pub fn total(&self) -> u64 {
        self.ready + self.delayed + self.claimed + self.blocked + self.dead
    }
}

/// The state of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MessageState {
    /// It can be claimed.
    Ready,
    /// It is delayed, by its sender or after a failure.
    Delayed,
    /// A consumer has claimed it.
    Claimed,
    /// It waits behind another of its key.
    Blocked,
    /// It has failed for good, and waits for an operator.
    Dead,
}

impl MessageState {
    /// The stable name.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Delayed => "delayed",
            Self::Claimed => "claimed",
            Self::Blocked => "blocked",
            Self::Dead => "dead",
        }
    }

    /// The state with this stable name; `Ready` for anything else.
    pub fn of(word: &str) -> Self {
        let mut known = [Self::Delayed, Self::Claimed, Self::Blocked, Self::Dead].into_iter();
        known
            .find(|state| state.code() == word)
            .unwrap_or(Self::Ready)
    }
}

/// One message, without its body.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MessageReport {
    /// The sender's id, or `@` and its number.
    pub id: String,
    /// Its number: the order of pushes.
    pub number: u64,
    /// Its key.
    pub key: Option<String>,
    /// Its state.
    pub state: MessageState,
    /// How often it was claimed.
    pub attempts: u32,
    /// When it was pushed, in milliseconds of Unix time.
    pub pushed: u64,
    /// The time until its state changes: the rest of its delay or of its lease.
    pub changes_in: Option<Duration>,
    /// The token of the consumer that has claimed it, without the era.
    pub sequence: Option<u64>,
    /// The consumer that has claimed it.
    pub owner: Option<Owner>,
    /// The reason of its last failure.
    pub why: Option<String>,
    /// The size of its body in bytes.
    pub size: u64,
}

impl MessageReport {
    /// A report on message `number`, without details.
    pub fn new(id: Option<String>, number: u64, state: MessageState) -> Self {
        Self {
            id: super::store::id_of(id, number),
            number,
            key: None,
            state,
            attempts: 0,
            pushed: 0,
            changes_in: None,
            sequence: None,
            owner: None,
            why: None,
            size: 0,
        }
    }
}
