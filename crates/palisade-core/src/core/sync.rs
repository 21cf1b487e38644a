//! The locks, the timers and the keeper's thread, in one place so that tests can replace them. With
//! `--cfg palisade_shuttle` (for tests only) a scheduler decides which thread runs next at every
//! lock, atomic and clock read, and time advances only when the test says so.
//!
//! `tests/orderings.rs` drives the core that way. Nothing else works in such a build.

#[cfg(not(palisade_shuttle))]
mod real;
#[cfg(not(palisade_shuttle))]
pub use real::*;

#[cfg(palisade_shuttle)]
mod shuttle;
#[cfg(palisade_shuttle)]
pub use self::shuttle::*;

/// Advances the test's clock, and wakes all sleepers.
#[cfg(palisade_shuttle)]
pub fn advance(by: std::time::Duration) {
    shuttle::advance(by);
}
