//! The fault proxy against small servers that implement each protocol's framing.

#![allow(clippy::unwrap_used)]

#[macro_use]
extern crate palisade_testkit;

mod actions;
mod grpc;
mod protocols;
mod real;
mod rules;
mod transparent;
#[allow(unreachable_pub)]
mod util;
mod verbs;
