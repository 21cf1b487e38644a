//! Rows of the user's own tables: the triggers refuse stale and missing tokens, in every kind of
//! statement.

use palisade::Token;
use palisade::engines::postgres::{self as pg};
use palisade::fence::sql::Table;
use palisade::fence::sqlite;
use palisade::fence::{Verdict, WriteToken};

use super::{postgres, server};

/// The result of a statement.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Did {
    Write,
    Stale,
    Missing,
    Other(String),
}

/// The same statements for both databases: each with the token that it presents itself (in the
/// column) or before it (for DELETE and TRUNCATE).
const STATEMENTS: &[(&str, Option<u64>, Did)] = &[
    (
        "INSERT INTO stock (id, n, fence) VALUES (1, 10, 5)",
        None,
        Did::Write,
    ),
    (
        "INSERT INTO stock (id, n) VALUES (2, 10)",
        None,
        Did::Missing,
    ),
    (
        "INSERT INTO stock (id, n, fence) VALUES (2, 10, 0)",
        None,
        Did::Missing,
    ),
    // A plain update by code that omits the token.
    ("UPDATE stock SET n = 9 WHERE id = 1", None, Did::Missing),
    (
        "UPDATE stock SET n = 9, fence = NULL WHERE id = 1",
        None,
        Did::Missing,
    ),
    (
        "UPDATE stock SET n = 9, fence_token = 99 WHERE id = 1",
        None,
        Did::Missing,
    ),
    (
        "UPDATE stock SET fence_token = 0, fence = 4 WHERE id = 1",
        None,
        Did::Stale,
    ),
    (
        "UPDATE stock SET n = 9, fence = 5 WHERE id = 1",
        None,
        Did::Write,
    ),
    (
        "UPDATE stock SET n = 8, fence = 7 WHERE id = 1",
        None,
        Did::Write,
    ),
    (
        "UPDATE stock SET n = 7, fence = 6 WHERE id = 1",
        None,
        Did::Stale,
    ),
    // An upsert of an existing row.
    (
        "INSERT INTO stock (id, n, fence) VALUES (1, 6, 6) \
         ON CONFLICT (id) DO UPDATE SET n = excluded.n, fence = 6",
        None,
        Did::Stale,
    ),
    (
        "INSERT INTO stock (id, n) VALUES (1, 6) \
         ON CONFLICT (id) DO UPDATE SET n = excluded.n",
        None,
        Did::Missing,
    ),
    (
        "INSERT INTO stock (id, n, fence) VALUES (1, 6, 8) \
         ON CONFLICT (id) DO UPDATE SET n = excluded.n, fence = 8",
        None,
        Did::Write,
    ),
    ("DELETE FROM stock WHERE id = 1", None, Did::Missing),
    ("DELETE FROM stock WHERE id = 1", Some(7), Did::Stale),
    ("DELETE FROM stock WHERE id = 1", Some(9), Did::Write),
    // The token outlives the row.
    (
        "INSERT INTO stock (id, n, fence) VALUES (1, 1, 8)",
        None,
        Did::Stale,
    ),
    (
        "INSERT INTO stock (id, n, fence) VALUES (1, 1, 9)",
        None,
        Did::Write,
    ),
    ("DELETE FROM stock", None, Did::Missing),
];

pub(super) async fn try_postgres(
    client: &mut tokio_postgres::Client,
    sql: &str,
    token: Option<u64>,
) -> Did {
    let transaction = client.transaction().await.unwrap();
    if let Some(token) = token {
        pg::present(&transaction, token.into()).await.unwrap();
    }
    let done = transaction.batch_execute(sql).await;
    match done {
        Ok(()) => {
            transaction.commit().await.unwrap();
            Did::Write
        }
        Err(error) if pg::refused(&error).is_some() => Did::Stale,
        Err(error) => match error.code().map(|code| code.code()) {
            Some("PFT02") => Did::Missing,
            _ => Did::Other(format!("{error:?}")),
        },
    }
}

async fn fenced_postgres(client: &tokio_postgres::Client, table: &Table) {
    client
        .batch_execute("CREATE TABLE stock (id int PRIMARY KEY, n int)")
        .await
        .unwrap();
    // It can be run again.
    for _ in 0..2 {
        client.batch_execute(&table.postgres()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_refuses_every_stale_or_forgetful_statement() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut client = postgres(server.url()).await;
    fenced_postgres(&client, &Table::new("stock").unwrap()).await;
    for (sql, token, did) in STATEMENTS {
        assert_eq!(try_postgres(&mut client, sql, *token).await, *did, "{sql}");
    }
    for (sql, token, did) in [
        ("UPDATE stock SET n = 7, fence = -1", None, Did::Missing),
        // A token that is presented for a transaction counts for every statement.
        ("UPDATE stock SET n = 2", Some(8), Did::Stale),
        ("UPDATE stock SET n = 2", Some(10), Did::Write),
        (
            "INSERT INTO stock (id, n) VALUES (5, 1)",
            Some(10),
            Did::Write,
        ),
        (
            "INSERT INTO stock (id, n) VALUES (5, 3) ON CONFLICT (id) DO UPDATE SET n = 4",
            Some(11),
            Did::Write,
        ),
        ("TRUNCATE stock", None, Did::Missing),
        ("TRUNCATE stock", Some(10), Did::Stale),
        ("TRUNCATE stock", Some(12), Did::Write),
        (
            "INSERT INTO stock (id, n) VALUES (5, 1)",
            Some(11),
            Did::Stale,
        ),
        (
            "INSERT INTO stock (id, n) VALUES (5, 1)",
            Some(12),
            Did::Write,
        ),
        // The token is removed explicitly.
        ("DELETE FROM stock WHERE id = 5", Some(20), Did::Write),
        ("DELETE FROM stock_fence WHERE id = 5", None, Did::Write),
        (
            "INSERT INTO stock (id, n) VALUES (5, 1)",
            Some(3),
            Did::Write,
        ),
    ] {
        assert_eq!(try_postgres(&mut client, sql, token).await, did, "{sql}");
    }
    let moved = try_postgres(&mut client, "UPDATE stock SET id = 6", Some(30)).await;
    assert!(
        matches!(&moved, Did::Other(why) if why.contains("PFT03")),
        "{moved:?}"
    );
    // After the transaction no token is presented any more.
    let row = client.query_one("SELECT fence, fence_token FROM stock", &[]);
    let row = row.await.unwrap();
    assert_eq!(
        (row.get::<_, Option<i64>>(0), row.get::<_, i64>(1)),
        (None, 3)
    );
    assert_eq!(
        try_postgres(&mut client, "UPDATE stock SET n = 0", None).await,
        Did::Missing
    );
    // The refusal names the highest token.
    let transaction = client.transaction().await.unwrap();
    pg::present(&transaction, 2.into()).await.unwrap();
    let error = transaction
        .execute("UPDATE stock SET n = 0", &[])
        .await
        .unwrap_err();
    let highest = Token(3);
    assert_eq!(pg::refused(&error), Some(Verdict::Stale { highest }));
}

#[tokio::test(flavor = "multi_thread")]
async fn strict_tables_and_wide_keys() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut client = postgres(server.url()).await;
    fenced_postgres(&client, &Table::new("stock").unwrap().strict()).await;
    for (sql, did) in [
        (
            "INSERT INTO stock (id, n, fence) VALUES (1, 1, 5)",
            Did::Write,
        ),
        ("UPDATE stock SET n = 2, fence = 5", Did::Stale),
        ("UPDATE stock SET n = 2, fence = 6", Did::Write),
    ] {
        assert_eq!(try_postgres(&mut client, sql, None).await, did, "{sql}");
    }
    let table = Table::new("public.wide").unwrap();
    let table = table.keyed_by(&["tenant", "sku"]).unwrap();
    let sql = "CREATE TABLE wide (tenant text, sku text, n int, PRIMARY KEY (tenant, sku))";
    client.batch_execute(sql).await.unwrap();
    client.batch_execute(&table.postgres()).await.unwrap();
    for (sql, token, did) in [
        ("INSERT INTO wide VALUES ('a', 'b,c', 1)", 5, Did::Write),
        ("DELETE FROM wide", 6, Did::Write),
        ("INSERT INTO wide VALUES ('a', 'b,c', 1)", 5, Did::Stale),
        ("INSERT INTO wide VALUES ('a,b', 'c', 1)", 5, Did::Write),
    ] {
        assert_eq!(
            try_postgres(&mut client, sql, Some(token)).await,
            did,
            "{sql}"
        );
    }
}

/// A stale insert can't bypass a delete that has not committed yet.
#[tokio::test(flavor = "multi_thread")]
async fn an_insert_waits_for_the_delete_of_its_key() {
    let Some(server) = server("postgres") else {
        return;
    };
    let (mut one, mut two) = (postgres(server.url()).await, postgres(server.url()).await);
    fenced_postgres(&one, &Table::new("stock").unwrap()).await;
    for round in 0..5 {
        let sql = format!("INSERT INTO stock (id, n, fence) VALUES ({round}, 1, 5)");
        one.batch_execute(&sql).await.unwrap();
        let delete = one.transaction().await.unwrap();
        pg::present(&delete, 7.into()).await.unwrap();
        let sql = format!("DELETE FROM stock WHERE id = {round}");
        delete.execute(&sql, &[]).await.unwrap();
        let stale = async {
            let sql = format!("INSERT INTO stock (id, n, fence) VALUES ({round}, 1, 6)");
            try_postgres(&mut two, &sql, None).await
        };
        let commit = async {
            // The other statement waits by then, or has not begun: the result must be the same.
            tokio::time::sleep(std::time::Duration::from_millis(30)).await;
            delete.commit().await.unwrap();
        };
        let (did, ()) = tokio::join!(stale, commit);
        assert_eq!(did, Did::Stale);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlx_presents_tokens_too() {
    use palisade::engines::postgres::sqlx as px;
    use sqlx::Connection as _;
    let Some(server) = server("postgres") else {
        return;
    };
    let client = postgres(server.url()).await;
    fenced_postgres(&client, &Table::new("stock").unwrap()).await;
    let mut connection = sqlx::PgConnection::connect(server.url()).await.unwrap();
    for (token, sql, fine) in [
        (7, "INSERT INTO stock (id, n) VALUES (1, 1)", true),
        (6, "DELETE FROM stock", false),
        (8, "DELETE FROM stock", true),
    ] {
        let mut transaction = connection.begin().await.unwrap();
        px::present(&mut transaction, WriteToken::from(token))
            .await
            .unwrap();
        match sqlx::query(sql).execute(&mut *transaction).await {
            Ok(_) => transaction.commit().await.unwrap(),
            Err(error) => {
                assert!(!fine, "{sql}: {error}");
                let highest = Token(7);
                assert_eq!(px::refused(&error), Some(Verdict::Stale { highest }));
            }
        }
    }
}

/// A DELETE presents its token as an update to a token below zero.
pub(super) fn try_sqlite(
    connection: &mut rusqlite::Connection,
    sql: &str,
    token: Option<u64>,
) -> Did {
    let transaction = connection.transaction().unwrap();
    let sql = match (token, sql.strip_prefix("DELETE FROM stock")) {
        (Some(token), Some(rest)) => &format!("UPDATE stock SET fence = -{token}{rest}"),
        _ => sql,
    };
    match transaction.execute_batch(sql) {
        Ok(()) => {
            transaction.commit().unwrap();
            Did::Write
        }
        Err(error) if sqlite::is_stale(&error) => Did::Stale,
        Err(error) => match error.to_string() {
            text if text.contains("missing") || text.contains("not a fencing") => Did::Missing,
            text => Did::Other(text),
        },
    }
}

#[test]
fn sqlite_refuses_every_stale_or_forgetful_statement() {
    let check = |recursive: bool| {
        let mut connection = rusqlite::Connection::open_in_memory().unwrap();
        let table = Table::new("stock").unwrap().sqlite().unwrap();
        let create = "CREATE TABLE stock (id INTEGER PRIMARY KEY, n INTEGER);";
        connection
            .execute_batch(&format!("{create}{table}"))
            .unwrap();
        // It can be fenced again.
        sqlite::fence(&mut connection, &Table::new("stock").unwrap()).unwrap();
        connection
            .pragma_update(None, "recursive_triggers", recursive)
            .unwrap();
        for (sql, token, did) in STATEMENTS {
            assert_eq!(try_sqlite(&mut connection, sql, *token), *did, "{sql}");
        }
        for (sql, did) in [
            // In SQLite text is greater than every number.
            ("UPDATE stock SET fence = 'zz' WHERE id = 1", Did::Missing),
            ("UPDATE stock SET fence = 9.5 WHERE id = 1", Did::Missing),
            ("UPDATE stock SET fence = 0 WHERE id = 1", Did::Missing),
            ("UPDATE stock SET fence = -8 WHERE id = 1", Did::Stale),
            // What removed nothing presents nothing for later.
            (
                "UPDATE stock SET fence = -99 WHERE id = 1 AND n = 77",
                Did::Write,
            ),
            ("DELETE FROM stock WHERE id = 1", Did::Missing),
            (
                "INSERT OR REPLACE INTO stock (id, n, fence) VALUES (1, 0, 8)",
                Did::Stale,
            ),
            (
                "INSERT OR IGNORE INTO stock (id, n, fence) VALUES (3, 0, 0)",
                Did::Missing,
            ),
            (
                "UPDATE OR IGNORE stock SET n = 0 WHERE id = 1",
                Did::Missing,
            ),
            // A key that the database assigns.
            ("INSERT INTO stock (n, fence) VALUES (5, 3)", Did::Write),
            ("UPDATE stock SET n = 6, fence = 2 WHERE id = 2", Did::Stale),
        ] {
            assert_eq!(try_sqlite(&mut connection, sql, None), did, "{sql}");
        }
        let moved = try_sqlite(&mut connection, "UPDATE stock SET id = 9, fence = 99", None);
        assert!(matches!(moved, Did::Other(_)), "{moved:?}");
        let at_rest: (Option<i64>, i64) = connection
            .query_row(
                "SELECT max(fence), max(fence_token) FROM stock",
                [],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .unwrap();
        assert_eq!(at_rest, (None, 9));
    };
    check(false);
    check(true);
}
