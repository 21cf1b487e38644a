//! Gateways killed with `kill -9`, alone and with their whole process group, with holds, and with
//! waiters that are granted at that moment: a client relies on a hold no longer than the engine's
//! lease lasts.

use std::time::Duration;

use palisade::BootTime;
use palisade_testkit::lab::trial::soon;

use crate::process::Process;
use crate::support::*;

/// Longer than the shortest lease of every engine here.
const TTL: Duration = Duration::from_secs(3);

/// The situation at the kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// One client holds, another waits behind it.
    Holding,
    /// The holder releases and the waiter is granted while the gateway is being killed.
    Granting,
}

async fn rounds(site: Site) {
    let rounds = if full() { 50 } else { 4 };
    for round in 0..rounds {
        let moment = match round % 2 {
            0 => Moment::Holding,
            _ => Moment::Granting,
        };
        one(&site, round, moment, round / 2 % 2 == 1).await;
    }
}

async fn one(site: &Site, round: u64, moment: Moment, group: bool) {
    let name = format!("door/{round}");
    let mut gateway = Process::start(&site.url);
    let outsider = site.outsider().await;
    let holder = Session::open(gateway.addr, TTL).await;
    let waiter = Session::open(gateway.addr, TTL).await;
    let held = holder.claim(&name, "h", "0s").await.unwrap().is(200);
    waiter.claim(&name, "w", "0s").await.unwrap().is(202);
    // Behind both.
    let next = {
        let name = name.clone();
        let outsider = outsider.clone();
        tokio::spawn(async move {
            let hold = outsider.mutex(&name).lock().await.unwrap();
            (BootTime::now(), hold)
        })
    };
    until_line(&outsider, &name, (1, 2)).await;
    let mut beliefs = vec![("holder", held.believed())];
    if moment == Moment::Holding {
        // Renewed, so that the engine's deadline has moved.
        let kept = holder.keep_alive(&["h"]).await.unwrap().is(200);
        beliefs.push(("holder", believed(kept.sent, &kept.json["claims"][0])));
        waiter.keep_alive(&["w"]).await.unwrap().is(200);
        gateway.kill(group);
    } else {
        // The holder no longer relies on its hold once it releases.
        beliefs.clear();
        let asks = {
            let waiter = waiter.clone();
            tokio::spawn(async move {
                let body = serde_json::json!({"id": "w", "wait": "900ms"});
                waiter.post("/v1/claims/wait", &body).await
            })
        };
        let lets_go = tokio::spawn(async move { holder.release("h").await });
        // At a random time between before the release and after the answer to the waiter.
        let pause = rand::random_range(0..6_000);
        tokio::time::sleep(Duration::from_micros(pause)).await;
        gateway.kill(group);
        // The gateway is gone: each has its answer, or will never get one.
        if let Ok(granted) = asks.await.unwrap() {
            beliefs.push(("waiter", granted.believed()));
        }
        let _ = lets_go.await.unwrap();
    }
    let killed = BootTime::now();
    let (granted, hold) = soon("the next", next).await.unwrap();
    for (who, until) in beliefs {
        assert!(
            granted >= until,
            "round {round} ({moment:?}, group {group}): granted {:?} before the {who} may know",
            until.saturating_since(granted)
        );
    }
    let took = granted.saturating_since(killed);
    println!("round {round} ({moment:?}, group {group}): next after {took:?}");
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_file() {
    rounds(Site::file()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_redis() {
    let Some(site) = Site::served("redis") else {
        return;
    };
    rounds(site).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres() {
    let Some(site) = Site::served("postgres") else {
        return;
    };
    rounds(site).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_etcd() {
    let Some(site) = Site::served("etcd") else {
        return;
    };
    rounds(site).await;
}
