//! Access control, one test for each rule; and no secret in anything that is logged.

use std::time::Duration;

use palisade::BootTime;
use palisade_gateway::{Limits, new_token};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::support::*;

#[tokio::test]
async fn no_token_and_a_wrong_one_are_refused() {
    let served = serve().await;
    let claim = || Ask::post("/v1/claims", &json!({"name": "a"}));
    for token in [
        "",
        "Bearer wrong",
        "Bearer ",
        "Basic YTpi",
        &format!("Bearer {TOKEN}x"),
    ] {
        let refused = claim().with("authorization", token).send(served.addr).await;
        assert!(
            refused.head.contains("www-authenticate: bearer"),
            "{}",
            refused.head
        );
        refused.refuses(401, "unauthorized");
    }
    assert_eq!(served.line("a").await, (0, 0));
    served.until_logged(r#""event":"refused""#).await;
    claim().send(served.addr).await.is(200);
}

/// Two principals and an operator; their tokens.
fn access() -> (String, [String; 3]) {
    let made = [new_token(), new_token(), new_token()];
    let text = format!(
        r#"
[[principal]]
name = "billing"
token_sha256 = "{}"
use = ["billing/"]
see = ["shared/"]

[[principal]]
name = "other"
token_sha256 = "{}"
use = ["other/"]

[[principal]]
name = "operator"
token_sha256 = "{}"
operate = ["billing/"]
"#,
        made[0].1, made[1].1, made[2].1
    );
    (text, made.map(|(token, _)| format!("Bearer {token}")))
}

pub(crate) async fn guarded() -> (Served, [String; 3]) {
    let (text, tokens) = access();
    let access = Some(text);
    (
        serve_with(With {
            access,
            ..With::default()
        })
        .await,
        tokens,
    )
}

#[tokio::test]
async fn a_name_outside_of_the_prefix_is_refused() {
    let (served, [billing, ..]) = guarded().await;
    let claim = |name: &str| {
        Ask::post("/v1/claims", &json!({"name": name})).with("authorization", &billing)
    };
    claim("billing/card").send(served.addr).await.is(200);
    // A name that only shares letters with the prefix, the bare name, and one that may only be
    // seen.
    for name in [
        "billing-x",
        "billing-x/y",
        "billing",
        "other/a",
        "shared/a",
        "a",
    ] {
        claim(name)
            .send(served.addr)
            .await
            .refuses(403, "forbidden");
        assert_eq!(served.line(name).await, (0, 0));
    }
}

#[tokio::test]
async fn only_what_may_be_seen_is_shown() {
    let (served, [billing, other, operator]) = guarded().await;
    let held = served.engine.mutex("billing/card").lock().await.unwrap();
    let lines = |token: &str| Ask::get("/v1/lines").with("authorization", token);
    let shown = lines(&billing).send(served.addr).await.is(200);
    assert_eq!(shown["lines"].as_array().unwrap().len(), 1);
    let shown = lines(&other).send(served.addr).await.is(200);
    assert_eq!(shown["lines"], json!([]));
    for path in [
        "/v1/lines?name=billing/card",
        "/v1/leaders?name=billing/card",
        "/v1/events?prefix=billing/",
    ] {
        let peek = Ask::get(path).with("authorization", &other);
        peek.send(served.addr).await.refuses(403, "forbidden");
    }
    // A refusal does not reveal whether the name exists.
    let asks = ["/v1/lines?name=billing/card", "/v1/lines?name=billing/none"];
    let mut said = Vec::new();
    for path in asks {
        said.push(
            Ask::get(path)
                .with("authorization", &other)
                .send(served.addr)
                .await
                .json,
        );
    }
    assert_eq!(said[0], said[1]);
    let evict = json!({"name": "billing/card", "how": "force", "reason": "test"});
    for token in [&billing, &other] {
        let evict = Ask::post("/v1/evictions", &evict).with("authorization", token);
        evict.send(served.addr).await.refuses(403, "forbidden");
    }
    assert!(held.is_valid());
    let evict = Ask::post("/v1/evictions", &evict).with("authorization", &operator);
    evict.send(served.addr).await.is(200);
    held.lost().await;
}

#[tokio::test]
async fn the_session_of_another_principal_is_not_there() {
    let (served, [billing, other, _]) = guarded().await;
    let open = Ask::post("/v1/sessions", &json!({})).with("authorization", &billing);
    let opened = open.send(served.addr).await.is(201);
    let secret = opened["secret"].as_str().unwrap();
    for (method, path, body) in [
        ("POST", "/v1/sessions/keepalive", r#"{"claims":[]}"#),
        ("POST", "/v1/claims", r#"{"name":"other/a"}"#),
        ("POST", "/v1/claims/release", r#"{"id":"x"}"#),
        ("GET", "/v1/sessions/events", ""),
        ("DELETE", "/v1/sessions", ""),
    ] {
        let ask = Ask::new(method, path, body)
            .with("authorization", &other)
            .session(secret);
        ask.send(served.addr).await.refuses(410, "no_session");
    }
    let own = Ask::post("/v1/sessions/keepalive", &json!({})).with("authorization", &billing);
    own.session(secret).send(served.addr).await.is(200);
}

#[tokio::test]
async fn another_host_and_another_origin_are_refused() {
    let served = serve().await;
    for host in [
        "evil.example",
        "evil.example:7420",
        "127.0.0.1",
        "localhost.evil.example",
    ] {
        let rebound = Ask::get("/v1/lines").with("host", host);
        rebound.send(served.addr).await.refuses(421, "wrong_host");
    }
    let local = format!("localhost:{}", served.addr.port());
    Ask::get("/v1/lines")
        .with("host", &local)
        .send(served.addr)
        .await
        .is(200);
    let claim = || Ask::post("/v1/claims", &json!({"name": "a"}));
    for origin in ["https://evil.example", "null", "http://127.0.0.1:1"] {
        let foreign = claim().with("origin", origin);
        foreign.send(served.addr).await.refuses(403, "forbidden");
    }
    assert_eq!(served.line("a").await, (0, 0));
    let own = format!("http://{}", served.addr);
    claim().with("origin", &own).send(served.addr).await.is(200);
}

#[tokio::test]
async fn a_form_is_no_request_and_a_get_changes_nothing() {
    let served = serve().await;
    for kind in [
        "application/x-www-form-urlencoded",
        "text/plain",
        "multipart/form-data",
        "",
    ] {
        let form = Ask::post("/v1/claims", &json!({"name": "a"})).with("content-type", kind);
        form.send(served.addr).await.refuses(415, "not_json");
    }
    for path in [
        "/v1/claims",
        "/v1/sessions",
        "/v1/evictions",
        "/v1/claims/release",
    ] {
        Ask::get(path)
            .send(served.addr)
            .await
            .refuses(405, "method_not_allowed");
    }
    Ask::get("/../etc/passwd")
        .send(served.addr)
        .await
        .refuses(404, "not_found");
    assert_eq!(served.line("a").await, (0, 0));
}

#[tokio::test]
async fn answers_are_not_framed_sniffed_or_cached() {
    let served = serve().await;
    for path in ["/healthz", "/v1/engine", "/nothing"] {
        let head = Ask::get(path).send(served.addr).await.head;
        for header in [
            "x-content-type-options: nosniff",
            "x-frame-options: deny",
            "content-security-policy: default-src 'none'",
            "cache-control: no-store",
        ] {
            assert!(head.contains(header), "{path}: {head}");
        }
    }
}

#[tokio::test]
async fn no_secret_is_taken_in_an_address_or_written_to_the_log() {
    let served = serve().await;
    let secret = served.session("1s").await;
    for key in ["token", "access_token", "secret", "session", "Token"] {
        let path = format!("/v1/lines?{key}={TOKEN}");
        let ask = Ask::get(&path).with("authorization", "");
        let refused = ask.send(served.addr).await.refuses(400, "secret_in_query");
        assert!(!refused.to_string().contains(TOKEN));
    }
    // In every place where it does not belong.
    let path = format!("/{TOKEN}");
    Ask::get(&path)
        .with("authorization", "")
        .send(served.addr)
        .await
        .refuses(404, "not_found");
    let bad = json!({"ttl": TOKEN, "tokens": secret});
    let said = Ask::post("/v1/sessions", &bad)
        .send(served.addr)
        .await
        .refuses(400, "invalid_argument");
    assert!(!said.to_string().contains(TOKEN) && !said.to_string().contains(&secret));
    let wrong = Ask::get("/v1/lines").with("authorization", &format!("Bearer {secret}"));
    wrong.send(served.addr).await.refuses(401, "unauthorized");
    served
        .post("/v1/claims", &secret, &json!({"name": "a", "id": "one"}))
        .await
        .is(200);
    served.until_logged("session_ended").await;
    let log = served.log.text();
    assert!(!log.contains(TOKEN) && !log.contains(&secret), "{log}");
    let lines = Ask::get("/v1/lines")
        .send(served.addr)
        .await
        .json
        .to_string();
    assert!(!lines.contains(&secret));
}

#[tokio::test]
async fn a_great_body_is_refused_before_it_is_read() {
    let served = serve().await;
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    let head = format!(
        "POST /v1/claims HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {TOKEN}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        served.addr,
        1u64 << 30
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // No body is sent: the announced length is enough.
    let mut answer = Vec::new();
    let read = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer));
    let _ = read.await.expect("an answer in time");
    parse(&answer).refuses(413, "too_large");
    // A body without a length.
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    let head = format!(
        "POST /v1/claims HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {TOKEN}\r\n\
         content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
        served.addr
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let (mut reading, mut writing) = stream.split();
    let endless = async {
        let chunk = [b"10000\r\n".as_slice(), &[b' '; 0x10000], b"\r\n"].concat();
        while writing.write_all(&chunk).await.is_ok() {}
        std::future::pending().await
    };
    let mut answer = vec![0; 4096];
    let length = tokio::select! {
        length = reading.read(&mut answer) => length.unwrap(),
        () = endless => 0,
    };
    assert_eq!(parse(&answer[..length]).status, 413);
}

#[tokio::test]
async fn a_header_bomb_is_refused() {
    let served = serve().await;
    for (count, size) in [(1, 64 * 1024), (2_000, 10)] {
        let mut text = format!("GET /healthz HTTP/1.1\r\nhost: {}\r\n", served.addr);
        for at in 0..count {
            text += &format!("x-{at}: {}\r\n", "y".repeat(size));
        }
        text += "\r\n";
        let stream = TcpStream::connect(served.addr).await.unwrap();
        let reply = exchange(stream, text.as_bytes()).await;
        // Hyper answers 431, or has closed before the answer could be read.
        assert!(matches!(reply.status, 431 | 0), "{reply:?}");
    }
    Ask::get("/healthz").send(served.addr).await.is(200);
}

/// Both ends of every connection are in this process.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let current = maximum;
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

#[tokio::test]
async fn slow_heads_cost_nobody_else_and_are_closed() {
    raise_file_limit();
    let limits = Some(Limits {
        per_peer: 0,
        ..Limits::default()
    });
    let served = serve_with(With {
        limits,
        ..With::default()
    })
    .await;
    let began = BootTime::now();
    let mut slow = Vec::new();
    // This many connections are idle.
    for _ in 0..2_000 {
        let mut stream = TcpStream::connect(served.addr).await.unwrap();
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nhost: ")
            .await
            .unwrap();
        slow.push(stream);
    }
    for _ in 0..20 {
        Ask::get("/healthz").send(served.addr).await.is(200);
    }
    let mut rest = Vec::new();
    let closed = slow[0].read_to_end(&mut rest);
    let _ = tokio::time::timeout(LIMIT, closed)
        .await
        .expect("it is closed");
    let took = BootTime::now().saturating_since(began);
    assert!(
        took > Duration::from_secs(5),
        "a head has some time: {took:?}"
    );
}

#[tokio::test]
async fn sessions_claims_and_waiting_requests_are_bounded() {
    let limits = Some(Limits {
        sessions: 2,
        claims: 2,
        waiting: 1,
        ..Limits::default()
    });
    let served = serve_with(With {
        limits,
        ..With::default()
    })
    .await;
    let secret = served.session("30s").await;
    served.session("30s").await;
    let third = Ask::post("/v1/sessions", &json!({}))
        .send(served.addr)
        .await;
    assert!(third.head.contains("retry-after"), "{}", third.head);
    third.refuses(429, "too_many");
    for id in ["one", "two"] {
        served
            .post("/v1/claims", &secret, &json!({"name": id, "id": id}))
            .await
            .is(200);
    }
    let third = json!({"name": "three", "id": "three"});
    served
        .post("/v1/claims", &secret, &third)
        .await
        .refuses(429, "too_many");
    // A released claim frees its place in the limit.
    served
        .post("/v1/claims/release", &secret, &json!({"id": "two"}))
        .await
        .is(200);
    let until = BootTime::now() + LIMIT;
    while served.post("/v1/claims", &secret, &third).await.status == 429 {
        assert!(!until.has_passed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_ttl_is_bounded() {
    let limits = Some(Limits {
        ttl: Duration::from_secs(10),
        ..Limits::default()
    });
    let served = serve_with(With {
        limits,
        ..With::default()
    })
    .await;
    let asked = Ask::post("/v1/sessions", &json!({"ttl": "10001ms"}));
    let refused = asked
        .send(served.addr)
        .await
        .refuses(400, "invalid_argument");
    assert!(
        refused["detail"].as_str().unwrap().contains("at most 10s"),
        "{refused}"
    );
    served.session("10s").await;
    // Whoever asks for none gets no longer one, with a session of its own or without.
    let opened = Ask::post("/v1/sessions", &json!({}))
        .send(served.addr)
        .await;
    assert_eq!(opened.is(201)["ttl_ms"], 10_000);
    let claim = Ask::post("/v1/claims", &json!({"name": "a", "id": "a"}));
    let claimed = claim.send(served.addr).await;
    assert_eq!(claimed.is(200)["session"]["ttl_ms"], 10_000);
    let engine = Ask::get("/v1/engine?check=false").send(served.addr).await;
    assert_eq!(engine.is(200)["capability"]["ttl_ms"]["max"], 10_000);
}

#[tokio::test]
async fn streams_of_events_are_bounded_like_waiting_requests() {
    let limits = Some(Limits {
        waiting: 1,
        ..Limits::default()
    });
    let served = serve_with(With {
        limits,
        ..With::default()
    })
    .await;
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    let events = Ask::get("/v1/events").bytes(served.addr);
    stream.write_all(&events).await.unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    let more = || Ask::get("/v1/events").send(served.addr);
    let refused = more().await;
    assert!(refused.head.contains("retry-after"), "{}", refused.head);
    refused.refuses(429, "too_many");
    drop(stream);
    let leader = || Ask::get("/v1/leaders?name=a").send(served.addr);
    let until = BootTime::now() + LIMIT;
    while leader().await.status == 429 {
        assert!(!until.has_passed(), "a stream that is gone still counts");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_right_that_is_taken_away_is_not_extended() {
    let (served, [billing, ..]) = guarded().await;
    let open = Ask::post("/v1/sessions", &json!({"ttl": "3s"})).with("authorization", &billing);
    let opened = open.send(served.addr).await.is(201);
    let secret = opened["secret"].as_str().unwrap();
    let ask = |path, body| {
        let ask = Ask::post(path, &body).with("authorization", &billing);
        ask.session(secret).send(served.addr)
    };
    ask("/v1/claims", json!({"name": "billing/a", "id": "one"}))
        .await
        .is(200);
    let path = served.dir.path().join("access.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace(r#"["billing/"]"#, r#"["elsewhere/"]"#)).unwrap();
    served.until_logged("access_read").await;
    let until = BootTime::now() + LIMIT;
    // However often it is kept alive.
    while served.line("billing/a").await != (0, 0) {
        ask("/v1/sessions/keepalive", json!({"claims": ["one"]}))
            .await
            .is(200);
        let wait = ask("/v1/claims/wait", json!({"id": "one"})).await;
        assert!(matches!(wait.status, 403 | 410), "{wait:?}");
        assert!(!until.has_passed(), "it is extended");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_broken_access_file_is_refused_and_the_old_one_stays() {
    let (served, [billing, ..]) = guarded().await;
    let path = served.dir.path().join("access.toml");
    let good = std::fs::read_to_string(&path).unwrap();
    let lines = || Ask::get("/v1/lines").with("authorization", &billing);
    for broken in [
        "[[principal]]\nname = 1",
        "rubbish hunter2",
        &good.replace("billing/", "billing"),
    ] {
        let before = served.log.text().matches("access_broken").count();
        std::fs::write(&path, broken).unwrap();
        let until = BootTime::now() + LIMIT;
        while served.log.text().matches("access_broken").count() == before {
            assert!(!until.has_passed(), "{}", served.log.text());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        lines().send(served.addr).await.is(200);
    }
    assert!(!served.log.text().contains("hunter2"));
    // One without them takes effect.
    std::fs::write(&path, "").unwrap();
    served.until_logged("access_read").await;
    lines().send(served.addr).await.refuses(401, "unauthorized");
}

#[tokio::test]
async fn the_socket_needs_no_token_unless_there_is_an_access_file() {
    let served = serve().await;
    let socket = served.dir.path().join("run/gateway.sock");
    let ask = Ask::get("/v1/lines")
        .with("authorization", "")
        .with("host", "localhost");
    let bytes = ask.bytes(served.addr);
    exchange(UnixStream::connect(&socket).await.unwrap(), &bytes)
        .await
        .is(200);
    let (served, _) = guarded().await;
    let socket = served.dir.path().join("run/gateway.sock");
    let stream = UnixStream::connect(&socket).await.unwrap();
    exchange(stream, &bytes).await.refuses(401, "unauthorized");
    use std::os::unix::fs::PermissionsExt;
    let folder = std::fs::metadata(served.dir.path().join("run")).unwrap();
    assert_eq!(folder.permissions().mode() & 0o777, 0o700);
}
