//! The Redlock engine: its token as a model, and five real servers that are hurt.

#![allow(clippy::unwrap_used)]

mod interop;
mod kleppmann;
mod model;
mod servers;
mod support;
mod votes;
