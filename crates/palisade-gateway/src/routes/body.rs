//! The body of a request: its document, and the durations in it.

use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::StatusCode;
use hyper::body::{Body as _, Incoming};
use hyper::header::CONTENT_TYPE;
use palisade::command::parse_duration;
use serde::de::DeserializeOwned;

use super::{Asking, Routes};
use crate::fields;
use crate::problem::Problem;

/// The largest body.
const BODY: usize = 1024 * 1024;
/// What is larger takes so long to parse that it would delay requests of others.
const GREAT: usize = 64 * 1024;
/// How long a body may take, with the wait for others of the same principal.
const BODY_TIME: Duration = Duration::from_secs(10);

pub(super) fn duration(what: &str, text: &str) -> Result<Duration, Problem> {
    // The message may repeat the text, which may be a secret in the wrong field.
    parse_duration(text).map_err(|_| {
        Problem::bad_request(format!(
            "the field `{what}` must be a duration such as 10s or 500ms"
        ))
    })
}

impl Routes {
    /// Reads the document of a request. How much of the bodies of a principal is in memory, and how
    /// many great ones are parsed at a time, is bounded.
    pub(super) async fn read<T: DeserializeOwned + Send + 'static>(
        &self,
        asking: &Asking,
        body: Incoming,
    ) -> Result<T, Problem> {
        check_kind(asking)?;
        let hint = body.size_hint();
        if hint.lower() > BODY as u64 {
            return Err(too_large());
        }
        let (counters, principal) = (&self.sessions.counters, &asking.principal);
        let most = hint.upper().unwrap_or(BODY as u64).min(BODY as u64);
        let room = u32::try_from(most).unwrap_or(u32::MAX);
        let collect = async {
            let room = counters.body(principal, room).await;
            (Limited::new(body, BODY).collect().await, room)
        };
        let (bytes, _room) = match tokio::time::timeout(BODY_TIME, collect).await {
            Ok((Ok(bytes), room)) => (bytes.to_bytes(), room),
            Ok((Err(error), _)) if error.is::<http_body_util::LengthLimitError>() => {
                return Err(too_large());
            }
            Ok((Err(_), _)) => return Err(Problem::bad_request("the body was cut off")),
            Err(_) => {
                let status = StatusCode::REQUEST_TIMEOUT;
                return Err(Problem::new(status, "too_slow", "the body took too long"));
            }
        };
        asking.via.phases.arrived();
        if bytes.len() <= GREAT {
            return parse(&bytes);
        }
        let _one = counters.great_request(principal).await;
        // Elsewhere, so that requests of others don't wait for it.
        let parsed = tokio::task::spawn_blocking(move || parse(&bytes)).await;
        parsed.unwrap_or_else(|_| Err(Problem::bad_request("the document can't be read")))
    }
}

fn check_kind(asking: &Asking) -> Result<(), Problem> {
    let kind = asking
        .headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let kind = kind
        .and_then(|kind| kind.split(';').next())
        .unwrap_or_default();
    if kind.trim().eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let detail = "send a document of `Content-Type: application/json`";
    let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    Err(Problem::new(status, "not_json", detail))
}

fn too_large() -> Problem {
    let detail = "a body has at most 1 MiB";
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail)
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    // An empty body is an empty document: `curl -X POST` sends none.
    let bytes = if bytes.is_empty() { &b"{}"[..] } else { bytes };
    serde_json::from_slice(bytes).map_err(|error| {
        // The parser's message may repeat what was sent, even a secret in the wrong field.
        let (line, column) = (error.line(), error.column());
        let document = Some(bytes).filter(|bytes| bytes.len() <= GREAT);
        let document = document.and_then(|bytes| serde_json::from_slice(bytes).ok());
        let why = match &document {
            Some(document) => fields::explain::<T>(document),
            None => "the document is not as expected".into(),
        };
        Problem::bad_request(format!(
            "{why} (line {line}, column {column}); see docs/gateway.md for its fields"
        ))
    })
}
