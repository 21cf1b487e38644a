//! What the read-write lock promises, beyond the exclusion of its writers.

use std::time::Duration;

use palisade::RwLock;

use super::fixture::{answered, free, granted, taken};
use super::{Fixture, cases, needs};

cases! { pub(super) CASES, "rwlock";
    "Readers hold beside each other, a writer alone." => [
        readers_share if needs::shared,
        a_writer_excludes_readers if needs::shared,
        a_reader_excludes_writers if needs::shared,
        a_writer_waits_for_every_reader if needs::shared,
        a_writer_and_a_mutex_exclude_each_other,
    ],
    "Readers and writers are served in the order in which they came." => [
        readers_do_not_overtake_a_waiting_writer if needs::fair_shared,
        a_writer_that_gives_up_lets_readers_in if needs::fair_shared,
    ],
    "A reader's patience is kept." => [
        read_timeout_is_none_in_time if needs::shared,
    ],
}

/// The same lock through two clients.
async fn pair(fx: &Fixture) -> (RwLock, RwLock) {
    let other = fx.other_client().await;
    (fx.client().rwlock("shared"), other.rwlock("shared"))
}

async fn readers_share(fx: Fixture) {
    let (lock, other) = pair(&fx).await;
    let mut readers = Vec::new();
    for lock in [&lock, &other].into_iter().cycle().take(6) {
        readers.push(free(lock.try_read().await));
    }
    assert!(readers.iter().all(|hold| hold.is_valid()));
    assert_eq!(fx.line("shared").length().await, (6, 0));
}

async fn a_writer_excludes_readers(fx: Fixture) {
    let (lock, other) = pair(&fx).await;
    let writer = lock.write().await.unwrap();
    taken(other.try_read().await);
    taken(lock.try_read().await);
    taken(other.try_write().await);
    writer.release().await.unwrap();
    drop(free(other.try_read().await));
}

async fn a_reader_excludes_writers(fx: Fixture) {
    let (lock, other) = pair(&fx).await;
    let reader = lock.read().await.unwrap();
    taken(other.try_write().await);
    taken(lock.try_write().await);
    reader.release().await.unwrap();
    drop(free(other.try_write().await));
}

async fn a_writer_waits_for_every_reader(fx: Fixture) {
    let (lock, other) = pair(&fx).await;
    let (one, two) = (lock.read().await.unwrap(), lock.read().await.unwrap());
    let writer = fx.queued("shared", 1, async move { other.write().await });
    let writer = writer.await;
    one.release().await.unwrap();
    assert_eq!(fx.line("shared").length().await.0, 1, "holders");
    assert!(!writer.is_finished(), "a writer beside a reader");
    two.release().await.unwrap();
    drop(granted(writer).await);
}

async fn a_writer_and_a_mutex_exclude_each_other(fx: Fixture) {
    let lock = fx.client().rwlock("same");
    let mutex = fx.other_client().await.mutex("same");
    let writer = lock.write().await.unwrap();
    taken(mutex.try_lock().await);
    writer.release().await.unwrap();
    let _hold = mutex.lock().await.unwrap();
    taken(lock.try_write().await);
}

async fn readers_do_not_overtake_a_waiting_writer(fx: Fixture) {
    let (lock, other) = pair(&fx).await;
    let reader = lock.read().await.unwrap();
    let writing = other.clone();
    let writer = fx.queued("shared", 1, async move { writing.write().await });
    let writer = writer.await;
    taken(other.try_read().await);
    let behind = fx.queued("shared", 2, async move { lock.read().await });
    let behind = behind.await;
    reader.release().await.unwrap();
    let writer = granted(writer).await;
    assert!(!behind.is_finished(), "a reader beside a writer");
    let token = writer.token();
    writer.release().await.unwrap();
    assert!(granted(behind).await.token() > token, "the reader's token");
}

async fn a_writer_that_gives_up_lets_readers_in(fx: Fixture) {
    let lock = fx.client().rwlock("shared");
    let other = fx.lasting_client().await.rwlock("shared");
    let _reader = lock.read().await.unwrap();
    let writer = fx.queued("shared", 1, async move { other.write().await });
    let writer = writer.await;
    let behind = fx.queued("shared", 2, async move { lock.read().await });
    let behind = behind.await;
    writer.abort();
    drop(granted(behind).await);
}

async fn read_timeout_is_none_in_time(fx: Fixture) {
    let lock = fx.client().rwlock("shared");
    let _writer = lock.write().await.unwrap();
    let read = async || lock.read_timeout(Duration::from_millis(150)).await;
    taken(answered(&fx.client(), read).await);
}
