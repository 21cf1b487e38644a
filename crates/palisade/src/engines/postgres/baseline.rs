//! The raw operations that the lease table is compared with: two updates of a row, and NOTIFY.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_postgres::{Client, Statement};

use super::fault;
use super::mail::Mail;
use super::offer::OPTIONS;
use super::server::Server;
use crate::core::baseline::Baseline;
use crate::core::claim::ClaimId;
use crate::core::engine::BoxFuture;
use crate::core::error::{Error, Result};
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
    for option in ["layout", "listen_url", "pooler", "schema"] {
        url.take(option);
    }
    url.finish(OPTIONS)?;
    let raws = Links::new(settings.connect_timeout, move || {
        let server = server.clone();
        Box::pin(async move { Raw::connect(&server).await.map(Arc::new) })
    });
    Ok(Arc::new(Rows(Arc::new(raws))))
}

struct Rows(Arc<Links<Arc<Raw>>>);

/// One connection, with its statements prepared.
struct Raw {
    client: Client,
    mail: Arc<Mail>,
    touch: Statement,
    grab: Statement,
    hand: Statement,
    known: Mutex<HashSet<String>>,
}

/// A number of a key that fits where claims are rung for.
fn bell_of(key: &str) -> ClaimId {
    let sum = |seed: u64| {
        key.bytes().fold(seed, |sum, b| {
            (sum ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
        })
    };
    ClaimId(u128::from(sum(7)) << 64 | u128::from(sum(0xcbf2_9ce4_8422_2325)))
}

impl Raw {
    async fn connect(server: &Server) -> Result<Self> {
        let mail = Arc::new(Mail::default());
        let client = server.connect(Arc::clone(&mail)).await?;
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
                 SELECT pg_notify('palisade_baseline', $2)",
            )
            .await?,
            client,
            mail,
            known: Mutex::default(),
        })
    }

    async fn know(&self, key: &str) -> Result<()> {
        if self.known.lock().contains(key) {
            return Ok(());
        }
        let sql = "INSERT INTO palisade_baseline (k, n) VALUES ($1, 0) ON CONFLICT DO NOTHING";
        self.client.execute(sql, &[&key]).await.map_err(failed)?;
        self.known.lock().insert(key.to_owned());
        Ok(())
    }
}

impl Baseline for Rows {
    fn describe(&self) -> String {
        "two prepared updates of one row, each committed; UPDATE and NOTIFY".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let raws = Arc::clone(&self.0);
        Box::pin(async move {
            let raw = raws.get().await?.connection;
            raw.know(&key).await?;
            for _ in 0..2 {
                raw.client
                    .execute(&raw.touch, &[&key])
                    .await
                    .map_err(failed)?;
            }
            Ok(())
        })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let raws = Arc::clone(&self.0);
        Box::pin(async move {
            let raw = raws.get().await?.connection;
            raw.know(&key).await?;
            let bell = raw.mail.bell(bell_of(&key));
            while raw
                .client
                .execute(&raw.grab, &[&key])
                .await
                .map_err(failed)?
                == 0
            {
                bell.rung().await;
            }
            Ok(())
        })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let raws = Arc::clone(&self.0);
        Box::pin(async move {
            let raw = raws.get().await?.connection;
            raw.know(&key).await?;
            let text = format!("g{}", bell_of(&key));
            raw.client
                .query(&raw.hand, &[&key, &text])
                .await
                .map_err(failed)?;
            Ok(())
        })
    }
}
