//! A hold as a condition of the user's own transaction, and locks inside a transaction.

use std::time::Duration;

use palisade::engines::postgres::{
    self as pg, PostgresHold, is_guard_failure, lock_in_transaction, try_lock_in_transaction,
};
use palisade::{Client, ErrorKind, Eviction, Hold, Which};
use palisade_testkit::lab::trial::{cycle, soon, until};

use super::{postgres, server};

/// A table with one row.
async fn table(url: &str) -> tokio_postgres::Client {
    let client = postgres(url).await;
    let sql = "CREATE TABLE stock (id int PRIMARY KEY, n int); INSERT INTO stock VALUES (1, 0)";
    client.batch_execute(sql).await.unwrap();
    client
}

/// Writes under a guard; `between` runs after the write and before the commit. Returns whether it
/// was committed.
async fn guarded(
    client: &mut tokio_postgres::Client,
    hold: &Hold,
    between: impl AsyncFnOnce(),
) -> bool {
    let transaction = client.transaction().await.unwrap();
    hold.postgres_guard(&transaction).await.unwrap();
    let write = transaction.execute("UPDATE stock SET n = n + 1", &[]);
    write.await.unwrap();
    between().await;
    match transaction.commit().await {
        Ok(()) => true,
        Err(error) if is_guard_failure(&error) => false,
        Err(error) => panic!("{error:?}"),
    }
}

async fn count(client: &tokio_postgres::Client) -> i32 {
    let row = client.query_one("SELECT n FROM stock", &[]).await.unwrap();
    row.get(0)
}

async fn take_away(other: &Client) {
    let evicted = other.evict("stock", Which::Holders, Eviction::Remove).await;
    assert!(evicted.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_commits_only_while_its_lock_is_held() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut db = table(server.url()).await;
    let client = palisade::connect(server.url()).await.unwrap();
    let other = palisade::connect(server.url()).await.unwrap();
    let mutex = client.mutex("stock").ttl(Duration::from_secs(2));

    let hold = mutex.lock().await.unwrap();
    assert!(guarded(&mut db, &hold, async || {}).await);
    assert!(guarded(&mut db, &hold, async || {}).await);
    assert_eq!(count(&db).await, 2);

    // The lock is taken away, and then taken away and granted to another.
    assert!(!guarded(&mut db, &hold, async || take_away(&other).await).await);
    drop(hold);
    let hold = mutex.lock().await.unwrap();
    let stolen = async || {
        take_away(&other).await;
        cycle(&other.mutex("stock")).await;
    };
    assert!(!guarded(&mut db, &hold, stolen).await);
    drop(hold);

    // The hold is marked for eviction.
    let hold = mutex.lock().await.unwrap();
    let mark = async || {
        let marking = other.clone();
        let marking =
            tokio::spawn(
                async move { marking.evict("stock", Which::Holders, Eviction::Mark).await },
            );
        soon("the hold is told", hold.lost()).await;
        marking.abort();
    };
    assert!(!guarded(&mut db, &hold, mark).await);
    drop(hold);
    assert_eq!(count(&db).await, 2);

    let rows = db.query("SELECT * FROM palisade.guard", &[]).await.unwrap();
    assert!(rows.is_empty(), "guards are left behind");
}

/// The lease itself is checked by the server's clock.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_ran_out_guards_nothing() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut db = table(server.url()).await;
    let client = palisade::connect(server.url()).await.unwrap();
    let ttl = Duration::from_millis(500);
    let hold = client
        .mutex("stock")
        .ttl(ttl)
        .unrenewed()
        .lock()
        .await
        .unwrap();
    let wait = async || tokio::time::sleep(ttl + Duration::from_millis(50)).await;
    assert!(!guarded(&mut db, &hold, wait).await);
    assert_eq!(count(&db).await, 0);
}

/// Nothing is locked before the commit: a client that is paused in its transaction blocks neither
/// renewals nor the next holder.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_transaction_is_in_nobodys_way() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut db = table(server.url()).await;
    let client = palisade::connect(server.url()).await.unwrap();
    let other = palisade::connect(server.url()).await.unwrap();
    let hold = client
        .mutex("stock")
        .ttl(Duration::from_secs(1))
        .lock()
        .await
        .unwrap();
    let paused = async || {
        // Renewed repeatedly meanwhile.
        let first = hold.deadline();
        until("it is renewed", async || hold.deadline() > first).await;
        take_away(&other).await;
        let next = soon("another is granted", other.mutex("stock").lock()).await;
        next.unwrap().release().await.unwrap();
    };
    assert!(!guarded(&mut db, &hold, paused).await);
}

/// Several guards of one transaction, and of concurrent transactions in opposite order: no
/// deadlock.
#[tokio::test(flavor = "multi_thread")]
async fn many_guards_in_any_order() {
    let Some(server) = server("postgres") else {
        return;
    };
    let db = table(server.url()).await;
    let client = palisade::connect(server.url()).await.unwrap();
    let names = ["a", "b", "c", "d"];
    let mut holds = Vec::new();
    for name in names {
        holds.push(client.mutex(name).lock().await.unwrap());
    }
    let holds = std::sync::Arc::new(holds);
    let workers = (0..4).map(|worker| {
        let (holds, url) = (holds.clone(), server.url().to_owned());
        tokio::spawn(async move {
            let mut db = postgres(&url).await;
            for round in 0..10 {
                let transaction = db.transaction().await.unwrap();
                for at in 0..4 {
                    let hold = &holds[(at + worker + round) % 4];
                    hold.postgres_guard(&transaction).await.unwrap();
                    hold.postgres_guard(&transaction).await.unwrap();
                }
                transaction.commit().await.unwrap();
            }
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        soon("no deadlock", worker).await.unwrap();
    }
    drop(db);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_exclusive_holds_of_the_table_can_guard() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut db = table(server.url()).await;
    let client = palisade::connect(server.url()).await.unwrap();
    let transaction = db.transaction().await.unwrap();
    let reader = client.rwlock("shared").read().await.unwrap();
    let permit = client.semaphore("few", 3).acquire().await.unwrap();
    for hold in [&*reader, &permit] {
        let refused = hold.postgres_guard(&transaction).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    }
    let memory = palisade::connect("memory:").await.unwrap();
    let advisory = server.url().replacen("postgres:", "postgres+advisory:", 1);
    let advisory = palisade::connect(&advisory).await.unwrap();
    for client in [memory, advisory] {
        let hold = client.mutex("x").lock().await.unwrap();
        let refused = hold.postgres_guard(&transaction).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
    }
}

/// A guard works for any era, namespace and schema.
#[tokio::test(flavor = "multi_thread")]
async fn a_guard_finds_its_line_whatever_the_url_says() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut db = table(server.url()).await;
    let url = format!("{}?namespace=a/b'c&schema=locks_2&era=3", server.url());
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("it's/x").lock().await.unwrap();
    assert!(guarded(&mut db, &hold, async || {}).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlx_can_be_guarded_too() {
    use sqlx::Connection as _;
    let Some(server) = server("postgres") else {
        return;
    };
    let db = table(server.url()).await;
    let client = palisade::connect(server.url()).await.unwrap();
    let mut connection = sqlx::PgConnection::connect(server.url()).await.unwrap();
    let hold = client.mutex("stock").lock().await.unwrap();
    for held in [true, false] {
        let mut transaction = connection.begin().await.unwrap();
        pg::sqlx::guard(&mut transaction, &hold).await.unwrap();
        let write = sqlx::query("UPDATE stock SET n = n + 1");
        write.execute(&mut *transaction).await.unwrap();
        if !held {
            take_away(&client).await;
        }
        match transaction.commit().await {
            Ok(()) => assert!(held),
            Err(error) => assert!(!held && pg::sqlx::is_guard_failure(&error), "{error}"),
        }
    }
    assert_eq!(count(&db).await, 1);
}

/// A lock inside a transaction excludes, and is excluded by, holds of `postgres+advisory:`.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_inside_a_transaction_ends_with_it() {
    let Some(server) = server("postgres") else {
        return;
    };
    let (mut one, mut two) = (postgres(server.url()).await, postgres(server.url()).await);
    let url = server.url().replacen("postgres:", "postgres+advisory:", 1);
    let client = palisade::connect(&url).await.unwrap();
    let transaction = one.transaction().await.unwrap();
    lock_in_transaction(&transaction, "palisade", "stock")
        .await
        .unwrap();
    assert!(client.mutex("stock").try_lock().await.unwrap().is_none());
    let other = two.transaction().await.unwrap();
    assert!(
        !try_lock_in_transaction(&other, "palisade", "stock")
            .await
            .unwrap()
    );
    assert!(
        try_lock_in_transaction(&other, "palisade", "another")
            .await
            .unwrap()
    );
    transaction.commit().await.unwrap();
    let hold = soon("it is free", client.mutex("stock").lock())
        .await
        .unwrap();
    assert!(
        !try_lock_in_transaction(&other, "palisade", "stock")
            .await
            .unwrap()
    );
    hold.release().await.unwrap();
    let refused = try_lock_in_transaction(&other, "palisade", "")
        .await
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidName);
}
