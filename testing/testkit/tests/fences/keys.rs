//! Keys of fenced rows: what is one key in the table is one key in the marks, whatever its text; and
//! tables that can't be fenced are refused with a reason.

use palisade::engines::postgres as pg;
use palisade::fence::sql::{Table, UNFIT};
use palisade::fence::sqlite;

use super::rows::{Did, try_postgres, try_sqlite};
use super::{postgres, server};

/// The SQL of an earlier version for a table `stock` with the key `id`.
const EARLIER_POSTGRES: &str = include_str!("earlier_postgres.sql");
const EARLIER_SQLITE: &str = include_str!("earlier_sqlite.sql");

/// Types of PostgreSQL, and two statements before an INSERT with two texts of one key.
const POSTGRES: &[(&str, &str, &str, &str, &str)] = &[
    ("numeric", "", "1", "", "1.0"),
    (
        "timestamptz",
        "SET TimeZone = 'UTC'",
        "'2026-11-18 12:00Z'",
        "SET TimeZone = 'Asia/Tokyo'",
        "'2026-11-18 12:00Z'",
    ),
    (
        "bytea",
        "SET bytea_output = 'hex'",
        "'\\x4101'",
        "SET bytea_output = 'escape'",
        "'\\x4101'",
    ),
    ("text COLLATE any_case", "", "'A7'", "", "'a7'"),
    ("char(4)", "", "'a'", "", "'a   '"),
    ("interval", "", "'24 hours'", "", "'1 day'"),
    (
        "float8",
        "SET extra_float_digits = 1",
        "0.1::float8 + 0.2",
        "SET extra_float_digits = -3",
        "0.1::float8 + 0.2",
    ),
];

fn stock() -> Table {
    Table::new("stock").unwrap()
}

/// A table `stock` whose key has this type.
async fn keyed(client: &tokio_postgres::Client, kind: &str) {
    let sql = format!(
        "DROP TABLE IF EXISTS stock, stock_fence; CREATE TABLE stock (id {kind} PRIMARY KEY, n int)"
    );
    client.batch_execute(&sql).await.unwrap();
}

async fn fenced(client: &tokio_postgres::Client, table: &Table) {
    client.batch_execute(&table.postgres()).await.unwrap();
}

const ANY_CASE: &str = "CREATE COLLATION any_case \
    (provider = icu, locale = 'und-u-ks-level2', deterministic = false)";

#[tokio::test(flavor = "multi_thread")]
async fn what_is_one_key_in_postgres_has_one_mark() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut client = postgres(server.url()).await;
    client.batch_execute(ANY_CASE).await.unwrap();
    for (kind, before, one, set, other) in POSTGRES {
        keyed(&client, kind).await;
        fenced(&client, &stock()).await;
        let insert = |key: &str| format!("INSERT INTO stock (id, n) VALUES ({key}, 1)");
        client.batch_execute(before).await.unwrap();
        for (sql, token, did) in [
            (insert(one), 5, Did::Write),
            ("DELETE FROM stock".to_owned(), 100, Did::Write),
        ] {
            let done = try_postgres(&mut client, &sql, Some(token)).await;
            assert_eq!(done, did, "{kind}: {sql}");
        }
        client.batch_execute(set).await.unwrap();
        let late = try_postgres(&mut client, &insert(other), Some(50)).await;
        assert_eq!(late, Did::Stale, "{kind}");
        let next = try_postgres(&mut client, &insert(other), Some(100)).await;
        assert_eq!(next, Did::Write, "{kind}");
        // Applied again, nothing is forgotten.
        fenced(&client, &stock()).await;
        let gone = try_postgres(&mut client, "DELETE FROM stock", Some(101)).await;
        assert_eq!(gone, Did::Write, "{kind}");
        let late = try_postgres(&mut client, &insert(one), Some(100)).await;
        assert_eq!(late, Did::Stale, "{kind}");
    }
}

/// The marks of an earlier version are carried over, with who may use them.
#[tokio::test(flavor = "multi_thread")]
async fn marks_of_an_earlier_version_stay_in_force_in_postgres() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut client = postgres(server.url()).await;
    client.batch_execute(ANY_CASE).await.unwrap();
    client.batch_execute("CREATE ROLE app").await.unwrap();
    for (kind, before, one, set, other) in POSTGRES {
        keyed(&client, kind).await;
        client.batch_execute(EARLIER_POSTGRES).await.unwrap();
        let sql = "GRANT SELECT, INSERT, UPDATE ON stock, stock_fence TO app";
        client.batch_execute(sql).await.unwrap();
        // Two texts of one key have a mark each, with different tokens.
        for (set, key, token) in [(before, one, 5), (set, other, 60)] {
            client.batch_execute(set).await.unwrap();
            let insert = format!("INSERT INTO stock (id, n) VALUES ({key}, 1)");
            for (sql, token) in [(&*insert, token), ("DELETE FROM stock", token + 40)] {
                let done = try_postgres(&mut client, sql, Some(token)).await;
                assert_eq!(done, Did::Write, "{kind}: {sql}");
            }
        }
        if *kind == "float8" {
            // Its text may have been rounded, and is no key any more.
            let why = unfit(&client, &stock().postgres()).await;
            assert!(why.contains("rounded"), "{why}");
            continue;
        }
        for _ in 0..2 {
            fenced(&client, &stock()).await;
        }
        for key in [one, other] {
            let insert = format!("INSERT INTO stock (id, n) VALUES ({key}, 1)");
            let late = try_postgres(&mut client, &insert, Some(99)).await;
            assert_eq!(late, Did::Stale, "{kind}: {key}");
        }
        client.batch_execute("SET ROLE app").await.unwrap();
        let insert = format!("INSERT INTO stock (id, n) VALUES ({one}, 1)");
        let next = try_postgres(&mut client, &insert, Some(100)).await;
        assert_eq!(next, Did::Write, "{kind}");
        client.batch_execute("RESET ROLE").await.unwrap();
    }
    // Keys of several columns.
    let sql = "CREATE TABLE wide (resource text, at date, n numeric, PRIMARY KEY (resource, at, n)); \
        CREATE TABLE wide_fence (resource text PRIMARY KEY, token bigint NOT NULL); \
        INSERT INTO wide_fence VALUES ('[\"a,b\", \"2026-11-18\", 1.0]', 100), \
        ('[\"a,b\", \"2026-11-18\", 1]', 90)";
    client.batch_execute(sql).await.unwrap();
    let wide = Table::new("wide").unwrap();
    let wide = wide.keyed_by(&["resource", "at", "n"]).unwrap();
    for _ in 0..2 {
        fenced(&client, &wide).await;
    }
    let insert = "INSERT INTO wide VALUES ('a,b', '2026-11-18', 1.00)";
    for (token, did) in [(99, Did::Stale), (100, Did::Write)] {
        assert_eq!(try_postgres(&mut client, insert, Some(token)).await, did);
    }
}

async fn unfit(client: &tokio_postgres::Client, sql: &str) -> String {
    let refused = client.batch_execute(sql).await.unwrap_err();
    let refused = refused.as_db_error().unwrap();
    assert_eq!(refused.code().code(), UNFIT, "{refused}");
    assert!(refused.hint().is_some(), "{refused}");
    refused.message().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cant_be_fenced_in_postgres_is_refused_and_stays_as_it_was() {
    let Some(server) = server("postgres") else {
        return;
    };
    let client = postgres(server.url()).await;
    // A date in a style that depends on the session that wrote it.
    let sql = "CREATE TABLE stock (id date PRIMARY KEY); \
        CREATE TABLE stock_fence (resource text PRIMARY KEY, token bigint NOT NULL); \
        INSERT INTO stock_fence VALUES ('11/12/2026', 9)";
    client.batch_execute(sql).await.unwrap();
    let why = unfit(&client, &stock().postgres()).await;
    assert!(why.contains("carried over"), "{why}");
    let kept = client.query_one("SELECT resource, token FROM stock_fence", &[]);
    assert_eq!(kept.await.unwrap().get::<_, i64>(1), 9);
    let sql = "UPDATE stock_fence SET resource = 'no date'";
    client.batch_execute(sql).await.unwrap();
    unfit(&client, &stock().postgres()).await;

    let sql = "CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child () INHERITS (parent)";
    client.batch_execute(sql).await.unwrap();
    let why = unfit(&client, &Table::new("parent").unwrap().postgres()).await;
    assert!(why.contains("INHERITS"), "{why}");
    // Nothing was added.
    let sql = "INSERT INTO child VALUES (1); INSERT INTO parent VALUES (2)";
    client.batch_execute(sql).await.unwrap();

    keyed(&client, "int").await;
    let other = stock().keyed_by(&["ID"]).unwrap();
    let why = unfit(&client, &other.postgres()).await;
    assert!(why.contains("no column ID"), "{why}");
    fenced(&client, &stock()).await;
    let other = stock().keyed_by(&["id", "n"]).unwrap();
    let why = unfit(&client, &other.postgres()).await;
    assert!(why.contains("by other columns: id"), "{why}");
}

/// A TRUNCATE of a partition is a write as any other.
#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_truncated_with_a_token_only() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut client = postgres(server.url()).await;
    let sql = "CREATE TABLE stock (id int PRIMARY KEY, n int) PARTITION BY RANGE (id); \
        CREATE TABLE low PARTITION OF stock FOR VALUES FROM (0) TO (10); \
        CREATE TABLE high PARTITION OF stock FOR VALUES FROM (10) TO (30) PARTITION BY RANGE (id); \
        CREATE TABLE high_a PARTITION OF high FOR VALUES FROM (10) TO (20)";
    client.batch_execute(sql).await.unwrap();
    for strict in [false, true] {
        let table = if strict { stock().strict() } else { stock() };
        for _ in 0..2 {
            fenced(&client, &table).await;
        }
        let base = if strict { 1000 } else { 0 };
        let insert = "INSERT INTO stock (id, n) VALUES (1, 1), (11, 1)";
        for (sql, token, did) in [
            (insert, Some(5), Did::Write),
            ("TRUNCATE low", None, Did::Missing),
            ("TRUNCATE high", None, Did::Missing),
            ("TRUNCATE high_a", None, Did::Missing),
            ("TRUNCATE stock", None, Did::Missing),
            ("TRUNCATE low", Some(4), Did::Stale),
            ("TRUNCATE low", Some(100), Did::Write),
            (
                "INSERT INTO stock (id, n) VALUES (1, 1)",
                Some(50),
                Did::Stale,
            ),
            (
                "INSERT INTO low (id, n) VALUES (1, 1)",
                Some(50),
                Did::Stale,
            ),
            (
                "INSERT INTO low (id, n) VALUES (1, 1)",
                Some(101),
                Did::Write,
            ),
            // All partitions by one statement, with one token.
            ("TRUNCATE stock", Some(100), Did::Stale),
            ("TRUNCATE stock", Some(200), Did::Write),
            (
                "INSERT INTO high (id, n) VALUES (11, 1)",
                Some(199),
                Did::Stale,
            ),
        ] {
            let did_it = try_postgres(&mut client, sql, token.map(|token| base + token)).await;
            assert_eq!(did_it, did, "strict {strict}: {sql} {token:?}");
        }
    }
    // A partition that came later has no trigger for TRUNCATE: nothing is written to it before.
    let sql = "CREATE TABLE later PARTITION OF stock FOR VALUES FROM (40) TO (50)";
    client.batch_execute(sql).await.unwrap();
    let insert = "INSERT INTO stock (id, n) VALUES (41, 1)";
    let refused = try_postgres(&mut client, insert, Some(3000)).await;
    assert!(
        matches!(&refused, Did::Other(why) if why.contains(UNFIT)),
        "{refused:?}"
    );
    fenced(&client, &stock()).await;
    let done = try_postgres(&mut client, insert, Some(3000)).await;
    assert_eq!(done, Did::Write);
    assert_eq!(
        try_postgres(&mut client, "TRUNCATE later", None).await,
        Did::Missing
    );
}

/// A key that the database computes, or that another trigger changes, is known only afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn generated_keys_and_keys_of_other_triggers_are_fenced() {
    let Some(server) = server("postgres") else {
        return;
    };
    let mut client = postgres(server.url()).await;
    let sql = "CREATE TABLE stock (a text, n int, \
        id text GENERATED ALWAYS AS (lower(a)) STORED PRIMARY KEY)";
    client.batch_execute(sql).await.unwrap();
    fenced(&client, &stock()).await;
    let steps = |insert: &'static str, again: &'static str, change: &'static str| {
        [
            (insert, 5, Did::Write),
            ("UPDATE stock SET n = 2", 6, Did::Write),
            ("UPDATE stock SET n = 2", 5, Did::Stale),
            (change, 7, Did::Other("PFT03".into())),
            ("DELETE FROM stock", 100, Did::Write),
            (again, 50, Did::Stale),
            (again, 100, Did::Write),
            ("DELETE FROM stock", 100, Did::Write),
        ]
    };
    let generated = steps(
        "INSERT INTO stock (a, n) VALUES ('x', 1)",
        "INSERT INTO stock (a, n) VALUES ('X', 1)",
        "UPDATE stock SET a = 'other'",
    );
    let check = async |client: &mut tokio_postgres::Client, steps: [(&str, u64, Did); 8]| {
        for (sql, token, did) in steps {
            match (try_postgres(client, sql, Some(token)).await, did) {
                (Did::Other(why), Did::Other(part)) => assert!(why.contains(&part), "{why}"),
                (done, did) => assert_eq!(done, did, "{sql}"),
            }
        }
    };
    check(&mut client, generated).await;
    keyed(&client, "text").await;
    fenced(&client, &stock()).await;
    let sql = "CREATE FUNCTION lower_id() RETURNS trigger LANGUAGE plpgsql AS \
        'BEGIN NEW.id := lower(NEW.id); RETURN NEW; END'; \
        CREATE TRIGGER zz BEFORE INSERT OR UPDATE ON stock FOR EACH ROW EXECUTE FUNCTION lower_id()";
    client.batch_execute(sql).await.unwrap();
    let changed = steps(
        "INSERT INTO stock (id, n) VALUES ('X', 1)",
        "INSERT INTO stock (id, n) VALUES ('x', 1)",
        "UPDATE stock SET id = 'other'",
    );
    check(&mut client, changed).await;
    // Without a key there is nothing to keep a token by.
    let sql = "CREATE TABLE loose (id int, n int)";
    client.batch_execute(sql).await.unwrap();
    fenced(&client, &Table::new("loose").unwrap()).await;
    let transaction = client.transaction().await.unwrap();
    pg::present(&transaction, 5.into()).await.unwrap();
    let refused = transaction.execute("INSERT INTO loose (n) VALUES (1)", &[]);
    let refused = refused.await.unwrap_err();
    assert_eq!(refused.code().unwrap().code(), "PFT03", "{refused:?}");
}

/// Keys of SQLite, and two texts of one key.
const SQLITE: &[(&str, &str, &str)] = &[
    ("TEXT COLLATE NOCASE", "'A7'", "'a7'"),
    ("TEXT COLLATE RTRIM", "'a'", "'a  '"),
    ("", "1", "1.0"),
    ("NUMERIC", "'1'", "1.0"),
    ("BLOB", "x'41'", "x'41'"),
    ("INTEGER", "1", "'1'"),
];

#[test]
fn what_is_one_key_in_sqlite_has_one_mark() {
    let other_keys = "INSERT INTO stock (id, n, fence) VALUES ('1', 1, 3), (x'31', 1, 3)";
    for earlier in [false, true] {
        for (kind, one, other) in SQLITE {
            let mut connection = rusqlite::Connection::open_in_memory().unwrap();
            let create = format!("CREATE TABLE stock (id {kind} PRIMARY KEY, n INTEGER);");
            connection.execute_batch(&create).unwrap();
            let insert = |key: &str, token: u64| {
                format!("INSERT INTO stock (id, n, fence) VALUES ({key}, 1, {token})")
            };
            if earlier {
                connection.execute_batch(EARLIER_SQLITE).unwrap();
                let delete = "INSERT INTO stock_fence (resource, fence) \
                              SELECT CAST(id AS TEXT), 100 FROM stock; DELETE FROM stock";
                for sql in [insert(one, 5), delete.to_owned()] {
                    assert_eq!(
                        try_sqlite(&mut connection, &sql, None),
                        Did::Write,
                        "{kind}"
                    );
                }
            } else {
                sqlite::fence(&mut connection, &stock()).unwrap();
                for (sql, token) in [(&*insert(one, 5), None), ("DELETE FROM stock", Some(100))] {
                    assert_eq!(
                        try_sqlite(&mut connection, sql, token),
                        Did::Write,
                        "{kind}"
                    );
                }
            }
            for _ in 0..2 {
                sqlite::fence(&mut connection, &stock()).unwrap();
            }
            for (sql, did) in [
                (insert(other, 50), Did::Stale),
                (
                    format!("INSERT INTO stock_fence_take (id, fence) VALUES ({other}, 50)"),
                    Did::Stale,
                ),
                (insert(other, 100), Did::Write),
            ] {
                assert_eq!(
                    try_sqlite(&mut connection, &sql, None),
                    did,
                    "{kind}: {sql}"
                );
            }
            if kind.is_empty() && !earlier {
                // Other keys, though their text is the same.
                let done = try_sqlite(&mut connection, other_keys, None);
                assert_eq!(done, Did::Write);
            }
        }
    }
}

/// The marks are found by an index, whatever the collation.
#[test]
fn a_mark_of_sqlite_is_found_by_an_index() {
    for collation in ["BINARY", "NOCASE", "RTRIM"] {
        let mut connection = rusqlite::Connection::open_in_memory().unwrap();
        let create = format!(
            "CREATE TABLE stock (a TEXT COLLATE {collation}, b INTEGER, PRIMARY KEY (a, b))"
        );
        connection.execute_batch(&create).unwrap();
        let table = stock().keyed_by(&["a", "b"]).unwrap();
        sqlite::fence(&mut connection, &table).unwrap();
        let plan = "EXPLAIN QUERY PLAN SELECT 1 FROM stock AS s, stock_fence_marks AS m \
             WHERE s.rowid = 1 AND s.a = m.a AND s.b = m.b";
        let mut plan = connection.prepare(plan).unwrap();
        let plan = plan.query_map([], |row| row.get::<_, String>(3)).unwrap();
        let plan: Vec<String> = plan.map(Result::unwrap).collect();
        let index = format!("stock_fence_{}", collation.to_lowercase());
        assert!(plan.iter().any(|step| step.contains(&index)), "{plan:?}");
    }
}

/// Keys of several columns, with their own collations, also over an earlier version's marks.
#[test]
fn wide_keys_of_sqlite_have_one_mark() {
    let mut connection = rusqlite::Connection::open_in_memory().unwrap();
    let sql = "CREATE TABLE stock (a TEXT COLLATE NOCASE, b, n INTEGER, PRIMARY KEY (a, b)) \
        WITHOUT ROWID; \
        CREATE TABLE stock_fence (resource TEXT PRIMARY KEY NOT NULL, fence INTEGER, \
        fence_token INTEGER); \
        INSERT INTO stock_fence VALUES ('[\"Ab\",1]', NULL, 100), ('[\"c\",1]', 3, NULL)";
    connection.execute_batch(sql).unwrap();
    let table = stock().keyed_by(&["a", "b"]).unwrap();
    for _ in 0..2 {
        sqlite::fence(&mut connection, &table).unwrap();
    }
    for (values, did) in [
        ("('aB', 1, 1, 99)", Did::Stale),
        ("('aB', '1', 1, 99)", Did::Write),
        ("('aB', 1, 1, 100)", Did::Write),
        ("('c', 1, 1, 1)", Did::Write),
    ] {
        let sql = format!("INSERT INTO stock (a, b, n, fence) VALUES {values}");
        assert_eq!(try_sqlite(&mut connection, &sql, None), did, "{values}");
    }
    let wrong = stock().keyed_by(&["nothing"]).unwrap();
    assert!(sqlite::fence(&mut connection, &wrong).is_err());
}
