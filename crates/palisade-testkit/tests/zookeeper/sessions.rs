//! Sessions: who owns a node, what a hold is worth in other transactions, what is left behind.

use std::sync::Arc;
use std::time::Duration;

use palisade::engine::{Entered, Place};
use palisade::engines::zookeeper::ZooKeeperHold;
use palisade::{ErrorKind, LossReason};
use palisade_testkit::lab::launch::{Running, wire};

use crate::util::{Raw, claim, connected, cycle, soon, until, uuid};

/// A node that has a claim's name but lives with another session is nobody's proof of anything
/// (CURATOR-498, CURATOR-604).
#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_another_session_is_not_taken_for_ours() {
    let running = need!("zookeeper");
    let client = connected(&running).await;
    let mut raw = Raw::connect(running.nodes()[0].port());
    cycle(&client.mutex("twin")).await;
    let claim = Arc::new(claim("twin", Duration::from_secs(20)));
    let uuid = uuid(claim.id.0);
    // As a session that is lost and not yet ended leaves it.
    let twin = format!("/palisade/twin/_c_{uuid}-lock-");
    raw.create(&twin, 3).unwrap();
    let enter = async || match client.engine().enter(Arc::clone(&claim)).await.unwrap() {
        Entered::In { ticket, place, .. } => (ticket, place),
        Entered::Busy => panic!("a claim that queues finds no place"),
    };
    let (_, place) = enter().await;
    assert_eq!(place, Place::Waiting, "the twin is ahead");
    // Asked again, it removes what an earlier session of its own may have left.
    let (ticket, place) = enter().await;
    assert_eq!(raw.children("/palisade/twin").len(), 1);
    let place = match place {
        Place::Waiting => client.engine().wait(ticket, palisade::BootTime::PAST).await,
        place => Ok(place),
    };
    assert!(matches!(place.unwrap(), Place::Held { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_is_a_check_for_other_transactions() {
    let running = need!("zookeeper");
    let client = connected(&running).await;
    let mut raw = Raw::connect(running.nodes()[0].port());
    let hold = client.mutex("checked").lock().await.unwrap();
    let check = hold.zookeeper_check().unwrap();
    assert!(raw.check(&check.path, check.version));
    hold.release().await.unwrap();
    assert!(!raw.check(&check.path, check.version));
    let memory = palisade::connect("memory:").await.unwrap();
    let hold = memory.mutex("checked").lock().await.unwrap();
    assert_eq!(hold.zookeeper_check(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_removed_by_hand_is_told() {
    let running = need!("zookeeper");
    let client = connected(&running).await;
    let hold = client.mutex("taken").lock().await.unwrap();
    let mut raw = Raw::connect(running.nodes()[0].port());
    let line = "/palisade/taken";
    // Not before it is watched, which takes a moment.
    until("a node", async || !raw.children(line).is_empty()).await;
    raw.delete_all(line);
    let loss = soon("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Taken);
}

/// Curator's way to ask a holder to let go is heard.
#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_of_curators_is_an_eviction() {
    let running = need!("zookeeper");
    let client = connected(&running).await;
    let hold = client.mutex("revoked").lock().await.unwrap();
    let node = hold.zookeeper_check().unwrap().path;
    let mut raw = Raw::connect(running.nodes()[0].port());
    raw.set(&node, b"__REVOKE__").unwrap();
    let loss = soon("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Evicted);
}

/// A server that has lost what a client has seen is refused: its tokens would go back.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_an_older_history_is_refused() {
    let running = need!("zookeeper");
    let client = connected(&running).await;
    let mutex = client.mutex("wiped").ttl(Duration::from_secs(3));
    for _ in 0..20 {
        mutex.lock().await.unwrap().release().await.unwrap();
    }
    let hold = mutex.lock().await.unwrap();
    tokio::task::block_in_place(|| running.wipe()).unwrap();
    let loss = soon("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Expired);
    let refused = mutex.try_lock().await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unreachable, "{refused}");
    // Whoever starts anew knows nothing of it.
    let other = connected(&running).await;
    let next = other.mutex("wiped").lock().await.unwrap();
    assert!(next.token() < hold.token(), "why `era` is to be raised");
}

/// How many sessions the server has.
fn sessions(running: &Running) -> usize {
    let told = wire::four_letters(running.nodes()[0].port(), "mntr").unwrap();
    let count = told
        .lines()
        .find_map(|line| line.strip_prefix("zk_global_sessions\t"));
    count.unwrap().trim().parse().unwrap()
}

/// A client has one session for each ttl, and those that nobody uses go; one that ends leaves
/// neither a session nor a node behind.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_behind() {
    let running = need!("zookeeper");
    let mut raw = Raw::connect(running.nodes()[0].port());
    let client = connected(&running).await;
    for seconds in [1, 2, 3] {
        let mutex = client.mutex("left").ttl(Duration::from_secs(seconds));
        mutex.lock().await.unwrap().release().await.unwrap();
    }
    // That of the raw client, the longest, and one for each ttl.
    assert!(sessions(&running) >= 4, "{}", sessions(&running));
    until("the end of idle sessions", async || sessions(&running) == 2).await;
    let hold = client.mutex("left").lock().await.unwrap();
    drop(hold);
    soon("the end", client.close()).await;
    assert_eq!(raw.children("/palisade/left").len(), 0);
    until("the end of the session", async || sessions(&running) == 1).await;
}
