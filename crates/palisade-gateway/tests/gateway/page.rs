//! The routes without a token, and the requests of the dashboard.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::security::guarded;
use crate::support::*;

/// Longer than a hint takes to come.
const QUIET: Duration = Duration::from_secs(1);

#[tokio::test]
async fn the_page_needs_no_token_and_has_a_strict_policy() {
    let served = serve().await;
    for (path, kind) in [
        ("/", "text/html"),
        ("/dashboard/app.js", "text/javascript"),
        ("/dashboard/style.css", "text/css"),
        ("/openapi.json", "application/json"),
    ] {
        let page = Ask::get(path)
            .with("authorization", "")
            .send(served.addr)
            .await;
        assert_eq!(page.status, 200, "{path}");
        assert!(page.head.contains(kind), "{}", page.head);
        assert!(page.head.contains("script-src 'self';"), "{}", page.head);
        assert!(
            page.head.contains("frame-ancestors 'none'"),
            "{}",
            page.head
        );
        assert!(!page.head.contains("unsafe"), "{}", page.head);
    }
    let elsewhere = Ask::get("/").with("host", "evil.example");
    elsewhere.send(served.addr).await.refuses(421, "wrong_host");
    Ask::post("/", &json!({}))
        .send(served.addr)
        .await
        .refuses(405, "method_not_allowed");
    for path in [
        "/dashboard",
        "/dashboard/",
        "/dashboard/none.js",
        "/index.html",
    ] {
        Ask::get(path)
            .send(served.addr)
            .await
            .refuses(404, "not_found");
    }
    // Health probes use the address of a pod.
    Ask::get("/readyz")
        .with("host", "10.1.2.3:7420")
        .send(served.addr)
        .await
        .is(200);
}

#[tokio::test]
async fn the_engine_page_tells_you_who_you_are_and_hides_the_sessions_of_others() {
    let (served, [billing, other, operator]) = guarded().await;
    let opened = Ask::post("/v1/sessions", &json!({"ttl": "30s"})).with("authorization", &billing);
    let opened = opened.send(served.addr).await.is(201);
    let claim = Ask::post("/v1/claims", &json!({"name": "billing/card"}))
        .with("authorization", &billing)
        .session(opened["secret"].as_str().unwrap());
    claim.send(served.addr).await.is(200);
    let engine = async |token: &str| {
        let ask = Ask::get("/v1/engine").with("authorization", token);
        ask.send(served.addr).await.is(200)
    };
    let mine = engine(&billing).await;
    assert_eq!(mine["you"]["name"], "billing");
    assert_eq!(mine["you"]["use"], json!(["billing/"]));
    assert_eq!(mine["you"]["operate"], json!([]));
    let session = &mine["open_sessions"][0];
    assert_eq!(
        (&session["holds"], &session["waits"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(session["id"], opened["id"]);
    assert!(
        !mine
            .to_string()
            .contains(opened["secret"].as_str().unwrap())
    );
    // Neither of them may see everything.
    for token in [&other, &operator] {
        let theirs = engine(token).await;
        assert_eq!(
            (&theirs["sessions"], &theirs["open_sessions"]),
            (&json!(1), &json!([]))
        );
    }
}

#[tokio::test]
async fn events_without_a_prefix_are_of_what_may_be_seen() {
    let (served, [billing, ..]) = guarded().await;
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    let ask = Ask::get("/v1/events").with("authorization", &billing);
    stream.write_all(&ask.bytes(served.addr)).await.unwrap();
    let mut seen = Vec::new();
    read_until(&mut stream, &mut seen, ": alive").await;
    let mut told = async || {
        read_until(&mut stream, &mut seen, "event: changed").await;
        seen.clear();
    };
    // A watch begins with a hint, since earlier changes were missed.
    told().await;
    // A principal that may not see a name gets no hint about it.
    for _ in 0..3 {
        let other = served.engine.mutex("billing-x/card").lock().await.unwrap();
        let told = tokio::time::timeout(QUIET, told()).await;
        assert!(told.is_err(), "told of what it may not see");
        other.release().await.unwrap();
    }
    for _ in 0..2 {
        let own = served.engine.mutex("billing/card").lock().await.unwrap();
        told().await;
        own.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_survey_pages_through_many_lines_and_says_who_runs_inside_whom() {
    let served = serve().await;
    let mut held = Vec::new();
    for number in 0..5 {
        let name = format!("many/{number}");
        held.push(served.engine.mutex(name).lock().await.unwrap());
    }
    let mut names: Vec<Value> = Vec::new();
    let mut after = String::new();
    loop {
        let path = format!("/v1/lines?limit=2&after={after}");
        let page = Ask::get(&path).send(served.addr).await.is(200);
        let lines = page["lines"].as_array().unwrap();
        assert!(lines.len() <= 2);
        names.extend(lines.iter().map(|line| line["name"].clone()));
        match page["next"].as_str() {
            Some(next) => after = next.to_owned(),
            None => break,
        }
    }
    assert_eq!(names.len(), 5);
    let inner = json!({"name": "inner", "agent": {"name": "job", "within": [{"claim": "c0ffee", "name": "outer"}]}});
    Ask::post("/v1/claims", &inner)
        .send(served.addr)
        .await
        .is(200);
    let page = Ask::get("/v1/lines?name=inner")
        .send(served.addr)
        .await
        .is(200);
    let claim = &page["lines"][0]["holders"][0];
    assert_eq!(
        (&claim["agent"], &claim["parent"]),
        (&json!("job"), &json!("c0ffee"))
    );
}
