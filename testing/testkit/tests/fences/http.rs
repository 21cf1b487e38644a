//! The layer in front of an axum service, over real connections.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Extension, Path, State};
use axum::http::StatusCode;
use axum::routing::get;
use palisade::fence::http::{FENCING_TAKE, FENCING_TOKEN, FenceLayer, FencedRequest};
use palisade::fence::{Fence, MemoryFence, SharedFence, WriteToken};
use palisade::{ErrorKind, Name};
use palisade_testkit::lab::fencing::{Kind, ledger};
use palisade_testkit::lab::trial::until;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::paused::stopped_writer_is_refused;

/// The state of the service, and how a test delays a handler.
#[derive(Clone, Default)]
struct Shop {
    kept: Arc<Mutex<HashMap<String, String>>>,
    seen: Arc<Mutex<Vec<u64>>>,
    go: Arc<Notify>,
}

async fn put(
    State(shop): State<Shop>,
    Path(name): Path<String>,
    token: Option<Extension<WriteToken>>,
    body: String,
) -> StatusCode {
    if let Some(Extension(token)) = token {
        shop.seen.lock().push(token.token().0);
    }
    if body == "slow" {
        shop.go.notified().await;
    }
    shop.kept.lock().insert(name, body);
    StatusCode::OK
}

async fn show(
    State(shop): State<Shop>,
    Path(name): Path<String>,
    token: Option<Extension<WriteToken>>,
) -> String {
    if let Some(Extension(token)) = token {
        shop.seen.lock().push(token.token().0);
    }
    shop.kept.lock().get(&name).cloned().unwrap_or_default()
}

/// Serves, with the layer if there is a fence; returns the address.
async fn serve(shop: &Shop, fence: Option<SharedFence>) -> String {
    let mut router = Router::new()
        .route("/{name}", get(show).put(put))
        .with_state(shop.clone());
    if let Some(fence) = fence {
        router = router.layer(FenceLayer::by_path(fence));
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

async fn ask(address: &str, method: &str, token: Option<u64>, body: &str) -> (u16, String) {
    let name = Name::new("stock").unwrap();
    let token = token.map(WriteToken::from);
    ledger::http(address, method, &name, token, body)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_token_is_409_and_a_missing_one_428() {
    let (shop, fence) = (Shop::default(), Arc::new(MemoryFence::default()));
    let address = serve(&shop, Some(fence.clone())).await;
    assert_eq!(ask(&address, "PUT", Some(5), "five").await.0, 200);
    assert_eq!(ask(&address, "PUT", Some(5), "five again").await.0, 200);
    assert_eq!(ask(&address, "PUT", Some(7), "seven").await.0, 200);
    let (status, body) = ask(&address, "PUT", Some(6), "six").await;
    let problem: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &problem["code"]), (409, &"stale_token".into()));
    assert_eq!(
        (&problem["highest"], &problem["status"]),
        (&"7".into(), &409.into())
    );
    let (status, body) = ask(&address, "PUT", None, "none").await;
    assert_eq!(status, 428);
    assert!(body.contains("token_missing"), "{body}");
    assert_eq!(ask(&address, "PUT", Some(0), "zero").await.0, 400);
    // The handler received only the tokens that were accepted.
    assert_eq!(*shop.seen.lock(), [5, 5, 7]);
    // A reader's token is compared, and not recorded.
    assert_eq!(ask(&address, "GET", None, "").await, (200, "seven".into()));
    assert_eq!(ask(&address, "GET", Some(9), "").await.0, 200);
    assert_eq!(ask(&address, "GET", Some(6), "").await.0, 409);
    let name = Name::new("/stock").unwrap();
    assert_eq!(fence.highest(&name).await.unwrap().unwrap().0, 7);
    // A request whose path is no valid name does not pass unfenced.
    let long = Name::new("x".repeat(255)).unwrap();
    let (status, body) = ledger::http(&address, "PUT", &long, None, "x")
        .await
        .unwrap();
    assert_eq!(status, 400);
    assert!(body.contains("invalid_resource"), "{body}");
}

/// A newer request waits until the handler of an older one has ended.
#[tokio::test(flavor = "multi_thread")]
async fn one_request_per_resource_writes_at_a_time() {
    let shop = Shop::default();
    let address = serve(&shop, Some(Arc::new(MemoryFence::default()))).await;
    let (slow, fast) = (address.clone(), address.clone());
    let slow = tokio::spawn(async move { ask(&slow, "PUT", Some(5), "slow").await });
    until("the handler runs", async || shop.seen.lock().len() == 1).await;
    let mut fast = tokio::spawn(async move { ask(&fast, "PUT", Some(6), "fast").await });
    // Enough time to overtake, if that were possible.
    let early = tokio::time::timeout(Duration::from_millis(100), &mut fast).await;
    assert!(early.is_err(), "it overtook: {early:?}");
    assert_eq!(shop.seen.lock().len(), 1);
    shop.go.notify_one();
    assert_eq!(slow.await.unwrap().0, 200);
    assert_eq!(fast.await.unwrap().0, 200);
    assert_eq!(ask(&address, "GET", None, "").await.1, "fast");
}

async fn take(address: &str, token: u64, headers: &str) -> (u16, String, String) {
    let name = Name::new("stock").unwrap();
    let headers = format!("Fencing-Take: {token}\r\n{headers}");
    let (head, body) = ledger::exchange(address, "GET", &name, &headers, "")
        .await
        .unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_lowercase(), body)
}

/// The handler of an older holder is paused before its write. The next holder takes: it waits, and
/// reads what the older one wrote; who only reads would not, and would overwrite it.
#[tokio::test(flavor = "multi_thread")]
async fn a_take_waits_for_a_paused_handler_and_reads_its_write() {
    let shop = Shop::default();
    let address = serve(&shop, Some(Arc::new(MemoryFence::default()))).await;
    let (slow, taking) = (address.clone(), address.clone());
    let slow = tokio::spawn(async move { ask(&slow, "PUT", Some(5), "slow").await });
    until("the handler runs", async || shop.seen.lock().len() == 1).await;
    // The control.
    let read = ask(&address, "GET", Some(7), "").await;
    assert_eq!(read, (200, String::new()));
    let taken = tokio::spawn(async move { take(&taking, 7, "").await });
    tokio::task::yield_now().await;
    assert_eq!(shop.seen.lock().len(), 1);
    shop.go.notify_one();
    assert_eq!(slow.await.unwrap().0, 200, "it was accepted");
    let (status, head, body) = taken.await.unwrap();
    assert_eq!((status, body.as_str()), (200, "slow"));
    assert!(head.contains("cache-control: no-store"), "{head}");
    // The handler may take in a store of its own.
    assert_eq!(*shop.seen.lock(), [5, 7]);
    // From now on the older holder is refused, whatever it sends.
    assert_eq!(ask(&address, "PUT", Some(5), "late").await.0, 409);
    assert_eq!(ask(&address, "GET", Some(5), "").await.0, 409);
    let (status, head, _) = take(&address, 5, "").await;
    assert_eq!(status, 409);
    assert!(head.contains("cache-control: no-store"), "{head}");
    assert_eq!(ask(&address, "PUT", Some(7), "second").await.0, 200);
    // It belongs to a GET, alone.
    for (method, headers) in [
        ("PUT", "Fencing-Take: 9\r\n"),
        ("GET", "Fencing-Take: 9\r\nFencing-Token: 9\r\n"),
        ("GET", "Fencing-Take: x\r\n"),
        ("GET", "Fencing-Take: 9\r\nFencing-Take: 9\r\n"),
    ] {
        let name = Name::new("stock").unwrap();
        let refused = ledger::http_with(&address, method, &name, headers, "x").await;
        assert_eq!(refused.unwrap().0, 400, "{method} {headers}");
    }
    assert_eq!(ask(&address, "PUT", Some(7), "third").await.0, 200);
}

/// A strict fence keeps the token for the write.
#[tokio::test(flavor = "multi_thread")]
async fn a_strict_layer_takes_and_writes_with_one_token() {
    let address = serve(&Shop::default(), Some(Arc::new(MemoryFence::strict()))).await;
    assert_eq!(ask(&address, "PUT", Some(5), "five").await.0, 200);
    assert_eq!(take(&address, 7, "").await.2, "five");
    assert_eq!(ask(&address, "PUT", Some(6), "six").await.0, 409);
    assert_eq!(ask(&address, "PUT", Some(7), "seven").await.0, 200);
    assert_eq!(ask(&address, "PUT", Some(7), "again").await.0, 409);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_adds_the_header_of_its_hold() {
    let client = palisade::connect("memory:").await.unwrap();
    let put = || axum::http::Request::put("/stock");
    let hold = client.mutex("stock").lock().await.unwrap();
    let request = put().fenced_by(&hold).unwrap().body(()).unwrap();
    let header = request.headers()[FENCING_TOKEN]
        .to_str()
        .unwrap()
        .to_owned();
    assert_eq!(header, hold.token().to_string());
    let get = axum::http::Request::get("/stock");
    let taking = get.taken_by(&hold).unwrap().body(()).unwrap();
    assert_eq!(taking.headers()[FENCING_TAKE], header);
    assert!(!taking.headers().contains_key(FENCING_TOKEN));
    hold.release().await.unwrap();
    let mut reader = client.rwlock("stock").read().await.unwrap();
    let refused = put().fenced_by(&reader).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    let get = axum::http::Request::get("/stock").body(()).unwrap();
    let get = get.fenced_by(&reader).unwrap();
    assert!(get.taken_by(&reader).is_err(), "a reader can't raise");
    // A reader that was upgraded may write, and one that was downgraded no longer.
    assert!(reader.try_upgrade().await.unwrap());
    assert!(put().fenced_by(&reader).is_ok());
    reader.downgrade().await.unwrap();
    assert!(reader.write_token().is_err());
    assert!(reader.read_token().is_ok());
    let permit = client.semaphore("api", 3).acquire().await.unwrap();
    assert!(permit.write_token().is_err() && permit.read_token().is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_writer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file:{}", dir.path().display());
    let fenced = serve(&Shop::default(), Some(Arc::new(MemoryFence::default()))).await;
    let plain = serve(&Shop::default(), None).await;
    stopped_writer_is_refused(&url, Kind::Http, [&fenced, &plain]).await;
}
