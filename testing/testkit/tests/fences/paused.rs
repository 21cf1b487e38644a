//! A writer that is stopped between its check and its write, on every store: 200 of 200 with
//! `PALISADE_TEST_FULL=1`.

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
