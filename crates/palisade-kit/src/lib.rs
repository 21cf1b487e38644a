//! What the engines of palisade share, one concept per file: connections that are kept and made anew,
//! TLS, logins, an HTTP client, pushes, retries of conditional writes, fenced stores and the SQL of
//! fenced rows.
//!
//! **What it may use**: `palisade_core`, and the clients that its features name. It names no engine.
//!
//! **Where to start reading**: [`rooms`](rooms!), which says what the rooms of an engine are; then
//! the pieces that the engine at hand calls.

pub mod absent;
pub mod asked;
pub mod cas;
pub mod fence_store;
#[cfg(feature = "tls")]
mod files;
#[cfg(feature = "tls")]
mod findings;
pub mod finish;
#[cfg(feature = "tls")]
mod host;
#[cfg(feature = "http")]
mod http;
pub mod leave;
#[cfg(feature = "tls")]
mod login;
#[cfg(feature = "tls")]
mod per_runtime;
pub mod poll_watch;
pub mod push;
mod queue_leases;
#[cfg(feature = "tls")]
pub mod replies;
mod rooms;
pub mod shared_sessions;
pub mod single_flight;
pub mod sql;
#[cfg(feature = "tls")]
mod tls;
#[cfg(feature = "tls")]
mod tls_error;
mod typed;
pub mod uuid;
#[cfg(feature = "tls")]
mod why;

pub use palisade_core::engine::{alarms, tombstones};

pub use self::queue_leases::renew_by_queue;

#[cfg(feature = "http")]
pub use self::http::{
    Answer, Broke, Place, ask_http, body_of, broken_http, http_client, http_client_with,
    plain_http_client, redirected,
};
#[cfg(feature = "tls")]
pub use self::{
    files::{DOCUMENT, SECRET, read_at_most, read_file, read_text, unread},
    findings::{clock_off, plain_text},
    host::{Host, first_to_answer},
    login::{Login, SecretFile},
    per_runtime::{Link, Pause, PerRuntime, timed},
    tls::Tls,
    tls_error::{Asked, about_tls, authority_as_server, refuses_ours},
    why::{cause, why},
};

#[cfg(feature = "tls")]
#[doc(hidden)]
pub use rustls;

/// The options of every engine behind a network, in addition to the common ones.
#[cfg(feature = "tls")]
pub const OPTIONS: &[&str] = &["password_file", "tls_ca", "tls_cert", "tls_key", "user"];
