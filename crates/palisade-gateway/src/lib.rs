//! Palisade's locks over HTTP: a gateway to an engine, for programs in any language.
//!
//! A client opens a session and claims names in it. The gateway holds the places in the lines, and
//! the library's keeper renews them. Every response about a claim carries a *promise*: how long the
//! client may rely on the claim. It never exceeds the engine's lease, so that if the gateway is
//! killed at any moment, no client believes that it holds what another is granted.
//!
//! ```text
//! connection ─▶ routes ─▶ access (who) ─▶ session ─▶ claim (a task that has the place) ─▶ library
//! ```
//!
//! It depends on the library and on no particular engine.

#![warn(missing_debug_implementations)]

mod access;
mod answer;
mod audit;
mod claim;
mod config;
mod connections;
mod events;
mod fields;
mod files;
mod limits;
mod metrics;
mod openapi;
mod pool;
mod problem;
mod routes;
mod server;
mod session;
mod sessions;
mod socket;
mod spans;
mod timed;
mod tls;
mod wire;
mod written;

pub use access::new_token;
pub use audit::Audit;
pub use config::{Config, Limits};
pub use files::distrusted;
pub use metrics::Metrics;
pub use server::Gateway;
pub use sessions::Stays;
pub use socket::private_folder;
