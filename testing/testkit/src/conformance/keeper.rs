//! What the keeper promises: renewal, loss in time, and no place left behind. A spy around the
//! engine simulates the faults.

use std::time::Duration;

use palisade::engine::Ask::Whole;
use palisade::{BootTime, ErrorKind, LossReason, Outcome, Patience, Request};

use super::fixture::{fails, free, granted};
use super::{Fixture, SOON, cases, needs, soon, within};
use crate::spy::{Enters, Verb};

cases! { pub(super) CASES, "keeper";
    "A hold lives until it is released, however short its ttl." => [
        a_hold_outlives_its_ttl,
        a_waiter_outlives_its_ttl,
        two_unanswered_renewals_are_no_loss,
        hold_survives_a_dead_connection if needs::network,
        a_blocked_runtime_costs_no_lease,
    ],
    "A hold without renewal ends with its ttl, and nothing else with it." => [
        an_unrenewed_hold_ends_beside_one_that_lives,
        an_unrenewed_claim_is_kept_while_it_waits,
    ],
    "A lease that ends is told to its holder before anyone else is granted." => [
        expiry_is_told_before_the_next_grant if needs::early_loss,
        the_deadline_counts_from_the_last_answer if needs::early_loss,
    ],
    "A grant counts only while its own lease is good." => [
        a_grant_that_comes_too_late_is_no_hold,
    ],
    "A release stops the renewal first." => [
        no_renewal_after_a_release,
        close_waits_for_background_releases,
        a_hold_dropped_without_a_runtime_is_released,
    ],
    "A lost answer is asked for again with the same claim, which has one place at the most." => [
        a_lost_answer_is_one_grant,
        no_wait_says_that_it_may_be_applied,
    ],
    "A future dropped at any await leaves no place behind, even if its request arrives later." => [
        a_future_dropped_before_the_answer_leaves_nothing,
        a_request_that_arrives_late_leaves_nothing,
    ],
}

async fn a_hold_outlives_its_ttl(fx: Fixture) {
    let ttl = fx.short_ttl();
    let hold = fx.mutex("kept").ttl(ttl).lock().await.unwrap();
    let end = BootTime::now() + ttl * 3;
    while !end.has_passed() {
        assert!(hold.is_valid(), "lost");
        tokio::time::sleep(ttl / 10).await;
    }
    let holders = fx.line("kept").shown().await.holders;
    assert_eq!(holders.len(), 1, "holders");
    let sequence = holders[0].sequence.unwrap_or(0);
    assert_eq!(fx.client().token(sequence).unwrap(), hold.token());
    hold.release().await.unwrap();
}

/// Waits for `time`, and asserts that the one waiter of `name` keeps its place.
async fn wait_on(fx: &Fixture, name: &str, time: Duration) {
    let before = fx.line(name).ids().await.1;
    tokio::time::sleep(time).await;
    let waiters = fx.line(name).ids().await.1;
    assert_eq!(waiters, before);
    assert_eq!(waiters.len(), usize::from(fx.capability().waiters_visible));
}

async fn a_waiter_outlives_its_ttl(fx: Fixture) {
    let ttl = fx.short_ttl();
    let hold = fx.mutex("kept").ttl(ttl).lock().await.unwrap();
    let mutex = fx.other_client().await.mutex("kept").ttl(ttl);
    let waiter = fx
        .queued("kept", 1, async move { mutex.lock().await })
        .await;
    wait_on(&fx, "kept", ttl * 2).await;
    hold.release().await.unwrap();
    drop(granted(waiter).await);
}

async fn two_unanswered_renewals_are_no_loss(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let ttl = fx.fit(fx.short_ttl() * 5);
    let hold = client.mutex("kept").ttl(ttl).lock().await.unwrap();
    spy.lose_renewals(2);
    within(ttl, "a third renewal", spy.called(Verb::Renew, 3)).await;
    fx.keeps(&hold, ttl * 3 / 2).await;
    hold.release().await.unwrap();
}

/// Existing connections go silent, as behind a firewall that dropped their state; new ones work.
async fn hold_survives_a_dead_connection(fx: Fixture) {
    let (proxies, client) = fx.proxied_client().await;
    let ttl = fx.fit(Duration::from_secs(3));
    let hold = client.mutex("dead").ttl(ttl).lock().await.unwrap();
    let lasting = client.mutex("lasting").ttl(fx.long_ttl());
    let lasting = lasting.lock().await.unwrap();
    for _ in 0..2 {
        proxies.silence();
        fx.keeps(&hold, ttl * 3 / 2).await;
    }
    // The connection of this runtime may still be dead; the keeper has a live one.
    drop((hold, lasting));
    fx.line("lasting").until_empty().await;
}

async fn a_blocked_runtime_costs_no_lease(fx: Fixture) {
    // Long enough for a machine that stalls meanwhile.
    let ttl = fx.fit(Duration::from_secs(3));
    let hold = fx.mutex("kept").ttl(ttl).lock().await.unwrap();
    // Simulates user code that blocks: every thread of this runtime is busy. There are more tasks
    // than threads, and all end at the same time, whenever they begin.
    let workers = tokio::runtime::Handle::current().metrics().num_workers();
    let end = BootTime::now() + ttl * 2;
    let block = || tokio::spawn(async move { std::thread::sleep(end.remaining()) });
    let blocked: Vec<_> = (0..workers * 2).map(|_| block()).collect();
    std::thread::sleep(end.remaining());
    assert!(hold.is_valid(), "lost with its runtime");
    for task in blocked {
        task.await.unwrap();
    }
    hold.release().await.unwrap();
}

/// A request without renewal; `None` where it is refused because holds live with their process or
/// session.
async fn unrenewed(fx: &Fixture, name: &str) -> Option<Request> {
    let line = fx
        .client()
        .line(name, Whole)
        .ttl(fx.short_ttl())
        .unrenewed();
    if fx.capability().detached {
        return Some(line);
    }
    fails(line.acquire(Patience::NoWait).await, ErrorKind::Unsupported);
    None
}

async fn an_unrenewed_hold_ends_beside_one_that_lives(fx: Fixture) {
    let Some(line) = unrenewed(&fx, "ending").await else {
        return;
    };
    let ttl = fx.short_ttl();
    let kept = fx.mutex("kept").ttl(ttl).lock().await.unwrap();
    let asked = BootTime::now();
    let ending = free(line.acquire(Patience::Forever).await);
    let mutex = fx.other_client().await.mutex("ending");
    let waiter = tokio::spawn(async move { mutex.lock().await });
    let loss = within(ttl + SOON, "its end", ending.lost()).await;
    assert_eq!(loss.reason, LossReason::Expired);
    // The engine ends it even if its owner does not release it.
    let next = within(ttl + SOON, "the next grant", waiter)
        .await
        .unwrap()
        .unwrap();
    assert!(BootTime::now() >= asked + ttl, "ended before its ttl");
    assert!(next.token() > ending.token(), "tokens");
    assert!(kept.is_valid(), "another hold ended with it");
    assert_eq!(fx.line("kept").length().await, (1, 0));
    fails(ending.release().await, ErrorKind::Lost);
    assert!(next.is_valid(), "a late release took another's place");
    next.release().await.unwrap();
    kept.release().await.unwrap();
}

async fn an_unrenewed_claim_is_kept_while_it_waits(fx: Fixture) {
    let Some(line) = unrenewed(&fx, "waits").await else {
        return;
    };
    let ttl = fx.short_ttl();
    let first = fx.mutex("waits").lock().await.unwrap();
    let acquire = async move { line.acquire(Patience::Forever).await };
    let waiter = fx.queued("waits", 1, acquire).await;
    wait_on(&fx, "waits", ttl * 2).await;
    first.release().await.unwrap();
    let hold = granted(waiter).await.expect("it holds");
    within(ttl + SOON, "its end", hold.lost()).await;
}

async fn expiry_is_told_before_the_next_grant(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let ttl = fx.short_ttl();
    let hold = client.mutex("expiry").ttl(ttl).lock().await.unwrap();
    spy.lose_renewals(u32::MAX);
    let mutex = fx.mutex("expiry");
    let waiter = tokio::spawn(async move { (mutex.lock().await.unwrap(), BootTime::now()) });
    let loss = within(ttl + SOON, "the loss", hold.lost()).await;
    let told = BootTime::now();
    assert!(!hold.is_valid(), "a lost hold is valid");
    assert_eq!(loss.reason, LossReason::Expired);
    let (next, at) = within(ttl + SOON, "the grant", waiter).await.unwrap();
    let late = told.saturating_since(at);
    assert!(told < at, "told {late:?} after the grant");
    assert!(hold.deadline() < at, "believed beyond the grant");
    assert!(next.token() > hold.token(), "tokens");
    let before = at.saturating_since(told);
    fx.note("told_before_ms", before.as_secs_f64() * 1e3);
}

async fn the_deadline_counts_from_the_last_answer(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let ttl = fx.fit(fx.short_ttl() * 2);
    let hold = client.mutex("expiry").ttl(ttl).lock().await.unwrap();
    within(ttl, "a renewal", spy.called(Verb::Renew, 1)).await;
    spy.lose_renewals(u32::MAX);
    within(ttl + SOON, "the loss", hold.lost()).await;
    let told = BootTime::now();
    let renewals = spy.calls(Verb::Renew);
    // At most one more renewal was answered before the rest were lost.
    let answered = renewals.get(1).unwrap_or(&renewals[0]).at;
    let half = renewals[0].at + *fx.granted(ttl).start() / 2;
    assert!(told >= half, "told long before the lease ends");
    assert!(
        hold.deadline() < answered + ttl,
        "believed beyond the lease"
    );
}

async fn a_grant_that_comes_too_late_is_no_hold(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let ttl = fx.short_ttl();
    let line = client.line("late", Whole).ttl(ttl);
    // The answer says that it holds, but the lease ends before the answer arrives.
    spy.set_enters(Enters::ReplyDelayed(ttl));
    let late = within(ttl + SOON, "an answer", line.acquire(Patience::NoWait)).await;
    assert!(late.unwrap().is_none(), "a hold whose lease has ended");
    spy.set_enters(Enters::ReplyDelayed(ttl));
    let hold = within(ttl + SOON, "a hold", line.acquire(Patience::Forever)).await;
    let hold = free(hold);
    assert!(hold.is_valid(), "a hold whose lease has ended");
    hold.release().await.unwrap();
}

async fn no_renewal_after_a_release(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let ttl = fx.short_ttl();
    let hold = client.mutex("released").ttl(ttl).lock().await.unwrap();
    within(ttl, "a renewal", spy.called(Verb::Renew, 1)).await;
    let claim = hold.claim().0;
    hold.release().await.unwrap();
    let left = spy.calls(Verb::Leave);
    assert_eq!(left.len(), 1, "leaves");
    tokio::time::sleep(ttl * 3 / 2).await;
    let mut renewals = spy.calls(Verb::Renew).into_iter();
    let late = renewals.find(|call| call.about == Some(claim) && call.at > left[0].at);
    assert!(late.is_none(), "renewed after the release: {late:?}");
    assert_eq!(spy.calls(Verb::Leave).len(), 1, "leaves");
}

async fn close_waits_for_background_releases(fx: Fixture) {
    let client = fx.other_client().await;
    let name = |index| format!("closed-{index}");
    let mut holds = Vec::new();
    for index in 0..20 {
        holds.push(client.mutex(name(index)).lock().await.unwrap());
    }
    drop(holds);
    soon("the close", client.flush()).await;
    for index in 0..20 {
        assert_eq!(fx.line(&name(index)).length().await, (0, 0));
    }
}

async fn a_hold_dropped_without_a_runtime_is_released(fx: Fixture) {
    let mutex = fx.mutex("dropped").ttl(fx.long_ttl());
    let hold = mutex.lock().await.unwrap();
    std::thread::spawn(move || drop(hold)).join().unwrap();
    fx.line("dropped").until_empty().await;
}

async fn a_lost_answer_is_one_grant(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    spy.set_enters(Enters::ReplyLost);
    let lock = client.mutex("lost");
    let hold = free(soon("the grant", lock.lock_timeout(SOON)).await);
    let enters = spy.calls(Verb::Enter);
    assert!(enters.len() >= 2, "it was not asked again");
    assert_eq!(enters[0].about, enters[1].about, "the claim asked for");
    let ids = (vec![hold.claim().to_string()], vec![]);
    assert_eq!(fx.line("lost").ids().await, ids);
    hold.release().await.unwrap();
}

async fn no_wait_says_that_it_may_be_applied(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    spy.set_enters(Enters::ReplyLost);
    let line = client.line("lost", Whole).ttl(fx.long_ttl());
    let answer = soon("an answer", line.acquire(Patience::NoWait)).await;
    let error = fails(answer, ErrorKind::Unreachable);
    assert_eq!(error.outcome(), Outcome::MaybeApplied, "{error}");
    // Nobody has the hold, so the place must be left.
    fx.line("lost").until_empty().await;
}

async fn a_future_dropped_before_the_answer_leaves_nothing(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    spy.set_enters(Enters::Hang);
    for round in 1..=3 {
        let mutex = client.mutex("hanging").ttl(fx.long_ttl());
        let lock = tokio::spawn(async move { mutex.lock().await });
        soon("the enter", spy.applied(round)).await;
        lock.abort();
        fx.line("hanging").until_empty().await;
    }
}

async fn a_request_that_arrives_late_leaves_nothing(fx: Fixture) {
    fx.line("probe").held(Whole).await.must_own_lease();
    let (spy, client) = fx.spied_client().await;
    spy.set_enters(Enters::Late);
    let mutex = client.mutex("late");
    let lock = tokio::spawn(async move { mutex.lock().await });
    soon("the enter", spy.called(Verb::Enter, 1)).await;
    lock.abort();
    soon("the leave", spy.called(Verb::Leave, 1)).await;
    soon("the background leave", client.flush()).await;
    spy.deliver();
    soon("the late enter", spy.applied(1)).await;
    assert_eq!(fx.line("late").length().await, (0, 0));
    drop(free(fx.mutex("late").try_lock().await));
}
