//! A primary and its standby: locks are only taken on the primary, and what a failover does.

use std::time::Duration;

use palisade::ErrorKind;
use palisade_testkit::lab::launch::{Node, Running, wire};

use super::{SOON, connect, soon, throughout};

const SCHEMES: [&str; 2] = ["postgres", "postgres+advisory"];

fn url(scheme: &str, hosts: &[String]) -> String {
    let hosts = hosts.join(",");
    format!("{scheme}://palisade@{hosts}/postgres?ttl=10s")
}

fn ask(node: &Node, sql: &str) -> Vec<String> {
    wire::postgres(node.port(), "palisade", sql).unwrap()
}

async fn until(node: &Node, sql: &str, wanted: &str) {
    let reached = async {
        while ask(node, sql) != [wanted] {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let reached = tokio::time::timeout(SOON * 4, reached).await;
    reached.unwrap_or_else(|_| panic!("not {wanted}: {sql}"));
}

/// Waits until the standby has caught up with the primary.
async fn caught_up(pair: &Running) {
    let lsn = ask(&pair.nodes()[0], "SELECT pg_current_wal_lsn()").remove(0);
    let replayed = format!("SELECT pg_last_wal_replay_lsn() >= '{lsn}'::pg_lsn");
    until(&pair.nodes()[1], &replayed, "t").await;
}

#[tokio::test]
async fn a_standby_is_refused_and_the_primary_among_several_is_found() {
    let pair = need!("postgres-pair");
    let [primary, standby] = [0, 1].map(|at| pair.nodes()[at].address());
    // First without palisade's tables, then with them.
    for tables in [false, true] {
        for scheme in SCHEMES {
            let client = connect(&url(scheme, std::slice::from_ref(&standby))).await;
            let refused = client.mutex("x").try_lock().await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Unreachable, "{scheme}, {tables}");
            assert!(refused.to_string().contains("standby"), "{refused}");
        }
        let made = connect(pair.url()).await;
        let hold = made.mutex("made").try_lock().await.unwrap();
        hold.unwrap().release().await.unwrap();
        caught_up(&pair).await;
    }
    // Nobody listens at the first address; the second accepts no writes.
    let hosts = ["127.0.0.1:1".to_owned(), standby.clone(), primary];
    for scheme in SCHEMES {
        let client = connect(&url(scheme, &hosts)).await;
        let hold = client.mutex("x").try_lock().await.unwrap();
        hold.unwrap().release().await.unwrap();
        let findings = client.check().await.unwrap().findings;
        let codes: Vec<_> = findings.iter().map(|finding| finding.code).collect();
        assert!(codes.contains(&"async_standby"), "{codes:?}");
    }
    let client = connect(&url("postgres", &[standby])).await;
    let findings = client.check().await.unwrap().findings;
    assert!(
        findings.iter().any(|finding| finding.code == "standby"),
        "{findings:?}"
    );
}

/// The server with the lock dies, and its standby is promoted: a session lock is lost and reported,
/// a row survives, and no token decreases.
#[tokio::test]
async fn a_failover_ends_session_locks_and_keeps_rows() {
    let pair = need!("postgres-pair");
    let hosts = [0, 1].map(|at| pair.nodes()[at].address());
    let [table, sessions] = SCHEMES.map(|scheme| url(scheme, &hosts));
    let table = connect(&table).await;
    let sessions = connect(&sessions).await;
    let row = table.mutex("x").lock().await.unwrap();
    let session = sessions.mutex("x").lock().await.unwrap();
    caught_up(&pair).await;
    pair.nodes()[0].kill().unwrap();
    tokio::time::timeout(SOON * 2, session.lost())
        .await
        .expect("a lock of a server that is gone");
    assert!(!session.is_valid());
    ask(&pair.nodes()[1], "SELECT pg_promote(false)");
    until(&pair.nodes()[1], "SELECT pg_is_in_recovery()", "f").await;
    let next = tokio::time::timeout(SOON * 2, async {
        sessions.mutex("x").lock().await.unwrap()
    });
    let next = next.await.expect("no lock on the new primary");
    assert!(next.token() > session.token(), "a token went back");
    // It is renewed on the new primary, and stays valid.
    throughout(Duration::from_secs(10), || {
        assert!(row.is_valid(), "lost though the new primary has it");
    })
    .await;
    let lock = table.mutex("x");
    assert!(lock.try_lock().await.unwrap().is_none(), "held by two");
    let token = row.token();
    row.release().await.unwrap();
    let again = lock.try_lock().await.unwrap().unwrap();
    assert!(again.token() > token, "a token went back");
}

/// A primary that no longer accepts writes but keeps its connections: the hold moves to the host
/// that accepts them.
#[tokio::test]
async fn a_demoted_primary_is_left_for_the_one_that_takes_writes() {
    let pair = need!("postgres-pair");
    let hosts = [0, 1].map(|at| pair.nodes()[at].address());
    let client = connect(&url("postgres", &hosts)).await;
    let lock = client.mutex("x");
    let hold = lock.lock().await.unwrap();
    caught_up(&pair).await;
    ask(&pair.nodes()[1], "SELECT pg_promote(false)");
    until(&pair.nodes()[1], "SELECT pg_is_in_recovery()", "f").await;
    let [demoted, _] = [0, 1].map(|at| &pair.nodes()[at]);
    ask(
        demoted,
        "ALTER SYSTEM SET default_transaction_read_only = on",
    );
    ask(demoted, "SELECT pg_reload_conf()");
    // Longer than the ttl.
    throughout(Duration::from_secs(15), || {
        assert!(hold.is_valid(), "lost though another host takes writes");
    })
    .await;
    let token = hold.token();
    hold.release().await.unwrap();
    let again = soon(lock.lock()).await;
    assert!(again.unwrap().token() > token, "a token went back");
}
