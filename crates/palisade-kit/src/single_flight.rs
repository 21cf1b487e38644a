//! `SingleFlight`: among all claims of this process that wait for one line, only one at a time
//! queries the engine.
//!
//! For engines whose waiters poll: a blocking query occupies a connection, and every write that
//! comes too late costs the servers a log entry. One waiter per process and line is enough; the
//! next one takes over when it holds or leaves. Each query is recorded with its time, so that a
//! waiter whose runtime is stalled delays the others only briefly.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use palisade_core::BootTime;

/// Longer than one query takes, unless its runtime is stalled.
const STALLED: Duration = Duration::from_secs(4);

/// The turns of all lines.
#[derive(Default)]
pub struct SingleFlight(Mutex<HashMap<String, Arc<Line>>>);

#[derive(Default)]
struct Line {
    turn: Arc<AsyncMutex<()>>,
    /// When a waiter last began a query.
    asked: AtomicU64,
}

/// A turn, or the wait for one.
pub struct Turn<'a> {
    flight: &'a SingleFlight,
    key: String,
    line: Arc<Line>,
    guard: Option<OwnedMutexGuard<()>>,
}

impl SingleFlight {
    /// Waits for a turn, at most for `limit`; `None` if another claim is querying.
    pub async fn turn(&self, key: &str, limit: Duration) -> Option<Turn<'_>> {
        let line = Arc::clone(self.0.lock().entry(key.to_owned()).or_default());
        // Created before the wait, so that a drop during it cleans up.
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
        // Release the guard first, so that the next waiter gets its turn.
        drop(self.guard.take());
        let mut lines = self.flight.0.lock();
        // Two references mean that only the map and this turn use the line.
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
