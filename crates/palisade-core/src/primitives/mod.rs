//! The primitives that users know. Each is a weight in a line; the logic is in `core/acquire.rs`.

mod election;
mod multi;
mod mutex;
mod reentrant;
mod rwlock;
mod semaphore;

pub use election::{Elected, Election, Leader, Leadership};
pub(crate) use multi::any;
pub use multi::{MultiHold, MultiLock};
pub use mutex::Mutex;
pub use reentrant::{ReentrantHold, ReentrantMutex};
pub use rwlock::{RwHold, RwLock};
pub use semaphore::Semaphore;

use std::time::Duration;

use crate::core::acquire::Request;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::hold::Hold;
use crate::core::wait::{Patience, Retry};

/// Generates the options that every primitive has. `$requests` iterates over the primitive's
/// requests.
macro_rules! options {
    ($name:ident, $self:ident => $requests:expr) => {
        impl $name {
            fn each(mut $self, mut change: impl FnMut(&mut Request)) -> Self {
                $requests.for_each(|request| change(request));
                $self
            }

            /// Sets how long it lasts without renewal; the library renews automatically. A ttl
            /// outside the engine's range is refused when the primitive is used.
            #[must_use]
            pub fn ttl(self, ttl: Duration) -> Self {
                self.each(|request| *request = request.clone().ttl(ttl))
            }

            /// Keeps a granted hold for at least this long; see [`Request::at_least`].
            #[must_use]
            pub fn at_least(self, at_least: Duration) -> Self {
                self.each(|request| *request = request.clone().at_least(at_least))
            }

            /// Lets a granted hold expire; see [`Request::unrenewed`].
            #[must_use]
            pub fn unrenewed(self) -> Self {
                self.each(|request| *request = request.clone().unrenewed())
            }

            /// Sets when a waiting agent checks for deadlocks, `None` for never; see
            /// [`Request::deadlock_after`].
            #[must_use]
            pub fn deadlock_after(self, after: impl Into<Option<Duration>>) -> Self {
                let after = after.into();
                self.each(|request| *request = request.clone().deadlock_after(after))
            }

            /// Sets how to retry when the engine can't be reached or has no line to wait in.
            #[must_use]
            pub fn retry(self, retry: Retry) -> Self {
                self.each(|request| *request = request.clone().retry(retry))
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    };
}

options!(Mutex, self => std::iter::once(&mut self.0));
options!(RwLock, self => [&mut self.read, &mut self.write].into_iter());
options!(Semaphore, self => std::iter::once(&mut self.0));
options!(Election, self => std::iter::once(&mut self.request));
options!(ReentrantMutex, self => std::iter::once(&mut self.request));
options!(MultiLock, self => self.0.iter_mut());

/// Waits without limit.
async fn forever(request: &Request) -> Result<Hold> {
    let hold = request.acquire(Patience::Forever).await?;
    hold.ok_or_else(|| {
        Error::new(
            ErrorKind::Internal,
            "acquire",
            "acquire without a deadline returned no hold (bug)",
        )
    })
}

/// Does not wait.
async fn now(request: &Request) -> Result<Option<Hold>> {
    request.acquire(Patience::NoWait).await
}

/// Waits at most this long.
async fn within(request: &Request, wait: Duration) -> Result<Option<Hold>> {
    request.acquire(Patience::For(wait)).await
}
