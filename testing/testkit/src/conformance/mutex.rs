//! Exclusion, tested three times with the same cases: by a mutex, by a semaphore with one permit
//! left, and by the write lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use palisade::{BootTime, Client, Hold, Patience, Request, Result, RwHold};

use super::fixture::{answered, free, granted, taken};
use super::outage::LATE;
use super::{Fixture, SOON, cases, needs, permits, soon, within};

/// The primitive that provides exclusion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    Mutex,
    /// Two of three permits are held by a bystander.
    DrainedSemaphore,
    WriteLock,
}

const NAME: &str = "exclusive";

impl Over {
    /// Takes enough permits that only one more holder fits.
    async fn prepare(self, fx: &Fixture) -> Vec<Hold> {
        let mut bystanders = Vec::new();
        for _ in 0..self.bystanders() {
            let semaphore = fx.client().semaphore(NAME, 3);
            bystanders.push(free(semaphore.try_acquire().await));
        }
        bystanders
    }

    /// How many bystanders are in the line.
    fn bystanders(self) -> usize {
        if self == Self::DrainedSemaphore { 2 } else { 0 }
    }

    fn request(self, client: &Client) -> Request {
        let ask = match self {
            Self::Mutex | Self::WriteLock => palisade::engine::Ask::Whole,
            Self::DrainedSemaphore => permits(1, 3),
        };
        client.line(NAME, ask)
    }

    async fn lock(self, client: &Client) -> Result<Hold> {
        match self {
            Self::Mutex => client.mutex(NAME).lock().await,
            Self::DrainedSemaphore => client.semaphore(NAME, 3).acquire().await,
            Self::WriteLock => Ok(client.rwlock(NAME).write().await?.into_hold()),
        }
    }

    async fn try_lock(self, client: &Client) -> Result<Option<Hold>> {
        match self {
            Self::Mutex => client.mutex(NAME).try_lock().await,
            Self::DrainedSemaphore => client.semaphore(NAME, 3).try_acquire().await,
            Self::WriteLock => {
                let hold = client.rwlock(NAME).try_write().await?;
                Ok(hold.map(RwHold::into_hold))
            }
        }
    }

    async fn lock_timeout(self, client: &Client, wait: Duration) -> Result<Option<Hold>> {
        match self {
            Self::Mutex => client.mutex(NAME).lock_timeout(wait).await,
            Self::DrainedSemaphore => {
                let semaphore = client.semaphore(NAME, 3);
                semaphore.acquire_timeout(wait).await
            }
            Self::WriteLock => {
                let hold = client.rwlock(NAME).write_timeout(wait).await?;
                Ok(hold.map(RwHold::into_hold))
            }
        }
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

async fn another_client_is_excluded(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let (one, two) = (fx.client(), fx.other_client().await);
    for (holder, other) in [(&one, &two), (&two, &one)] {
        let hold = free(over.try_lock(holder).await);
        taken(over.try_lock(other).await);
        hold.release().await.unwrap();
    }
}

async fn another_lock_of_the_same_client_is_excluded(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let client = fx.client();
    let hold = over.lock(&client).await.unwrap();
    taken(over.try_lock(&client).await);
    taken(over.try_lock(&client.clone()).await);
    assert!(hold.is_valid());
    hold.release().await.unwrap();
}

async fn contention_never_overlaps(fx: Fixture, over: Over) {
    const TASKS: u32 = 6;
    const ROUNDS: u32 = 8;
    let _bystanders = over.prepare(&fx).await;
    let inside = Arc::new(AtomicU32::new(0));
    let total = Arc::new(AtomicU32::new(0));
    let other = fx.other_client().await;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let client = if task % 2 == 0 {
            fx.client()
        } else {
            other.clone()
        };
        let (inside, total) = (Arc::clone(&inside), Arc::clone(&total));
        tasks.spawn(async move {
            for _ in 0..ROUNDS {
                let hold = over.lock(&client).await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "others inside");
                // The read and the write are separate steps, so an overlap would lose an update.
                let seen = total.load(Ordering::SeqCst);
                tokio::task::yield_now().await;
                total.store(seen + 1, Ordering::SeqCst);
                inside.fetch_sub(1, Ordering::SeqCst);
                hold.release().await.unwrap();
            }
        });
    }
    within(SOON * 4, "all rounds", tasks.join_all()).await;
    assert_eq!(total.load(Ordering::SeqCst), TASKS * ROUNDS, "updates");
}

async fn other_names_are_free(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let _hold = over.lock(&fx.client()).await.unwrap();
    for name in ["exclusiv", "exclusive2", "Exclusive", "exclusive/"] {
        drop(free(fx.mutex(name).try_lock().await));
    }
}

async fn release_frees(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    for _ in 0..3 {
        let hold = free(over.try_lock(&fx.client()).await);
        hold.release().await.unwrap();
    }
    assert_eq!(fx.line(NAME).length().await.0, over.bystanders());
}

async fn drop_frees(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let client = fx.lasting_client().await;
    drop(over.lock(&client).await.unwrap());
    soon("the background release", client.flush()).await;
    // A majority that votes without a line may split once more on a busy machine.
    if client.capability().fair {
        drop(free(over.try_lock(&client).await));
    } else {
        drop(soon("a free lock", over.lock(&client)).await.unwrap());
    }
}

async fn release_wakes_the_waiter(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let other = fx.other_client().await;
    let hold = over.lock(&fx.client()).await.unwrap();
    let waiter = fx.queued(NAME, 1, async move { over.lock(&other).await });
    let waiter = waiter.await;
    assert!(!waiter.is_finished(), "two holders");
    hold.release().await.unwrap();
    assert!(granted(waiter).await.is_valid());
}

async fn a_hold_outlives_its_client(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let other = fx.other_client().await;
    let ttl = fx.short_ttl();
    let request = over.request(&other).ttl(ttl);
    let hold = free(request.acquire(Patience::NoWait).await);
    drop((other, request));
    tokio::time::sleep(ttl * 3 / 2).await;
    assert!(hold.is_valid(), "lost with its client");
    taken(over.try_lock(&fx.client()).await);
    hold.release().await.unwrap();
    drop(free(over.try_lock(&fx.client()).await));
}

async fn try_lock_is_none_at_once(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let _hold = over.lock(&fx.client()).await.unwrap();
    let other = fx.other_client().await;
    let limit = Duration::from_millis(800);
    taken(within(limit, "an answer", over.try_lock(&other)).await);
    assert_eq!(fx.line(NAME).length().await.1, 0, "waiters left");
}

async fn timeout_is_none_in_time(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let hold = over.lock(&fx.client()).await.unwrap();
    let other = fx.other_client().await;
    // Long enough for an engine to answer on a busy machine.
    let wait = Duration::from_secs(1);
    let start = BootTime::now();
    taken(soon("the timeout", over.lock_timeout(&other, wait)).await);
    let took = BootTime::now().saturating_since(start);
    assert!(took >= wait, "gave up after {took:?}");
    assert!(took < wait + LATE, "only after {took:?}");
    soon("the background leave", other.flush()).await;
    assert_eq!(fx.line(NAME).length().await.1, 0, "waiters left");
    hold.release().await.unwrap();
    drop(free(over.try_lock(&fx.client()).await));
}

async fn zero_timeout_takes_a_free_lock(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let client = fx.client();
    let lock = async || over.lock_timeout(&client, Duration::ZERO).await;
    let _hold = free(answered(&client, lock).await);
    taken(answered(&client, lock).await);
}

async fn lock_in_time_is_held(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let other = fx.other_client().await;
    let hold = over.lock(&fx.client()).await.unwrap();
    let lock = async move { over.lock_timeout(&other, SOON * 2).await };
    let waiter = fx.queued(NAME, 1, lock).await;
    hold.release().await.unwrap();
    assert!(granted(waiter).await.is_some(), "busy");
}

async fn a_dropped_future_leaves_no_claim(fx: Fixture, over: Over) {
    let _bystanders = over.prepare(&fx).await;
    let other = fx.lasting_client().await;
    let hold = over.lock(&fx.client()).await.unwrap();
    // Dropped before its first poll, at its first await, and at later ones.
    drop(over.lock(&other));
    for micros in [0, 50, 500, 5_000, 50_000] {
        let lock = over.lock(&other);
        let dropped = tokio::time::timeout(Duration::from_micros(micros), lock).await;
        assert!(dropped.is_err(), "two holders");
    }
    soon("the background leaves", other.flush()).await;
    let left = fx.line(NAME).until_waiting(0).await;
    assert_eq!(left.holders.len(), over.bystanders() + 1, "holders");
    hold.release().await.unwrap();
    drop(free(over.try_lock(&fx.client()).await));
}

async fn waiters_are_served_in_order(fx: Fixture, over: Over) {
    let hold = over.lock(&fx.client()).await.unwrap();
    let (sender, mut served) = tokio::sync::mpsc::unbounded_channel();
    for index in 0..5 {
        let (client, sender) = (fx.other_client().await, sender.clone());
        let lock = async move {
            let hold = over.lock(&client).await.unwrap();
            sender.send((index, hold.token())).unwrap();
            hold.release().await
        };
        fx.queued(NAME, index + 1, lock).await;
    }
    let mut last = hold.token();
    hold.release().await.unwrap();
    for expected in 0..5 {
        let next = soon("the next grant", served.recv()).await;
        let (index, token) = next.expect("a grant");
        assert_eq!(index, expected, "who is served");
        assert!(token > last, "token {token} after {last}");
        last = token;
    }
}

async fn tokens_rise_from_grant_to_grant(fx: Fixture, over: Over) {
    let other = fx.other_client().await;
    let mut last = None;
    for round in 0..10 {
        let client = if round % 3 == 0 {
            other.clone()
        } else {
            fx.client()
        };
        let hold = over.lock(&client).await.unwrap();
        let token = Some(hold.token());
        assert!(token > last, "token {token:?} after {last:?}");
        last = token;
        hold.release().await.unwrap();
    }
}

async fn a_dropped_waiter_is_skipped(fx: Fixture, over: Over) {
    let hold = over.lock(&fx.client()).await.unwrap();
    let (first, second) = (fx.lasting_client().await, fx.other_client().await);
    let dropped = fx.queued(NAME, 1, async move { over.lock(&first).await });
    let dropped = dropped.await;
    let next = fx.queued(NAME, 2, async move { over.lock(&second).await });
    let next = next.await;
    dropped.abort();
    fx.line(NAME).until_waiting(1).await;
    hold.release().await.unwrap();
    drop(granted(next).await);
}
