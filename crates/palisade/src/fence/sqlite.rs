//! `SqliteFence`: fenced rows of a SQLite database, and helpers for the user's own fenced tables.
//!
//! The triggers are those that any table can have ([`super::sql`]). SQLite has one writer at a
//! time: a statement that the triggers accept is written before any other is judged.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rusqlite::{Connection, ErrorCode, OptionalExtension, TransactionBehavior};

use super::sql::Table;
use super::{Fence, Fenced, Rule, Verdict, WriteToken};
use palisade_core::engine::BoxFuture;
use palisade_core::{Error, ErrorKind, Name, Result, Token};

/// How long to wait for another writer.
const TURN: Duration = Duration::from_secs(2);

const STALE: &str = "stale fencing token";

/// Fenced values in a table of a SQLite database. Clones share the connection.
#[derive(Debug, Clone)]
pub struct SqliteFence {
    connection: Arc<Mutex<Connection>>,
    rule: Rule,
}

impl SqliteFence {
    /// Opens the database, and creates the table `palisade_fenced` if it does not exist.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when it can't be opened; [`ErrorKind::Unusable`] when the table can't
    /// be created.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let connection = Connection::open(path).map_err(|error| {
            let message = "the SQLite database can't be opened; does its directory exist?";
            Error::new(ErrorKind::Config, "fence", message).because(error)
        })?;
        Self::over(connection)
    }

    /// As [`SqliteFence::open`], over an open connection. Its settings (journal, `synchronous`) are
    /// kept: with `synchronous = OFF` a power failure can roll tokens back.
    ///
    /// # Errors
    /// [`ErrorKind::Unusable`] when the table can't be created.
    pub fn over(mut connection: Connection) -> Result<Self> {
        connection.busy_timeout(TURN).map_err(failed)?;
        let made = connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(failed)?;
        let there: bool = made
            .query_row(
                "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'palisade_fenced')",
                [],
                |row| row.get(0),
            )
            .map_err(failed)?;
        if !there {
            let table = Table::new("palisade_fenced")?.keyed_by(&["resource"])?;
            let create =
                "CREATE TABLE palisade_fenced (resource TEXT PRIMARY KEY NOT NULL, data BLOB);\n";
            let sql = format!("{create}{}", table.sqlite()?);
            made.execute_batch(&sql).map_err(failed)?;
        }
        made.commit().map_err(failed)?;
        Ok(Self {
            connection: Arc::new(Mutex::new(connection)),
            rule: Rule::default(),
        })
    }

    /// The same fence, but it accepts each token only once.
    #[must_use]
    pub fn strict(self) -> Self {
        Self {
            rule: Rule::Strict,
            ..self
        }
    }

    /// Runs SQL on a thread that may block.
    fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connection, Rule) -> Result<T> + Send + 'static,
    ) -> BoxFuture<Result<T>> {
        let fence = self.clone();
        Box::pin(async move {
            let run = move || work(&mut fence.connection.lock(), fence.rule);
            let joined = tokio::task::spawn_blocking(run).await;
            joined.unwrap_or_else(|error| {
                let message = "the task for the database was aborted";
                let error = Error::new(ErrorKind::Internal, "fence", message).because(error);
                Err(error.maybe_applied())
            })
        })
    }

    /// Judges a token, and writes `data` if it is accepted.
    fn judged(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Option<Vec<u8>>,
    ) -> BoxFuture<Result<Verdict>> {
        let resource = resource.to_string();
        self.blocking(move |connection, rule| {
            let number = token.stored()?;
            // Starting as a write transaction avoids a later conflict when upgrading from a read.
            let write = connection
                .transaction_with_behavior(TransactionBehavior::Immediate)
                .map_err(failed)?;
            let highest = highest(&write, &resource)?;
            let verdict = rule.judge(highest, token);
            if verdict != Verdict::Accepted {
                return Ok(verdict);
            }
            let written = match data {
                Some(data) => write.execute(
                    "INSERT INTO palisade_fenced (resource, data, fence) VALUES (?1, ?2, ?3) \
                     ON CONFLICT (resource) DO UPDATE SET data = excluded.data, fence = ?3",
                    (&resource, data, number),
                ),
                None => write.execute(
                    "INSERT INTO palisade_fenced (resource, fence) VALUES (?1, ?2) \
                     ON CONFLICT (resource) DO UPDATE SET fence = ?2",
                    (&resource, number),
                ),
            };
            written.map_err(failed)?;
            write.commit().map_err(|e| failed(e).maybe_applied())?;
            Ok(Verdict::Accepted)
        })
    }
}

fn highest(connection: &Connection, resource: &str) -> Result<Option<Token>> {
    let row = connection.query_row(
        "SELECT fence_token FROM palisade_fenced WHERE resource = ?1",
        [resource],
        |row| row.get::<_, i64>(0),
    );
    let token = row.optional().map_err(failed)?;
    Ok(token.map(|token| Token(token.unsigned_abs())))
}

impl Fence for SqliteFence {
    fn write(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Vec<u8>,
    ) -> BoxFuture<Result<Verdict>> {
        self.judged(resource, token, Some(data))
    }

    fn accept(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Verdict>> {
        self.judged(resource, token, None)
    }

    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>> {
        let resource = resource.to_string();
        self.blocking(move |connection, _| {
            let sql = "SELECT fence_token, data FROM palisade_fenced WHERE resource = ?1";
            let row = connection.query_row(sql, [&resource], |row| {
                Ok(Fenced {
                    token: Token(row.get::<_, i64>(0)?.unsigned_abs()),
                    data: row.get::<_, Option<Vec<u8>>>(1)?.unwrap_or_default(),
                })
            });
            row.optional().map_err(failed)
        })
    }

    fn highest(&self, resource: &Name) -> BoxFuture<Result<Option<Token>>> {
        let resource = resource.to_string();
        self.blocking(move |connection, _| highest(connection, &resource))
    }

    fn forget(&self, resource: &Name) -> BoxFuture<Result<bool>> {
        let resource = resource.to_string();
        self.blocking(move |connection, _| {
            let forget = connection
                .transaction_with_behavior(TransactionBehavior::Immediate)
                .map_err(failed)?;
            let all = WriteToken::from(i64::MAX.unsigned_abs());
            present(&forget, "palisade_fenced", &resource, all)?;
            let sql = "DELETE FROM palisade_fenced WHERE resource = ?1";
            let known = forget.execute(sql, [&resource]).map_err(failed)? > 0;
            let sql = "DELETE FROM palisade_fenced_fence WHERE resource = ?1";
            forget.execute(sql, [&resource]).map_err(failed)?;
            forget.commit().map_err(|e| failed(e).maybe_applied())?;
            Ok(known)
        })
    }

    fn rule(&self) -> Rule {
        self.rule
    }
}

/// Presents the token for a DELETE of the row `key` of a fenced table, in the same transaction.
/// Other statements present theirs in the column `fence`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for an invalid token; [`ErrorKind::Config`] for a table name as
/// in [`Table::new`]; those of the database.
pub fn present(
    transaction: &rusqlite::Transaction<'_>,
    table: &str,
    key: &str,
    token: WriteToken,
) -> Result<()> {
    Table::new(table)?;
    let sql = format!(
        "INSERT INTO \"{table}_fence\" (resource, fence) VALUES (?1, ?2) \
         ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence"
    );
    let presented = transaction.execute(&sql, (key, token.stored()?));
    presented.map(drop).map_err(failed)
}

/// Whether a write to a fenced table failed because its token is stale.
pub fn is_stale(error: &rusqlite::Error) -> bool {
    matches!(error, rusqlite::Error::SqliteFailure(_, Some(message)) if message == STALE)
}

fn failed(error: rusqlite::Error) -> Error {
    let (kind, message) = match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => (
            ErrorKind::Unreachable,
            "another writer keeps the database locked",
        ),
        Some(ErrorCode::PermissionDenied | ErrorCode::ReadOnly) => {
            (ErrorKind::Denied, "the database can't be written to")
        }
        _ => (ErrorKind::Unusable, "the database refuses the statement"),
    };
    Error::new(kind, "fence", message).because(error)
}
