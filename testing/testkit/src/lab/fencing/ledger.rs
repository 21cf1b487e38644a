//! `Ledger`: lines of text in one fenced resource, for every kind of store, with and without the
//! fence, by holders that take and by holders that only read.

use palisade::engines::postgres::{self as pg, PostgresHold};
use palisade::engines::redis::RedisFence;
use palisade::fence::sqlite::{self, SqliteFence};
use palisade::fence::{self, Fence, FileFence, SharedFence, Taken, Verdict, WriteToken};
use palisade::{Hold, Name};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Spec;

/// The kind of store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A `FileFence` in a folder.
    File,
    /// The fenced store beside an engine's locks.
    Engine,
    /// A hash in Redis.
    RedisHash,
    /// A row of a table with triggers, in PostgreSQL.
    PostgresRow,
    /// A row of a table without triggers, in a transaction that a hold guards.
    PostgresGuard,
    /// A `SqliteFence`.
    Sqlite,
    /// A row of a table with triggers, in SQLite.
    SqliteRow,
    /// A resource of an HTTP service behind the layer: `PUT` and `GET`.
    Http,
}

/// The result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrote {
    /// It was written.
    Done,
    /// The store refused it as stale.
    Refused,
}

/// The resource of one run.
pub struct Ledger {
    resource: Name,
    fenced: bool,
    takes: bool,
    store: Store,
}

enum Store {
    Fence(SharedFence),
    Hash(RedisFence),
    Postgres {
        client: Box<tokio_postgres::Client>,
        guarded: bool,
    },
    Sqlite(Box<rusqlite::Connection>),
    Http(String),
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger").finish_non_exhaustive()
    }
}

fn words(error: impl std::fmt::Debug) -> String {
    format!("{error:?}")
}

impl Ledger {
    /// Opens it; `first` also creates what it needs.
    ///
    /// # Errors
    /// A message if it can't be opened.
    pub async fn open(spec: &Spec, first: bool) -> Result<Self, String> {
        let store = match spec.kind {
            Kind::File => Store::Fence(Arc::new(FileFence::open(&spec.store).map_err(words)?)),
            Kind::Engine => Store::Fence(fence::open(&spec.store).await.map_err(words)?),
            Kind::Sqlite => Store::Fence(Arc::new(SqliteFence::open(&spec.store).map_err(words)?)),
            Kind::RedisHash => Store::Hash(RedisFence::open(&spec.store).await.map_err(words)?),
            Kind::PostgresRow | Kind::PostgresGuard => {
                let guarded = spec.kind == Kind::PostgresGuard;
                postgres(spec, first, guarded).await?
            }
            Kind::SqliteRow => sqlite_row(spec, first)?,
            Kind::Http => Store::Http(spec.store.clone()),
        };
        Ok(Self {
            resource: Name::new(&spec.name).map_err(words)?,
            fenced: spec.fenced,
            takes: spec.takes,
            store,
        })
    }

    /// All lines.
    ///
    /// # Errors
    /// A message if it can't be read.
    pub async fn read(&mut self) -> Result<String, String> {
        match &mut self.store {
            Store::Fence(fence) => {
                let kept = fence.read(&self.resource).await.map_err(words)?;
                text(kept.map(|kept| kept.data).unwrap_or_default())
            }
            Store::Hash(fence) => {
                let kept = fence.read_fields(&self.resource).await.map_err(words)?;
                let fields = kept.map(|(_, fields)| fields).unwrap_or_default();
                let data = fields.into_iter().find(|(field, _)| field == "data");
                text(data.map(|(_, data)| data).unwrap_or_default())
            }
            Store::Postgres { client, .. } => {
                let row = client.query_one("SELECT data FROM public.ledger WHERE id = 1", &[]);
                row.await.and_then(|row| row.try_get(0)).map_err(words)
            }
            Store::Sqlite(connection) => {
                let sql = "SELECT data FROM ledger WHERE id = 1";
                let row = connection.query_row(sql, [], |row| row.get(0));
                row.map_err(words)
            }
            Store::Http(address) => {
                let (status, body) = http(address, "GET", &self.resource, None, "").await?;
                (status == 200)
                    .then_some(body)
                    .ok_or(format!("GET: {status}"))
            }
        }
    }

    /// All lines, after which no older holder can write; `None` if the token is stale.
    async fn take(&mut self, token: WriteToken) -> Result<Option<String>, String> {
        let data = match &mut self.store {
            Store::Fence(fence) => match fence.take(&self.resource, token).await {
                Ok(Taken::Accepted { data }) => data.unwrap_or_default(),
                Ok(Taken::Stale { .. }) => return Ok(None),
                Err(error) => return Err(words(error)),
            },
            Store::Hash(fence) => match fence.take_fields(&self.resource, token).await {
                Ok(Taken::Accepted { data }) => {
                    let fields = data.unwrap_or_default().into_iter();
                    let mut data = fields.filter(|(field, _)| field == "data");
                    data.next().map(|(_, data)| data).unwrap_or_default()
                }
                Ok(Taken::Stale { .. }) => return Ok(None),
                Err(error) => return Err(words(error)),
            },
            Store::Postgres { client, .. } => {
                let sql = "UPDATE public.ledger SET fence = $1 WHERE id = 1 RETURNING data";
                let row = match client.query_one(sql, &[&token]).await {
                    Err(error) if pg::refused(&error).is_some() => return Ok(None),
                    row => row.map_err(words)?,
                };
                return row.try_get(0).map(Some).map_err(words);
            }
            Store::Sqlite(connection) => {
                let sql = "UPDATE ledger SET fence = ?1 WHERE id = 1 RETURNING data";
                return match connection.query_row(sql, [token], |row| row.get(0)) {
                    Err(error) if sqlite::is_stale(&error) => Ok(None),
                    data => data.map(Some).map_err(words),
                };
            }
            Store::Http(address) => {
                let header = format!("Fencing-Take: {token}\r\n");
                return match http_with(address, "GET", &self.resource, &header, "").await? {
                    (200, body) => Ok(Some(body)),
                    (409, _) => Ok(None),
                    (status, _) => Err(format!("GET: {status}")),
                };
            }
        };
        text(data).map(Some)
    }

    /// Adds a line: takes or reads, passes the failpoint, writes back.
    ///
    /// # Errors
    /// A message if that failed for another reason than staleness.
    pub async fn add(
        &mut self,
        hold: &Hold,
        line: &str,
        failpoint: impl AsyncFnOnce() -> Result<(), String>,
    ) -> Result<Wrote, String> {
        let token = hold.write_token().map_err(words)?;
        if let Store::Postgres {
            guarded: true,
            client,
        } = &mut self.store
        {
            return guarded(client, (hold, self.fenced), line, failpoint).await;
        }
        let found = if self.fenced && self.takes {
            match self.take(token).await? {
                Some(found) => found,
                None => return Ok(Wrote::Refused),
            }
        } else {
            self.read().await?
        };
        let data = format!("{found}{line}\n");
        failpoint().await?;
        self.write(token, data).await
    }

    async fn write(&mut self, token: WriteToken, data: String) -> Result<Wrote, String> {
        match &mut self.store {
            Store::Fence(fence) => {
                // Without the fence, any token is raised to the highest one, so that nothing is
                // stale.
                let highest = fence.highest(&self.resource).await.map_err(words)?;
                let token = match highest {
                    Some(highest) if !self.fenced => highest.max(token.token()).into(),
                    _ => token,
                };
                let written = fence.write(&self.resource, token, data.into_bytes());
                Ok(wrote(written.await.map_err(words)?))
            }
            Store::Hash(fence) => {
                let highest = fence.highest(&self.resource).await.map_err(words)?;
                let token = match highest {
                    Some(highest) if !self.fenced => highest.max(token.token()).into(),
                    _ => token,
                };
                let fields = vec![("data".to_owned(), data.into_bytes())];
                let written = fence.write_fields(&self.resource, token, &fields).await;
                Ok(wrote(written.map_err(words)?))
            }
            Store::Postgres { client, .. } if self.fenced => {
                let sql = "UPDATE public.ledger SET data = $1, fence = $2 WHERE id = 1";
                match client.execute(sql, &[&data, &token]).await {
                    Ok(_) => Ok(Wrote::Done),
                    Err(error) => pg::refused(&error).map(wrote).ok_or_else(|| words(error)),
                }
            }
            Store::Postgres { client, .. } => {
                let sql = "UPDATE public.ledger SET data = $1 WHERE id = 1";
                client.execute(sql, &[&data]).await.map_err(words)?;
                Ok(Wrote::Done)
            }
            Store::Sqlite(connection) if self.fenced => {
                let sql = "UPDATE ledger SET data = ?1, fence = ?2 WHERE id = 1";
                match connection.execute(sql, (data, token)) {
                    Ok(_) => Ok(Wrote::Done),
                    Err(error) if sqlite::is_stale(&error) => Ok(Wrote::Refused),
                    Err(error) => Err(words(error)),
                }
            }
            Store::Sqlite(connection) => {
                let sql = "UPDATE ledger SET data = ?1 WHERE id = 1";
                connection.execute(sql, [data]).map_err(words)?;
                Ok(Wrote::Done)
            }
            Store::Http(address) => {
                let token = self.fenced.then_some(token);
                let put = http(address, "PUT", &self.resource, token, &data);
                match put.await?.0 {
                    200 => Ok(Wrote::Done),
                    409 => Ok(Wrote::Refused),
                    other => Err(format!("PUT: {other}")),
                }
            }
        }
    }
}

fn wrote(verdict: Verdict) -> Wrote {
    match verdict {
        Verdict::Accepted => Wrote::Done,
        Verdict::Stale { .. } => Wrote::Refused,
    }
}

fn text(data: Vec<u8>) -> Result<String, String> {
    String::from_utf8(data).map_err(words)
}

/// The table; with the fence it has triggers, unless a hold guards it.
async fn postgres(spec: &Spec, first: bool, guarded: bool) -> Result<Store, String> {
    let (client, connection) = tokio_postgres::connect(&spec.store, tokio_postgres::NoTls)
        .await
        .map_err(words)?;
    tokio::spawn(connection);
    if first {
        let mut sql = "DROP TABLE IF EXISTS public.ledger, public.ledger_fence; \
             CREATE TABLE public.ledger (id int PRIMARY KEY, data text); \
             INSERT INTO public.ledger VALUES (1, '');"
            .to_owned();
        if spec.fenced && !guarded {
            sql += &fence::sql::Table::new("ledger").map_err(words)?.postgres();
        }
        client.batch_execute(&sql).await.map_err(words)?;
    }
    Ok(Store::Postgres {
        client: Box::new(client),
        guarded,
    })
}

fn sqlite_row(spec: &Spec, first: bool) -> Result<Store, String> {
    let connection = rusqlite::Connection::open(&spec.store).map_err(words)?;
    let limit = std::time::Duration::from_secs(5);
    connection.busy_timeout(limit).map_err(words)?;
    if first {
        let mut sql = "CREATE TABLE ledger (id INTEGER PRIMARY KEY, data TEXT); \
             INSERT INTO ledger VALUES (1, '');"
            .to_owned();
        if spec.fenced {
            let table = fence::sql::Table::new("ledger").map_err(words)?;
            sql += &table.sqlite().map_err(words)?;
        }
        connection.execute_batch(&sql).map_err(words)?;
    }
    Ok(Store::Sqlite(Box::new(connection)))
}

/// Writes in one transaction, which commits only if the lock is still held.
async fn guarded(
    client: &mut tokio_postgres::Client,
    (hold, fenced): (&Hold, bool),
    line: &str,
    failpoint: impl AsyncFnOnce() -> Result<(), String>,
) -> Result<Wrote, String> {
    let transaction = client.transaction().await.map_err(words)?;
    if fenced {
        hold.postgres_guard(&transaction).await.map_err(words)?;
    }
    let sql = "SELECT data FROM public.ledger WHERE id = 1";
    let row = transaction.query_one(sql, &[]).await.map_err(words)?;
    let data = format!("{}{line}\n", row.get::<_, String>(0));
    failpoint().await?;
    let sql = "UPDATE public.ledger SET data = $1 WHERE id = 1";
    transaction.execute(sql, &[&data]).await.map_err(words)?;
    match transaction.commit().await {
        Ok(()) => Ok(Wrote::Done),
        Err(error) if pg::is_guard_failure(&error) => Ok(Wrote::Refused),
        Err(error) => Err(words(error)),
    }
}

/// One request on its own connection.
///
/// # Errors
/// A message if there was no answer.
pub async fn http(
    address: &str,
    method: &str,
    resource: &Name,
    token: Option<WriteToken>,
    body: &str,
) -> Result<(u16, String), String> {
    let header = token.map_or_else(String::new, |token| format!("Fencing-Token: {token}\r\n"));
    http_with(address, method, resource, &header, body).await
}

/// As [`http`], with headers as they are sent.
///
/// # Errors
/// As there.
pub async fn http_with(
    address: &str,
    method: &str,
    resource: &Name,
    headers: &str,
    body: &str,
) -> Result<(u16, String), String> {
    let (head, body) = exchange(address, method, resource, headers, body).await?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    Ok((status.ok_or("no status")?, body))
}

/// As [`http_with`]; answers with the head and the body.
///
/// # Errors
/// As there.
pub async fn exchange(
    address: &str,
    method: &str,
    resource: &Name,
    headers: &str,
    body: &str,
) -> Result<(String, String), String> {
    let mut stream = tokio::net::TcpStream::connect(address)
        .await
        .map_err(words)?;
    let request = format!(
        "{method} /{resource} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         {headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.map_err(words)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.map_err(words)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
    Ok((head.to_owned(), body.to_owned()))
}
