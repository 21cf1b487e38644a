//! `Config`: where a gateway listens, who has access, and the limits.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use opentelemetry::global::BoxedTracer;

use crate::audit::Audit;
use crate::metrics::Metrics;

/// The limits of each principal, and of those that are unknown.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Sessions.
    pub sessions: usize,
    /// Claims, held or waiting, in all its sessions.
    pub claims: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Connections from one address that have not shown a valid token; 0 for any number, for a
    /// gateway behind a proxy.
    pub per_peer: usize,
    /// The longest ttl of a session. An engine may have to wait for it after a reboot.
    pub ttl: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sessions: 1_000,
            claims: 10_000,
            waiting: 10_000,
            per_peer: 64,
            ttl: Duration::from_secs(24 * 3600),
        }
    }
}

/// Where a gateway listens, who has access, and the limits.
#[derive(Debug)]
pub struct Config {
    /// The port; none without an address.
    pub listen: Option<SocketAddr>,
    /// The socket; its folder is created with mode 0700.
    pub socket: Option<PathBuf>,
    /// The file of principals. It governs the socket too.
    pub access: Option<PathBuf>,
    /// The token of the port, if there is no access file.
    pub token: Option<String>,
    /// Certificate chain and key, in PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Whether a proxy in front of the gateway provides TLS and access control.
    pub insecure: bool,
    /// The URLs that clients use: what `Host` and `Origin` must be. Sessions are told to use the
    /// first.
    pub public_urls: Vec<String>,
    /// How long sessions are kept while the gateway drains.
    pub drain: Duration,
    /// The limits of each principal, and of those that are unknown.
    pub limits: Limits,
    /// Where audit events go.
    pub audit: Audit,
    /// The metrics that `/metrics` exports.
    pub metrics: Metrics,
    /// The tracer for requests, if any.
    pub tracer: Option<BoxedTracer>,
}
