//! `Links`: one connection per runtime, which fails fast while the server is down and comes back.
//!
//! Client libraries drive a connection by a task of the runtime that made it. The keeper renews
//! from its own thread, so that a blocked or ended runtime of the caller costs no lock: it must
//! have its own connection. A caller's connection lives in the caller's runtime, so that an
//! answer or a push wakes the caller without another thread in between.
//!
//! Invariant: at most one attempt to connect per runtime at once; between attempts every call
//! fails at once with what the last one found. A connection is given up when a call says that it
//! broke, or when two answers in a row did not come in time: a frozen server looks alive.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::{Handle, Id};
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::Instant;

use crate::core::engine::BoxFuture;
use crate::core::error::{Error, Kind, Result};

/// The pause after the first failed attempt, and the longest one.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How many answers in a row may fail to come before the connection is given up.
const LATE: u32 = 2;

/// The connections of one engine.
pub(crate) struct Links<C> {
    connect: Box<dyn Fn() -> BoxFuture<Result<C>> + Send + Sync>,
    connect_timeout: Duration,
    slots: Mutex<HashMap<Id, Arc<AsyncMutex<Slot<C>>>>>,
    generations: AtomicU64,
}

/// The connection of one runtime.
enum Slot<C> {
    Up {
        link: Link<C>,
        late: u32,
    },
    Down {
        failures: u32,
        not_before: Option<(Instant, String)>,
    },
}

/// A connection, and which one it is.
#[derive(Clone)]
pub(crate) struct Link<C> {
    pub(crate) connection: C,
    generation: u64,
}

impl<C: Clone + Send + 'static> Links<C> {
    /// Connects when it is asked to, with `connect`, for `connect_timeout` at the longest.
    pub(crate) fn new(
        connect_timeout: Duration,
        connect: impl Fn() -> BoxFuture<Result<C>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            connect: Box::new(connect),
            connect_timeout,
            slots: Mutex::default(),
            generations: AtomicU64::new(1),
        }
    }

    /// How long connecting may take.
    pub(crate) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    fn slot(&self) -> Arc<AsyncMutex<Slot<C>>> {
        let mut slots = self.slots.lock();
        let new = || Slot::Down {
            failures: 0,
            not_before: None,
        };
        let slot = slots
            .entry(Handle::current().id())
            .or_insert_with(|| Arc::new(AsyncMutex::new(new())));
        Arc::clone(slot)
    }

    /// The connection of this runtime, made anew when it is down.
    ///
    /// # Cancellation
    /// Dropped while it connects, the attempt is given up, and the next call makes another.
    ///
    /// # Errors
    /// What `connect` answers; [`Kind::Unreachable`], not applied, between attempts.
    pub(crate) async fn get(&self) -> Result<Link<C>> {
        let slot = self.slot();
        let mut slot = slot.lock().await;
        let failures = match &*slot {
            Slot::Up { link, .. } => return Ok(link.clone()),
            Slot::Down {
                not_before: Some((at, why)),
                ..
            } if Instant::now() < *at => {
                return Err(Error::new(Kind::Unreachable, "connect", why.clone()));
            }
            Slot::Down { failures, .. } => *failures,
        };
        let connected = match tokio::time::timeout(self.connect_timeout, (self.connect)()).await {
            Ok(connected) => connected,
            Err(_) => {
                let message = format!("no connection within {:?}", self.connect_timeout);
                Err(Error::new(Kind::Unreachable, "connect", message))
            }
        };
        match connected {
            Ok(connection) => {
                let generation = self.generations.fetch_add(1, Ordering::Relaxed);
                let link = Link {
                    connection,
                    generation,
                };
                *slot = Slot::Up {
                    link: link.clone(),
                    late: 0,
                };
                Ok(link)
            }
            Err(error) => {
                let pause = (PAUSE * 2u32.pow(failures.min(8))).min(LONGEST_PAUSE);
                let not_before = (Instant::now() + pause, error.message().to_owned());
                *slot = Slot::Down {
                    failures: failures + 1,
                    // Only an unreachable server is worth a pause: other errors are for people.
                    not_before: error.is_transient().then_some(not_before),
                };
                Err(error)
            }
        }
    }

    /// Gives `link` up, unless another has taken its place already.
    pub(crate) async fn broken(&self, link: &Link<C>) {
        self.judge(link, |_| true).await;
    }

    /// Says that an answer on `link` did not come in time.
    pub(crate) async fn late(&self, link: &Link<C>) {
        self.judge(link, |late| {
            *late += 1;
            *late >= LATE
        })
        .await;
    }

    /// Says that an answer came on `link`.
    pub(crate) fn answered(&self, link: &Link<C>) {
        // Only worth it when nobody else is at the slot: the next answer says it again.
        if let Ok(mut slot) = self.slot().try_lock()
            && let Slot::Up { link: now, late } = &mut *slot
            && now.generation == link.generation
        {
            *late = 0;
        }
    }

    async fn judge(&self, link: &Link<C>, over: impl FnOnce(&mut u32) -> bool) {
        let slot = self.slot();
        let mut slot = slot.lock().await;
        if let Slot::Up { link: now, late } = &mut *slot
            && now.generation == link.generation
            && over(late)
        {
            *slot = Slot::Down {
                failures: 0,
                not_before: None,
            };
        }
    }

    /// Drops all connections.
    pub(crate) fn close(&self) {
        self.slots.lock().clear();
    }
}

/// Waits for the answer to a request that may be applied even if it does not come in time.
///
/// # Errors
/// [`Kind::Unreachable`], maybe applied.
pub(crate) async fn timed<T>(
    operation: &'static str,
    timeout: Duration,
    request: impl Future<Output = T>,
) -> Result<T> {
    tokio::time::timeout(timeout, request).await.map_err(|_| {
        let message = format!("no answer within {timeout:?}");
        Error::new(Kind::Unreachable, operation, message).maybe_applied()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counting() -> (Arc<AtomicU64>, Links<u64>) {
        let made = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&made);
        let links = Links::new(Duration::from_millis(50), move || {
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
        // A late verdict on the first one leaves the second alone.
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

    #[tokio::test(start_paused = true)]
    async fn while_it_is_down_calls_fail_at_once_and_attempts_are_rare() {
        let made = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&made);
        let links: Links<()> = Links::new(Duration::from_millis(50), move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Box::pin(std::future::pending())
        });
        let start = Instant::now();
        assert_eq!(links.get().await.err().unwrap().kind(), Kind::Unreachable);
        for _ in 0..100 {
            assert_eq!(links.get().await.err().unwrap().kind(), Kind::Unreachable);
        }
        assert_eq!(start.elapsed(), Duration::from_millis(50));
        assert_eq!(made.load(Ordering::Relaxed), 1);
        tokio::time::sleep(LONGEST_PAUSE).await;
        assert!(links.get().await.is_err());
        assert_eq!(made.load(Ordering::Relaxed), 2);
    }
}
