//! What the semaphore promises.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use palisade::Kind;
use palisade::core::clock::BootTime;
use tokio::sync::watch;

use super::bed::held;
use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, Failure, SOON, cases, needs, within};

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

async fn as_many_as_there_are(bed: Bed) -> Check {
    let semaphore = bed.client().semaphore("permits", 3);
    let other = bed.other_client().await?.semaphore("permits", 3);
    let mut all = Vec::new();
    for one in [&semaphore, &other, &semaphore] {
        all.push(held(one.try_acquire().await?)?);
    }
    ensure!(
        semaphore.try_acquire().await?.is_none(),
        "a fourth of three"
    );
    ensure!(other.try_acquire().await?.is_none(), "a fourth of three");
    let Some(one) = all.pop() else { return Ok(()) };
    one.release().await?;
    held(other.try_acquire().await?)?.release().await?;
    Ok(())
}

async fn contention_stays_within_capacity(bed: Bed) -> Check {
    const CAPACITY: u32 = 3;
    let inside = Arc::new(AtomicU32::new(0));
    let most = Arc::new(watch::Sender::new(0));
    let other = bed.other_client().await?;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let client = if task % 2 == 0 {
            bed.client()
        } else {
            other.clone()
        };
        let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
        tasks.spawn(async move {
            let semaphore = client.semaphore("permits", CAPACITY);
            for _ in 0..6 {
                let hold = semaphore.acquire().await?;
                let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                most.send_modify(|most| *most = now.max(*most));
                ensure!(now <= CAPACITY, "{now} of {CAPACITY} permits");
                // Until two were inside at once: however slow the engine is, unless it gives
                // permits one at a time.
                let mut most = most.subscribe();
                let second = async { most.wait_for(|most| *most > 1).await.is_ok() };
                ensure!(within(SOON, "a second permit", second).await?, "no count");
                // And some time together, for one too many to come in.
                tokio::time::sleep(Duration::from_millis(10)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                hold.release().await?;
            }
            Ok::<_, Failure>(())
        });
    }
    while let Some(task) = within(SOON * 4, "a round", tasks.join_next()).await? {
        task??;
    }
    Ok(())
}

async fn many_permits_are_taken_at_once(bed: Bed) -> Check {
    let semaphore = bed.client().semaphore("permits", 5);
    let three = held(semaphore.try_acquire_many(3).await?)?;
    ensure!(
        semaphore.try_acquire_many(3).await?.is_none(),
        "six of five"
    );
    let two = held(semaphore.try_acquire_many(2).await?)?;
    ensure!(semaphore.try_acquire().await?.is_none(), "six of five");
    three.release().await?;
    two.release().await?;
    held(semaphore.try_acquire_many(5).await?)?
        .release()
        .await?;
    Ok(())
}

async fn a_heavy_waiter_is_not_overtaken(bed: Bed) -> Check {
    let name = bed.name("permits")?;
    let semaphore = bed.client().semaphore("permits", 3);
    let one = semaphore.acquire().await?;
    let waiting = semaphore.clone();
    let heavy = tokio::spawn(async move { waiting.acquire_many(3).await });
    bed.until_waiting(&name, 1).await?;
    ensure!(
        semaphore.try_acquire().await?.is_none(),
        "the heavy one was overtaken"
    );
    one.release().await?;
    drop(within(SOON, "the heavy one's grant", heavy).await???);
    Ok(())
}

async fn the_light_wait_until_the_heavy_was_served(bed: Bed) -> Check {
    let name = bed.name("permits")?;
    let semaphore = bed.client().semaphore("permits", 3);
    let (one, two) = (semaphore.acquire().await?, semaphore.acquire().await?);
    let waiting = semaphore.clone();
    let heavy = tokio::spawn(async move { waiting.acquire_many(2).await });
    bed.until_waiting(&name, 1).await?;
    let waiting = semaphore.clone();
    let light = tokio::spawn(async move { waiting.acquire().await });
    bed.until_waiting(&name, 2).await?;
    one.release().await?;
    let heavy = within(SOON, "the heavy one's grant", heavy).await???;
    ensure!(!light.is_finished(), "four of three");
    two.release().await?;
    let light = within(SOON, "the light one's grant", light).await???;
    ensure!(light.token() > heavy.token(), "counted out of order");
    Ok(())
}

async fn senseless_numbers_are_invalid(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    for capacity in [0, u32::MAX] {
        let tried = client.semaphore("permits", capacity).try_acquire().await;
        let error = inside!(tried, Err(error) => error, "an error");
        ensure_eq!(error.kind(), Kind::InvalidArgument, "the kind of {error}");
    }
    let semaphore = client.semaphore("permits", 3);
    for permits in [0, 4] {
        let refused = semaphore.try_acquire_many(permits).await;
        let error = inside!(refused.err(), Some(error) => error, "an error");
        ensure_eq!(error.kind(), Kind::InvalidArgument, "the kind of {error}");
    }
    ensure_eq!(spy.total(), 0, "requests made");
    Ok(())
}

async fn another_capacity_is_waited_for(bed: Bed) -> Check {
    let hold = bed.client().semaphore("permits", 3).acquire().await?;
    let other = bed.other_client().await?.semaphore("permits", 2);
    let wait = Duration::from_millis(150);
    let start = BootTime::now();
    for refused in [
        within(SOON, "the refusal", other.try_acquire()).await?,
        within(SOON, "the refusal", other.acquire_timeout(wait)).await?,
    ] {
        let error = inside!(refused, Err(error) => error, "an error");
        ensure_eq!(error.kind(), Kind::CapacityMismatch, "the kind of {error}");
    }
    let took = BootTime::now().saturating_since(start);
    ensure!(took >= wait, "refused after {took:?}");
    let waiter = tokio::spawn(async move { other.acquire_timeout(SOON).await });
    hold.release().await?;
    held(within(SOON, "the grant", waiter).await???)?
        .release()
        .await?;
    Ok(())
}

async fn acquire_timeout_is_none_in_time(bed: Bed) -> Check {
    let semaphore = bed.client().semaphore("permits", 1);
    let _hold = semaphore.acquire().await?;
    let wait = semaphore.acquire_timeout(Duration::from_millis(150));
    ensure!(
        within(SOON, "the timeout", wait).await??.is_none(),
        "two of one"
    );
    Ok(())
}
