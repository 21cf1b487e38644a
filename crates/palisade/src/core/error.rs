//! `Error`: one type for everything that can go wrong.
//!
//! It says what kind of failure it is (a caller branches on that), during which operation, where,
//! because of what, and whether the change it was about may have been applied all the same.
//! Busy is not an error (it is a value) and neither is loss (it is a signal on the hold).

use std::fmt;
use std::sync::Arc;

/// What palisade's functions answer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kinds of failure. [`ErrorKind::code`] is the stable word for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A name that no line can have.
    InvalidName,
    /// A ttl, weight, capacity or other argument out of its range.
    InvalidArgument,
    /// A URL or configuration that can't be used: unknown scheme or option, unusable directory.
    Config,
    /// The engine did not answer: down, cut off, frozen or too slow.
    Unreachable,
    /// The engine answers but what it stores can't be used: corrupt, full or of a foreign type.
    Unusable,
    /// The engine or the operating system refuses the right to do it.
    Denied,
    /// The engine can't do this (see its capability).
    Unsupported,
    /// The line is in use with another capacity or another kind.
    CapacityMismatch,
    /// `for_correctness` was asked of an engine whose tokens can go back, by its nature or as it
    /// is set up.
    NotForCorrectness,
    /// The hold was lost before the operation could be done.
    Lost,
    /// The claim was in a circle of claims that wait for each other, and gave way. What its caller
    /// holds is the caller's to release.
    Deadlock,
    /// The call would block the only thread of a runtime.
    WouldBlock,
    /// A defect in palisade.
    Internal,
}

/// One list for all that is said of every kind.
macro_rules! codes {
    ($($kind:ident => $code:literal,)*) => {
        /// Every kind.
        #[doc(hidden)]
        pub const ALL: &'static [Self] = &[$(Self::$kind),*];

        /// The stable word for this kind, as in the command's JSON errors.
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

/// Whether the change that failed may be in force.
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

    /// Adds where it happened. Never a secret: URLs as scheme and host only.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        self.0.context.push((key, value.to_string()));
        self
    }

    /// Adds what caused it.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(Arc::from(source.into()));
        self
    }

    /// Says that the change may have been applied.
    #[must_use]
    pub fn maybe_applied(mut self) -> Self {
        self.0.outcome = Outcome::MaybeApplied;
        self
    }

    /// What kind of failure it is.
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

    /// Whether the change that failed may be in force.
    pub fn outcome(&self) -> Outcome {
        self.0.outcome
    }

    /// Whether the same call may succeed a little later.
    pub fn is_transient(&self) -> bool {
        self.0.kind == ErrorKind::Unreachable
    }
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
