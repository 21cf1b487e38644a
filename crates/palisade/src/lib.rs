//! Distributed locks and coordination, the same everywhere.
pub mod core;
pub mod engines;
