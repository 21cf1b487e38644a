//! Faults of servers while clients work: no two believe to hold at once, tokens rise, everyone is
//! served.

use std::time::Duration;

use palisade::ErrorKind;
use palisade_testkit::lab::launch::Running;
use palisade_testkit::lab::proxy::{Protocol, Proxy, to_engine};
use palisade_testkit::lab::trial::Crew;

use crate::util::{connected, fails};

const TTL: Duration = Duration::from_secs(4);

/// Longer than an election, two leases, and delays of a busy machine.
const PATIENCE: Duration = Duration::from_secs(21);

/// Clients that use one lock.
async fn crew(running: &Running) -> Crew {
    Crew::start(running.url(), 4, TTL, PATIENCE).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_is_killed() {
    let running = need!("consul3");
    let crew = crew(&running).await;
    crew.lose_leader(&running).await;
    crew.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_is_stopped_past_the_ttl() {
    let running = need!("consul3");
    let crew = crew(&running).await;
    crew.stop_leader(&running).await;
    crew.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_one_server_is_restarted() {
    let running = need!("consul");
    let crew = crew(&running).await;
    let ttl = Duration::from_secs(30);
    crew.outlives_a_restart(&running, ttl).await;
}

/// The first write of a claim that does not queue assumes a free line. However long that write
/// takes, the line is read before the claim is answered busy.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_server_hides_no_mismatch() {
    let running = need!("consul");
    let port = running.nodes()[0].port();
    let proxy = Proxy::start(([127, 0, 0, 1], port).into(), Protocol::Http1).unwrap();
    let slow = format!("consul://{}", proxy.addr());
    let slow = palisade::connect(&slow).await.unwrap();
    let client = connected(&running).await;
    let _readers = client.rwlock("mixed").read().await.unwrap();
    let _permit = client.semaphore("pool", 3).acquire().await.unwrap();
    // Longer than such a claim retries.
    let delay = Duration::from_millis(400);
    let _slow = proxy.inject(to_engine().containing("/v1/txn").delay(delay));
    assert!(slow.mutex("mixed").try_lock().await.unwrap().is_none());
    let permits = slow.semaphore("mixed", 3).try_acquire().await;
    fails(permits, ErrorKind::CapacityMismatch);
    let lock = slow.mutex("pool").try_lock().await;
    fails(lock, ErrorKind::CapacityMismatch);
}
