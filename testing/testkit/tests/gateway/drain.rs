//! A drain with a hundred holders and a hundred waiters.

use std::time::Duration;

use palisade::BootTime;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::process::Process;
use crate::support::*;

const MANY: usize = 100;
/// Far above [`LIMIT`], so that nothing ends by itself.
const TTL: Duration = Duration::from_secs(300);

/// Holders and waiters, each with its own session, a pair for each name.
async fn pairs(gateway: &Process, ttl: Duration) -> Vec<[Session; 2]> {
    let mut pairs = Vec::new();
    for at in 0..MANY {
        let name = format!("x{at}");
        let holder = Session::open(gateway.addr, ttl).await;
        holder.claim(&name, "h", "0s").await.unwrap().is(200);
        let waiter = Session::open(gateway.addr, ttl).await;
        waiter.claim(&name, "w", "0s").await.unwrap().is(202);
        pairs.push([holder, waiter]);
    }
    pairs
}

async fn until_ended(mut gateway: Process) {
    let until = BootTime::now() + LIMIT;
    loop {
        if let Some(status) = gateway.ended() {
            assert!(status.success(), "{status}");
            return;
        }
        assert!(!until.has_passed(), "it does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everyone_finishes_and_nobody_new_comes_in() {
    let site = Site::file();
    let gateway = Process::start(&site.url);
    let outsider = site.outsider().await;
    let pairs = pairs(&gateway, TTL).await;
    let idle = Session::open(gateway.addr, TTL).await;
    gateway.signal(Signal::TERM);
    let until = BootTime::now() + LIMIT;
    loop {
        let kept = pairs[0][0].keep_alive(&["h"]).await.unwrap().is(200);
        if kept.json["draining"] == true {
            break;
        }
        assert!(!until.has_passed());
    }
    let addr = gateway.addr;
    let refused = ask(addr, "POST", "/v1/sessions", None, &json!({})).await;
    let refused = refused.unwrap();
    assert_eq!((refused.status, refused.code()), (503, "draining"));
    assert!(refused.head.contains("retry-after:"));
    let ready = ask(addr, "GET", "/readyz", None, &Value::Null).await;
    assert_eq!(ready.unwrap().status, 503);
    // A holder may take a nested lock; a client without holds may not.
    pairs[0][0]
        .claim("nested", "n", "0s")
        .await
        .unwrap()
        .is(200);
    pairs[0][0].release("n").await.unwrap().is(200);
    let refused = idle.claim("new", "n", "0s").await.unwrap();
    assert_eq!((refused.status, refused.code()), (503, "draining"));
    let turns = pairs.iter().map(|[holder, waiter]| async move {
        holder.keep_alive(&["h"]).await.unwrap().is(200);
        let let_go = BootTime::now();
        holder.release("h").await.unwrap().is(200);
        let body = json!({"id": "w", "wait": "6s"});
        let granted = waiter.post("/v1/claims/wait", &body).await.unwrap().is(200);
        assert!(granted.believed() > let_go);
        // The last ones end the gateway, which still answers them all.
        waiter.release("w").await.unwrap().is(200);
    });
    futures_util::future::join_all(turns).await;
    until_ended(gateway).await;
    assert_eq!(line(&outsider, "x0").await, (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_let_go_keeps_the_last_promise_and_no_more() {
    let site = Site::file();
    let ttl = Duration::from_secs(5);
    let gateway = Process::with(&site.url, Duration::from_secs(1));
    let outsider = site.outsider().await;
    let pairs = pairs(&gateway, ttl).await;
    gateway.signal(Signal::TERM);
    let keeping = pairs.iter().enumerate().map(|(at, [holder, _])| {
        let outsider = outsider.clone();
        async move {
            let mut promise = BootTime::PAST;
            // It is kept alive to the end, but the drain ends nevertheless.
            while let Ok(kept) = holder.keep_alive(&["h"]).await {
                if kept.status != 200 {
                    break;
                }
                promise = promise.max(believed(kept.sent, &kept.json["claims"][0]));
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            let next = outsider.mutex(format!("x{at}")).lock().await.unwrap();
            assert!(promise.has_passed(), "granted within a promise");
            next.release().await.unwrap();
        }
    });
    let ended = tokio::time::timeout(LIMIT, futures_util::future::join_all(keeping));
    ended.await.expect("all end");
    until_ended(gateway).await;
}
