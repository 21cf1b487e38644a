//! The core: one primitive, a weighted place in a fair line, and what keeps and watches it.
//! It names no engine and no primitive.
//!
//! The main flow: [`acquire`] enters an [`engine`], which asks [`admission`]; [`wait`] says how
//! often to look; a granted ticket becomes a [`hold`], which the keeper renews until it is left.

pub mod acquire;
pub mod admission;
#[cfg(feature = "baseline")]
pub mod baseline;
pub mod capability;
pub mod claim;
pub mod clock;
pub mod duration;
pub mod dyn_engine;
pub mod engine;
pub mod error;
pub mod events;
pub mod hold;
pub(crate) mod keeper;
#[cfg(not(palisade_known_bad))]
mod known_bad;
/// Known-bad variants of our own code, for tests only.
#[cfg(palisade_known_bad)]
#[doc(hidden)]
pub mod known_bad;
pub mod line;
pub mod name;
pub mod owner;
mod place;
pub mod registry;
pub mod report;
#[cfg(not(palisade_shuttle))]
pub(crate) mod sync;
/// Locks, timers and threads that a test schedules.
#[cfg(palisade_shuttle)]
#[doc(hidden)]
pub mod sync;
pub mod ticket;
pub mod token;
pub mod url;
pub mod validity;
pub mod wait;
