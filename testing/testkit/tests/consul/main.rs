//! Consul on real servers: with its own tools, and under its own kinds of faults.

#![allow(clippy::unwrap_used)]

#[macro_use]
extern crate palisade_testkit;

mod access;
mod crowd;
mod faults;
mod interop;
mod limits;
mod names;
mod sessions;
mod util;
