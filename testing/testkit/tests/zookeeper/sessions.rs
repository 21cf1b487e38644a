//! Sessions: who owns a node, what a hold is worth in other transactions, what is left behind.

use std::sync::Arc;
use std::time::Duration;

use palisade::engine::{Entered, Place};
use palisade::engines::zookeeper::ZooKeeperHold;
use palisade::{ErrorKind, LossReason};
use palisade_testkit::lab::launch::{Running, wire};
use palisade_testkit::lab::proxy::Direction;
use tokio::task::JoinSet;

use crate::util::{Raw, claim, connected, cycle, proxied, soon, until, uuid};

/// A node with a claim's name that belongs to another session proves nothing (CURATOR-498,
/// CURATOR-604).
#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_another_session_is_not_taken_for_ours() {
    let running = need!("zookeeper");
    let client = connected(&running).await;
    let mut raw = Raw::connect(running.nodes()[0].port());
    cycle(&client.mutex("twin")).await;
    let claim = Arc::new(claim("twin", Duration::from_secs(20)));
    let uuid = uuid(claim.id.0);
    // As left by a session that was lost and has not ended yet.
    let twin = format!("/palisade/twin/_c_{uuid}-lock-");
    raw.create(&twin, 3).unwrap();
    let enter = async || match client.engine().enter(Arc::clone(&claim)).await.unwrap() {
        Entered::In { ticket, place, .. } => (ticket, place),
        Entered::Busy => panic!("a claim that queues finds no place"),
    };
    let (_, place) = enter().await;
    assert_eq!(place, Place::Waiting, "the twin is ahead");
    // A repeated enter removes what an earlier session of the same claim may have left.
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
    // Not by a renewal, which is due after a third of the ttl.
    let mutex = client.mutex("taken").ttl(Duration::from_secs(75));
    let hold = mutex.lock().await.unwrap();
    let mut raw = Raw::connect(running.nodes()[0].port());
    let line = "/palisade/taken";
    // Not before it is watched, which takes a moment.
    until("a node", async || !raw.children(line).is_empty()).await;
    raw.delete_all(line);
    let loss = soon("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Taken);
}

/// Curator's way to ask a holder to release works.
#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_of_curators_is_an_eviction() {
    let running = need!("zookeeper");
    let client = connected(&running).await;
    // Its watch tells; a renewal is due after a third of the ttl.
    let mutex = client.mutex("revoked").ttl(Duration::from_secs(75));
    let hold = mutex.lock().await.unwrap();
    let node = hold.zookeeper_check().unwrap().path;
    let mut raw = Raw::connect(running.nodes()[0].port());
    raw.set(&node, b"__REVOKE__").unwrap();
    let loss = soon("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Evicted);
}

/// A server that has lost data which a client has seen is refused: its tokens would decrease.
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
    // A new client knows nothing of it.
    let other = connected(&running).await;
    let next = other.mutex("wiped").lock().await.unwrap();
    assert!(next.token() < hold.token(), "why `era` is to be raised");
}

/// The number of sessions on the server.
fn sessions(running: &Running) -> usize {
    let told = wire::four_letters(running.nodes()[0].port(), "mntr").unwrap();
    let count = told
        .lines()
        .find_map(|line| line.strip_prefix("zk_global_sessions\t"));
    count.unwrap().trim().parse().unwrap()
}

/// A client has one session for each ttl, and unused ones are closed; a client that ends leaves
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
    // The raw client's session, the longest one, and one for each ttl.
    assert!(sessions(&running) >= 4, "{}", sessions(&running));
    until("the end of idle sessions", async || sessions(&running) == 2).await;
    let hold = client.mutex("left").lock().await.unwrap();
    drop(hold);
    soon("the end", client.close()).await;
    assert_eq!(raw.children("/palisade/left").len(), 0);
    until("the end of the session", async || sessions(&running) == 1).await;
}

/// However long its line is, a claim that enters behind another of the same client knows which one
/// it waits for, and the line is read once for each grant.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_one_client_reads_the_line_only_in_its_turns() {
    const CROWD: usize = 200;
    let running = need!("zookeeper");
    let (proxy, url) = proxied(&running, 0);
    let mut raw = Raw::connect(running.nodes()[0].port());
    let client = palisade::connect(&url).await.unwrap();
    let reads = || {
        let seen = proxy.seen().into_iter();
        let lists = seen.filter(|seen| {
            let label = seen.label.as_deref().unwrap_or_default();
            seen.direction == Direction::ToEngine && label.starts_with("getChildren")
        });
        lists.count()
    };
    let hold = client.mutex("crowd").lock().await.unwrap();
    let before = reads();
    let mut crowd = JoinSet::new();
    for _ in 0..CROWD {
        let mutex = client.mutex("crowd");
        crowd.spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() });
    }
    until("the crowd", async || {
        raw.children("/palisade/crowd").len() == CROWD + 1
    })
    .await;
    let entered = reads() - before;
    assert!(entered < CROWD / 10, "{entered} reads to enter");
    hold.release().await.unwrap();
    soon("all of them", crowd.join_all()).await;
    let all = reads() - before;
    assert!(all < CROWD * 3 / 2, "{all} reads for {CROWD} grants");
}
