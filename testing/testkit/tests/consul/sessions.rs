//! Sessions: shared, unusable after an unknown outcome, ended by hand, and delayed.

use std::net::SocketAddr;
use std::time::Duration;

use palisade::engine::Ask;
use palisade::report::Scope;
use palisade::{BootTime, ErrorKind, LossReason, Patience};
use palisade_testkit::lab::launch::Running;
use palisade_testkit::lab::proxy::{Direction, Protocol, Proxy, to_engine};
use palisade_testkit::lab::trial::{cycle, survives_dead_connections, uuid};

use crate::util::{connected, consul, destroy, fails, get, holder, keys, lasting, soon, until};

fn behind(running: &Running) -> (Proxy, String) {
    let target = SocketAddr::from(([127, 0, 0, 1], running.nodes()[0].port()));
    let proxy = Proxy::start(target, Protocol::Http1).unwrap();
    let url = format!("consul://{}", proxy.addr());
    (proxy, url)
}

fn sessions(running: &Running) -> usize {
    let all = get(running, "/v1/session/list");
    all.as_array().map_or(0, Vec::len)
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_share_a_session_but_not_on_one_name() {
    let running = need!("consul");
    // No session ends by itself within the test.
    let client = lasting(running.url()).await;
    let mut holds = Vec::new();
    for name in ["a", "b", "c", "d"] {
        holds.push(client.mutex(name).lock().await.unwrap());
    }
    assert_eq!(sessions(&running), 1);
    let again = client.mutex("a");
    assert!(
        again.try_lock().await.unwrap().is_none(),
        "one session has a lock twice"
    );
    assert_eq!(sessions(&running), 2);
    let ttl = Duration::from_secs(60);
    holds.push(client.mutex("e").ttl(ttl).lock().await.unwrap());
    assert_eq!(sessions(&running), 3);
    drop(holds);
    client.flush().await;
    drop(again);
    client.close().await;
    until("the end of all sessions", async || sessions(&running) == 0).await;
    let left = keys(&running);
    assert!(left.is_empty(), "left behind: {left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_reader_that_comes_moves_the_gate() {
    let running = need!("consul");
    let client = connected(&running).await;
    let index = || {
        let gate = get(&running, "/v1/kv/palisade/gate?consistent");
        gate[0]["ModifyIndex"].as_u64().unwrap()
    };
    let lock = client.rwlock("gate");
    let first = lock.read().await.unwrap();
    let mut last = index();
    for _ in 0..3 {
        // The index must change, so that a writer that has read before is not granted now.
        let reader = lock.read().await.unwrap();
        assert!(index() > last, "a reader came unseen");
        last = index();
        reader.release().await.unwrap();
    }
    first.release().await.unwrap();
    let left = keys(&running);
    assert!(left.is_empty(), "left behind: {left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_permit_that_is_taken_moves_the_list_of_holders() {
    let running = need!("consul");
    let client = connected(&running).await;
    let index = || {
        let list = get(&running, "/v1/kv/palisade/pool/.lock?consistent");
        list[0]["ModifyIndex"].as_u64().unwrap()
    };
    let pool = client.semaphore("pool", 3);
    let first = pool.acquire().await.unwrap();
    let mut last = 0;
    for _ in 0..4 {
        // The same session each time, still listed when it returns.
        let permit = pool.acquire().await.unwrap();
        assert!(index() > last, "a permit was taken unseen");
        last = index();
        permit.release().await.unwrap();
    }
    first.release().await.unwrap();
    let left = keys(&running);
    assert!(left.is_empty(), "left behind: {left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_and_writers_of_many_clients_never_overlap() {
    use std::sync::atomic::{AtomicI64, Ordering};
    let running = need!("consul");
    // A reader adds one, a writer adds a million.
    let inside = std::sync::Arc::new(AtomicI64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..6 {
        let client = connected(&running).await;
        let inside = std::sync::Arc::clone(&inside);
        tasks.spawn(async move {
            let lock = client.rwlock("busy");
            for round in 0..30 {
                let writes = (task + round) % 3 == 0;
                let (hold, weight) = if writes {
                    (lock.write().await.unwrap(), 1_000_000)
                } else {
                    (lock.read().await.unwrap(), 1)
                };
                let before = inside.fetch_add(weight, Ordering::SeqCst);
                assert!(
                    before < 1_000_000 && (!writes || before == 0),
                    "{before} inside"
                );
                tokio::time::sleep(Duration::from_millis(1)).await;
                inside.fetch_sub(weight, Ordering::SeqCst);
                hold.release().await.unwrap();
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_destroyed_by_hand_is_told_and_replaced() {
    let running = need!("consul");
    let ttl = Duration::from_secs(3);
    let client = connected(&running).await;
    let hold = client.mutex("taken").ttl(ttl).lock().await.unwrap();
    let other = connected(&running).await;
    let waiting = other.mutex("taken");
    let waiting = tokio::spawn(async move { waiting.lock().await });
    let session = holder(&running, "palisade/taken").unwrap();
    destroy(&running, &session);
    let next = soon("the grant", waiting).await.unwrap().unwrap();
    assert!(next.token() > hold.token());
    let loss = tokio::time::timeout(ttl, hold.lost())
        .await
        .expect("told within the ttl");
    assert_eq!(loss.reason, LossReason::Taken);
    assert_eq!(hold.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(
        next.is_valid(),
        "the release of a lost lock took the next one's"
    );
    // A dead session is not reused, and nobody sees an error.
    let hold = client.mutex("free").ttl(ttl).try_lock().await.unwrap();
    assert!(hold.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_session_that_ended_costs_no_error() {
    let running = need!("consul");
    let client = connected(&running).await;
    let mutex = client.mutex("idle");
    let hold = mutex.lock().await.unwrap();
    let session = holder(&running, "palisade/idle").unwrap();
    hold.release().await.unwrap();
    destroy(&running, &session);
    assert!(mutex.try_lock().await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_delay_is_waited_for_without_a_busy_loop() {
    let running = need!("consul");
    let delay = Duration::from_secs(2);
    let owner = palisade::connect(&format!("{}?lock_delay=2s", running.url()))
        .await
        .unwrap();
    let _hold = owner.mutex("delayed").lock().await.unwrap();
    let (proxy, url) = behind(&running);
    let other = palisade::connect(&url).await.unwrap();
    let waiting = other.mutex("delayed");
    let waiting = tokio::spawn(async move { waiting.lock().await });
    until("the wait", async || {
        let seen = proxy.seen();
        seen.iter().any(|seen| {
            seen.label
                .as_deref()
                .is_some_and(|label| label.contains("index="))
        })
    })
    .await;
    let session = holder(&running, "palisade/delayed").unwrap();
    let before = proxy.seen().len();
    let destroyed = BootTime::now();
    destroy(&running, &session);
    let next = soon("the grant", waiting).await.unwrap().unwrap();
    let took = BootTime::now().saturating_since(destroyed);
    assert!(took >= delay, "granted within the lock-delay: {took:?}");
    assert!(
        took < delay + Duration::from_millis(1500),
        "granted late: {took:?}"
    );
    let asked = proxy.seen().len() - before;
    assert!(asked < 60, "{asked} messages in {took:?}");
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_is_one_grant() {
    let running = need!("consul");
    let (proxy, url) = behind(&running);
    // No audit, which would remove the orphan too, happens within the test.
    let client = lasting(&url).await;
    cycle(&client.mutex("warm")).await;
    // The request arrives, but its answer is lost.
    let rule = to_engine().label_contains("/v1/txn").once().cut_after();
    let guard = proxy.inject(rule);
    let mutex = client.mutex("once");
    let hold = mutex.lock_timeout(Duration::from_secs(5));
    let hold = hold.await.unwrap().expect("a free lock");
    assert_eq!(guard.hits(), 1);
    let line = client
        .survey(Scope::Line(hold.name().clone()))
        .await
        .unwrap();
    assert_eq!(line[0].holders.len(), 1);
    assert_eq!(line[0].holders[0].sequence, Some(hold.token().0));
    hold.release().await.unwrap();

    // The same without a retry: the lock is not left behind.
    let guard = proxy.inject(to_engine().label_contains("/v1/txn").once().cut_after());
    let line = client.line("orphan", Ask::Whole);
    let error = line.acquire(Patience::NoWait).await.unwrap_err();
    assert_eq!((error.kind(), guard.hits()), (ErrorKind::Unreachable, 1));
    until("the end of the orphan", async || {
        holder(&running, "palisade/orphan").is_none()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blackholed_agent_is_noticed_before_the_session_can_end() {
    let running = need!("consul");
    let ttl = Duration::from_secs(3);
    let (proxy, url) = behind(&running);
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("dark").ttl(ttl).lock().await.unwrap();
    let other = connected(&running).await;
    let waiting = other.mutex("dark");
    let waiting = tokio::spawn(async move {
        let next = waiting.lock().await.unwrap();
        (next, BootTime::now())
    });
    proxy.blackhole(Direction::ToEngine);
    proxy.blackhole(Direction::ToClient);
    let dark = BootTime::now();
    let loss = soon("the loss", hold.lost()).await;
    let told = BootTime::now();
    assert_eq!(loss.reason, LossReason::Expired);
    assert!(told.saturating_since(dark) < ttl, "told too late");
    let (next, granted) = soon("the grant", waiting).await.unwrap();
    assert!(
        told < granted && hold.deadline() < granted,
        "told after the grant"
    );
    assert!(next.token() > hold.token());
    let bound = ttl * 2 + Duration::from_secs(1);
    assert!(granted.saturating_since(dark) < bound, "taken over late");
    // After the outage the client that lost its hold works again.
    proxy.heal();
    drop(hold);
    next.release().await.unwrap();
    let mutex = client.mutex("dark");
    let again = mutex.lock_timeout(Duration::from_secs(8));
    assert!(again.await.unwrap().is_some());
}

#[tokio::test]
async fn a_ttl_below_the_minimum_is_refused_by_name() {
    let running = need!("consul", "-hcl", "session_ttl_min = \"10s\"");
    let error = fails(
        palisade::connect(&format!("{}?ttl=5s", running.url())).await,
        ErrorKind::InvalidArgument,
    );
    assert!(error.to_string().contains("session_ttl_min"), "{error}");
    let client = connected(&running).await;
    assert_eq!(client.capability().ttl.min, Duration::from_secs(10));
    let short = client.mutex("x").ttl(Duration::from_secs(5));
    fails(short.try_lock().await, ErrorKind::InvalidArgument);
}

/// Holders without waiters sleep, however much is written elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn idle_holders_ask_nothing_while_others_write() {
    let running = need!("consul");
    let (proxy, url) = behind(&running);
    let mut holds = Vec::new();
    for number in 0..5 {
        let client = palisade::connect(&url).await.unwrap();
        let name = format!("idle-{number}");
        holds.push(client.mutex(&name).lock().await.unwrap());
    }
    let watches = || {
        let seen = proxy.seen().into_iter();
        let labels = seen.filter_map(|message| message.label);
        labels.filter(|label| label.contains("/.evict/")).count()
    };
    // Each has started to watch, with a read and a key to block on.
    until("the watches", async || watches() >= 15).await;
    let busy = connected(&running).await;
    let (before, from) = (watches(), BootTime::now());
    let mut writes = 0;
    while writes < 100 || BootTime::now().saturating_since(from) < Duration::from_secs(3) {
        let mutex = busy.mutex(format!("busy-{}", writes % 7));
        mutex.lock().await.unwrap().release().await.unwrap();
        writes += 1;
    }
    // One blocking query every ten seconds, and the audit of a renewal every ten seconds.
    let tens = BootTime::now().saturating_since(from).as_secs() as usize / 10 + 1;
    let asked = watches() - before;
    assert!(
        asked <= 5 * 4 * tens,
        "{asked} requests beside {writes} locks"
    );
    drop(holds);
}

/// A snapshot from before a release is restored while the client is connected. Only this client can
/// release the lock that its session holds again.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_a_restored_snapshot_brings_back_is_released() {
    let running = need!("consul");
    let client = connected(&running).await;
    let kept = client.mutex("kept").lock().await.unwrap();
    let undone = client.mutex("undone").lock().await.unwrap();
    let read = client.rwlock("read").read().await.unwrap();
    let permit = client.semaphore("permit", 1);
    let permit = permit.acquire().await.unwrap();
    let file = running.folder().join("snapshot").display().to_string();
    consul(&running, &["snapshot", "save", &file]);
    let token = undone.token();
    undone.release().await.unwrap();
    read.release().await.unwrap();
    permit.release().await.unwrap();
    // The client is still active when that happens.
    let until_then = client.mutex("other");
    until_then.lock().await.unwrap().release().await.unwrap();
    consul(&running, &["snapshot", "restore", &file]);
    let other = connected(&running).await;
    let again = other.mutex("undone");
    let again = soon("the lock", again.lock()).await.unwrap();
    assert!(again.token() > token, "tokens go back");
    let writer = other.rwlock("read");
    drop(soon("the writer", writer.write()).await.unwrap());
    let permits = other.semaphore("permit", 1);
    drop(soon("the permit", permits.acquire()).await.unwrap());
    assert!(kept.is_valid(), "what was held all along is held");
    assert_eq!(holder(&running, "palisade/kept"), Some(session(&kept)));
}

/// The remains of a dead holder are removed when somebody reads the line.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_dead_leave_is_swept_away() {
    let running = need!("consul");
    let client = connected(&running).await;
    let whole = client.mutex("whole").lock().await.unwrap();
    let read = client.rwlock("read").read().await.unwrap();
    let permit = client.semaphore("permit", 2);
    let permit = permit.acquire().await.unwrap();
    let election = client.election("elected");
    let leader = election.campaign("first").await.unwrap();
    leader.proclaim("second").await.unwrap();
    assert!(keys(&running).len() > 6, "{:?}", keys(&running));
    destroy(&running, &session(&whole));
    let looks = connected(&running).await;
    until("an empty store", async || {
        let lines = looks.survey(Scope::Prefix(String::new())).await.unwrap();
        lines.is_empty() && keys(&running).is_empty()
    })
    .await;
    drop((whole, read, permit, leader));
}

/// Existing connections go silent, new ones are served: a hold survives.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_connection_costs_no_hold() {
    let running = need!("consul");
    let (proxy, url) = behind(&running);
    survives_dead_connections(&url, &proxy).await;
}

/// The id of a hold's session, as Consul writes it.
fn session(hold: &palisade::Hold) -> String {
    uuid(hold.ticket().lease.0)
}
