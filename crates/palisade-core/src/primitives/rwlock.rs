//! `RwLock`: a reader takes 1 of very many, a writer the whole line.

use std::ops::Deref;
use std::time::Duration;

use super::{forever, now, within};
use crate::core::acquire::Request;
use crate::core::claim::Ask;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::hold::Hold;

/// A lock that many may hold to read, or one to write.
///
/// Readers and writers are served in order of arrival: a reader does not overtake a waiting writer,
/// so neither starves. A writer excludes, and is excluded by, a [`Mutex`](crate::Mutex) of the same
/// name.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:").await?;
/// let catalogue = palisade.rwlock("catalogue");
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
    /// Waits for a read lock. For cancellation see [`Request::acquire`].
    ///
    /// # Errors
    /// Those of [`Request::acquire`], such as
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where the engine has no readers.
    pub async fn read(&self) -> Result<RwHold> {
        forever(&self.read).await.map(RwHold)
    }

    /// Takes a read lock if that is possible now; otherwise `None`.
    ///
    /// # Errors
    /// As [`RwLock::read`].
    pub async fn try_read(&self) -> Result<Option<RwHold>> {
        Ok(now(&self.read).await?.map(RwHold))
    }

    /// Waits for a read lock at most this long.
    ///
    /// # Errors
    /// As [`RwLock::read`].
    pub async fn read_timeout(&self, wait: Duration) -> Result<Option<RwHold>> {
        Ok(within(&self.read, wait).await?.map(RwHold))
    }

    /// Waits for the write lock. For cancellation see [`Request::acquire`].
    ///
    /// # Errors
    /// Those of [`Request::acquire`].
    pub async fn write(&self) -> Result<RwHold> {
        forever(&self.write).await.map(RwHold)
    }

    /// Takes the write lock if that is possible now; otherwise `None`.
    ///
    /// # Errors
    /// As [`RwLock::write`].
    pub async fn try_write(&self) -> Result<Option<RwHold>> {
        Ok(now(&self.write).await?.map(RwHold))
    }

    /// Waits for the write lock at most this long.
    ///
    /// # Errors
    /// As [`RwLock::write`].
    pub async fn write_timeout(&self, wait: Duration) -> Result<Option<RwHold>> {
        Ok(within(&self.write, wait).await?.map(RwHold))
    }
}

/// A granted read or write lock of an [`RwLock`]: a [`Hold`] that can be downgraded and upgraded.
#[must_use = "dropping the hold releases the lock"]
#[derive(Debug)]
pub struct RwHold(Hold);

impl RwHold {
    /// Turns a writer into a reader, without letting another writer in between. The token stays.
    /// Readers that are next in line are granted at once. A reader is left unchanged.
    ///
    /// # Cancellation
    /// The lock stays held; whether it was downgraded is unknown.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the engine has no readers; [`ErrorKind::CapacityMismatch`]
    /// when permits wait in the line; [`ErrorKind::Lost`]; those of the engine. The lock stays
    /// held.
    pub async fn downgrade(&mut self) -> Result<()> {
        if self.0.reweigh(Ask::READ, "downgrade").await? {
            return Ok(());
        }
        let message = "permits wait for this name, so it can't become a line of readers";
        Err(Error::new(
            ErrorKind::CapacityMismatch,
            "downgrade",
            message,
        ))
    }

    /// Turns a reader into the writer if nobody else reads; otherwise returns `false`, and the hold
    /// stays a reader. The token stays. It never waits, because two readers that waited for each
    /// other to leave would deadlock.
    ///
    /// # Cancellation
    /// The lock stays held; whether it was upgraded is unknown.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`]; those of the engine. The lock stays held.
    pub async fn try_upgrade(&mut self) -> Result<bool> {
        self.0.reweigh(Ask::Whole, "upgrade").await
    }

    /// Releases the lock; see [`Hold::release`].
    ///
    /// # Errors
    /// Those of [`Hold::release`].
    pub async fn release(self) -> Result<()> {
        self.0.release().await
    }

    /// Converts it to a plain hold, for code that treats all holds alike.
    pub fn into_hold(self) -> Hold {
        self.0
    }
}

impl Deref for RwHold {
    type Target = Hold;

    fn deref(&self) -> &Hold {
        &self.0
    }
}
