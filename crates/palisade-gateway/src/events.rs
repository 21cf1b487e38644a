//! Server-sent events: a session's own changes, and hints that lines have changed.
//!
//! Both are hints: a reader requests the current state, which also fills a gap.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{FutureExt, Stream, StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::Response;
use hyper::body::Frame;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use palisade::Result;
use palisade::engine::BoxStream;
use serde_json::json;
use tokio::sync::broadcast::error::RecvError;

use crate::answer::Answer;
use crate::limits::Counted;
use crate::session::Session;

/// A comment this often keeps proxies from cutting the stream.
const ALIVE: Duration = Duration::from_secs(15);
/// The most hints that one event combines.
const MOST_AT_ONCE: usize = 64;
/// At most four hints a second, whatever changes.
const APART: Duration = Duration::from_millis(250);

/// Grants, losses and evictions of a session's claims, until the principal has `ended`.
pub(crate) fn of_session(
    session: &Session,
    counted: Counted,
    ended: impl Future<Output = ()> + Send + 'static,
) -> Answer {
    let state = (session.changes.subscribe(), counted);
    let events = stream::unfold(state, |(mut changes, counted)| async move {
        let event = match tokio::time::timeout(ALIVE, changes.recv()).await {
            Err(_) => comment(),
            Ok(Ok(change)) => {
                event("claim", &json!({"id": change.id, "state": change.state})).into()
            }
            Ok(Err(RecvError::Lagged(_))) => event("gap", &json!({})).into(),
            // The session has ended.
            Ok(Err(RecvError::Closed)) => return None,
        };
        Some((event, (changes, counted)))
    });
    streamed(events.take_until(ended))
}

/// Hints that lines have changed, until the principal has `ended`.
pub(crate) fn of_lines(
    changes: BoxStream<Result<()>>,
    counted: Counted,
    ended: impl Future<Output = ()> + Send + 'static,
) -> Answer {
    streamed(hints(changes, counted).take_until(ended))
}

/// Few events for many hints: of several prefixes each begins with one, and one tells of all. A
/// failure among them is told beside it: a watch of others may go on.
fn hints(
    changes: BoxStream<Result<()>>,
    counted: impl Send + 'static,
) -> impl Stream<Item = Bytes> + Send + 'static {
    // The end may be found among the hints, and is told after them.
    let state = (changes.fuse(), counted);
    stream::unfold(state, |(mut changes, counted)| async move {
        let first = match tokio::time::timeout(ALIVE, changes.next()).await {
            Err(_) => return Some((comment(), (changes, counted))),
            Ok(first) => first?,
        };
        tokio::time::sleep(APART).await;
        let mut hints = vec![first];
        while hints.len() < MOST_AT_ONCE
            && let Some(Some(hint)) = changes.next().now_or_never()
        {
            hints.push(hint);
        }
        let mut told = String::new();
        if hints.iter().any(Result::is_ok) {
            told += &event("changed", &json!({}));
        }
        if let Some(error) = hints.into_iter().find_map(Result::err) {
            told += &event("gap", &json!({"code": error.kind().code()}));
        }
        Some((told.into(), (changes, counted)))
    })
}

fn event(name: &str, data: &serde_json::Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

fn comment() -> Bytes {
    Bytes::from_static(b": alive\n\n")
}

fn streamed(events: impl Stream<Item = Bytes> + Send + 'static) -> Answer {
    // The first bytes tell the reader that no later change is missed.
    let events = stream::iter([comment()]).chain(events);
    let frames = events.map(|bytes| Ok::<_, Infallible>(Frame::data(bytes)));
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    let kind = HeaderValue::from_static("text/event-stream");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Answer::Other(response)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use palisade::{Error, ErrorKind};

    use super::*;

    #[tokio::test]
    async fn a_failure_among_hints_is_told_beside_them() {
        let failure = || Err(Error::new(ErrorKind::Unreachable, "watch", "cut off"));
        let watch = |hints: Vec<Result<()>>| stream::iter(hints).chain(stream::pending()).boxed();
        let both = vec![watch(vec![Ok(())]), watch(vec![Ok(()), failure(), Ok(())])];
        let mut told = pin!(hints(stream::select_all(both).boxed(), ()));
        let (changed, gap) = (
            "event: changed\ndata: {}\n\n",
            "event: gap\ndata: {\"code\":\"unreachable\"}\n\n",
        );
        assert_eq!(told.next().await.unwrap(), format!("{changed}{gap}"));
        let mut told = pin!(hints(watch(vec![failure()]), ()));
        assert_eq!(told.next().await.unwrap(), gap);
    }

    #[tokio::test]
    async fn the_end_of_a_watch_is_the_end_of_its_events() {
        // It panics when it is asked again.
        let once = stream::unfold(true, |more| async move { more.then_some((Ok(()), false)) });
        let told: Vec<Bytes> = hints(once.boxed(), ()).collect().await;
        assert_eq!(told.len(), 1);
    }
}
