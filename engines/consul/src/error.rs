//! The meaning of a refusal or of a failed request.
//!
//! An error says whether the change may have been applied, and who can help: a token or an option
//! needs a fix by people, an unreachable server another attempt. Messages of the HTTP library and
//! of Consul are not repeated, because they may contain addresses and keys.

use reqwest::StatusCode;

use palisade_core::engine::unreachable;
use palisade_core::{Error, ErrorKind};
use palisade_kit::{Broke, Place, about_tls, broken_http};

/// The name of the other side in messages.
pub(super) const WHO: &str = "Consul";

/// The message for a token that the servers don't know.
pub(super) const UNKNOWN_TOKEN: &str = "Consul does not know the ACL token; pass one that exists with token_file= or CONSUL_HTTP_TOKEN";

/// The error for a reply with `status` and `text`, and whether its connection is still usable.
/// `has_token` says whether the request had a token.
pub(super) fn refused(
    operation: &'static str,
    status: StatusCode,
    text: &str,
    has_token: bool,
) -> (Error, bool) {
    let says = |what: &str| text.contains(what);
    let failed = status == StatusCode::INTERNAL_SERVER_ERROR;
    let bad = status == StatusCode::BAD_REQUEST;
    let (kind, message) = match status {
        _ if says("ACL not found") => (ErrorKind::Denied, UNKNOWN_TOKEN),
        StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED => {
            return (denied(operation, has_token), true);
        }
        _ if failed && says("ermission denied") => return (denied(operation, has_token), true),
        StatusCode::TOO_MANY_REQUESTS => (
            ErrorKind::Unreachable,
            "Consul refuses more requests or connections from here; raise the agent's limits.http_max_conns_per_client (200 connections per address by default)",
        ),
        _ if bad && says("Consul Enterprise feature") => (
            ErrorKind::Config,
            "this Consul is the open edition, which has no namespaces; omit consul_namespace (namespace= is palisade's own)",
        ),
        _ if bad && text.is_empty() => (
            ErrorKind::InvalidName,
            "Consul's HTTP server refuses a character in this name; use another name",
        ),
        _ if bad && says("HTTPS") => (
            ErrorKind::Config,
            "this port of Consul speaks TLS; use consuls: in place of consul:",
        ),
        _ if failed && says("Invalid Session TTL") => (
            ErrorKind::InvalidArgument,
            "the servers refuse this ttl: it is below their session_ttl_min (10s by default) or above 24h",
        ),
        _ if failed && says("Missing check") => (
            ErrorKind::Config,
            "option node_checks names a check that the agent's node does not have; see `consul members` and /v1/health/node",
        ),
        _ if failed && says("Check '") && says("state") => (
            ErrorKind::Unreachable,
            "a check that node_checks names is critical, and Consul gives no session until it passes",
        ),
        _ if failed && says("No path to datacenter") => (
            // It answered before, and is down now.
            if operation == "connect" {
                ErrorKind::Config
            } else {
                ErrorKind::Unreachable
            },
            "the agent knows no way to the datacenter that option datacenter names; see `consul catalog datacenters`",
        ),
        _ if failed && says("Missing node registration") => (
            ErrorKind::Unreachable,
            "the agent has not registered its node yet (it has just started, or may not: give it an agent token)",
        ),
        _ if failed && says("No cluster leader") => {
            let message = "the Consul cluster has no leader";
            return (unreachable(operation, message), false);
        }
        status if status.is_server_error() => {
            let text: String = text.trim().chars().take(200).collect();
            let message = format!("Consul answers with status {}: {text:?}", status.as_u16());
            return (unreachable(operation, message).maybe_applied(), false);
        }
        status => {
            let message = format!(
                "Consul refuses the request with status {}; is it Consul at this address, and 1.4 or newer?",
                status.as_u16()
            );
            return (Error::new(ErrorKind::Unusable, operation, message), true);
        }
    };
    (Error::new(kind, operation, message), true)
}

pub(super) fn not_consul(operation: &'static str) -> Error {
    let message = "the answer is none of Consul's; is it Consul at this address?";
    Error::new(ErrorKind::Unusable, operation, message)
}

pub(super) fn denied(operation: &'static str, has_token: bool) -> Error {
    const RIGHTS: &str =
        "key:write on the keys of the namespace and session:write on the agent's node";
    let message = if has_token {
        format!("Consul denies it; give the ACL token {RIGHTS}")
    } else {
        format!(
            "Consul denies it without an ACL token; pass one with token_file= or CONSUL_HTTP_TOKEN that has {RIGHTS}"
        )
    };
    Error::new(ErrorKind::Denied, operation, message)
}

/// The error for a failed connection to `base`.
pub(super) fn broken(operation: &'static str, base: &str, broke: &Broke) -> Error {
    let about_tls = |tls: &_| about_tls(WHO, "consul", tls);
    let place = Place {
        who: WHO,
        nobody: "no Consul agent",
        base,
        with_tls: "consuls: in place of consul:",
        // An agent answers what is beyond its limit with 429, or just closes it.
        closed: "; if many processes here use this agent, raise its limits.http_max_conns_per_client (200 connections per address by default)",
    };
    broken_http(operation, &place, broke, about_tls)
}
