//! Fenced nodes: what other programs see of them, and what is refused. The suite for all stores is
//! in `tests/fences`.

use palisade::fence::{self, Verdict};
use palisade::report::Scope;
use palisade::{ErrorKind, Name};
use palisade_testkit::lab::proxy::to_engine;
use palisade_testkit::lab::trial::fails;

use crate::util::{Raw, beside_others, connected, proxied, soon, until};

/// An unreadable token is never treated as free, and data is stored as given.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_marks_are_an_error_and_data_stays_plain() {
    let running = need!("zookeeper");
    let mut raw = Raw::connect(running.nodes()[0].port());
    let url = format!("{}?namespace=", running.url());
    let fence = fence::open(&url).await.unwrap();
    let name = Name::new("shop/stock").unwrap();
    let write = async |token: u64, data: &[u8]| fence.write(&name, token.into(), data.into()).await;
    assert_eq!(write(7, b"seven").await.unwrap(), Verdict::Accepted);
    let [mark, data] = ["fence", "data"].map(|kind| format!("/.palisade/{kind}/%/shop%2Fstock"));
    assert_eq!(raw.get(&data).unwrap(), b"seven");
    assert_eq!(raw.get(&mark).unwrap(), b"00000000000000000007");
    for damage in ["", "7", "x0000000000000000007", "000000000000000000071"] {
        raw.set(&mark, damage.as_bytes()).unwrap();
        fails(write(9, b"nine").await, ErrorKind::Unusable);
        fails(fence.highest(&name).await, ErrorKind::Unusable);
    }
    assert_eq!(raw.get(&data).unwrap(), b"seven");
    // Data that would end the connection is refused.
    let much = fence.write(&Name::new("much").unwrap(), 9.into(), vec![0; 1_000_001]);
    fails(much.await, ErrorKind::InvalidArgument);
}

/// A write that was judged before a newer one came, and arrives after it, changes nothing, whether
/// it was to create the token, raise it, or keep it.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_comes_late_is_judged_again() {
    let running = need!("zookeeper");
    let (proxy, slow) = proxied(&running, 0);
    let late = fence::open(&format!("{slow}?timeout=20s")).await.unwrap();
    let fence = fence::open(running.url()).await.unwrap();
    for (first, token) in [(None, 6), (Some(5), 6), (Some(6), 6)] {
        let name = Name::new(format!("late-{first:?}")).unwrap();
        if let Some(first) = first {
            let written = fence.write(&name, u64::into(first), b"first".into()).await;
            assert_eq!(written.unwrap(), Verdict::Accepted);
        }
        let held = proxy.inject(to_engine().label_contains("multi").once().hold());
        let write = tokio::spawn(late.write(&name, u64::into(token), b"late".into()));
        soon("the late write", held.fired()).await;
        let written = fence.write(&name, 7.into(), b"newer".into()).await;
        assert_eq!(written.unwrap(), Verdict::Accepted);
        held.release();
        let written = soon("its answer", write).await.unwrap().unwrap();
        assert!(matches!(written, Verdict::Stale { highest } if highest.0 == 7));
        let kept = fence.read(&name).await.unwrap().unwrap();
        assert_eq!((kept.token.0, kept.data), (7, b"newer".to_vec()));
    }
}

/// The lock of the same name is another node, which is removed when it is released.
#[tokio::test(flavor = "multi_thread")]
async fn data_outlives_the_lock_of_its_name() {
    let running = need!("zookeeper");
    let mut raw = Raw::connect(running.nodes()[0].port());
    let client = beside_others(&running, "").await;
    let url = format!("{}?namespace=", running.url());
    let fence = fence::open(&url).await.unwrap();
    let hold = client.mutex("stock").lock().await.unwrap();
    let (name, token) = (hold.name().clone(), hold.write_token().unwrap());
    let written = fence.write(&name, token, b"9".into()).await;
    assert_eq!(written.unwrap(), Verdict::Accepted);
    hold.release().await.unwrap();
    until("the end of the line", async || raw.get("/stock").is_err()).await;
    assert_eq!(fence.read(&name).await.unwrap().unwrap().data, b"9");
}

/// A resource may have the name of a ticket: it is in no line.
#[tokio::test(flavor = "multi_thread")]
async fn fenced_nodes_are_in_no_line() {
    let running = need!("zookeeper");
    for url in ["", "?namespace="].map(|options| format!("{}{options}", running.url())) {
        let fence = fence::open(&url).await.unwrap();
        for name in ["job-0000000001", "lock/x-0000000002"] {
            let name = Name::new(name).unwrap();
            fence.write(&name, 7.into(), b"x".into()).await.unwrap();
        }
        let client = palisade::connect(&url).await.unwrap();
        let lines = client.survey(Scope::Prefix(String::new())).await.unwrap();
        assert!(lines.is_empty(), "{lines:?}");
    }
    let client = connected(&running).await;
    let hold = client.mutex("job-0000000001").try_lock().await.unwrap();
    assert!(hold.is_some());
}
