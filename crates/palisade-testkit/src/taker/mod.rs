//! A real second process that takes a lock, and that can be stopped and killed.
//!
//! [`process`] is what runs in it: it acquires, prints what happens as JSON lines with the boot
//! clock, which both processes share, and does what its stdin says. [`Taker`] drives it. A test
//! binary can be its own second process, so that authors of engines need nothing but the library.

mod driver;
pub mod process;

pub use driver::{Second, Taker, increment};

use std::time::Duration;

use palisade::BootTime;
use palisade::engine::Ask;
use serde::{Deserialize, Serialize};

/// What a second process is told to do.
#[derive(Debug, Clone, Copy)]
pub struct TakerArgs {
    /// How long its place lasts without renewal.
    pub ttl: Option<Duration>,
    /// How much of the line it takes.
    pub ask: Ask,
    /// Whether it leaves the lock behind when its stdin says `exit` or ends.
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

/// What happened in a second process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// What.
    pub event: What,
    /// When, in nanoseconds of the boot clock.
    pub at: u64,
    /// The token, while there is a hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<u64>,
    /// Whether the hold is valid, read before anything else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid: Option<bool>,
    /// The reason of a loss, or what went wrong.
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
    /// It is about to ask.
    Waiting,
    /// It holds.
    Held,
    /// It was asked to look at its hold.
    Checked,
    /// Its hold is lost.
    Lost,
    /// It let go.
    Released,
    /// It counted as often as it was told to.
    Counted,
    /// It could not go on.
    Failed,
}
