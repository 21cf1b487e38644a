//! `Counters`: the usage and the limits of each principal.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::access::Principal;
use crate::config::Limits;
use crate::problem::Problem;

/// How many ended claims may be remembered for each claim that may be in a line. A client that
/// locks and releases 10,000 times a second fills this in 100 s of its ttl.
const REMEMBERED: usize = 100;

/// See the module's documentation.
pub(crate) struct Counters {
    limits: Limits,
    by_principal: Mutex<HashMap<String, Counts>>,
}

#[derive(Default, Clone)]
struct Counts {
    claims: Arc<AtomicUsize>,
    remembered: Arc<AtomicUsize>,
    waiting: Arc<AtomicUsize>,
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

    pub(crate) fn check_sessions(&self, open: usize) -> Result<(), Problem> {
        if open < self.limits.sessions {
            Ok(())
        } else {
            Err(Problem::too_many("sessions", self.limits.sessions))
        }
    }

    /// Counts a claim until both are dropped: the first while it is in a line, the second while it
    /// is remembered.
    pub(crate) fn claim(&self, principal: &Principal) -> Result<(Counted, Counted), Problem> {
        let Limits { claims, .. } = self.limits;
        let claim = Counted::below(&self.of(principal).claims, claims)
            .ok_or_else(|| Problem::too_many("claims", claims))?;
        Ok((claim, self.remembered(principal)?))
    }

    /// Counts a claim that is over, or was released before it arrived, until it is forgotten.
    pub(crate) fn remembered(&self, principal: &Principal) -> Result<Counted, Problem> {
        let remembered = self.limits.claims.saturating_mul(REMEMBERED);
        let what = "claims that are over and remembered for a ttl";
        Counted::below(&self.of(principal).remembered, remembered)
            .ok_or_else(|| Problem::too_many(what, remembered))
    }

    /// Counts a request that waits, or a stream of events, until it is dropped.
    pub(crate) fn waiting(&self, principal: &Principal) -> Result<Counted, Problem> {
        let Limits { waiting, .. } = self.limits;
        Counted::below(&self.of(principal).waiting, waiting)
            .ok_or_else(|| Problem::too_many("waiting requests", waiting))
    }
}

/// Something that is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<AtomicUsize>);

impl Counted {
    /// Counts one more, unless there are `limit`.
    fn below(count: &Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        let more = |now| (now < limit).then_some(now + 1);
        let counted = count.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        counted.ok().map(|_| Self(Arc::clone(count)))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
