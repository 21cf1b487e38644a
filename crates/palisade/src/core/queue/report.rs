//! What a store shows of its queues, for people and for the command.

use std::time::Duration;

use crate::core::owner::Owner;

/// How many messages of a queue are in which state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueReport {
    /// The name, without the namespace.
    pub name: String,
    /// Those that can be claimed now.
    pub ready: u64,
    /// Those that are kept back, by their sender or after a failure.
    pub delayed: u64,
    /// Those that a consumer has.
    pub claimed: u64,
    /// Those that wait behind another of their key.
    pub blocked: u64,
    /// Dead letters.
    pub dead: u64,
    /// How long the oldest ready one has been so.
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

    /// Counts messages in one state; `oldest` is for those that are ready.
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

    /// All of them.
    pub fn total(&self) -> u64 {
        self.ready + self.delayed + self.claimed + self.blocked + self.dead
    }
}

/// Where a message stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MessageState {
    /// It can be claimed.
    Ready,
    /// It is kept back, by its sender or after a failure.
    Delayed,
    /// A consumer has it.
    Claimed,
    /// It waits behind another of its key.
    Blocked,
    /// It failed for good, and waits for an operator.
    Dead,
}

impl MessageState {
    /// The stable word for it.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Delayed => "delayed",
            Self::Claimed => "claimed",
            Self::Blocked => "blocked",
            Self::Dead => "dead",
        }
    }

    /// The state that a store calls so; ready, if it is none.
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
    /// Where it stands.
    pub state: MessageState,
    /// How often it was claimed.
    pub attempts: u32,
    /// When it was pushed, in milliseconds of Unix time.
    pub pushed: u64,
    /// When that changes: how long it is kept back, or how long its lease runs.
    pub changes_in: Option<Duration>,
    /// The token of the consumer that has it, before the era is added.
    pub sequence: Option<u64>,
    /// Who has it.
    pub owner: Option<Owner>,
    /// What went wrong with it last.
    pub why: Option<String>,
    /// How long its body is, in bytes.
    pub size: u64,
}

impl MessageReport {
    /// What a store says of message `number`, before the details.
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
