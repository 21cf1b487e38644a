//! A real second process that acquires a lock, and that can be stopped and killed.
//!
//! [`process`] is the code that runs in it. It acquires, prints events as JSON lines with times of
//! the boot clock, which both processes share, and obeys its stdin. [`Taker`] drives it. A test
//! binary can be its own second process, so that authors of engines need only the library.

mod driver;
pub mod process;

pub use driver::{Second, Taker, increment};

use std::time::Duration;

use palisade::BootTime;
use palisade::engine::Ask;
use serde::{Deserialize, Serialize};

/// The instructions for a second process.
#[derive(Debug, Clone, Copy)]
pub struct TakerArgs {
    /// How long its place lasts without renewal.
    pub ttl: Option<Duration>,
    /// How much of the line it takes.
    pub ask: Ask,
    /// Whether it exits without releasing the lock when its stdin says `exit` or ends.
    pub no_release: bool,
}

impl Default for TakerArgs {
    fn default() -> Self {
        Self {
            ttl: None,
            ask: Ask::Whole,
            no_release: false,
        }
    }
}

impl TakerArgs {
    /// With this ttl.
    pub fn ttl(ttl: Duration) -> Self {
        Self {
            ttl: Some(ttl),
            ..Self::default()
        }
    }
}

/// An event in a second process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// The kind.
    pub event: What,
    /// The time, in nanoseconds of the boot clock.
    pub at: u64,
    /// The token, if there is a hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<u64>,
    /// Whether the hold is valid, read before anything else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid: Option<bool>,
    /// The reason of a loss or a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl Event {
    /// How long after `start` it happened.
    pub fn since(&self, start: BootTime) -> Duration {
        BootTime::from_nanos(self.at).saturating_since(start)
    }
}

/// The kinds of event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// It is about to acquire.
    Waiting,
    /// It holds.
    Held,
    /// It was told to check its hold.
    Checked,
    /// Its hold is lost.
    Lost,
    /// It has released.
    Released,
    /// It has finished counting.
    Counted,
    /// It has failed.
    Failed,
}
