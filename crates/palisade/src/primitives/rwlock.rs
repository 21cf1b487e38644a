//! `RwLock`: a reader takes 1 of many, a writer the whole line.

use std::ops::Deref;
use std::time::Duration;

use super::{forever, now, within};
use crate::core::acquire::Request;
use crate::core::claim::Ask;
use crate::core::error::{Error, ErrorKind, Result};
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
    /// Waits to read. Errors and cancellation as in [`Request::acquire`].
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where the engine has no readers.
    pub async fn read(&self) -> Result<RwHold> {
        forever(&self.read).await.map(RwHold)
    }

    /// Reads if that is possible now; `None` when it is not.
    ///
    /// # Errors
    /// As [`RwLock::read`].
    pub async fn try_read(&self) -> Result<Option<RwHold>> {
        Ok(now(&self.read).await?.map(RwHold))
    }

    /// Waits to read at most this long.
    ///
    /// # Errors
    /// As [`RwLock::read`].
    pub async fn read_timeout(&self, wait: Duration) -> Result<Option<RwHold>> {
        Ok(within(&self.read, wait).await?.map(RwHold))
    }

    /// Waits to write. Errors and cancellation as in [`Request::acquire`].
    ///
    /// # Errors
    /// Those of [`Request::acquire`].
    pub async fn write(&self) -> Result<RwHold> {
        forever(&self.write).await.map(RwHold)
    }

    /// Writes if that is possible now; `None` when it is not.
    ///
    /// # Errors
    /// As [`RwLock::write`].
    pub async fn try_write(&self) -> Result<Option<RwHold>> {
        Ok(now(&self.write).await?.map(RwHold))
    }

    /// Waits to write at most this long.
    ///
    /// # Errors
    /// As [`RwLock::write`].
    pub async fn write_timeout(&self, wait: Duration) -> Result<Option<RwHold>> {
        Ok(within(&self.write, wait).await?.map(RwHold))
    }
}

/// A granted read or write of an [`RwLock`]: a [`Hold`] that can change its kind.
#[must_use = "dropping the hold releases the lock"]
#[derive(Debug)]
pub struct RwHold(Hold);

impl RwHold {
    /// Makes a writer a reader, without letting anyone write in between. The token stays;
    /// readers that wait next in line hold at once. A reader stays one.
    ///
    /// # Cancellation
    /// The hold stays a hold; whether it was downgraded is not known.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the engine has no readers; [`ErrorKind::CapacityMismatch`] when
    /// permits wait in the line; [`ErrorKind::Lost`]; those of the engine. The hold is kept.
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

    /// Makes a reader the one writer, if nobody else reads: `false` otherwise, and the hold goes
    /// on reading. The token stays. It never waits: two readers waiting for each other to leave
    /// would wait for ever.
    ///
    /// # Cancellation
    /// The hold stays a hold; whether it was upgraded is not known.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`]; those of the engine. The hold is kept.
    pub async fn try_upgrade(&mut self) -> Result<bool> {
        self.0.reweigh(Ask::Whole, "upgrade").await
    }

    /// Gives the place up; see [`Hold::release`].
    ///
    /// # Errors
    /// As there.
    pub async fn release(self) -> Result<()> {
        self.0.release().await
    }

    /// The plain hold, for code that treats all holds alike.
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
