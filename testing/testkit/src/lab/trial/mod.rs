//! What the tests of single engines share: servers ([`need!`](crate::need)) and their clients,
//! waiting with a deadline, expected errors ([`fails`]), a [`Crew`] that uses one lock, another
//! tool's process ([`Tool`], [`Servant`]), test [`certificates`], and a check that no secret is
//! logged ([`says_no_secret`]).

mod certificates;
mod crew;
mod names;
mod said;
mod tool;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

pub use certificates::{certificates, expired};
pub use crew::{Belief, Crew};
pub use names::{NASTY, every_nasty_name};
use palisade::engine::{Ask, Claim, ClaimId, Entered, Place, Ticket};
use palisade::report::{Owner, Scope};
use palisade::{BootTime, Client, Error, ErrorKind, Mutex, Name};
pub use said::says_no_secret;
pub use tool::{Servant, Tool, python, run};

use super::launch::{self, Running};
use super::proxy::Proxy;

/// Far more than anything takes that is due at once, even on a busy machine.
///
/// A test about a place that is left behind needs a ttl far above it (120 s, say): else the end of
/// the lease removes the place. Where leases are shared, and in a test of an alarm, a third of the
/// ttl must be above it, because a renewal, which comes then, finds out too.
pub const SOON: Duration = Duration::from_secs(20);

/// Waits for `future`.
///
/// # Panics
/// With the name `what`, if it takes longer than [`SOON`].
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    let done = tokio::time::timeout(SOON, future).await;
    done.unwrap_or_else(|_| panic!("{what} did not happen within {SOON:?}"))
}

/// Polls until `test` is true.
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

/// What a test needs, and without which it is skipped: an engine by its name and settings, or an
/// `Option`. Why it is missing has been reported.
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

/// An engine with its own settings; `None`, with the reason reported, if it is not available.
///
/// # Panics
/// If it is available and does not start.
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

/// A client of a server.
///
/// # Panics
/// If it can't connect.
pub async fn connected(running: &Running) -> Client {
    beside(running, "").await
}

/// A client without a namespace, for names that other tools use, with further options:
/// `&layout=readwrite`.
///
/// # Panics
/// If it can't connect.
pub async fn beside_others(running: &Running, options: &str) -> Client {
    beside(running, &format!("?namespace={options}")).await
}

async fn beside(running: &Running, options: &str) -> Client {
    let url = format!("{}{options}", running.url());
    let client = palisade::connect(&url).await;
    client.unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// Waits until the line has one waiter.
///
/// # Panics
/// As [`soon`], and if the engine does not answer.
pub async fn until_one_waits(client: &Client, name: &str) {
    let name = Name::new(name).unwrap_or_else(|error| panic!("{name:?}: {error}"));
    until("a waiter", async || {
        let lines = client.survey(Scope::Line(name.clone())).await;
        let lines = lines.unwrap_or_else(|error| panic!("{error}"));
        lines.first().is_some_and(|line| line.waiters.len() == 1)
    })
    .await;
}

/// Connects, locks and releases.
///
/// # Errors
/// Whatever fails first.
pub async fn lock_once(url: &str) -> Result<(), Error> {
    let client = palisade::connect(url).await?;
    client.mutex("guarded").lock().await?.release().await
}

/// Asserts what an error says, and that it does not show the secret.
///
/// # Panics
/// If it is of another kind, lacks the words or shows the secret.
pub fn says(error: &Error, kind: ErrorKind, words: &str, secret: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
    let all = format!("{error:?} {error}");
    assert!(!all.contains(secret), "the secret is shown: {all}");
}

/// A claim of a whole line, for direct calls to an engine.
///
/// # Panics
/// If `name` is invalid.
pub fn claim(name: &str, ttl: Duration) -> Claim {
    Claim {
        id: ClaimId::random(),
        name: Name::new(name).unwrap_or_else(|error| panic!("{name:?}: {error}")),
        ask: Ask::Whole,
        ttl,
        queue: true,
        owner: Owner::here("test", None),
        value: None,
        renewed: true,
        at_least: Duration::ZERO,
    }
}

/// Enters with a [`claim`], without the keeper.
///
/// # Panics
/// If it gets no place.
pub async fn enter(client: &Client, name: &str, ttl: Duration) -> (Ticket, Place) {
    match client.engine().enter(Arc::new(claim(name, ttl))).await {
        Ok(Entered::In { ticket, place, .. }) => (ticket, place),
        other => panic!("no place: {other:?}"),
    }
}

/// The UUID text of a 128-bit number.
pub fn uuid(number: u128) -> String {
    let hex = format!("{number:032x}");
    let ends = [0, 8, 12, 16, 20, 32];
    let parts: Vec<&str> = ends.windows(2).map(|at| &hex[at[0]..at[1]]).collect();
    parts.join("-")
}

/// Existing connections go silent, repeatedly, while new ones are served: a hold survives.
///
/// # Panics
/// If it is lost.
pub async fn survives_dead_connections(url: &str, proxy: &Proxy) {
    let client = palisade::connect(url).await;
    let client = client.unwrap_or_else(|error| panic!("{url}: {error}"));
    let ttl = Duration::from_secs(3);
    let hold = client.mutex("silent").ttl(ttl).lock().await;
    let hold = hold.unwrap_or_else(|error| panic!("{error}"));
    for _ in 0..3 {
        let first = hold.deadline();
        until("a renewal", async || hold.deadline() > first).await;
        proxy.silence();
        let past = BootTime::now() + ttl * 2;
        until("the end of two ttls", async || past.has_passed()).await;
        assert!(hold.is_valid(), "lost over a dead connection");
    }
}

/// The error, which must have this kind.
///
/// # Panics
/// If it has another kind, or there is none.
#[track_caller]
pub fn fails<T>(answer: palisade::Result<T>, kind: ErrorKind) -> Error {
    let Err(error) = answer else {
        panic!("not {kind:?} but success");
    };
    assert_eq!(error.kind(), kind, "{error}");
    error
}

/// Locks, within [`SOON`], and unlocks.
///
/// # Panics
/// If either fails.
pub async fn cycle(mutex: &Mutex) {
    let hold = soon("the lock", mutex.lock()).await;
    let hold = hold.unwrap_or_else(|error| panic!("{error}"));
    let released = hold.release().await;
    released.unwrap_or_else(|error| panic!("{error}"));
}
