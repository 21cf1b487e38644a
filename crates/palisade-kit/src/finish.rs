//! `finish`: a future that continues in the background when its caller is dropped.
//!
//! It runs where it is awaited, so that an answer needs no extra wake-up. Only if it is dropped
//! unfinished does it become a task of the runtime, so that the table that records its outcome is
//! still updated.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::{Fuse, FusedFuture};
use tokio::runtime::Handle;

use palisade_core::engine::BoxFuture;

/// Runs a future to its end, whether or not the caller keeps waiting for it.
pub fn finish<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> impl Future<Output = T> {
    Finish(future.boxed().fuse())
}

struct Finish<T: Send + 'static>(Fuse<BoxFuture<T>>);

impl<T: Send + 'static> Future for Finish<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.0.poll_unpin(context)
    }
}

impl<T: Send + 'static> Drop for Finish<T> {
    fn drop(&mut self) {
        // Without a runtime nothing can finish it.
        if !self.0.is_terminated()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(std::mem::replace(&mut self.0, Fuse::terminated()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn it_is_finished_also_when_it_is_dropped() {
        assert_eq!(finish(async { 7 }).await, 7);
        let (go, gone) = oneshot::channel::<()>();
        let (tell, told) = oneshot::channel();
        let mut waits = Box::pin(finish(async move {
            let _ = gone.await;
            let _ = tell.send(());
        }));
        assert!((&mut waits).now_or_never().is_none());
        drop(waits);
        go.send(()).unwrap();
        told.await.unwrap();
    }
}
