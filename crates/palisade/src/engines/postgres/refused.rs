//! Why a connection could not be made, and what to do about it. Messages are ours: the server's
//! own may hold names. Each names the host, since a URL may have several.

use std::io;

use tokio_postgres::error::{DbError, SqlState};

use super::pooler;
use crate::core::error::{Error, Kind};
use crate::engines::remote::{Host, about_tls, cause};

/// The name leads nowhere.
pub(super) fn unknown(host: &Host) -> Error {
    let message = format!("the host of {host} can't be found; is its name right?");
    Error::new(Kind::Unreachable, "connect", message)
}

/// Nothing answers at all.
pub(super) fn unreachable(host: &Host, error: &io::Error) -> Error {
    let message = match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            format!("nothing listens at {host}; is PostgreSQL running there, and on this port?")
        }
        kind => format!("{host} can't be reached: {kind}"),
    };
    Error::new(Kind::Unreachable, "connect", message)
}

/// What became of an attempt to connect to `host`.
pub(super) fn why(host: &Host, error: tokio_postgres::Error) -> Error {
    let fail = |kind, message: String| Error::new(kind, "connect", message);
    if let Some(db) = error.as_db_error() {
        return said(host, db);
    }
    if let Some(tls) = cause::<rustls::Error>(&error) {
        return fail(Kind::Config, about_tls(&host.to_string(), "postgres", tls));
    }
    let text = format!("{error}: {:?}", std::error::Error::source(&error));
    if text.contains("does not support TLS") {
        let message = format!(
            "{host} does not speak TLS; switch it on there, or use tls=disable inside a network you trust"
        );
        return fail(Kind::Config, message);
    }
    if text.contains("password missing") {
        let message =
            format!("{host} asks for a password; give it with password_file=FILE or in the URL");
        return fail(Kind::Denied, message);
    }
    match cause::<io::Error>(&error) {
        Some(error) => unreachable(host, error),
        None => fail(
            Kind::Unreachable,
            format!("{host} does not answer as PostgreSQL does; is it another service's port?"),
        ),
    }
}

fn said(host: &Host, db: &DbError) -> Error {
    let fail = |kind, message: String| Error::new(kind, "connect", message);
    let code = db.code();
    // Poolers have one code for many things, and say what they mean in English.
    let says = |text| db.message().contains(text);
    if says("unsupported startup parameter") {
        return pooler::no_session_locks("connect");
    }
    let missing = *code == SqlState::INVALID_AUTHORIZATION_SPECIFICATION
        && db.routine() == Some("InitializeSessionUserId");
    if missing || says("no such user") {
        let message = format!(
            "{host} has no such user that may log in; name another with user=, or CREATE ROLE … LOGIN"
        );
        return fail(Kind::Denied, message);
    }
    if *code == SqlState::INVALID_CATALOG_NAME || says("no such database") {
        let message = format!("{host} has no such database; name it in the URL's path");
        return fail(Kind::Config, message);
    }
    if *code == SqlState::INVALID_PASSWORD {
        let message = format!(
            "{host} refuses this user or this password, and does not say which; is the password in password_file= or in the URL this user's?"
        );
        return fail(Kind::Denied, message);
    }
    if *code == SqlState::INVALID_AUTHORIZATION_SPECIFICATION {
        let message = format!(
            "{host} lets nobody in from here as this user, to this database and with this encryption; see its pg_hba.conf, or try tls=require"
        );
        return fail(Kind::Denied, message);
    }
    if *code == SqlState::INSUFFICIENT_PRIVILEGE {
        let message = format!("this user may not connect to the database at {host}");
        return fail(Kind::Denied, message);
    }
    if *code == SqlState::TOO_MANY_CONNECTIONS {
        let message = format!(
            "{host} has no connection left; raise max_connections there, or put a pooler in front"
        );
        return fail(Kind::Unreachable, message);
    }
    let message = format!("{host} refuses connections (SQLSTATE {})", code.code());
    fail(Kind::Unreachable, message)
}
