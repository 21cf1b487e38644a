//! `Config`: where a gateway listens, who may come in, and how much of everything.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use opentelemetry::global::BoxedTracer;

use crate::audit::Audit;
use crate::metrics::Metrics;

/// How much a principal may have at once.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Sessions.
    pub sessions: usize,
    /// Claims, held or waiting, in all its sessions.
    pub claims: usize,
    /// Requests that wait.
    pub waiting: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sessions: 1_000,
            claims: 10_000,
            waiting: 10_000,
        }
    }
}

/// Where a gateway listens, who may come in, and how much of everything.
#[derive(Debug)]
pub struct Config {
    /// The port; none without an address.
    pub listen: Option<SocketAddr>,
    /// The socket; its folder is made with mode 0700.
    pub socket: Option<PathBuf>,
    /// The file of principals. It governs the socket too.
    pub access: Option<PathBuf>,
    /// The token of the port, where there is no access file.
    pub token: Option<String>,
    /// Certificate chain and key, in PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Whether TLS and access are seen to by something in front of the gateway.
    pub insecure: bool,
    /// What clients call the gateway: what `Host` and `Origin` must be. The first is where a
    /// session's client is told to ask.
    pub public_urls: Vec<String>,
    /// How long sessions are kept after the end was asked for.
    pub drain: Duration,
    /// How much a principal may have.
    pub limits: Limits,
    /// Where audit events go.
    pub audit: Audit,
    /// What `/metrics` shows.
    pub metrics: Metrics,
    /// Who is told of every request, if anybody.
    pub tracer: Option<BoxedTracer>,
}
