//! Palisade's locks over HTTP: one door to an engine, for every language.
//!
//! A client opens a session and claims names in it; the gateway has the places, with the
//! library's keeper behind them. Every answer about a claim says how long the client may believe
//! in it, and that is never longer than the engine keeps it: a gateway that is killed at any
//! moment leaves nobody believing in what another may be granted.
//!
//! ```text
//! connection ─▶ routes ─▶ access (who) ─▶ session ─▶ claim (a task that has the place) ─▶ library
//! ```
//!
//! It knows the library and no single engine.

#![warn(missing_debug_implementations)]

mod access;
mod answer;
mod audit;
mod claim;
mod config;
mod events;
mod limits;
mod metrics;
mod openapi;
mod problem;
mod routes;
mod server;
mod session;
mod sessions;
mod socket;
mod spans;
mod timed;
mod wire;

pub use access::new_token;
pub use audit::Audit;
pub use config::{Config, Limits};
pub use metrics::Metrics;
pub use server::Gateway;
pub use socket::private_folder;
