//! A hostile client with few rights, and what others notice of it.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use palisade::BootTime;
use palisade_gateway::{Limits, new_token};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::support::*;

/// A gateway with principals of these rights, and their tokens.
async fn principals<const N: usize>(
    limits: Limits,
    rights: [(&str, &str); N],
) -> (Served, [String; N]) {
    let made = rights.map(|_| new_token());
    let mut text = String::new();
    for ((name, rights), (_, hash)) in rights.iter().zip(&made) {
        text += &format!("[[principal]]\nname = {name:?}\ntoken_sha256 = {hash:?}\n{rights}\n");
    }
    let with = With {
        access: Some(text),
        limits: Some(limits),
        ..With::default()
    };
    let tokens = made.map(|(token, _)| format!("Bearer {token}"));
    (serve_with(with).await, tokens)
}

const ALL: &str = "use = [\"\"]";

async fn open(served: &Served, token: &str) -> String {
    let ask = Ask::post("/v1/sessions", &json!({})).with("authorization", token);
    let opened = ask.send(served.addr).await.is(201);
    opened["secret"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn ids_have_a_limit_wherever_they_are_sent() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let long = "x".repeat(129);
    for (path, body) in [
        ("/v1/claims", json!({"name": "a", "id": long})),
        ("/v1/claims/wait", json!({"id": long})),
        ("/v1/claims/amend", json!({"id": long, "value": "v"})),
        ("/v1/claims/release", json!({"id": long})),
        ("/v1/sessions/keepalive", json!({"claims": [long]})),
    ] {
        let said = served.post(path, &secret, &body).await;
        let said = said.refuses(400, "invalid_argument");
        let detail = said["detail"].as_str().unwrap();
        assert!(detail.contains("128 bytes"), "{path}: {detail}");
    }
    let claim = "x".repeat(1025);
    let evict = json!({"name": "a", "claim": claim, "how": "force", "reason": "r"});
    let refused = Ask::post("/v1/evictions", &evict).send(served.addr).await;
    refused.refuses(400, "invalid_argument");
}

#[tokio::test]
async fn a_keep_alive_names_each_claim_once_and_no_more_than_there_may_be() {
    let limits = Limits {
        claims: 300,
        ..Limits::default()
    };
    let (served, [token]) = principals(limits, [("p", ALL)]).await;
    let secret = open(&served, &token).await;
    let keep = async |claims: Value| {
        let ask = Ask::post("/v1/sessions/keepalive", &json!({"claims": claims}));
        let ask = ask.session(&secret).with("authorization", &token);
        ask.send(served.addr).await
    };
    let ids = |count: usize| Value::from((0..count).map(|at| at.to_string()).collect::<Vec<_>>());
    assert_eq!(
        keep(ids(300)).await.is(200)["claims"]
            .as_array()
            .unwrap()
            .len(),
        300
    );
    let said = keep(ids(301)).await.refuses(400, "invalid_argument");
    assert!(said.to_string().contains("300"), "{said}");
    let said = keep(json!(["a", "b", "a"]))
        .await
        .refuses(400, "invalid_argument");
    assert!(said.to_string().contains("twice"), "{said}");
}

#[tokio::test]
async fn who_may_use_nothing_gets_no_session() {
    let (served, [viewer]) = principals(Limits::default(), [("viewer", "see = [\"\"]")]).await;
    let ask = Ask::post("/v1/sessions", &json!({})).with("authorization", &viewer);
    ask.send(served.addr).await.refuses(403, "forbidden");
}

/// Sixteen connections that send the greatest keep-alives beside one that keeps its own claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn great_keep_alives_delay_nobody_else() {
    let rights = [
        ("flood", "use = [\"flood/\"]"),
        ("calm", "use = [\"calm/\"]"),
    ];
    let (served, [flood, calm]) = principals(Limits::default(), rights).await;
    let secret = open(&served, &calm).await;
    let claim = Ask::post("/v1/claims", &json!({"name": "calm/a", "id": "a"})).session(&secret);
    claim
        .with("authorization", &calm)
        .send(served.addr)
        .await
        .is(200);
    let theirs = open(&served, &flood).await;
    // One of many short ids, one of as many as are allowed, each as long as is allowed.
    let short: Vec<_> = (0..120_000).map(|at| format!("{at:x}")).collect();
    let long: Vec<_> = (0..9_000).map(|at| format!("{at:0>100}")).collect();
    // Threads of their own: what they cost is not the gateway's time.
    let addr = served.addr;
    let send = move |bytes: &[u8]| {
        let mut stream = std::net::TcpStream::connect(addr).unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..12]).into_owned()
    };
    let keep = Ask::post("/v1/sessions/keepalive", &json!({"claims": ["a"]})).session(&secret);
    let keep = keep.with("authorization", &calm).bytes(addr);
    let p99 = move || {
        let mut took = Vec::new();
        let until = Instant::now() + Duration::from_secs(3);
        while Instant::now() < until {
            let began = Instant::now();
            assert_eq!(send(&keep), "HTTP/1.1 200");
            took.push(began.elapsed());
            std::thread::sleep(Duration::from_millis(5));
        }
        took.sort_unstable();
        let p99 = took[took.len() * 99 / 100];
        println!(
            "{} keep-alives, p50 {:?}, p99 {p99:?}",
            took.len(),
            took[took.len() / 2]
        );
        p99
    };
    // On a busy machine it is slow without them, too.
    let (usual, p99) = tokio::task::spawn_blocking(move || (p99(), p99))
        .await
        .unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let mut floods = Vec::new();
    for at in 0..16 {
        let claims = if at % 2 == 0 { &short } else { &long };
        let ask = Ask::post("/v1/sessions/keepalive", &json!({"claims": claims}));
        let ask = ask.session(&theirs).with("authorization", &flood);
        let (bytes, done) = (ask.bytes(addr), Arc::clone(&done));
        assert!(bytes.len() < 1024 * 1024 + 4096);
        let expected = ["HTTP/1.1 400", "HTTP/1.1 200"][at % 2];
        floods.push(std::thread::spawn(move || {
            while !done.load(Ordering::Acquire) {
                assert_eq!(send(&bytes), expected);
            }
        }));
    }
    let flooded = tokio::task::spawn_blocking(p99).await.unwrap();
    done.store(true, Ordering::Release);
    for flood in floods {
        tokio::task::spawn_blocking(|| flood.join().unwrap())
            .await
            .unwrap();
    }
    let most = Duration::from_millis(100).max(10 * usual);
    assert!(flooded <= most, "{flooded:?}, {usual:?} without the flood");
}

#[tokio::test]
async fn a_claim_that_may_not_wait_is_not_in_the_line() {
    let limits = Limits {
        waiting: 1,
        ..Limits::default()
    };
    let with = With {
        limits: Some(limits),
        ..With::default()
    };
    let served = serve_with(with).await;
    let secret = served.session("30s").await;
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    let events = Ask::get("/v1/events").bytes(served.addr);
    stream.write_all(&events).await.unwrap();
    read_until(&mut stream, &mut Vec::new(), "alive").await;
    let claim = json!({"name": "a", "id": "one", "queue": true});
    let refused = served.post("/v1/claims", &secret, &claim).await;
    let refused = refused.refuses(429, "too_many");
    assert_eq!(refused["outcome"], "not_applied");
    let kept = json!({"claims": ["one"]});
    let kept = served
        .post("/v1/sessions/keepalive", &secret, &kept)
        .await
        .is(200);
    assert_eq!(kept["claims"][0]["state"], "no_claim");
    assert_eq!(served.line("a").await, (0, 0));
}

/// What is stored with a claim is bounded together, not only each part.
#[tokio::test]
async fn the_values_of_a_principal_are_bounded_together() {
    let limits = Limits {
        claims: 100,
        ..Limits::default()
    };
    let (served, [token]) = principals(limits, [("p", ALL)]).await;
    let secret = open(&served, &token).await;
    let mut refused = None;
    for at in 0..100 {
        let claim =
            json!({"name": format!("x{at}"), "id": at.to_string(), "value": "v".repeat(65_000)});
        let ask = Ask::post("/v1/claims", &claim).session(&secret);
        let reply = ask.with("authorization", &token).send(served.addr).await;
        if reply.status != 200 {
            refused = Some((at, reply));
            break;
        }
    }
    let (at, reply) = refused.expect("a bound");
    assert!(at >= 10, "{at}");
    reply.refuses(429, "too_many");
}

/// An agent of one principal is never taken for that of another.
#[tokio::test]
async fn a_forged_agent_makes_nobody_give_way() {
    let rights = [("victim", ALL), ("forger", ALL)];
    let (served, [victim, forger]) = principals(Limits::default(), rights).await;
    let secret = open(&served, &victim).await;
    let claim = async |name: &str, id: &str, agent: &str, status: u16| {
        let body = json!({"name": name, "id": id, "agent": agent, "queue": true});
        let ask = Ask::post("/v1/claims", &body).session(&secret);
        ask.with("authorization", &victim)
            .send(served.addr)
            .await
            .is(status);
    };
    claim("a", "wa", "w", 200).await;
    claim("b", "vb", "v", 200).await;
    claim("b", "wb", "w", 202).await;
    let lines = Ask::get("/v1/lines?name=b&records=true").with("authorization", &forger);
    let lines = lines.send(served.addr).await.is(200);
    let holder = &lines["lines"][0]["holders"][0];
    // The holder of b seems to wait for a, which waits for b.
    let theirs = open(&served, &forger).await;
    let deadlocks = async || {
        let ask = Ask::get("/v1/deadlocks").with("authorization", &victim);
        ask.send(served.addr).await.is(200)["deadlocks"].clone()
    };
    let claim = json!({"name": "a", "id": "forged", "queue": true, "owner": holder["record"]});
    let ask = Ask::post("/v1/claims", &claim).session(&theirs);
    ask.with("authorization", &forger)
        .send(served.addr)
        .await
        .is(202);
    assert_eq!(deadlocks().await, json!([]));
    // Nor is a claim of its own, which is said to run inside that of another.
    let record = json!({"owner": "o", "host": "h", "pid": 1, "since": 1, "agent": {
        "client": "c", "name": "n", "ttl": 30_000, "yields": true, "yields_nested": true,
        "holds": ["b"], "within": [{"claim": holder["id"], "name": "b"}]}});
    let claim = json!({"name": "a", "id": "nested", "queue": true, "owner": record});
    let ask = Ask::post("/v1/claims", &claim).session(&theirs);
    ask.with("authorization", &forger)
        .send(served.addr)
        .await
        .is(202);
    assert_eq!(deadlocks().await, json!([]));
}

#[tokio::test]
async fn records_name_only_what_may_be_seen() {
    let rights = [("worker", ALL), ("viewer", "see = [\"open/\"]")];
    let (served, [worker, viewer]) = principals(Limits::default(), rights).await;
    let secret = open(&served, &worker).await;
    let record = json!({"owner": "o", "host": "h", "pid": 1, "since": 1, "agent": {
        "client": "c", "name": "n", "ttl": 1000, "holds": ["hidden/a", "open/b"],
        "within": [{"claim": "1f", "name": "open/c"}, {"claim": "2f", "name": "hidden/d"}]}});
    let claim = json!({"name": "open/x", "owner": record});
    let ask = Ask::post("/v1/claims", &claim).session(&secret);
    ask.with("authorization", &worker)
        .send(served.addr)
        .await
        .is(200);
    for path in [
        "/v1/lines?records=true",
        "/v1/lines?name=open/x&records=true",
        "/v1/lines",
    ] {
        let shown = Ask::get(path)
            .with("authorization", &viewer)
            .send(served.addr)
            .await
            .is(200);
        let holder = &shown["lines"][0]["holders"][0];
        assert!(!shown.to_string().contains("hidden/"), "{path}: {shown}");
        assert_eq!(
            holder["parent"],
            Value::Null,
            "{path}: its parent is hidden"
        );
        if path.contains("records") {
            let agent = &holder["record"]["agent"];
            assert_eq!(agent["holds"], json!(["open/b"]));
            assert_eq!(agent["within"], json!([{"claim": "1f", "name": "open/c"}]));
        }
    }
    let shown = Ask::get("/v1/lines?records=true").with("authorization", &worker);
    assert!(
        shown
            .send(served.addr)
            .await
            .is(200)
            .to_string()
            .contains("hidden/d")
    );
}

#[tokio::test]
async fn refusals_say_who_where_and_what_and_a_flood_hides_no_others() {
    let rights = [
        ("billing", "use = [\"billing/\"]"),
        ("other", "use = [\"other/\"]"),
    ];
    let (served, [billing, other]) = principals(Limits::default(), rights).await;
    let ask = |token: &str, name: &str| {
        let claim = json!({"name": name});
        Ask::post("/v1/claims", &claim)
            .with("authorization", token)
            .send(served.addr)
    };
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(1200) {
        ask("Bearer wrong", "billing/x")
            .await
            .refuses(401, "unauthorized");
    }
    for _ in 0..200 {
        ask(&other, "billing/flood").await.refuses(403, "forbidden");
    }
    ask(&billing, "other/one").await.refuses(403, "forbidden");
    served.until_logged("\"other/one\"").await;
    let log = served.log.text();
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |name: &str| lines.iter().find(|line| line["lock"] == name).unwrap();
    let one = of("other/one");
    assert_eq!(
        (&one["principal"], &one["peer"]),
        (&json!("billing"), &json!("127.0.0.1"))
    );
    assert_eq!(of("billing/flood")["principal"], "other");
    let unknown = lines
        .iter()
        .find(|line| line["code"] == "unauthorized")
        .unwrap();
    assert_eq!(
        (&unknown["principal"], &unknown["peer"]),
        (&Value::Null, &json!("127.0.0.1"))
    );
}

#[tokio::test]
async fn streams_of_events_end_with_their_token() {
    let rights = [("p", ALL), ("stays", ALL)];
    let (served, [token, stays]) = principals(Limits::default(), rights).await;
    let secret = open(&served, &token).await;
    let listen = async |ask: Ask<'_>| {
        let mut stream = TcpStream::connect(served.addr).await.unwrap();
        stream.write_all(&ask.bytes(served.addr)).await.unwrap();
        read_until(&mut stream, &mut Vec::new(), "alive").await;
        stream
    };
    let mut revoked = vec![
        listen(Ask::get("/v1/events").with("authorization", &token)).await,
        listen(
            Ask::get("/v1/sessions/events")
                .session(&secret)
                .with("authorization", &token),
        )
        .await,
    ];
    let mut kept = listen(Ask::get("/v1/events").with("authorization", &stays)).await;
    let path = served.dir.path().join("access.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let at = text.rfind("[[principal]]").unwrap();
    std::fs::write(&path, &text[at..]).unwrap();
    for stream in &mut revoked {
        let mut rest = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(8), stream.read_to_end(&mut rest));
        ended.await.expect("it ends").unwrap();
    }
    let _held = served.engine.mutex("x").lock().await.unwrap();
    read_until(&mut kept, &mut Vec::new(), "changed").await;
}

#[tokio::test]
async fn a_second_host_is_refused_and_a_chunked_body_is_the_last() {
    let served = serve().await;
    let addr = served.addr;
    let head = format!(
        "GET /healthz HTTP/1.1\r\nhost: {addr}\r\nhost: evil.example\r\nconnection: close\r\n\r\n"
    );
    for head in [
        head.clone(),
        head.replace("/healthz", "/v1/lines"),
        head.replace("evil.example", &addr.to_string()),
    ] {
        let stream = TcpStream::connect(addr).await.unwrap();
        exchange(stream, head.as_bytes())
            .await
            .refuses(400, "invalid_argument");
    }
    // What follows a body with both lengths may be meant as another request by whoever is between.
    let next = format!("GET /healthz HTTP/1.1\r\nhost: {addr}\r\n\r\n");
    for both in [
        "content-length: 4\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 4",
    ] {
        let text = format!(
            "POST /v1/sessions HTTP/1.1\r\nhost: {addr}\r\nauthorization: Bearer {TOKEN}\r\n\
             content-type: application/json\r\n{both}\r\n\r\n0\r\n\r\n{next}"
        );
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut answer));
        let _ = read.await.expect("the connection is closed");
        let answer = String::from_utf8_lossy(&answer);
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    }
}

#[tokio::test]
async fn a_client_that_sends_no_more_still_gets_its_answer() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let held = served.engine.mutex("a").lock().await.unwrap();
    let claim = json!({"name": "a", "id": "one", "wait": "10s", "queue": true});
    let ask = Ask::post("/v1/claims", &claim).session(&secret);
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    stream.write_all(&ask.bytes(served.addr)).await.unwrap();
    stream.shutdown().await.unwrap();
    served.until_line("a", (1, 1)).await;
    held.release().await.unwrap();
    let mut answer = Vec::new();
    let read = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer));
    read.await.expect("an answer").unwrap();
    assert_eq!(parse(&answer).is(200)["state"], "held");
    // A body that is cut off is told at once.
    let cut = format!(
        "POST /v1/claims HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {TOKEN}\r\n\
         content-type: application/json\r\ncontent-length: 100\r\n\r\n{{",
        served.addr
    );
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    let began = BootTime::now();
    stream.write_all(cut.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let _ = tokio::time::timeout(LIMIT, stream.read_to_end(&mut Vec::new()))
        .await
        .unwrap();
    assert!(BootTime::now().saturating_since(began) < Duration::from_secs(5));
}

#[tokio::test]
async fn a_refusal_names_the_field() {
    let served = serve().await;
    let secret = served.session("30s").await;
    for (path, body, field) in [
        (
            "/v1/claims",
            json!({"name": "a", "weight": "two"}),
            "weight",
        ),
        (
            "/v1/claims",
            json!({"name": "a", "mode": "hunter2"}),
            "mode",
        ),
        (
            "/v1/claims",
            json!({"name": "a", "agent": {"nome": 1}}),
            "agent",
        ),
        ("/v1/claims", json!({"names": "a"}), "names"),
        ("/v1/claims", json!({"wait": "1s"}), "name"),
        (
            "/v1/claims",
            json!({"name": "a", "wait": "hunter2"}),
            "wait",
        ),
        ("/v1/claims/release", json!({}), "id"),
        ("/v1/sessions/keepalive", json!({"claims": [1]}), "claims"),
        (
            "/v1/sessions/keepalive",
            json!({"claims": "hunter2"}),
            "claims",
        ),
        ("/v1/sessions", json!({"ttl": 30}), "ttl"),
        ("/v1/sessions", json!(["hunter2"]), "object"),
    ] {
        let said = served.post(path, &secret, &body).await;
        let said = said.refuses(400, "invalid_argument");
        let detail = said["detail"].as_str().unwrap();
        assert!(
            detail.contains(&format!("`{field}`")) || field == "object" && detail.contains(field),
            "{body}: {detail}"
        );
        assert!(!detail.contains("hunter2"), "{detail}");
    }
}

#[tokio::test]
async fn lines_come_in_pages_of_bytes() {
    let served = serve().await;
    let secret = served.session("30s").await;
    // 7.8 MiB of values.
    for at in 0..120 {
        let claim =
            json!({"name": format!("x{at:03}"), "id": at.to_string(), "value": "v".repeat(65_000)});
        served.post("/v1/claims", &secret, &claim).await.is(200);
    }
    let (mut after, mut names, mut pages) = (String::new(), Vec::new(), 0);
    loop {
        let path = format!("/v1/lines?limit=10000&after={after}");
        let bytes = Ask::get(&path).bytes(served.addr);
        let stream = TcpStream::connect(served.addr).await.unwrap();
        let page = exchange(stream, &bytes).await.is(200);
        assert!(
            page.to_string().len() <= 4 * 1024 * 1024,
            "{}",
            page.to_string().len()
        );
        names.extend(
            page["lines"]
                .as_array()
                .unwrap()
                .iter()
                .map(|line| line["name"].clone()),
        );
        pages += 1;
        match page["next"].as_str() {
            Some(next) => after = next.to_owned(),
            None => break,
        }
    }
    assert!(pages > 1);
    let expected: Vec<_> = (0..120).map(|at| json!(format!("x{at:03}"))).collect();
    assert_eq!(names, expected);
}

/// Pipelined requests whose answers nobody reads.
#[tokio::test]
async fn an_answer_that_nobody_reads_ends() {
    let served = serve().await;
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    let ask = format!(
        "GET /openapi.json HTTP/1.1\r\nhost: {}\r\n\r\n",
        served.addr
    );
    let began = Instant::now();
    let flood = async { while stream.write_all(ask.as_bytes()).await.is_ok() {} };
    let ended = tokio::time::timeout(Duration::from_secs(50), flood).await;
    ended.expect("the connection ends");
    assert!(
        began.elapsed() > Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
}

/// They come from one address, as a crowd without tokens might.
#[tokio::test]
async fn many_programs_of_a_machine_may_start_at_once() {
    let served = serve().await;
    let asks = (0..300).map(|_| Ask::get("/v1/lines?name=a").send(served.addr));
    for reply in futures_util::future::join_all(asks).await {
        reply.is(200);
    }
}
