//! A network between client and gateway that eats answers, cuts, and leads to another replica.

use std::time::Duration;

use palisade::BootTime;
use palisade_testkit::lab::proxy::{Protocol, Proxy, to_client};
use serde_json::{Value, json};

use crate::process::Process;
use crate::support::*;

const TTL: Duration = Duration::from_secs(20);
/// When a client asks again.
const PATIENCE: Duration = Duration::from_millis(700);

/// A client that asks again, by new connections, until it has an answer.
struct Stubborn {
    wire: Wire,
    secret: String,
}

impl Stubborn {
    async fn ask(&self, method: &str, path: &str, body: &Value) -> Reply {
        let until = BootTime::now() + LIMIT;
        loop {
            let secret = Some(self.secret.as_str()).filter(|_| path != "/v1/sessions");
            let secret = secret.or((method == "DELETE").then_some(&self.secret));
            let asked = ask_within(PATIENCE, self.wire, method, path, secret, body).await;
            match asked {
                Ok(reply) => return reply,
                Err(_) => assert!(!until.has_passed(), "{path}: no answer"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eaten_answers_asked_again_are_no_second_claim_and_no_orphan() {
    let site = Site::file();
    let gateway = Process::start(&site.url);
    let outsider = site.outsider().await;
    let proxy = Proxy::start(gateway.addr, Protocol::Http1).unwrap();
    let rounds = if full() { 50 } else { 5 };
    for round in 0..rounds {
        let name = format!("x{round}");
        let client = Stubborn {
            wire: Wire::through(proxy.addr(), gateway.addr),
            secret: format!("{:064x}", rand::random::<u128>()),
        };
        let eaten = |skip: u64| proxy.inject(to_client().nth(skip + 1).eat());
        let ttl = format!("{}ms", TTL.as_millis());
        let guard = eaten(0);
        let opening = json!({"ttl": ttl, "secret": client.secret});
        client.ask("POST", "/v1/sessions", &opening).await.is(201);
        drop(guard);
        let guard = eaten(0);
        let claim = json!({"name": name, "id": "one", "wait": "0s"});
        let first = client.ask("POST", "/v1/claims", &claim).await.is(200);
        drop(guard);
        assert_eq!(line(&outsider, &name).await, (1, 0), "one place");
        let again = client.ask("POST", "/v1/claims", &claim).await.is(200);
        assert_eq!(first.json["token"], again.json["token"]);
        let guard = eaten(0);
        let keep = json!({"claims": ["one"]});
        let kept = client
            .ask("POST", "/v1/sessions/keepalive", &keep)
            .await
            .is(200);
        assert_eq!(kept.json["claims"][0]["state"], "held");
        drop(guard);
        // Another behind it, whose grant is eaten.
        let second = json!({"name": name, "id": "two", "queue": true});
        let guard = eaten(0);
        client.ask("POST", "/v1/claims", &second).await.is(202);
        drop(guard);
        assert_eq!(line(&outsider, &name).await, (1, 1));
        let guard = eaten(0);
        client
            .ask("POST", "/v1/claims/release", &json!({"id": "one"}))
            .await
            .is(200);
        drop(guard);
        let guard = eaten(0);
        let wait = json!({"id": "two", "wait": "300ms"});
        let granted = client.ask("POST", "/v1/claims/wait", &wait).await.is(200);
        assert_eq!(granted.json["state"], "held");
        drop(guard);
        // Copies that were on their way for long.
        let late = client.ask("POST", "/v1/claims", &claim).await;
        assert_eq!((late.status, late.code()), (410, "released"));
        assert_eq!(line(&outsider, &name).await, (1, 0));
        let guard = eaten(0);
        let closed = client.ask("DELETE", "/v1/sessions", &Value::Null).await;
        // Asked again, it is gone.
        assert_eq!((closed.status, closed.code()), (410, "no_session"));
        drop(guard);
        until_line(&outsider, &name, (0, 0)).await;
        let late = client.ask("POST", "/v1/sessions", &opening).await;
        assert_eq!(
            (late.status, late.code()),
            (410, "no_session"),
            "a late copy opens nothing"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_wait_keeps_its_place_and_is_asked_again() {
    let site = Site::file();
    let gateway = Process::start(&site.url);
    let outsider = site.outsider().await;
    let proxy = Proxy::start(gateway.addr, Protocol::Http1).unwrap();
    let session = Session {
        wire: Wire::through(proxy.addr(), gateway.addr),
        ..Session::open(gateway.addr, TTL).await
    };
    let ahead = outsider.mutex("x").lock().await.unwrap();
    session.claim("x", "w", "0s").await.unwrap().is(202);
    let behind = {
        let outsider = outsider.clone();
        tokio::spawn(async move { outsider.mutex("x").lock().await.unwrap() })
    };
    until_line(&outsider, "x", (1, 2)).await;
    let body = json!({"id": "w", "wait": "6s"});
    for _ in 0..3 {
        let waiting = session.clone();
        let waits = body.clone();
        let waiting = tokio::spawn(async move { waiting.post("/v1/claims/wait", &waits).await });
        until_waiting(&proxy).await;
        proxy.cut_all();
        waiting.await.unwrap().unwrap_err();
        assert_eq!(line(&outsider, "x").await, (1, 2), "it has its place");
    }
    ahead.release().await.unwrap();
    let granted = session
        .post("/v1/claims/wait", &body)
        .await
        .unwrap()
        .is(200);
    assert!(!granted.believed().has_passed(), "before who came later");
    session.release("w").await.unwrap().is(200);
    behind.await.unwrap().release().await.unwrap();
}

/// Waits until a request has gone through that has no answer yet.
async fn until_waiting(proxy: &Proxy) {
    use palisade_testkit::lab::proxy::Direction;
    let until = BootTime::now() + LIMIT;
    let label = "POST /v1/claims/wait";
    let before = proxy.passed(Direction::ToClient, label);
    while proxy.passed(Direction::ToEngine, label) <= before {
        assert!(!until.has_passed(), "{:?}", proxy.seen());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_replica_knows_nothing_and_the_session_says_where_to_ask() {
    let site = Site::file();
    let (one, other) = (Process::start(&site.url), Process::start(&site.url));
    let opened = ask(one.addr, "POST", "/v1/sessions", None, &json!({})).await;
    let opened = opened.unwrap().is(201).json;
    assert_eq!(opened["url"], format!("http://{}", one.addr));
    let session = Session {
        wire: one.addr.into(),
        secret: opened["secret"].as_str().unwrap().to_owned(),
    };
    let held = session.claim("x", "h", "0s").await.unwrap().is(200);
    let elsewhere = Session {
        wire: other.addr.into(),
        ..session.clone()
    };
    let lost = elsewhere.keep_alive(&["h"]).await.unwrap();
    assert_eq!((lost.status, lost.code()), (410, "no_session"));
    // It is still held, and the other replica does not grant it.
    let busy = ask(
        other.addr,
        "POST",
        "/v1/claims",
        None,
        &json!({"name": "x"}),
    )
    .await;
    assert_eq!(busy.unwrap().code(), "busy");
    assert!(!held.believed().has_passed());
    session.keep_alive(&["h"]).await.unwrap().is(200);
}
