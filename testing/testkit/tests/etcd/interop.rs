//! Other tools exclude palisade on the same name, and are excluded by it.

use palisade::engines::etcd::EtcdHold;
use palisade::report::Scope;
use palisade::{ErrorKind, Eviction, Name, Which};
use serde_json::json;

use crate::util::{
    applies, base64, beside_others, call, cycle, served, soon, start_ctl, until_one_waits,
};

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_lock_excludes_palisade() {
    let (running, client) = need!(beside_others().await);
    let ctl = need!(start_ctl(&running, &["lock", "/jobs/nightly"]));
    let key = ctl.line();
    let mutex = client.mutex("/jobs/nightly");
    assert!(mutex.try_lock().await.unwrap().is_none(), "two holders");
    let name = Name::new("/jobs/nightly").unwrap();
    let lines = client.survey(Scope::Line(name.clone())).await.unwrap();
    let foreign = &lines[0].holders[0];
    assert!(
        foreign.owner.is_none() && key.ends_with(&foreign.id),
        "{foreign:?}"
    );
    let gently = client.evict(&name, Which::Holders, Eviction::Mark).await;
    assert_eq!(gently.err().unwrap().kind(), ErrorKind::Unsupported);
    // It waits behind the other tool, also as a reader, and is woken by the tool's release.
    let reader = client.rwlock("/jobs/nightly");
    assert!(
        reader.try_read().await.unwrap().is_none(),
        "a reader beside a lock"
    );
    let waiter = tokio::spawn(async move { mutex.lock().await });
    until_one_waits(&client, "/jobs/nightly").await;
    ctl.interrupt();
    let hold = soon("the grant", waiter).await.unwrap().unwrap();
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_lock_is_excluded_by_palisade() {
    let (running, client) = need!(beside_others().await);
    // A reader excludes the tool just as a lock does.
    let read = client.rwlock("jobs").read().await.unwrap();
    let ctl = need!(start_ctl(&running, &["lock", "jobs"]));
    until_one_waits(&client, "jobs").await;
    assert!(ctl.is_silent(), "two holders");
    read.release().await.unwrap();
    assert!(ctl.line().starts_with("jobs/"));
    let write = client.mutex("jobs");
    assert!(write.try_lock().await.unwrap().is_none(), "two holders");
    // A forced eviction removes a foreign ticket and its key.
    let taken = client.evict("jobs", Which::Holders, Eviction::Remove);
    assert!(taken.await.unwrap());
    cycle(&write).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn v3lock_and_palisade_exclude_each_other() {
    let (running, client) = need!(beside_others().await);
    let lease = call(&running, "/v3/lease/grant", json!({ "TTL": 60 }));
    let lock = json!({ "name": base64(b"served"), "lease": lease["ID"] });
    let locked = call(&running, "/v3/lock/lock", lock.clone());
    let mutex = client.mutex("served");
    assert!(mutex.try_lock().await.unwrap().is_none(), "two holders");
    call(&running, "/v3/lock/unlock", json!({ "key": locked["key"] }));
    let hold = soon("the lock", mutex.lock()).await.unwrap();
    let served = tokio::task::spawn_blocking(move || {
        call(&running, "/v3/lock/lock", lock);
        running
    });
    until_one_waits(&client, "served").await;
    assert!(!served.is_finished(), "two holders");
    hold.release().await.unwrap();
    soon("v3lock's turn", served).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_elect_and_palisade_elect_one_leader() {
    let (running, client) = need!(beside_others().await);
    let election = client.election("boss");
    let ctl = need!(start_ctl(&running, &["elect", "boss", "theirs"]));
    assert!(ctl.line().starts_with("boss/"));
    assert_eq!(ctl.line(), "theirs");
    let leader = election.leader().await.unwrap().unwrap();
    assert_eq!(leader.value.as_deref(), Some("theirs"));
    let ours = election.clone();
    let campaign = tokio::spawn(async move { ours.campaign("ours").await });
    until_one_waits(&client, "boss").await;
    assert!(!campaign.is_finished(), "two leaders");
    ctl.interrupt();
    let led = soon("the election", campaign).await.unwrap().unwrap();
    // The tool's observers see our value, and what we proclaim.
    let listener = start_ctl(&running, &["elect", "-l", "boss"]).unwrap();
    assert!(listener.line().starts_with("boss/"));
    assert_eq!(listener.line(), "ours");
    led.proclaim("still ours").await.unwrap();
    assert!(listener.line().starts_with("boss/"));
    assert_eq!(listener.line(), "still ours");
    let theirs = start_ctl(&running, &["elect", "boss", "again"]).unwrap();
    until_one_waits(&client, "boss").await;
    assert!(theirs.is_silent(), "two leaders");
    led.resign().await.unwrap();
    assert!(theirs.line().starts_with("boss/"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_is_a_condition_for_other_writes() {
    let (running, client) = need!(served().await);
    let hold = client.mutex("guarded").lock().await.unwrap();
    let condition = hold.etcd_compare().unwrap();
    assert_eq!(hold.token().0, condition.create_revision as u64);
    let (key, created) = (&condition.key, condition.create_revision);
    assert!(applies(&running, key, created));
    assert!(!applies(&running, key, created + 1));
    hold.release().await.unwrap();
    let next = client.mutex("guarded").lock().await.unwrap();
    assert!(!applies(&running, key, created));
    next.release().await.unwrap();
    let memory = palisade::connect("memory:").await.unwrap();
    let other = memory.mutex("guarded").lock().await.unwrap();
    assert_eq!(other.etcd_compare(), None);
}
