//! A writer that is stopped between its check and its write, on every store: 200 of 200 with
//! `PALISADE_TEST_FULL=1`. It is continued after the next holder's write, or between that holder's
//! read and its write.

use std::path::Path;

use palisade_testkit::lab::fencing::{Kind, Score, Spec, rounds};

use super::server;

/// With the fence every late write is refused and nothing is lost; without it, the second writer's
/// data is lost.
pub(super) async fn stopped_writer_is_refused(url: &str, kind: Kind, store: [&str; 2]) {
    let (count, control) = match std::env::var_os("PALISADE_TEST_FULL") {
        Some(_) => (200, 20),
        None => (12, 3),
    };
    let program = Path::new(env!("CARGO_BIN_EXE_palisade-testkit"));
    for (fenced, count, store) in [(true, count, store[0]), (false, control, store[1])] {
        let spec = Spec {
            url: url.to_owned(),
            name: format!("ledger-{:08x}", rand::random::<u32>()),
            kind,
            store: store.to_owned(),
            fenced,
            takes: true,
            between: false,
        };
        let score = rounds(program, &spec, count).await.unwrap();
        println!("{kind:?}, fenced {fenced}: {count} rounds, {score:?}");
        let expected = if fenced {
            Score {
                refused: count,
                lost: 0,
            }
        } else {
            Score {
                refused: 0,
                lost: count,
            }
        };
        assert_eq!(score, expected, "{kind:?}, fenced: {fenced}");
    }
    if kind != Kind::PostgresGuard {
        takes_or_loses(url, kind, store[0]).await;
    }
}

/// The late write comes between the next holder's read and its write. Who takes loses nothing; the
/// control, which only reads, loses a line that was accepted in each round.
async fn takes_or_loses(url: &str, kind: Kind, store: &str) {
    let (count, control) = match std::env::var_os("PALISADE_TEST_FULL") {
        Some(_) => (200, 20),
        None => (4, 3),
    };
    let program = Path::new(env!("CARGO_BIN_EXE_palisade-testkit"));
    for (takes, count) in [(true, count), (false, control)] {
        // Each run of rows begins with a table of its own.
        let own = match kind {
            Kind::SqliteRow => format!("{store}-{takes}"),
            _ => store.to_owned(),
        };
        let spec = Spec {
            url: url.to_owned(),
            name: format!("taken-{:08x}", rand::random::<u32>()),
            kind,
            store: own,
            fenced: true,
            takes,
            between: true,
        };
        let score = rounds(program, &spec, count).await.unwrap();
        println!("{kind:?}, between, takes {takes}: {count} rounds, {score:?}");
        let (refused, lost) = if takes { (count, 0) } else { (0, count) };
        assert_eq!(score, Score { refused, lost }, "{kind:?}, takes: {takes}");
    }
}

/// Locks of the embedded engine, for stores that have none of their own.
fn locks(dir: &Path) -> String {
    format!("file:{}", dir.join("locks").display())
}

#[tokio::test(flavor = "multi_thread")]
async fn files() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    stopped_writer_is_refused(&locks(dir.path()), Kind::File, [data, data]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_engine() {
    let dir = tempfile::tempdir().unwrap();
    let url = locks(dir.path());
    stopped_writer_is_refused(&url, Kind::Engine, [&url, &url]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    stopped_writer_is_refused(&locks(dir.path()), Kind::Sqlite, [data, data]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_rows() {
    let dir = tempfile::tempdir().unwrap();
    let [fenced, plain] = ["fenced", "plain"].map(|name| dir.path().join(name));
    let stores = [fenced.to_str().unwrap(), plain.to_str().unwrap()];
    stopped_writer_is_refused(&locks(dir.path()), Kind::SqliteRow, stores).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis() {
    let Some(server) = server("redis") else {
        return;
    };
    let url = server.url();
    stopped_writer_is_refused(url, Kind::Engine, [url, url]).await;
    stopped_writer_is_refused(url, Kind::RedisHash, [url, url]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd() {
    let Some(server) = server("etcd") else { return };
    let url = server.url();
    stopped_writer_is_refused(url, Kind::Engine, [url, url]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn zookeeper() {
    let Some(server) = server("zookeeper") else {
        return;
    };
    let url = server.url();
    stopped_writer_is_refused(url, Kind::Engine, [url, url]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres() {
    let Some(server) = server("postgres") else {
        return;
    };
    let url = server.url();
    stopped_writer_is_refused(url, Kind::Engine, [url, url]).await;
    stopped_writer_is_refused(url, Kind::PostgresRow, [url, url]).await;
    stopped_writer_is_refused(url, Kind::PostgresGuard, [url, url]).await;
}
