//! The Redlock engine: a model of its token, and five real servers under faults.

#![allow(clippy::unwrap_used)]

mod interop;
mod kleppmann;
mod model;
mod servers;
mod support;
mod votes;
