//! Faults of three members while eight clients work: no two believe to hold at once, tokens rise,
//! every waiter is served in time, and an expiry is reported before the next grant.

use std::time::Duration;

use palisade::engine::{Lease, Renewal};
use palisade::{BootTime, LossReason};
use palisade_testkit::lab::launch::Running;
use palisade_testkit::lab::proxy::{Direction, Kind, Protocol, Proxy};
use palisade_testkit::lab::trial::{Crew, survives_dead_connections};
use serde_json::json;

use crate::util::{call, run_ctl, soon, until};

const TTL: Duration = Duration::from_secs(4);

/// Eight clients that use one lock; each is served within two ttls and a second.
async fn crew(running: &Running) -> Crew {
    Crew::start(running.url(), 8, TTL, TTL * 2 + Duration::from_secs(1)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_is_killed() {
    let running = need!("etcd3");
    let crew = crew(&running).await;
    crew.lose_leader(&running).await;
    crew.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_is_stopped_for_five_seconds() {
    let running = need!("etcd3");
    let patient = palisade::connect(running.url()).await.unwrap();
    let mutex = patient.mutex("patient");
    let hold = mutex.ttl(Duration::from_secs(10)).lock().await.unwrap();
    let crew = crew(&running).await;
    crew.grants(40).await;
    let leader = running.leader_where(|_| true).unwrap();
    tokio::task::block_in_place(|| running.nodes()[leader].stop()).unwrap();
    let stopped = BootTime::now();
    crew.grants(10).await;
    tokio::time::sleep((stopped + Duration::from_secs(5)).remaining()).await;
    tokio::task::block_in_place(|| running.nodes()[leader].cont()).unwrap();
    crew.grants(40).await;
    crew.end().await;
    // Past the ttl of the last renewal before the stop.
    tokio::time::sleep((stopped + Duration::from_secs(11)).remaining()).await;
    assert!(
        hold.is_valid(),
        "a ttl of 10 s does not survive a stop of 5 s"
    );
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn members_are_restarted_one_by_one() {
    let running = need!("etcd3");
    let crew = crew(&running).await;
    for node in running.nodes() {
        crew.grants(20).await;
        tokio::task::block_in_place(|| node.restart()).unwrap();
        tokio::task::block_in_place(|| running.ready()).unwrap();
    }
    crew.grants(40).await;
    crew.end().await;
}

/// A proxy before each member, and a URL through them.
fn proxied(running: &Running) -> (Vec<Proxy>, String) {
    let start = |port: u16| Proxy::start(([127, 0, 0, 1], port).into(), Protocol::Grpc).unwrap();
    let proxies: Vec<Proxy> = running
        .nodes()
        .iter()
        .map(|node| start(node.port()))
        .collect();
    let hosts: Vec<String> = proxies
        .iter()
        .map(|proxy| proxy.addr().to_string())
        .collect();
    (proxies, format!("etcd://{}", hosts.join(",")))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_is_cut_off_for_longer_than_the_ttl() {
    let running = need!("etcd3");
    let (proxies, url) = proxied(&running);
    let lonely = palisade::connect(&url).await.unwrap();
    let mutex = lonely.mutex("shared").ttl(TTL);
    // First swallowed packets, then refused connections.
    for silent in [true, false] {
        let hold = soon("the lock", mutex.lock()).await.unwrap();
        let crew = crew(&running).await;
        let cut = BootTime::now();
        for proxy in &proxies {
            if silent {
                [Direction::ToEngine, Direction::ToClient].map(|d| proxy.blackhole(d))
            } else {
                [proxy.refuse(), proxy.cut_all()]
            };
        }
        let loss = hold.lost().await;
        let told = BootTime::now();
        assert_eq!(loss.reason, LossReason::Expired);
        assert!(told <= cut + TTL + Duration::from_millis(500), "told late");
        crew.grants(1).await;
        let next = crew.beliefs()[0];
        assert!(told < next.from, "told after the next grant");
        assert!(hold.token().0 < next.token, "tokens");
        drop(hold);
        proxies.iter().for_each(Proxy::heal);
        // It reconnects by itself, and gets its turn.
        let again = soon("a second lock", mutex.lock()).await.unwrap();
        assert!(again.token().0 > next.token, "tokens");
        again.release().await.unwrap();
        crew.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_that_hangs_is_a_loss_by_the_local_deadline() {
    let running = need!("etcd");
    let (proxies, url) = proxied(&running);
    let client = palisade::connect(&url).await.unwrap();
    let ttl = Duration::from_secs(3);
    let mutex = client.mutex("hangs").ttl(ttl);
    let hold = mutex.lock().await.unwrap();
    // Only the keepalive stream is lost: everything else is answered.
    let rule = palisade_testkit::lab::proxy::both_ways()
        .label_contains("LeaseKeepAlive")
        .black_hole(palisade_testkit::lab::proxy::Extent::Stream);
    let _hole = proxies[0].inject(rule);
    let begun = BootTime::now();
    let loss = soon("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Expired);
    assert!(
        begun + ttl + Duration::from_millis(300) >= BootTime::now(),
        "told late"
    );
}

/// A leader that was stopped and is continued renews leases that its successor has begun to count
/// down. So an answer from before a change of leaders is not trusted.
#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_of_an_earlier_term_is_not_believed() {
    let running = need!("etcd3");
    let (proxies, _) = proxied(&running);
    let leader = running.leader_where(|_| true).unwrap();
    let follower = &proxies[(leader + 1) % proxies.len()];
    // The keeper does not renew within the test.
    let url = format!("etcd://{}?timeout=30s&ttl=10m", follower.addr());
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("term").lock().await.unwrap();
    let renew = || {
        let lease = Lease::in_a_test(hold.ticket());
        let engine = client.engine().clone();
        async move { engine.renew(vec![lease], Duration::from_secs(2)).await }
    };
    assert!(matches!(renew().await[..], [Renewal::Held(_)]));
    let answer = palisade_testkit::lab::proxy::to_client()
        .label_contains("LeaseKeepAlive")
        .kind(Kind::Data)
        .once()
        .hold();
    let held_up = follower.inject(answer);
    let late = tokio::spawn(renew());
    soon("the answer of the first term", held_up.fired()).await;
    tokio::task::block_in_place(|| {
        let dead = running.kill_leader().unwrap();
        running.leader_where(|leader| leader != dead).unwrap();
    });
    held_up.release();
    let late = soon("the renewal", late).await.unwrap();
    assert!(matches!(late[..], [Renewal::Unknown(_)]), "{late:?}");
    // The next one is within one term again.
    until("a renewal", || async {
        matches!(renew().await[..], [Renewal::Held(_)])
    })
    .await;
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_revoked_by_hand() {
    let running = need!("etcd3");
    let client = palisade::connect(running.url()).await.unwrap();
    let mutex = client.mutex("shared").ttl(TTL);
    let hold = mutex.lock().await.unwrap();
    let crew = crew(&running).await;
    let lease = hold.ticket().lease.0;
    call(
        &running,
        "/v3/lease/revoke",
        json!({ "ID": lease.to_string() }),
    );
    let revoked = BootTime::now();
    // No earlier signal is possible: the next check after the end of the lease reports it.
    crew.grants(1).await;
    let loss = soon("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Taken);
    let took = BootTime::now().saturating_since(revoked);
    assert!(
        took < TTL / 3 + Duration::from_secs(2),
        "told after {took:?}"
    );
    let next = crew.beliefs()[0];
    assert!(hold.token().0 < next.token, "tokens");
    let late = hold.release().await.err().unwrap();
    assert_eq!(late.kind(), palisade::ErrorKind::Lost);
    // The same client continues with another lease.
    let again = soon("a second lock", mutex.lock()).await.unwrap();
    assert!(again.token().0 > next.token, "tokens");
    again.release().await.unwrap();
    crew.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn history_is_compacted_while_clients_wait() {
    let running = need!("etcd3");
    let crew = crew(&running).await;
    for _ in 0..5 {
        crew.grants(20).await;
        let status = call(&running, "/v3/maintenance/status", json!({}));
        let compact = json!({ "revision": status["header"]["revision"], "physical": true });
        call(&running, "/v3/kv/compaction", compact);
    }
    crew.grants(20).await;
    crew.end().await;
}

/// Existing connections go silent, new ones are served: a hold survives.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_connection_costs_no_hold() {
    let running = need!("etcd");
    let (proxies, url) = proxied(&running);
    survives_dead_connections(&url, &proxies[0]).await;
}

/// A snapshot is restored, with another cluster id as etcd advises, or with the same one: holders
/// are told, and why.
#[tokio::test(flavor = "multi_thread")]
async fn a_restored_cluster_ends_holds() {
    for token in ["another", "etcd-cluster"] {
        let running = need!("etcd");
        let client = palisade::connect(running.url()).await.unwrap();
        let mutex = client.mutex("kept");
        // A renewal is due within the limit, and the deadline long after it.
        let mutex = mutex.ttl(Duration::from_secs(40));
        let hold = mutex.lock().await.unwrap();
        let file = running.folder().join("snapshot").display().to_string();
        if run_ctl(&running, &["snapshot", "save", &file]).is_none() {
            return;
        }
        let other = client.mutex("other");
        for _ in 0..3 {
            other.lock().await.unwrap().release().await.unwrap();
        }
        let lease = || Lease::in_a_test(hold.ticket());
        let renew = || async {
            let within = Duration::from_secs(2);
            client.engine().renew(vec![lease()], within).await.remove(0)
        };
        assert!(matches!(renew().await, Renewal::Held(_)));
        let member = call(&running, "/v3/cluster/member/list", json!({}));
        let peer = member["members"][0]["peerURLs"][0].as_str().unwrap();
        let (node, cluster) = (&running.nodes()[0], format!("n0={peer}"));
        tokio::task::block_in_place(|| node.kill()).unwrap();
        let data = node.folder().join("data");
        std::fs::remove_dir_all(&data).unwrap();
        let data = data.display().to_string();
        let restore = ["snapshot", "restore", &file, "--data-dir", &data];
        let who = ["--name", "n0", "--initial-cluster", &cluster];
        let how = ["--initial-advertise-peer-urls", peer];
        let token = ["--initial-cluster-token", token];
        run_ctl(&running, &[&restore[..], &who, &how, &token].concat()).unwrap();
        tokio::task::block_in_place(|| node.restart()).unwrap();
        let told = std::cell::Cell::new(None);
        until("the loss", || async {
            if let Renewal::Revoked(error) = renew().await {
                told.set(Some(error));
            }
            !hold.is_valid()
        })
        .await;
        let loss = hold.lost().await;
        assert_eq!(loss.reason, LossReason::Taken, "{loss}");
        if let Some(error) = told.take() {
            assert!(error.to_string().contains("era="), "{error}");
        }
        let check = client.check().await.unwrap();
        let codes: Vec<&str> = check.findings.iter().map(|finding| finding.code).collect();
        assert!(codes.contains(&"cluster_replaced"), "{codes:?}");
    }
}
