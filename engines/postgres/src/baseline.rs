//! The raw operations that `bench` compares with. For the lease table: two updates of a row, and
//! NOTIFY. For session locks: `pg_try_advisory_lock` and `pg_advisory_unlock`, and a blocking
//! `pg_advisory_lock` as the wake-up. All statements are prepared.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_postgres::Statement;

use super::advisory;
use super::config;
use super::connect::Server;
use super::connection::{Connection, Listener, Notice};
use super::error;
use palisade_core::engine::{Baseline, BoxFuture, Settings, Url};
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::PerRuntime;

fn failed(error: tokio_postgres::Error) -> Error {
    error::failed("baseline", &error)
}

/// The server of a URL; `options` are the engine's own, which are ignored here.
fn server(mut url: Url, settings: &Settings, options: &[&str]) -> Result<Server> {
    let server = Server::take(&mut url, settings)?;
    for option in options {
        url.take(option);
    }
    url.finish(options)?;
    Ok(server)
}

/// The baseline of the lease table.
pub(super) async fn table(url: Url, settings: Settings) -> Result<Arc<dyn Baseline>> {
    let server = server(url, &settings, config::OPTIONS)?;
    let rows = PerRuntime::new(settings.connect_timeout, move || {
        let server = server.clone();
        Box::pin(async move { Row::connect(&server).await.map(Arc::new) })
    });
    Ok(Arc::new(Rows(Arc::new(rows))))
}

struct Rows(Arc<PerRuntime<Arc<Row>>>);

/// One connection that updates rows.
struct Row {
    connection: Connection,
    wakers: Arc<Mutex<HashMap<String, Arc<Notify>>>>,
    touch: Statement,
    grab: Statement,
    hand: Statement,
    known: Mutex<HashSet<String>>,
}

impl Row {
    async fn connect(server: &Server) -> Result<Self> {
        let wakers: Arc<Mutex<HashMap<String, Arc<Notify>>>> = Arc::default();
        let heard = Arc::clone(&wakers);
        let listener: Listener = Arc::new(move |notice| {
            if let Notice::Text(key) = notice
                && let Some(waker) = heard.lock().get(key)
            {
                waker.notify_one();
            }
        });
        let connection = server.connect(None, listener).await?;
        let client = &connection.client;
        let setup = "SELECT pg_advisory_lock(7420); \
            CREATE TABLE IF NOT EXISTS palisade_baseline (k text PRIMARY KEY, n bigint NOT NULL) \
            WITH (fillfactor = 50); SELECT pg_advisory_unlock(7420); LISTEN palisade_baseline";
        client.batch_execute(setup).await.map_err(failed)?;
        let prepare = async |sql| client.prepare(sql).await.map_err(failed);
        Ok(Self {
            touch: prepare("UPDATE palisade_baseline SET n = n + 1 WHERE k = $1").await?,
            grab: prepare("UPDATE palisade_baseline SET n = n - 1 WHERE k = $1 AND n > 0").await?,
            hand: prepare(
                "WITH one AS (UPDATE palisade_baseline SET n = n + 1 WHERE k = $1) \
                 SELECT pg_notify('palisade_baseline', $1)",
            )
            .await?,
            wakers,
            known: Mutex::default(),
            connection,
        })
    }

    /// Runs a statement on the row of `key`, which is inserted first; returns how many rows it
    /// changed.
    async fn run(&self, statement: &Statement, key: &str) -> Result<u64> {
        let client = &self.connection.client;
        if !self.known.lock().contains(key) {
            let sql = "INSERT INTO palisade_baseline (k, n) VALUES ($1, 0) ON CONFLICT DO NOTHING";
            client.execute(sql, &[&key]).await.map_err(failed)?;
            self.known.lock().insert(key.to_owned());
        }
        client.execute(statement, &[&key]).await.map_err(failed)
    }
}

impl Baseline for Rows {
    fn describe(&self) -> String {
        "two prepared updates of one row, each committed; UPDATE and NOTIFY".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let rows = Arc::clone(&self.0);
        Box::pin(async move {
            let row = rows.get().await?.connection;
            row.run(&row.touch, &key).await?;
            row.run(&row.touch, &key).await.map(drop)
        })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let rows = Arc::clone(&self.0);
        Box::pin(async move {
            let row = rows.get().await?.connection;
            let waker = Arc::clone(row.wakers.lock().entry(key.clone()).or_default());
            while row.run(&row.grab, &key).await? == 0 {
                waker.notified().await;
            }
            Ok(())
        })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let rows = Arc::clone(&self.0);
        Box::pin(async move {
            let row = rows.get().await?.connection;
            row.run(&row.hand, &key).await.map(drop)
        })
    }
}

/// The baseline of session locks.
pub(super) async fn sessions(url: Url, settings: Settings) -> Result<Arc<dyn Baseline>> {
    let server = server(url, &settings, advisory::config::OPTIONS)?;
    let shared = server.clone();
    let links = PerRuntime::new(settings.connect_timeout, move || {
        let server = shared.clone();
        Box::pin(async move { Lock::connect(&server).await.map(Arc::new) })
    });
    Ok(Arc::new(Locks(Arc::new(Inner {
        server,
        links,
        spare: Mutex::default(),
        taken: Mutex::default(),
    }))))
}

struct Locks(Arc<Inner>);

struct Inner {
    server: Server,
    links: PerRuntime<Arc<Lock>>,
    spare: Mutex<Vec<Lock>>,
    taken: Mutex<HashMap<String, Lock>>,
}

/// One connection that takes session locks.
struct Lock {
    connection: Connection,
    attempt: Statement,
    block: Statement,
    unlock: Statement,
}

impl Lock {
    async fn connect(server: &Server) -> Result<Self> {
        let connection = server.connect(None, Arc::new(|_| {})).await?;
        let prepare = async |sql| connection.client.prepare(sql).await.map_err(failed);
        Ok(Self {
            attempt: prepare("SELECT pg_try_advisory_lock($1)").await?,
            block: prepare("SELECT pg_advisory_lock($1)::text = ''").await?,
            unlock: prepare("SELECT pg_advisory_unlock($1)").await?,
            connection,
        })
    }

    async fn ask(&self, statement: &Statement, key: &str) -> Result<bool> {
        let mix = |sum: i64, byte: u8| (sum ^ i64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let number = key.bytes().fold(7420, mix);
        let row = self
            .connection
            .here()
            .query_one(statement, &[&number])
            .await;
        row.and_then(|row| row.try_get(0)).map_err(failed)
    }
}

impl Baseline for Locks {
    fn describe(&self) -> String {
        "pg_try_advisory_lock and pg_advisory_unlock, prepared, on one connection".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let lock = inner.links.get().await?.connection;
            if lock.ask(&lock.attempt, &key).await? && lock.ask(&lock.unlock, &key).await? {
                return Ok(());
            }
            Err(Error::new(
                ErrorKind::Unusable,
                "baseline",
                "the key is in use",
            ))
        })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let spare = inner.spare.lock().pop();
            let lock = match spare {
                Some(lock) => lock,
                None => Lock::connect(&inner.server).await?,
            };
            lock.ask(&lock.block, &key).await?;
            inner.taken.lock().insert(key, lock);
            Ok(())
        })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let taken = inner.taken.lock().remove(&key);
            // A lock that nobody took stays free for the next `take`.
            if let Some(lock) = taken {
                lock.ask(&lock.unlock, &key).await?;
                inner.spare.lock().push(lock);
            }
            Ok(())
        })
    }
}
