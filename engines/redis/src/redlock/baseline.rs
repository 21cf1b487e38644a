//! The raw operations that `bench` compares with: what a hand-written client would send to all
//! servers at once, waiting for all of them.

use std::sync::Arc;

use futures_util::future::try_join_all;

use super::config::Options;
use crate::baseline::{RedisBaseline, of_server};
use palisade_core::Result;
use palisade_core::engine::{Baseline, BoxFuture, Settings, Url};

struct RedlockBaseline(Arc<Vec<RedisBaseline>>);

pub(super) async fn open(url: Url, settings: Settings) -> Result<Arc<dyn Baseline>> {
    let servers = Options::take(url, &settings)?.servers.into_iter();
    let servers = servers.map(|server| of_server(server, &settings)).collect();
    Ok(Arc::new(RedlockBaseline(Arc::new(servers))))
}

impl Baseline for RedlockBaseline {
    fn describe(&self) -> String {
        "SET NX PX, EVALSHA compare-and-delete; RPUSH, BLPOP; each on all servers at once"
            .to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let servers = Arc::clone(&self.0);
        Box::pin(async move {
            let id = format!("{:032x}", rand::random::<u128>());
            try_join_all(servers.iter().map(|server| server.set(&key, &id))).await?;
            let releases = servers.iter().map(|server| server.release(&key, &id));
            try_join_all(releases).await.map(drop)
        })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let takes: Vec<_> = self
            .0
            .iter()
            .map(|server| server.take(key.clone()))
            .collect();
        Box::pin(async move { try_join_all(takes).await.map(drop) })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let gives: Vec<_> = self
            .0
            .iter()
            .map(|server| server.give(key.clone()))
            .collect();
        Box::pin(async move { try_join_all(gives).await.map(drop) })
    }
}
