//! The blocking API outside of tokio, inside of it, and where it must refuse.
#![cfg(feature = "blocking")]
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use palisade::blocking::{Client, connect};
use palisade::{ErrorKind, Patience};

fn url() -> String {
    format!("memory:{:x}", rand::random::<u64>())
}

fn works(client: &Client) {
    let mutex = client.mutex("x");
    let hold = mutex.lock().unwrap();
    assert!(hold.is_valid());
    assert!(mutex.try_lock().unwrap().is_none());
    assert!(
        mutex
            .lock_timeout(Duration::from_millis(20))
            .unwrap()
            .is_none()
    );
    assert!(
        hold.lost_within(Duration::from_millis(5))
            .unwrap()
            .is_none()
    );
    hold.release().unwrap();
}

#[test]
fn it_works_outside_of_tokio() {
    let client = connect(&url()).unwrap();
    works(&client);
    let lock = client.rwlock("rw");
    let mut read = lock.read().unwrap();
    assert!(read.try_upgrade().unwrap());
    read.downgrade().unwrap();
    drop(read);
    let permits = client.semaphore("s", 3);
    let two = permits.acquire_many(2).unwrap();
    assert!(permits.try_acquire_many(2).unwrap().is_none());
    two.release().unwrap();
    let election = client.election("e");
    let mut leaders = election.observe();
    assert!(leaders.next().unwrap().unwrap().is_none());
    let elected = election.campaign("me").unwrap();
    elected.proclaim("still me").unwrap();
    assert_eq!(
        election.leader().unwrap().unwrap().value.as_deref(),
        Some("still me")
    );
    assert!(leaders.next().unwrap().unwrap().is_some());
    elected.resign().unwrap();
    client
        .multi_lock(["a", "b"])
        .lock()
        .unwrap()
        .release()
        .unwrap();
    assert!(
        client
            .lock_any(["a", "b"], Patience::NoWait)
            .unwrap()
            .is_some()
    );
    let mine = client.reentrant("r");
    let (outer, inner) = (mine.lock().unwrap(), mine.lock().unwrap());
    assert_eq!(outer.token(), inner.token());
}

#[test]
fn threads_exclude_each_other_in_turn() {
    let client = connect(&url()).unwrap();
    let mutex = client.mutex("x");
    let counter = &AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let mutex = mutex.clone();
            scope.spawn(move || {
                for _ in 0..50 {
                    let hold = mutex.lock().unwrap();
                    let was = counter.load(Ordering::Relaxed);
                    std::thread::yield_now();
                    counter.store(was + 1, Ordering::Relaxed);
                    hold.release().unwrap();
                }
            });
        }
    });
    assert_eq!(counter.load(Ordering::Relaxed), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn it_works_on_a_worker_and_lets_other_tasks_run() {
    let client = connect(&url()).unwrap();
    works(&client);
    // The holder is a task of the same single worker: it must get to run while we block.
    let held = client.mutex("x").lock().unwrap();
    let releases = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(50)).await;
        held.release().unwrap();
    });
    let blocked = tokio::spawn(async move { client.mutex("x").lock().unwrap().token() });
    blocked.await.unwrap();
    releases.await.unwrap();
}

#[tokio::test]
async fn it_works_in_spawn_blocking_of_a_current_thread_runtime() {
    tokio::task::spawn_blocking(|| works(&connect(&url()).unwrap()))
        .await
        .unwrap();
}

#[tokio::test]
async fn it_refuses_to_block_the_only_thread_of_a_runtime() {
    let client: Client = palisade::connect(&url()).await.unwrap().into();
    let refused = client.mutex("x").lock().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::WouldBlock);
    let spawned = tokio::spawn(async move { client.mutex("x").try_lock().unwrap_err() });
    assert_eq!(spawned.await.unwrap().kind(), ErrorKind::WouldBlock);
    // The runtime goes on as if nothing had been.
    tokio::time::sleep(Duration::from_millis(1)).await;
}
