//! What happens to claims, told to whoever wants to know: the source of metrics and traces.
//!
//! Told from where it happens, on the caller's thread or the keeper's, with no lock held; an
//! observer must be quick and must not block. With no observer the cost is one atomic load.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::RwLock;

use super::claim::Mode;
use super::deadlock::Deadlock;
use super::error::Error;
use super::name::Name;
use super::token::Token;
use super::validity::LossReason;

/// How an acquire ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ending {
    /// Granted, with this token.
    Held(Token),
    /// Patience ended first.
    Busy,
    /// An error ended it.
    Failed,
    /// Its future was dropped.
    Cancelled,
}

impl Ending {
    /// The stable word for it.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Held(_) => "held",
            Self::Busy => "busy",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// What a renewal of one lease came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewed {
    /// It lives on.
    Held,
    /// It is over.
    Lost,
    /// An operator takes it away.
    Evicted,
    /// Not known.
    Unknown,
}

impl Renewed {
    /// The stable word for it.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Lost => "lost",
            Self::Evicted => "evicted",
            Self::Unknown => "unknown",
        }
    }
}

/// Something that happened. `engine` is the scheme of the engine's URL.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Event<'a> {
    /// An acquire began.
    Acquiring {
        /// The engine's scheme.
        engine: &'a str,
        /// The line.
        name: &'a Name,
        /// How it takes part.
        mode: Mode,
    },
    /// An acquire ended.
    Acquired {
        /// The engine's scheme.
        engine: &'a str,
        /// The line.
        name: &'a Name,
        /// How it takes part.
        mode: Mode,
        /// How it ended.
        ending: Ending,
        /// How long it took.
        took: Duration,
    },
    /// A hold was given up: released, dropped, or dropped after a loss.
    Released {
        /// The engine's scheme.
        engine: &'a str,
        /// The line.
        name: &'a Name,
        /// How it took part.
        mode: Mode,
        /// How long it was in the user's hands.
        held: Duration,
    },
    /// A lease was to be renewed.
    Renewed {
        /// The engine's scheme.
        engine: &'a str,
        /// What came of it.
        outcome: Renewed,
        /// How long the call took, which may have been for many leases.
        took: Duration,
    },
    /// A hold was lost.
    Lost {
        /// The engine's scheme.
        engine: &'a str,
        /// The line.
        name: &'a Name,
        /// Why.
        reason: LossReason,
        /// What was behind it, where something failed.
        why: Option<&'a Error>,
    },
    /// A waiting claim is in a deadlock. Told once, and once more when the claim gives way.
    Deadlocked {
        /// The engine's scheme.
        engine: &'a str,
        /// The line that the claim waits in.
        name: &'a Name,
        /// The deadlock.
        deadlock: &'a Deadlock,
        /// Whether the claim gives way.
        gives_way: bool,
    },
}

/// Someone who wants to know. See [`Client::observed_by`](crate::Client::observed_by).
pub trait Observer: Send + Sync + 'static {
    /// Sees what happened. Called where it happens: quick, never blocking. It may use the client
    /// and drop holds. A panic is caught, and logged through `tracing`.
    fn see(&self, event: &Event<'_>);
}

/// The observers of one client and its clones.
pub(crate) struct Observers {
    engine: String,
    any: AtomicBool,
    all: RwLock<Arc<[Arc<dyn Observer>]>>,
}

impl Observers {
    pub(super) fn new(described: &str) -> Self {
        let engine = described.split(':').next().unwrap_or_default().to_owned();
        Self {
            engine,
            any: AtomicBool::new(false),
            all: RwLock::new(Arc::new([])),
        }
    }

    pub(crate) fn add(&self, observer: Arc<dyn Observer>) {
        let mut all = self.all.write();
        *all = all.iter().cloned().chain([observer]).collect();
        self.any.store(true, Ordering::Release);
    }

    /// Tells everyone; `event` is given the engine's scheme. No lock is held meanwhile, so that
    /// an observer may do anything with the client, and one that panics harms nobody else.
    pub(super) fn tell<'a>(&'a self, event: impl FnOnce(&'a str) -> Event<'a>) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let event = event(&self.engine);
        let all = Arc::clone(&self.all.read());
        for observer in all.iter() {
            if catch_unwind(AssertUnwindSafe(|| observer.see(&event))).is_err() {
                #[cfg(feature = "trace")]
                tracing::error!(?event, "an observer panicked");
            }
        }
    }
}
