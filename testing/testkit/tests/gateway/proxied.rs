//! A network between client and gateway that loses answers, cuts connections, and leads to another
//! replica.

use std::time::Duration;

use palisade::BootTime;
use palisade_testkit::lab::proxy::{Direction, Protocol, Proxy, to_client};
use serde_json::{Value, json};

use crate::process::Process;
use crate::support::*;

/// Far above [`LIMIT`], so that no orphan ends by itself.
const TTL: Duration = Duration::from_secs(300);
/// When a client retries.
const PATIENCE: Duration = Duration::from_millis(700);

/// A client that retries, on new connections, until it has an answer.
struct Stubborn<'a> {
    proxy: &'a Proxy,
    wire: Wire,
    secret: String,
}

impl Stubborn<'_> {
    async fn ask(&self, method: &str, path: &str, body: &Value) -> Reply {
        let until = BootTime::now() + LIMIT;
        let opens = (method, path) == ("POST", "/v1/sessions");
        let secret = Some(self.secret.as_str()).filter(|_| !opens);
        loop {
            let asked = ask_within(PATIENCE, self.wire, method, path, secret, body).await;
            match asked {
                Ok(reply) => return reply,
                Err(_) => assert!(!until.has_passed(), "{path}: no answer"),
            }
        }
    }

    /// Sends a request whose first answer is lost.
    async fn ask_twice(&self, method: &str, path: &str, body: &Value) -> Reply {
        let eaten = self.proxy.inject(to_client().once().eat());
        let reply = self.ask(method, path, body).await;
        assert_eq!(eaten.hits(), 1, "{path}");
        reply
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
            proxy: &proxy,
            wire: Wire::through(proxy.addr(), gateway.addr),
            secret: format!("{:064x}", rand::random::<u128>()),
        };
        let post = async |path: &str, body: Value| client.ask_twice("POST", path, &body).await;
        let opening = json!({"ttl": format!("{}ms", TTL.as_millis()), "secret": client.secret});
        post("/v1/sessions", opening.clone()).await.is(201);
        let claim = json!({"name": name, "id": "one", "wait": "0s"});
        let first = post("/v1/claims", claim.clone()).await.is(200);
        assert_eq!(line(&outsider, &name).await, (1, 0), "one place");
        let again = client.ask("POST", "/v1/claims", &claim).await.is(200);
        assert_eq!(first.json["token"], again.json["token"]);
        let kept = post("/v1/sessions/keepalive", json!({"claims": ["one"]})).await;
        assert_eq!(kept.is(200).json["claims"][0]["state"], "held");
        // Another claim behind it, whose grant is lost.
        let second = json!({"name": name, "id": "two", "queue": true});
        post("/v1/claims", second).await.is(202);
        assert_eq!(line(&outsider, &name).await, (1, 1));
        post("/v1/claims/release", json!({"id": "one"}))
            .await
            .is(200);
        let wait = json!({"id": "two", "wait": "300ms"});
        let granted = post("/v1/claims/wait", wait).await.is(200);
        assert_eq!(granted.json["state"], "held");
        // Copies that were delayed for long.
        let late = client.ask("POST", "/v1/claims", &claim).await;
        assert_eq!((late.status, late.code()), (410, "released"));
        assert_eq!(line(&outsider, &name).await, (1, 0));
        let closed = client.ask_twice("DELETE", "/v1/sessions", &Value::Null);
        let closed = closed.await;
        assert_eq!((closed.status, closed.code()), (410, "no_session"));
        until_line(&outsider, &name, (0, 0)).await;
        let late = client.ask("POST", "/v1/sessions", &opening).await;
        let said = (late.status, late.code());
        assert_eq!(said, (410, "no_session"), "a late copy opens nothing");
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
    for round in 1..=3 {
        let waiting = session.clone();
        let waits = body.clone();
        let waiting = tokio::spawn(async move { waiting.post("/v1/claims/wait", &waits).await });
        until_waiting(&proxy, round).await;
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

/// Waits until `count` wait requests have passed.
async fn until_waiting(proxy: &Proxy, count: usize) {
    let until = BootTime::now() + LIMIT;
    while proxy.passed(Direction::ToEngine, "POST /v1/claims/wait") < count {
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

/// The engine has released, and its answer is in flight: a keep-alive at that moment must not
/// promise anything wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_promised_while_it_is_being_released() {
    let Some(site) = Site::served("redis") else {
        return;
    };
    let port = site.running.as_ref().unwrap().nodes()[0].port();
    let to_redis = Proxy::start(([127, 0, 0, 1], port).into(), Protocol::Resp).unwrap();
    let gateway = Process::start(&format!("redis://{}", to_redis.addr()));
    let outsider = site.outsider().await;
    let ttl = Duration::from_secs(4);
    let session = Session::open(gateway.addr, ttl).await;
    session.claim("a", "one", "0s").await.unwrap().is(200);
    session.claim("b", "two", "0s").await.unwrap().is(200);
    let asked = BootTime::now();
    let next = {
        let outsider = outsider.clone();
        tokio::spawn(async move { outsider.mutex("a").lock().await.unwrap() })
    };
    let mut slow = None;
    // The session stays alive, but one of its claims is no longer named.
    while !next.is_finished() {
        session.keep_alive(&["two"]).await.unwrap().is(200);
        if (asked + ttl / 2).has_passed() {
            let delay = to_client().delay(Duration::from_millis(900));
            slow.get_or_insert_with(|| to_redis.inject(delay));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let granted = BootTime::now();
    let kept = session.keep_alive(&["one"]).await.unwrap().is(200);
    let said = &kept.json["claims"][0];
    assert!(believed(kept.sent, said) <= granted, "promised: {said}");
    next.await.unwrap().release().await.unwrap();
}
