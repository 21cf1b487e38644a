//! The promises to a client: one place per id, and no validity beyond the engine's lease.

use std::sync::Arc;
use std::time::Duration;

use palisade::events::{Event, Observer};
use palisade::{BootTime, LossReason};
use parking_lot::Mutex;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::support::*;

#[tokio::test]
async fn curl_alone_locks_and_releases() {
    let served = serve().await;
    let held = Ask::post("/v1/claims", &json!({"name": "a"}))
        .send(served.addr)
        .await
        .is(200);
    assert_eq!(held["state"], "held");
    assert!(held["token"].as_str().unwrap().parse::<u64>().unwrap() > 0);
    assert!(held["sequence"].as_str().unwrap().parse::<u64>().unwrap() > 0);
    let valid = held["valid_ms"].as_u64().unwrap();
    // The lease of 30 s less its margin, and the time from the arrival to the engine's request.
    assert!((20_000..29_000).contains(&valid), "{valid}");
    let busy = Ask::post("/v1/claims", &json!({"name": "a", "wait": "50ms"}));
    busy.send(served.addr).await.refuses(409, "busy");
    served.until_line("a", (1, 0)).await;
    let secret = held["session"]["secret"].as_str().unwrap();
    let id = &held["id"];
    let shown = Ask::get("/v1/lines?name=a").send(served.addr).await.is(200);
    assert_eq!(shown["lines"][0]["holders"][0]["id"], held["claim"]);
    served
        .post("/v1/claims/release", secret, &json!({"id": id}))
        .await
        .is(200);
    served.until_line("a", (0, 0)).await;
}

#[tokio::test]
async fn asking_again_is_the_same_claim_and_a_released_one_stays_released() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let ask = json!({"name": "a", "id": "one"});
    let first = served.post("/v1/claims", &secret, &ask).await.is(200);
    let again = served.post("/v1/claims", &secret, &ask).await.is(200);
    assert_eq!(
        (&first["claim"], &first["token"]),
        (&again["claim"], &again["token"])
    );
    assert_eq!(served.line("a").await, (1, 0));
    let other = json!({"name": "b", "id": "one"});
    served
        .post("/v1/claims", &secret, &other)
        .await
        .refuses(409, "id_reused");
    let release = json!({"id": "one"});
    served
        .post("/v1/claims/release", &secret, &release)
        .await
        .is(200);
    // A retry because the response was lost.
    served
        .post("/v1/claims/release", &secret, &release)
        .await
        .is(200);
    // A delayed copy of the first request.
    served
        .post("/v1/claims", &secret, &ask)
        .await
        .refuses(410, "released");
    assert_eq!(served.line("a").await, (0, 0));
}

#[tokio::test]
async fn a_place_in_the_line_is_granted_while_nobody_asks() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let holder = served.engine.mutex("a").lock().await.unwrap();
    let ask = json!({"name": "a", "id": "w", "queue": true});
    let waiting = served.post("/v1/claims", &secret, &ask).await.is(202);
    assert_eq!(waiting["state"], "waiting");
    assert!(waiting["valid_ms"].as_u64().unwrap() > 0);
    served.until_line("a", (1, 1)).await;
    holder.release().await.unwrap();
    let wait = json!({"id": "w", "wait": "9s"});
    let held = served.post("/v1/claims/wait", &secret, &wait).await.is(200);
    assert_eq!(held["state"], "held");
}

#[tokio::test]
async fn a_dropped_request_keeps_its_place_and_the_session_ends_it() {
    let served = serve().await;
    let holder = served.engine.mutex("a").lock().await.unwrap();
    let secret = served.session("2s").await;
    let ask = Ask::post(
        "/v1/claims",
        &json!({"name": "a", "id": "w", "wait": "600ms"}),
    );
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    stream
        .write_all(&ask.session(&secret).bytes(served.addr))
        .await
        .unwrap();
    served.until_line("a", (1, 1)).await;
    drop(stream);
    holder.release().await.unwrap();
    // Without a waiting request it is granted all the same, and ends with the ttl.
    served.until_line("a", (1, 0)).await;
    served.until_line("a", (0, 0)).await;
    served.until_logged("session_ended").await;
    assert!(served.log.text().contains("expired"));
    let keep = json!({"claims": ["w"]});
    served
        .post("/v1/sessions/keepalive", &secret, &keep)
        .await
        .refuses(410, "no_session");
}

#[tokio::test]
async fn a_promise_never_outlives_the_session_or_the_lease() {
    let served = serve().await;
    let ttl = Duration::from_secs(2);
    let secret = served.session("2s").await;
    let mut sent = BootTime::now();
    let ask = json!({"name": "a", "id": "one"});
    let mut answer = served.post("/v1/claims", &secret, &ask).await.is(200);
    for _ in 0..4 {
        let valid = Duration::from_millis(answer["valid_ms"].as_u64().unwrap());
        assert!(valid <= ttl - ttl / 10, "{valid:?} has the margin in it");
        tokio::time::sleep(Duration::from_millis(400)).await;
        sent = BootTime::now();
        let keep = json!({"claims": ["one"]});
        let kept = served
            .post("/v1/sessions/keepalive", &secret, &keep)
            .await
            .is(200);
        answer = kept["claims"][0].clone();
        assert_eq!(answer["state"], "held");
        assert_eq!(kept["draining"], false);
    }
    let believed = sent + Duration::from_millis(answer["valid_ms"].as_u64().unwrap());
    // The client sends nothing from here on: the next is granted only after its last promise.
    let next = served.engine.mutex("a").lock().await.unwrap();
    assert!(
        believed.has_passed(),
        "granted to another within the promise"
    );
    drop(next);
}

#[tokio::test]
async fn a_claim_that_no_keep_alive_names_ends_with_the_ttl() {
    let served = serve().await;
    let secret = served.session("1s").await;
    for (name, id) in [("a", "kept"), ("b", "forgotten")] {
        served
            .post("/v1/claims", &secret, &json!({"name": name, "id": id}))
            .await
            .is(200);
    }
    let until = BootTime::now() + Duration::from_secs(3);
    while !until.has_passed() {
        let keep = json!({"claims": ["kept"]});
        served
            .post("/v1/sessions/keepalive", &secret, &keep)
            .await
            .is(200);
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    assert_eq!(
        (served.line("a").await, served.line("b").await),
        ((1, 0), (0, 0))
    );
}

#[tokio::test]
async fn a_secret_of_ones_own_opens_one_session_however_often() {
    let served = serve().await;
    let secret = "0123456789abcdef".repeat(4);
    let ask = json!({"ttl": "30s", "secret": secret});
    let first = Ask::post("/v1/sessions", &ask)
        .send(served.addr)
        .await
        .is(201);
    let again = Ask::post("/v1/sessions", &ask)
        .send(served.addr)
        .await
        .is(201);
    assert_eq!(first["id"], again["id"]);
    let short = json!({"secret": "guessable"});
    Ask::post("/v1/sessions", &short)
        .send(served.addr)
        .await
        .refuses(400, "invalid_argument");
}

#[tokio::test]
async fn readers_share_and_permits_are_counted() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let read = |id: &str| json!({"name": "doc", "id": id, "mode": "shared"});
    served
        .post("/v1/claims", &secret, &read("r1"))
        .await
        .is(200);
    served
        .post("/v1/claims", &secret, &read("r2"))
        .await
        .is(200);
    let permit = |id: &str, weight: u32| json!({"name": "pool", "id": id, "mode": "permits", "weight": weight, "capacity": 3, "queue": false});
    served
        .post("/v1/claims", &secret, &permit("p1", 2))
        .await
        .is(200);
    served
        .post("/v1/claims", &secret, &permit("p2", 2))
        .await
        .refuses(409, "busy");
    served
        .post("/v1/claims", &secret, &permit("p3", 1))
        .await
        .is(200);
    let other = json!({"name": "pool", "id": "p4", "mode": "permits", "capacity": 9});
    served
        .post("/v1/claims", &secret, &other)
        .await
        .refuses(409, "capacity_mismatch");
}

#[tokio::test]
async fn downgrade_upgrade_and_proclaim_by_amend() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let ask = json!({"name": "a", "id": "w", "value": "one"});
    let before = served.post("/v1/claims", &secret, &ask).await.is(200);
    let amend = json!({"id": "w", "value": "two"});
    served
        .post("/v1/claims/amend", &secret, &amend)
        .await
        .is(200);
    let leader = Ask::get("/v1/leaders?name=a")
        .send(served.addr)
        .await
        .is(200);
    assert_eq!(leader["leader"]["value"], "two");
    let amend = json!({"id": "w", "mode": "shared"});
    let after = served
        .post("/v1/claims/amend", &secret, &amend)
        .await
        .is(200);
    assert_eq!(before["token"], after["token"]);
    served
        .post(
            "/v1/claims",
            &secret,
            &json!({"name": "a", "id": "r", "mode": "shared"}),
        )
        .await
        .is(200);
    let amend = json!({"id": "w", "mode": "exclusive"});
    served
        .post("/v1/claims/amend", &secret, &amend)
        .await
        .refuses(409, "busy");
}

#[tokio::test]
async fn an_eviction_is_told_to_the_session_and_audited() {
    let served = serve().await;
    // A renewal, which would notice it too, is due after a third of it.
    let secret = served.session("120s").await;
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    let events = Ask::get("/v1/sessions/events").session(&secret);
    stream.write_all(&events.bytes(served.addr)).await.unwrap();
    let mut seen = Vec::new();
    read_until(&mut stream, &mut seen, ": alive").await;
    served
        .post("/v1/claims", &secret, &json!({"name": "a", "id": "one"}))
        .await
        .is(200);
    read_until(&mut stream, &mut seen, r#"{"id":"one","state":"held"}"#).await;
    let evict = json!({"name": "a", "how": "ask", "reason": "deploy"});
    let evicting = tokio::spawn(Ask::post("/v1/evictions", &evict).send(served.addr));
    read_until(&mut stream, &mut seen, r#"{"id":"one","state":"evicted"}"#).await;
    let wait = json!({"id": "one"});
    served
        .post("/v1/claims/wait", &secret, &wait)
        .await
        .refuses(410, "evicted");
    // Before it lets go, it is unknown whether it was notified.
    assert_eq!(served.line("a").await, (1, 0));
    assert!(served.engine.mutex("a").try_lock().await.unwrap().is_none());
    served
        .post("/v1/claims/release", &secret, &json!({"id": "one"}))
        .await
        .refuses(410, "evicted");
    evicting.await.unwrap().is(200);
    Ask::post("/v1/evictions", &evict)
        .send(served.addr)
        .await
        .refuses(404, "absent");
    let log = served.log.text();
    assert!(
        log.contains(r#""event":"eviction""#) && log.contains("deploy"),
        "{log}"
    );
}

#[tokio::test]
async fn an_evicted_hold_is_kept_until_its_last_promise_is_over() {
    let served = serve().await;
    let secret = served.session("3s").await;
    let sent = BootTime::now();
    let ask = json!({"name": "a", "id": "one"});
    let held = served.post("/v1/claims", &secret, &ask).await.is(200);
    let believed = sent + Duration::from_millis(held["valid_ms"].as_u64().unwrap());
    let evict = json!({"name": "a", "how": "ask", "reason": "deploy"});
    // Its client sends nothing any more.
    let evicting = tokio::spawn(Ask::post("/v1/evictions", &evict).send(served.addr));
    let mutex = served.engine.mutex("a");
    let next = tokio::time::timeout(LIMIT, mutex.lock());
    let next = next.await.unwrap().unwrap();
    assert!(believed.has_passed(), "granted within a promise");
    evicting.await.unwrap().is(200);
    drop(next);
}

#[tokio::test]
async fn nothing_is_promised_to_who_comes_when_it_is_ending() {
    let served = serve().await;
    for round in 0..20 {
        let secret = served.session("400ms").await;
        let name = format!("x{round}");
        let mut sent = BootTime::now();
        let ask = json!({"name": name, "id": "one"});
        let mut answer = served.post("/v1/claims", &secret, &ask).await.json;
        let mut believed = BootTime::PAST;
        // A keep-alive at about the moment when the session ends.
        let late = Duration::from_micros(399_000 + 150 * round);
        tokio::time::sleep((sent + late).remaining()).await;
        for _ in 0..2 {
            let valid = answer["valid_ms"]
                .as_u64()
                .filter(|_| answer["state"] == "held");
            believed = believed.max(sent + Duration::from_millis(valid.unwrap_or(0)));
            sent = BootTime::now();
            let keep = json!({"claims": ["one"]});
            let kept = served.post("/v1/sessions/keepalive", &secret, &keep).await;
            assert!(matches!(kept.status, 200 | 410), "{kept:?}");
            answer = kept.json["claims"][0].clone();
        }
        let next = served.engine.mutex(&name).lock().await.unwrap();
        assert!(
            believed.has_passed(),
            "round {round}: granted within a promise"
        );
        drop(next);
    }
}

#[tokio::test]
async fn changes_of_lines_are_hinted_at() {
    let served = serve().await;
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    let events = Ask::get("/v1/events?prefix=");
    stream.write_all(&events.bytes(served.addr)).await.unwrap();
    let mut seen = Vec::new();
    read_until(&mut stream, &mut seen, ": alive").await;
    let hold = served.engine.mutex("a").lock().await.unwrap();
    read_until(&mut stream, &mut seen, "event: changed").await;
    drop(hold);
}

#[tokio::test]
async fn draining_lets_holders_finish_and_takes_nobody_in() {
    let mut served = serve().await;
    let secret = served.session("30s").await;
    served
        .post("/v1/claims", &secret, &json!({"name": "a", "id": "one"}))
        .await
        .is(200);
    Ask::get("/readyz").send(served.addr).await.is(200);
    served.end.take().unwrap().send(()).unwrap();
    served.until_logged("draining").await;
    Ask::get("/readyz")
        .send(served.addr)
        .await
        .refuses(503, "draining");
    let refused = Ask::post("/v1/sessions", &json!({}))
        .send(served.addr)
        .await;
    assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
    refused.refuses(503, "draining");
    // Nested locks of a session that already holds one.
    served
        .post("/v1/claims", &secret, &json!({"name": "b", "id": "two"}))
        .await
        .is(200);
    let keep = json!({"claims": ["one", "two"]});
    let kept = served
        .post("/v1/sessions/keepalive", &secret, &keep)
        .await
        .is(200);
    assert_eq!(kept["draining"], true);
    for id in ["two", "one"] {
        served
            .post("/v1/claims/release", &secret, &json!({"id": id}))
            .await
            .is(200);
    }
    tokio::time::timeout(LIMIT, served.task)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn after_the_drain_nothing_is_extended() {
    let drain = Some(Duration::from_millis(300));
    let mut served = serve_with(With {
        drain,
        ..With::default()
    })
    .await;
    let secret = served.session("2s").await;
    served
        .post("/v1/claims", &secret, &json!({"name": "a", "id": "one"}))
        .await
        .is(200);
    served.end.take().unwrap().send(()).unwrap();
    let (addr, stubborn) = (served.addr, secret.clone());
    // A client that sends keep-alives whatever the response.
    let mut believed = BootTime::now();
    let patience = BootTime::now() + LIMIT;
    let ended = loop {
        assert!(!patience.has_passed(), "it goes on being extended");
        let sent = BootTime::now();
        let Ok(stream) = TcpStream::connect(addr).await else {
            break BootTime::now();
        };
        let keep = Ask::post("/v1/sessions/keepalive", &json!({"claims": ["one"]}));
        let bytes = keep.session(&stubborn).bytes(addr);
        let reply = exchange(stream, &bytes).await;
        if reply.status != 200 {
            break BootTime::now();
        }
        if let Some(valid) = reply.json["claims"][0]["valid_ms"].as_u64() {
            believed = believed.max(sent + Duration::from_millis(valid));
        }
        assert!(!served.task.is_finished() || believed.has_passed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(ended >= believed, "let go of within a promise");
    tokio::time::timeout(LIMIT, served.task)
        .await
        .unwrap()
        .unwrap();
    assert!(served.engine.mutex("a").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn what_an_engine_takes_with_the_process_is_refused() {
    // A store that ends holds with the process, and is not of class C.
    let dir = tempfile::tempdir().unwrap();
    let url = Some(format!("file:{}", dir.path().join("store").display()));
    let served = serve_with(With {
        url,
        ..With::default()
    })
    .await;
    let claim = Ask::post("/v1/claims", &json!({"name": "a"}));
    claim.send(served.addr).await.refuses(501, "unsupported");
    let memory = Some("memory:refused-test".to_owned());
    let served = serve_with(With {
        url: memory,
        ..With::default()
    })
    .await;
    Ask::post("/v1/claims", &json!({"name": "a"}))
        .send(served.addr)
        .await
        .is(200);
    let engine = Ask::get("/v1/engine").send(served.addr).await.is(200);
    assert_eq!(engine["capability"]["early_loss"], false);
    assert_eq!(engine["capability"]["detached"], false);
}

/// The holds that were lost.
#[derive(Clone, Default)]
struct Losses(Arc<Mutex<Vec<(String, LossReason)>>>);

impl Observer for Losses {
    fn see(&self, event: &Event<'_>) {
        if let Event::Lost { name, reason, .. } = event {
            self.0.lock().push((name.to_string(), *reason));
        }
    }
}

#[tokio::test]
async fn what_is_not_kept_alive_is_lost_and_what_is_given_back_is_not() {
    let served = serve().await;
    let losses = Losses::default();
    let _observed = served.engine.clone().observed_by(losses.clone());
    for name in ["closed", "silent"] {
        let secret = served.session("2s").await;
        let ask = json!({"name": name, "id": "one"});
        served.post("/v1/claims", &secret, &ask).await.is(200);
        if name == "closed" {
            let close = Ask::new("DELETE", "/v1/sessions", "").session(&secret);
            close.send(served.addr).await.is(200);
        }
    }
    served.until_logged("expired").await;
    assert_eq!(served.line("silent").await, (0, 0));
    let lost = losses.0.lock().clone();
    assert_eq!(lost, [("silent".to_owned(), LossReason::Expired)]);
}
