//! `Answer`: a response with the headers that every response has.

use std::convert::Infallible;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE,
};
use hyper::{Response, StatusCode};
use serde_json::Value;

use crate::problem::Problem;

pub(crate) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// See the module's documentation.
pub(crate) enum Answer {
    Document(StatusCode, Value),
    Other(Response<Body>),
}

impl Answer {
    /// Adds a field to a document.
    pub(crate) fn add(&mut self, field: &str, value: Value) {
        if let Self::Document(_, Value::Object(fields)) = self {
            fields.insert(field.to_owned(), value);
        }
    }

    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Document(status, _) => *status,
            Self::Other(response) => response.status(),
        }
    }

    pub(crate) fn into_response(self) -> Response<Body> {
        let mut response = match self {
            Self::Other(response) => response,
            Self::Document(status, document) => {
                let mut text = document.to_string().into_bytes();
                // A final newline, for curl in a terminal.
                text.push(b'\n');
                made(status, "application/json", text)
            }
        };
        let headers = response.headers_mut();
        let fixed = |text| HeaderValue::from_static(text);
        headers.insert(CACHE_CONTROL, fixed("no-store"));
        headers.insert("x-content-type-options", fixed("nosniff"));
        headers.insert("x-frame-options", fixed("DENY"));
        // The dashboard's files have their own policy.
        let policy = "default-src 'none'; frame-ancestors 'none'";
        let policed = headers.entry("content-security-policy");
        policed.or_insert(fixed(policy));
        response
    }
}

/// A document.
pub(crate) fn reply(status: StatusCode, document: &Value) -> Answer {
    Answer::Document(status, document.clone())
}

/// A document whose text is already there; nothing can be added to it.
pub(crate) fn document(mut text: String) -> Answer {
    text.push('\n');
    Answer::Other(made(StatusCode::OK, "application/json", text.into_bytes()))
}

/// What Prometheus scrapes.
pub(crate) fn metrics(text: String) -> Answer {
    let kind = "text/plain; version=0.0.4";
    Answer::Other(made(StatusCode::OK, kind, text.into_bytes()))
}

/// A problem.
pub(crate) fn problem(problem: &Problem) -> Answer {
    let mut response = made(problem.status, "application/problem+json", problem.body());
    let headers = response.headers_mut();
    if let Some(seconds) = problem.retry_after {
        headers.insert(RETRY_AFTER, seconds.into());
    }
    if let Some(Ok(allow)) = problem.allow.as_deref().map(HeaderValue::from_str) {
        headers.insert(ALLOW, allow);
    }
    if problem.status == StatusCode::UNAUTHORIZED {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    Answer::Other(response)
}

/// A response of this type.
pub(crate) fn made(
    status: StatusCode,
    kind: &'static str,
    body: impl Into<Bytes>,
) -> Response<Body> {
    let mut response = Response::new(Full::new(body.into()).boxed_unsync());
    *response.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
