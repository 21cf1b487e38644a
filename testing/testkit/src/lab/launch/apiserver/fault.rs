//! The faults that can be injected into requests to the fake API server.

use std::time::Duration;

use hyper::Method;

/// What happens to a request.
#[derive(Debug, Clone)]
pub enum Fault {
    /// It is applied, and the connection ends without an answer.
    ReplyLost,
    /// The connection ends, and nothing is applied.
    RequestLost,
    /// The server times out on etcd: 504 (or 500, as in 1.20), applied or not.
    Ambiguous {
        /// 504 or 500.
        code: u16,
        /// Whether it is applied nevertheless.
        applied: bool,
    },
    /// It is answered with 504 at once, and applied after this time: a proposal that etcd committed
    /// late.
    AppliedLate(Duration),
    /// Priority and fairness: 429 as plain text, not executed.
    TooMany {
        /// The value of the header `Retry-After`.
        retry_after: u64,
    },
    /// It is refused with this code.
    Refused(u16),
    /// It is executed after this time.
    Delayed(Duration),
}

/// Which requests a fault concerns, and how many.
#[derive(Debug, Clone)]
pub struct Rule {
    pub(super) method: Option<Method>,
    pub(super) containing: String,
    pub(super) left: usize,
    pub(super) fault: Fault,
}

impl Rule {
    /// The next request of this method.
    pub fn next(method: Method, fault: Fault) -> Self {
        Self {
            method: Some(method),
            containing: String::new(),
            left: 1,
            fault,
        }
    }

    /// Every request.
    pub fn always(fault: Fault) -> Self {
        Self {
            method: None,
            containing: String::new(),
            left: usize::MAX,
            fault,
        }
    }

    /// Limits it to this many requests.
    #[must_use]
    pub fn times(self, left: usize) -> Self {
        Self { left, ..self }
    }

    /// Limits it to requests whose body or path contains this text.
    #[must_use]
    pub fn containing(self, text: &str) -> Self {
        let containing = text.to_owned();
        Self { containing, ..self }
    }

    pub(super) fn concerns(&self, method: &Method, path: &str, body: &[u8]) -> bool {
        let has = |text: &str| text.contains(&self.containing);
        self.left > 0
            && self.method.as_ref().is_none_or(|wanted| wanted == method)
            && (has(path) || has(&String::from_utf8_lossy(body)))
    }
}

/// A permission.
#[derive(Debug, Clone)]
pub struct Grant {
    /// The bearer token.
    pub token: String,
    /// `get`, `create`, `update`, …
    pub verbs: Vec<String>,
    /// The names that it covers; empty for all.
    pub names: Vec<String>,
}

impl Grant {
    /// All verbs on all Leases.
    pub fn all(token: &str) -> Self {
        let verbs = [
            "get", "list", "watch", "create", "update", "patch", "delete",
        ];
        Self::of(token, &verbs)
    }

    /// These verbs on all Leases.
    pub fn of(token: &str, verbs: &[&str]) -> Self {
        Self {
            token: token.to_owned(),
            verbs: verbs.iter().map(|&verb| verb.to_owned()).collect(),
            names: Vec::new(),
        }
    }

    pub(super) fn allows(&self, verb: &str, name: &str) -> bool {
        let named = self.names.is_empty() || self.names.iter().any(|known| known == name);
        self.verbs.iter().any(|known| known == verb) && named
    }
}
