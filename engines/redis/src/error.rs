//! Translates the client library's errors. The messages are our own, because a library's may repeat
//! its input.

use std::io;

use redis::RedisError;

use super::connection::Server;
use palisade_core::engine::config_error;
use palisade_core::{Error, ErrorKind};
use palisade_kit::{Host, Login, about_tls, cause};

/// The meaning of the server's first word, or of the word inside a script's error. The server says
/// all of these before it writes anything, except what a script meets halfway.
const WORDS: &[(&str, ErrorKind, &str)] = &[
    (
        "WRONGTYPE",
        ErrorKind::Unusable,
        "a key of this line holds something that is no lock (another type); remove it or use another name",
    ),
    (
        "CORRUPT",
        ErrorKind::Unusable,
        "the records of this line can't be read; delete its key ending in :palisade when nobody holds it",
    ),
    (
        "NEWER",
        ErrorKind::Unusable,
        "the records of this line were written by a newer palisade; update this one, or use another namespace",
    ),
    (
        "NOSCRIPT",
        ErrorKind::Unreachable,
        "the server forgot its scripts again and again",
    ),
    (
        "OOM",
        ErrorKind::Unusable,
        "the server is out of memory (maxmemory); give it more",
    ),
    (
        "MISCONF",
        ErrorKind::Unusable,
        "the server can't save to its disk and takes no writes",
    ),
    (
        "READONLY",
        ErrorKind::Unreachable,
        "this server is a read-only replica; the URL must name the primary",
    ),
    (
        "LOADING",
        ErrorKind::Unreachable,
        "the server is still loading its data",
    ),
    (
        "MASTERDOWN",
        ErrorKind::Unreachable,
        "this server is a replica that has lost its primary",
    ),
    (
        "NOREPLICAS",
        ErrorKind::Unreachable,
        "the server has too few good replicas to take writes (min-replicas-to-write)",
    ),
    (
        "BUSY",
        ErrorKind::Unreachable,
        "the server is busy with a long script",
    ),
    (
        "NOPERM",
        ErrorKind::Denied,
        "the user may not do this; see the rights that the docs of this engine list",
    ),
    (
        "NOAUTH",
        ErrorKind::Denied,
        "the server asks for a password",
    ),
    (
        "WRONGPASS",
        ErrorKind::Denied,
        "the server refuses this user and password",
    ),
    (
        "MOVED",
        ErrorKind::Unsupported,
        "this server is part of a Redis Cluster; use redis+cluster:",
    ),
    (
        "ASK",
        ErrorKind::Unsupported,
        "this server is part of a Redis Cluster; use redis+cluster:",
    ),
    (
        "TRYAGAIN",
        ErrorKind::Unreachable,
        "the slot of this name is being moved to another server",
    ),
    (
        "CLUSTERDOWN",
        ErrorKind::Unreachable,
        "the Redis Cluster has lost servers and takes no requests",
    ),
];

fn word_in(text: &str) -> Option<&'static (&'static str, ErrorKind, &'static str)> {
    let has = |word: &str| {
        text.split(|c: char| !c.is_ascii_uppercase())
            .any(|found| found == word)
    };
    WORDS.iter().find(|(word, ..)| has(word))
}

/// Whether the connection is no longer usable.
pub(crate) fn is_broken(error: &RedisError) -> bool {
    error.is_connection_dropped()
        || error.is_unrecoverable_error()
        || matches!(error.kind(), redis::ErrorKind::Io | redis::ErrorKind::Parse)
        // Another server may be the primary by now.
        || error.code() == Some("READONLY")
}

/// Whether the server did not know the script.
pub(crate) fn is_no_script(error: &RedisError) -> bool {
    error.code() == Some("NOSCRIPT")
}

/// The error for a failure of `operation`.
pub(crate) fn fault(operation: &'static str, error: &RedisError) -> Error {
    let plain = |kind, message: &str| Error::new(kind, operation, message);
    let said = error.code().and_then(word_in);
    let said = said.or_else(|| error.detail().and_then(word_in));
    if let Some((_, kind, message)) = said {
        return plain(*kind, message);
    }
    if error
        .detail()
        .is_some_and(|detail| detail.contains("non local key"))
    {
        // The script met a key that has migrated before its line's own key.
        let message = "the slot of this name is being moved to another server";
        return plain(ErrorKind::Unreachable, message).maybe_applied();
    }
    match error.kind() {
        redis::ErrorKind::AuthenticationFailed => plain(
            ErrorKind::Denied,
            "the server refuses this user and password",
        ),
        redis::ErrorKind::InvalidClientConfig => {
            plain(ErrorKind::Config, "the connection can't be set up so")
        }
        redis::ErrorKind::RESP3NotSupported => plain(
            ErrorKind::Unusable,
            "this server is too old; Redis 6.2 or Valkey is needed",
        ),
        redis::ErrorKind::Server(_) | redis::ErrorKind::Extension => {
            let code = error.code().unwrap_or("ERR").to_owned();
            plain(ErrorKind::Unusable, "the server refuses the request")
                .with("code", code)
                .maybe_applied()
        }
        _ => plain(ErrorKind::Unreachable, "the connection broke").maybe_applied(),
    }
}

/// The error for a failed TCP connection.
pub(crate) fn no_tcp(host: &Host, error: &io::Error) -> Error {
    let message = match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            format!("{host} refuses connections; is the server running there?")
        }
        // The library has no error kind for it.
        _ if error.to_string().contains("lookup") => {
            format!("{host} is not known; is the name of the host right?")
        }
        _ => format!("{host} can't be reached"),
    };
    Error::new(ErrorKind::Unreachable, "connect", message).because(error.to_string())
}

/// The error for a failed TLS handshake.
pub(crate) fn no_tls(host: &Host, error: &io::Error) -> Error {
    match cause::<rustls::Error>(error) {
        Some(tls) => {
            let message = about_tls(&format!("Redis at {host}"), "redis", tls);
            config_error(message)
        }
        None => {
            let message = format!("{host} broke off the TLS handshake; is it a port for TLS?");
            Error::new(ErrorKind::Unreachable, "connect", message).because(error.to_string())
        }
    }
}

/// The error for a refused login.
pub(crate) fn no_login(server: &Server, login: &Login, error: &RedisError) -> Error {
    let host = &server.host;
    let denied = |what: &str| Error::new(ErrorKind::Denied, "connect", format!("{host} {what}"));
    let said = error.detail().unwrap_or_default();
    match error.code() {
        Some("WRONGPASS") => denied(match (&login.user, &login.password) {
            (Some(_), Some(_)) => {
                "refuses this user: it is unknown or disabled, or the password is wrong"
            }
            (Some(_), None) => {
                "refuses this user without a password; give it with password_file=, and see that the user exists"
            }
            _ => "refuses this password of its default user; does another user need to be named?",
        }),
        Some("NOAUTH") => denied("asks for a password; give it with password_file="),
        _ if said.contains("DB index") => config_error(format!(
            "{host} has no database {}; its setting databases says how many there are",
            server.db
        )),
        _ if said.contains("SELECT is not allowed") => config_error(format!(
            "{host} is in cluster mode and has no database but 0; name no other in the URL"
        )),
        _ => no_connection(host, error),
    }
}

/// The error for a failure while connecting; nothing was requested yet.
pub(crate) fn no_connection(host: &Host, error: &RedisError) -> Error {
    if let Some(tls) = cause::<rustls::Error>(error) {
        let message = about_tls(&format!("Redis at {host}"), "redis", tls);
        return config_error(message);
    }
    let fault = fault("connect", error);
    let message = match error.kind() {
        redis::ErrorKind::Io | redis::ErrorKind::Parse => {
            "does not answer as Redis does; if it is a port for TLS, use rediss:"
        }
        _ => fault.message(),
    };
    Error::new(fault.kind(), "connect", format!("{host}: {message}"))
}
