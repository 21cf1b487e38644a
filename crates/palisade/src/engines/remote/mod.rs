//! What the engines behind a network share: where a server is, who asks, TLS, connections that
//! fail fast and come back, and findings that hold for all of them.

// Each engine uses its part of this, and a build may have only one of them.
#![allow(dead_code, unused_imports)]

mod findings;
mod host;
mod links;
mod login;
mod refusal;
mod tls;

pub(crate) use findings::{clock_off, plain_text};
pub(crate) use host::Host;
pub(crate) use links::{Link, Links, timed};
pub(crate) use login::{Login, SecretFile};
pub(crate) use refusal::{Asked, about_tls, cause, refuses_ours};
pub(crate) use tls::Tls;

/// The options that every engine behind a network takes beside the common ones.
pub(crate) const OPTIONS: &[&str] = &["password_file", "tls_ca", "tls_cert", "tls_key", "user"];
