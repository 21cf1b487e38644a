//! Distributed locks and coordination, the same everywhere: one library over an embedded store
//! and, by changing one URL, other engines.
//!
//! Every exclusive lock carries a fencing [`Token`]; every holder is told that its lease runs out
//! before anyone else can be granted ([`Hold::lost`]).
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
//! let palisade = palisade::connect("memory:").await?;
//! let hold = palisade.mutex("charge-card-4711").lock().await?;
//! let charged = hold.run(async { "charged once" }).await?;
//! # assert_eq!(charged, "charged once");
//! hold.release().await
//! # }
//! ```
//!
//! [`connect()`] gives a [`Client`], and that the primitives: [`Client::mutex`],
//! [`Client::rwlock`], [`Client::semaphore`], [`Client::election`], and work queues
//! ([`Client::queue`]). Each has the same options and is
//! checked when it is used:
//!
//! ```
//! # use std::time::Duration;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
//! let palisade = palisade::connect("memory:").await?;
//! let nightly = palisade.mutex("nightly-report").ttl(Duration::from_secs(10));
//! if let Some(hold) = nightly.try_lock().await? {
//!     // Give hold.token() to the storage with every write.
//!     hold.release().await?;
//! }
//! # Ok(()) }
//! ```
//!
//! For code without a runtime there is [`blocking`], for storage that refuses stale holders
//! [`fence`], for metrics and traces [`layers`], for authors of engines [`engine`].
//!
//! It runs on Unix systems: processes, signals and the boot-time clock are theirs.

#![warn(missing_debug_implementations)]

#[cfg(feature = "blocking")]
pub mod blocking;
mod client;
mod connect;
mod core;
pub mod engine;
pub mod engines;
pub mod fence;
pub mod layers;
mod primitives;

pub use client::{Client, Which};
pub use connect::{config, connect, connect_existing};
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

/// What happens to claims, told to an [`Observer`](events::Observer).
pub mod events {
    pub use crate::core::events::{Ending, Event, Observer, Renewed};
}

/// Work queues: each message to one consumer at a time; see [`Client::queue`].
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

/// What [`Client::survey`], [`Client::deadlocks`] and [`Client::check`] answer.
pub mod report {
    pub use crate::core::deadlock::{Deadlock, Sightings, StuckAgent, StuckClaim, find};
    pub use crate::core::owner::{Agent, Ancestor, Group, Owner};
    pub use crate::core::report::{Checkup, ClaimReport, Finding, LineReport, Scope, Severity};
}

/// What the command and the tests need beside the API. No part of it: it may change at any time.
#[doc(hidden)]
pub mod command {
    #[cfg(feature = "baseline")]
    pub use crate::connect::baseline;
    pub use crate::connect::{Prepared, prepare, registry, schemes};
    #[cfg(feature = "baseline")]
    pub use crate::core::baseline::Baseline;
    pub use crate::core::duration::parse_duration;
    #[cfg(palisade_known_bad)]
    pub use crate::core::known_bad::step_wall_clock;
    pub use crate::core::lookout::DEADLOCK_AFTER;
    #[cfg(palisade_shuttle)]
    pub use crate::core::sync::advance;
    pub use crate::core::url::nearest;
    #[cfg(feature = "http")]
    pub use crate::engines::http::config::own_folder;
}

/// The Rust in the pages compiles.
#[cfg(all(doctest, feature = "etcd", feature = "postgres"))]
#[doc = include_str!("../../../docs/options.md")]
struct Pages;
