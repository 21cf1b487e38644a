//! The connections of session locks: how many there are, how they are maintained, and what the
//! owner is told when one dies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use palisade::engine::{Ask, Lease, Place, Renewal};
use palisade::{BootTime, ErrorKind, LossReason};
use palisade_testkit::lab::proxy::{Protocol, Proxy};
use palisade_testkit::lab::trial::enter;

use super::{Psql, SOON, advisory, connect, fails, server, soon, sql, waits_for_a_lock};

const TTL: Duration = Duration::from_secs(10);

const SESSIONS: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'palisade%'";

#[tokio::test]
async fn connections_have_a_ceiling() {
    let server = need!(server());
    let url = format!("{}?max_connections=3&timeout=500ms", advisory(&server));
    let client = connect(&url).await;
    let lock = |name: &str| client.mutex(name);
    let mut holds = Vec::new();
    for name in ["a", "b", "c"] {
        holds.push(lock(name).lock().await.unwrap());
    }
    let refused = lock("d").try_lock().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unreachable);
    assert!(refused.to_string().contains("max_connections"), "{refused}");
    // Surveys have their own connection.
    client
        .survey(palisade::report::Scope::Prefix(String::new()))
        .await
        .unwrap();
    // A waiter gets the first connection that is returned.
    let waiting = lock("d");
    let waiter = tokio::spawn(async move { waiting.lock().await });
    holds.pop().unwrap().release().await.unwrap();
    let next = tokio::time::timeout(SOON, waiter).await;
    holds.push(next.expect("no connection").unwrap().unwrap());
    drop(holds);
    // Many more locks than connections: all are served.
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..30 {
        let lock = lock(&format!("many-{task}"));
        tasks.spawn(async move { lock.lock().await.unwrap().release().await.unwrap() });
    }
    let all = tokio::time::timeout(SOON * 3, tasks.join_all()).await;
    assert!(all.is_ok(), "not all were served");
    let sessions: usize = sql(&server, SESSIONS)[0].parse().unwrap();
    // One for surveys in each of two runtimes.
    assert!(sessions <= 3 + 2, "{sessions} sessions");
    for bad in ["0", "x", "100000"] {
        let url = format!("{}?max_connections={bad}", advisory(&server));
        let refused = palisade::connect(&url).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Config);
    }
}

/// Among many waiters for one lock in one client, only the first has a connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_costs_one_connection_and_leaves_others_alone() {
    const CROWD: usize = 300;
    let server = need!(server());
    let url = format!("{}?max_connections=4", advisory(&server));
    let client = connect(&url).await;
    let hold = client.mutex("x").lock().await.unwrap();
    let inside = Arc::new(AtomicU32::new(0));
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..CROWD {
        let (lock, inside) = (client.mutex("x"), Arc::clone(&inside));
        crowd.spawn(async move {
            let hold = lock.lock().await.unwrap();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "held by two");
            tokio::task::yield_now().await;
            inside.fetch_sub(1, Ordering::SeqCst);
            hold.release().await.unwrap();
        });
    }
    // One waiter gives up, and there is one of another client.
    let impatient = client.line("x", Ask::Whole);
    let patience = palisade::Patience::For(Duration::from_millis(300));
    assert!(impatient.acquire(patience).await.unwrap().is_none());
    waits_for_a_lock(&server).await;
    let other = client.mutex("y").try_lock().await.unwrap();
    other.expect("busy").release().await.unwrap();
    let foreign = connect(&advisory(&server)).await;
    let foreign = foreign.mutex("x");
    let foreign = tokio::spawn(async move { foreign.lock().await.unwrap().release().await });
    hold.release().await.unwrap();
    let all = tokio::time::timeout(SOON * 6, crowd.join_all()).await;
    assert!(all.is_ok(), "not all were served");
    let foreign = tokio::time::timeout(SOON, foreign).await;
    foreign.expect("not served").unwrap().unwrap();
}

/// When the connection of a lock ends, its place goes to the next, whoever ends it.
#[tokio::test]
async fn a_dead_connection_gives_its_place_back() {
    let server = need!(server());
    let url = format!("{}?max_connections=1", advisory(&server));
    let client = connect(&url).await;
    let hold = client.mutex("a").lock().await.unwrap();
    sql(
        &server,
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'",
    );
    soon(hold.lost()).await;
    let next = client.mutex("b");
    let next = tokio::time::timeout(SOON, next.lock()).await;
    drop(next.expect("no connection").unwrap());
}

#[tokio::test]
async fn a_frozen_server_keeps_waiters_no_longer_than_one() {
    const WAITERS: usize = 20;
    let server = need!(server());
    let url = format!("{}?timeout=1s&connect_timeout=1s", advisory(&server));
    let client = connect(&url).await;
    let (_, place) = enter(&client, "x", TTL).await;
    assert!(matches!(place, Place::Held { .. }));
    let mut tickets = Vec::new();
    for _ in 0..WAITERS {
        tickets.push(enter(&client, "x", TTL).await.0);
    }
    server.nodes()[0].stop().unwrap();
    let start = BootTime::now();
    let until = start + Duration::from_secs(60);
    let waits = tickets.into_iter().map(|ticket| {
        let engine = client.engine().clone();
        tokio::spawn(async move { engine.wait(ticket, until).await })
    });
    for wait in waits.collect::<Vec<_>>() {
        fails(wait.await.unwrap(), ErrorKind::Unreachable);
    }
    let took = BootTime::now().saturating_since(start);
    server.nodes()[0].cont().unwrap();
    // One after the other they would take at least a second each, and more to connect.
    assert!(took < Duration::from_secs(16), "they took {took:?}");
}

#[tokio::test]
async fn a_renewal_gives_a_silent_connection_up_in_time_and_the_owner_is_told() {
    const WITHIN: Duration = Duration::from_millis(700);
    let server = need!(server());
    let target = server.nodes()[0].address().parse().unwrap();
    let proxy = Proxy::start(target, Protocol::Postgres).unwrap();
    let url = format!(
        "postgres+advisory://palisade@{}/postgres?ttl=3s",
        proxy.addr()
    );
    let client = connect(&url).await;
    let (ticket, _) = enter(&client, "x", TTL).await;
    let hold = client.mutex("y").lock().await.unwrap();
    proxy.silence();
    let lease = Lease::in_a_test(&ticket);
    let start = BootTime::now();
    let renewed = client.engine().renew(vec![lease], WITHIN).await;
    let took = BootTime::now().saturating_since(start);
    assert!(matches!(renewed[..], [Renewal::Unknown(_)]), "{renewed:?}");
    assert!(
        took < Duration::from_millis(1_900),
        "answered after {took:?}"
    );
    // Another connection can't take over the session: the hold ends by its deadline, before the
    // server releases it, and new locks use new connections.
    let loss = soon(hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Expired);
    let again = client.mutex("y");
    let next = tokio::time::timeout(SOON * 2, again.lock()).await;
    let next = next.expect("the server does not let go").unwrap();
    assert!(next.token() > hold.token());
}

#[tokio::test]
async fn the_key_is_the_number_that_the_server_locks() {
    let server = need!(server());
    for options in ["", "?key=hashtext", "?key=raw&namespace="] {
        let client = palisade::connect(&format!("{}{options}", advisory(&server))).await;
        let client = client.unwrap();
        let (ticket, _) = enter(&client, "4711", TTL).await;
        let key = client.engine().key(&ticket).unwrap();
        let locked = format!(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted \
             AND (classid::bigint << 32 | objid::bigint) = {key}"
        );
        assert_eq!(sql(&server, &locked), ["1"], "{key}");
        client.engine().leave(ticket).await.unwrap();
    }
}

/// With asynchronous commits a crash could lose a token.
#[tokio::test]
async fn a_token_is_on_the_disk_before_it_is_told() {
    let server = need!(server());
    let mut psql = need!(Psql::open(&server));
    psql.ask("ALTER ROLE palisade SET synchronous_commit = off;");
    let client = connect(&advisory(&server)).await;
    let mut last = 0;
    for round in 0..40 {
        let hold = client.mutex("x").lock().await.unwrap();
        assert!(hold.token().0 > last, "round {round}");
        last = hold.token().0;
        hold.release().await.unwrap();
    }
    drop(psql);
    server.nodes()[0].restart().unwrap();
    let hold = client.mutex("x").lock().await.unwrap();
    assert!(hold.token().0 > last, "{} after {last}", hold.token().0);
}
