//! Rows that are taken before they are read, whether they are there or not, with writes of older
//! holders in flight; and tokens as parameters of SQL. Each has a control that only reads, and
//! loses.

use palisade::engines::postgres::{self as pg, sqlx as px};
use palisade::fence::sql::Table;
use palisade::fence::{Verdict, WriteToken, sqlite};
use palisade::{ErrorKind, Token};
use palisade_testkit::lab::trial::{soon, until};

use super::{postgres, server};

fn table(strict: bool) -> Table {
    let table = Table::new("stock").unwrap();
    if strict { table.strict() } else { table }
}

async fn made(url: &str, strict: bool) -> tokio_postgres::Client {
    let client = postgres(url).await;
    let sql = "DROP TABLE IF EXISTS stock, stock_fence; \
               CREATE TABLE stock (id int PRIMARY KEY, log text)";
    client.batch_execute(sql).await.unwrap();
    client
        .batch_execute(&table(strict).postgres())
        .await
        .unwrap();
    client
}

/// Takes a row, which may be absent, and reads it.
async fn take(client: &tokio_postgres::Client, token: u64) -> Result<Option<String>, Verdict> {
    let sql = "INSERT INTO stock_fence (id, fence) VALUES (1, $1)";
    match client.execute(sql, &[&WriteToken::from(token)]).await {
        Ok(_) => Ok(read(client).await),
        Err(error) => Err(pg::refused(&error).unwrap()),
    }
}

async fn read(client: &tokio_postgres::Client) -> Option<String> {
    let row = client.query_opt("SELECT log FROM stock WHERE id = 1", &[]);
    row.await.unwrap().map(|row| row.get(0))
}

/// Writes the whole log, inserting the row if it is absent.
async fn write(client: &tokio_postgres::Client, token: u64, log: &str) -> Verdict {
    let sql = "INSERT INTO stock (id, log, fence) VALUES (1, $1, $2) \
               ON CONFLICT (id) DO UPDATE SET log = excluded.log, fence = $2";
    match client.execute(sql, &[&log, &WriteToken::from(token)]).await {
        Ok(_) => Verdict::Accepted,
        Err(error) => pg::refused(&error).unwrap(),
    }
}

const fn stale(highest: u64) -> Verdict {
    let highest = Token(highest);
    Verdict::Stale { highest }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_of_postgres_is_taken_whether_it_is_there_or_not() {
    let Some(server) = server("postgres") else {
        return;
    };
    for strict in [false, true] {
        for is_there in [false, true] {
            for takes in [true, false] {
                let client = made(server.url(), strict).await;
                if is_there {
                    assert_eq!(write(&client, 5, "old").await, Verdict::Accepted);
                }
                let seen = if takes {
                    take(&client, 9).await.unwrap()
                } else {
                    read(&client).await
                };
                assert_eq!(seen.as_deref(), is_there.then_some("old"));
                // The older holder, which read the same, goes on where it was.
                let late = write(&client, 8, "first").await;
                assert_eq!(write(&client, 9, "second").await, Verdict::Accepted);
                // What was accepted is overwritten unless it was taken.
                let highest = if strict { 8 } else { 9 };
                let expected = if takes {
                    stale(highest)
                } else {
                    Verdict::Accepted
                };
                assert_eq!(late, expected, "strict {strict}, there {is_there}");
                let log = read(&client).await.unwrap();
                assert_eq!(log, "second");
                assert_eq!(take(&client, 8).await, Err(stale(9)));
                if strict {
                    assert_eq!(take(&client, 9).await, Err(stale(9)), "it is used up");
                } else {
                    assert_eq!(take(&client, 9).await, Ok(Some(log)));
                }
            }
        }
    }
}

/// What another holder has begun and not committed is waited for: it is in what is taken, or refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_take_in_postgres_waits_for_a_write_in_flight() {
    let Some(server) = server("postgres") else {
        return;
    };
    let insert = "INSERT INTO stock (id, log, fence) VALUES (1, 'first', 7)";
    let update = "UPDATE stock SET log = 'first', fence = 7 WHERE id = 1";
    for (is_there, sql) in [(false, insert), (true, update)] {
        for commits in [true, false] {
            let client = made(server.url(), false).await;
            if is_there {
                assert_eq!(write(&client, 5, "old").await, Verdict::Accepted);
            }
            let mut zombie = postgres(server.url()).await;
            let flight = zombie.transaction().await.unwrap();
            flight.execute(sql, &[]).await.unwrap();
            let taking = postgres(server.url()).await;
            let taken = tokio::spawn(async move { take(&taking, 9).await });
            until("the take waits", async || {
                let sql = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
                !client.query(sql, &[]).await.unwrap().is_empty()
            })
            .await;
            if commits {
                flight.commit().await.unwrap();
            } else {
                flight.rollback().await.unwrap();
            }
            let seen = soon("the take", taken).await.unwrap().unwrap();
            let expected = match (commits, is_there) {
                (true, _) => Some("first"),
                (false, true) => Some("old"),
                (false, false) => None,
            };
            assert_eq!(seen.as_deref(), expected, "there: {is_there}");
            assert_eq!(write(&client, 8, "late").await, stale(9));
        }
    }
    // The shorter form, of a row that is there, waits as well.
    let client = made(server.url(), false).await;
    assert_eq!(write(&client, 5, "old").await, Verdict::Accepted);
    let mut zombie = postgres(server.url()).await;
    let flight = zombie.transaction().await.unwrap();
    flight.execute(update, &[]).await.unwrap();
    let taking = postgres(server.url()).await;
    let taken = tokio::spawn(async move {
        let sql = "UPDATE stock SET fence = 9 WHERE id = 1 RETURNING log";
        taking
            .query_one(sql, &[])
            .await
            .unwrap()
            .get::<_, String>(0)
    });
    until("the take waits", async || {
        let sql = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        !client.query(sql, &[]).await.unwrap().is_empty()
    })
    .await;
    flight.commit().await.unwrap();
    assert_eq!(soon("the take", taken).await.unwrap(), "first");
}

#[test]
fn a_row_of_sqlite_is_taken_whether_it_is_there_or_not() {
    for strict in [false, true] {
        for is_there in [false, true] {
            for takes in [true, false] {
                let mut db = rusqlite::Connection::open_in_memory().unwrap();
                let create = "CREATE TABLE stock (id INTEGER PRIMARY KEY, log TEXT)";
                db.execute_batch(create).unwrap();
                sqlite::fence(&mut db, &table(strict)).unwrap();
                let write = |token: u64, log: &str| {
                    let sql = "INSERT INTO stock (id, log, fence) VALUES (1, ?1, ?2) \
                               ON CONFLICT (id) DO UPDATE SET log = excluded.log, fence = ?2";
                    match db.execute(sql, (log, WriteToken::from(token))) {
                        Ok(_) => true,
                        Err(error) if sqlite::is_stale(&error) => false,
                        Err(error) => panic!("{error}"),
                    }
                };
                let take = |token: u64| {
                    let sql = "INSERT INTO stock_fence_take (id, fence) VALUES (1, ?1)";
                    match db.execute(sql, [WriteToken::from(token)]) {
                        Ok(_) => true,
                        Err(error) if sqlite::is_stale(&error) => false,
                        Err(error) => panic!("{error}"),
                    }
                };
                if is_there {
                    assert!(write(5, "old"));
                }
                assert!(!takes || take(9));
                let late = write(8, "first");
                assert!(write(9, "second"));
                assert_eq!(late, !takes, "strict {strict}, there {is_there}");
                assert!(!take(8));
                assert_eq!(take(9), !strict, "a strict token is used up");
            }
        }
    }
}

/// A token is a parameter, and what is no token is an error of the statement.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_parameters_of_statements() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut client = made(server.url(), false).await;
    let (good, bad) = (WriteToken::from(7), WriteToken::from(u64::MAX));
    assert_eq!(good.number(), 7);
    let insert = "INSERT INTO stock (id, fence) VALUES (1, $1)";
    client.execute(insert, &[&good]).await.unwrap();
    client.execute(insert, &[&bad]).await.unwrap_err();
    let transaction = client.transaction().await.unwrap();
    let present = palisade::fence::sql::PRESENT;
    transaction.execute(present, &[&good]).await.unwrap();
    transaction.execute("DELETE FROM stock", &[]).await.unwrap();
    transaction.commit().await.unwrap();

    use sqlx::Connection as _;
    let mut connection = sqlx::PgConnection::connect(server.url()).await.unwrap();
    let run = sqlx::query(insert).bind(good).execute(&mut connection);
    run.await.unwrap();
    let run = sqlx::query(insert).bind(bad).execute(&mut connection);
    run.await.unwrap_err();
    let late = sqlx::query("UPDATE stock SET fence = $1")
        .bind(WriteToken::from(6))
        .execute(&mut connection);
    assert_eq!(px::refused(&late.await.unwrap_err()), Some(stale(7)));

    let db = rusqlite::Connection::open_in_memory().unwrap();
    let number = db.query_row("SELECT ?1 + 0", [good], |row| row.get::<_, i64>(0));
    assert_eq!(number.unwrap(), 7);
    db.query_row("SELECT ?1", [bad], |_| Ok(())).unwrap_err();
    assert_eq!(bad.stored().unwrap_err().kind(), ErrorKind::InvalidArgument);
}
