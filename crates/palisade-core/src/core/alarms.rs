//! Streams of hints from a broadcast channel: alarms for the keeper, changes for a watch.

use futures_util::{StreamExt, stream};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::core::engine::{Alarm, BoxStream};

/// A stream of the broadcast alarms; `Alarm::All` if some were missed.
pub fn alarms(heard: broadcast::Receiver<Alarm>) -> BoxStream<Alarm> {
    hints(heard, |alarm| Some(alarm.unwrap_or(Alarm::All)))
}

/// A stream of what `pick` makes of each message; `pick` receives `None` if some were missed.
pub fn hints<T: Clone + Send + 'static, U: Send + 'static>(
    heard: broadcast::Receiver<T>,
    pick: impl Fn(Option<T>) -> Option<U> + Send + 'static,
) -> BoxStream<U> {
    stream::unfold((heard, pick), |(mut heard, pick)| async move {
        loop {
            let message = match heard.recv().await {
                Ok(message) => Some(message),
                Err(RecvError::Lagged(_)) => None,
                Err(RecvError::Closed) => return None,
            };
            if let Some(picked) = pick(message) {
                return Some((picked, (heard, pick)));
            }
        }
    })
    .boxed()
}
