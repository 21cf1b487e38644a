//! For transactions of sqlx: tokens for fenced tables, a hold as a condition, and locks that last
//! as long as a transaction. They do the same as their namesakes for tokio-postgres.

use ::sqlx::{Error as SqlxError, Postgres, Transaction};

use super::guard::{self, Guard};
use palisade_core::fence::{Verdict, WriteToken};
use palisade_core::{Error, ErrorKind, Hold, Result};
use palisade_kit::sql;

/// As [`present`](super::present).
///
/// # Errors
/// As there.
pub async fn present(transaction: &mut Transaction<'_, Postgres>, token: WriteToken) -> Result<()> {
    let presented = ::sqlx::query(sql::PRESENT)
        .bind(token.stored()?.to_string())
        .execute(&mut **transaction);
    presented.await.map(drop).map_err(|e| failed("fence", e))
}

/// As [`refused`](super::refused).
pub fn refused(error: &SqlxError) -> Option<Verdict> {
    let db = error.as_database_error()?;
    let detail = db
        .try_downcast_ref::<::sqlx::postgres::PgDatabaseError>()
        .and_then(|error| error.detail());
    sql::refused(&db.code()?, detail)
}

/// As [`PostgresHold::postgres_guard`](super::PostgresHold::postgres_guard).
///
/// # Errors
/// As there.
pub async fn guard(transaction: &mut Transaction<'_, Postgres>, hold: &Hold) -> Result<()> {
    let guard = Guard::of(hold)?;
    let asked = ::sqlx::query(&guard.sql)
        .bind(guard.namespace)
        .bind(guard.name)
        .bind(guard.claim)
        .bind(guard.sequence)
        .execute(&mut **transaction);
    asked.await.map(drop).map_err(|e| failed("guard", e))
}

/// As [`is_guard_failure`](super::is_guard_failure).
pub fn is_guard_failure(error: &SqlxError) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.as_deref() == Some(guard::LOST)
}

/// As [`lock_in_transaction`](super::lock_in_transaction).
///
/// # Errors
/// As there.
pub async fn lock_in_transaction(
    transaction: &mut Transaction<'_, Postgres>,
    namespace: &str,
    name: impl AsRef<str>,
) -> Result<()> {
    let key = guard::key_of(namespace, name.as_ref())?;
    let asked = ::sqlx::query("SELECT pg_advisory_xact_lock($1)")
        .bind(key)
        .execute(&mut **transaction);
    asked.await.map(drop).map_err(|e| failed("lock", e))
}

/// The server's message is left out, because it may contain names or values.
fn failed(operation: &'static str, error: SqlxError) -> Error {
    let code = error.as_database_error().and_then(|error| error.code());
    match code {
        Some(code) => {
            let message = format!("the server refuses the statement (SQLSTATE {code})");
            Error::new(ErrorKind::Unusable, operation, message)
        }
        None => {
            let message = "the connection of the transaction failed";
            Error::new(ErrorKind::Unreachable, operation, message).maybe_applied()
        }
    }
}
