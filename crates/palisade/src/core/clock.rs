//! `BootTime`: the clock that every lease is measured with.
//!
//! It is CLOCK_BOOTTIME where the system has it: monotonic, never stepped, and running on while
//! the machine sleeps, so that a lid closed for a minute counts as a minute of the lease.
//! Two processes of one boot read the same clock; across machines only differences mean anything.

use std::ops::Add;
use std::time::{Duration, Instant, UNIX_EPOCH};

use super::known_bad::{self, Bad};
use super::sync;

/// Unix time by this machine's clock. For people, and a floor for tokens: no lease is measured with
/// it.
pub(crate) fn unix_time() -> Duration {
    UNIX_EPOCH.elapsed().unwrap_or_default()
}

/// A point in time of this boot, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootTime(u64);

impl BootTime {
    /// The start of the clock: a deadline that has always passed.
    pub const PAST: Self = Self(0);
    /// A deadline that never passes.
    pub const NEVER: Self = Self(u64::MAX);

    /// Reads the clock. Costs tens of nanoseconds and never fails.
    pub fn now() -> Self {
        if known_bad::is(Bad::WallClock) {
            return known_bad::wall_clock();
        }
        Self(sync::nanos())
    }

    /// The point in time that `nanos` stands for, as an engine stored it.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the start of the clock.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// How long until this point, or zero when it has passed.
    pub fn remaining(self) -> Duration {
        self.saturating_since(Self::now())
    }

    /// How long after `earlier` this point lies, or zero when it does not.
    pub fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This point for a timer: as far from `Instant::now()` as it is from now. An `Instant` may
    /// stand still while the machine sleeps, so ask anew after each renewal and never keep it.
    pub fn to_instant(self) -> Instant {
        let now = Instant::now();
        // A deadline that never passes is some years away for a timer.
        let far = Duration::from_secs(u64::from(u32::MAX));
        now + self.remaining().min(far)
    }

    /// Whether this point lies behind us.
    pub fn has_passed(self) -> bool {
        Self::now() >= self
    }
}

impl Add<Duration> for BootTime {
    type Output = Self;

    fn add(self, later: Duration) -> Self {
        let nanos = u64::try_from(later.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_runs_forward_and_never_wraps() {
        let before = BootTime::now();
        assert!(BootTime::now() >= before);
        assert_eq!(before + Duration::MAX, BootTime::NEVER);
        assert_eq!(BootTime::PAST.remaining(), Duration::ZERO);
        assert!(BootTime::PAST.to_instant() <= Instant::now());
        assert!(BootTime::NEVER.to_instant() > Instant::now());
        assert!(BootTime::PAST.has_passed() && !BootTime::NEVER.has_passed());
    }
}
