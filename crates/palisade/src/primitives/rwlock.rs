//! `RwLock`: a reader takes 1 of many, a writer the whole line.

use std::time::Duration;

use super::{forever, now, within};
use crate::core::acquire::Request;
use crate::core::error::Result;
use crate::core::hold::Hold;

/// A lock that many may read at once, or one write.
///
/// First come, first served among both: a reader does not overtake a waiting writer, so neither
/// side starves. A writer excludes, and is excluded by, a [`Mutex`](crate::Mutex) of the same name.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:").await?;
/// let catalogue = palisade.rwlock("catalogue")?;
/// let one = catalogue.read().await?;
/// let two = catalogue.read().await?;
/// assert!(catalogue.try_write().await?.is_none());
/// one.release().await?;
/// two.release().await?;
/// assert!(catalogue.try_write().await?.is_some());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RwLock {
    pub(crate) read: Request,
    pub(crate) write: Request,
}

impl RwLock {
    /// Sets how long the lock lasts without renewal.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`](crate::Kind::InvalidArgument) outside the engine's range.
    pub fn ttl(self, ttl: Duration) -> Result<Self> {
        Ok(Self {
            read: self.read.ttl(ttl)?,
            write: self.write.ttl(ttl)?,
        })
    }

    /// Waits to read. Errors and cancellation as in [`Request::acquire`].
    ///
    /// # Errors
    /// [`Kind::Unsupported`](crate::Kind::Unsupported) where the engine has no readers.
    pub async fn read(&self) -> Result<Hold> {
        forever(&self.read).await
    }

    /// Reads if that is possible now; `None` when it is not.
    ///
    /// # Errors
    /// As [`RwLock::read`].
    pub async fn try_read(&self) -> Result<Option<Hold>> {
        now(&self.read).await
    }

    /// Waits to read at most this long.
    ///
    /// # Errors
    /// As [`RwLock::read`].
    pub async fn read_timeout(&self, wait: Duration) -> Result<Option<Hold>> {
        within(&self.read, wait).await
    }

    /// Waits to write. Errors and cancellation as in [`Request::acquire`].
    ///
    /// # Errors
    /// Those of [`Request::acquire`].
    pub async fn write(&self) -> Result<Hold> {
        forever(&self.write).await
    }

    /// Writes if that is possible now; `None` when it is not.
    ///
    /// # Errors
    /// As [`RwLock::write`].
    pub async fn try_write(&self) -> Result<Option<Hold>> {
        now(&self.write).await
    }

    /// Waits to write at most this long.
    ///
    /// # Errors
    /// As [`RwLock::write`].
    pub async fn write_timeout(&self, wait: Duration) -> Result<Option<Hold>> {
        within(&self.write, wait).await
    }
}
