//! `Validity`: whether one claim is still alive, shared by its hold and the keeper.
//!
//! The keeper updates it; checking it is one clock read and one atomic load. A loss is final: a
//! deadline that has passed is never moved again, so a hold that was seen invalid never becomes
//! valid again, and its holder is notified.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::clock::BootTime;
use super::error::Error;
use super::name::Name;
use super::sync::AtomicU64;
use super::ticket::LeaseStart;

/// Why a hold ended without being released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// No renewal was acknowledged in time. Reported before the engine may grant to another claim.
    Expired,
    /// The engine no longer has it, or its store was moved away or replaced. Another claim may have
    /// been granted already; fencing protects the data.
    Taken,
    /// An operator evicts it. The place is kept until the hold is dropped or its lease ends.
    Evicted,
}

impl LossReason {
    /// The stable name.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Taken => "taken",
            Self::Evicted => "evicted",
        }
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "its lease was not renewed in time",
            Self::Taken => "the engine no longer knows it",
            Self::Evicted => "an operator evicted it",
        })
    }
}

/// The end of a hold that was not released. Its `Display` is a sentence with the reason.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Loss {
    /// The reason.
    pub reason: LossReason,
    /// When the engine may grant to another claim, as far as the holder knows: work must have
    /// stopped by then. Already past unless the reason is [`LossReason::Evicted`].
    pub lease_ends: BootTime,
    why: Option<Error>,
}

impl Loss {
    /// The underlying failure: the last failed renewal, or the engine's message when it revoked the
    /// lease. `None` if nothing failed, as when the process was stopped for longer than the ttl.
    pub fn why(&self) -> Option<&Error> {
        self.why.as_ref()
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)?;
        let mut source: Option<&dyn std::error::Error> = self.why.as_ref().map(|why| why as _);
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

/// The validity of one claim.
#[derive(Debug)]
pub(crate) struct Validity {
    name: Name,
    since: BootTime,
    /// Whether it is a hold, and not a waiting claim.
    granted: AtomicBool,
    deadline: AtomicU64,
    loss: OnceLock<Loss>,
    told: Notify,
}

impl Validity {
    /// The validity of a claim whose enter was acknowledged at `since`.
    pub(crate) fn new(name: Name, armed: LeaseStart, since: BootTime) -> Self {
        Self {
            name,
            granted: AtomicBool::new(false),
            since,
            deadline: AtomicU64::new(armed.deadline().as_nanos()),
            loss: OnceLock::new(),
            told: Notify::new(),
        }
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    /// Marks it as a hold.
    pub(crate) fn grant(&self) {
        self.granted.store(true, Ordering::Release);
    }

    pub(crate) fn is_granted(&self) -> bool {
        self.granted.load(Ordering::Acquire)
    }

    /// When its enter was acknowledged.
    pub(crate) fn since(&self) -> BootTime {
        self.since
    }

    /// The end of its validity; in the past once it is lost.
    pub(crate) fn deadline(&self) -> BootTime {
        BootTime::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// Whether it is valid now. Returning `false` is final: it marks the deadline as passed, so
    /// that a concurrent renewal can't revive the hold.
    pub(crate) fn is_valid(&self) -> bool {
        let mut deadline = self.deadline();
        while deadline.has_passed() {
            match self.replace(deadline, BootTime::PAST) {
                Ok(()) => return false,
                Err(moved) => deadline = moved,
            }
        }
        true
    }

    /// Moves the deadline after an acknowledged renewal. Returns `false` if the deadline has
    /// passed, or if [`Validity::is_valid`] has returned `false`; the caller must then report the
    /// loss.
    pub(crate) fn extend(&self, armed: LeaseStart) -> bool {
        let deadline = self.deadline();
        let later = armed.deadline().max(deadline);
        !deadline.has_passed() && self.replace(deadline, later).is_ok()
    }

    fn replace(&self, old: BootTime, new: BootTime) -> Result<(), BootTime> {
        let (old, new) = (old.as_nanos(), new.as_nanos());
        self.deadline
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(BootTime::from_nanos)
    }

    /// Ends it, and returns whether this call was the first to do so. The first reason stands.
    /// Waiters are woken later, by [`Validity::tell`], which needs no lock of the keeper.
    pub(crate) fn lose(&self, reason: LossReason, why: Option<Error>) -> bool {
        let deadline = self.deadline();
        let lease_ends = match reason {
            LossReason::Evicted => deadline,
            LossReason::Expired | LossReason::Taken => deadline.min(BootTime::now()),
        };
        let loss = Loss {
            reason,
            lease_ends,
            why,
        };
        let first = self.loss.set(loss).is_ok();
        if first {
            self.deadline
                .store(BootTime::PAST.as_nanos(), Ordering::Release);
        }
        first
    }

    /// Wakes the waiters for the loss.
    pub(crate) fn tell(&self) {
        self.told.notify_waiters();
    }

    pub(crate) fn loss(&self) -> Option<&Loss> {
        self.loss.get()
    }

    /// Resolves at the first [`Validity::tell`] from now on. The loss may have been told before.
    pub(super) fn told(&self) -> Notified<'_> {
        self.told.notified()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::core::error::ErrorKind;

    fn name() -> Name {
        Name::new("x").unwrap()
    }

    fn armed(ttl: Duration) -> LeaseStart {
        LeaseStart {
            sent: BootTime::now(),
            ttl,
        }
    }

    #[test]
    fn a_passed_deadline_is_never_moved_again() {
        let validity = Validity::new(
            name(),
            LeaseStart {
                sent: BootTime::PAST,
                ttl: Duration::from_secs(1),
            },
            BootTime::now(),
        );
        assert!(!validity.is_valid());
        assert!(!validity.extend(armed(Duration::from_secs(60))));
        assert!(!validity.is_valid());
    }

    #[test]
    fn the_first_reason_stands_and_a_late_acknowledgement_changes_nothing() {
        let validity = Validity::new(name(), armed(Duration::from_secs(60)), BootTime::now());
        assert!(validity.is_valid());
        validity.lose(LossReason::Evicted, None);
        validity.lose(LossReason::Taken, None);
        assert!(!validity.extend(armed(Duration::from_secs(60))));
        let loss = validity.loss().unwrap();
        assert_eq!(loss.reason, LossReason::Evicted);
        assert!(
            !loss.lease_ends.has_passed(),
            "an evicted hold may wind down"
        );
    }

    #[test]
    fn a_late_answer_to_an_early_renewal_never_shortens_it() {
        let validity = Validity::new(name(), armed(Duration::from_secs(60)), BootTime::now());
        let before = validity.deadline();
        assert!(validity.extend(armed(Duration::from_secs(1))));
        assert_eq!(validity.deadline(), before);
    }
    #[test]
    fn a_loss_says_what_was_behind_it() {
        let validity = Validity::new(name(), armed(Duration::from_secs(60)), BootTime::now());
        let why = Error::new(ErrorKind::Unreachable, "renew", "no answer").because("broken pipe");
        validity.lose(LossReason::Expired, Some(why));
        let loss = validity.loss().unwrap();
        assert_eq!(
            loss.to_string(),
            "its lease was not renewed in time: renew: no answer: broken pipe"
        );
        assert_eq!(loss.why().unwrap().kind(), ErrorKind::Unreachable);
    }
}
