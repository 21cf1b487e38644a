//! ZooKeeper for real: beside Curator and kazoo, and hurt in its own ways.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod util;

mod access;
mod faults;
mod interop;
mod names;
mod sessions;
