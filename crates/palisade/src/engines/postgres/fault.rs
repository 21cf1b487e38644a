//! What a failure of the client library or the server means: its kind, and whether the change it
//! was about may be in force. Messages are ours: the server's own may hold names or values.

use tokio_postgres::error::SqlState;

use crate::core::error::{Error, Kind, Result};

/// What is said of a server that only follows another one.
pub(super) const STANDBY: &str =
    "this server takes no writes: it is a standby; name the primary, or all servers by commas";

/// Whether the server refused because it only follows another one.
pub(super) fn is_standby(error: &Error) -> bool {
    error.message().starts_with(STANDBY)
}

/// What to do about a failed statement.
#[derive(Debug)]
pub(super) enum Remedy {
    /// It was rolled back because of others: the same again may do.
    Again,
    /// The statement is not known here: a pooler gave us another server.
    Unprepared,
    /// The connection is over.
    Reconnect(Error),
    /// Tell the caller.
    Tell(Error),
}

/// The failure of a connection attempt.
pub(super) fn connecting(error: tokio_postgres::Error) -> Error {
    let fail = |kind, message: &str| Error::new(kind, "connect", message);
    let Some(db) = error.as_db_error() else {
        let text = format!("{error}: {:?}", std::error::Error::source(&error));
        if text.contains("does not support TLS") {
            return fail(
                Kind::Config,
                "the server does not speak TLS; switch it on there, or use tls=disable inside a network you trust",
            );
        }
        if text.contains("password missing") {
            return fail(
                Kind::Denied,
                "the server asks for a password; give it with password_file=FILE or in the URL",
            );
        }
        if text.contains("TLS handshake") {
            return fail(
                Kind::Config,
                "TLS can't be agreed on; is tls_ca the authority of the server's certificate, and does the certificate name this host?",
            );
        }
        if text.contains("does not match target_session_attrs")
            || text.contains("read only")
            || text.contains("target_session_attrs")
        {
            return fail(
                Kind::Unreachable,
                "none of the servers takes writes: all are standbys",
            );
        }
        return fail(Kind::Unreachable, "the server can't be reached").because(source_text(&error));
    };
    let code = db.code();
    let class = code.code().get(..2).unwrap_or_default();
    match (code, class) {
        // The server says the same of a user that it does not know, so that nobody can find out.
        (c, _) if *c == SqlState::INVALID_PASSWORD => fail(
            Kind::Denied,
            "the server refuses the password of this user, or does not know the user",
        ),
        (c, _) if *c == SqlState::INVALID_AUTHORIZATION_SPECIFICATION => fail(
            Kind::Denied,
            "the server does not let this user in: there is no such user, or pg_hba.conf has no line for it from here",
        ),
        (c, _) if *c == SqlState::INVALID_CATALOG_NAME => fail(
            Kind::Config,
            "there is no such database; name it in the URL's path",
        ),
        (c, _) if *c == SqlState::INSUFFICIENT_PRIVILEGE => {
            fail(Kind::Denied, "this user may not connect to the database")
        }
        (c, _) if *c == SqlState::TOO_MANY_CONNECTIONS => fail(
            Kind::Unreachable,
            "the server has no connection left; raise max_connections, or put a pooler in front",
        ),
        _ => fail(
            Kind::Unreachable,
            &format!("the server refuses connections (SQLSTATE {})", code.code()),
        ),
    }
}

/// Only what the operating system said: it holds no secret.
fn source_text(error: &tokio_postgres::Error) -> String {
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(io) = inner.downcast_ref::<std::io::Error>() {
            return io.kind().to_string();
        }
        source = inner.source();
    }
    "no answer".to_owned()
}

/// The failure of a statement that may change something.
pub(super) fn asking(operation: &'static str, error: &tokio_postgres::Error) -> Remedy {
    let fail = |kind, message: String| Error::new(kind, operation, message);
    let Some(db) = error.as_db_error() else {
        if error.is_closed()
            || std::error::Error::source(error).is_some_and(|s| s.is::<std::io::Error>())
        {
            let message = "the connection was lost before the answer came".to_owned();
            return Remedy::Reconnect(fail(Kind::Unreachable, message).maybe_applied());
        }
        let message =
            "the server's answer can't be read; is another schema of the same name in use?";
        return Remedy::Tell(fail(Kind::Unusable, message.to_owned()).maybe_applied());
    };
    let state = db.code().code();
    let tell =
        |kind, message: &str| Remedy::Tell(fail(kind, format!("{message} (SQLSTATE {state})")));
    match state {
        "40001" | "40P01" => Remedy::Again,
        "26000" | "42P05" => Remedy::Unprepared,
        "57014" | "55P03" => tell(
            Kind::Unreachable,
            "the server gave the statement up: something keeps the line's row locked, or a timeout of the server is too short",
        ),
        // It takes no writes any more: another of the hosts may.
        "25006" => {
            let message = format!("{STANDBY} (SQLSTATE {state})");
            Remedy::Reconnect(fail(Kind::Unreachable, message))
        }
        "42501" => tell(
            Kind::Denied,
            "this user lacks rights; run the grants that `palisade schema postgres` prints",
        ),
        "3F000" | "42883" | "42P01" | "42703" | "42704" => tell(
            Kind::Unusable,
            "palisade's tables and functions are not there, or others of the same name are; run what `palisade schema postgres` prints",
        ),
        "22021" | "22P05" => tell(
            Kind::InvalidName,
            "the database can't store this name; it should be encoded in UTF8",
        ),
        "53100" => tell(Kind::Unusable, "the server's disk is full"),
        "53200" => tell(
            Kind::Unusable,
            "the server is out of shared memory; raise max_locks_per_transaction",
        ),
        "54000" => tell(
            Kind::Unusable,
            "the line is longer than the server can store",
        ),
        _ if state.starts_with("57P") || state.starts_with("08") => {
            let message = format!("the server ended the connection (SQLSTATE {state})");
            Remedy::Reconnect(fail(Kind::Unreachable, message).maybe_applied())
        }
        _ if state.starts_with("53") => tell(Kind::Unreachable, "the server lacks resources"),
        _ => tell(Kind::Unusable, "the server refuses the statement"),
    }
}

/// The failure of a statement that changes nothing.
pub(super) fn reading(operation: &'static str, error: &tokio_postgres::Error) -> Error {
    match asking(operation, error) {
        Remedy::Reconnect(error) | Remedy::Tell(error) => error,
        Remedy::Again | Remedy::Unprepared => Error::new(
            Kind::Unreachable,
            operation,
            "the server could not finish the statement because of others",
        ),
    }
}

/// An answer that no version of our functions gives.
pub(super) fn unreadable<T>(operation: &'static str) -> Result<T> {
    Err(Error::new(
        Kind::Unusable,
        operation,
        "an answer of another form than ours; are palisade's functions another version's?",
    ))
}
