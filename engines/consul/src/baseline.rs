//! The raw operations that `bench` compares with: `PUT ?acquire` and `PUT ?release` with one
//! session, and a blocking query for a key that is written and deleted.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;

use super::client::{Client, Read, SessionSettings, path};
use super::config::Options;
use super::kv::session_text;
use palisade_core::engine::{Baseline, BoxFuture, Settings, Url};
use palisade_core::{Error, ErrorKind, Result};

/// Opens the raw operations on the agent of `url`.
pub(super) async fn open_baseline(mut url: Url, settings: &Settings) -> Result<Arc<dyn Baseline>> {
    let options = Options::take(&mut url, settings)?;
    let client = Client::new(options.access)?;
    // Consul ends a session after at most twice its ttl, far later than a benchmark; it is never
    // renewed.
    let session = SessionSettings {
        ttl: Duration::from_secs(3600),
        lock_delay: Duration::ZERO,
        checks: Vec::new(),
    };
    let session = session_text(client.create_session(&session).await?);
    Ok(Arc::new(Raw(Arc::new(Inner { client, session }))))
}

struct Raw(Arc<Inner>);

struct Inner {
    client: Client,
    session: String,
}

impl Inner {
    async fn put(&self, key: &str, query: &str) -> Result<()> {
        let path = format!("/v1/kv/palisade-raw/{}?{query}", path(key));
        let put = self
            .client
            .send("baseline", Method::PUT, &path, b"raw".to_vec());
        if put.await?.body.starts_with(b"true") {
            return Ok(());
        }
        let message = "a raw key is in use";
        Err(Error::new(ErrorKind::Internal, "baseline", message))
    }
}

impl Baseline for Raw {
    fn describe(&self) -> String {
        "PUT ?acquire, PUT ?release; hand-over: PUT, blocking query, DELETE".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let raw = Arc::clone(&self.0);
        Box::pin(async move {
            raw.put(&key, &format!("acquire={}", raw.session)).await?;
            raw.put(&key, &format!("release={}", raw.session)).await
        })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let raw = Arc::clone(&self.0);
        Box::pin(async move {
            let key = format!("palisade-raw/baton-{key}");
            let mut index = 0;
            loop {
                let read = match index {
                    0 => Read::Consistent,
                    index => Read::After(index, Duration::from_secs(10)),
                };
                let seen = raw.client.read("baseline", &key, false, read).await?;
                index = seen.index;
                if let Some(pair) = seen.pairs.first() {
                    let path = format!("/v1/kv/{}?cas={}", path(&key), pair.modify_index);
                    let deleted = raw
                        .client
                        .send("baseline", Method::DELETE, &path, Vec::new());
                    if deleted.await?.body.starts_with(b"true") {
                        return Ok(());
                    }
                }
            }
        })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let raw = Arc::clone(&self.0);
        Box::pin(async move { raw.put(&format!("baton-{key}"), "").await })
    }
}
