//! The blocking [`Hold`].

use std::ops::Deref;
use std::time::Duration;

use super::runtime::wait;
use crate::core::error::Result;
use crate::core::pulse::Loss;

/// A granted place; see [`palisade::Hold`](crate::Hold), whose `token()`, `is_valid()`,
/// `remaining()` and the like it has too. Dropping it releases in the background.
#[must_use = "dropping the hold releases the lock"]
#[derive(Debug)]
pub struct Hold(pub(super) crate::Hold);

impl Hold {
    /// Waits at most this long for a loss; `None` when there was none.
    ///
    /// # Errors
    /// [`Kind::WouldBlock`](crate::Kind::WouldBlock).
    pub fn lost_within(&self, limit: Duration) -> Result<Option<Loss>> {
        wait(async { tokio::time::timeout(limit, self.0.lost()).await.ok() })
    }

    /// As [`downgrade`](crate::Hold::downgrade).
    ///
    /// # Errors
    /// As there, and [`Kind::WouldBlock`](crate::Kind::WouldBlock).
    pub fn downgrade(&mut self) -> Result<()> {
        wait(self.0.downgrade())?
    }

    /// As [`try_upgrade`](crate::Hold::try_upgrade).
    ///
    /// # Errors
    /// As there, and [`Kind::WouldBlock`](crate::Kind::WouldBlock).
    pub fn try_upgrade(&mut self) -> Result<bool> {
        wait(self.0.try_upgrade())?
    }

    /// As [`release`](crate::Hold::release).
    ///
    /// # Errors
    /// As there, and [`Kind::WouldBlock`](crate::Kind::WouldBlock), when it is released in the
    /// background.
    pub fn release(self) -> Result<()> {
        wait(self.0.release())?
    }
}

impl Deref for Hold {
    type Target = crate::Hold;

    fn deref(&self) -> &crate::Hold {
        &self.0
    }
}
