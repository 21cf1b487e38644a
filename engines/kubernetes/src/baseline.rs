//! The raw operations that `bench` compares with: a Lease taken and freed by two PUTs, and a
//! hand-over by a watch.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::client::{Client, Written};
use super::config::client;
use super::lease::Lease;
use palisade_core::engine::{Baseline, BoxFuture, Settings, Url};
use palisade_core::{Error, ErrorKind, Result};

/// Opens the raw operations on the API server of `url`.
pub(super) async fn open_baseline(mut url: Url, settings: &Settings) -> Result<Arc<dyn Baseline>> {
    let client = client(&mut url, settings)?;
    client.connect().await?;
    let known = Mutex::default();
    Ok(Arc::new(Raw(Arc::new(Inner { client, known }))))
}

struct Raw(Arc<Inner>);

struct Inner {
    client: Client,
    /// The last known state of each Lease, on which the next write is conditional.
    known: Mutex<std::collections::HashMap<String, Lease>>,
}

fn in_use() -> Error {
    Error::new(ErrorKind::Internal, "baseline", "a raw Lease is in use")
}

impl Inner {
    /// A Lease as it was last written; created if it does not exist.
    async fn lease(&self, key: &str) -> Result<Lease> {
        if let Some(lease) = self.known.lock().get(key) {
            return Ok(lease.clone());
        }
        let timeout = self.client.timeout;
        if let Some(lease) = self.client.read("baseline", key, timeout).await? {
            return Ok(lease);
        }
        let free = Lease::free(key, key, &self.client.clock.stamp());
        match self.client.create("baseline", &free, timeout).await? {
            Written::Done(lease) => Ok(*lease),
            Written::Refused => Err(in_use()),
        }
    }

    async fn write(&self, mut lease: Lease, holder: &str, duration: i32) -> Result<Lease> {
        lease.spec.holder_identity = Some(holder.to_owned());
        lease.spec.lease_duration_seconds = Some(duration);
        let timeout = self.client.timeout;
        match self.client.replace("baseline", &lease, timeout).await? {
            Written::Done(lease) => Ok(*lease),
            Written::Refused => Err(in_use()),
        }
    }
}

impl Baseline for Raw {
    fn describe(&self) -> String {
        "PUT of a Lease with a holder, PUT without; hand-over: PUT, watch, PUT".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let raw = Arc::clone(&self.0);
        Box::pin(async move {
            let key = name(&key);
            let lease = raw.lease(&key).await?;
            let lease = raw.write(lease, "raw", 30).await?;
            let lease = raw.write(lease, "", 1).await?;
            raw.known.lock().insert(key, lease);
            Ok(())
        })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let raw = Arc::clone(&self.0);
        Box::pin(async move {
            let key = name(&format!("baton-{key}"));
            let lasts = Duration::from_secs(30);
            let selector = format!("&fieldSelector=metadata.name%3D{key}");
            let mut watch = raw.client.watch(&selector, lasts).await?;
            loop {
                let timeout = raw.client.timeout;
                let lease = raw.client.read("baseline", &key, timeout).await?;
                if let Some(lease) = lease
                    && lease.spec.holder_identity.as_deref() == Some("given")
                    && raw.write(lease, "", 1).await.is_ok()
                {
                    return Ok(());
                }
                if !matches!(watch.chunk().await, Ok(Some(_))) {
                    watch = raw.client.watch(&selector, lasts).await?;
                }
            }
        })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let raw = Arc::clone(&self.0);
        Box::pin(async move {
            let key = name(&format!("baton-{key}"));
            let lease = raw.lease(&key).await?;
            raw.write(lease, "given", 30).await.map(drop)
        })
    }
}

/// The Lease name for a key of the benchmark.
fn name(key: &str) -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() {
            c.to_ascii_lowercase()
        } else {
            '-'
        }
    };
    let key: String = key.chars().map(plain).collect();
    format!("palisade-raw-{key}-x")
}
