//! The two schedules of Martin Kleppmann's "How to do distributed locking", on real servers.

use std::time::Duration;

use palisade::Name;
use palisade::fence::{Fence, MemoryFence, Verdict};
use palisade_testkit::lab::proxy::to_client;

use super::support::{FRESH, Five, soon, until};

/// A clock that jumps on one server: the lock is on A, B and C, C expires it early, and a second
/// client gets C, D and E. Both clients believe to hold; the store accepts only one.
#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_jumps_makes_a_second_grant_which_the_fence_survives() {
    let Some(five) = Five::start() else { return };
    let (one, two) = (five.client(FRESH).await, five.client(FRESH).await);
    let (storage, data) = (MemoryFence::default(), Name::new("data").unwrap());
    let first = five.lock_on_three(&one, "job").await;
    let write = |token, text: &str| storage.write(&data, token, text.as_bytes().to_vec());
    assert_eq!(
        write(first.token().into(), "one").await.unwrap(),
        Verdict::Accepted
    );

    // As if the clock of C had jumped past the lease: it ends in the same step, because a renewal
    // that came in between would prolong it.
    assert_eq!(five.ask(2, &["PEXPIRE", "job", "0"]), "1");
    assert!(!five.having("job").contains(&2), "it ended");
    let second = two.mutex("job").try_lock().await.unwrap();
    let second = second.expect("C, D and E are a majority");
    assert!(second.token() > first.token(), "the fence needs it");
    // The first holder may know by now, and have left, if its client has just connected to a server
    // and checked its lease there. The store must not depend on that.

    assert_eq!(
        write(second.token().into(), "two").await.unwrap(),
        Verdict::Accepted
    );
    let stale = write(first.token().into(), "one again").await.unwrap();
    assert_ne!(stale, Verdict::Accepted, "a write of the first holder");
    assert_eq!(storage.read(&data).await.unwrap().unwrap().data, b"two");
}

/// A client is stopped while the answers are in flight, and continued when its lease is over: it
/// must not accept them.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_is_read_too_late_is_refused() {
    let Some(five) = Five::start() else { return };
    let ttl = Duration::from_millis(800);
    // Servers are waited for far longer than the lease lasts, as by a stopped client.
    let stopped = five
        .proxied(&format!("{FRESH}&node_timeout=20s&timeout=20s"))
        .await;
    let other = five.client(FRESH).await;
    // Connected, with scripts loaded.
    let warm = stopped.mutex("warm").lock().await.unwrap();
    warm.release().await.unwrap();
    let replies: Vec<_> = five
        .proxies
        .iter()
        .map(|proxy| proxy.inject(to_client().label_contains("EVALSHA").hold()))
        .collect();
    let mutex = stopped.mutex("job").ttl(ttl);
    let late = tokio::spawn(async move { mutex.try_lock().await });
    until("all votes", async || five.having("job").len() == 5).await;
    until("their end", async || five.having("job").is_empty()).await;
    let hold = soon("a grant", other.mutex("job").lock()).await.unwrap();
    for reply in replies {
        reply.release();
        drop(reply);
    }
    let late = soon("an answer", late).await.unwrap();
    assert!(
        !matches!(late, Ok(Some(_))),
        "a grant that was over when it was read"
    );
    assert!(hold.is_valid(), "it is the other's");
    hold.release().await.unwrap();
}
