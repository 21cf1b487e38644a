//! Known-bad variants of our own code, so that tests can prove that they see.
//!
//! For tests only: without `--cfg palisade_known_bad` every switch is the constant `false` and
//! compiles to nothing. With it, `PALISADE_KNOWN_BAD=N` in the environment of a process breaks
//! that process in one way, each a mistake that some lock library has shipped.
//! `tests/known_bad.rs` runs named tests once per variant and asserts that they fail.

use std::sync::atomic::{AtomicU64, Ordering};

use super::clock::{BootTime, unix_time};
use super::ticket::LeaseStart;

/// One way to be wrong. The numbers are those of `PALISADE_KNOWN_BAD`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bad {
    /// A leave removes whoever holds the line.
    LeaveAnyone = 1,
    /// A leave compares the key and not the incarnation.
    LeaveByKey = 2,
    /// A renewal renews whatever it finds.
    RenewAnyone = 3,
    /// A grant after waiting is taken though our own lease has ended meanwhile.
    GrantUnchecked = 4,
    /// The deadline counts from the answer, not from before the request.
    DeadlineFromReply = 5,
    /// The deadline is measured with the wall clock.
    WallClock = 6,
    /// The loss is told at twice the ttl.
    LossAtTwiceTtl = 7,
    /// The renewal goes on after the release.
    RenewalSurvivesRelease = 8,
    /// The renewal stops after one error.
    RenewalStopsAtError = 9,
    /// The renewal does not come back after the engine was away for a while.
    NoRenewalAfterOutage = 10,
}

/// Whether this process is to be wrong in this way.
#[cfg(not(palisade_known_bad))]
pub(crate) const fn is(_: Bad) -> bool {
    false
}

/// Whether this process is to be wrong in this way.
#[cfg(palisade_known_bad)]
pub(crate) fn is(bad: Bad) -> bool {
    static CHOSEN: std::sync::LazyLock<Option<u8>> = std::sync::LazyLock::new(|| {
        let chosen = std::env::var("PALISADE_KNOWN_BAD").ok()?.parse().ok();
        eprintln!("palisade is broken on purpose: PALISADE_KNOWN_BAD={chosen:?}");
        chosen
    });
    *CHOSEN == Some(bad as u8)
}

/// Whether a failed renewal is to be the last one.
pub(crate) fn gives_up_renewing(armed: LeaseStart) -> bool {
    is(Bad::RenewalStopsAtError)
        || is(Bad::NoRenewalAfterOutage) && (armed.sent + armed.ttl / 2).has_passed()
}

/// How far the wall clock was stepped, in nanoseconds.
static STEPPED: AtomicU64 = AtomicU64::new(0);

/// The wall clock, taken for the clock of leases.
pub(crate) fn wall_clock() -> BootTime {
    let nanos = unix_time().as_nanos() as u64;
    BootTime::from_nanos(nanos + STEPPED.load(Ordering::SeqCst))
}

/// Steps the wall clock forward as this process sees it, as an operator or NTP would.
#[cfg(palisade_known_bad)]
pub fn step_wall_clock(by: std::time::Duration) {
    STEPPED.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
}
