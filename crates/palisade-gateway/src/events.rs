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

/// Grants, losses and evictions of a session's claims.
pub(crate) fn of_session(session: &Session, counted: Counted) -> Answer {
    let state = (session.changes.subscribe(), counted);
    streamed(stream::unfold(state, |(mut changes, counted)| async move {
        let event = match tokio::time::timeout(ALIVE, changes.recv()).await {
            Err(_) => comment(),
            Ok(Ok(change)) => event("claim", &json!({"id": change.id, "state": change.state})),
            Ok(Err(RecvError::Lagged(_))) => event("gap", &json!({})),
            // The session has ended.
            Ok(Err(RecvError::Closed)) => return None,
        };
        Some((event, (changes, counted)))
    }))
}

/// Hints that lines have changed.
pub(crate) fn of_lines(changes: BoxStream<Result<()>>, counted: Counted) -> Answer {
    let state = (changes, counted);
    streamed(stream::unfold(state, |(mut changes, counted)| async move {
        let told = match tokio::time::timeout(ALIVE, changes.next()).await {
            Err(_) => comment(),
            Ok(Some(Ok(()))) => {
                tokio::time::sleep(APART).await;
                // Of several prefixes each begins with a hint, and one tells of all.
                let mut more = MOST_AT_ONCE;
                while more > 0 && changes.next().now_or_never().is_some() {
                    more -= 1;
                }
                event("changed", &json!({}))
            }
            Ok(Some(Err(error))) => {
                tokio::time::sleep(APART).await;
                event("gap", &json!({"code": error.kind().code()}))
            }
            Ok(None) => return None,
        };
        Some((told, (changes, counted)))
    }))
}

fn event(name: &str, data: &serde_json::Value) -> Bytes {
    format!("event: {name}\ndata: {data}\n\n").into()
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
