//! Fenced storage: the half of a lock that the storage has to do.
//!
//! A [`Fence`] remembers the highest exclusive token it has accepted per resource and refuses
//! lower ones, in the same step as the write. A holder that was paused past its lease and
//! replaced finds its write refused, whatever it believes.
//!
//! Exclusive holds (mutex, write lock, leadership) have a [`WriteToken`], readers a [`ReadToken`]
//! that is compared and never remembered; permits are not fenced, because several may write.
//!
//! | store | atomic by |
//! |---|---|
//! | [`MemoryFence`] | a mutex of this process |
//! | [`FileFence`] | flock and rename |
//! | [`open`] of `redis:`, `etcd:`, `zookeeper:`, `postgres:`, `file:` | one script, one transaction, one multi, a trigger, flock and rename |
//! | rows of your own tables | the triggers of [`sql`], for PostgreSQL and SQLite |
//! | an HTTP service | a layer of its own (feature `tower`), advisory across replicas |
//!
//! A store of an engine stands beside that engine (`engines/…/fence.rs`) and is listed in
//! `connect`; all of them pass one suite (`palisade_testkit::fences`).

mod file;
#[cfg(feature = "tower")]
pub mod http;
mod memory;
pub mod sql;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(any(feature = "etcd", feature = "postgres", feature = "zookeeper"))]
mod store;
mod token;

use std::sync::Arc;

pub use crate::connect::{open_fence as open, open_strict_fence as open_strict};
pub use file::FileFence;
#[cfg(feature = "file")]
pub(crate) use file::encode;
pub use memory::MemoryFence;
#[cfg(any(feature = "etcd", feature = "postgres", feature = "zookeeper"))]
pub(crate) use store::{FenceStore, Stored};
pub use token::{Presented, ReadToken, WriteToken};
#[cfg(any(feature = "etcd", feature = "redis", feature = "zookeeper"))]
pub(crate) use token::{digits, read_digits};

use crate::core::engine::BoxFuture;
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::token::Token;

/// A fence that many may use.
pub type SharedFence = Arc<dyn Fence>;

/// What a fence says to a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Not older than any before it; what came with it is written.
    Accepted,
    /// Older than one that was accepted, or, with a strict fence, as old. Nothing was written.
    Stale {
        /// The highest token accepted so far.
        highest: Token,
    },
}

/// What a fence keeps for a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fenced {
    /// The highest token accepted so far.
    pub token: Token,
    /// What was last written.
    pub data: Vec<u8>,
}

/// Storage that refuses the writes of stale holders.
///
/// ```
/// use palisade::fence::{Fence, MemoryFence, Verdict};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:").await?;
/// let (stock, fence) = (palisade::Name::new("stock")?, MemoryFence::default());
///
/// let zombie = palisade.mutex("stock").lock().await?;
/// let old = zombie.write_token()?;
/// zombie.release().await?; // or: it was paused, and its lease ran out
/// let holder = palisade.mutex("stock").lock().await?;
///
/// let written = fence.write(&stock, holder.write_token()?, b"9".into()).await?;
/// assert_eq!(written, Verdict::Accepted);
/// let late = fence.write(&stock, old, b"10".into()).await?;
/// assert_eq!(late, Verdict::Stale { highest: holder.token() });
/// # Ok(()) }
/// ```
pub trait Fence: Send + Sync + 'static {
    /// Writes, unless the token is stale: both are decided in one step.
    ///
    /// # Behavior
    /// - A token lower than one accepted before is stale, also after a restart.
    /// - An equal token is accepted (a holder writes many times), unless the fence is strict.
    /// - A greater token is remembered, its era included.
    /// - A number that no engine grants (0, or above 63 bits) is refused as invalid.
    /// - After an error the token may have been accepted, never a lower one after it.
    fn write(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Vec<u8>,
    ) -> BoxFuture<Result<Verdict>>;

    /// Remembers a token for data that is kept elsewhere, unless it is stale.
    ///
    /// Advisory: a pause can come between this and the write that it is about.
    ///
    /// # Behavior
    /// - Data that was written here is left as it is.
    /// - It judges as a write does.
    fn accept(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Verdict>>;

    /// Reads what was last written, with the highest token accepted.
    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>>;

    /// The highest token accepted so far.
    fn highest(&self, resource: &Name) -> BoxFuture<Result<Option<Token>>>;

    /// Forgets a resource that is gone, its data included: any token is accepted afterwards, also
    /// a stale one. For names that are never used again; `false` when nothing was known of it.
    fn forget(&self, resource: &Name) -> BoxFuture<Result<bool>>;

    /// Which tokens it takes.
    fn rule(&self) -> Rule;
}

#[deny(clippy::missing_trait_methods)]
impl<F: Fence + ?Sized> Fence for Arc<F> {
    fn write(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Vec<u8>,
    ) -> BoxFuture<Result<Verdict>> {
        (**self).write(resource, token, data)
    }

    fn accept(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Verdict>> {
        (**self).accept(resource, token)
    }

    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>> {
        (**self).read(resource)
    }

    fn highest(&self, resource: &Name) -> BoxFuture<Result<Option<Token>>> {
        (**self).highest(resource)
    }

    fn forget(&self, resource: &Name) -> BoxFuture<Result<bool>> {
        (**self).forget(resource)
    }

    fn rule(&self) -> Rule {
        (**self).rule()
    }
}

/// What every fence can do beside.
pub trait FenceExt: Fence {
    /// Compares a token, and remembers nothing. Advisory: a pause can come between this and a
    /// write elsewhere.
    fn check(
        &self,
        resource: &Name,
        token: impl Into<Presented>,
    ) -> impl Future<Output = Result<Verdict>> + Send {
        let (highest, rule, token) = (self.highest(resource), self.rule(), token.into());
        async move {
            token.stored()?;
            Ok(rule.judge(highest.await?, token))
        }
    }
}

impl<F: Fence + ?Sized> FenceExt for F {}

/// Which tokens a fence takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rule {
    /// Not older than the highest: a holder writes many times.
    #[default]
    NotOlder,
    /// Newer than the highest: each token writes once.
    Strict,
}

impl Rule {
    /// What to say to a token.
    pub fn judge(self, highest: Option<Token>, presented: impl Into<Presented>) -> Verdict {
        let presented = presented.into();
        let token = presented.token();
        let once = self == Self::Strict && matches!(presented, Presented::Write(_));
        match highest {
            Some(highest) if token < highest || once && token == highest => {
                Verdict::Stale { highest }
            }
            _ => Verdict::Accepted,
        }
    }
}

#[cfg(test)]
mod tests;
