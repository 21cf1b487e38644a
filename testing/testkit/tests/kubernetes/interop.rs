//! A contender that behaves like client-go and palisade exclude each other, both ways.

use std::time::{Duration, Instant};

use crate::client_go::Elector;
use crate::util::{beside_others, holder, seconds, server, shown, soon};

#[tokio::test(flavor = "multi_thread")]
async fn palisade_waits_for_client_go() {
    let server = server();
    let client = beside_others(&server).await;
    let mut theirs = Elector::new(&server, "controller", "pod-a_1f2e", 15);
    assert!(theirs.try_acquire_or_renew());
    let mutex = client.mutex("controller");
    assert!(mutex.try_lock().await.unwrap().is_none(), "two leaders");
    let line = shown(&client, "controller").await.unwrap();
    assert_eq!(line.holders[0].id, "pod-a_1f2e");
    assert_eq!(line.holders[0].owner, None);
    let waiting = tokio::spawn(async move { mutex.lock().await });
    assert!(theirs.try_acquire_or_renew(), "their renewal");
    assert!(theirs.release());
    let hold = soon("the grant", waiting).await.unwrap().unwrap();
    // The number of transitions is right for client-go.
    let lease = server.lease("controller").unwrap();
    assert_eq!(lease["spec"]["leaseTransitions"], 1);
    assert!(!theirs.try_acquire_or_renew(), "two leaders");
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn client_go_waits_for_palisade() {
    let server = server();
    let client = beside_others(&server).await;
    let hold = client
        .mutex("controller")
        .ttl(seconds(2))
        .lock()
        .await
        .unwrap();
    let mut theirs = Elector::new(&server, "controller", "pod-a_1f2e", 15);
    let start = Instant::now();
    // Longer than the ttl, so that renewals are seen as such.
    while start.elapsed() < Duration::from_secs(4) {
        assert!(!theirs.try_acquire_or_renew(), "two leaders");
        assert!(hold.is_valid());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    hold.release().await.unwrap();
    assert!(theirs.try_acquire_or_renew(), "free, but not for them");
    let lease = server.lease("controller").unwrap();
    assert_eq!(holder(&lease), "pod-a_1f2e");
    assert!(
        client
            .mutex("controller")
            .try_lock()
            .await
            .unwrap()
            .is_none()
    );
}

/// A dead holder is replaced after the duration in its own record, not after that of the next one.
#[tokio::test(flavor = "multi_thread")]
async fn the_records_duration_counts() {
    let server = server();
    let client = beside_others(&server).await;
    let mut theirs = Elector::new(&server, "controller", "pod-a_1f2e", 3);
    let start = Instant::now();
    assert!(theirs.try_acquire_or_renew());
    let hold = client
        .mutex("controller")
        .ttl(seconds(1))
        .lock()
        .await
        .unwrap();
    let took = start.elapsed();
    assert!(took >= seconds(3), "taken over after {took:?}");
    drop(hold);

    // The other way: a palisade process that is gone, as seen by its Lease.
    let gone = beside_others(&server).await;
    let kept = gone.mutex("other").ttl(seconds(3)).unrenewed();
    let kept = kept.lock().await.unwrap();
    let mut theirs = Elector::new(&server, "other", "pod-b_77", 1);
    let start = Instant::now();
    while !theirs.try_acquire_or_renew() {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(start.elapsed() < seconds(12), "never free");
    }
    let took = start.elapsed();
    assert!(took >= seconds(2), "taken over after {took:?}");
    assert!(!kept.is_valid(), "two leaders");
    // Our annotation stays in the object that they wrote, but has no meaning any more.
    let lease = server.lease("other").unwrap();
    assert!(lease["metadata"]["annotations"]["palisade/holders"].is_string());
    let line = shown(&client, "other").await.unwrap();
    assert_eq!(line.holders[0].id, "pod-b_77");
}

/// Clocks are never compared: an hour's difference changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_is_an_hour_off_changes_nothing() {
    for ahead in [3600, -3600] {
        let server = server();
        let client = beside_others(&server).await;
        let theirs = Elector::new(&server, "controller", "pod-a_1f2e", 2);
        let mut theirs = theirs.with_clock_ahead(ahead);
        assert!(theirs.try_acquire_or_renew());
        let mutex = client.mutex("controller").ttl(seconds(2));
        let waiting = tokio::spawn(async move { mutex.lock().await });
        let start = Instant::now();
        while start.elapsed() < seconds(5) {
            assert!(theirs.try_acquire_or_renew(), "their renewal, {ahead}");
            assert!(!waiting.is_finished(), "two leaders, {ahead}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        // The other one dies: its record is waited for exactly as long as it says.
        let start = Instant::now();
        let hold = soon("the grant", waiting).await.unwrap().unwrap();
        let took = start.elapsed();
        assert!(took >= seconds(1) && took < seconds(6), "{took:?}, {ahead}");
        hold.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn permits_keep_client_go_out_while_one_of_them_lives() {
    let server = server();
    let client = beside_others(&server).await;
    let pool = client.semaphore("pool", 2).ttl(seconds(2));
    let (one, two) = (pool.acquire().await.unwrap(), pool.acquire().await.unwrap());
    let mut theirs = Elector::new(&server, "pool", "pod-a_1f2e", 15);
    assert!(!theirs.try_acquire_or_renew(), "beside two");
    one.release().await.unwrap();
    let start = Instant::now();
    while start.elapsed() < seconds(3) {
        assert!(!theirs.try_acquire_or_renew(), "beside one");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    two.release().await.unwrap();
    assert!(theirs.try_acquire_or_renew(), "free, but not for them");
    assert!(pool.try_acquire().await.unwrap().is_none(), "beside them");
}

#[tokio::test(flavor = "multi_thread")]
async fn contenders_of_both_kinds_never_lead_at_once() {
    let server = std::sync::Arc::new(server());
    let leaders = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for n in 0..2 {
        let (server, leaders) = (server.clone(), leaders.clone());
        tasks.push(tokio::task::spawn_blocking(move || {
            let mut terms = 0;
            let mut theirs = Elector::new(&server, "shared", &format!("pod_{n}"), 5);
            while terms < 10 {
                if theirs.try_acquire_or_renew() {
                    alone(&leaders, || std::thread::sleep(Duration::from_millis(5)));
                    terms += usize::from(theirs.release());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }));
    }
    for _ in 0..2 {
        let client = beside_others(&server).await;
        let leaders = leaders.clone();
        tasks.push(tokio::spawn(async move {
            for _ in 0..10 {
                let hold = client.mutex("shared").ttl(seconds(5)).lock().await.unwrap();
                tokio::task::block_in_place(|| {
                    alone(&leaders, || std::thread::sleep(Duration::from_millis(5)));
                });
                hold.release().await.unwrap();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }));
    }
    for task in tasks {
        tokio::time::timeout(seconds(60), task)
            .await
            .unwrap()
            .unwrap();
    }
}

fn alone(leaders: &std::sync::atomic::AtomicUsize, work: impl FnOnce()) {
    use std::sync::atomic::Ordering::SeqCst;
    assert_eq!(leaders.fetch_add(1, SeqCst), 0, "two leaders");
    work();
    leaders.fetch_sub(1, SeqCst);
}
