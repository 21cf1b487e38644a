//! What the library's own `http:` engine needs of a gateway, beyond what every client does.

use serde_json::json;

use super::support::*;

#[tokio::test]
async fn a_release_before_its_claim_is_remembered() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let release = json!({"id": "late"});
    let refused = served.post("/v1/claims/release", &secret, &release).await;
    refused.refuses(410, "no_claim");
    // The claim was still in flight.
    let ask = json!({"name": "a", "id": "late", "queue": true});
    let refused = served.post("/v1/claims", &secret, &ask).await;
    refused.refuses(410, "released");
    assert_eq!(served.line("a").await, (0, 0));
    // In another session it is another claim.
    let other = served.session("30s").await;
    served.post("/v1/claims", &other, &ask).await.is(200);
}

#[tokio::test]
async fn a_look_keeps_nothing_alive() {
    let served = serve().await;
    let _held = served.engine.mutex("a").lock().await.unwrap();
    let secret = served.session("2s").await;
    let ask = json!({"name": "a", "id": "w", "queue": true});
    served.post("/v1/claims", &secret, &ask).await.is(202);
    let look = json!({"id": "w", "wait": "300ms", "keep": false});
    let over = loop {
        let looked = served.post("/v1/claims/wait", &secret, &look).await;
        if looked.status != 202 {
            break looked;
        }
    };
    over.refuses(410, "lost");
    served.until_line("a", (1, 0)).await;
}

#[tokio::test]
async fn a_mark_is_known_to_the_next_who_asks() {
    let served = serve().await;
    let secret = served.session("120s").await;
    let names = ["a", "b"];
    for name in names {
        let ask = json!({"name": name, "id": name});
        served.post("/v1/claims", &secret, &ask).await.is(200);
    }
    let lines = Ask::get("/v1/lines").send(served.addr).await.is(200);
    for (at, (how, state)) in [("mark", "evicted"), ("force", "lost")]
        .into_iter()
        .enumerate()
    {
        let claim = &lines["lines"][at]["holders"][0]["id"];
        let evict = json!({"name": names[at], "claim": claim, "how": how, "reason": "test"});
        let evicted = Ask::post("/v1/evictions", &evict).send(served.addr).await;
        evicted.is(200);
        let kept = json!({"claims": [names[at]]});
        let kept = served.post("/v1/sessions/keepalive", &secret, &kept).await;
        assert_eq!(kept.is(200)["claims"][0]["state"], state);
    }
    // A marked claim stays until its client lets go.
    assert_eq!(served.line("a").await, (1, 0));
    let release = json!({"id": "a"});
    let released = served.post("/v1/claims/release", &secret, &release).await;
    released.refuses(410, "evicted");
    served.until_line("a", (0, 0)).await;
    let unnamed = json!({"name": "a", "how": "mark", "reason": "test"});
    let refused = Ask::post("/v1/evictions", &unnamed).send(served.addr).await;
    refused.refuses(400, "invalid_argument");
}

#[tokio::test]
async fn a_record_is_kept_as_it_was_given_beside_the_principal() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let agent = json!({"client": "c", "name": "job", "ttl": 30_000, "holds": ["x"]});
    let record = json!({
        "owner": "me", "host": "far", "pid": 7, "label": "l", "since": 1_500, "agent": agent,
        "principal": "somebody else",
    });
    let ask = json!({"name": "a", "id": "one", "owner": record});
    served.post("/v1/claims", &secret, &ask).await.is(200);
    let lines = Ask::get("/v1/lines?name=a&records=true").send(served.addr);
    let shown = &lines.await.is(200)["lines"][0]["holders"][0];
    let mut expected = record.clone();
    expected["principal"] = json!("local");
    assert_eq!(shown["record"], expected);
    assert_eq!(shown["principal"], "local");
    assert_eq!(shown["label"], "l");
    let lines = Ask::get("/v1/lines?name=a").send(served.addr).await.is(200);
    assert!(lines["lines"][0]["holders"][0].get("record").is_none());
}

#[tokio::test]
async fn what_it_can_do_is_told_without_a_look_at_the_engine() {
    let served = serve().await;
    let told = Ask::get("/v1/engine?check=false")
        .send(served.addr)
        .await
        .is(200);
    assert_eq!(told["capability"]["detached"], false);
    assert_eq!(told["findings"], json!([]));
}
