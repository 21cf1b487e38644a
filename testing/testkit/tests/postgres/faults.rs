//! Faults of the server and its sessions.

use std::time::Duration;

use palisade::{BootTime, LossReason};
use palisade_testkit::lab::proxy::{Protocol, Proxy, to_client};
use palisade_testkit::lab::trial::until;

use super::{
    LET_GO, Psql, SOON, advisory, connect, server, server_with, soon, sql, waits_for_a_lock,
};

const OURS: &str = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
    WHERE application_name LIKE 'palisade%' AND pid <> pg_backend_pid()";

#[tokio::test]
async fn a_terminated_session_is_a_lost_lock_that_is_told() {
    let server = need!(server());
    let client = connect(&advisory(&server)).await;
    let lock = client.mutex("x");
    let hold = lock.lock().await.unwrap();
    sql(&server, OURS);
    let loss = soon(hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Taken);
    assert!(!hold.is_valid());
    let next = soon(lock.lock()).await.unwrap();
    assert!(next.token() > hold.token());
}

#[tokio::test]
async fn terminated_sessions_cost_the_table_nothing() {
    let server = need!(server());
    let client = connect(&format!("{}?ttl=2s", server.url())).await;
    let lock = client.mutex("x");
    let hold = lock.lock().await.unwrap();
    let waiter = tokio::spawn(async move { lock.lock().await });
    let end = BootTime::now() + Duration::from_secs(3);
    while !end.has_passed() {
        sql(&server, OURS);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(hold.is_valid(), "lost with a session that it does not need");
    }
    let token = hold.token();
    hold.release().await.unwrap();
    let next = soon(waiter).await.unwrap().unwrap();
    assert!(next.token() > token);
}

#[tokio::test]
async fn a_crash_keeps_the_table_s_holds_and_tokens_and_ends_session_locks() {
    let server = need!(server());
    let table = connect(server.url()).await;
    let sessions = connect(&advisory(&server)).await;
    let row = table.mutex("x").lock().await.unwrap();
    let session = sessions.mutex("x").lock().await.unwrap();
    server.nodes()[0].restart().unwrap();
    soon(session.lost()).await;
    let next = tokio::time::timeout(SOON, async { sessions.mutex("x").lock().await.unwrap() });
    assert!(
        next.await.unwrap().token() > session.token(),
        "a token went back"
    );
    assert!(row.is_valid());
    assert!(table.mutex("x").try_lock().await.unwrap().is_none());
    let token = row.token();
    row.release().await.unwrap();
    let again = table.mutex("x").try_lock().await.unwrap().unwrap();
    assert!(again.token() > token, "a token went back");
}

/// Old row versions are removed by later statements, without waiting for a vacuum.
#[tokio::test]
async fn dead_rows_do_not_pile_up() {
    let server = need!(server());
    let client = connect(server.url()).await;
    let lock = client.mutex("x");
    for _ in 0..3000 {
        lock.lock().await.unwrap().release().await.unwrap();
    }
    let size = sql(&server, "SELECT pg_total_relation_size('palisade.line')");
    let size: u64 = size[0].parse().unwrap();
    assert!(
        size <= 128 * 1024,
        "{size} bytes after 6000 changes of one row"
    );
}

/// A notification from the past, or one without a token, is no grant.
#[tokio::test]
async fn only_the_message_of_its_grant_is_a_grant() {
    let server = need!(server());
    let client = connect(server.url()).await;
    let lock = client.mutex("told");
    let hold = lock.lock().await.unwrap();
    let mut waiter = tokio::spawn(async move { lock.lock().await });
    let tell = |token: &str| {
        let tell = format!(
            "SELECT count(pg_notify(seats[2].mailbox, 'g' || seats[2].claim || {token}))
               FROM palisade.line WHERE cardinality(seats) = 2"
        );
        sql(&server, &tell) == ["1"]
    };
    let end = BootTime::now() + SOON;
    while !tell("' ' || token") {
        assert!(!end.has_passed(), "nobody waits");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for token in ["' ' || token", "' ' || token - 1", "''", "' x'"] {
        assert!(tell(token));
        let early = tokio::time::timeout(Duration::from_millis(200), &mut waiter).await;
        assert!(early.is_err(), "granted by a message of the past: {token}");
    }
    let token = hold.token();
    hold.release().await.unwrap();
    let next = soon(waiter).await;
    assert!(next.unwrap().unwrap().token() > token);
}

/// A leave grants the first waiter whose lease is valid, in the same statement.
#[tokio::test]
async fn a_waiter_whose_lease_has_ended_is_passed_over() {
    let server = need!(server());
    let client = connect(&format!("{}?ttl=60s", server.url())).await;
    let lock = client.mutex("ended");
    let hold = lock.lock().await.unwrap();
    let mut waiters = Vec::new();
    for seats in ["2", "3"] {
        let lock = lock.clone();
        waiters.push(tokio::spawn(async move { lock.lock().await }));
        until("a waiter", async || {
            sql(&server, "SELECT cardinality(seats) FROM palisade.line") == [seats]
        })
        .await;
    }
    let last = sql(&server, "SELECT seats[3].claim FROM palisade.line");
    let ended = "UPDATE palisade.line SET seats[2].expires = clock_timestamp() - interval '1 s'";
    sql(&server, ended);
    hold.release().await.unwrap();
    let holder = "SELECT seats[1].claim FROM palisade.line WHERE seats[1].counted > 0";
    assert_eq!(sql(&server, holder), last);
    waiters.into_iter().for_each(|waiter| waiter.abort());
}

/// The request of a dropped future is applied nevertheless, but leaves nothing behind.
#[tokio::test]
async fn dropped_futures_leave_no_claim() {
    let server = need!(server());
    // Within the limit no lease ends: a session lock has a ttl of 12 s at the most.
    let table = (format!("{}?ttl=120s", server.url()), SOON);
    let sessions = (format!("{}?ttl=12s", advisory(&server)), LET_GO);
    for (url, limit) in [table, sessions] {
        let client = connect(&url).await;
        let lock = client.mutex("dropped");
        for round in 0..200_u64 {
            let lock = lock.clone();
            let task = tokio::spawn(async move { lock.lock().await.map(drop) });
            tokio::time::sleep(Duration::from_micros(round * 10)).await;
            task.abort();
        }
        client.flush().await;
        let other = connect(&url).await;
        let hold = other.mutex("dropped").lock_timeout(limit).await.unwrap();
        assert!(
            hold.is_some(),
            "{}: a claim was left behind",
            client.describe()
        );
    }
}

/// 40P01: the server resolves a deadlock by aborting our statement, which is then retried.
#[tokio::test]
async fn a_deadlock_at_our_cost_is_asked_again() {
    // Time to close the circle before the server checks for a deadlock.
    let server = need!(server_with(&["-c", "deadlock_timeout=4s"]));
    let mut other = need!(Psql::open(&server));
    let client = connect(&format!("{}?timeout=30s", server.url())).await;
    let lock = client.mutex("x");
    lock.lock().await.unwrap().release().await.unwrap();
    // An enter now locks the line's row, and then looks for claims that were left before they
    // arrived; the other session locks in the opposite order.
    sql(
        &server,
        "UPDATE palisade.line SET doubt = clock_timestamp() + interval '1 hour'",
    );
    other.ask(
        "SET deadlock_timeout = '1h'; BEGIN; \
         LOCK TABLE palisade.departed IN ACCESS EXCLUSIVE MODE;",
    );
    let ours = tokio::spawn(async move { lock.try_lock().await });
    let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    while sql(&server, waits) != ["1"] {
        tokio::task::yield_now().await;
    }
    other.send("UPDATE palisade.line SET used = used; COMMIT;");
    let hold = tokio::time::timeout(SOON * 6, ours).await.unwrap().unwrap();
    assert!(hold.unwrap().is_some(), "busy, and nobody has it");
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    tokio::time::timeout(SOON * 2, async {
        while sql(&server, deadlocks) == ["0"] {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await
    .expect("there was no deadlock");
}

/// The server counts a session's idle time from the grant on, whenever its notification arrives.
#[tokio::test]
async fn a_grant_whose_news_come_late_lasts_no_longer_for_it() {
    const TTL: Duration = Duration::from_secs(6);
    let server = need!(server());
    let target = server.nodes()[0].address().parse().unwrap();
    let proxy = Proxy::start(target, Protocol::Postgres).unwrap();
    let near = connect(&advisory(&server)).await;
    let far = format!(
        "postgres+advisory://palisade@{}/postgres?ttl=6s&timeout=1s",
        proxy.addr()
    );
    let far = connect(&far).await;
    let first = near.mutex("x").lock().await.unwrap();
    let lock = far.mutex("x");
    let waiter = tokio::spawn(async move { lock.lock().await });
    waits_for_a_lock(&server).await;
    let silence = proxy.inject(to_client().hold());
    let token = first.token();
    first.release().await.unwrap();
    let granted = BootTime::now();
    // Long enough for two renewals to be due.
    tokio::time::sleep(TTL / 2 + TTL / 12).await;
    drop(silence);
    let late = tokio::time::timeout(SOON * 4, waiter).await;
    let late = late.unwrap().unwrap().unwrap();
    // The next token was in the late notification; any other token belongs to a later grant of
    // another claim.
    if late.token().0 == token.0 + 1 {
        let deadline = late.deadline();
        assert!(
            deadline <= granted + TTL,
            "it lasts {:?} longer than the session",
            deadline.saturating_since(granted + TTL)
        );
    }
}
