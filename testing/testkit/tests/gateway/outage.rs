//! An engine that becomes unreachable and returns.

use std::time::Duration;

use palisade::BootTime;
use serde_json::Value;

use crate::process::Process;
use crate::support::*;

const TTL: Duration = Duration::from_secs(4);

async fn away_and_back(site: Option<Site>) {
    let Some(site) = site else {
        return;
    };
    let node = &site.running.as_ref().unwrap().nodes()[0];
    let gateway = Process::start(&format!("{}{}timeout=500ms", site.url, sign(&site.url)));
    let outsider = site.outsider().await;
    let session = Session::open(gateway.addr, TTL).await;
    let held = session.claim("x", "h", "0s").await.unwrap().is(200);
    let mut longest = held.believed();
    let away = BootTime::now();
    node.stop().unwrap();
    // It is kept alive, but its promise ends with the lease that can't be renewed.
    loop {
        let kept = session.keep_alive(&["h"]).await.unwrap().is(200);
        let claim = &kept.json["claims"][0];
        if claim["state"] != "held" {
            assert_eq!(claim["state"], "lost", "{kept:?}");
            break;
        }
        longest = longest.max(believed(kept.sent, claim));
        assert!(BootTime::now().saturating_since(away) < LIMIT);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(longest <= away + TTL, "believed beyond the lease");
    // New claims are refused meanwhile.
    let refused = session.claim("y", "y", "0s").await.unwrap();
    assert_eq!(
        (refused.status, refused.code()),
        (503, "unreachable"),
        "{refused:?}"
    );
    assert!(refused.head.contains("retry-after:"), "{}", refused.head);
    assert_eq!(readiness(&gateway).await, 503);
    node.cont().unwrap();
    // The same claim is repeated, and granted once.
    let until = BootTime::now() + LIMIT;
    loop {
        let again = session.claim("y", "y", "0s").await.unwrap();
        if again.status == 200 {
            break;
        }
        assert!(
            matches!(again.status, 202 | 503) && !until.has_passed(),
            "{again:?}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(line(&outsider, "y").await, (1, 0));
    session.release("y").await.unwrap().is(200);
    // At once; its ttl would end it soon.
    assert_eq!(line(&outsider, "y").await, (0, 0));
    until_line(&outsider, "x", (0, 0)).await;
    // Readiness is cached for a second.
    while readiness(&gateway).await != 200 {
        assert!(!until.has_passed(), "it is not ready");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn readiness(gateway: &Process) -> u16 {
    let ready = ask(gateway.addr, "GET", "/readyz", None, &Value::Null).await;
    ready.unwrap().status
}

fn sign(url: &str) -> char {
    if url.contains('?') { '&' } else { '?' }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_away_and_back() {
    away_and_back(Site::guarded()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_away_and_back() {
    away_and_back(Site::served("postgres")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_away_and_back() {
    away_and_back(Site::served("etcd")).await;
}
