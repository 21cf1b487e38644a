//! ZooKeeper for real: beside Curator and kazoo, and hurt in its own ways.

#![allow(clippy::unwrap_used)]

#[macro_use]
extern crate palisade_testkit;

mod access;
mod faults;
mod fence;
mod interop;
mod names;
mod sessions;
mod util;
