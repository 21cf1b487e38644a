//! The Redis engine on real servers: network faults, states of the server, other tools.

#![allow(clippy::unwrap_used)]

#[macro_use]
extern crate palisade_testkit;

mod data;
mod faults;
mod interop;
mod many;
mod server;
mod sets;
mod support;
mod surveys;
