//! `Problem`: a failure, as `application/problem+json`.
//!
//! `code` is the library's word for a kind of failure, or one of the gateway's own; `detail` says
//! what to do; `outcome` says whether the change may have been applied anyway.

use hyper::StatusCode;
use palisade::{Error, ErrorKind, Outcome};
use serde_json::json;

/// A refusal or a failure.
#[derive(Debug, Clone)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    pub(crate) detail: String,
    outcome: Outcome,
    /// After how many seconds to retry.
    pub(crate) retry_after: Option<u32>,
    /// The methods that an address takes.
    pub(crate) allow: Option<String>,
    /// The lock that a refusal is about, for the audit events only.
    pub(crate) lock: Option<String>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self {
            status,
            code,
            detail: detail.into(),
            outcome: Outcome::NotApplied,
            retry_after: None,
            allow: None,
            lock: None,
        }
    }

    pub(crate) fn method_not_allowed(allow: String) -> Self {
        let detail = format!("this address takes {allow}");
        let status = StatusCode::METHOD_NOT_ALLOWED;
        Self {
            allow: Some(allow),
            ..Self::new(status, "method_not_allowed", detail)
        }
    }

    pub(crate) fn bad_request(detail: impl Into<String>) -> Self {
        let code = ErrorKind::InvalidArgument.code();
        Self::new(StatusCode::BAD_REQUEST, code, detail)
    }

    /// A refusal that does not reveal whether the requested name exists.
    pub(crate) fn forbidden(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", detail)
    }

    /// The same refusal, about this lock or prefix.
    pub(crate) fn about(mut self, lock: &str) -> Self {
        self.lock = Some(lock.to_owned());
        self
    }

    pub(crate) fn unauthorized() -> Self {
        let detail = "send a token as `Authorization: Bearer TOKEN`; see docs/gateway.md";
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", detail)
    }

    pub(crate) fn no_session() -> Self {
        let detail = "there is no such session at this gateway: it has ended, or it was opened at \
                      another; what you hold is yours until your own deadline";
        Self::new(StatusCode::GONE, "no_session", detail)
    }

    /// The same id for two different claims.
    pub(crate) fn id_reused(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "id_reused", detail)
    }

    /// The engine did not answer in time; the change may have been applied.
    pub(crate) fn too_late(detail: impl Into<String>) -> Self {
        let code = ErrorKind::Unreachable.code();
        let mut problem = Self::new(StatusCode::SERVICE_UNAVAILABLE, code, detail);
        (problem.outcome, problem.retry_after) = (Outcome::MaybeApplied, Some(1));
        problem
    }

    pub(crate) fn too_many(what: &str, limit: usize) -> Self {
        let detail = format!("this principal has {limit} {what} here, the most that it may have");
        let mut problem = Self::new(StatusCode::TOO_MANY_REQUESTS, "too_many", detail);
        problem.retry_after = Some(1);
        problem
    }

    /// Places for connections run short, and a client without a valid token can't have one.
    pub(crate) fn crowded() -> Self {
        let detail = "there are too many connections: only requests with a token are answered";
        let status = StatusCode::TOO_MANY_REQUESTS;
        let mut problem = Self::new(status, "too_many", detail);
        problem.retry_after = Some(1);
        problem
    }

    pub(crate) fn draining() -> Self {
        let detail = "this gateway is about to stop; open the session at another";
        let mut problem = Self::new(StatusCode::SERVICE_UNAVAILABLE, "draining", detail);
        problem.retry_after = Some(1);
        problem
    }

    pub(crate) fn body(&self) -> Vec<u8> {
        let outcome = match self.outcome {
            Outcome::NotApplied => "not_applied",
            Outcome::MaybeApplied => "maybe_applied",
        };
        json!({
            "title": self.status.canonical_reason().unwrap_or_default(),
            "status": self.status.as_u16(),
            "code": self.code,
            "detail": self.detail,
            "outcome": outcome,
        })
        .to_string()
        .into_bytes()
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let status = match error.kind() {
            ErrorKind::InvalidName | ErrorKind::InvalidArgument => StatusCode::BAD_REQUEST,
            ErrorKind::CapacityMismatch | ErrorKind::Deadlock => StatusCode::CONFLICT,
            ErrorKind::Lost => StatusCode::GONE,
            ErrorKind::Unsupported | ErrorKind::NotForCorrectness => StatusCode::NOT_IMPLEMENTED,
            ErrorKind::Unreachable => StatusCode::SERVICE_UNAVAILABLE,
            // The engine refuses the gateway, or can't be used: a client can't fix that.
            _ => StatusCode::BAD_GATEWAY,
        };
        let transient = error.is_transient();
        Self {
            status,
            code: error.kind().code(),
            detail: error.message().to_owned(),
            outcome: error.outcome(),
            retry_after: transient.then_some(1),
            allow: None,
            lock: None,
        }
    }
}
