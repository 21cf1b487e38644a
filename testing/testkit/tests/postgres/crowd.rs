//! Many waiters for one name, and rows that others keep locked.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use palisade::LossReason;
use palisade_testkit::lab::proxy::{Direction, Protocol, Proxy};
use palisade_testkit::lab::trial::until;
use tokio::task::JoinSet;

use super::{Psql, SOON, connect, server, soon, sql, throughout};

const SEATS: &str = "SELECT cardinality(seats) FROM palisade.line WHERE name = 'crowd'";

/// Many waiters in one process delay neither the holder nor an unrelated lock, and are all served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_waiters_cost_nobody_a_lock() {
    const CROWD: u32 = 2000;
    let server = need!(server());
    // The timeout allows for a busy machine; a renewal gives up after a sixth of the ttl.
    let client = connect(&format!("{}?ttl=6s&timeout=20s", server.url())).await;
    let lock = client.mutex("crowd");
    let hold = lock.lock().await.unwrap();
    let other = client.mutex("other").lock().await.unwrap();
    let (inside, served) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let mut crowd = JoinSet::new();
    for _ in 0..CROWD {
        let (lock, inside, served) = (lock.clone(), Arc::clone(&inside), Arc::clone(&served));
        crowd.spawn(async move {
            let hold = lock.lock().await.unwrap();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two hold it");
            inside.fetch_sub(1, Ordering::SeqCst);
            served.fetch_add(1, Ordering::SeqCst);
            hold.release().await.unwrap();
        });
    }
    throughout(Duration::from_secs(15), || {
        assert!(hold.is_valid(), "the crowd took the lock from its holder");
        assert!(other.is_valid(), "the crowd took an unrelated lock away");
    })
    .await;
    let seats: u32 = sql(&server, SEATS)[0].parse().unwrap();
    assert!((2..100).contains(&seats), "{seats} claims in the line");
    assert_eq!(served.load(Ordering::SeqCst), 0);
    hold.release().await.unwrap();
    let all = tokio::time::timeout(SOON * 12, async {
        while let Some(done) = crowd.join_next().await {
            done.unwrap();
        }
    });
    all.await.expect("not all were served");
    assert_eq!(served.load(Ordering::SeqCst), CROWD);
    assert!(other.is_valid(), "the crowd took an unrelated lock away");
}

/// A claim that is dropped while it waits, even before it is in the server's line, leaves nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_that_goes_leaves_nothing() {
    let server = need!(server());
    // No lease ends within the test.
    let client = connect(&format!("{}?ttl=120s", server.url())).await;
    let lock = client.mutex("crowd");
    let hold = lock.lock().await.unwrap();
    let mut crowd = JoinSet::new();
    for _ in 0..100 {
        let lock = lock.clone();
        crowd.spawn(async move { lock.lock().await.map(drop) });
    }
    until("a line", async || sql(&server, SEATS)[0] != "1").await;
    crowd.shutdown().await;
    until("the end of it", async || sql(&server, SEATS) == ["1"]).await;
    hold.release().await.unwrap();
    let next = soon(lock.lock()).await;
    assert!(next.unwrap().is_valid());
}

/// However many claims a line has, renewing all of them writes its row once.
#[tokio::test]
async fn a_renewal_writes_each_row_once() {
    let server = need!(server());
    let client = connect(server.url()).await;
    drop(client.mutex("x").lock().await.unwrap());
    let mut psql = need!(Psql::open(&server));
    psql.ask(
        "CREATE FUNCTION id(i int) RETURNS uuid LANGUAGE sql AS
           $$ SELECT ('00000000-0000-0000-0000-' || lpad(i::text, 12, '0'))::uuid $$;
         SELECT count(palisade.enter('palisade', 'crowd', id(i), 0, 0, 30000000, true, 'm', '{}', NULL))
           FROM generate_series(1, 400) i;",
    );
    let rows = psql.ask(
        "BEGIN;
         SELECT pg_stat_get_xact_tuples_updated('palisade.line'::regclass) AS before \\gset
         SELECT count(*) FROM unnest(palisade.renew('palisade',
           ARRAY(SELECT 'crowd'::text FROM generate_series(1, 400)),
           ARRAY(SELECT id(i) FROM generate_series(1, 400) i),
           ARRAY(SELECT 0::bigint FROM generate_series(1, 400)), 0)) a WHERE a = 30000000;
         SELECT pg_stat_get_xact_tuples_updated('palisade.line'::regclass) - :before;
         COMMIT;",
    );
    assert_eq!(rows, ["400", "1"]);
}

/// Only the lease whose row is locked has an unknown renewal, and ends; the others survive.
#[tokio::test]
async fn a_row_that_another_locks_costs_its_own_lease_only() {
    let server = need!(server());
    let mut psql = need!(Psql::open(&server));
    let client = connect(&format!("{}?ttl=4s", server.url())).await;
    let mut holds = Vec::new();
    for name in ["a", "b", "c"] {
        holds.push(client.mutex(name).lock().await.unwrap());
    }
    psql.ask("BEGIN; SELECT 1 FROM palisade.line WHERE name = 'b' FOR UPDATE;");
    let loss = soon(holds[1].lost()).await;
    assert_eq!(loss.reason, LossReason::Expired);
    throughout(Duration::from_secs(8), || {
        assert!(holds[0].is_valid() && holds[2].is_valid(), "lost beside it");
    })
    .await;
    psql.ask("COMMIT;");
    let lock = client.mutex("b");
    let again = soon(lock.lock()).await;
    assert!(again.unwrap().token() > holds[1].token());
}

/// Rows that one transaction keeps locked are asked for together when it has ended, not each with a
/// request of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_rows_are_renewed_together() {
    const LOCKS: usize = 100;
    let server = need!(server());
    let mut psql = need!(Psql::open(&server));
    let target = server.nodes()[0].address().parse().unwrap();
    let proxy = Proxy::start(target, Protocol::Postgres).unwrap();
    let url = format!("postgres://palisade@{}/postgres?ttl=6s", proxy.addr());
    let client = connect(url).await;
    let locks: Vec<_> = (0..LOCKS).map(|at| client.mutex(format!("{at}"))).collect();
    let holds = locks.iter().map(palisade::Mutex::lock);
    let holds = futures_util::future::try_join_all(holds).await.unwrap();
    psql.ask("BEGIN; SELECT count(*) FROM (SELECT FROM palisade.line FOR UPDATE) l;");
    proxy.forget();
    until("a renewal waits", async || {
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        sql(&server, waits) == ["1"]
    })
    .await;
    psql.ask("COMMIT;");
    let end = holds[LOCKS - 1].deadline();
    until("the end of the first lease", async || end.has_passed()).await;
    assert!(holds.iter().all(palisade::Hold::is_valid), "lost");
    let asked = proxy.passed(Direction::ToEngine, "Execute");
    assert!(asked < LOCKS / 3, "{asked} requests");
}

/// A renewal that hangs in the server keeps the rows locked that it has reached. The client that
/// gives up on it cancels it: otherwise the next one finds them locked, as all further ones.
#[tokio::test]
async fn a_renewal_that_was_given_up_lets_go_of_its_rows() {
    let server = need!(server());
    let mut psql = need!(Psql::open(&server));
    let client = connect(&format!("{}?ttl=6s", server.url())).await;
    let mut holds = Vec::new();
    for name in ["a", "b", "c", "last"] {
        holds.push(client.mutex(name).lock().await.unwrap());
    }
    let first_end = holds[0].deadline();
    psql.ask(
        "CREATE SEQUENCE hangs;
         CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           IF nextval('hangs') = 1 THEN PERFORM pg_sleep(600); END IF; RETURN NEW; END $$;
         CREATE TRIGGER hang BEFORE UPDATE ON palisade.line FOR EACH ROW
           WHEN (NEW.name = 'last') EXECUTE FUNCTION hang();",
    );
    let all = || holds.iter().all(palisade::Hold::is_valid);
    until("two leases", async || {
        assert!(all(), "lost by a renewal of our own");
        (first_end + Duration::from_secs(6)).has_passed()
    })
    .await;
    let renewed = sql(&server, "SELECT last_value > 2 FROM hangs");
    assert_eq!(renewed, ["t"], "nothing hung");
    let hangs = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
    assert_eq!(sql(&server, hangs), ["0"], "it still hangs");
}
