//! The verbs that users know. Each is a weight in a line; all that happens is in
//! [`core::acquire`](crate::core::acquire).

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
pub use rwlock::RwLock;
pub use semaphore::Semaphore;

use std::time::Duration;

use crate::core::acquire::Request;
use crate::core::error::{Error, Kind, Result};
use crate::core::hold::Hold;
use crate::core::wait::Patience;

/// Waits as long as it takes.
async fn forever(request: &Request) -> Result<Hold> {
    let hold = request.acquire(Patience::Forever).await?;
    hold.ok_or_else(|| Error::new(Kind::Internal, "acquire", "endless patience came to an end"))
}

/// Does not wait.
async fn now(request: &Request) -> Result<Option<Hold>> {
    request.acquire(Patience::NoWait).await
}

/// Waits this long.
async fn within(request: &Request, wait: Duration) -> Result<Option<Hold>> {
    request.acquire(Patience::For(wait)).await
}
