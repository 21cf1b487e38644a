//! `ReentrantMutex`: a lock that its owner may lock again while holding it.
//!
//! The owner is this handle and its clones, never a thread: tasks move between threads, and two
//! tasks on one thread are not the same owner.

use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::core::acquire::Request;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::hold::Hold;
use crate::core::wait::Patience;

/// A lock that the same handle may lock again at once, with the same token. It is free again when
/// every [`ReentrantHold`] of the handle is released.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:").await?;
/// let mine = palisade.reentrant("inventory");
/// let outer = mine.lock().await?;
/// let inner = mine.lock().await?; // at once
/// assert_eq!(outer.token(), inner.token());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct ReentrantMutex {
    pub(super) request: Request,
    /// The hold of this handle. The mutex is held across an acquire, so that two tasks of one
    /// handle make one claim.
    held: Arc<tokio::sync::Mutex<Weak<Hold>>>,
}

impl ReentrantMutex {
    pub(crate) fn new(request: Request) -> Self {
        Self {
            request,
            held: Arc::default(),
        }
    }

    /// Locks; at once if this handle holds the lock already.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when this handle's hold was lost and is not released yet; those of
    /// [`Request::acquire`].
    pub async fn lock(&self) -> Result<ReentrantHold> {
        let hold = self.acquire(Patience::Forever).await?;
        hold.ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                "lock",
                "acquire without a deadline returned no hold (bug)",
            )
        })
    }

    /// Locks if the lock is free now, or held by this handle.
    ///
    /// # Errors
    /// As [`ReentrantMutex::lock`].
    pub async fn try_lock(&self) -> Result<Option<ReentrantHold>> {
        self.acquire(Patience::NoWait).await
    }

    /// Waits for the lock at most this long.
    ///
    /// # Errors
    /// As [`ReentrantMutex::lock`].
    pub async fn lock_timeout(&self, wait: Duration) -> Result<Option<ReentrantHold>> {
        self.acquire(Patience::For(wait)).await
    }

    async fn acquire(&self, patience: Patience) -> Result<Option<ReentrantHold>> {
        let deadline = patience.deadline();
        let mut held = match patience {
            Patience::Forever => self.held.lock().await,
            Patience::NoWait => match self.held.try_lock() {
                Ok(held) => held,
                Err(_) => return Ok(None),
            },
            Patience::For(wait) => match tokio::time::timeout(wait, self.held.lock()).await {
                Ok(held) => held,
                Err(_) => return Ok(None),
            },
        };
        if let Some(hold) = held.upgrade() {
            return if hold.is_valid() {
                Ok(Some(ReentrantHold(hold)))
            } else {
                Err(hold.lost_error("lock"))
            };
        }
        let Some(hold) = self.request.acquire(patience.rest(deadline)).await? else {
            return Ok(None);
        };
        let hold = Arc::new(hold);
        *held = Arc::downgrade(&hold);
        Ok(Some(ReentrantHold(hold)))
    }
}

/// One level of a reentrant lock. All levels of a handle share one [`Hold`]; dropping the last one
/// releases it in the background.
#[must_use = "dropping it gives this taking back"]
#[derive(Debug)]
pub struct ReentrantHold(Arc<Hold>);

impl ReentrantHold {
    /// How many levels the handle holds now.
    pub fn depth(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Releases this level; the last one releases the lock.
    ///
    /// # Errors
    /// As [`Hold::release`].
    pub async fn release(self) -> Result<()> {
        match Arc::into_inner(self.0) {
            Some(hold) => hold.release().await,
            None => Ok(()),
        }
    }
}

impl Deref for ReentrantHold {
    type Target = Hold;

    fn deref(&self) -> &Hold {
        &self.0
    }
}
