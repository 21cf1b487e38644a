//! A watch of a store that tells nobody of its changes.

use std::time::Duration;

use futures_util::{StreamExt, stream};

use crate::core::engine::BoxStream;
use crate::core::error::Result;

/// Yields whenever `look` sees something else than before: a fingerprint of what is watched.
pub(crate) fn poll_watch<T, F>(
    every: Duration,
    look: impl Fn() -> F + Send + 'static,
) -> BoxStream<Result<()>>
where
    T: PartialEq + Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    stream::unfold((look, None), move |(look, mut seen)| async move {
        loop {
            match look().await {
                Ok(now) if seen.as_ref() == Some(&now) => tokio::time::sleep(every).await,
                Ok(now) => {
                    seen = Some(now);
                    return Some((Ok(()), (look, seen)));
                }
                Err(error) => {
                    tokio::time::sleep(every).await;
                    return Some((Err(error), (look, seen)));
                }
            }
        }
    })
    .boxed()
}
