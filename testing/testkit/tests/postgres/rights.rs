//! Users with few permissions, the schema's version, and exhausted connections.

use std::time::Duration;

use palisade::engines::postgres::Schema;
use palisade::{ErrorKind, Patience};
use palisade_testkit::lab::proxy::{Direction, Protocol, Proxy};

use super::{Psql, advisory, connect, server, server_with, sql};

#[tokio::test]
async fn a_lesser_user_needs_the_grants_that_are_printed_and_no_more() {
    let server = need!(server());
    let mut psql = need!(Psql::open(&server));
    sql(&server, "CREATE ROLE app LOGIN");
    let urls = [
        server.url().replace("palisade@", "app@"),
        advisory(&server).replace("palisade@", "app@"),
    ];
    for url in &urls {
        let client = connect(url).await;
        let refused = client.mutex("x").try_lock().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Denied);
        let said = refused.to_string();
        assert!(said.contains("`palisade schema postgres --user"), "{said}");
    }
    let schema = Schema::default();
    psql.ask(&schema.sql());
    // The tables are there, and the rights are not.
    for url in &urls {
        let client = connect(url).await;
        let refused = client.mutex("x").try_lock().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Denied);
        let said = refused.to_string();
        assert!(said.contains("`palisade schema postgres --user"), "{said}");
    }
    // Twice, because it can be run again.
    for _ in 0..2 {
        psql.ask(&schema.sql());
        psql.ask(&schema.grants("app"));
    }
    for url in &urls {
        let client = connect(url).await;
        let hold = client.mutex("x").try_lock().await.unwrap().unwrap();
        hold.release().await.unwrap();
    }
}

#[tokio::test]
async fn another_schema_is_another_set_of_locks() {
    let server = need!(server());
    let one = connect(server.url()).await;
    let other = format!("{}?schema=other_locks", server.url());
    let other = connect(&other).await;
    let first = one.mutex("x").try_lock().await.unwrap();
    let second = other.mutex("x").try_lock().await.unwrap();
    assert!(first.is_some() && second.is_some());
    let bad = format!("{}?schema=a%3Bdrop", server.url());
    assert_eq!(
        palisade::connect(&bad).await.unwrap_err().kind(),
        ErrorKind::Config
    );
}

/// 53300: a patient acquire waits for a free connection, an impatient one fails.
#[tokio::test]
async fn no_connection_left_is_unreachable_and_passes() {
    let few = [
        "-c",
        "max_connections=4",
        "-c",
        "superuser_reserved_connections=0",
        "-c",
        "max_wal_senders=0",
    ];
    let server = need!(server_with(&few));
    let target = server.nodes()[0].address().parse().unwrap();
    let proxy = Proxy::start(target, Protocol::Postgres).unwrap();
    let client = connect(format!("postgres://palisade@{}/postgres", proxy.addr())).await;
    let mut sessions: Vec<_> = (0..4).filter_map(|_| Psql::open(&server)).collect();
    if sessions.is_empty() {
        return;
    }
    sessions
        .iter_mut()
        .for_each(|psql| drop(psql.ask("SELECT 1;")));
    let lock = client.mutex("x");
    let refused = lock.try_lock().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unreachable);
    assert!(refused.to_string().contains("max_connections"), "{refused}");
    // Each attempt costs a full server a process and a line in its log: with its two connections the
    // client would make 16 in this time, if the server were down.
    let end = palisade::BootTime::now() + Duration::from_secs(2);
    while !end.has_passed() {
        assert!(lock.try_lock().await.is_err());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let tries = proxy.passed(Direction::ToEngine, "StartupMessage");
    assert!((2..12).contains(&tries), "{tries} attempts");
    let line = client.line("x", palisade::engine::Ask::Whole);
    let waiting = tokio::spawn(async move { line.acquire(Patience::For(super::SOON * 2)).await });
    drop(sessions);
    assert!(waiting.await.unwrap().unwrap().is_some());
}
