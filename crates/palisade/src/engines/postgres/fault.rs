//! What a failure of the client library or the server means: its kind, and whether the change it
//! was about may be in force. Messages are ours: the server's own may hold names or values.

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
