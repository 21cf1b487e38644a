//! The engine kit: what several engines need, written once.

// Each engine uses its part of this, and a build may have only one of them.
#![allow(dead_code)]

pub(crate) mod cas;
pub(crate) mod finish;
pub(crate) mod shared_sessions;
pub(crate) mod single_flight;
