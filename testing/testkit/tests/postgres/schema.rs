//! The schema's versions, its tokens, and the cost of reading it.

use palisade::ErrorKind;
use palisade::engines::postgres::Schema;
use palisade::report::Severity;
use palisade_testkit::lab::launch::Running;
use palisade_testkit::lab::trial::until;

use super::{Psql, connect, server, server_with, sql};

/// The schema of an earlier palisade, whose clients call its functions as [`earlier`] does.
const SCHEMA_3: &str = include_str!("schema_3.sql");

/// Sends one call as a client of the earlier schema does.
fn earlier(server: &Running, call: &str) -> String {
    let id = "'00000000-0000-0000-0000-000000000001'::text::uuid";
    sql(server, &format!("SELECT palisade.{call}").replace("ID", id)).remove(0)
}

/// A digest of all functions.
const FUNCTIONS: &str = "SELECT md5(string_agg(proname || prosrc, '' ORDER BY proname, prosrc)) \
    FROM pg_proc WHERE pronamespace = 'palisade'::regnamespace";

const ENTER: &str = "enter('palisade', 'x', ID, 0, 0, 30000000, true, 'm', '{}', NULL)";

#[tokio::test]
async fn an_earlier_schema_is_left_alone_and_its_clients_go_on_with_this_one() {
    let server = need!(server());
    let mut psql = need!(Psql::open(&server));
    psql.ask(SCHEMA_3);
    let before = sql(&server, FUNCTIONS);
    let client = connect(server.url()).await;
    let lock = client.mutex("x");
    let refused = lock.try_lock().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Config);
    assert!(
        refused.to_string().contains("palisade schema postgres"),
        "{refused}"
    );
    assert_eq!(sql(&server, FUNCTIONS), before, "the schema was changed");

    assert_eq!(earlier(&server, ENTER), "{1,1,30000000}");
    psql.ask(&Schema::default().sql());
    assert!(lock.try_lock().await.unwrap().is_none(), "held by two");
    // What an earlier client asks when it connects, and what it does with its lock.
    assert_eq!(earlier(&server, "version()"), "3");
    let prolong = "prolong('palisade', ARRAY['x'], ARRAY[ID], ARRAY[1::bigint])";
    assert_eq!(earlier(&server, prolong), "{30000000}");
    assert_eq!(earlier(&server, "place('palisade', 'x', ID)"), "{1,1}");
    let amend = "amend('palisade', 'x', ID, 1, NULL, NULL, 'v')";
    assert_eq!(earlier(&server, amend), "{1}");
    assert_eq!(
        earlier(&server, "leave('palisade', 'x', ID, 1, false)"),
        "{1}"
    );
    let hold = lock.try_lock().await.unwrap().unwrap();
    assert!(hold.token().0 > 1, "a token went back");
    assert!(earlier(&server, ENTER).starts_with("{2,0,"), "held by two");
    let token = hold.token().0;
    hold.release().await.unwrap();
    let place = earlier(&server, "place('palisade', 'x', ID)");
    let granted: u64 = place[3..place.len() - 1].parse().unwrap();
    assert!(granted > token, "a token went back: {place}");
}

#[tokio::test]
async fn a_later_schema_is_used_unless_it_says_that_it_can_t_be() {
    let server = need!(server());
    let first = connect(server.url()).await;
    first.mutex("x").try_lock().await.unwrap();
    let say = |what: &str, number: u32| {
        let sql_text = format!(
            "CREATE OR REPLACE FUNCTION palisade.{what}() RETURNS int LANGUAGE sql AS 'SELECT {number}'"
        );
        sql(&server, &sql_text);
    };
    say("revision", 999);
    let client = connect(server.url()).await;
    let hold = client.mutex("y").try_lock().await.unwrap();
    assert!(hold.is_some());
    say("version", 999);
    let client = connect(server.url()).await;
    let newer = client.mutex("x").try_lock().await.unwrap_err();
    assert_eq!(newer.kind(), ErrorKind::Config);
}

#[tokio::test]
async fn a_deleted_row_sends_no_token_back() {
    let server = need!(server());
    let client = connect(server.url()).await;
    let lock = client.mutex("x");
    let token = async || {
        let hold = lock.lock().await.unwrap();
        let token = hold.token();
        hold.release().await.unwrap();
        token
    };
    let first = token().await;
    sql(&server, "DELETE FROM palisade.line");
    assert!(token().await > first, "a token went back");
    // The same for the token of a row that is ahead of the clock.
    let ahead = "UPDATE palisade.line SET token = token + 3600000000 RETURNING token";
    let ahead: u64 = sql(&server, ahead)[0].parse().unwrap();
    assert_eq!(token().await.0, ahead + 1);
}

/// With `synchronous_commit=off` the server answers before the change is on disk; a grant overrides
/// that.
#[tokio::test]
async fn a_grant_survives_a_crash_of_a_server_that_commits_later() {
    let later = [
        "-c",
        "synchronous_commit=off",
        "-c",
        "wal_writer_delay=10s",
        "-c",
        "wal_writer_flush_after=0",
    ];
    let server = need!(server_with(&later));
    let client = connect(server.url()).await;
    drop(client.mutex("other").lock().await.unwrap());
    sql(&server, "CHECKPOINT");
    let hold = client.mutex("x").lock().await.unwrap();
    server.nodes()[0].restart().unwrap();
    let lock = client.mutex("x");
    let next = tokio::time::timeout(super::SOON, async {
        loop {
            match lock.try_lock().await {
                Ok(next) => break next,
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
            }
        }
    });
    assert!(next.await.unwrap().is_none(), "held by two");
    assert!(hold.is_valid());
}

#[tokio::test]
async fn what_is_not_durable_is_a_danger() {
    let settings = ["-c", "fsync=off", "-c", "synchronous_commit=off"];
    let unsafe_one = need!(server_with(&settings));
    let safe = need!(server_with(&["-c", "synchronous_commit=off"]));
    let dangers = async |server: &Running| {
        let client = connect(server.url()).await;
        client.mutex("x").try_lock().await.unwrap();
        let findings = client.check().await.unwrap().findings;
        let danger = findings.iter().filter(|f| f.severity == Severity::Danger);
        danger.map(|finding| finding.code).collect::<Vec<_>>()
    };
    assert_eq!(dangers(&unsafe_one).await, ["not_durable"]);
    assert!(dangers(&safe).await.is_empty());
    sql(&safe, "ALTER TABLE palisade.line SET UNLOGGED");
    assert_eq!(dangers(&safe).await, ["unlogged"]);
}

/// Claims that were left before they arrived are forgotten, by every way to leave.
#[tokio::test]
async fn departed_claims_are_swept() {
    let server = need!(server());
    let client = connect(server.url()).await;
    client.mutex("x").try_lock().await.unwrap();
    for leave in [
        "leave('palisade', 'x', gen_random_uuid(), 0, false)",
        "shed_leave('x', gen_random_uuid()::text, 0, false)",
    ] {
        sql(
            &server,
            "INSERT INTO palisade.departed SELECT gen_random_uuid(), now() - interval '1 s' \
             FROM generate_series(1, 50)",
        );
        if leave.starts_with("shed") {
            sql(
                &server,
                "CREATE TABLE shedlock (name varchar(64) PRIMARY KEY, lock_until timestamp, \
                 locked_at timestamp, locked_by varchar(255))",
            );
        }
        for _ in 0..10 {
            sql(&server, &format!("SELECT palisade.{leave}"));
        }
        let old = "SELECT count(*) FROM palisade.departed WHERE until < now()";
        assert_eq!(sql(&server, old), ["0"], "{leave}");
    }
}

/// Reading one line or a prefix reads only what it needs, whatever the database's collation is.
#[tokio::test]
async fn looks_don_t_scan_the_table() {
    let server = need!(server());
    let mut psql = need!(Psql::open(&server));
    psql.ask("CREATE DATABASE other TEMPLATE template0 LC_COLLATE 'C.UTF-8' LC_CTYPE 'C.UTF-8';");
    let url = server.url().replace("/postgres", "/other");
    let client = connect(&url).await;
    let hold = client.mutex("job/1").lock().await.unwrap();
    psql.ask(
        "\\c other
         INSERT INTO palisade.line (namespace, name, token)
           SELECT 'palisade', 'filler/' || i, 1 FROM generate_series(1, 20000) i;
         ANALYZE palisade.line;",
    );
    let mut count = |column: &str| -> u64 {
        let rows = psql.ask(&format!(
            "SELECT {column} FROM pg_stat_user_tables WHERE relname = 'line';"
        ));
        rows[0].parse().unwrap()
    };
    let (scans, reads) = (count("seq_scan"), count("idx_scan"));
    let name = palisade::Name::new("job/1").unwrap();
    let scopes = [
        palisade::report::Scope::Prefix("job/".into()),
        palisade::report::Scope::Line(name),
    ];
    for _ in 0..20 {
        for scope in scopes.clone() {
            let lines = client.survey(scope.clone()).await.unwrap();
            assert_eq!(lines.len(), 1);
            let mut watch = client.engine().watch(scope);
            futures_util::StreamExt::next(&mut watch)
                .await
                .unwrap()
                .unwrap();
        }
    }
    // The server updates its statistics when a session has been idle for a moment.
    hold.release().await.unwrap();
    client.close().await;
    until("counts", async || count("idx_scan") >= reads + 80).await;
    // Creating the tables may be counted by now.
    let more = count("seq_scan") - scans;
    assert!(more < 10, "the whole table was read {more} times");
}

/// Creating it again would lock tables that the others already use.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_who_start_at_once_one_makes_the_schema() {
    let server = need!(server());
    let url = format!("{}?schema=crowded&ttl=5s", server.url());
    let starters = (0..20).map(|_| {
        let url = url.clone();
        tokio::spawn(async move {
            let client = connect(&url).await;
            let hold = client.mutex("crowd").lock().await.unwrap();
            hold.release().await.unwrap();
        })
    });
    for starter in starters.collect::<Vec<_>>() {
        starter.await.unwrap();
    }
    let once = "SELECT n.xmin = p.xmin FROM pg_namespace n, pg_proc p \
                WHERE n.nspname = 'crowded' AND p.oid = 'crowded.version()'::regprocedure";
    assert_eq!(sql(&server, once), ["t"], "made again");
}
