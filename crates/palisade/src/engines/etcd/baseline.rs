//! etcd's own raw operations: what a lock costs with nothing of palisade in between.
//!
//! Two transactions for lock and unlock, a watch and a delete for a baton, over the same client
//! library and connection.

use std::sync::Arc;

use tokio::sync::OnceCell;

use super::Inner;
use super::book::{News, Range};
use super::leases::Living;
use super::ops;
use super::rpc::revision;
use super::wire::TxnRequest;
use crate::core::baseline::Baseline;
use crate::core::engine::BoxFuture;
use crate::core::error::{Error, Kind, Result};
use crate::core::url::{Settings, Url};

/// The raw operations on one cluster.
struct Raw {
    inner: Inner,
    lease: OnceCell<Living>,
}

/// Long enough for a run; nobody keeps it alive.
const TTL: std::time::Duration = std::time::Duration::from_secs(3600);

/// Opens what the URL names.
///
/// # Errors
/// As the engine's own.
pub(super) async fn open(url: Url, settings: &Settings) -> Result<Arc<dyn Baseline>> {
    let inner = Inner::new(url, settings)?;
    inner.rpc.links.get().await?;
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
        let make = || self.inner.leases.get(&self.inner.rpc, TTL);
        Ok(self.lease.get_or_try_init(make).await?.id)
    }

    async fn cycle(&self, prefix: &str) -> Result<()> {
        let lease = self.lease().await?;
        let key = format!("{prefix}{lease:x}");
        let lock = TxnRequest {
            compare: vec![ops::created_at(key.as_bytes(), 0)],
            success: vec![
                ops::put(key.as_str(), Vec::new(), lease),
                ops::range(ops::youngest(prefix, 2)),
            ],
            failure: Vec::new(),
        };
        let locked = self.inner.rpc.txn("raw", lock).await?;
        if !locked.succeeded {
            let message = "the key is in use; give every task its own";
            return Err(Error::new(Kind::InvalidArgument, "raw", message));
        }
        let created = revision(locked.header.as_ref());
        let unlock = TxnRequest {
            compare: vec![ops::created_at(key.as_bytes(), created)],
            success: vec![ops::delete(key)],
            failure: Vec::new(),
        };
        self.inner.rpc.txn("raw", unlock).await.map(drop)
    }

    async fn take(&self, key: &str) -> Result<()> {
        loop {
            if self.take_if_there(key).await? {
                return Ok(());
            }
            let baton = Range {
                key: key.into(),
                end: Vec::new(),
                deletes: false,
            };
            let mut watch = self.inner.begin_watch("raw", baton).await?;
            if self.take_if_there(key).await? {
                return Ok(());
            }
            if let News::Over = watch.next().await {
                let message = "etcd has ended the watch";
                return Err(Error::new(Kind::Unreachable, "raw", message));
            }
        }
    }

    async fn take_if_there(&self, key: &str) -> Result<bool> {
        let take = TxnRequest {
            compare: vec![ops::exists(key.as_bytes())],
            success: vec![ops::delete(key)],
            failure: Vec::new(),
        };
        Ok(self.inner.rpc.txn("raw", take).await?.succeeded)
    }

    async fn give(&self, key: &str) -> Result<()> {
        let give = TxnRequest {
            success: vec![ops::put(key, Vec::new(), self.lease().await?)],
            ..Default::default()
        };
        self.inner.rpc.txn("raw", give).await.map(drop)
    }
}
