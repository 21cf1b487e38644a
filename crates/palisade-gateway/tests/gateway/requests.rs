//! Headers of requests, and what responses say about the gateway.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use palisade::BootTime;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::support::*;

#[tokio::test]
async fn a_session_stays_at_the_door_that_it_came_in() {
    let served = serve().await;
    let by_port = Ask::post("/v1/sessions", &json!({}))
        .send(served.addr)
        .await;
    assert_eq!(by_port.is(201)["url"], format!("http://{}", served.addr));
    let socket = served.dir.path().join("run/gateway.sock");
    let ask = Ask::post("/v1/sessions", &json!({})).with("authorization", "");
    let stream = UnixStream::connect(&socket).await.unwrap();
    let by_socket = exchange(stream, &ask.bytes(served.addr)).await.is(201);
    assert_eq!(by_socket["url"], format!("http+unix:{}", socket.display()));
}

#[tokio::test]
async fn the_methods_of_an_address_are_told() {
    let served = serve().await;
    let refused = Ask::new("PUT", "/v1/sessions", "").send(served.addr).await;
    assert!(
        refused.head.contains("allow: post, delete"),
        "{}",
        refused.head
    );
    refused.refuses(405, "method_not_allowed");
}

#[tokio::test]
async fn a_trace_is_in_the_record_if_it_is_one() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    for (at, (header, kept)) in [
        (trace, Some(trace)),
        ("00-0-0-01", None),
        (
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            None,
        ),
        ("<script>", None),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("x{at}");
        let claim = Ask::post("/v1/claims", &json!({"name": name})).session(&secret);
        claim
            .with("traceparent", header)
            .send(served.addr)
            .await
            .is(200);
        let path = format!("/v1/lines?name={name}");
        let shown = Ask::get(&path).send(served.addr).await.is(200);
        assert_eq!(shown["lines"][0]["holders"][0]["traceparent"], json!(kept));
    }
}

#[tokio::test]
async fn an_engine_that_hangs_is_told_within_the_clients_own_timeout() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let claim = json!({"name": "a", "id": "one"});
    served.post("/v1/claims", &secret, &claim).await.is(200);
    // Its line is in the middle of a change.
    let mut line = std::fs::read_dir(served.dir.path().join("store/lines")).unwrap();
    let line = line.next().unwrap().unwrap().path();
    let line = std::fs::File::options().write(true).open(line).unwrap();
    line.lock().unwrap();
    line.write_all_at(b"?", 0).unwrap();
    let began = BootTime::now();
    let ask = Ask::get("/v1/lines?name=a").with("palisade-timeout", "500ms");
    let said = ask.send(served.addr).await.refuses(503, "unreachable");
    assert_eq!(said["outcome"], "maybe_applied");
    let took = BootTime::now().saturating_since(began);
    assert!(took >= Duration::from_millis(400), "{took:?}");
    line.write_all_at(b"p", 0).unwrap();
    drop(line);
    Ask::get("/v1/lines?name=a").send(served.addr).await.is(200);
    let ask = Ask::get("/v1/lines").with("palisade-timeout", "soon");
    ask.send(served.addr).await.refuses(400, "invalid_argument");
}

#[tokio::test]
async fn what_is_too_long_for_an_engine_is_refused() {
    let served = serve().await;
    let long = "x".repeat(2_000);
    for field in ["label", "owner"] {
        let claim = json!({"name": "a", field: long});
        let refused = Ask::post("/v1/claims", &claim).send(served.addr).await;
        refused.refuses(400, "invalid_argument");
    }
    let claim = json!({"name": "a", "value": "x".repeat(70_000)});
    let refused = Ask::post("/v1/claims", &claim).send(served.addr).await;
    refused.refuses(400, "invalid_argument");
    assert_eq!(served.line("a").await, (0, 0));
}

#[tokio::test]
async fn a_connection_may_be_silent_between_requests_but_not_within_a_head() {
    // Both are idle for longer than a head may take.
    let served = serve().await;
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    let head = format!("GET /healthz HTTP/1.1\r\nhost: {}\r\n\r\n", served.addr);
    for pause in [0, 12] {
        tokio::time::sleep(Duration::from_secs(pause)).await;
        stream.write_all(head.as_bytes()).await.unwrap();
        read_until(&mut stream, &mut Vec::new(), r#"{"status":"ok"}"#).await;
    }
    let began = BootTime::now();
    stream.write_all(&head.as_bytes()[..20]).await.unwrap();
    let mut rest = Vec::new();
    let closed = tokio::time::timeout(LIMIT, stream.read_to_end(&mut rest)).await;
    closed.expect("it is closed").unwrap();
    let took = BootTime::now().saturating_since(began);
    assert!(
        took > Duration::from_secs(5),
        "a head has some time: {took:?}"
    );
}
