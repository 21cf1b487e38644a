//! What the tests of single engines share: waiting with a deadline, a [`Crew`] at work on one
//! lock, another tool's process ([`Tool`]), [`certificates`] of our own making, and whether a
//! secret is said ([`says_no_secret`]).

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
pub use said::says_no_secret;
pub use tool::Tool;

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
