//! Many clients on one line: a waiting writer is not overtaken, and whatever happens to it, the
//! gate opens again; permits of one process don't refuse each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use palisade::Patience;
use palisade::engine::Ask;
use palisade_testkit::lab::launch::Running;

use crate::util::{connected, holder, keys, lasting, soon, until};

/// Whether a writer keeps the gate of `name` closed.
fn is_closed(running: &Running, name: &str) -> bool {
    holder(running, &format!("palisade/{name}")).is_some()
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_come_later_do_not_overtake_a_writer() {
    let running = need!("consul");
    let (readers, writers) = (connected(&running).await, connected(&running).await);
    let lock = readers.rwlock("door");
    let first = lock.read().await.unwrap();
    let second = lock.read().await.unwrap();
    let writer = writers.rwlock("door");
    let mut writer = tokio::spawn(async move { writer.write().await });
    until("the closed gate", async || is_closed(&running, "door")).await;
    assert!(lock.try_read().await.unwrap().is_none(), "overtaken");
    // Readers inside keep their holds, and are shown as the holders.
    let shown = readers
        .survey(palisade::report::Scope::Line(first.name().clone()))
        .await
        .unwrap();
    assert_eq!(shown[0].holders.len(), 2, "{shown:?}");
    first.release().await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(50), &mut writer);
    assert!(early.await.is_err(), "granted beside a reader");
    let last = second.token();
    let late = tokio::spawn({
        let lock = readers.rwlock("door");
        async move { lock.read().await }
    });
    second.release().await.unwrap();
    let held = soon("the writer's grant", writer).await.unwrap().unwrap();
    assert!(held.token() > last);
    let token = held.token();
    held.release().await.unwrap();
    let late = soon("the reader's grant", late).await.unwrap().unwrap();
    assert!(late.token() > token);
    late.release().await.unwrap();
    let left = keys(&running);
    assert!(left.is_empty(), "left behind: {left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_gives_up_opens_the_gate() {
    let running = need!("consul");
    let (readers, writers) = (connected(&running).await, lasting(running.url()).await);
    let lock = readers.rwlock("door");
    let inside = lock.read().await.unwrap();
    // The writer runs out of patience, is dropped, or ends with its client.
    for end in 0..3 {
        let line = writers.line("door", Ask::Whole);
        let waits = Duration::from_secs(if end == 0 { 3 } else { 60 });
        let writer = tokio::spawn(async move { line.acquire(Patience::For(waits)).await });
        until("the closed gate", async || is_closed(&running, "door")).await;
        match end {
            0 => assert!(soon("the end", writer).await.unwrap().unwrap().is_none()),
            1 => writer.abort(),
            _ => {
                writer.abort();
                writers.flush().await;
            }
        }
        until("the open gate", async || !is_closed(&running, "door")).await;
        let reader = soon("a reader", lock.read()).await.unwrap();
        reader.release().await.unwrap();
    }
    assert!(inside.is_valid());
    inside.release().await.unwrap();
    until("an empty line", async || keys(&running).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_whose_answer_is_lost_closes_nothing_for_long() {
    use palisade_testkit::lab::proxy::{Protocol, Proxy, to_engine};
    let running = need!("consul");
    let target = ([127, 0, 0, 1], running.nodes()[0].port()).into();
    let proxy = Proxy::start(target, Protocol::Http1).unwrap();
    let url = format!("consul://{}?ttl=3s", proxy.addr());
    let writers = palisade::connect(&url).await.unwrap();
    let warm = writers.mutex("warm").lock().await.unwrap();
    warm.release().await.unwrap();
    let readers = connected(&running).await;
    let lock = readers.rwlock("door");
    let inside = lock.read().await.unwrap();
    // The first try reads the gate, the second closes it, and its answer is lost.
    let rule = to_engine().label_contains("/v1/txn").nth(2).cut_after();
    let cut = proxy.inject(rule);
    let line = writers.line("door", Ask::Whole);
    let mut writer = tokio::spawn(async move { line.acquire(Patience::Forever).await });
    soon("the cut", cut.fired()).await;
    let before = proxy.seen().len();
    until("another look", async || proxy.seen().len() > before + 4).await;
    let early = tokio::time::timeout(Duration::from_millis(200), &mut writer);
    assert!(early.await.is_err(), "granted beside a reader");
    inside.release().await.unwrap();
    let held = soon("the writer's grant", writer).await.unwrap();
    held.unwrap().unwrap().release().await.unwrap();
    let reader = soon("a reader", lock.read()).await.unwrap();
    reader.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_among_many_readers_is_served() {
    let running = need!("consul");
    let stop = Arc::new(AtomicBool::new(false));
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let (client, stop) = (connected(&running).await, Arc::clone(&stop));
        readers.spawn(async move {
            let lock = client.rwlock("busy");
            // Two at a time, so that the line always has a reader.
            let mut held = lock.read().await.unwrap();
            while !stop.load(Ordering::SeqCst) {
                let next = lock.read_timeout(Duration::from_millis(200)).await;
                if let Some(next) = next.unwrap() {
                    held.release().await.unwrap();
                    held = next;
                } else {
                    held.release().await.unwrap();
                    held = lock.read().await.unwrap();
                }
            }
            held.release().await.unwrap();
        });
    }
    let client = connected(&running).await;
    let lock = client.rwlock("busy");
    for _ in 0..3 {
        let held = soon("the writer's grant", lock.write()).await.unwrap();
        held.release().await.unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    while let Some(reader) = readers.join_next().await {
        reader.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn permits_of_a_crowd_stay_within_the_capacity() {
    let running = need!("consul3");
    let (inside, most) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let client = connected(&running).await;
        for _ in 0..4 {
            let (pool, inside) = (client.semaphore("pool", 3), Arc::clone(&inside));
            let most = Arc::clone(&most);
            tasks.spawn(async move {
                for _ in 0..8 {
                    let permit = pool.acquire().await.unwrap();
                    let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= 3, "{now} inside");
                    most.fetch_max(now, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    permit.release().await.unwrap();
                }
            });
        }
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    assert!(most.load(Ordering::SeqCst) > 1, "given one at a time");
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_that_come_and_go_wake_no_keeper() {
    use palisade_testkit::lab::proxy::{Protocol, Proxy};
    let running = need!("consul");
    let target = ([127, 0, 0, 1], running.nodes()[0].port()).into();
    let proxy = Proxy::start(target, Protocol::Http1).unwrap();
    let idle = palisade::connect(&format!("consul://{}", proxy.addr()))
        .await
        .unwrap();
    let held = idle.mutex("held").lock().await.unwrap();
    let busy = connected(&running).await;
    let mutex = busy.mutex("busy");
    let transactions = || {
        let seen = proxy.seen();
        let labels = seen.iter().filter_map(|seen| seen.label.as_deref());
        labels.filter(|label| label.contains("/v1/txn")).count()
    };
    let before = transactions();
    for _ in 0..100 {
        mutex.lock().await.unwrap().release().await.unwrap();
    }
    // A holder reads its own locks when it renews, and when an operator has marked something.
    let asked = transactions() - before;
    assert!(
        asked < 20,
        "{asked} messages about transactions of one that only holds"
    );
    assert!(held.is_valid());
}
