//! Consul for real: beside its own tools, and hurt in its own ways.

#![allow(clippy::unwrap_used)]

#[macro_use]
extern crate palisade_testkit;

mod access;
mod crowd;
mod faults;
mod interop;
mod names;
mod sessions;
mod util;
