//! A gateway in a separate process, in front of real engines, under faults: killed, stopped,
//! drained, partitioned from its engine and from its clients.
//!
//! All tests check that **no client relies on a lock that another has been granted.** A client may
//! rely on it for the answer's `valid_ms`, counted from before the request was sent.
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
