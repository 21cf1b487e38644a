//! The raw operations that session locks are compared with: `pg_try_advisory_lock` and
//! `pg_advisory_unlock`, prepared, and a blocking `pg_advisory_lock` as the wake-up.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_postgres::{Client, Statement};

use super::super::fault;
use super::super::mail::Mail;
use super::super::server::Server;
use super::offer::OPTIONS;
use crate::core::baseline::Baseline;
use crate::core::engine::BoxFuture;
use crate::core::error::{Error, Kind, Result};
use crate::core::url::{Settings, Url};
use crate::engines::remote::Links;

fn failed(error: tokio_postgres::Error) -> Error {
    fault::reading("baseline", &error)
}

/// Opens them.
///
/// # Errors
/// As opening the engine.
pub(super) async fn open(mut url: Url, settings: Settings) -> Result<Arc<dyn Baseline>> {
    let server = Server::take(&mut url, &settings)?;
    for option in ["key", "max_connections", "pooler", "schema"] {
        url.take(option);
    }
    url.finish(OPTIONS)?;
    let links = {
        let server = server.clone();
        Links::new(settings.connect_timeout, move || {
            let server = server.clone();
            Box::pin(async move { Raw::connect(&server).await.map(Arc::new) })
        })
    };
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
    links: Links<Arc<Raw>>,
    spare: Mutex<Vec<Raw>>,
    taken: Mutex<HashMap<String, Raw>>,
}

/// One connection, with its statements prepared.
struct Raw {
    client: Client,
    attempt: Statement,
    block: Statement,
    unlock: Statement,
}

impl Raw {
    async fn connect(server: &Server) -> Result<Self> {
        let client = server.connect(Arc::new(Mail::default())).await?;
        let prepare = async |sql| client.prepare(sql).await.map_err(failed);
        Ok(Self {
            attempt: prepare("SELECT pg_try_advisory_lock($1)").await?,
            block: prepare("SELECT pg_advisory_lock($1)").await?,
            unlock: prepare("SELECT pg_advisory_unlock($1)").await?,
            client,
        })
    }

    async fn whether(&self, statement: &Statement, key: i64) -> Result<bool> {
        let row = self.client.query_one(statement, &[&key]).await;
        row.and_then(|row| row.try_get(0)).map_err(failed)
    }
}

fn number(key: &str) -> i64 {
    let mix = |sum: i64, byte: u8| (sum ^ i64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    key.bytes().fold(7420, mix)
}

impl Baseline for Locks {
    fn describe(&self) -> String {
        "pg_try_advisory_lock and pg_advisory_unlock, prepared, on one connection".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let raw = inner.links.get().await?.connection;
            let number = number(&key);
            let taken = raw.whether(&raw.attempt, number).await?;
            match taken && raw.whether(&raw.unlock, number).await? {
                true => Ok(()),
                false => Err(Error::new(Kind::Unusable, "baseline", "the key is in use")),
            }
        })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let spare = inner.spare.lock().pop();
            let raw = match spare {
                Some(raw) => raw,
                None => Raw::connect(&inner.server).await?,
            };
            let locked = raw.client.query_one(&raw.block, &[&number(&key)]).await;
            locked.map_err(failed)?;
            inner.taken.lock().insert(key, raw);
            Ok(())
        })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let taken = inner.taken.lock().remove(&key);
            // Whom nobody has taken is there for the next who comes.
            if let Some(raw) = taken {
                raw.whether(&raw.unlock, number(&key)).await?;
                inner.spare.lock().push(raw);
            }
            Ok(())
        })
    }
}
