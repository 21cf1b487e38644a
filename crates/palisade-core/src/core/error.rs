//! `Error`: one type for everything that can go wrong.
//!
//! It has a kind (callers branch on it), the operation, the context, the cause, and whether the
//! change may have been applied despite the failure. Busy is not an error but a value, and loss is
//! not an error but a signal on the hold.

use std::fmt;
use std::sync::Arc;

/// The result of palisade's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kinds of failure. [`ErrorKind::code`] is the stable name of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An invalid name of a line.
    InvalidName,
    /// A ttl, weight, capacity or other argument out of its range.
    InvalidArgument,
    /// A URL or configuration that can't be used: unknown scheme or option, unusable directory.
    Config,
    /// The engine did not answer: it is down, partitioned, frozen or too slow.
    Unreachable,
    /// The engine answers, but its data can't be used: corrupt, full or of a foreign type.
    Unusable,
    /// The engine or the operating system denies permission.
    Denied,
    /// The engine can't do this (see its capability).
    Unsupported,
    /// The line is in use with another capacity or another kind.
    CapacityMismatch,
    /// `for_correctness` was requested of an engine whose tokens can decrease, by design or because
    /// of its configuration.
    NotForCorrectness,
    /// The hold was lost before the operation completed.
    Lost,
    /// The claim was in a circle of claims that wait for each other, and gave way. The caller's
    /// other holds stay held until it releases them.
    Deadlock,
    /// The call would block the only thread of a runtime.
    WouldBlock,
    /// A defect in palisade.
    Internal,
}

/// Lists every kind once, for its code and for [`ErrorKind::ALL`].
macro_rules! codes {
    ($($kind:ident => $code:literal,)*) => {
        /// Every kind.
        #[doc(hidden)]
        pub const ALL: &'static [Self] = &[$(Self::$kind),*];

        /// The stable name of this kind, as used in the command's JSON errors.
        pub const fn code(self) -> &'static str {
            match self {
                $(Self::$kind => $code,)*
            }
        }
    };
}

impl ErrorKind {
    codes! {
        InvalidName => "invalid_name",
        InvalidArgument => "invalid_argument",
        Config => "config",
        Unreachable => "unreachable",
        Unusable => "unusable",
        Denied => "denied",
        Unsupported => "unsupported",
        CapacityMismatch => "capacity_mismatch",
        NotForCorrectness => "not_for_correctness",
        Lost => "lost",
        Deadlock => "deadlock",
        WouldBlock => "would_block",
        Internal => "internal",
    }
}

/// Whether a failed change may have been applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Nothing was changed.
    NotApplied,
    /// The change may have been, or may still be, applied.
    MaybeApplied,
}

/// A failure: kind, operation, message, context, source and outcome.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    operation: &'static str,
    message: String,
    context: Vec<(&'static str, String)>,
    outcome: Outcome,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// A failure of `kind` in `operation` that changed nothing. The message says what to do.
    pub fn new(kind: ErrorKind, operation: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            operation,
            message: message.into(),
            context: Vec::new(),
            outcome: Outcome::NotApplied,
            source: None,
        }))
    }

    /// Adds context. Never a secret: URLs as scheme and host only.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        self.0.context.push((key, value.to_string()));
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(Arc::from(source.into()));
        self
    }

    /// Marks the change as possibly applied.
    #[must_use]
    pub fn maybe_applied(mut self) -> Self {
        self.0.outcome = Outcome::MaybeApplied;
        self
    }

    /// Records that nothing was changed: a read changes nothing, even if its reply was lost.
    #[must_use]
    #[allow(dead_code, reason = "some engines need it")]
    pub fn not_applied(mut self) -> Self {
        self.0.outcome = Outcome::NotApplied;
        self
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The operation that failed: `enter`, `renew`, `connect`, …
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// What went wrong and what to do about it, without operation, context and source.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Whether the failed change may have been applied.
    pub fn outcome(&self) -> Outcome {
        self.0.outcome
    }

    /// Whether the same call may succeed a little later.
    pub fn is_transient(&self) -> bool {
        self.0.kind == ErrorKind::Unreachable
    }
}

/// The error for an invalid argument of `connect`.
pub fn config_error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, "connect", message)
}

/// The error for a connection that can't be made now.
#[allow(dead_code, reason = "some engines need it")]
pub fn no_connection(message: impl Into<String>) -> Error {
    unreachable("connect", message)
}

/// The error for a server that does not answer.
#[allow(dead_code, reason = "some engines need it")]
pub fn unreachable(operation: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unreachable, operation, message)
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.operation, self.0.message)?;
        for (index, (key, value)) in self.0.context.iter().enumerate() {
            write!(f, "{}{key}={value}", if index == 0 { " (" } else { ", " })?;
        }
        if !self.0.context.is_empty() {
            f.write_str(")")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}: {self}", self.0.kind, self.0.outcome)?;
        match &self.0.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}
