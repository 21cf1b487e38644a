//! The meaning of a gateway's refusal, and of a failed connection.
//!
//! A gateway reports an error as a problem document: its code is one of the library's kinds or one
//! of its own, and its outcome says whether the change may have been applied. A reply that is not
//! such a document, from a load balancer or another server, leaves that open.

use std::io;

use reqwest::StatusCode;
use serde::Deserialize;

use palisade_core::engine::{config_error, unreachable};
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::{Answer, Broke, Place, about_tls, broken_http, cause, redirected};

/// How we call the other side.
pub(super) const WHO: &str = "the gateway";

/// The advice for a port that speaks TLS.
const WITH_TLS: &str = "https: in place of http:";

/// A refusal, as a gateway writes it.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) code: String,
    detail: String,
    maybe_applied: bool,
    status: StatusCode,
    /// The end of a message about a reply that no gateway wrote.
    hint: String,
}

#[derive(Deserialize)]
struct Document {
    code: String,
    #[serde(default)]
    detail: String,
    #[serde(default)]
    outcome: String,
}

/// The longest detail that is passed on.
const DETAIL: usize = 500;

impl Problem {
    pub(super) fn of(answer: &Answer) -> Self {
        let Answer {
            status,
            headers,
            body,
        } = answer;
        let mut problem = Self::read(*status, body);
        problem.hint = redirected(*status, headers);
        problem
    }

    fn read(status: StatusCode, body: &[u8]) -> Self {
        let Ok(said) = serde_json::from_slice::<Document>(body) else {
            return Self {
                code: String::new(),
                detail: String::new(),
                // A load balancer that answers may have forwarded the request before.
                maybe_applied: status.is_server_error(),
                status,
                hint: String::new(),
            };
        };
        let detail = said.detail.chars().filter(|c| !c.is_control());
        Self {
            code: said.code,
            detail: detail.take(DETAIL).collect(),
            maybe_applied: said.outcome != "not_applied",
            status,
            hint: String::new(),
        }
    }

    /// Whether the place no longer exists.
    pub(super) fn is_gone(&self) -> bool {
        let codes = ["busy", "evicted", "failed", "lost", "no_claim", "released"];
        codes.contains(&self.code.as_str())
    }

    pub(super) fn error(&self, operation: &'static str) -> Error {
        let (kind, message) = match self.code.as_str() {
            "unauthorized" => (
                ErrorKind::Denied,
                "the gateway does not know the token; pass one with token_file= or \
                 PALISADE_GATEWAY_TOKEN (which palisade does not pass on to the commands that it \
                 runs)"
                    .to_owned(),
            ),
            "" => self.no_gateway(),
            code => (kind(code), self.detail.clone()),
        };
        let error = Error::new(kind, operation, message);
        if self.maybe_applied {
            error.maybe_applied()
        } else {
            error
        }
    }

    fn no_gateway(&self) -> (ErrorKind, String) {
        let status = self.status.as_u16();
        if self.status.is_server_error() {
            let message = format!("no gateway answers; something before it says {status}");
            return (ErrorKind::Unreachable, message);
        }
        let message = match &*self.hint {
            "" => format!("the answer has status {status}; is it a palisade gateway?"),
            hint => format!("the answer has status {status}{hint}"),
        };
        (ErrorKind::Unusable, message)
    }
}

fn kind(code: &str) -> ErrorKind {
    match code {
        "forbidden" => ErrorKind::Denied,
        // It may work later, or at another gateway.
        "draining" | "no_session" | "too_many" => ErrorKind::Unreachable,
        "evicted" | "no_claim" | "released" => ErrorKind::Lost,
        "wrong_host" => ErrorKind::Config,
        // The gateway's own trouble, and none of this process.
        "config" | "internal" | "would_block" => ErrorKind::Unusable,
        code => {
            let mut kinds = ErrorKind::ALL.iter().copied();
            let known = kinds.find(|kind| kind.code() == code);
            known.unwrap_or(ErrorKind::Unusable)
        }
    }
}

/// Reads a document.
pub(super) fn parse<T: for<'a> Deserialize<'a>>(operation: &'static str, body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|_| {
        let message = "the answer is none of a gateway's; is it a palisade gateway, and not older \
                       than this program?";
        Error::new(ErrorKind::Unusable, operation, message).maybe_applied()
    })
}

/// What a connection to `place` that failed means.
pub(super) fn broken(operation: &'static str, place: &str, broke: &Broke) -> Error {
    if let Broke::Connection(error) = broke
        && error.is_connect()
        && let Some(why) = cause::<io::Error>(error).and_then(|io| match io.kind() {
            io::ErrorKind::NotFound => Some("there is no such socket"),
            io::ErrorKind::PermissionDenied => Some("the socket is another user's"),
            _ => None,
        })
    {
        return unreachable(operation, format!("no gateway answers at {place}: {why}"));
    }
    let place = Place {
        who: WHO,
        nobody: "no gateway",
        base: place,
        with_tls: WITH_TLS,
        closed: "",
    };
    broken_http(operation, &place, broke, |tls| about_tls(WHO, "http", tls))
}

/// The error for the greeting of a gateway at `base`, if a server that expects TLS refused it.
pub(super) fn speaks_tls(base: &str, answer: &Answer) -> Option<Error> {
    let said = || String::from_utf8_lossy(&answer.body).contains("HTTPS");
    let expects = answer.status == StatusCode::BAD_REQUEST && base.starts_with("http://") && said();
    expects.then(|| config_error(format!("this port of {WHO} speaks TLS; use {WITH_TLS}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::Outcome;

    #[test]
    fn problems_keep_their_kind_and_outcome() {
        let read = |status: u16, body: &str| {
            let status = StatusCode::from_u16(status).unwrap();
            Problem::read(status, body.as_bytes()).error("enter")
        };
        let said = |code: &str, outcome: &str| {
            read(
                409,
                &format!(r#"{{"code":"{code}","detail":"do\nthis","outcome":"{outcome}"}}"#),
            )
        };
        let error = said("capacity_mismatch", "not_applied");
        assert_eq!(error.kind(), ErrorKind::CapacityMismatch);
        assert_eq!(error.outcome(), Outcome::NotApplied);
        assert_eq!(error.message(), "dothis");
        let error = said("unreachable", "maybe_applied");
        assert_eq!(error.outcome(), Outcome::MaybeApplied);
        assert!(error.is_transient());
        assert!(said("no_session", "not_applied").is_transient());
        assert_eq!(said("forbidden", "not_applied").kind(), ErrorKind::Denied);
        // What is wrong with the gateway is not wrong with this program, and a later gateway may
        // have words of its own.
        for code in ["config", "internal", "would_block", "of_tomorrow"] {
            assert_eq!(said(code, "not_applied").kind(), ErrorKind::Unusable);
        }
        // A balancer's.
        let error = read(502, "<html>");
        assert!(error.is_transient() && error.outcome() == Outcome::MaybeApplied);
        assert_eq!(read(404, "<html>").kind(), ErrorKind::Unusable);
    }
}
