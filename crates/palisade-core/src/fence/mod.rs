//! Fenced storage: the part of a lock that the storage must do.
//!
//! A [`Fence`] remembers the highest exclusive token it has accepted per resource and refuses lower
//! ones, in the same step as the write. So the write of a holder that was paused past its lease and
//! replaced is refused, even if it still believes that it holds the lock.
//!
//! **Take, then read.** A write that depends on what was read begins with [`Fence::take`]: it raises
//! the highest token first and reads then, so that no older holder can write in between.
//!
//! Exclusive holds (mutex, write lock, leadership) have a [`WriteToken`]. Readers have a
//! [`ReadToken`], which is compared and never remembered. Permits are not fenced, because several
//! holders may write.
//!
//! | store | atomic by |
//! |---|---|
//! | [`MemoryFence`] | a mutex of this process |
//! | `FileFence` of `palisade-file` | flock and rename |
//! | `palisade::fence::open` of `redis:`, `etcd:`, `zookeeper:`, `postgres:`, `file:` | one script, one transaction, one multi, a trigger, flock and rename |
//! | rows of your own tables | the triggers of `palisade::fence::sql`, for PostgreSQL and SQLite |
//! | an HTTP service | a layer of its own (feature `tower`), advisory across replicas |
//!
//! An engine's store is beside that engine (`engines/…/fence.rs`) and listed in `connect`; all
//! stores pass one suite (`palisade_testkit::fences`).

#[cfg(any(feature = "tokio-postgres", feature = "rusqlite", feature = "sqlx"))]
mod bind;
mod memory;
mod token;

use std::sync::Arc;

pub use memory::MemoryFence;
pub use token::{Presented, ReadToken, WriteToken};
#[doc(hidden)]
pub use token::{digits, read_digits};

use crate::core::engine::BoxFuture;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::name::Name;
use crate::core::token::Token;

/// A fence that can be shared.
pub type SharedFence = Arc<dyn Fence>;

/// The decision of a fence about a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The token is not older than any accepted before, and the data is written.
    Accepted,
    /// The token is older than an accepted one, or, with a strict fence, equal to it. Nothing was
    /// written.
    Stale {
        /// The highest token accepted so far.
        highest: Token,
    },
}

/// The answer to [`Fence::take`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Taken<T = Vec<u8>> {
    /// No older holder can write any more.
    Accepted {
        /// Everything that was accepted up to now; `None` if nothing was ever written.
        data: Option<T>,
    },
    /// The token is older than an accepted one, or, with a strict fence, used up. Nothing was
    /// changed.
    Stale {
        /// The highest token accepted so far.
        highest: Token,
    },
}

impl<T> Taken<T> {
    /// The decision about the token, without the data.
    pub fn verdict(&self) -> Verdict {
        match *self {
            Self::Accepted { .. } => Verdict::Accepted,
            Self::Stale { highest } => Verdict::Stale { highest },
        }
    }
}

/// What a fence stores for a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fenced {
    /// The highest token accepted so far.
    pub token: Token,
    /// The data that was last written.
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
    /// Writes unless the token is stale; the check and the write are one step.
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

    /// Records a token for data that is stored elsewhere, unless it is stale.
    ///
    /// Advisory: the process can be paused between this call and the write that it is about.
    ///
    /// # Behavior
    /// - Data that was written here is left as it is.
    /// - It judges as a write does.
    fn accept(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Verdict>>;

    /// Raises the highest token, then reads: afterwards no older holder can write, and what it
    /// returns is everything that was accepted. For a write that depends on what was read. After a
    /// plain [`Fence::read`] a paused holder's write may still be accepted, and is overwritten by
    /// the write that follows.
    ///
    /// # Behavior
    /// - A lower token is stale, as in a write; the data is not returned.
    /// - A write of an older holder that was not accepted before is stale afterwards.
    /// - A write in flight is either in the data that it returns, or stale.
    /// - A strict fence raises the mark to the number below the token, so that the token can still
    ///   write once; a token that has written is stale.
    /// - Nothing written is `None`, and empty data is `Some`.
    /// - After an error the token may have been accepted, never a lower one after it.
    ///
    /// Once for each hold and resource is enough, and again after an upgrade.
    ///
    /// # Errors
    /// As [`Fence::write`]. [`ErrorKind::Unsupported`] by this provided method: a fence of your own
    /// implements it, or its users call [`Fence::accept`] and then [`Fence::read`].
    fn take(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Taken>> {
        let _ = (resource, token);
        let message = "this fence can't take: call accept, and then read";
        let error = Error::new(ErrorKind::Unsupported, "fence", message);
        Box::pin(async move { Err(error) })
    }

    /// Reads the data that was last written, with the highest token accepted. A write that depends
    /// on it needs [`Fence::take`] instead.
    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>>;

    /// The highest token accepted so far.
    fn highest(&self, resource: &Name) -> BoxFuture<Result<Option<Token>>>;

    /// Forgets a resource and its data: any token is accepted afterwards, even a stale one. For
    /// names that are never used again; `false` if the resource was unknown.
    fn forget(&self, resource: &Name) -> BoxFuture<Result<bool>>;

    /// Which tokens it accepts.
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

    fn take(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Taken>> {
        (**self).take(resource, token)
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

/// Methods that every fence has in addition.
pub trait FenceExt: Fence {
    /// Compares a token without recording it. Advisory: the process can be paused between this call
    /// and a write elsewhere.
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

/// Which tokens a fence accepts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Rule {
    /// Tokens not older than the highest: a holder can write many times.
    #[default]
    NotOlder,
    /// Tokens newer than the highest: each token can write once.
    Strict,
}

impl Rule {
    /// Decides about a token.
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

    /// The mark that a token which is accepted leaves when it takes; `None` if no older token
    /// exists. A strict fence keeps the token itself for the write.
    #[doc(hidden)]
    pub fn mark_of_take(self, token: WriteToken) -> Result<Option<i64>> {
        let number = token.stored()?;
        let mark = match self {
            Self::NotOlder => number,
            Self::Strict => number - 1,
        };
        Ok(Some(mark).filter(|mark| *mark > 0))
    }
}
