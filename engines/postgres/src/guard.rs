//! A hold of `postgres://` as a condition of the user's own transaction, and locks that last as
//! long as a transaction.
//!
//! With lock and data in one database this is exact without a token column: the transaction commits
//! only if the hold is at the head of its line, and no other claim can be granted during the
//! commit.

use tokio_postgres::Transaction;
use tokio_postgres::types::{ToSql, Type};

use super::advisory::Keys;
use super::schema::Schema;
use super::{error, signed};
use palisade_core::engine::Mode;
use palisade_core::{Error, ErrorKind, Hold, Name, Result};

/// The SQLSTATE of a COMMIT whose guard is no longer held.
pub(super) const LOST: &str = "PFG01";

const PREFIX: &str = "postgres line ";

/// The value of `Ticket::native` for holds of a lease table: where its guards are.
pub(super) fn native(schema: &Schema, namespace: &str) -> String {
    format!("{PREFIX}{}/{namespace}", schema.name())
}

/// The statement and parameters of a guard.
pub(super) struct Guard {
    pub(super) sql: String,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) claim: String,
    pub(super) sequence: i64,
}

impl Guard {
    /// # Errors
    /// As [`PostgresHold::postgres_guard`], before anything is sent.
    pub(super) fn of(hold: &Hold) -> Result<Self> {
        let refuse = |kind, message| Error::new(kind, "guard", message);
        let ticket = hold.ticket();
        let place = ticket.native.as_deref().and_then(|native| {
            let (schema, namespace) = native.strip_prefix(PREFIX)?.split_once('/')?;
            Some((Schema::new(schema).ok()?, namespace))
        });
        let Some((schema, namespace)) = place else {
            let message = "only a hold of a postgres:// lock can guard a transaction";
            return Err(refuse(ErrorKind::Unsupported, message));
        };
        if hold.mode() != Mode::Exclusive {
            let message = "only an exclusive hold can guard a transaction: others may hold beside \
                           readers and permits";
            return Err(refuse(ErrorKind::InvalidArgument, message));
        }
        if !hold.is_valid() {
            return Err(hold.lost_error("guard"));
        }
        Ok(Self {
            // A function call, so that the server has its statement planned already.
            sql: format!(
                "SELECT {}.guard_by($1, $2, $3::text::uuid, $4)",
                schema.quoted()
            ),
            namespace: namespace.to_owned(),
            name: ticket.name.to_string(),
            claim: ticket.claim.to_string(),
            sequence: signed(ticket.sequence),
        })
    }
}

/// Extensions for holds of `postgres://`.
pub trait PostgresHold {
    /// Lets `transaction`, in the lock's own database, commit only while this is held. At COMMIT
    /// the server checks that the hold is at the head of its line, unexpired and not evicted, and
    /// it keeps the line locked until the commit is done. Otherwise the COMMIT fails
    /// ([`is_guard_failure`]) and nothing is written. Before the COMMIT nothing is locked, so a
    /// client that is paused in its transaction blocks nobody.
    ///
    /// It costs one round trip, unless it is polled together with the first statement: both are
    /// then pipelined (`tokio::join!(hold.postgres_guard(&tx), tx.execute(…))`).
    ///
    /// Above READ COMMITTED, a renewal during the transaction makes the COMMIT fail with a
    /// serialization failure (40001), which the caller should retry.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a hold of another engine (also of `postgres+advisory:` and of
    /// ShedLock's table); [`ErrorKind::InvalidArgument`] for readers and permits;
    /// [`ErrorKind::Lost`] when the hold is known to be lost; errors of the server.
    fn postgres_guard(
        &self,
        transaction: &Transaction<'_>,
    ) -> impl Future<Output = Result<()>> + Send;
}

impl PostgresHold for Hold {
    async fn postgres_guard(&self, transaction: &Transaction<'_>) -> Result<()> {
        let guard = Guard::of(self)?;
        let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
            (&guard.namespace, Type::TEXT),
            (&guard.name, Type::TEXT),
            (&guard.claim, Type::TEXT),
            (&guard.sequence, Type::INT8),
        ];
        let asked = transaction.client().query_typed(&guard.sql, &parameters);
        asked
            .await
            .map_err(|error| error::failed("guard", &error))?;
        Ok(())
    }
}

/// Whether a COMMIT failed because its guard is no longer held.
pub fn is_guard_failure(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| code.code() == LOST)
}

/// Waits for the lock `name` inside the user's own transaction, which holds it until it ends
/// (`pg_advisory_xact_lock`). It conflicts with holds of `postgres+advisory://` in the same
/// namespace; an empty namespace means sqlx's `PgAdvisoryLock` of that name. It needs no lease and
/// no token, because the lock and the writes end together. `lock_timeout` bounds the wait.
///
/// # Errors
/// [`ErrorKind::InvalidName`]; errors of the server.
pub async fn lock_in_transaction(
    transaction: &Transaction<'_>,
    namespace: &str,
    name: impl AsRef<str>,
) -> Result<()> {
    let sql = "SELECT pg_advisory_xact_lock($1)";
    advisory(transaction, sql, namespace, name.as_ref()).await?;
    Ok(())
}

/// As [`lock_in_transaction`] without waiting: `false` when the lock is taken.
///
/// # Errors
/// As [`lock_in_transaction`].
pub async fn try_lock_in_transaction(
    transaction: &Transaction<'_>,
    namespace: &str,
    name: impl AsRef<str>,
) -> Result<bool> {
    let sql = "SELECT pg_try_advisory_xact_lock($1)";
    let rows = advisory(transaction, sql, namespace, name.as_ref()).await?;
    let taken = rows.first().and_then(|row| row.try_get(0).ok());
    taken.map_or_else(|| error::unreadable("lock"), Ok)
}

async fn advisory(
    transaction: &Transaction<'_>,
    sql: &str,
    namespace: &str,
    name: &str,
) -> Result<Vec<tokio_postgres::Row>> {
    let key = key_of(namespace, name)?;
    let parameters: [(&(dyn ToSql + Sync), Type); 1] = [(&key, Type::INT8)];
    let asked = transaction.client().query_typed(sql, &parameters);
    asked.await.map_err(|error| error::failed("lock", &error))
}

/// The advisory-lock key that `postgres+advisory:` uses for a name.
pub(super) fn key_of(namespace: &str, name: &str) -> Result<i64> {
    Keys::new(None, namespace)?.number(&Name::new(name)?)
}
