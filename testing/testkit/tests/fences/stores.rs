//! Every store passes the suite.

use std::sync::Arc;

use palisade::engines::redis::RedisFence;
use palisade::fence::sqlite::SqliteFence;
use palisade::fence::{self, Fence, FileFence, MemoryFence, Rule, SharedFence, Taken, Verdict};
use palisade::{ErrorKind, Name};
use palisade_testkit::fences::conforms;

use super::server;

/// The fenced store beside an engine's locks.
async fn of_engine(engine: &'static str) {
    let Some(server) = server(engine) else { return };
    of_url(engine, server.url()).await;
}

async fn of_url(store: &str, url: &str) {
    let open = |rule| -> palisade::engine::BoxFuture<palisade::Result<SharedFence>> {
        let url = url.to_owned();
        Box::pin(async move {
            match rule {
                Rule::Strict => fence::open_strict(&url).await,
                _ => fence::open(&url).await,
            }
        })
    };
    conforms(store, &open).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory() {
    // Opening it again would create another store, so the suite gets clones of two.
    let (plain, strict) = (MemoryFence::default(), MemoryFence::strict());
    let open = |rule| -> palisade::engine::BoxFuture<palisade::Result<SharedFence>> {
        let fence = if rule == Rule::Strict {
            &strict
        } else {
            &plain
        };
        let fence: SharedFence = Arc::new(fence.clone());
        Box::pin(async move { Ok(fence) })
    };
    conforms("memory", &open).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn file() {
    let dir = tempfile::tempdir().unwrap();
    of_url("file", &format!("file:{}", dir.path().display())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files() {
    let dir = tempfile::tempdir().unwrap();
    let open = |rule| -> palisade::engine::BoxFuture<palisade::Result<SharedFence>> {
        let fence = FileFence::open(dir.path());
        Box::pin(async move {
            Ok(match rule {
                Rule::Strict => Arc::new(fence?.strict()) as _,
                _ => Arc::new(fence?) as _,
            })
        })
    };
    conforms("files", &open).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let open = |rule| -> palisade::engine::BoxFuture<palisade::Result<SharedFence>> {
        let fence = SqliteFence::open(dir.path().join("data"));
        Box::pin(async move {
            Ok(match rule {
                Rule::Strict => Arc::new(fence?.strict()) as _,
                _ => Arc::new(fence?) as _,
            })
        })
    };
    conforms("sqlite", &open).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis() {
    of_engine("redis").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn valkey() {
    of_engine("valkey").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_sets() {
    of_engine("redis-sentinel").await;
    of_engine("redis-cluster").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd() {
    of_engine("etcd").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn zookeeper() {
    of_engine("zookeeper").await;
}

/// Each client is at another server: its reads may lag behind the other's writes.
#[tokio::test(flavor = "multi_thread")]
async fn zookeeper_of_three() {
    of_engine("zookeeper3").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres() {
    of_engine("postgres").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_advisory() {
    let Some(server) = server("postgres") else {
        return;
    };
    let url = server.url().replacen("postgres:", "postgres+advisory:", 1);
    of_url("postgres+advisory", &format!("{url}?key=hashtext")).await;
    // One database has one fenced store, whichever way its locks are kept.
    let (name, one) = (Name::new("x").unwrap(), fence::open(&url).await.unwrap());
    one.accept(&name, 5.into()).await.unwrap();
    let other = fence::open(server.url()).await.unwrap();
    assert!(other.highest(&name).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hash_of_redis_keeps_its_other_fields() {
    let Some(server) = server("redis") else {
        return;
    };
    let fence = RedisFence::open(server.url()).await.unwrap();
    let name = Name::new("stock").unwrap();
    let write = async |token: u64, fields: &[(&str, &str)]| {
        let fields = fields
            .iter()
            .map(|(f, v)| ((*f).to_owned(), v.as_bytes().to_vec()));
        let fields = fields.collect();
        fence.write_fields(&name, token.into(), &fields).await
    };
    assert_eq!(
        write(5, &[("a", "1"), ("b", "2")]).await.unwrap(),
        Verdict::Accepted
    );
    assert_eq!(write(6, &[("b", "3")]).await.unwrap(), Verdict::Accepted);
    assert!(matches!(
        write(5, &[("b", "4")]).await.unwrap(),
        Verdict::Stale { .. }
    ));
    let (token, mut fields) = fence.read_fields(&name).await.unwrap().unwrap();
    fields.sort();
    let expected = [
        ("a".to_owned(), b"1".to_vec()),
        ("b".to_owned(), b"3".to_vec()),
    ];
    assert_eq!((token.0, fields), (6, expected.to_vec()));
    // Who takes a hash reads what was accepted, and older holders are refused.
    let taken = fence.take_fields(&name, 8.into()).await.unwrap();
    let Taken::Accepted {
        data: Some(mut data),
    } = taken
    else {
        panic!("{taken:?}");
    };
    data.sort();
    assert_eq!(data, expected);
    let late = write(7, &[("a", "9")]).await.unwrap();
    assert!(matches!(late, Verdict::Stale { highest } if highest.0 == 8));
    let taken = fence.take_fields(&name, 7.into()).await.unwrap();
    assert!(matches!(taken, Taken::Stale { highest } if highest.0 == 8));
    let fresh = Name::new("fresh").unwrap();
    let taken = fence.take_fields(&fresh, 8.into()).await.unwrap();
    assert_eq!(taken, Taken::Accepted { data: None });
    assert_eq!(
        fence.take(&name, 9.into()).await.unwrap_err().kind(),
        ErrorKind::Unusable
    );
    assert_eq!(fence.highest(&name).await.unwrap().unwrap().0, 8);
    // A hash is no string: nothing is written, and no token recorded.
    assert_eq!(
        write(7, &[]).await.unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let text = Name::new("text").unwrap();
    fence.write(&text, 5.into(), b"x".into()).await.unwrap();
    let mixed = vec![("a".to_owned(), b"1".to_vec())];
    let refused = fence
        .write_fields(&text, 9.into(), &mixed)
        .await
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unusable, "{refused}");
    assert_eq!(fence.highest(&text).await.unwrap().unwrap().0, 5);
}

/// An unreadable token is never treated as free, and keys are those that other programs use.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_marks_are_an_error_and_plain_keys_stay_plain() {
    use palisade_testkit::lab::launch::wire;
    let Some(server) = server("redis") else {
        return;
    };
    let ask = |command: &[&str]| wire::redis(server.nodes()[0].port(), command).unwrap();
    let fence = fence::open(&format!("{}?namespace=", server.url()))
        .await
        .unwrap();
    let name = Name::new("plain").unwrap();
    fence.write(&name, 7.into(), b"seven".into()).await.unwrap();
    assert!(ask(&["GET", "plain"]).contains("seven"));
    assert!(ask(&["GET", "{plain}:palisade:fence"]).contains("00000000000000000007"));
    for damage in ["", "7", "x0000000000000000007", "000000000000000000071"] {
        ask(&["SET", "{plain}:palisade:fence", damage]);
        let refused = fence
            .write(&name, 9.into(), b"nine".into())
            .await
            .unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unusable, "{damage:?}");
        assert_eq!(
            fence.highest(&name).await.unwrap_err().kind(),
            ErrorKind::Unusable
        );
    }
}

#[tokio::test]
async fn engines_without_a_storage_say_so() {
    for url in ["memory:", "consul://127.0.0.1:1"] {
        let refused = fence::open(url).await.err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{url}");
    }
    let unknown = fence::open("bananas:").await.err().unwrap();
    assert_eq!(unknown.kind(), ErrorKind::Config);
}
