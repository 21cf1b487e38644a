//! Known-bad variants of our own code, which prove that the tests can fail.
//!
//! For tests only: without `--cfg palisade_known_bad` every switch is the constant `false` and
//! compiles to nothing. With it, `PALISADE_KNOWN_BAD=N` in the environment of a process enables one
//! bug, each of which some lock library has shipped. `tests/known_bad.rs` runs named tests once per
//! variant and asserts that they fail.

use std::sync::atomic::{AtomicU64, Ordering};

use super::clock::{BootTime, unix_time};
use super::ticket::LeaseStart;

/// A bug that can be enabled. The numbers are those of `PALISADE_KNOWN_BAD`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bad {
    /// A leave removes any holder of the line.
    LeaveAnyone = 1,
    /// A leave compares the key and not the incarnation.
    LeaveByKey = 2,
    /// A renewal extends any lease that it finds.
    RenewAnyone = 3,
    /// A grant after waiting is accepted though the claim's own lease has ended meanwhile.
    GrantUnchecked = 4,
    /// The deadline counts from the answer, not from before the request.
    DeadlineFromReply = 5,
    /// The deadline is measured with the wall clock.
    WallClock = 6,
    /// The loss is reported at twice the ttl.
    LossAtTwiceTtl = 7,
    /// The renewal continues after the release.
    RenewalSurvivesRelease = 8,
    /// The renewal stops after one error.
    RenewalStopsAtError = 9,
    /// The renewal does not resume after an outage of the engine.
    NoRenewalAfterOutage = 10,
}

/// Whether this bug is enabled in this process.
#[cfg(not(palisade_known_bad))]
pub(crate) const fn is(_: Bad) -> bool {
    false
}

/// Whether this bug is enabled in this process.
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

/// The wall clock, used in place of the lease clock.
pub(crate) fn wall_clock() -> BootTime {
    let nanos = unix_time().as_nanos() as u64;
    BootTime::from_nanos(nanos + STEPPED.load(Ordering::SeqCst))
}

/// Steps the wall clock forward as this process sees it, as an operator or NTP would.
#[cfg(palisade_known_bad)]
pub fn step_wall_clock(by: std::time::Duration) {
    STEPPED.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
}
