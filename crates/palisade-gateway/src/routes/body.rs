//! The body of a request: its document, and the durations in it.

use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::StatusCode;
use hyper::body::{Body as _, Incoming};
use hyper::header::CONTENT_TYPE;
use palisade::command::parse_duration;
use serde::de::DeserializeOwned;

use super::Asking;
use crate::problem::Problem;

/// The largest body.
const BODY: usize = 1024 * 1024;
/// How long a body may take.
const BODY_TIME: Duration = Duration::from_secs(10);

pub(super) fn duration(what: &str, text: &str) -> Result<Duration, Problem> {
    parse_duration(text).map_err(|why| Problem::bad_request(format!("{what}: {why}")))
}

/// Reads the document of a request.
pub(super) async fn read<T: DeserializeOwned>(
    asking: &Asking,
    body: Incoming,
) -> Result<T, Problem> {
    let kind = asking
        .headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let kind = kind
        .and_then(|kind| kind.split(';').next())
        .unwrap_or_default();
    if !kind.trim().eq_ignore_ascii_case("application/json") {
        let detail = "send a document of `Content-Type: application/json`";
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Err(Problem::new(status, "not_json", detail));
    }
    let too_large = || {
        let detail = "a body has at most 1 MiB";
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail)
    };
    if body.size_hint().lower() > BODY as u64 {
        return Err(too_large());
    }
    let collected = tokio::time::timeout(BODY_TIME, Limited::new(body, BODY).collect()).await;
    let bytes = match collected {
        Ok(Ok(bytes)) => bytes.to_bytes(),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            return Err(too_large());
        }
        Ok(Err(_)) => return Err(Problem::bad_request("the body was cut off")),
        Err(_) => {
            let status = StatusCode::REQUEST_TIMEOUT;
            return Err(Problem::new(status, "too_slow", "the body took too long"));
        }
    };
    // An empty body is an empty document: `curl -X POST` sends none.
    let bytes = if bytes.is_empty() {
        &b"{}"[..]
    } else {
        &bytes[..]
    };
    serde_json::from_slice(bytes).map_err(|error| {
        // The parser's message may repeat what was sent, even a secret in the wrong field.
        let (line, column) = (error.line(), error.column());
        Problem::bad_request(format!(
            "the document is not as expected at line {line}, column {column}; see docs/gateway.md \
             for its fields"
        ))
    })
}
