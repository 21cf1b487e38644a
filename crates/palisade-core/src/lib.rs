//! The core of palisade: one model, a weighted place in a fair line, and everything that is built on
//! it without naming an engine: claims, holds, the keeper that renews, primitives, deadlocks, work
//! queues, fences, reports.
//!
//! Programs depend on `palisade`, which re-exports what they need. Authors of engines depend on this
//! crate: module [`engine`] is written for them.
//!
//! **What it may use**: nothing of palisade. It knows no engine but [`memory`], the reference, which
//! is one file.
//!
//! **Where to start reading**: `primitives/mutex.rs`, then `core/acquire.rs`, which enters an
//! [`Engine`](engine::Engine); `core/hold.rs` is what the user gets, `core/keeper` what keeps it
//! alive.

#![warn(missing_debug_implementations)]

#[cfg(feature = "blocking")]
pub mod blocking;
mod client;
mod core;
pub mod engine;
pub mod fence;
pub mod layers;
#[cfg(feature = "memory")]
pub mod memory;
mod primitives;

pub use client::{Client, Which};
pub use core::acquire::Request;
pub use core::capability::{Capability, Guarantee};
pub use core::clock::BootTime;
pub use core::engine::Eviction;
pub use core::error::{Error, ErrorKind, Outcome, Result};
pub use core::hold::Hold;
pub use core::name::Name;
pub use core::token::Token;
pub use core::validity::{Loss, LossReason};
pub use core::wait::{Patience, Retry};
pub use primitives::{
    Elected, Election, Leader, Leadership, MultiHold, MultiLock, Mutex, ReentrantHold,
    ReentrantMutex, RwHold, RwLock, Semaphore,
};

/// Events in the life of claims, for an [`Observer`](events::Observer).
pub mod events {
    pub use crate::core::events::{Ending, Event, Observer, Renewed};
}

/// Work queues: each message has one consumer at a time; see [`Client::queue`].
///
/// Delivery is at least once. It is exactly once where the effect and
/// [`done`](queue::Message::done) are one step.
pub mod queue {
    pub use crate::core::queue::{
        DEDUPLICATED, Delivery, Draft, Failed, FullReport, MAX_BATCH, MAX_BODY, Message,
        MessageReport, MessageState, Pick, Pushed, Queue, QueueReport, QueueStore, Receipt,
        Retries, Settlement, SharedQueueStore, Take, Taken,
    };
}

/// The results of [`Client::survey`], [`Client::deadlocks`] and [`Client::check`].
pub mod report {
    pub use crate::core::deadlock::{Deadlock, Sightings, StuckAgent, StuckClaim, find};
    pub use crate::core::owner::{Agent, Ancestor, Group, Owner};
    pub use crate::core::report::{Checkup, ClaimReport, Finding, LineReport, Scope, Severity};
}

/// What the command and the tests need beyond the API. Not public: it may change at any time.
#[doc(hidden)]
pub mod command {
    #[cfg(palisade_known_bad)]
    pub use crate::core::known_bad::step_wall_clock;
    pub use crate::core::lookout::DEADLOCK_AFTER;
    #[cfg(palisade_shuttle)]
    pub use crate::core::sync::advance;
    pub use crate::core::url::nearest;
}
