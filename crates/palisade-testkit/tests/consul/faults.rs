//! Servers are hurt while clients work: no two believe at once, tokens rise, everyone is served.

use std::time::Duration;

use palisade_testkit::lab::launch::Running;
use palisade_testkit::lab::trial::Crew;

use crate::util::connected;

const TTL: Duration = Duration::from_secs(4);

/// Longer than an election, a lease twice over, and a busy machine.
const PATIENCE: Duration = Duration::from_secs(21);

/// Clients at work on one lock.
async fn crew(running: &Running) -> Crew {
    Crew::start(running.url(), 4, TTL, PATIENCE).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_is_killed() {
    let running = need!("consul3");
    let crew = crew(&running).await;
    crew.grants(20).await;
    let killed = tokio::task::block_in_place(|| running.kill_leader()).unwrap();
    crew.grants(20).await;
    tokio::task::block_in_place(|| running.nodes()[killed].restart()).unwrap();
    crew.grants(20).await;
    crew.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_is_stopped_past_the_ttl() {
    let running = need!("consul3");
    let crew = crew(&running).await;
    crew.grants(20).await;
    let leader = running.leader().unwrap();
    tokio::task::block_in_place(|| running.nodes()[leader].stop()).unwrap();
    crew.grants(10).await;
    tokio::task::block_in_place(|| running.nodes()[leader].cont()).unwrap();
    crew.grants(20).await;
    crew.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_one_server_is_restarted() {
    let running = need!("consul");
    let client = connected(&running).await;
    let ttl = Duration::from_secs(30);
    let kept = client.mutex("kept").ttl(ttl).lock().await.unwrap();
    let crew = crew(&running).await;
    crew.grants(20).await;
    tokio::task::block_in_place(|| running.nodes()[0].restart()).unwrap();
    crew.grants(20).await;
    crew.end().await;
    assert!(kept.is_valid(), "a restart shorter than the ttl is no loss");
    let token = kept.token();
    kept.release().await.unwrap();
    let next = client.mutex("kept").lock().await.unwrap();
    assert!(next.token() > token);
}
