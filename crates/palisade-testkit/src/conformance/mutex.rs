//! Exclusion, three times over the same bodies: a mutex, a semaphore with one permit left, and
//! the write lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use palisade::core::clock::BootTime;
use palisade::{Client, Hold, Patience, Request, RwHold};

use super::bed::held;
use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, Failure, SOON, cases, needs, permits, within};

/// What makes holders exclude each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    Mutex,
    /// Two of three permits are held by a bystander.
    DrainedSemaphore,
    WriteLock,
}

const NAME: &str = "exclusive";

impl Over {
    /// Takes what must be taken so that one more holder is all there can be.
    async fn prepare(self, bed: &Bed) -> Result<Vec<Hold>, Failure> {
        let mut bystanders = Vec::new();
        if self == Self::DrainedSemaphore {
            let semaphore = bed.client().semaphore(NAME, 3);
            for _ in 0..2 {
                bystanders.push(held(semaphore.try_acquire().await?)?);
            }
        }
        Ok(bystanders)
    }

    fn request(self, client: &Client) -> Request {
        let ask = match self {
            Self::Mutex | Self::WriteLock => palisade::Ask::Whole,
            Self::DrainedSemaphore => permits(1, 3),
        };
        client.line(NAME, ask)
    }

    async fn lock(self, client: &Client) -> palisade::Result<Hold> {
        match self {
            Self::Mutex => client.mutex(NAME).lock().await,
            Self::DrainedSemaphore => client.semaphore(NAME, 3).acquire().await,
            Self::WriteLock => Ok(client.rwlock(NAME).write().await?.into_hold()),
        }
    }

    async fn try_lock(self, client: &Client) -> palisade::Result<Option<Hold>> {
        match self {
            Self::Mutex => client.mutex(NAME).try_lock().await,
            Self::DrainedSemaphore => client.semaphore(NAME, 3).try_acquire().await,
            Self::WriteLock => {
                let hold = client.rwlock(NAME).try_write().await?;
                Ok(hold.map(RwHold::into_hold))
            }
        }
    }

    async fn lock_timeout(self, client: &Client, wait: Duration) -> palisade::Result<Option<Hold>> {
        match self {
            Self::Mutex => client.mutex(NAME).lock_timeout(wait).await,
            Self::DrainedSemaphore => client.semaphore(NAME, 3).acquire_timeout(wait).await,
            Self::WriteLock => {
                let hold = client.rwlock(NAME).write_timeout(wait).await?;
                Ok(hold.map(RwHold::into_hold))
            }
        }
    }

    /// How many bystanders are in the line.
    fn bystanders(self) -> usize {
        if self == Self::DrainedSemaphore { 2 } else { 0 }
    }
}

macro_rules! exclusion {
    ($list:ident, $group:literal, $over:expr $(, $need:path)?) => {
        cases! { pub(super) $list, $group with $over;
            "Nobody else holds while one does." => [
                another_client_is_excluded $(if $need)?,
                another_lock_of_the_same_client_is_excluded $(if $need)?,
                contention_never_overlaps $(if $need)?,
                other_names_are_free $(if $need)?,
            ],
            "A release hands over, whichever way it comes." => [
                release_frees $(if $need)?,
                drop_frees $(if $need)?,
                release_wakes_the_waiter $(if $need)?,
                a_hold_outlives_its_client $(if $need)?,
            ],
            "Patience is kept, and leaves no trace when it ends." => [
                try_lock_is_none_at_once $(if $need)?,
                timeout_is_none_in_time $(if $need)?,
                zero_timeout_takes_a_free_lock $(if $need)?,
                lock_in_time_is_held $(if $need)?,
                a_dropped_future_leaves_no_claim $(if $need)?,
            ],
        }
    };
}

exclusion!(MUTEX, "mutex", Over::Mutex);
exclusion!(
    DRAINED_SEMAPHORE,
    "semaphore_as_mutex",
    Over::DrainedSemaphore,
    needs::any_permits
);
exclusion!(WRITE_LOCK, "write_lock", Over::WriteLock);

cases! { pub(super) ORDER, "mutex" with Over::Mutex;
    "Who came first is served first, with a greater token each time." => [
        waiters_are_served_in_order if needs::fair,
        tokens_rise_from_grant_to_grant if needs::tokens,
        a_dropped_waiter_is_skipped if needs::fair,
    ],
}

async fn another_client_is_excluded(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let other = bed.other_client().await?;
    let hold = held(over.try_lock(&bed.client()).await?)?;
    ensure!(over.try_lock(&other).await?.is_none(), "two holders");
    hold.release().await?;
    let hold = held(over.try_lock(&other).await?)?;
    ensure!(over.try_lock(&bed.client()).await?.is_none(), "two holders");
    hold.release().await?;
    Ok(())
}

async fn another_lock_of_the_same_client_is_excluded(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let client = bed.client();
    let hold = over.lock(&client).await?;
    ensure!(over.try_lock(&client).await?.is_none(), "two holders");
    ensure!(
        over.try_lock(&client.clone()).await?.is_none(),
        "two holders"
    );
    ensure!(hold.is_valid(), "the first is valid");
    hold.release().await?;
    Ok(())
}

async fn contention_never_overlaps(bed: Bed, over: Over) -> Check {
    const TASKS: u32 = 6;
    const ROUNDS: u32 = 8;
    let _bystanders = over.prepare(&bed).await?;
    let inside = Arc::new(AtomicU32::new(0));
    let total = Arc::new(AtomicU32::new(0));
    let other = bed.other_client().await?;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let client = if task % 2 == 0 {
            bed.client()
        } else {
            other.clone()
        };
        let (inside, total) = (Arc::clone(&inside), Arc::clone(&total));
        tasks.spawn(async move {
            for _ in 0..ROUNDS {
                let hold = over.lock(&client).await?;
                ensure_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "others inside");
                // A read and a write apart: an overlap would lose an update.
                let seen = total.load(Ordering::SeqCst);
                tokio::task::yield_now().await;
                total.store(seen + 1, Ordering::SeqCst);
                inside.fetch_sub(1, Ordering::SeqCst);
                hold.release().await?;
            }
            Ok::<_, Failure>(())
        });
    }
    while let Some(task) = within(SOON * 4, "a round", tasks.join_next()).await? {
        task??;
    }
    ensure_eq!(total.load(Ordering::SeqCst), TASKS * ROUNDS, "updates");
    Ok(())
}

async fn other_names_are_free(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let hold = over.lock(&bed.client()).await?;
    for name in ["exclusiv", "exclusive2", "Exclusive", "exclusive/"] {
        let other = bed.client().mutex(name).try_lock().await?;
        ensure!(other.is_some(), "{name} is another lock");
    }
    hold.release().await?;
    Ok(())
}

async fn release_frees(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    for _ in 0..3 {
        held(over.try_lock(&bed.client()).await?)?.release().await?;
    }
    let line = bed.line(&bed.name(NAME)?).await?;
    ensure_eq!(line.holders.len(), over.bystanders(), "holders left");
    Ok(())
}

async fn drop_frees(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let client = bed.client();
    drop(over.lock(&client).await?);
    within(SOON, "the background release", client.flush()).await?;
    held(over.try_lock(&client).await?)?.release().await?;
    Ok(())
}

async fn release_wakes_the_waiter(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let other = bed.other_client().await?;
    let hold = over.lock(&bed.client()).await?;
    let waiter = tokio::spawn(async move { over.lock(&other).await });
    if bed.capability().waiters_visible {
        bed.until_waiting(&bed.name(NAME)?, 1).await?;
    }
    ensure!(!waiter.is_finished(), "two holders");
    hold.release().await?;
    let hold = within(SOON, "the grant", waiter).await???;
    ensure!(hold.is_valid(), "a fresh hold is valid");
    Ok(())
}

async fn a_hold_outlives_its_client(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let other = bed.other_client().await?;
    let ttl = bed.short_ttl();
    let hold = over
        .request(&other)
        .ttl(ttl)
        .acquire(Patience::NoWait)
        .await?;
    let hold = held(hold)?;
    drop(other);
    tokio::time::sleep(ttl * 3 / 2).await;
    ensure!(hold.is_valid(), "lost with its client");
    ensure!(over.try_lock(&bed.client()).await?.is_none(), "two holders");
    hold.release().await?;
    held(over.try_lock(&bed.client()).await?)?.release().await?;
    Ok(())
}

async fn try_lock_is_none_at_once(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let _hold = over.lock(&bed.client()).await?;
    let other = bed.other_client().await?;
    let busy = within(
        Duration::from_millis(800),
        "an answer",
        over.try_lock(&other),
    )
    .await??;
    ensure!(busy.is_none(), "two holders");
    let line = bed.line(&bed.name(NAME)?).await?;
    ensure_eq!(line.waiters.len(), 0, "waiters left");
    Ok(())
}

async fn timeout_is_none_in_time(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let hold = over.lock(&bed.client()).await?;
    let other = bed.other_client().await?;
    let wait = Duration::from_millis(250);
    let start = BootTime::now();
    let busy = within(SOON, "the timeout", over.lock_timeout(&other, wait)).await??;
    let took = BootTime::now().saturating_since(start);
    ensure!(busy.is_none(), "two holders");
    ensure!(took >= wait, "gave up after {took:?}");
    ensure!(
        took < wait + Duration::from_secs(1),
        "gave up after {took:?} only"
    );
    within(SOON, "the background leave", other.flush()).await?;
    let line = bed.line(&bed.name(NAME)?).await?;
    ensure_eq!(line.waiters.len(), 0, "waiters left");
    hold.release().await?;
    held(over.try_lock(&bed.client()).await?)?.release().await?;
    Ok(())
}

async fn zero_timeout_takes_a_free_lock(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let hold = held(over.lock_timeout(&bed.client(), Duration::ZERO).await?)?;
    let busy = over.lock_timeout(&bed.client(), Duration::ZERO).await?;
    ensure!(busy.is_none(), "two holders");
    hold.release().await?;
    Ok(())
}

async fn lock_in_time_is_held(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let other = bed.other_client().await?;
    let hold = over.lock(&bed.client()).await?;
    let waiter = tokio::spawn(async move { over.lock_timeout(&other, SOON * 2).await });
    if bed.capability().waiters_visible {
        bed.until_waiting(&bed.name(NAME)?, 1).await?;
    }
    hold.release().await?;
    let hold = within(SOON, "the grant", waiter).await???;
    held(hold)?.release().await?;
    Ok(())
}

async fn a_dropped_future_leaves_no_claim(bed: Bed, over: Over) -> Check {
    let _bystanders = over.prepare(&bed).await?;
    let other = bed.other_client().await?;
    let hold = over.lock(&bed.client()).await?;
    // Dropped before its first poll, at its first await, and at later ones.
    drop(over.lock(&other));
    for micros in [0, 50, 500, 5_000, 50_000] {
        let lock = over.lock(&other);
        let dropped = tokio::time::timeout(Duration::from_micros(micros), lock).await;
        ensure!(dropped.is_err(), "two holders");
    }
    within(SOON, "the background leaves", other.flush()).await?;
    let name = bed.name(NAME)?;
    let left = bed
        .until(&name, "no waiters", |line| line.waiters.is_empty())
        .await?;
    ensure_eq!(left.holders.len(), over.bystanders() + 1, "holders");
    hold.release().await?;
    held(over.try_lock(&bed.client()).await?)?.release().await?;
    Ok(())
}

async fn waiters_are_served_in_order(bed: Bed, over: Over) -> Check {
    let name = bed.name(NAME)?;
    let hold = over.lock(&bed.client()).await?;
    let (sender, mut served) = tokio::sync::mpsc::unbounded_channel();
    for index in 0..5 {
        let client = bed.other_client().await?;
        let sender = sender.clone();
        tokio::spawn(async move {
            let hold = over.lock(&client).await;
            let token = hold.as_ref().map(Hold::token).ok();
            let _ = sender.send((index, token));
            if let Ok(hold) = hold {
                let _ = hold.release().await;
            }
        });
        bed.until_waiting(&name, index + 1).await?;
    }
    let mut last = Some(hold.token());
    hold.release().await?;
    for expected in 0..5 {
        let next = within(SOON, "the next grant", served.recv()).await?;
        let (index, token) = inside!(next, Some(next) => next, "a grant");
        ensure_eq!(index, expected, "who is served");
        ensure!(token > last, "token {token:?} after {last:?}");
        last = token;
    }
    Ok(())
}

async fn tokens_rise_from_grant_to_grant(bed: Bed, over: Over) -> Check {
    let other = bed.other_client().await?;
    let mut last = None;
    for round in 0..10 {
        let client = if round % 3 == 0 {
            other.clone()
        } else {
            bed.client()
        };
        let hold = over.lock(&client).await?;
        ensure!(
            Some(hold.token()) > last,
            "token {:?} after {last:?}",
            hold.token()
        );
        last = Some(hold.token());
        hold.release().await?;
    }
    Ok(())
}

async fn a_dropped_waiter_is_skipped(bed: Bed, over: Over) -> Check {
    let name = bed.name(NAME)?;
    let hold = over.lock(&bed.client()).await?;
    let (first, second) = (bed.other_client().await?, bed.other_client().await?);
    let dropped = tokio::spawn(async move { over.lock(&first).await });
    bed.until_waiting(&name, 1).await?;
    let next = tokio::spawn(async move { over.lock(&second).await });
    bed.until_waiting(&name, 2).await?;
    dropped.abort();
    bed.until_waiting(&name, 1).await?;
    hold.release().await?;
    drop(within(SOON, "the grant", next).await???);
    Ok(())
}
