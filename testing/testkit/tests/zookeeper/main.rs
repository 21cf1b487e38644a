//! ZooKeeper on real servers: with Curator and kazoo, and under its own kinds of faults.

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
