//! Agents of sessions: a cycle is found, one gives way, and a principal without rights learns no
//! names.

use serde_json::json;

use super::support::*;

/// Two agents that hold one name each and ask for the other's; the answer of each.
async fn circle(served: &Served, secrets: [&str; 2], names: [&str; 2]) -> [Reply; 2] {
    let agents = ["worker", "worker"];
    for at in 0..2 {
        let claim = json!({"name": names[at], "id": "first", "agent": agents[at]});
        served.post("/v1/claims", secrets[at], &claim).await.is(200);
    }
    let ask = async |at: usize| {
        let claim =
            json!({"name": names[1 - at], "id": "second", "agent": agents[at], "queue": true});
        let mut reply = served.post("/v1/claims", secrets[at], &claim).await;
        while reply.status == 202 {
            let wait = json!({"id": "second", "wait": "9s"});
            reply = served.post("/v1/claims/wait", secrets[at], &wait).await;
            if reply.status == 409 {
                // It gave way, and lets go of what the other waits for.
                let release = json!({"id": "first"});
                served
                    .post("/v1/claims/release", secrets[at], &release)
                    .await
                    .is(200);
            }
        }
        reply
    };
    let (one, other) = futures_util::future::join(ask(0), ask(1)).await;
    [one, other]
}

#[tokio::test]
async fn one_of_a_circle_gives_way() {
    let served = serve().await;
    // Two sessions whose agents have the same name are two agents.
    let (one, other) = (served.session("30s").await, served.session("30s").await);
    let replies = circle(&served, [&one, &other], ["a", "b"]).await;
    let gave_way: Vec<_> = replies.iter().filter(|reply| reply.status == 409).collect();
    assert_eq!(gave_way.len(), 1, "{replies:?}");
    assert_eq!(gave_way[0].json["code"], "deadlock");
    let detail = gave_way[0].json["detail"].as_str().unwrap();
    assert!(
        detail.contains("worker") && detail.contains("waits for"),
        "{detail}"
    );
    assert_eq!(
        replies.iter().filter(|reply| reply.status == 200).count(),
        1
    );
}

#[tokio::test]
async fn a_circle_is_shown_and_names_that_may_not_be_seen_are_hidden() {
    let (served, [billing, other, _]) = super::security::guarded().await;
    // One agent of each principal; neither looks for deadlocks, so the cycle stays.
    let agents = [served.engine.agent("one"), served.engine.agent("two")];
    let names = ["billing/a", "other/b"];
    let mut holds = Vec::new();
    for (agent, name) in agents.iter().zip(names) {
        holds.push(agent.mutex(name).lock().await.unwrap());
    }
    let waits = agents
        .iter()
        .zip(["other/b", "billing/a"])
        .map(|(agent, name)| {
            let mutex = agent
                .line(name, palisade::engine::Ask::Whole)
                .deadlock_after(None);
            tokio::spawn(async move { mutex.acquire(palisade::Patience::Forever).await })
        });
    let waits: Vec<_> = waits.collect();
    for name in names {
        served.until_line(name, (1, 1)).await;
    }
    let shown = Ask::get("/v1/deadlocks").with("authorization", &billing);
    let shown = shown.send(served.addr).await.is(200);
    let circle = &shown["deadlocks"][0];
    assert_eq!(circle["circle"], 2, "{shown}");
    let text = shown.to_string();
    assert!(
        text.contains("billing/a") && !text.contains("other/b"),
        "{text}"
    );
    assert!(text.contains(r#""hidden":true"#), "{text}");
    let shown = Ask::get("/v1/deadlocks").with("authorization", &other);
    let text = shown.send(served.addr).await.is(200).to_string();
    assert!(
        text.contains("other/b") && !text.contains("billing/a"),
        "{text}"
    );
    waits.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn an_agent_is_in_the_record_of_its_claim() {
    let served = serve().await;
    let secret = served.session("30s").await;
    let agent = json!({"name": "w", "within": [{"claim": "00", "name": "outer"}], "nested": true});
    let claim = json!({"name": "a", "id": "one", "agent": agent});
    served.post("/v1/claims", &secret, &claim).await.is(200);
    let scope = palisade::report::Scope::Line(palisade::Name::new("a").unwrap());
    let lines = served.engine.survey(scope).await.unwrap();
    let owner = lines[0].holders[0].owner.clone().unwrap();
    let agent = owner.agent.unwrap();
    assert_eq!((agent.name.as_str(), agent.yields_nested), ("w", true));
    assert_eq!(agent.within[0].name, "outer");
    let shown = Ask::get("/v1/lines?name=a").send(served.addr).await.is(200);
    assert_eq!(shown["lines"][0]["holders"][0]["agent"], "w");
    for agent in [
        json!(""),
        json!({"name": "x", "more": 1}),
        json!("x".repeat(2000)),
    ] {
        let claim = json!({"name": "b", "agent": agent});
        let refused = served.post("/v1/claims", &secret, &claim).await;
        refused.refuses(400, "invalid_argument");
    }
}
