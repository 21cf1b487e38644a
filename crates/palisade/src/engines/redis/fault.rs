//! From the client library's errors to ours. The texts are our own: a library's may repeat what
//! it was given.

use redis::{ErrorKind, RedisError};

use crate::core::error::{Error, Kind};
use crate::engines::remote::{about_tls, cause};

/// What the server's first word, or the word inside the report of a script, stands for.
/// All of these are said before anything is written, except what a script met half way.
const WORDS: &[(&str, Kind, &str)] = &[
    (
        "WRONGTYPE",
        Kind::Unusable,
        "a key of this line holds something that is no lock (another type); remove it or use another name",
    ),
    (
        "CORRUPT",
        Kind::Unusable,
        "the records of this line can't be read; delete its key ending in :palisade when nobody holds it",
    ),
    (
        "NOSCRIPT",
        Kind::Unreachable,
        "the server forgot its scripts again and again",
    ),
    (
        "OOM",
        Kind::Unusable,
        "the server is out of memory (maxmemory); give it more",
    ),
    (
        "MISCONF",
        Kind::Unusable,
        "the server can't save to its disk and takes no writes",
    ),
    (
        "READONLY",
        Kind::Unreachable,
        "this server is a read-only replica; the URL must name the primary",
    ),
    (
        "LOADING",
        Kind::Unreachable,
        "the server is still loading its data",
    ),
    (
        "MASTERDOWN",
        Kind::Unreachable,
        "this server is a replica that has lost its primary",
    ),
    (
        "NOREPLICAS",
        Kind::Unreachable,
        "the server has too few good replicas to take writes (min-replicas-to-write)",
    ),
    (
        "BUSY",
        Kind::Unreachable,
        "the server is busy with a long script",
    ),
    (
        "NOPERM",
        Kind::Denied,
        "the user may not do this; see the rights that the docs of this engine list",
    ),
    ("NOAUTH", Kind::Denied, "the server asks for a password"),
    (
        "WRONGPASS",
        Kind::Denied,
        "the server refuses this user and password",
    ),
    (
        "MOVED",
        Kind::Unsupported,
        "this server is part of a Redis Cluster, which redis: does not speak",
    ),
    (
        "ASK",
        Kind::Unsupported,
        "this server is part of a Redis Cluster, which redis: does not speak",
    ),
    (
        "CLUSTERDOWN",
        Kind::Unsupported,
        "this server is part of a Redis Cluster, which redis: does not speak",
    ),
];

fn word_in(text: &str) -> Option<&'static (&'static str, Kind, &'static str)> {
    let has = |word: &str| {
        text.split(|c: char| !c.is_ascii_uppercase())
            .any(|found| found == word)
    };
    WORDS.iter().find(|(word, ..)| has(word))
}

/// Whether the connection is of no more use.
pub(super) fn is_broken(error: &RedisError) -> bool {
    error.is_connection_dropped()
        || error.is_unrecoverable_error()
        || matches!(error.kind(), ErrorKind::Io | ErrorKind::Parse)
        // The primary may be elsewhere by now.
        || error.code() == Some("READONLY")
}

/// Whether the server did not know the script.
pub(super) fn is_no_script(error: &RedisError) -> bool {
    error.code() == Some("NOSCRIPT")
}

/// What `operation` ran into.
pub(super) fn fault(operation: &'static str, error: &RedisError) -> Error {
    let plain = |kind, message: &str| Error::new(kind, operation, message);
    let said = error.code().and_then(word_in);
    let said = said.or_else(|| error.detail().and_then(word_in));
    if let Some((_, kind, message)) = said {
        return plain(*kind, message);
    }
    match error.kind() {
        ErrorKind::AuthenticationFailed => {
            plain(Kind::Denied, "the server refuses this user and password")
        }
        ErrorKind::InvalidClientConfig => plain(Kind::Config, "the connection can't be set up so"),
        ErrorKind::RESP3NotSupported => plain(
            Kind::Unusable,
            "this server is too old; Redis 6.2 or Valkey is needed",
        ),
        ErrorKind::Server(_) | ErrorKind::Extension => {
            let code = error.code().unwrap_or("ERR").to_owned();
            plain(Kind::Unusable, "the server refuses the request")
                .with("code", code)
                .maybe_applied()
        }
        _ => plain(Kind::Unreachable, "the connection broke").maybe_applied(),
    }
}

/// What a script says that it ran into, in the middle of its work.
pub(super) fn refused(operation: &'static str, why: &str) -> Error {
    match word_in(why) {
        Some((_, kind, message)) => Error::new(*kind, operation, *message),
        None => {
            let message = "the server refuses the request";
            Error::new(Kind::Unusable, operation, message).maybe_applied()
        }
    }
}

/// What connecting ran into: nothing was asked for yet.
pub(super) fn no_connection(error: &RedisError) -> Error {
    if let Some(tls) = cause::<rustls::Error>(error) {
        return Error::new(Kind::Config, "connect", about_tls("Redis", "redis", tls));
    }
    let fault = fault("connect", error);
    match fault.kind() {
        Kind::Unreachable => {
            let message = match error.is_connection_refusal() {
                true => "the server refuses connections; is it running there?",
                false if word_in(error.code().unwrap_or_default()).is_some() => fault.message(),
                false => "the server can't be reached, or TLS with it fails",
            };
            Error::new(Kind::Unreachable, "connect", message)
        }
        kind => Error::new(kind, "connect", fault.message()),
    }
}
