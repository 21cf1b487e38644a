//! Events in the life of claims, for observers: the source of metrics and traces.
//!
//! An event is reported where it happens, on the caller's thread or the keeper's, with no lock
//! held. An observer must be quick and must not block. Without observers the cost is one atomic
//! load.

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
    /// It failed with an error.
    Failed,
    /// Its future was dropped.
    Cancelled,
}

impl Ending {
    /// The stable name.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Held(_) => "held",
            Self::Busy => "busy",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The result of renewing one lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewed {
    /// It was extended.
    Held,
    /// It has ended.
    Lost,
    /// It is marked for eviction.
    Evicted,
    /// Unknown.
    Unknown,
}

impl Renewed {
    /// The stable name.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Lost => "lost",
            Self::Evicted => "evicted",
            Self::Unknown => "unknown",
        }
    }
}

/// An event. `engine` is the scheme of the engine's URL.
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
    /// A hold ended: it was released or dropped, possibly after a loss.
    Released {
        /// The engine's scheme.
        engine: &'a str,
        /// The line.
        name: &'a Name,
        /// How it took part.
        mode: Mode,
        /// How long it was held.
        held: Duration,
    },
    /// A renewal of a lease was attempted.
    Renewed {
        /// The engine's scheme.
        engine: &'a str,
        /// The result.
        outcome: Renewed,
        /// How long the call took; it may have renewed many leases.
        took: Duration,
    },
    /// A hold was lost.
    Lost {
        /// The engine's scheme.
        engine: &'a str,
        /// The line.
        name: &'a Name,
        /// The reason.
        reason: LossReason,
        /// The underlying failure, if there was one.
        why: Option<&'a Error>,
    },
    /// A waiting claim is in a deadlock. Reported once, and again when the claim gives way.
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

/// A receiver of events. See [`Client::observed_by`](crate::Client::observed_by).
pub trait Observer: Send + Sync + 'static {
    /// Receives an event on the thread where it happened, so it must be quick and never block. It
    /// may use the client and drop holds. A panic is caught, and logged through `tracing`.
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

    /// Notifies all observers; `event` receives the engine's scheme. No lock is held during the
    /// calls, so an observer may use the client freely, and one that panics affects no other.
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
