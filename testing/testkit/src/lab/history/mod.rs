//! Histories: what every process of a run saw, on one clock, to be judged afterwards.
//!
//! Each process appends JSON lines to its own file ([`Recorder`]); [`History`] merges the files by
//! time. All processes run on one machine, so the boot clock gives the true order of their events.
//! **A time never favours the library**: a call is stamped before it is made, an answer after it
//! has come, a stop before the signal is sent, a resumption after it.

mod read;
mod recorder;
pub mod timeline;

pub use read::{History, Malformed};
pub use recorder::Recorder;

use std::fmt;

use palisade::engine::{Ask, READERS};
use serde::{Deserialize, Serialize};

/// An event in one process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// The time, in nanoseconds of the boot clock.
    pub at: u64,
    /// The worker; the harness records stops and kills under the victim's name.
    pub client: String,
    /// The lock or resource that it concerns; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The kind of event.
    #[serde(flatten)]
    pub what: What,
}

/// The kinds of events.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[allow(missing_docs)] // The fields are named after what they are.
pub enum What {
    /// A process starts, with the owner handle of its client.
    Start { pid: u32, owner: String },
    /// A process is about to exit by itself.
    End,
    /// It requests a place. Without `patience_ms` it waits for ever.
    AcquireCalled {
        op: u64,
        grip: Grip,
        patience_ms: Option<u64>,
    },
    /// The result of an acquire.
    AcquireReturned { op: u64, answer: Answer },
    /// `is_valid()`, called at this time, returned `true`.
    Valid { token: u64, claim: String },
    /// `lost()` resolved. `valid_until`: when the hold became invalid, if that is known.
    Lost {
        token: u64,
        claim: String,
        reason: String,
        valid_until: Option<u64>,
    },
    /// `is_valid()` returned `false`.
    Invalid {
        token: u64,
        claim: String,
        valid_until: Option<u64>,
    },
    /// It gives the place up, by `release` or by dropping the hold. `valid_until`: the deadline
    /// that the hold had just before; a stop may have come in between.
    ReleaseCalled {
        token: u64,
        claim: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        valid_until: Option<u64>,
    },
    /// The result of `release`.
    ReleaseReturned {
        token: u64,
        claim: String,
        answer: Released,
    },
    /// It writes `value` with its token.
    WriteCalled { op: u64, token: u64, value: String },
    /// The answer of the storage.
    WriteReturned { op: u64, answer: Written },
    /// It reads.
    ReadCalled { op: u64 },
    /// The result of a read; `None` from a store that was never written.
    ReadReturned { op: u64, answer: Option<Kept> },
    /// A leader's work begins.
    LeadBegin { token: u64 },
    /// A leader's work has ended or was dropped.
    LeadEnd { token: u64 },
    /// The harness stops the process.
    PauseBegin,
    /// The harness has continued the process.
    PauseEnd,
    /// The harness kills the process.
    Kill,
    /// The process got no CPU time since then.
    Stall { since: u64 },
    /// A fault that does not concern a single process begins.
    FaultBegin { fault: String },
    /// The harness is about to end it.
    FaultHeal { fault: String },
    /// It has ended: an engine answers again.
    FaultEnd { fault: String },
    /// The line as the engine showed it; requested at `asked`.
    Survey { asked: u64, line: Vec<Shown> },
    /// The store's own record at the end: one accepted write, in the store's order.
    Stored { op: u64, token: u64 },
    /// The store's record is complete with this many writes.
    StoredAll { count: u64 },
    /// For people.
    Note { text: String },
}

/// How much of a line a request takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grip {
    /// All of it: mutex, writer, leader.
    Whole,
    /// A weight out of a capacity: a reader or permits.
    Part {
        /// The weight.
        weight: u32,
        /// The capacity.
        capacity: u32,
    },
}

impl Grip {
    /// The weight in a line of `capacity`.
    pub fn weight_in(self, capacity: u32) -> u64 {
        u64::from(Ask::from(self).weight_in(capacity))
    }
}

impl From<Grip> for Ask {
    fn from(grip: Grip) -> Self {
        match grip {
            Grip::Whole => Self::Whole,
            Grip::Part { weight, capacity } => Self::Part { weight, capacity },
        }
    }
}

impl From<Ask> for Grip {
    fn from(ask: Ask) -> Self {
        match ask {
            Ask::Whole => Self::Whole,
            Ask::Part { weight, capacity } => Self::Part { weight, capacity },
        }
    }
}

impl fmt::Display for Grip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("exclusive"),
            Self::Part {
                capacity: READERS, ..
            } => f.write_str("shared"),
            Self::Part { weight, capacity } => write!(f, "{weight}/{capacity} permits"),
        }
    }
}

/// How an acquire ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Granted.
    Held {
        /// The fencing token.
        token: u64,
        /// The claim, in hex.
        claim: String,
    },
    /// Patience ended.
    Busy,
    /// The future was dropped.
    Cancelled,
    /// An error.
    Error {
        /// Its stable name.
        kind: String,
        /// Whether the claim may nevertheless be in the line.
        maybe_applied: bool,
    },
}

/// How a release ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Released {
    /// It was held until then.
    Done,
    /// It had been lost before.
    Lost,
    /// An error.
    Error {
        /// Its stable name.
        kind: String,
    },
}

/// The result of a write. A write without a result may or may not have been applied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Written {
    /// It is in the storage.
    Accepted,
    /// Refused: a higher token was accepted before. Nothing changed.
    Stale {
        /// That token.
        highest: u64,
    },
    /// An error after which nothing has changed.
    NotApplied,
    /// An error with an unknown outcome.
    Unknown,
}

/// The content of a store.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Kept {
    /// The highest token accepted.
    pub token: u64,
    /// The value last written.
    pub value: String,
}

/// One claim of a survey, in the order of the line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// The claim, in hex.
    pub claim: String,
    /// The owner handle; empty for another tool's claim.
    pub owner: String,
    /// The token, if it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<u64>,
}

impl Event {
    /// The token that it concerns, if any.
    pub fn token(&self) -> Option<u64> {
        match &self.what {
            What::Valid { token, .. }
            | What::Lost { token, .. }
            | What::Invalid { token, .. }
            | What::ReleaseCalled { token, .. }
            | What::ReleaseReturned { token, .. }
            | What::WriteCalled { token, .. }
            | What::LeadBegin { token }
            | What::LeadEnd { token }
            | What::Stored { token, .. }
            | What::AcquireReturned {
                answer: Answer::Held { token, .. },
                ..
            } => Some(*token),
            _ => None,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6} s {}", self.at as f64 / 1e9, self.client)?;
        if !self.name.is_empty() {
            write!(f, " on {}", self.name)?;
        }
        write!(f, ": {:?}", self.what)
    }
}
