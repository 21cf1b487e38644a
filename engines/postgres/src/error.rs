//! The meaning of a failed statement or connection: the kind of error, whether the change may have
//! been applied, and what to do about it. The messages are our own, because the server's may
//! contain names or values.

use std::io;

use tokio_postgres::error::{DbError, SqlState};

use super::{pooler, queue};
use palisade_core::engine::no_connection;
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::sql;
use palisade_kit::{Host, about_tls, cause};

/// The message for a standby.
pub(super) const STANDBY: &str =
    "this server takes no writes: it is a standby; name the primary, or all servers by commas";

/// Whether the server refused because it is a standby.
pub(super) fn is_standby(error: &Error) -> bool {
    error.message().starts_with(STANDBY)
}

/// The message for a token that a fenced row refuses.
const STALE: &str = "the fencing token is stale";

/// Whether a fenced row refused the token.
pub(super) fn is_stale(error: &Error) -> bool {
    error.message().starts_with(STALE)
}

/// The message for a server, or a pooler, whose connections are all in use.
const FULL: &str = "has no connection left; raise max_connections there, or put a pooler in front (a process that waits or holds takes two)";

/// Whether the server refused because its connections are all in use.
pub(super) fn is_full(error: &Error) -> bool {
    error.message().ends_with(FULL)
}

/// What to do about a failed statement.
#[derive(Debug)]
pub(super) enum Remedy {
    /// It was rolled back because of a conflict: retry.
    Retry,
    /// This session has not prepared it: a pooler has assigned another session.
    Unprepared,
    /// The connection has ended.
    Reconnect(Error),
    /// Return it to the caller.
    Fail(Error),
}

/// What to do about the failure of a statement that may change something.
pub(super) fn remedy(operation: &'static str, error: &tokio_postgres::Error) -> Remedy {
    let Some(db) = error.as_db_error() else {
        if error.is_closed() || cause::<io::Error>(error).is_some() {
            let message = "the connection was lost before the answer came";
            let lost = Error::new(ErrorKind::Unreachable, operation, message);
            return Remedy::Reconnect(lost.maybe_applied());
        }
        let message =
            "the server's answer can't be read; is another schema of the same name in use?";
        return Remedy::Fail(Error::new(ErrorKind::Unusable, operation, message).maybe_applied());
    };
    let state = db.code().code();
    let fail = |kind, text: &str| Error::new(kind, operation, format!("{text} (SQLSTATE {state})"));
    let (kind, text) = match state {
        "40001" | "40P01" => return Remedy::Retry,
        "26000" | "42P05" => return Remedy::Unprepared,
        // Another host may be the primary.
        "25006" => return Remedy::Reconnect(fail(ErrorKind::Unreachable, STANDBY)),
        _ if state.starts_with("57P") || state.starts_with("08") => {
            let ended = fail(ErrorKind::Unreachable, "the server ended the connection");
            return Remedy::Reconnect(ended.maybe_applied());
        }
        "57014" | "55P03" => (
            ErrorKind::Unreachable,
            "the server gave the statement up: something keeps the row locked, or a timeout of the server is too short",
        ),
        "42501" => (
            ErrorKind::Denied,
            "this user lacks rights; let an owner run what `palisade schema postgres --user USER` prints, with this user's name (and --schema, if the URL has schema=)",
        ),
        "3F000" | "42883" | "42P01" | "42703" | "42704" => (
            ErrorKind::Unusable,
            "palisade's tables and functions are missing, or others of the same name are there; run what `palisade schema postgres` prints",
        ),
        "22021" | "22P05" => (
            ErrorKind::InvalidName,
            "the database can't store this name; it should be encoded in UTF8",
        ),
        sql::STALE => (ErrorKind::Lost, STALE),
        queue::LOST => (
            ErrorKind::Lost,
            "the message was lost, another consumer may have it",
        ),
        "0A000" => (
            ErrorKind::Unsupported,
            "messages with a key can be pushed and done in READ COMMITTED only, not in this transaction",
        ),
        "53100" => (ErrorKind::Unusable, "the server's disk is full"),
        "53200" => (
            ErrorKind::Unusable,
            "the server is out of shared memory; raise max_locks_per_transaction",
        ),
        "54000" => (
            ErrorKind::Unusable,
            "the line is longer than the server can store",
        ),
        _ if state.starts_with("53") => (ErrorKind::Unreachable, "the server lacks resources"),
        _ => (ErrorKind::Unusable, "the server refuses the statement"),
    };
    Remedy::Fail(fail(kind, text))
}

/// The error of a statement that is not retried.
pub(super) fn failed(operation: &'static str, error: &tokio_postgres::Error) -> Error {
    match remedy(operation, error) {
        Remedy::Reconnect(error) | Remedy::Fail(error) => error,
        Remedy::Retry | Remedy::Unprepared => Error::new(
            ErrorKind::Unreachable,
            operation,
            "the server could not finish the statement because of others",
        ),
    }
}

/// The error for a reply that no version of our functions gives.
pub(super) fn unreadable<T>(operation: &'static str) -> Result<T> {
    Err(Error::new(
        ErrorKind::Unusable,
        operation,
        "unexpected reply from the server; are palisade's functions another version's?",
    ))
}

/// The error for a host name that can't be resolved.
pub(super) fn unknown_host(host: &Host) -> Error {
    let message = format!("the host of {host} can't be found; is its name right?");
    no_connection(message)
}

/// The error for a host that can't be reached.
pub(super) fn unreachable(host: &Host, error: &io::Error) -> Error {
    let message = match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            format!("nothing listens at {host}; is PostgreSQL running there, and on this port?")
        }
        kind => format!("{host} can't be reached: {kind}"),
    };
    no_connection(message)
}

/// The error for a failed connection to `host`. It names the host, because a URL may have several.
pub(super) fn connecting(host: &Host, error: &tokio_postgres::Error) -> Error {
    if let Some(db) = error.as_db_error() {
        return refused(host, db);
    }
    let text = format!("{error}: {:?}", std::error::Error::source(error));
    let (kind, message) = if let Some(tls) = cause::<rustls::Error>(error) {
        (
            ErrorKind::Config,
            about_tls(&host.to_string(), "postgres", tls),
        )
    } else if text.contains("does not support TLS") {
        let message = format!(
            "{host} does not speak TLS; switch it on there, or use tls=disable inside a network you trust"
        );
        (ErrorKind::Config, message)
    } else if text.contains("password missing") {
        let message =
            format!("{host} asks for a password; pass it with password_file=FILE or in the URL");
        (ErrorKind::Denied, message)
    } else if let Some(error) = cause::<io::Error>(error) {
        return unreachable(host, error);
    } else {
        let message =
            format!("{host} does not answer as PostgreSQL does; is it another service's port?");
        (ErrorKind::Unreachable, message)
    };
    Error::new(kind, "connect", message)
}

/// The error for a refusal by the server.
fn refused(host: &Host, db: &DbError) -> Error {
    let code = db.code();
    // Poolers use one code for many errors, and only their message tells them apart.
    let says = |text| db.message().contains(text);
    if says("unsupported startup parameter") {
        return pooler::no_session_locks("connect");
    }
    let no_such_user = says("no such user")
        || (*code == SqlState::INVALID_AUTHORIZATION_SPECIFICATION
            && db.routine() == Some("InitializeSessionUserId"));
    let (kind, text) = if no_such_user {
        (
            ErrorKind::Denied,
            "has no such user that may log in; name another with user=, or CREATE ROLE … LOGIN",
        )
    } else if *code == SqlState::INVALID_CATALOG_NAME || says("no such database") {
        (
            ErrorKind::Config,
            "has no such database; name it in the URL's path",
        )
    } else if *code == SqlState::INVALID_PASSWORD {
        (
            ErrorKind::Denied,
            "refuses this user or this password, and does not say which; is the password in password_file= or in the URL this user's?",
        )
    } else if *code == SqlState::INVALID_AUTHORIZATION_SPECIFICATION {
        (
            ErrorKind::Denied,
            "lets nobody in from here as this user, to this database and with this encryption; see its pg_hba.conf, or try tls=require",
        )
    } else if *code == SqlState::INSUFFICIENT_PRIVILEGE {
        (
            ErrorKind::Denied,
            "does not let this user connect to the database",
        )
    } else if *code == SqlState::TOO_MANY_CONNECTIONS || says("no more connections allowed") {
        (ErrorKind::Unreachable, FULL)
    } else {
        let message = format!("{host} refuses connections (SQLSTATE {})", code.code());
        return no_connection(message);
    };
    Error::new(kind, "connect", format!("{host} {text}"))
}
