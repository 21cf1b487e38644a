//! The raw operations that `bench` compares with: create, getChildren and delete in sequence, as in
//! every recipe, and a watch and a delete for a hand-over, with the same client and connection.

use std::sync::Arc;
use std::time::Duration;

use super::Inner;
use super::error;
use super::keys::Keys;
use super::proto::{Answer, Lives, Request, code};
use super::session::Session;
use super::watches::Watched;
use palisade_core::Result;
use palisade_core::engine::{Baseline, BoxFuture, Settings, Url};

/// How long a lost event may delay a hand-over.
const RECHECK: Duration = Duration::from_secs(1);

/// Opens the ensemble that the URL names.
///
/// # Errors
/// As opening the engine.
pub(super) async fn open(url: Url, settings: &Settings) -> Result<Arc<dyn Baseline>> {
    let inner = super::config::open(url, settings).await?;
    Ok(Arc::new(Raw(Arc::new(inner))))
}

struct Raw(Arc<Inner>);

impl Baseline for Raw {
    fn describe(&self) -> String {
        "create, getChildren, delete; watch and delete".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move { cycle(&inner, &inner.raw(&key)).await })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move { take(&inner, &inner.raw(&key)).await })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move { give(&inner, &inner.raw(&key)).await })
    }
}

impl Inner {
    fn raw(&self, key: &str) -> String {
        let base = self.keys.base().trim_end_matches('/');
        format!("{base}/.raw/{}", key.replace('/', "%2F"))
    }

    async fn one(&self, session: &Session, request: Request) -> Result<Answer> {
        session.ask("raw", self.client.timeout, request).await
    }

    /// Creates a znode, and its parents if they are missing.
    async fn make(&self, session: &Session, path: &str, lives: Lives) -> Result<String> {
        let create = |path: &str, lives| Request::Create {
            path: path.to_owned(),
            data: Vec::new(),
            acl: self.client.acl,
            lives,
        };
        loop {
            match self.one(session, create(path, lives)).await? {
                Ok(created) => return Ok(created.path),
                Err(refused) if refused.is(code::NODE_EXISTS) => return Ok(path.to_owned()),
                Err(refused) if refused.is(code::NO_NODE) => {}
                Err(refused) => return Err(error::refused("raw", refused)),
            }
            let above = path.rsplit_once('/').map_or("", |(above, _)| above);
            for parent in Keys::parents(above) {
                let _ = self.one(session, create(parent, Lives::Container)).await?;
            }
        }
    }
}

async fn cycle(inner: &Inner, line: &str) -> Result<()> {
    let session = inner.client.any().await?;
    let path = format!("{line}/lock-");
    let path = inner
        .make(&session, &path, Lives::EphemeralSequential)
        .await?;
    let _ = inner
        .one(&session, Request::Children(line.to_owned(), false))
        .await?;
    inner.one(&session, Request::Delete(path)).await.map(drop)
}

async fn take(inner: &Inner, key: &str) -> Result<()> {
    let session = inner.client.any().await?;
    let (folder, baton) = (format!("{key}-baton"), format!("{key}-baton/b"));
    loop {
        let fired = session.watch(&folder, Watched::Children);
        match inner.one(&session, Request::Delete(baton.clone())).await? {
            Ok(_) => return Ok(()),
            Err(refused) if refused.is(code::NO_NODE) => {}
            Err(refused) => return Err(error::refused("raw", refused)),
        }
        let look = inner
            .one(&session, Request::Children(folder.clone(), true))
            .await?;
        match look {
            Ok(look) if look.names.is_empty() => {
                let _ = tokio::time::timeout(RECHECK, fired).await;
            }
            Ok(_) => {}
            Err(_) => drop(inner.make(&session, &folder, Lives::Container).await?),
        }
    }
}

async fn give(inner: &Inner, key: &str) -> Result<()> {
    let session = inner.client.any().await?;
    let baton = format!("{key}-baton/b");
    inner
        .make(&session, &baton, Lives::Ephemeral)
        .await
        .map(drop)
}
