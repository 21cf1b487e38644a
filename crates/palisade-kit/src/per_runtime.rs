//! `PerRuntime`: one connection per runtime, which fails fast while the server is down and
//! reconnects.
//!
//! Client libraries drive a connection by a task of the runtime that opened it. The keeper renews
//! from its own thread, so that a blocked or ended runtime of the caller costs no lock; it needs
//! its own connection. A caller's connection lives in the caller's runtime, so that an answer or a
//! notification wakes the caller without another thread in between.
//!
//! Invariant: each runtime has at most one attempt to connect at a time; between attempts every
//! call fails at once with the last error. An attempt is a separate task: if a caller runs out of
//! time, the attempt continues for the next one. A connection is given up when a call reports that
//! it broke, or when two answers in a row were late, because a frozen server looks alive. At the
//! first late renewal the engine gives it up itself ([`PerRuntime::broken`]), so that there is time
//! for another try on a new connection. A runtime that ends takes its connection with it.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::Shared;
use parking_lot::Mutex;
use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot;
use tokio::time::Instant;

use palisade_core::engine::{BoxFuture, no_connection, rounded};
use palisade_core::{Error, ErrorKind, Result};

/// The pause after the first failed attempt, and the longest one.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The same when the server is up and has no place left. Each attempt costs it a process and a line
/// in its log, and it is asked by many: by 300 clients, about once in 15 ms in the end, so that a
/// place that gets free is soon taken by one of them. The pauses are random, between a half and all.
const PAUSE_IF_FULL: Duration = Duration::from_millis(250);
const LONGEST_PAUSE_IF_FULL: Duration = Duration::from_secs(5);

/// How many late answers in a row end a connection.
const LATE: u32 = 2;

/// The connections of one engine.
pub struct PerRuntime<C> {
    connect: Box<dyn Fn() -> BoxFuture<Result<C>> + Send + Sync>,
    connect_timeout: Duration,
    /// The server's name, for messages.
    server: String,
    /// Whether an error says that the server has no place left.
    is_full: fn(&Error) -> bool,
    slots: Arc<Slots<C>>,
    generations: AtomicU64,
}

type Slots<C> = Mutex<HashMap<Id, Arc<Slot<C>>>>;

impl Pause {
    /// After the error `why`, and so many others before it.
    pub fn after(failures: u32, why: Error, full: bool) -> Self {
        let growing = |first: Duration, longest| (first * 2u32.pow(failures.min(8))).min(longest);
        let short = growing(PAUSE, LONGEST_PAUSE);
        let long =
            growing(PAUSE_IF_FULL, LONGEST_PAUSE_IF_FULL).mul_f64(rand::random_range(0.5..1.0));
        let now = Instant::now();
        Self {
            until: now + if full { long } else { short },
            urgent_until: now + short,
            why,
        }
    }

    /// The error, while the pause lasts.
    pub fn refusal(&self) -> Option<Error> {
        (Instant::now() < self.until).then(|| self.why.clone())
    }
}

/// The connection of one runtime.
struct Slot<C> {
    state: Mutex<State<C>>,
    /// Dropping it ends the task that detects the end of the runtime.
    _watch: oneshot::Sender<()>,
}

enum State<C> {
    Up { link: Link<C>, late: u32 },
    Connecting(Attempt<C>),
    Down { failures: u32, pause: Option<Pause> },
}

/// What follows a failed attempt: until its end, calls fail at once with the same error.
pub struct Pause {
    until: Instant,
    /// For who can't wait for the end of a long one.
    urgent_until: Instant,
    why: Error,
}

/// An attempt to connect, shared by all who wait for it.
type Attempt<C> = Shared<BoxFuture<Result<Link<C>>>>;

/// A connection and its generation.
#[derive(Clone)]
pub struct Link<C> {
    /// The client's own connection.
    pub connection: C,
    generation: u64,
}

impl<C> Link<C> {
    /// A number that is unique to each connection.
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

/// Removes the slot of a runtime when the runtime drops its tasks.
struct RuntimeEnd<C> {
    runtime: Id,
    slots: Weak<Slots<C>>,
}

impl<C> RuntimeEnd<C> {
    /// Called when the slot was removed first, since the runtime may have another by now.
    fn disarm(&mut self) {
        self.slots = Weak::new();
    }
}

impl<C> Drop for RuntimeEnd<C> {
    fn drop(&mut self) {
        let slots = self.slots.upgrade();
        // Dropped after the lock is released: dropping a connection may run arbitrary code.
        let _ended = slots.and_then(|slots| slots.lock().remove(&self.runtime));
    }
}

impl<C: Clone + Send + Sync + 'static> PerRuntime<C> {
    /// Connects on demand, with `connect`, within `connect_timeout`.
    pub fn new(
        connect_timeout: Duration,
        connect: impl Fn() -> BoxFuture<Result<C>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            connect: Box::new(connect),
            connect_timeout,
            server: "the server".to_owned(),
            is_full: |_| false,
            slots: Arc::default(),
            generations: AtomicU64::new(1),
        }
    }

    /// Sets the server's name for messages.
    pub fn to(mut self, server: impl ToString) -> Self {
        self.server = server.to_string();
        self
    }

    /// Sets how an error is known by which a server refuses a connection because it has too many.
    pub fn full_if(mut self, is_full: fn(&Error) -> bool) -> Self {
        self.is_full = is_full;
        self
    }

    /// How long connecting may take.
    pub fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    fn slot(&self) -> Arc<Slot<C>> {
        let runtime = Handle::current().id();
        let mut slots = self.slots.lock();
        let slot = slots.entry(runtime).or_insert_with(|| {
            let (watch, dropped) = oneshot::channel::<()>();
            let mut end = RuntimeEnd {
                runtime,
                slots: Arc::downgrade(&self.slots),
            };
            tokio::spawn(async move {
                let _ = dropped.await;
                end.disarm();
            });
            Arc::new(Slot {
                state: Mutex::new(State::Down {
                    failures: 0,
                    pause: None,
                }),
                _watch: watch,
            })
        });
        Arc::clone(slot)
    }

    /// The connection of this runtime; reconnects if it is down.
    ///
    /// # Cancellation
    /// If it is dropped while connecting, the attempt continues, and the next call gets its result.
    ///
    /// # Errors
    /// The error of `connect`; between attempts the error of the last one.
    pub async fn get(&self) -> Result<Link<C>> {
        self.connection(|pause| pause.until).await
    }

    /// As [`PerRuntime::get`], for a renewal: it can't wait for long until a server has a place.
    pub async fn get_urgently(&self) -> Result<Link<C>> {
        self.connection(|pause| pause.urgent_until).await
    }

    async fn connection(&self, until: fn(&Pause) -> Instant) -> Result<Link<C>> {
        let attempt = {
            let slot = self.slot();
            let mut state = slot.state.lock();
            match &*state {
                State::Up { link, .. } => return Ok(link.clone()),
                State::Down {
                    pause: Some(pause), ..
                } if Instant::now() < until(pause) => return Err(pause.why.clone()),
                State::Connecting(attempt) if attempt.peek().is_none() => attempt.clone(),
                ended => {
                    let failures = match ended {
                        State::Down { failures, .. } => *failures,
                        // An attempt that ended without setting another state has panicked.
                        _ => 0,
                    };
                    let attempt = self.attempt(Arc::clone(&slot), failures);
                    *state = State::Connecting(attempt.clone());
                    attempt
                }
            }
        };
        attempt.await
    }

    /// Starts an attempt to connect.
    fn attempt(&self, slot: Arc<Slot<C>>, failures: u32) -> Attempt<C> {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        let (limit, server) = (self.connect_timeout, self.server.clone());
        let is_full = self.is_full;
        let connecting = (self.connect)();
        let (tell, told) = oneshot::channel();
        tokio::spawn(async move {
            let connected = tokio::time::timeout(limit, connecting).await;
            let connected = connected.unwrap_or_else(|_| {
                let message = format!("no connection to {server} within {}", rounded(limit));
                Err(no_connection(message))
            });
            let linked = connected.map(|connection| Link {
                connection,
                generation,
            });
            *slot.state.lock() = match &linked {
                Ok(link) => State::Up {
                    link: link.clone(),
                    late: 0,
                },
                Err(error) => State::Down {
                    failures: failures + 1,
                    // Only an unreachable server warrants a pause: other errors need a person.
                    pause: error
                        .is_transient()
                        .then(|| Pause::after(failures, error.clone(), is_full(error))),
                },
            };
            let _ = tell.send(linked);
        });
        let ended = |_| {
            let message = "the attempt to connect was given up";
            Err(no_connection(message))
        };
        told.map(move |told| told.unwrap_or_else(ended))
            .boxed()
            .shared()
    }

    /// Gives `link` up, unless it was replaced already: the next call reconnects without a pause.
    pub async fn broken(&self, link: &Link<C>) {
        self.judge(link, |_| true);
    }

    /// As [`PerRuntime::late`], but a renewal can't afford a second timeout, and a leave is retried.
    pub async fn unanswered(&self, operation: &'static str, link: &Link<C>) {
        if matches!(operation, "renew" | "leave") {
            self.broken(link).await;
        } else {
            self.late(link).await;
        }
    }

    /// Records that an answer on `link` was late.
    pub async fn late(&self, link: &Link<C>) {
        self.judge(link, |late| {
            *late += 1;
            *late >= LATE
        });
    }

    /// Records that an answer came on `link`.
    pub fn answered(&self, link: &Link<C>) {
        self.judge(link, |late| {
            *late = 0;
            false
        });
    }

    fn judge(&self, link: &Link<C>, over: impl FnOnce(&mut u32) -> bool) {
        let slot = self.slot();
        let mut state = slot.state.lock();
        if let State::Up { link: now, late } = &mut *state
            && now.generation == link.generation
            && over(late)
        {
            *state = State::Down {
                failures: 0,
                pause: None,
            };
        }
    }

    /// Drops all connections.
    pub fn close(&self) {
        let _ended = std::mem::take(&mut *self.slots.lock());
    }
}

/// Waits for the answer to a request that may be applied even if the answer is late.
///
/// # Errors
/// [`ErrorKind::Unreachable`], maybe applied.
pub async fn timed<T>(
    operation: &'static str,
    timeout: Duration,
    request: impl Future<Output = T>,
) -> Result<T> {
    tokio::time::timeout(timeout, request).await.map_err(|_| {
        let message = format!("no answer within {}", rounded(timeout));
        Error::new(ErrorKind::Unreachable, operation, message).maybe_applied()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counting() -> (Arc<AtomicU64>, PerRuntime<u64>) {
        let made = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&made);
        let links = PerRuntime::new(Duration::from_millis(50), move || {
            let number = counter.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move { Ok(number) })
        });
        (made, links)
    }

    #[tokio::test]
    async fn a_connection_is_shared_until_it_breaks() {
        let (made, links) = counting();
        let first = links.get().await.unwrap();
        assert_eq!(links.get().await.unwrap().connection, first.connection);
        links.broken(&first).await;
        let second = links.get().await.unwrap();
        assert_ne!(second.connection, first.connection);
        // A late report about the first one does not affect the second.
        links.broken(&first).await;
        links.get().await.unwrap();
        assert_eq!(made.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn two_late_answers_in_a_row_end_it_and_one_answer_forgives() {
        let (made, links) = counting();
        let link = links.get().await.unwrap();
        links.late(&link).await;
        links.answered(&link);
        links.late(&link).await;
        links.get().await.unwrap();
        assert_eq!(made.load(Ordering::Relaxed), 1);
        links.late(&link).await;
        links.get().await.unwrap();
        assert_eq!(made.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn every_runtime_has_its_own() {
        let (made, links) = counting();
        for _ in 0..2 {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async { links.get().await.unwrap() });
        }
        assert_eq!(made.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_runtime_that_ends_takes_its_connection_along() {
        let connection = Arc::new(());
        let given = Arc::clone(&connection);
        let links = PerRuntime::new(Duration::from_secs(5), move || {
            let connection = Arc::clone(&given);
            Box::pin(async move { Ok(connection) })
        });
        for flavour in 0..4 {
            let runtime = match flavour % 2 {
                0 => tokio::runtime::Builder::new_current_thread(),
                _ => tokio::runtime::Builder::new_multi_thread(),
            };
            let runtime = { runtime }.enable_all().build().unwrap();
            drop(runtime.block_on(links.get()).unwrap());
            assert_eq!(Arc::strong_count(&connection), 3);
            drop(runtime);
            assert_eq!(Arc::strong_count(&connection), 2, "ours, and to give");
            assert!(links.slots.lock().is_empty());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_with_little_time_leaves_the_attempt_to_the_next() {
        let made = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&made);
        let links = PerRuntime::new(Duration::from_secs(5), move || {
            let number = counter.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                tokio::time::sleep(Duration::from_secs(2)).await;
                Ok(number)
            })
        });
        let start = Instant::now();
        let soon = Duration::from_millis(1500);
        let (one, two) = tokio::join!(
            tokio::time::timeout(soon, links.get()),
            tokio::time::timeout(soon, links.get()),
        );
        assert!(one.is_err() && two.is_err());
        assert_eq!(start.elapsed(), soon);
        let link = links.get().await.unwrap();
        assert_eq!(start.elapsed(), Duration::from_secs(2));
        assert_eq!((link.connection, made.load(Ordering::Relaxed)), (0, 1));
    }

    #[tokio::test]
    async fn an_attempt_that_panics_is_made_again() {
        let made = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&made);
        let links = PerRuntime::new(Duration::from_secs(5), move || {
            let number = counter.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                assert!(number > 0, "the first one");
                Ok(number)
            })
        });
        assert_eq!(
            links.get().await.err().unwrap().kind(),
            ErrorKind::Unreachable
        );
        assert_eq!(links.get().await.unwrap().connection, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn while_it_is_down_calls_fail_at_once_and_attempts_are_rare() {
        let made = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&made);
        let links: PerRuntime<()> = PerRuntime::new(Duration::from_millis(50), move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Box::pin(std::future::pending())
        });
        let start = Instant::now();
        assert_eq!(
            links.get().await.err().unwrap().kind(),
            ErrorKind::Unreachable
        );
        for _ in 0..100 {
            assert_eq!(
                links.get().await.err().unwrap().kind(),
                ErrorKind::Unreachable
            );
        }
        assert_eq!(start.elapsed(), Duration::from_millis(50));
        assert_eq!(made.load(Ordering::Relaxed), 1);
        tokio::time::sleep(LONGEST_PAUSE).await;
        assert!(links.get().await.is_err());
        assert_eq!(made.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_server_is_asked_less_often_except_for_renewals() {
        const SECOND: Duration = Duration::from_secs(1);
        let made = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&made);
        let links: PerRuntime<()> = PerRuntime::new(Duration::from_secs(5), move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Box::pin(async { Err(no_connection("full")) })
        });
        let links = links.full_if(|error| error.message() == "full");
        let minute = async |urgent: bool| {
            let (before, end) = (made.load(Ordering::Relaxed), Instant::now() + SECOND * 60);
            while Instant::now() < end {
                let got = if urgent {
                    links.get_urgently().await
                } else {
                    links.get().await
                };
                assert_eq!(got.err().unwrap().message(), "full");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            made.load(Ordering::Relaxed) - before
        };
        let asked = minute(false).await;
        assert!((12..32).contains(&asked), "{asked} in the first minute");
        let asked = minute(true).await;
        assert!(asked > 100, "{asked} in a minute of renewals");
    }
}
