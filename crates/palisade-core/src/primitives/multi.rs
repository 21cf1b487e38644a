//! `MultiLock`: several names at once, all or nothing.
//!
//! Names are locked one after another in sorted order, the same for everyone, so that two
//! multi-locks never deadlock.

use std::future::Future;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::select_all;
use futures_util::stream::FuturesUnordered;

use crate::core::acquire::Request;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::hold::Hold;
use crate::core::owner::Group;
use crate::core::validity::Loss;
use crate::core::wait::Patience;

/// Several locks acquired together. See [`Client::multi_lock`](crate::Client::multi_lock).
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> palisade::Result<()> {
/// let palisade = palisade::connect("memory:").await?;
/// let holds = palisade.multi_lock(["account-7", "account-4"]).lock().await?;
/// assert!(holds.is_valid());
/// holds.release().await
/// # }
/// ```
#[derive(Clone)]
pub struct MultiLock(pub(super) Vec<Request>);

impl MultiLock {
    pub(crate) fn new(mut requests: Vec<Request>) -> Self {
        requests.sort_by(|a, b| a.name.cmp(&b.name));
        // All refused names are equal; each keeps its own reason.
        requests.dedup_by(|a, b| a.name == b.name && a.refused.is_none());
        Self(requests)
    }

    /// Waits for all of them. Those already acquired are held meanwhile.
    ///
    /// # Cancellation
    /// A call that is dropped at any await leaves no place in any line.
    ///
    /// # Errors
    /// Those of [`Request::acquire`]; the locks acquired so far are released.
    pub async fn lock(&self) -> Result<MultiHold> {
        let holds = self.acquire(Patience::Forever).await?;
        holds.ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                "lock",
                "acquire without a deadline returned no hold (bug)",
            )
        })
    }

    /// Locks all of them if all are free now; otherwise `None`, and the locks acquired so far are
    /// released before it returns.
    ///
    /// # Errors
    /// As [`MultiLock::lock`].
    pub async fn try_lock(&self) -> Result<Option<MultiHold>> {
        self.acquire(Patience::NoWait).await
    }

    /// Waits for all of them, at most this long in total.
    ///
    /// # Errors
    /// As [`MultiLock::lock`].
    pub async fn lock_timeout(&self, wait: Duration) -> Result<Option<MultiHold>> {
        self.acquire(Patience::For(wait)).await
    }

    async fn acquire(&self, patience: Patience) -> Result<Option<MultiHold>> {
        if self.0.is_empty() {
            let message = "give at least one name";
            return Err(Error::new(ErrorKind::InvalidArgument, "lock", message));
        }
        if let Some(refused) = self.0.iter().find_map(|request| request.refused.as_ref()) {
            return Err(refused.clone());
        }
        let deadline = patience.deadline();
        let mut holds = MultiHold(Vec::with_capacity(self.0.len()));
        for request in &self.0 {
            // One deadline for all locks.
            let hold = match request.acquire(patience.rest(deadline)).await {
                Ok(Some(hold)) => hold,
                ended => {
                    // A release that takes too long continues in the background.
                    let given_back = holds.release();
                    let _ = patience.bound(deadline, "release", given_back).await;
                    return ended.map(|_| None);
                }
            };
            holds.0.push(hold);
        }
        // The first lock may have been lost while waiting for the last.
        if holds.is_valid() {
            return Ok(Some(holds));
        }
        let message = "a lock was lost while waiting for another";
        Err(Error::new(ErrorKind::Lost, "lock", message))
    }
}

/// Several locks held together: valid while all of them are.
#[must_use = "dropping the holds releases the locks"]
#[derive(Debug)]
pub struct MultiHold(Vec<Hold>);

impl MultiHold {
    /// The holds, sorted by name, each with its own token.
    pub fn holds(&self) -> &[Hold] {
        &self.0
    }

    /// Whether all of them are held now.
    pub fn is_valid(&self) -> bool {
        self.0.iter().all(Hold::is_valid)
    }

    /// The earliest deadline of all holds.
    pub fn deadline(&self) -> BootTime {
        self.0
            .iter()
            .map(Hold::deadline)
            .min()
            .unwrap_or(BootTime::PAST)
    }

    /// Resolves when one of them is lost.
    pub async fn lost(&self) -> Loss {
        if self.0.is_empty() {
            // There is always at least one hold.
            return std::future::pending().await;
        }
        // Each poll polls them all, and so looks at the clock for each.
        select_all(self.0.iter().map(|hold| Box::pin(hold.lost())))
            .await
            .0
    }

    /// Runs `work` while all are held, and drops it unfinished when one is lost.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] when one was lost before the work completed.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let done = tokio::select! {
            biased;
            _ = self.lost() => None,
            done = work => Some(done),
        };
        done.filter(|_| self.is_valid()).ok_or_else(|| {
            Error::new(
                ErrorKind::Lost,
                "run",
                "one of the locks was lost while held",
            )
        })
    }

    /// Releases all of them, in reverse order of acquisition.
    ///
    /// # Errors
    /// The first error of a [`Hold::release`]; the others are released anyway.
    pub async fn release(mut self) -> Result<()> {
        let mut first = Ok(());
        while let Some(hold) = self.0.pop() {
            first = first.and(hold.release().await);
        }
        first
    }
}

/// Locks the first of `requests` that is free, in their order. If patience allows, it then waits
/// for any of them.
pub(crate) async fn any(mut requests: Vec<Request>, patience: Patience) -> Result<Option<Hold>> {
    let deadline = patience.deadline();
    for request in &requests {
        if let Some(hold) = request.acquire(Patience::NoWait).await? {
            return Ok(Some(hold));
        }
    }
    if patience == Patience::NoWait {
        return Ok(None);
    }
    // Deadlock detection must know that one of these claims is enough.
    let group = Group {
        id: ClaimId::random().to_string(),
        size: requests.len(),
    };
    for request in &mut requests {
        request.group = Some(group.clone());
    }
    let rest = patience.rest(deadline);
    let mut waits: FuturesUnordered<_> = requests
        .iter()
        .map(|request| request.acquire(rest))
        .collect();
    while let Some(waited) = waits.next().await {
        // Dropping `waits` drops the other acquires, which leave their lines or release their
        // holds.
        if let Some(hold) = waited? {
            return Ok(Some(hold));
        }
    }
    Ok(None)
}
