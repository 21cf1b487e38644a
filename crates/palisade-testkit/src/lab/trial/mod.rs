//! What the tests of single engines share: servers ([`need!`](crate::need)), waiting with a
//! deadline, errors as they must be ([`fails`]), a [`Crew`] at work on one lock, another tool's
//! process ([`Tool`]), [`certificates`] of our own making, whether a secret is said
//! ([`says_no_secret`]).

mod certificates;
mod crew;
mod names;
mod said;
mod tool;

use std::future::Future;
use std::time::Duration;

pub use certificates::{certificates, expired};
pub use crew::{Belief, Crew};
pub use names::{NASTY, every_nasty_name};
use palisade::{Error, ErrorKind, Mutex};
pub use said::says_no_secret;
pub use tool::Tool;

use super::launch::{self, Running};

/// Far more than anything takes that is due at once, also on a busy machine.
pub const SOON: Duration = Duration::from_secs(10);

/// Waits for `future`.
///
/// # Panics
/// By the name of `what`, when it takes longer than [`SOON`].
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    let done = tokio::time::timeout(SOON, future).await;
    done.unwrap_or_else(|_| panic!("{what} did not happen within {SOON:?}"))
}

/// Looks until `test` is true.
///
/// # Panics
/// As [`soon`].
pub async fn until(what: &str, mut test: impl AsyncFnMut() -> bool) {
    let look = async {
        while !test().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    soon(what, look).await;
}

/// What a test needs, and is skipped without: an engine by its name and settings, or what is there
/// if it is. What is missing has been told.
#[macro_export]
macro_rules! need {
    ($name:literal $(, $setting:expr)*) => {
        $crate::need!($crate::lab::trial::started($name, &[$($setting),*]))
    };
    ($needed:expr) => {
        match $needed {
            Some(had) => had,
            None => return,
        }
    };
}

/// An engine with settings of its own; `None`, with the reason told, where it can't be had.
///
/// # Panics
/// When it is here and does not start.
pub fn started(name: &str, settings: &[&str]) -> Option<Running> {
    if settings.is_empty() {
        return launch::need(name);
    }
    match launch::start_with(name, settings) {
        Ok(running) => Some(running),
        Err(launch::Error::Missing(why)) => {
            launch::skip(name, &why);
            None
        }
        Err(launch::Error::Failed(why)) => panic!("{why}"),
    }
}

/// The error, which must be of this kind.
///
/// # Panics
/// When it is of another, or there is none.
#[track_caller]
pub fn fails<T>(answer: palisade::Result<T>, kind: ErrorKind) -> Error {
    let Err(error) = answer else {
        panic!("not {kind:?} but success");
    };
    assert_eq!(error.kind(), kind, "{error}");
    error
}

/// Locks, soon, and unlocks.
///
/// # Panics
/// When either fails.
pub async fn cycle(mutex: &Mutex) {
    let hold = soon("the lock", mutex.lock()).await;
    let hold = hold.unwrap_or_else(|error| panic!("{error}"));
    let released = hold.release().await;
    released.unwrap_or_else(|error| panic!("{error}"));
}
