//! A write whose future was dropped before its turn is not started: it can't land over a later write
//! of the same holder.

use std::sync::Arc;

use palisade::Name;
use palisade::fence::sqlite::SqliteFence;
use palisade::fence::{Fence, FileFence, SharedFence, Verdict};
use tokio::runtime::Runtime;

/// Writes wait for a turn that `occupied` keeps, are dropped, and the next one is acknowledged.
fn a_dropped_write_is_not_started(fences: &[SharedFence], occupied: impl FnOnce()) {
    let name = Name::new("stock").unwrap();
    let runtime = Runtime::new().unwrap();
    #[expect(
        clippy::async_yields_async,
        reason = "it is awaited once the turn is free"
    )]
    let newer = runtime.block_on(async {
        for fence in fences {
            let write = fence.write(&name, 5.into(), b"dropped".into());
            // Polled once: its thread waits for the turn.
            assert!(futures_util::poll!(std::pin::pin!(write)).is_pending());
        }
        let newer = tokio::spawn(fences[0].write(&name, 5.into(), b"newer".into()));
        tokio::task::yield_now().await;
        newer
    });
    occupied();
    assert_eq!(runtime.block_on(newer).unwrap().unwrap(), Verdict::Accepted);
    // Waits for every thread.
    drop(runtime);
    let kept = Runtime::new().unwrap().block_on(fences[0].read(&name));
    assert_eq!(kept.unwrap().unwrap().data, b"newer");
}

#[test]
fn files() {
    let dir = tempfile::tempdir().unwrap();
    let fence = FileFence::open(dir.path()).unwrap();
    let lock = std::fs::File::create(dir.path().join("stock.lock")).unwrap();
    lock.lock().unwrap();
    let fences = vec![Arc::new(fence) as SharedFence; 12];
    a_dropped_write_is_not_started(&fences, || drop(lock));
}

#[test]
fn sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    let open = |_| Arc::new(SqliteFence::open(&path).unwrap()) as SharedFence;
    let fences: Vec<SharedFence> = (0..12).map(open).collect();
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    a_dropped_write_is_not_started(&fences, || other.execute_batch("ROLLBACK").unwrap());
}
