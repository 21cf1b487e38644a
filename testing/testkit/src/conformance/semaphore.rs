//! What the semaphore promises.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use palisade::{BootTime, ErrorKind, Semaphore};
use tokio::sync::watch;

use super::fixture::{answered, fails, free, granted, taken};
use super::{Fixture, SOON, cases, needs, soon, within};

cases! { pub(super) CASES, "semaphore";
    "The permits held never exceed the capacity." => [
        as_many_as_there_are if needs::any_permits,
        contention_stays_within_capacity if needs::any_permits,
        many_permits_are_taken_at_once if needs::weighted,
    ],
    "Permits are served in the order in which they were asked for." => [
        a_heavy_waiter_is_not_overtaken if needs::fair_weighted,
        the_light_wait_until_the_heavy_was_served if needs::fair_weighted,
    ],
    "What no line could grant is refused before anything is asked of the engine." => [
        senseless_numbers_are_invalid if needs::any_permits,
    ],
    "A permit's patience is kept, also where the line has another capacity." => [
        another_capacity_is_waited_for if needs::any_permits,
        acquire_timeout_is_none_in_time if needs::any_permits,
    ],
}

/// The same permits through two clients.
async fn pair(fx: &Fixture, capacity: u32) -> (Semaphore, Semaphore) {
    let (mine, other) = (fx.client(), fx.other_client().await);
    let of = |client: palisade::Client| client.semaphore("permits", capacity);
    (of(mine), of(other))
}

async fn as_many_as_there_are(fx: Fixture) {
    let (semaphore, other) = pair(&fx, 3).await;
    let one = free(semaphore.try_acquire().await);
    let _two = free(other.try_acquire().await);
    let _three = free(semaphore.try_acquire().await);
    taken(semaphore.try_acquire().await);
    taken(other.try_acquire().await);
    one.release().await.unwrap();
    drop(free(other.try_acquire().await));
}

async fn contention_stays_within_capacity(fx: Fixture) {
    const CAPACITY: u32 = 3;
    let inside = Arc::new(AtomicU32::new(0));
    let most = Arc::new(watch::Sender::new(0));
    let (mine, other) = pair(&fx, CAPACITY).await;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let semaphore = if task % 2 == 0 {
            mine.clone()
        } else {
            other.clone()
        };
        let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
        tasks.spawn(async move {
            for _ in 0..6 {
                let hold = semaphore.acquire().await.unwrap();
                let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                most.send_modify(|most| *most = now.max(*most));
                assert!(now <= CAPACITY, "{now} of {CAPACITY} permits");
                // Waits until two tasks are inside at once, however slow the engine is. This fails
                // if the engine grants only one permit at a time.
                let mut most = most.subscribe();
                let second = soon("a second permit", most.wait_for(|most| *most > 1));
                second.await.unwrap();
                // Then both stay for a while, so that an excess grant would be noticed.
                tokio::time::sleep(Duration::from_millis(10)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                hold.release().await.unwrap();
            }
        });
    }
    within(SOON * 4, "all rounds", tasks.join_all()).await;
}

async fn many_permits_are_taken_at_once(fx: Fixture) {
    let semaphore = fx.client().semaphore("permits", 5);
    let three = free(semaphore.try_acquire_many(3).await);
    taken(semaphore.try_acquire_many(3).await);
    let two = free(semaphore.try_acquire_many(2).await);
    taken(semaphore.try_acquire().await);
    three.release().await.unwrap();
    two.release().await.unwrap();
    drop(free(semaphore.try_acquire_many(5).await));
}

async fn a_heavy_waiter_is_not_overtaken(fx: Fixture) {
    let (semaphore, other) = pair(&fx, 3).await;
    let one = semaphore.acquire().await.unwrap();
    let heavy = fx.queued("permits", 1, async move { other.acquire_many(3).await });
    let heavy = heavy.await;
    taken(semaphore.try_acquire().await);
    one.release().await.unwrap();
    drop(granted(heavy).await);
}

async fn the_light_wait_until_the_heavy_was_served(fx: Fixture) {
    let (semaphore, other) = pair(&fx, 3).await;
    let one = semaphore.acquire().await.unwrap();
    let two = semaphore.acquire().await.unwrap();
    let heavy = fx.queued("permits", 1, async move { other.acquire_many(2).await });
    let heavy = heavy.await;
    let light = fx.queued("permits", 2, async move { semaphore.acquire().await });
    let light = light.await;
    one.release().await.unwrap();
    let heavy = granted(heavy).await;
    assert!(!light.is_finished(), "four of three");
    two.release().await.unwrap();
    assert!(granted(light).await.token() > heavy.token(), "out of order");
}

async fn senseless_numbers_are_invalid(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    for capacity in [0, u32::MAX] {
        let tried = client.semaphore("permits", capacity).try_acquire().await;
        fails(tried, ErrorKind::InvalidArgument);
    }
    let semaphore = client.semaphore("permits", 3);
    for permits in [0, 4] {
        let refused = semaphore.try_acquire_many(permits).await;
        fails(refused, ErrorKind::InvalidArgument);
    }
    assert_eq!(spy.total(), 0, "requests made");
}

async fn another_capacity_is_waited_for(fx: Fixture) {
    let hold = fx.client().semaphore("permits", 3).acquire().await.unwrap();
    let client = fx.other_client().await;
    let other = client.semaphore("permits", 2);
    let wait = Duration::from_millis(150);
    let start = BootTime::now();
    let refused = soon("the refusal", other.try_acquire()).await;
    fails(refused, ErrorKind::CapacityMismatch);
    let refused = answered(&client, async || other.acquire_timeout(wait).await).await;
    fails(refused, ErrorKind::CapacityMismatch);
    let took = BootTime::now().saturating_since(start);
    assert!(took >= wait, "refused after {took:?}");
    let waiter = tokio::spawn(async move { other.acquire_timeout(SOON).await });
    hold.release().await.unwrap();
    assert!(granted(waiter).await.is_some(), "busy");
}

async fn acquire_timeout_is_none_in_time(fx: Fixture) {
    let semaphore = fx.client().semaphore("permits", 1);
    let _hold = semaphore.acquire().await.unwrap();
    let acquire = async || semaphore.acquire_timeout(Duration::from_millis(150)).await;
    taken(answered(&fx.client(), acquire).await);
}
