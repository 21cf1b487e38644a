//! The content of a Lease, and how palisade treats what others wrote there.

use std::time::Instant;

use futures_util::StreamExt;
use palisade::report::Scope;
use palisade::{ErrorKind, LossReason};
use palisade_testkit::lab::trial::every_nasty_name;
use serde_json::{Value, json};

use crate::util::{
    beside_others, client, cycle, holder, lease, seconds, server, shown, soon, until,
};

fn transitions(lease: &Value) -> i64 {
    lease["spec"]["leaseTransitions"].as_i64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_is_a_lease_by_client_gos_rules() {
    let server = server();
    let client = client(&server).await;
    let hold = client.mutex("a").ttl(seconds(20)).lock().await.unwrap();
    let taken = lease(&server, "a");
    assert!(holder(&taken).contains(&hold.claim().to_string()));
    assert_eq!(taken["spec"]["leaseDurationSeconds"], 20);
    assert_eq!(transitions(&taken), 1);
    assert_eq!(taken["spec"]["acquireTime"], taken["spec"]["renewTime"]);
    // The version that the acquiring write was conditioned on: that of the newly created Lease.
    let version: u64 = taken["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    let token = hold.token().0;
    assert!(token < version, "{token} and {version}");
    let kept: Value = serde_json::from_str(
        taken["metadata"]["annotations"]["palisade/holders"]
            .as_str()
            .unwrap(),
    )
    .unwrap();
    assert_eq!(kept["holders"][0]["token"], token);
    hold.release().await.unwrap();
    let free = lease(&server, "a");
    assert_eq!(
        (holder(&free), &free["spec"]["leaseDurationSeconds"]),
        ("", &json!(1))
    );
    assert_eq!(transitions(&free), 1, "kept for others");
    // A warm cycle costs two writes and no read. The watch that the first lock began may be asked
    // for during one of these.
    let mut reads = Vec::new();
    for _ in 0..3 {
        let (before, writes) = (server.requests("GET"), server.requests("PUT"));
        cycle(&client.mutex("a")).await;
        assert_eq!(server.requests("PUT") - writes, 2);
        reads.push(server.requests("GET") - before);
    }
    assert!(reads.contains(&0), "{reads:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_over_delete_and_create() {
    let server = server();
    let client = client(&server).await;
    let mut last = 0;
    for _ in 0..4 {
        let hold = client.mutex("a").lock().await.unwrap();
        assert!(hold.token().0 > last, "{} after {last}", hold.token());
        last = hold.token().0;
        hold.release().await.unwrap();
        server.delete("palisade.a");
    }
}

/// The control is in `status.rs`: a write with only the version re-creates a deleted Lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_was_deleted_while_held_is_lost_and_not_brought_back() {
    let server = server();
    let (one, two) = (client(&server).await, client(&server).await);
    let hold = one.mutex("a").ttl(seconds(3)).lock().await.unwrap();
    server.delete("palisade.a");
    let loss = soon("the loss", hold.lost()).await;
    assert_eq!(loss.reason, LossReason::Taken);
    assert_eq!(
        server.lease("palisade.a"),
        None,
        "brought back by a renewal"
    );
    let next = two.mutex("a").lock().await.unwrap();
    assert!(next.token() > hold.token());
    // Its release is late, and changes nothing.
    let before = lease(&server, "a");
    assert!(hold.release().await.is_err());
    one.flush().await;
    assert_eq!(
        lease(&server, "a")["metadata"]["uid"],
        before["metadata"]["uid"]
    );
    assert!(next.is_valid() && holder(&lease(&server, "a")) == holder(&before));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_being_deleted_is_not_taken() {
    let server = server();
    let client = beside_others(&server).await;
    cycle(&client.mutex("a")).await;
    server.edit("a", |lease| {
        lease["metadata"]["finalizers"] = json!(["example.org/x"])
    });
    server.delete("a");
    assert!(client.mutex("a").try_lock().await.unwrap().is_none());
    let mutex = client.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await });
    server.edit("a", |lease| lease["metadata"]["finalizers"] = json!([]));
    drop(soon("the grant", waiting).await.unwrap().unwrap());
}

/// All spec fields are optional, and data of others in an object is preserved.
#[tokio::test(flavor = "multi_thread")]
async fn leases_of_others_are_taken_as_they_are() {
    let server = server();
    let client = beside_others(&server).await;
    let path = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let bare = json!({ "metadata": {
        "name": "bare", "labels": { "app": "theirs" }, "annotations": { "note": "theirs" },
    } });
    assert_eq!(server.ask("POST", path, &bare).0, 201);
    let hold = client.mutex("bare").lock().await.unwrap();
    let taken = server.lease("bare").unwrap();
    assert_eq!(taken["metadata"]["labels"]["app"], "theirs");
    assert_eq!(taken["metadata"]["annotations"]["note"], "theirs");
    hold.release().await.unwrap();
    let held = json!({ "metadata": { "name": "held" }, "spec": { "holderIdentity": "x" } });
    assert_eq!(server.ask("POST", path, &held).0, 201);
    assert!(client.mutex("held").try_lock().await.unwrap().is_none());
    // An annotation that is not our record is ignored.
    server.edit("held", |lease| {
        lease["metadata"]["annotations"] = json!({ "palisade/holders": "{\"id\":\"x\"" });
    });
    assert_eq!(shown(&client, "held").await.unwrap().holders[0].id, "x");
    let error = client.mutex("Not/a.name").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidName);
    // Leases without any data of palisade are not listed.
    let all = client.survey(Scope::Prefix(String::new())).await.unwrap();
    assert!(all.is_empty(), "{all:?}");
}

/// A process that never waits and has never seen the holder detects its death: it watches the
/// record for exactly the record's duration.
#[tokio::test(flavor = "multi_thread")]
async fn no_wait_watches_a_record_that_is_overdue() {
    let server = server();
    let dead = client(&server).await;
    let mutex = dead.mutex("cron").ttl(seconds(2)).unrenewed();
    let hold = mutex.lock().await.unwrap();
    // Not dropped, so that nobody leaves for it.
    let fresh = client(&server).await;
    let start = Instant::now();
    assert!(fresh.mutex("cron").try_lock().await.unwrap().is_none());
    assert!(start.elapsed() < seconds(1), "busy is said at once");
    hold.lost().await;
    until("its end", async || shown(&fresh, "cron").await.is_none()).await;
    let late = client(&server).await;
    let start = Instant::now();
    let next = late.mutex("cron").try_lock().await.unwrap();
    let took = start.elapsed();
    assert!(next.is_some(), "busy for ever");
    assert!(
        took >= seconds(1),
        "taken after {took:?} without having been watched"
    );
    assert!(next.unwrap().token() > hold.token());
}

/// A live holder is not replaced, even if its clock or ours says that it should be gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_clock_that_is_an_hour_off_changes_nothing() {
    for ahead in [3600, -3600] {
        let server = server();
        let holder = client(&server).await;
        let hold = holder.mutex("a").ttl(seconds(2)).lock().await.unwrap();
        server.set_clock_ahead(ahead);
        let other = client(&server).await;
        let start = Instant::now();
        while start.elapsed() < seconds(3) {
            assert!(
                other.mutex("a").try_lock().await.unwrap().is_none(),
                "{ahead}"
            );
            assert!(hold.is_valid(), "{ahead}");
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        assert!(shown(&other, "a").await.is_some(), "{ahead}");
        let check = other.check().await.unwrap();
        let off = check.clock_ahead_us.unwrap() / 1_000_000;
        assert!((off - ahead).abs() < 5, "{off}");
        assert!(
            check
                .findings
                .iter()
                .any(|finding| finding.code == "clock_off")
        );
        hold.release().await.unwrap();
        assert!(other.mutex("a").try_lock().await.unwrap().is_some());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_that_were_free_for_a_day_are_deleted() {
    let server = server();
    let client = client(&server).await;
    for name in ["old", "young", "held"] {
        cycle(&client.mutex(name)).await;
    }
    let hold = client.mutex("held").lock().await.unwrap();
    let past = |lease: &mut Value| {
        lease["spec"]["renewTime"] = "2020-01-02T03:04:05.000000Z".into();
    };
    server.edit("palisade.old", past);
    server.edit("palisade.held", past);
    // A Lease like ours that somebody else created.
    let path = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let theirs = json!({ "metadata": { "name": "palisade.theirs" }, "spec": {
        "renewTime": "2020-01-02T03:04:05.000000Z",
    } });
    assert_eq!(server.ask("POST", path, &theirs).0, 201);
    client.survey(Scope::Prefix(String::new())).await.unwrap();
    let left = server.leases();
    assert_eq!(left, ["palisade.held", "palisade.theirs", "palisade.young"]);
    drop(hold);
    // A name whose Lease was deleted can be locked as before.
    let again = client.mutex("old").lock().await.unwrap();
    again.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_name_is_kept_apart() {
    let server = server();
    every_nasty_name(&client(&server).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_election_has_a_value_that_is_observed() {
    let server = server();
    let (one, two) = (client(&server).await, client(&server).await);
    let elected = one.election("leader").campaign("one:80").await.unwrap();
    let mut seen = Box::pin(two.election("leader").observe());
    let mut next = async || soon("a leader", seen.next()).await.unwrap().unwrap();
    assert_eq!(next().await.unwrap().value.as_deref(), Some("one:80"));
    let token = elected.hold().token();
    elected.proclaim("one:81").await.unwrap();
    let leader = next().await.unwrap();
    assert_eq!(
        (leader.value.as_deref(), leader.token),
        (Some("one:81"), token)
    );
    assert!(elected.hold().is_valid());
    elected.resign().await.unwrap();
    assert!(next().await.is_none());
}

/// What `palisade bench --baseline` compares with: a Lease acquired and released, and a hand-over.
#[tokio::test(flavor = "multi_thread")]
async fn the_raw_operations_work() {
    let server = server();
    let raw = palisade::command::baseline(&server.url()).await;
    let raw = raw.unwrap().expect("raw operations");
    for _ in 0..3 {
        raw.cycle("bench/a".into()).await.unwrap();
    }
    let taken = tokio::spawn(raw.take("bench/a".into()));
    raw.give("bench/a".into()).await.unwrap();
    soon("the baton", taken).await.unwrap().unwrap();
}
