//! The engine kit: what engines share, one concept per file.

// Each engine uses some of this, and a build may have only one engine.
#![allow(dead_code, unused_imports)]

pub(crate) mod absent;
pub(crate) mod alarms;
pub(crate) mod cas;
#[cfg(feature = "remote")]
mod files;
#[cfg(feature = "remote")]
mod findings;
pub(crate) mod finish;
#[cfg(feature = "remote")]
mod host;
#[cfg(any(feature = "consul", feature = "http", feature = "kubernetes"))]
mod http;
pub(crate) mod leave;
#[cfg(feature = "remote")]
mod login;
#[cfg(feature = "remote")]
mod per_runtime;
pub(crate) mod poll_watch;
pub(crate) mod push;
mod queue_leases;
#[cfg(feature = "remote")]
pub(crate) mod replies;
#[cfg(any(feature = "file", feature = "remote"))]
mod rooms;
pub(crate) mod shared_sessions;
pub(crate) mod single_flight;
#[cfg(feature = "remote")]
mod tls;
#[cfg(feature = "remote")]
mod tls_error;
pub(crate) mod tombstones;
#[cfg(any(feature = "file", feature = "remote"))]
mod typed;
pub(crate) mod uuid;
#[cfg(feature = "remote")]
mod why;

#[cfg(any(feature = "file", feature = "remote"))]
pub(crate) use typed::typed_config;

pub(crate) use self::queue_leases::renew_by_queue;
#[cfg(any(feature = "file", feature = "remote"))]
pub(crate) use self::rooms::rooms;

#[cfg(feature = "http")]
pub use self::http::plain_http_client;
#[cfg(any(feature = "consul", feature = "http", feature = "kubernetes"))]
pub(crate) use self::http::{
    Answer, Broke, Place, ask_http, body_of, broken_http, http_client, http_client_with, redirected,
};
#[cfg(feature = "remote")]
pub(crate) use self::{
    files::{DOCUMENT, SECRET, read_at_most, read_file, read_text, unread},
    findings::{clock_off, plain_text},
    host::{Host, first_to_answer},
    login::{Login, SecretFile},
    per_runtime::{Link, Pause, PerRuntime, timed},
    tls::Tls,
    tls_error::{Asked, about_tls, authority_as_server, refuses_ours},
    why::{cause, why},
};

/// The options of every engine behind a network, in addition to the common ones.
#[cfg(feature = "remote")]
pub(crate) const OPTIONS: &[&str] = &["password_file", "tls_ca", "tls_cert", "tls_key", "user"];
