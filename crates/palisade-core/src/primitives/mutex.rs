//! `Mutex`: the whole line, one holder at a time.

use std::time::Duration;

use super::{forever, now, within};
use crate::core::acquire::Request;
use crate::core::error::Result;
use crate::core::hold::Hold;

/// A mutual exclusion lock among all users of the same engine and name.
///
/// Waiters are served in order of arrival if the engine is [fair](crate::Capability::fair). Not
/// reentrant: a second `lock` by the same client waits.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:").await?;
/// let hold = palisade.mutex("nightly-report").lock().await?;
/// // Give the token to the storage with every write; it refuses the write of a stale holder.
/// println!("holding {} with token {}", hold.name(), hold.token());
/// hold.run(async { /* the work, dropped at once if the lock is lost */ }).await?;
/// hold.release().await
/// # }
/// ```
#[derive(Clone)]
pub struct Mutex(pub(crate) Request);

impl Mutex {
    /// Waits for the lock without limit, even while the engine can't be reached.
    ///
    /// # Cancellation
    /// A call that is dropped at any await leaves no place in the line.
    ///
    /// # Errors
    /// Those of [`Request::acquire`].
    pub async fn lock(&self) -> Result<Hold> {
        forever(&self.0).await
    }

    /// Locks if the lock is free now; otherwise `None`.
    ///
    /// # Errors
    /// Those of [`Request::acquire`]; if the engine can't be reached, the error is immediate.
    pub async fn try_lock(&self) -> Result<Option<Hold>> {
        now(&self.0).await
    }

    /// Waits for the lock at most this long; `None` if it did not become free.
    ///
    /// # Cancellation
    /// A call that is dropped at any await leaves no place in the line.
    ///
    /// # Errors
    /// Those of [`Request::acquire`].
    pub async fn lock_timeout(&self, wait: Duration) -> Result<Option<Hold>> {
        within(&self.0, wait).await
    }
}
