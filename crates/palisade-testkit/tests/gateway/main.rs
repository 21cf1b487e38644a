//! A gateway as a process of its own, in front of real engines, under faults: killed, stopped,
//! drained, cut off from its engine and from its clients.
//!
//! What is asked of all of them: **no client believes in a lock that another has been granted.**
//! A belief is what the answer's `valid_ms` allows, counted from before the request was sent.
//!
//! `PALISADE_TEST_FULL=1` kills fifty gateways on every engine.

#![allow(clippy::unwrap_used)]

mod clients;
mod drain;
mod killed;
mod outage;
mod process;
mod proxied;
mod support;
mod tls;
