//! Fenced storage: the half of a lock that the storage has to do.
//!
//! A [`Fence`] remembers the highest exclusive token it has accepted per resource and refuses
//! lower ones, in the same step as the write. A holder that was paused past its lease and
//! replaced finds its write refused, whatever it believes.
//!
//! Tokens of exclusive holds (mutex, write lock, leadership) are for [`Fence::write`]. A reader
//! compares its token with [`Fence::check`]; permits are not fenced, because several may write.

mod file;
mod memory;

pub use crate::connect::open_fence as open;
pub use file::FileFence;
#[cfg(feature = "file")]
pub(crate) use file::encode;
pub use memory::MemoryFence;

use crate::core::engine::BoxFuture;
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::token::Token;

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
/// let old = zombie.token();
/// zombie.release().await?; // or: it was paused, and its lease ran out
/// let holder = palisade.mutex("stock").lock().await?;
///
/// assert_eq!(fence.write(&stock, holder.token(), b"9".into()).await?, Verdict::Accepted);
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
    /// - After an error the token may have been accepted, never a lower one after it.
    fn write(&self, resource: &Name, token: Token, data: Vec<u8>) -> BoxFuture<Result<Verdict>>;

    /// Reads what was last written, with the highest token accepted.
    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>>;

    /// Compares a token, and remembers nothing. Advisory: a pause can come between this and a
    /// write elsewhere.
    fn check(&self, resource: &Name, token: Token) -> BoxFuture<Result<Verdict>>;
}

/// Which tokens a fence takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Rule {
    /// Not older than the highest.
    #[default]
    NotOlder,
    /// Newer than the highest: each token once.
    Newer,
}

impl Rule {
    fn judge(self, highest: Option<Token>, token: Token) -> Verdict {
        match highest {
            Some(highest) if token < highest => Verdict::Stale { highest },
            Some(highest) if token == highest && self == Self::Newer => Verdict::Stale { highest },
            _ => Verdict::Accepted,
        }
    }
}

#[cfg(test)]
mod tests;
