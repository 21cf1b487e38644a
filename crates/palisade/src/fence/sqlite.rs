//! `SqliteFence`: fenced rows of a SQLite database, and helpers for the user's own fenced tables.
//!
//! The triggers are those that any table can have ([`super::sql`]). SQLite has one writer at a
//! time: a statement that the triggers accept is written before any other is judged.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rusqlite::{Connection, ErrorCode, OptionalExtension, Transaction, TransactionBehavior};

use super::sql::Table;
use palisade_kit::asked::Asked;

use super::{Fence, Fenced, Rule, Taken, Verdict, WriteToken};
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
        let create = "CREATE TABLE IF NOT EXISTS palisade_fenced \
                      (resource TEXT PRIMARY KEY NOT NULL, data BLOB)";
        let is_ready = "SELECT EXISTS (SELECT 1 FROM sqlite_schema \
                        WHERE name = 'palisade_fenced_fence_take')";
        let is_ready = connection.query_row(is_ready, [], |row| row.get(0));
        if !is_ready.map_err(failed)? {
            connection.execute_batch(create).map_err(failed)?;
            fence(
                &mut connection,
                &Table::new("palisade_fenced")?.keyed_by(&["resource"])?,
            )?;
        }
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

    /// Runs SQL in a write transaction of its own, on a thread that may block. It is not started when
    /// its future was dropped before its turn: it can't land over a later write of the same holder.
    fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>, Rule) -> Result<T> + Send + 'static,
    ) -> BoxFuture<Result<T>> {
        let fence = self.clone();
        Box::pin(async move {
            let (_asking, asked) = Asked::new();
            let run = move || {
                let mut connection = fence.connection.lock();
                // Starting as a write transaction avoids a later conflict when upgrading from a
                // read.
                let turn = connection
                    .transaction_with_behavior(TransactionBehavior::Immediate)
                    .map_err(failed)?;
                if asked.is_dropped() {
                    let message = "the caller is gone, and this was not started";
                    return Err(Error::new(ErrorKind::Internal, "fence", message));
                }
                let done = work(&turn, fence.rule)?;
                turn.commit().map_err(|e| failed(e).maybe_applied())?;
                Ok(done)
            };
            joined(tokio::task::spawn_blocking(run).await)
        })
    }

    /// Reads on a thread that may block, without a turn.
    fn reading<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> BoxFuture<Result<T>> {
        let connection = Arc::clone(&self.connection);
        Box::pin(async move {
            joined(tokio::task::spawn_blocking(move || work(&connection.lock())).await)
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
        self.blocking(move |turn, rule| {
            let number = token.stored()?;
            let verdict = rule.judge(highest(turn, &resource)?, token);
            if verdict == Verdict::Accepted {
                put(turn, &resource, data, number)?;
            }
            Ok(verdict)
        })
    }
}

fn joined<T>(joined: std::result::Result<Result<T>, tokio::task::JoinError>) -> Result<T> {
    joined.unwrap_or_else(|error| {
        let message = "the task for the database was aborted";
        let error = Error::new(ErrorKind::Internal, "fence", message).because(error);
        Err(error.maybe_applied())
    })
}

/// Writes a token, and data if there is any. The caller has judged it.
fn put(turn: &Connection, resource: &str, data: Option<Vec<u8>>, number: i64) -> Result<()> {
    let written = match data {
        Some(data) => turn.execute(
            "INSERT INTO palisade_fenced (resource, data, fence) VALUES (?1, ?2, ?3) \
             ON CONFLICT (resource) DO UPDATE SET data = excluded.data, fence = ?3",
            (resource, data, number),
        ),
        None => turn.execute(
            "INSERT INTO palisade_fenced (resource, fence) VALUES (?1, ?2) \
             ON CONFLICT (resource) DO UPDATE SET fence = ?2",
            (resource, number),
        ),
    };
    written.map(drop).map_err(failed)
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

#[deny(clippy::missing_trait_methods)]
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

    fn take(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Taken>> {
        let resource = resource.to_string();
        self.blocking(move |turn, rule| {
            let mark = rule.mark_of_take(token)?;
            let highest = highest(turn, &resource)?;
            if let Verdict::Stale { highest } = rule.judge(highest, token) {
                return Ok(Taken::Stale { highest });
            }
            let mark = mark.filter(|mark| highest != Some(Token(mark.unsigned_abs())));
            if let Some(mark) = mark {
                put(turn, &resource, None, mark)?;
            }
            let sql = "SELECT data FROM palisade_fenced WHERE resource = ?1";
            let data = turn.query_row(sql, [&resource], |row| row.get(0));
            let data = data.optional().map_err(failed)?.flatten();
            Ok(Taken::Accepted { data })
        })
    }

    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>> {
        let resource = resource.to_string();
        self.reading(move |connection| {
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
        self.reading(move |connection| highest(connection, &resource))
    }

    fn forget(&self, resource: &Name) -> BoxFuture<Result<bool>> {
        let resource = resource.to_string();
        self.blocking(move |turn, _| {
            let sql = "UPDATE palisade_fenced SET fence = -9223372036854775807 WHERE resource = ?1";
            let known = turn.execute(sql, [&resource]).map_err(failed)? > 0;
            let sql = "DELETE FROM palisade_fenced_fence_marks WHERE resource = ?1";
            let marked = turn.execute(sql, [&resource]).map_err(failed)? > 0;
            Ok(known || marked)
        })
    }

    fn rule(&self) -> Rule {
        self.rule
    }
}

/// Fences a table: what [`Table::sqlite`] does, any number of times, also over an earlier version.
/// It changes no data.
///
/// # Errors
/// As [`Table::sqlite`]; those of the database.
pub fn fence(connection: &mut Connection, table: &Table) -> Result<()> {
    let columns = table.sqlite_columns()?;
    let turn = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(failed)?;
    for (column, add) in columns {
        let sql = "SELECT EXISTS (SELECT 1 FROM pragma_table_info(?1) WHERE name = ?2)";
        let is_there = turn.query_row(sql, (table.name(), column), |row| row.get(0));
        if !is_there.map_err(failed)? {
            turn.execute_batch(&add).map_err(failed)?;
        }
    }
    turn.execute_batch(&table.sqlite_rest()).map_err(failed)?;
    turn.commit().map_err(|e| failed(e).maybe_applied())
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
