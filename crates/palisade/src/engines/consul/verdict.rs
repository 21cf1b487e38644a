//! `Verdict`: what an answer that is no answer means, in our own words.
//!
//! An error says whether the change may have been applied, and whose turn it is: a token or an
//! option is for people, a server that is away is for another try. What the HTTP library and
//! Consul say is never repeated: it may hold addresses and names of keys.

use std::io;

use reqwest::StatusCode;

use crate::core::error::{Error, Kind};
use crate::engines::remote::{about_tls, cause};

/// How we call the other side.
pub(super) const WHO: &str = "Consul";

/// The message for a token that the servers don't have.
pub(super) const UNKNOWN_TOKEN: &str = "Consul does not know the ACL token; pass one that exists with token_file= or CONSUL_HTTP_TOKEN";

/// Who asks, and what for.
pub(super) struct Verdict {
    pub(super) operation: &'static str,
    pub(super) has_token: bool,
}

impl Verdict {
    /// The error that an answer is, and whether its connection is still good; `None` when it is
    /// an answer.
    pub(super) fn of(&self, status: StatusCode, text: &str) -> Option<(Error, bool)> {
        let says = |what: &str| text.contains(what);
        let error = |kind, message: &str| Some((Error::new(kind, self.operation, message), true));
        match status {
            StatusCode::OK | StatusCode::NOT_FOUND | StatusCode::CONFLICT => None,
            _ if says("ACL not found") => error(Kind::Denied, UNKNOWN_TOKEN),
            StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED => {
                Some((denied(self.operation, self.has_token), true))
            }
            StatusCode::TOO_MANY_REQUESTS => error(
                Kind::Unreachable,
                "Consul refuses more requests or connections from here; raise limits.http_max_conns_per_client",
            ),
            StatusCode::BAD_REQUEST if says("Consul Enterprise feature") => error(
                Kind::Config,
                "this Consul is the open edition, which has no namespaces; omit consul_namespace (namespace= is palisade's own)",
            ),
            StatusCode::BAD_REQUEST if text.is_empty() => error(
                Kind::InvalidName,
                "Consul's HTTP server refuses a character in this name; use another name",
            ),
            StatusCode::BAD_REQUEST if says("HTTPS server") => error(
                Kind::Config,
                "this port of Consul speaks TLS; use consuls: in place of consul:",
            ),
            StatusCode::INTERNAL_SERVER_ERROR if says("ermission denied") => {
                Some((denied(self.operation, self.has_token), true))
            }
            StatusCode::INTERNAL_SERVER_ERROR if says("Invalid Session TTL") => error(
                Kind::InvalidArgument,
                "the servers refuse this ttl: it is below their session_ttl_min (10s by default) or above 24h",
            ),
            StatusCode::INTERNAL_SERVER_ERROR if says("Missing check") => error(
                Kind::Config,
                "option node_checks names a check that the agent's node does not have; see `consul members` and /v1/health/node",
            ),
            StatusCode::INTERNAL_SERVER_ERROR if says("Check '") && says("state") => error(
                Kind::Unreachable,
                "a check that node_checks names is critical, and Consul gives no session until it passes",
            ),
            StatusCode::INTERNAL_SERVER_ERROR if says("No path to datacenter") => {
                // One that answered before is away now.
                let kind = match self.operation {
                    "connect" => Kind::Config,
                    _ => Kind::Unreachable,
                };
                error(
                    kind,
                    "the agent knows no way to the datacenter that option datacenter names; see `consul catalog datacenters`",
                )
            }
            StatusCode::INTERNAL_SERVER_ERROR if says("Missing node registration") => error(
                Kind::Unreachable,
                "the agent has not registered its node yet (it has just started, or may not: give it an agent token)",
            ),
            StatusCode::INTERNAL_SERVER_ERROR if says("No cluster leader") => Some((
                unreachable(self.operation, "the Consul cluster has no leader"),
                false,
            )),
            status if status.is_server_error() => {
                let text: String = text.trim().chars().take(200).collect();
                let message = format!("Consul answers with status {}: {text:?}", status.as_u16());
                let error = unreachable(self.operation, &message);
                Some((error.maybe_applied(), false))
            }
            status => {
                let message = format!(
                    "Consul refuses the request with status {}; is it Consul at this address, and 1.4 or newer?",
                    status.as_u16()
                );
                error(Kind::Unusable, &message)
            }
        }
    }
}

pub(super) fn unreachable(operation: &'static str, message: &str) -> Error {
    Error::new(Kind::Unreachable, operation, message)
}

pub(super) fn denied(operation: &'static str, has_token: bool) -> Error {
    let message = match has_token {
        true => {
            "Consul denies it; give the ACL token key:write on the keys of the namespace and session:write on the agent's node"
        }
        false => {
            "Consul denies it without an ACL token; pass one with token_file= or CONSUL_HTTP_TOKEN that has key:write on the keys of the namespace and session:write on the agent's node"
        }
    };
    Error::new(Kind::Denied, operation, message)
}

/// What a connection to `base` that failed means.
pub(super) fn broken(operation: &'static str, base: &str, error: &reqwest::Error) -> Error {
    if let Some(tls) = cause::<rustls::Error>(error) {
        return Error::new(Kind::Config, operation, about_tls(WHO, "consul", tls));
    }
    let why = cause::<io::Error>(error).map_or("", |io| match io.kind() {
        io::ErrorKind::ConnectionRefused => ": the connection is refused",
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            ": there is no way to this host"
        }
        // Of the connection a moment ago; the name of a host otherwise.
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ": it closed the connection",
        _ if error.is_connect() && io.raw_os_error().is_none() => ": the host's name is not known",
        _ => "",
    });
    match error.is_connect() {
        true => unreachable(
            operation,
            &format!("no Consul agent answers at {base}{why}"),
        ),
        false => {
            unreachable(operation, &format!("the connection to {base} broke{why}")).maybe_applied()
        }
    }
}
