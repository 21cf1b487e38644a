//! Events in the life of claims, for observers: the source of metrics and traces.
//!
//! An event is reported where it happens, on the caller's thread, the keeper's or one of its own,
//! with no lock held. An observer must be quick and must not block. Without observers the cost is
//! one atomic load.

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
    /// An acquire, or a consumer of a queue, waits for something other than its turn: an engine that
    /// does not answer or can't grant yet, or a line that is in use with another capacity. Reported
    /// when that begins, when the reason changes in more than its numbers, and when it is over.
    Stalled {
        /// The engine's scheme.
        engine: &'a str,
        /// The line, or the queue.
        name: &'a Name,
        /// The error of the last try, which will be repeated; `None` when it is over: only others
        /// are waited for. The end of an acquire ends this without a report.
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

/// What one acquire, or one consumer, waits for besides its turn.
#[derive(Debug, Default)]
pub(crate) struct Stall(Option<Error>);

impl Stall {
    /// A try has failed for this reason, and will be repeated.
    pub(super) fn begins(&mut self, observers: &Observers, name: &Name, why: &Error) {
        let known = self.0.as_ref().is_some_and(|known| is_same(known, why));
        if known || !observers.any() {
            return;
        }
        self.0 = Some(why.clone());
        let why = Some(why);
        observers.tell(|engine| Event::Stalled { engine, name, why });
    }

    /// The engine has answered.
    pub(super) fn ends(&mut self, observers: &Observers, name: &Name) {
        if self.0.take().is_some() {
            let why = None;
            observers.tell(|engine| Event::Stalled { engine, name, why });
        }
    }
}

/// Whether two errors say the same, but for the numbers: some say how long it still takes.
fn is_same(one: &Error, other: &Error) -> bool {
    let words = |error: &Error| {
        let message = error.message().chars();
        message.filter(|c| !c.is_ascii_digit()).collect::<String>()
    };
    one.kind() == other.kind() && words(one) == words(other)
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

    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Notifies all observers; `event` receives the engine's scheme. No lock is held during the
    /// calls, so an observer may use the client freely, and one that panics affects no other.
    pub(super) fn tell<'a>(&'a self, event: impl FnOnce(&'a str) -> Event<'a>) {
        if !self.any() {
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
