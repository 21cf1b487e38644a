//! `Turns`: of all claims of this process that wait for one line, one at a time asks the engine.
//!
//! A blocking query occupies a connection, and every write that comes too late costs the servers
//! an entry in their log: one waiter per process and line is enough, and the others take over
//! when it holds or leaves. Whoever asks says so, so that one that stands still with its runtime
//! holds nobody up for long.

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
pub(super) struct Turns(Mutex<HashMap<String, Arc<Turn>>>);

/// The turn of one line.
#[derive(Default)]
struct Turn {
    lock: Arc<AsyncMutex<()>>,
    /// When somebody last began to ask.
    asked: AtomicU64,
}

/// A turn, while it lasts.
pub(super) struct Mine<'a> {
    turns: &'a Turns,
    key: String,
    turn: Option<(Arc<Turn>, Option<OwnedMutexGuard<()>>)>,
}

impl Turns {
    /// Waits for a turn, so long at the most; `None` when another claim asks meanwhile.
    pub(super) async fn take(&self, key: &str, limit: Duration) -> Option<Mine<'_>> {
        let turn = Arc::clone(self.0.lock().entry(key.to_owned()).or_default());
        // Cleans up also when it is dropped here.
        let mut mine = Mine {
            turns: self,
            key: key.to_owned(),
            turn: Some((Arc::clone(&turn), None)),
        };
        let lock = Arc::clone(&turn.lock);
        let guard = match Arc::clone(&lock).try_lock_owned() {
            Ok(guard) => Some(guard),
            Err(_) => tokio::time::timeout(limit, lock.lock_owned()).await.ok(),
        };
        let now = BootTime::now();
        let asked = BootTime::from_nanos(turn.asked.load(Ordering::Relaxed));
        if guard.is_none() && now.saturating_since(asked) < STALLED {
            return None;
        }
        turn.asked.store(now.as_nanos(), Ordering::Relaxed);
        mine.turn = Some((turn, guard));
        Some(mine)
    }
}

impl Drop for Mine<'_> {
    fn drop(&mut self) {
        // The guard first, so that the next one has its turn.
        let Some((turn, guard)) = self.turn.take() else {
            return;
        };
        drop(guard);
        let mut turns = self.turns.0.lock();
        // Nobody else is at it: the map's and ours.
        if Arc::strong_count(&turn) == 2 {
            turns.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_at_a_time_and_nothing_is_left() {
        let turns = Turns::default();
        let short = Duration::from_millis(5);
        let first = turns.take("a", short).await;
        assert!(first.is_some());
        assert!(turns.take("a", short).await.is_none());
        assert!(turns.take("b", short).await.is_some());
        drop(first);
        assert!(turns.take("a", short).await.is_some());
        assert!(turns.0.lock().is_empty());
    }
}
