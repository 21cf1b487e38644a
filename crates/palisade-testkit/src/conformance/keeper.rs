//! What the keeper promises: renewal, loss in time, and no place left behind. The faults are
//! played by a wrapper around the engine.

use std::time::Duration;

use palisade::core::acquire::Request;
use palisade::core::claim::Ask;
use palisade::core::clock::BootTime;
use palisade::{Kind, LossReason, Outcome, Patience};

use super::bed::held;
use super::failure::{Failure, ensure, ensure_eq, inside};
use super::{Bed, Check, SOON, cases, needs, within};
use crate::wrap::{Enters, Verb};

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

async fn a_hold_outlives_its_ttl(bed: Bed) -> Check {
    let ttl = bed.short_ttl();
    let hold = bed.client().mutex("kept").ttl(ttl).lock().await?;
    let token = hold.token();
    let end = BootTime::now() + ttl * 3;
    while !end.has_passed() {
        ensure!(hold.is_valid(), "lost");
        tokio::time::sleep(ttl / 10).await;
    }
    let line = bed.line(hold.name()).await?;
    ensure_eq!(line.holders.len(), 1, "holders");
    ensure_eq!(
        bed.client().token(line.holders[0].sequence.unwrap_or(0))?,
        token,
        "the token"
    );
    hold.release().await?;
    Ok(())
}

async fn a_waiter_outlives_its_ttl(bed: Bed) -> Check {
    let ttl = bed.short_ttl();
    let hold = bed.client().mutex("kept").ttl(ttl).lock().await?;
    let mutex = bed.other_client().await?.mutex("kept").ttl(ttl);
    let waiter = tokio::spawn(async move { mutex.lock().await });
    if bed.capability().waiters_visible {
        let name = bed.name("kept")?;
        bed.until_waiting(&name, 1).await?;
        let first = bed.line(&name).await?.waiters[0].id.clone();
        tokio::time::sleep(ttl * 2).await;
        let waiters = bed.line(&name).await?.waiters;
        ensure_eq!(waiters.len(), 1, "waiters");
        ensure_eq!(waiters[0].id, first, "the waiter");
    } else {
        tokio::time::sleep(ttl * 2).await;
    }
    hold.release().await?;
    drop(within(SOON, "the grant", waiter).await???);
    Ok(())
}

async fn two_unanswered_renewals_are_no_loss(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let ttl = bed.fit(bed.short_ttl() * 5);
    let hold = client.mutex("kept").ttl(ttl).lock().await?;
    spy.lose_renewals(2);
    within(ttl, "a third renewal", spy.called(Verb::Renew, 3)).await?;
    let lost = tokio::time::timeout(ttl * 3 / 2, hold.lost()).await;
    ensure!(lost.is_err(), "lost: {lost:?}");
    hold.release().await?;
    Ok(())
}

/// Existing connections fall silent, as behind a firewall that forgot them; new ones are fine.
async fn hold_survives_a_dead_connection(bed: Bed) -> Check {
    let (proxies, client) = bed.proxied_client().await?;
    let ttl = bed.fit(Duration::from_secs(3));
    let hold = client.mutex("dead").ttl(ttl).lock().await?;
    for _ in 0..2 {
        proxies.silence();
        let lost = tokio::time::timeout(ttl * 3 / 2, hold.lost()).await;
        ensure!(lost.is_err(), "lost: {lost:?}");
        ensure!(hold.is_valid(), "not valid");
    }
    // The connection of this runtime may still be a dead one: the keeper has a living one.
    drop(hold);
    bed.until_empty(&bed.name("dead")?).await
}

async fn a_blocked_runtime_costs_no_lease(bed: Bed) -> Check {
    let ttl = bed.short_ttl();
    let hold = bed.client().mutex("kept").ttl(ttl).lock().await?;
    // What a user's code does that forgets to await: every thread of this runtime is busy.
    let blocked = (0..8).map(|_| tokio::spawn(async move { std::thread::sleep(ttl * 2) }));
    let blocked: Vec<_> = blocked.collect();
    std::thread::sleep(ttl * 2);
    ensure!(hold.is_valid(), "lost with its runtime");
    for task in blocked {
        task.await?;
    }
    hold.release().await?;
    Ok(())
}

/// A claim without renewal; where holds live with their process or session it is refused.
async fn unrenewed(bed: &Bed, name: &str) -> Result<Option<Request>, Failure> {
    let line = bed
        .client()
        .line(name, Ask::Whole)
        .ttl(bed.short_ttl())
        .unrenewed();
    if bed.capability().detached {
        return Ok(Some(line));
    }
    let refused = inside!(line.acquire(Patience::NoWait).await, Err(error) => error, "a refusal");
    ensure_eq!(refused.kind(), Kind::Unsupported, "the refusal");
    Ok(None)
}

async fn an_unrenewed_hold_ends_beside_one_that_lives(bed: Bed) -> Check {
    let Some(line) = unrenewed(&bed, "ending").await? else {
        return Ok(());
    };
    let ttl = bed.short_ttl();
    let kept = bed.client().mutex("kept").ttl(ttl).lock().await?;
    let asked = BootTime::now();
    let ending = line.acquire(Patience::Forever).await?;
    let ending = inside!(ending, Some(hold) => hold, "it holds");
    let mutex = bed.other_client().await?.mutex("ending");
    let waiter = tokio::spawn(async move { mutex.lock().await });
    let loss = within(ttl + SOON, "its end", ending.lost()).await?;
    ensure_eq!(loss.reason, LossReason::Expired, "the reason");
    // Also while its owner does not let go: the engine has ended it.
    let next = within(ttl + SOON, "the next grant", waiter).await???;
    ensure!(BootTime::now() >= asked + ttl, "ended before its ttl");
    ensure!(next.token() > ending.token(), "tokens");
    ensure!(kept.is_valid(), "another hold ended with it");
    ensure_eq!(bed.line(kept.name()).await?.holders.len(), 1, "the other");
    let late = ending.release().await;
    ensure!(late.is_err_and(|error| error.kind() == Kind::Lost), "lost");
    ensure!(next.is_valid(), "a late release took another's place");
    next.release().await?;
    kept.release().await?;
    Ok(())
}

async fn an_unrenewed_claim_is_kept_while_it_waits(bed: Bed) -> Check {
    let Some(line) = unrenewed(&bed, "waits").await? else {
        return Ok(());
    };
    let ttl = bed.short_ttl();
    let first = bed.other_client().await?.mutex("waits").lock().await?;
    let waiter = tokio::spawn(async move { line.acquire(Patience::Forever).await });
    if bed.capability().waiters_visible {
        bed.until_waiting(first.name(), 1).await?;
        let place = bed.line(first.name()).await?.waiters[0].id.clone();
        tokio::time::sleep(ttl * 2).await;
        let waiters = bed.line(first.name()).await?.waiters;
        ensure_eq!(waiters.len(), 1, "waiters");
        ensure_eq!(waiters[0].id, place, "the waiter");
    }
    first.release().await?;
    let hold = within(SOON, "the grant", waiter).await???;
    let hold = inside!(hold, Some(hold) => hold, "it holds");
    within(ttl + SOON, "its end", hold.lost()).await?;
    Ok(())
}

async fn expiry_is_told_before_the_next_grant(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let ttl = bed.short_ttl();
    let hold = client.mutex("expiry").ttl(ttl).lock().await?;
    spy.lose_renewals(u32::MAX);
    let mutex = bed.client().mutex("expiry");
    let waiter = tokio::spawn(async move {
        let next = mutex.lock().await?;
        Ok::<_, palisade::Error>((next, BootTime::now()))
    });
    let loss = within(ttl + SOON, "the loss", hold.lost()).await?;
    let told = BootTime::now();
    ensure!(!hold.is_valid(), "a lost hold is valid");
    ensure_eq!(loss.reason, LossReason::Expired, "the reason");
    let (next, granted) = within(ttl + SOON, "the grant", waiter).await???;
    ensure!(
        told < granted,
        "told {:?} after the grant",
        told.saturating_since(granted)
    );
    ensure!(hold.deadline() < granted, "believed beyond the grant");
    ensure!(
        next.token() > hold.token(),
        "token {} after {}",
        next.token(),
        hold.token()
    );
    bed.note(
        "told_before_ms",
        granted.saturating_since(told).as_secs_f64() * 1e3,
    );
    Ok(())
}

async fn the_deadline_counts_from_the_last_answer(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let ttl = bed.fit(bed.short_ttl() * 2);
    let hold = client.mutex("expiry").ttl(ttl).lock().await?;
    within(ttl, "a renewal", spy.called(Verb::Renew, 1)).await?;
    let renewed = spy.calls(Verb::Renew)[0].at;
    spy.lose_renewals(u32::MAX);
    within(ttl + SOON, "the loss", hold.lost()).await?;
    // At the most one more renewal was answered before the rest were lost.
    let answered = spy
        .calls(Verb::Renew)
        .get(1)
        .map_or(renewed, |call| call.at);
    let told = BootTime::now();
    ensure!(told >= renewed + ttl / 2, "told long before the lease ends");
    ensure!(
        hold.deadline() < answered + ttl,
        "believed beyond the lease"
    );
    Ok(())
}

async fn a_grant_that_comes_too_late_is_no_hold(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let ttl = bed.short_ttl();
    let line = client.line("late", Ask::Whole).ttl(ttl);
    // The answer says that it holds, but the lease has ended before the answer comes.
    spy.set_enters(Enters::ReplyDelayed(ttl));
    let answer = within(ttl + SOON, "an answer", line.acquire(Patience::NoWait)).await??;
    ensure!(answer.is_none(), "a hold whose lease has ended");
    spy.set_enters(Enters::ReplyDelayed(ttl));
    let hold = within(ttl + SOON, "a hold", line.acquire(Patience::Forever)).await??;
    let hold = held(hold)?;
    ensure!(hold.is_valid(), "a hold whose lease has ended");
    hold.release().await?;
    Ok(())
}

async fn no_renewal_after_a_release(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let ttl = bed.short_ttl();
    let hold = client.mutex("released").ttl(ttl).lock().await?;
    within(ttl, "a renewal", spy.called(Verb::Renew, 1)).await?;
    let claim = hold.claim().0;
    hold.release().await?;
    let left = spy.calls(Verb::Leave);
    ensure_eq!(left.len(), 1, "leaves");
    tokio::time::sleep(ttl * 3 / 2).await;
    let after = spy.calls(Verb::Renew);
    let late = after
        .iter()
        .filter(|call| call.about == Some(claim) && call.at > left[0].at);
    ensure_eq!(late.count(), 0, "renewals after the release");
    ensure_eq!(spy.calls(Verb::Leave).len(), 1, "leaves");
    Ok(())
}

async fn close_waits_for_background_releases(bed: Bed) -> Check {
    let client = bed.other_client().await?;
    let mut holds = Vec::new();
    for index in 0..20 {
        holds.push(client.mutex(format!("closed-{index}")).lock().await?);
    }
    drop(holds);
    within(SOON, "the close", client.close()).await?;
    for index in 0..20 {
        let name = bed.name(&format!("closed-{index}"))?;
        ensure_eq!(bed.line(&name).await?.holders.len(), 0, "holders of {name}");
    }
    Ok(())
}

async fn a_hold_dropped_without_a_runtime_is_released(bed: Bed) -> Check {
    let hold = bed.client().mutex("dropped").lock().await?;
    let name = hold.name().clone();
    let thread = std::thread::spawn(move || drop(hold));
    ensure!(thread.join().is_ok(), "the drop panicked");
    bed.until_empty(&name).await
}

async fn a_lost_answer_is_one_grant(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    spy.set_enters(Enters::ReplyLost);
    let lock = client.mutex("lost");
    let hold = within(SOON, "the grant", lock.lock_timeout(SOON)).await??;
    let hold = held(hold)?;
    let enters = spy.calls(Verb::Enter);
    ensure!(enters.len() >= 2, "it was not asked again");
    ensure_eq!(enters[0].about, enters[1].about, "the claim asked for");
    let line = bed.line(hold.name()).await?;
    ensure_eq!((line.holders.len(), line.waiters.len()), (1, 0), "the line");
    ensure_eq!(line.holders[0].id, hold.claim().to_string(), "the holder");
    hold.release().await?;
    Ok(())
}

async fn no_wait_says_that_it_may_be_applied(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    spy.set_enters(Enters::ReplyLost);
    let line = client.line("lost", Ask::Whole);
    let answer = within(SOON, "an answer", line.acquire(Patience::NoWait)).await?;
    let error = inside!(answer, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Unreachable, "the kind of {error}");
    ensure_eq!(
        error.outcome(),
        Outcome::MaybeApplied,
        "the outcome of {error}"
    );
    // Nobody has the hold, so it must not stay.
    bed.until_empty(&bed.name("lost")?).await
}

async fn a_future_dropped_before_the_answer_leaves_nothing(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    spy.set_enters(Enters::Hang);
    let name = bed.name("hanging")?;
    for round in 1..=3 {
        let mutex = client.mutex("hanging");
        let lock = tokio::spawn(async move { mutex.lock().await });
        within(SOON, "the enter", spy.applied(round)).await?;
        lock.abort();
        bed.until_empty(&name).await?;
    }
    Ok(())
}

async fn a_request_that_arrives_late_leaves_nothing(bed: Bed) -> Check {
    let probe = bed.hold(&bed.name("probe")?, Ask::Whole).await?;
    probe.must_own_lease()?;
    let (spy, client) = bed.spied_client().await?;
    spy.set_enters(Enters::Late);
    let mutex = client.mutex("late");
    let lock = tokio::spawn(async move { mutex.lock().await });
    within(SOON, "the enter", spy.called(Verb::Enter, 1)).await?;
    lock.abort();
    within(SOON, "the leave", spy.called(Verb::Leave, 1)).await?;
    within(SOON, "the background leave", client.close()).await?;
    spy.deliver();
    within(SOON, "the late enter", spy.applied(1)).await?;
    let line = bed.line(&bed.name("late")?).await?;
    ensure_eq!((line.holders.len(), line.waiters.len()), (0, 0), "the line");
    let hold = bed.client().mutex("late").try_lock().await?;
    held(hold)?.release().await?;
    Ok(())
}
