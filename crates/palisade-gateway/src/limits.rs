//! `Counters`: the usage and the limits of each principal.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use palisade::command::rounded;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::access::Principal;
use crate::config::Limits;
use crate::problem::Problem;

/// How many ended claims may be remembered for each claim that may be in a line: some 90 MiB. A
/// client that locks and releases 10,000 times a second fills this in 50 s of its ttl.
const REMEMBERED: usize = 50;
/// How much may be stored with all claims of a principal, in bytes for each that it may have. It is
/// in memory about three times.
const BYTES: usize = 2 * 1024;
/// Never less than this for all of them.
const LEAST_BYTES: usize = 1024 * 1024;
/// How many great requests of a principal are handled at a time: each keeps a processor busy for
/// some milliseconds.
const GREAT_REQUESTS: usize = 4;
/// How much of the bodies of a principal's requests may be in memory at a time.
pub(crate) const BODIES: u32 = 16 * 1024 * 1024;

/// See the module's documentation.
pub(crate) struct Counters {
    limits: Limits,
    by_principal: Mutex<HashMap<String, Counts>>,
}

#[derive(Clone)]
struct Counts {
    claims: Arc<AtomicUsize>,
    bytes: Arc<AtomicUsize>,
    remembered: Arc<AtomicUsize>,
    waiting: Arc<AtomicUsize>,
    great: Arc<Semaphore>,
    bodies: Arc<Semaphore>,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            claims: Arc::default(),
            bytes: Arc::default(),
            remembered: Arc::default(),
            waiting: Arc::default(),
            great: Arc::new(Semaphore::new(GREAT_REQUESTS)),
            bodies: Arc::new(Semaphore::new(BODIES as usize)),
        }
    }
}

impl Counters {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            by_principal: Mutex::default(),
        }
    }

    fn of(&self, principal: &Principal) -> Counts {
        let mut all = self.by_principal.lock();
        // Names come from the access file, so that their number is bounded.
        all.entry(principal.name.clone()).or_default().clone()
    }

    /// The ttl of a session that asks for none, or for `asked`.
    pub(crate) fn ttl(
        &self,
        asked: Option<Duration>,
        default: Duration,
    ) -> Result<Duration, Problem> {
        let longest = self.limits.ttl;
        match asked {
            None => Ok(default.min(longest)),
            Some(ttl) if ttl <= longest => Ok(ttl),
            Some(ttl) => Err(Problem::bad_request(format!(
                "`ttl` may be at most {} at this gateway (--max-ttl), not {}",
                rounded(longest),
                rounded(ttl)
            ))),
        }
    }

    /// The longest ttl of a session.
    pub(crate) fn longest_ttl(&self) -> Duration {
        self.limits.ttl
    }

    pub(crate) fn check_sessions(&self, open: usize) -> Result<(), Problem> {
        if open < self.limits.sessions {
            Ok(())
        } else {
            Err(Problem::too_many("sessions", self.limits.sessions))
        }
    }

    /// The number of claims that a principal may have.
    pub(crate) fn most_claims(&self) -> usize {
        self.limits.claims
    }

    /// Counts a claim that stores so many bytes until all are dropped: the first two while it is in
    /// a line, the third while it is remembered.
    pub(crate) fn claim(
        &self,
        principal: &Principal,
        bytes: usize,
    ) -> Result<([Counted; 2], Counted), Problem> {
        let Limits { claims, .. } = self.limits;
        let counts = self.of(principal);
        let claim = Counted::below(&counts.claims, 1, claims)
            .ok_or_else(|| Problem::too_many("claims", claims))?;
        let most = claims.saturating_mul(BYTES).max(LEAST_BYTES);
        let what = "bytes of values, owners and labels";
        let bytes = Counted::below(&counts.bytes, bytes, most)
            .ok_or_else(|| Problem::too_many(what, most))?;
        Ok(([claim, bytes], self.remembered(principal)?))
    }

    /// Waits until a great request of this principal may be handled.
    pub(crate) async fn great_request(
        &self,
        principal: &Principal,
    ) -> Option<OwnedSemaphorePermit> {
        // It is never closed.
        self.of(principal).great.acquire_owned().await.ok()
    }

    /// Waits until a body of this length may be in memory.
    pub(crate) async fn body(
        &self,
        principal: &Principal,
        bytes: u32,
    ) -> Option<OwnedSemaphorePermit> {
        let bodies = self.of(principal).bodies;
        bodies.acquire_many_owned(bytes.min(BODIES)).await.ok()
    }

    /// Counts a claim that is over, or was released before it arrived, until it is forgotten.
    pub(crate) fn remembered(&self, principal: &Principal) -> Result<Counted, Problem> {
        let remembered = self.limits.claims.saturating_mul(REMEMBERED);
        let what = "claims that are over and remembered for a ttl";
        Counted::below(&self.of(principal).remembered, 1, remembered)
            .ok_or_else(|| Problem::too_many(what, remembered))
    }

    /// Counts a request that waits, or a stream of events, until it is dropped.
    pub(crate) fn waiting(&self, principal: &Principal) -> Result<Counted, Problem> {
        let Limits { waiting, .. } = self.limits;
        Counted::below(&self.of(principal).waiting, 1, waiting)
            .ok_or_else(|| Problem::too_many("waiting requests", waiting))
    }
}

/// Something that is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<AtomicUsize>, usize);

impl Counted {
    /// Counts so many more, unless there are more than `limit` then.
    fn below(count: &Arc<AtomicUsize>, more: usize, limit: usize) -> Option<Self> {
        let add = |now: usize| now.checked_add(more).filter(|count| *count <= limit);
        let counted = count.fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
        counted.ok().map(|_| Self(Arc::clone(count), more))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::AcqRel);
    }
}
