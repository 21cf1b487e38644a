//! The raw operations that `bench` compares with: two transactions for lock and unlock, a watch and
//! a delete for a hand-over, with the same client library and connection.

use std::sync::Arc;

use tokio::sync::OnceCell;

use super::Inner;
use super::client::revision;
use super::txn;
use super::watch::Range;
use palisade_core::engine::{Baseline, BoxFuture, Settings, Url};
use palisade_core::{Error, ErrorKind, Result};

struct Raw {
    inner: Inner,
    lease: OnceCell<i64>,
}

/// Long enough for a run; the lease is never renewed.
const TTL: std::time::Duration = std::time::Duration::from_secs(3600);

/// Opens the cluster that the URL names.
///
/// # Errors
/// As opening the engine.
pub(super) async fn open(url: Url, settings: &Settings) -> Result<Arc<dyn Baseline>> {
    let inner = super::config::open(url, settings).await?;
    let lease = OnceCell::new();
    Ok(Arc::new(Handle(Arc::new(Raw { inner, lease }))))
}

struct Handle(Arc<Raw>);

impl Baseline for Handle {
    fn describe(&self) -> String {
        "txn put-if-absent with lease and read, txn compare-and-delete; watch and delete".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let raw = Arc::clone(&self.0);
        Box::pin(async move { raw.cycle(&format!("raw/{key}/")).await })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let raw = Arc::clone(&self.0);
        Box::pin(async move { raw.take(&format!("baton/{key}")).await })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let raw = Arc::clone(&self.0);
        Box::pin(async move { raw.give(&format!("baton/{key}")).await })
    }
}

impl Raw {
    async fn lease(&self) -> Result<i64> {
        let grant = || async {
            let granted = self.inner.leases.grant(&self.inner.client, TTL).await;
            granted.map(|lease| lease.id)
        };
        self.lease.get_or_try_init(grant).await.copied()
    }

    async fn cycle(&self, prefix: &str) -> Result<()> {
        let (client, lease) = (&self.inner.client, self.lease().await?);
        let key = format!("{prefix}{lease:x}");
        let lock = txn::only_if(
            vec![txn::created_at(key.as_bytes(), 0)],
            vec![
                txn::put(key.as_str(), Vec::new(), lease),
                txn::read(txn::ahead(prefix, true)),
            ],
        );
        let locked = client.call("raw", lock).await?;
        if !locked.succeeded {
            let message = "the key is in use; give every task its own";
            return Err(Error::new(ErrorKind::InvalidArgument, "raw", message));
        }
        let created = txn::created_at(key.as_bytes(), revision(&locked.header));
        let unlock = txn::only_if(vec![created], vec![txn::delete(key)]);
        client.call("raw", unlock).await.map(drop)
    }

    async fn take(&self, key: &str) -> Result<()> {
        let baton = Range {
            key: key.into(),
            end: Vec::new(),
            deletes: false,
        };
        let mut watch = None;
        loop {
            let exists = vec![txn::exists(key.as_bytes())];
            let take = txn::only_if(exists, vec![txn::delete(key)]);
            let taken = self.inner.client.call("raw", take).await?;
            if taken.succeeded {
                return Ok(());
            }
            let Some(watch) = &mut watch else {
                let begun = self.inner.client.watch("raw", baton.clone()).await?;
                watch = Some(begun.0);
                continue;
            };
            if watch.changed_since(revision(&taken.header)).await.is_none() {
                let message = "etcd has ended the watch";
                return Err(Error::new(ErrorKind::Unreachable, "raw", message));
            }
        }
    }

    async fn give(&self, key: &str) -> Result<()> {
        let give = vec![txn::put(key, Vec::new(), self.lease().await?)];
        self.inner
            .client
            .call("raw", txn::plain(give))
            .await
            .map(drop)
    }
}
