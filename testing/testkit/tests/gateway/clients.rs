//! Clients that disappear, and a gateway that is stopped for longer than a ttl.

use std::net::SocketAddr;
use std::time::Duration;

use palisade::BootTime;
use palisade_testkit::lab::trial::soon;
use rustix::process::Signal;

use crate::process::Process;
use crate::support::*;

const TTL: Duration = Duration::from_secs(2);

/// An allowance for a busy machine; on an idle one all is released within a ttl and a second.
fn slack() -> Duration {
    Duration::from_secs(if full() { 1 } else { 15 })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_is_gone_loses_all_by_its_ttl() {
    let site = Site::file();
    let gateway = Process::start(&site.url);
    let outsider = site.outsider().await;
    let blocked = outsider.mutex("waits").lock().await.unwrap();
    let session = Session::open(gateway.addr, TTL).await;
    for at in 0..20 {
        let name = format!("x{at}");
        session.claim(&name, &name, "0s").await.unwrap().is(200);
    }
    session.claim("waits", "w", "0s").await.unwrap().is(202);
    // Its last request.
    let last = session.keep_alive(&["x0", "w"]).await.unwrap().is(200);
    let promised = believed(last.sent, &last.json["claims"][0]);
    for at in 0..20 {
        until_line(&outsider, &format!("x{at}"), (0, 0)).await;
    }
    until_line(&outsider, "waits", (1, 0)).await;
    let took = BootTime::now().saturating_since(last.sent);
    assert!(promised.has_passed());
    assert!(took <= TTL + slack(), "released after {took:?}");
    // The gateway's metrics count these as lost.
    assert_eq!(lost(gateway.addr).await, 20);
    blocked.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_stopped_past_the_ttl_gives_nothing_back() {
    let Some(redis) = Site::served("redis") else {
        return;
    };
    for site in [Site::file(), redis] {
        let gateway = Process::start(&site.url);
        let outsider = site.outsider().await;
        let session = Session::open(gateway.addr, TTL).await;
        let held = session.claim("x", "h", "0s").await.unwrap().is(200);
        gateway.signal(Signal::STOP);
        // Sent to a gateway that is stopped, and answered when it is continued.
        let asked = {
            let session = session.clone();
            tokio::spawn(async move { session.keep_alive(&["h"]).await })
        };
        let next = soon("the next", outsider.mutex("x").lock()).await.unwrap();
        let granted = BootTime::now();
        assert!(granted >= held.believed(), "granted within a promise");
        gateway.signal(Signal::CONT);
        let kept = asked.await.unwrap().unwrap();
        let believed = match kept.status {
            200 => believed(kept.sent, &kept.json["claims"][0]),
            410 => BootTime::PAST,
            _ => panic!("{kept:?}"),
        };
        assert!(believed <= granted, "promised what another has: {kept:?}");
        let again = session.keep_alive(&["h"]).await.unwrap();
        let state = again.json["claims"][0]["state"].as_str();
        assert!(again.status == 410 || state != Some("held"), "{again:?}");
        assert!(next.is_valid());
        // Observers are told on a thread of their own.
        soon("the loss is counted", async {
            while lost(gateway.addr).await == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
        assert_eq!(lost(gateway.addr).await, 1);
        next.release().await.unwrap();
    }
}

/// The number of lost holds in the gateway's metrics.
async fn lost(addr: SocketAddr) -> u64 {
    let text = text_of(addr, "/metrics").await;
    let counts = text.lines().filter_map(|line| {
        let count = line.strip_prefix("palisade_lost_total{")?;
        count.rsplit_once(' ')?.1.parse::<u64>().ok()
    });
    counts.sum()
}
