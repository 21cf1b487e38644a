//! `Finish`: a future that goes on in the background when whoever waits for it is dropped.
//!
//! It runs where it is awaited, so that an answer wakes nobody else in between; only when it is
//! dropped unfinished does it become a task of the runtime.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;

use crate::core::engine::BoxFuture;

/// See the module's text.
pub(super) struct Finish<T: Send + 'static>(Option<BoxFuture<T>>);

impl<T: Send + 'static> Finish<T> {
    pub(super) fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Some(Box::pin(future)))
    }
}

impl<T: Send + 'static> Future for Finish<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Some(future) = &mut self.0 else {
            // Polled after its end, which no await does.
            return Poll::Pending;
        };
        let done = future.as_mut().poll(context);
        if done.is_ready() {
            self.0 = None;
        }
        done
    }
}

impl<T: Send + 'static> Drop for Finish<T> {
    fn drop(&mut self) {
        // Without a runtime there is nobody to finish it.
        if let Some(future) = self.0.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(future);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn it_is_finished_also_when_it_is_dropped() {
        assert_eq!(Finish::new(async { 7 }).await, 7);
        let (go, gone) = oneshot::channel::<()>();
        let (told, done) = oneshot::channel();
        let mut finish = Finish::new(async move {
            let _ = gone.await;
            let _ = told.send(());
        });
        let soon = std::time::Duration::from_millis(1);
        assert!(tokio::time::timeout(soon, &mut finish).await.is_err());
        drop(finish);
        go.send(()).unwrap();
        done.await.unwrap();
    }
}
