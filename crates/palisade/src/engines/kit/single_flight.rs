//! `SingleFlight`: of all claims of this process that wait for one line, one at a time asks the
//! engine.
//!
//! For engines whose waiters ask by themselves: a blocking query occupies a connection, and every
//! write that comes too late costs the servers an entry in their log. One waiter per process and
//! line is enough, and the next takes over when it holds or leaves. Whoever asks says so, so that
//! one that stands still with its runtime holds nobody up for long.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::core::clock::BootTime;

/// Longer than one query takes, unless its runtime stands still.
const STALLED: Duration = Duration::from_secs(4);

/// The turns of all lines.
#[derive(Default)]
pub(crate) struct SingleFlight(Mutex<HashMap<String, Arc<Line>>>);

#[derive(Default)]
struct Line {
    turn: Arc<AsyncMutex<()>>,
    /// When somebody last began to ask.
    asked: AtomicU64,
}

/// A turn, or the wait for one.
pub(crate) struct Turn<'a> {
    flight: &'a SingleFlight,
    key: String,
    line: Arc<Line>,
    guard: Option<OwnedMutexGuard<()>>,
}

impl SingleFlight {
    /// Waits for a turn, so long at the most; `None` when another claim asks meanwhile.
    pub(crate) async fn turn(&self, key: &str, limit: Duration) -> Option<Turn<'_>> {
        let line = Arc::clone(self.0.lock().entry(key.to_owned()).or_default());
        // Cleans up also when it is dropped here.
        let mut turn = Turn {
            flight: self,
            key: key.to_owned(),
            line,
            guard: None,
        };
        let lock = Arc::clone(&turn.line.turn);
        turn.guard = match Arc::clone(&lock).try_lock_owned() {
            Ok(guard) => Some(guard),
            Err(_) => tokio::time::timeout(limit, lock.lock_owned()).await.ok(),
        };
        let (now, asked) = (BootTime::now(), &turn.line.asked);
        let last = BootTime::from_nanos(asked.load(Ordering::Relaxed));
        if turn.guard.is_none() && now.saturating_since(last) < STALLED {
            return None;
        }
        asked.store(now.as_nanos(), Ordering::Relaxed);
        Some(turn)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // The guard first, so that the next one has its turn.
        drop(self.guard.take());
        let mut lines = self.flight.0.lock();
        // Nobody else is at it: the map's and ours.
        if Arc::strong_count(&self.line) == 2 {
            lines.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_at_a_time_and_nothing_is_left() {
        let flight = SingleFlight::default();
        let short = Duration::from_millis(5);
        let first = flight.turn("a", short).await;
        assert!(first.is_some());
        assert!(flight.turn("a", short).await.is_none());
        assert!(flight.turn("b", short).await.is_some());
        drop(first);
        assert!(flight.turn("a", short).await.is_some());
        assert!(flight.0.lock().is_empty());
    }
}
