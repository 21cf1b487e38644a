//! `BootTime`: the clock that every lease is measured with.
//!
//! It is CLOCK_BOOTTIME where the system has it: monotonic, never stepped, and running while the
//! machine is suspended, so that a minute of suspend counts as a minute of the lease. Two processes
//! of one boot read the same clock. Across machines only differences are meaningful.

use std::ops::Add;
use std::time::{Duration, Instant, UNIX_EPOCH};

use super::known_bad::{self, Bad};
use super::sync;

/// Unix time by this machine's clock: for display, and as a lower bound of tokens. No lease is
/// measured with it.
pub fn unix_time() -> Duration {
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

    /// The point in time that an engine stored as `nanos`.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the start of the clock.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time until this point, or zero if it has passed.
    pub fn remaining(self) -> Duration {
        self.saturating_since(Self::now())
    }

    /// The time from `earlier` to this point, or zero if this point is not later.
    pub fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Converts this point to a timer's clock, by its distance from now. An `Instant` may stand
    /// still during suspend, so convert again after each renewal and don't keep the result.
    pub fn to_instant(self) -> Instant {
        let now = Instant::now();
        // Caps a deadline that never passes, since `Instant` would overflow.
        let far = Duration::from_secs(u64::from(u32::MAX));
        now + self.remaining().min(far)
    }

    /// Whether this point has passed.
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
