//! A watch of a store that sends no notifications.

use std::time::Duration;

use futures_util::{StreamExt, stream};

use palisade_core::Result;
use palisade_core::engine::BoxStream;

/// Yields whenever the result of `look`, a fingerprint of what is watched, has changed.
pub fn poll_watch<T, F>(
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
