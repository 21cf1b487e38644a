//! What the election promises.

use std::time::Duration;

use futures_util::StreamExt;
use palisade::{Election, ErrorKind, Eviction, Leader, Which};

use super::fixture::{answered, fails, free, granted, taken};
use super::{Fixture, cases, needs, soon};

cases! { pub(super) CASES, "election";
    "One leads at a time, and every later leader has a greater token." => [
        one_leads_at_a_time,
        terms_rise if needs::tokens,
        a_campaign_waits_for_its_turn,
        campaign_timeout_is_none_in_time,
    ],
    "Everyone sees who leads and what it stands for." => [
        nobody_leads_at_first,
        the_leader_is_seen_by_all,
        proclaim_replaces_the_value,
        a_former_leader_can_not_proclaim,
    ],
    "An observer is told of every change that lasts." => [
        observe_shows_changes,
        observe_begins_with_now,
    ],
}

/// The same election through two clients. A leadership that nobody resigns lasts.
async fn pair(fx: &Fixture) -> (Election, Election) {
    let (lasting, other) = (fx.lasting_client().await, fx.other_client().await);
    (lasting.election("chair"), other.election("chair"))
}

/// The leader; fails if there is none.
async fn leader(election: &Election) -> Leader {
    election.leader().await.unwrap().expect("a leader")
}

/// The value that the leader announces.
async fn value(election: &Election) -> String {
    leader(election).await.value.expect("a value")
}

async fn one_leads_at_a_time(fx: Fixture) {
    let (election, other) = pair(&fx).await;
    let leads = election.campaign("one").await.unwrap();
    taken(other.try_campaign("two").await);
    leads.resign().await.unwrap();
    let _leads = free(other.try_campaign("two").await);
    taken(election.try_campaign("one").await);
}

async fn terms_rise(fx: Fixture) {
    let (mine, other) = pair(&fx).await;
    let mut last = None;
    for election in [&mine, &other, &mine, &other] {
        let leads = election.campaign("x").await.unwrap();
        let token = leads.hold().token();
        assert_eq!(leader(&mine).await.token, token);
        assert!(Some(token) > last, "term {token} after {last:?}");
        last = Some(token);
        leads.resign().await.unwrap();
    }
}

async fn a_campaign_waits_for_its_turn(fx: Fixture) {
    let (election, other) = pair(&fx).await;
    let leads = election.campaign("one").await.unwrap();
    let campaign = async move { other.campaign("two").await };
    let campaign = fx.queued("chair", 1, campaign).await;
    assert_eq!(value(&election).await, "one");
    // Dropping resigns.
    drop(leads);
    let _leads = granted(campaign).await;
    assert_eq!(value(&election).await, "two");
}

async fn campaign_timeout_is_none_in_time(fx: Fixture) {
    let election = fx.client().election("chair");
    let _leads = election.campaign("one").await.unwrap();
    let patience = Duration::from_millis(150);
    let campaign = async || election.campaign_timeout("two", patience).await;
    taken(answered(&fx.client(), campaign).await);
}

async fn nobody_leads_at_first(fx: Fixture) {
    let election = fx.client().election("chair");
    assert_eq!(election.leader().await.unwrap(), None);
    election
        .campaign("one")
        .await
        .unwrap()
        .resign()
        .await
        .unwrap();
    assert_eq!(
        election.leader().await.unwrap(),
        None,
        "after a resignation"
    );
}

async fn the_leader_is_seen_by_all(fx: Fixture) {
    let (client, other) = (fx.client(), fx.other_client().await);
    let stands_for = "10.0.0.7:8080 ünïcode";
    let leads = client.election("chair").campaign(stands_for).await.unwrap();
    let leader = leader(&other.election("chair")).await;
    assert_eq!(leader.value.as_deref(), Some(stands_for));
    assert_eq!(leader.token, leads.hold().token());
    let owner = leader.owner.expect("an owner");
    assert_eq!(owner.owner, client.owner());
    assert_eq!(owner.pid, std::process::id());
}

async fn proclaim_replaces_the_value(fx: Fixture) {
    let election = fx.client().election("chair");
    let leads = election.campaign("one").await.unwrap();
    leads.proclaim("other").await.unwrap();
    assert_eq!(value(&election).await, "other");
    assert_eq!(leader(&election).await.token, leads.hold().token());
    assert!(leads.hold().is_valid());
}

async fn a_former_leader_can_not_proclaim(fx: Fixture) {
    let (election, other) = pair(&fx).await;
    let leads = election.campaign("one").await.unwrap();
    let evicted = fx
        .client()
        .evict(&fx.line("chair").name, Which::Holders, Eviction::Remove)
        .await;
    assert!(evicted.unwrap(), "a leader to evict");
    let _next = other.campaign("two").await.unwrap();
    fails(leads.proclaim("late").await, ErrorKind::Lost);
    assert_eq!(value(&election).await, "two");
}

async fn observe_shows_changes(fx: Fixture) {
    let (election, other) = pair(&fx).await;
    let mut seen = std::pin::pin!(other.observe());
    let mut next = async |what: &str| {
        let seen = soon(what, seen.next()).await;
        let leader = seen.expect("the observation ended").unwrap();
        leader.map(|leader| leader.value.expect("a value"))
    };
    assert_eq!(next("the first look").await, None);
    let leads = election.campaign("one").await.unwrap();
    assert_eq!(next("the leader").await.as_deref(), Some("one"));
    leads.proclaim("other").await.unwrap();
    assert_eq!(next("the new value").await.as_deref(), Some("other"));
    leads.resign().await.unwrap();
    assert_eq!(next("the resignation").await, None);
}

async fn observe_begins_with_now(fx: Fixture) {
    let election = fx.client().election("chair");
    let _leads = election.campaign("one").await.unwrap();
    let mut seen = std::pin::pin!(election.observe());
    let first = soon("a look", seen.next()).await.expect("a look");
    let value = first.unwrap().and_then(|leader| leader.value);
    assert_eq!(value.as_deref(), Some("one"));
}
