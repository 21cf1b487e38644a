//! `Semaphore`: k permits out of n.

use std::time::Duration;

use super::{forever, now, within};
use crate::core::acquire::Request;
use crate::core::claim::Ask;
use crate::core::error::Result;
use crate::core::hold::Hold;

/// A semaphore: at most `capacity` permits are held at once.
///
/// Nobody overtakes: a claim for many permits is not starved by claims for few. Permits carry a
/// token to tell holders apart, but are not fenced: several holders may write at once.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:").await?;
/// let api = palisade.semaphore("partner-api", 10);
/// let few = api.acquire_many(8).await?;
/// let one = api.acquire().await?;
/// assert!(api.try_acquire_many(2).await?.is_none());
/// few.release().await?;
/// one.release().await
/// # }
/// ```
#[derive(Clone)]
pub struct Semaphore(pub(crate) Request);

impl Semaphore {
    /// Waits for one permit. For cancellation see [`Request::acquire`].
    ///
    /// # Errors
    /// Those of [`Request::acquire`], such as
    /// [`ErrorKind::CapacityMismatch`](crate::ErrorKind::CapacityMismatch) when the name is in use
    /// with another capacity.
    pub async fn acquire(&self) -> Result<Hold> {
        forever(&self.0).await
    }

    /// Takes one permit if one is free now.
    ///
    /// # Errors
    /// As [`Semaphore::acquire`].
    pub async fn try_acquire(&self) -> Result<Option<Hold>> {
        now(&self.0).await
    }

    /// Waits for one permit at most this long.
    ///
    /// # Errors
    /// As [`Semaphore::acquire`].
    pub async fn acquire_timeout(&self, wait: Duration) -> Result<Option<Hold>> {
        within(&self.0, wait).await
    }

    /// Waits for `permits` at once.
    ///
    /// # Errors
    /// As [`Semaphore::acquire`]; [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument)
    /// for 0 or more than the capacity; [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported)
    /// above 1 where the engine grants only single permits.
    pub async fn acquire_many(&self, permits: u32) -> Result<Hold> {
        forever(&self.weighing(permits)).await
    }

    /// Takes `permits` at once if they are free now.
    ///
    /// # Errors
    /// As [`Semaphore::acquire_many`].
    pub async fn try_acquire_many(&self, permits: u32) -> Result<Option<Hold>> {
        now(&self.weighing(permits)).await
    }

    /// Waits for `permits` at once, at most this long.
    ///
    /// # Errors
    /// As [`Semaphore::acquire_many`].
    pub async fn acquire_many_timeout(&self, permits: u32, wait: Duration) -> Result<Option<Hold>> {
        within(&self.weighing(permits), wait).await
    }

    fn weighing(&self, weight: u32) -> Request {
        let capacity = match self.0.ask {
            Ask::Part { capacity, .. } => capacity,
            Ask::Whole => 1,
        };
        self.0.clone().asking(Ask::Part { weight, capacity })
    }
}
