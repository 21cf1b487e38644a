//! `Failure`: why a case failed, and where in its body.

use std::fmt;
use std::panic::Location;

use super::Verdict;

/// What a case answers.
pub type Check = Result<(), Failure>;

/// A case that did not end well.
#[derive(Debug)]
pub struct Failure {
    verdict: Verdict,
}

impl Failure {
    /// The engine did not do what it promises.
    #[track_caller]
    pub fn new(why: impl fmt::Display) -> Self {
        let at = Location::caller();
        let file = at.file().rsplit('/').next().unwrap_or(at.file());
        Self {
            verdict: Verdict::Failed(format!("{why} [{file}:{}]", at.line())),
        }
    }

    /// It turned out that this engine can't be asked for it.
    pub fn not_applicable(reason: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::NotApplicable(reason.into()),
        }
    }

    /// How the case ended.
    pub fn verdict(self) -> Verdict {
        self.verdict
    }
}

// `?` keeps the place where it stands, so that an error names its line of the case.
impl From<palisade::Error> for Failure {
    #[track_caller]
    fn from(error: palisade::Error) -> Self {
        Self::new(format!("{error:?}"))
    }
}

impl From<std::io::Error> for Failure {
    #[track_caller]
    fn from(error: std::io::Error) -> Self {
        Self::new(error)
    }
}

impl From<tokio::task::JoinError> for Failure {
    #[track_caller]
    fn from(error: tokio::task::JoinError) -> Self {
        Self::new(error)
    }
}

/// Fails the case unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($what:tt)+) => {
        if !$condition {
            return Err($crate::conformance::Failure::new(format!($($what)+)));
        }
    };
}
pub(crate) use ensure;

/// Fails the case unless both are equal, showing both.
macro_rules! ensure_eq {
    ($left:expr, $right:expr, $($what:tt)+) => {
        match (&$left, &$right) {
            (left, right) => if left != right {
                return Err($crate::conformance::Failure::new(format!(
                    "{}: {left:?} is not {right:?}", format_args!($($what)+)
                )));
            }
        }
    };
}
pub(crate) use ensure_eq;

/// The inside of a pattern, or a failure that shows what came instead.
macro_rules! inside {
    ($value:expr, $pattern:pat => $inside:expr, $($what:tt)+) => {
        match $value {
            $pattern => $inside,
            #[allow(unreachable_patterns)]
            other => return Err($crate::conformance::Failure::new(format!(
                "{}, not {other:?}", format_args!($($what)+)
            ))),
        }
    };
}
pub(crate) use inside;
