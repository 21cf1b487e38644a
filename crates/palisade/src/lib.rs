//! Distributed locks and coordination, the same everywhere: one library over an embedded store
//! and, by changing one URL, other engines.
//!
//! Every exclusive lock carries a fencing [`Token`]; every holder is told that its lease runs out
//! before anyone else can be granted ([`Hold::lost`]). This page leads from the first lock to the
//! fence; all its examples run as shown.
//!
//! # The first lock
//!
//! [`connect()`] takes a URL and returns a [`Client`]. `memory:` is for this process. `file:` is
//! for all processes of this user on this machine, and needs no server. [`engines`] lists the
//! others.
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
//! A lock is identified by its name and needs no setup. The [`Hold`] is owned and `Send`: it can be
//! stored, moved to another task and outlive the client. A thread of the library renews its lease
//! in the background, so that work may last longer than the ttl. Dropping a hold releases it in the
//! background; [`Hold::release`] also reports the result.
//!
//! # To wait, or not
//!
//! ```
//! # use std::time::Duration;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
//! # let palisade = palisade::connect("memory:waiting").await?;
//! let nightly = palisade.mutex("nightly-report").ttl(Duration::from_secs(10));
//! let hold = nightly.lock().await?;                                     // as long as it takes
//! assert!(nightly.try_lock().await?.is_none());                         // not at all
//! assert!(nightly.lock_timeout(Duration::from_millis(50)).await?.is_none());  // for a while
//! # hold.release().await
//! # }
//! ```
//!
//! Busy is a value, not an error. A future that is dropped while it waits leaves no place in the
//! line. Options (`ttl`, `at_least`, `deadlock_after`) are the same on every primitive and are
//! checked when it is used.
//!
//! # When the lock is lost
//!
//! A lease can end during the work: the engine is unreachable for longer than the ttl, the machine
//! is suspended, an operator evicts the holder ([`Client::evict`]). [`Hold::run`] drops the work at
//! that moment, [`Hold::lost`] resolves, [`Hold::is_valid`] answers in nanoseconds.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
//! # let palisade = palisade::connect("memory:lost").await?;
//! use palisade::{ErrorKind, Eviction, LossReason, Which};
//!
//! let hold = palisade.mutex("nightly-report").lock().await?;
//! // An operator, elsewhere:
//! palisade.evict("nightly-report", Which::Holders, Eviction::Remove).await?;
//!
//! let work = hold.run(std::future::pending::<()>()).await;
//! assert_eq!(work.unwrap_err().kind(), ErrorKind::Lost);
//! assert_eq!(hold.lost().await.reason, LossReason::Taken);
//! assert!(!hold.is_valid());
//! # Ok(()) }
//! ```
//!
//! # The fence
//!
//! A process can be paused right after it checked that its lock is valid, for longer than any
//! lease. When it resumes and writes, no lock of any kind can prevent that. The storage can: it
//! remembers the highest token and refuses lower ones, in the same step as the write.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
//! # let palisade = palisade::connect("memory:fence").await?;
//! use palisade::fence::{Fence, MemoryFence, Verdict};
//! use palisade::{Eviction, Which};
//!
//! let storage = MemoryFence::default();
//! let zombie = palisade.mutex("stock").lock().await?;
//! // It is paused. Its lease ends, and another is granted with a greater token.
//! # palisade.evict("stock", Which::Holders, Eviction::Remove).await?;
//! let holder = palisade.mutex("stock").lock().await?;
//! assert!(holder.token() > zombie.token());
//! let written = storage.write(holder.name(), holder.write_token()?, b"9 left".into()).await?;
//! assert_eq!(written, Verdict::Accepted);
//!
//! // It wakes up.
//! let late = storage.write(zombie.name(), zombie.write_token()?, b"10 left".into()).await?;
//! assert_eq!(late, Verdict::Stale { highest: holder.token() });
//! # Ok(()) }
//! ```
//!
//! [`fence`] offers this for PostgreSQL, SQLite, Redis, etcd, files and HTTP services. Where two
//! holders at once would damage data, use [`Client::for_correctness`]: it refuses engines, and
//! settings of engines, whose tokens could decrease.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
//! let refused = palisade::connect("memory:").await?.for_correctness().await;
//! assert_eq!(refused.unwrap_err().kind(), palisade::ErrorKind::NotForCorrectness);
//! # Ok(()) }
//! ```
//!
//! # More than a mutex
//!
//! | you want | use |
//! |---|---|
//! | many readers or one writer | [`Client::rwlock`] |
//! | at most n at once | [`Client::semaphore`] |
//! | one leader, with an address | [`Client::election`] |
//! | several names, all or nothing | [`Client::multi_lock`] |
//! | any free one of several | [`Client::lock_any`] |
//! | to take it again while holding it | [`Client::reentrant`] |
//! | each message to one consumer at a time | [`Client::queue`] |
//! | who holds, who waits, who waits for each other | [`Client::survey`], [`Client::deadlocks`] |
//!
//! Code without a runtime uses [`blocking`]. Metrics and traces are in [`layers`], typed
//! configuration in place of a URL in [`config`], and what authors of engines need in [`engine`].
//!
//! # Engines and features
//!
//! `file`, `memory`, `blocking`, `metrics` and `trace` are on by default. Each engine behind a
//! server is a feature: `consul`, `etcd`, `http`, `kubernetes`, `postgres`, `redis`, `zookeeper`.
//! The rest: `file-queue` (queues of `file:`), `sqlite` and `tower` (fences), `sqlx` (helpers for
//! its transactions). What an engine can do is data, [`Client::capability`]. What it can't do is
//! refused before anything is sent, as [`ErrorKind::Unsupported`].
//!
//! # Errors
//!
//! An [`Error`] has a [kind](Error::kind), says what to do, and whether the change may have been
//! applied ([`Error::outcome`]). While an engine can't be reached, requests are retried as long as
//! the caller's patience lasts. A retry repeats the same claim, so a lost answer never takes a
//! second place.
//!
//! It runs on Unix systems, because it relies on their processes, signals and boot-time clock.

#![warn(missing_debug_implementations)]

mod connect;
pub mod engines;
pub mod fence;

pub use connect::{config, connect, connect_existing};
pub use palisade_core::{
    BootTime, Capability, Client, Elected, Election, Error, ErrorKind, Eviction, Guarantee, Hold,
    Leader, Leadership, Loss, LossReason, MultiHold, MultiLock, Mutex, Name, Outcome, Patience,
    ReentrantHold, ReentrantMutex, Request, Result, Retry, RwHold, RwLock, Semaphore, Token, Which,
    engine, events, layers, queue, report,
};

/// The same API for code without a runtime; see [`palisade_core::blocking`].
#[cfg(feature = "blocking")]
pub mod blocking {
    pub use palisade_core::blocking::*;

    /// Connects; see [`palisade::connect`](crate::connect()).
    ///
    /// # Errors
    /// As there, and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn connect(target: impl crate::engine::IntoUrl) -> crate::Result<Client> {
        let url = target.into_url()?;
        wait(crate::connect(url))?.map(Client::from)
    }
}

/// What the command and the tests need beyond the API. Not public: it may change at any time.
#[doc(hidden)]
pub mod command {
    #[cfg(feature = "baseline")]
    pub use crate::connect::baseline;
    pub use crate::connect::{Prepared, prepare, registry, schemes};
    pub use palisade_core::command::*;
    #[cfg(feature = "baseline")]
    pub use palisade_core::engine::Baseline;
    pub use palisade_core::engine::{parse_duration, rounded};
    #[cfg(feature = "file")]
    pub use palisade_file::locate;
    #[cfg(feature = "http")]
    pub use palisade_http::config::own_folder;
    #[cfg(feature = "http")]
    pub use palisade_kit::plain_http_client;
}
