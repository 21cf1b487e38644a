//! The core: one primitive, a weighted place in a fair line, and the code that renews and monitors
//! it. It names no engine and no primitive.
//!
//! The main flow: [`acquire`] enters an [`engine`], which asks [`admission`]; [`wait`] bounds how
//! often a waiter re-checks; a granted ticket becomes a [`hold`], which the keeper renews until it
//! is left.

pub(crate) mod acquire;
pub(crate) mod admission;
pub mod alarms;
#[cfg(feature = "baseline")]
pub(crate) mod baseline;
pub(crate) mod capability;
pub(crate) mod claim;
pub(crate) mod clock;
pub(crate) mod deadlock;
pub(crate) mod duration;
pub(crate) mod dyn_engine;
pub(crate) mod engine;
pub(crate) mod entry;
pub(crate) mod error;
pub(crate) mod events;
pub(crate) mod hold;
pub(crate) mod keeper;
pub(crate) mod known_bad;
pub(crate) mod leasing;
pub(crate) mod line;
pub(crate) mod lookout;
pub(crate) mod name;
pub(crate) mod owner;
mod place;
pub(crate) mod queue;
pub(crate) mod registry;
pub(crate) mod report;
pub mod sync;
pub(crate) mod ticket;
pub(crate) mod token;
pub mod tombstones;
pub(crate) mod url;
pub(crate) mod validity;
pub(crate) mod wait;
