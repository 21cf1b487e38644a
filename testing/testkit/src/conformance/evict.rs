//! What `Engine::evict` promises, and what a client makes of it.

use std::time::Duration;

use palisade::engine::Ask::Whole;
use palisade::engine::{ClaimId, Place, Renewal};
use palisade::{Client, ErrorKind, Eviction, Hold, LossReason};

use super::fixture::assert_is;
use super::{Fixture, SOON, cases, needs, soon, within};
use crate::spy::Enters;

cases! { pub(super) CASES, "evict";
    "[`Eviction::Mark`] leaves the place as it is, makes its renewals answer [`Renewal::Evicted`], and raises an alarm at its client." => [
        marked_place_stays,
        marked_hold_is_told_at_once,
        marked_hold_leaves_when_dropped,
        a_mark_before_the_answer_is_told_at_once,
    ],
    "[`Eviction::Remove`] removes it at once; the next in line is granted and woken, and an alarm is raised at its client." => [
        removed_holder_is_replaced,
        removed_waiter_is_skipped if needs::fair,
        removed_hold_is_told_at_once,
    ],
    "An id that is not in the line answers `false`." => [
        unknown_id_is_false,
    ],
}

async fn marked_place_stays(fx: Fixture) {
    let line = fx.line("marked");
    let held = line.held(Whole).await;
    let next = line.waiting(Whole).await;
    assert!(held.evict(Eviction::Mark).await, "the holder is there");
    let holders = line.shown().await.holders;
    assert_eq!(holders.len(), 1, "holders");
    assert_eq!(holders[0].id, held.id());
    assert!(holders[0].evicted, "the mark is not shown");
    assert_eq!(next.now().await, Place::Waiting);
    held.must_own_lease();
    assert_is!(held.renew().await, Renewal::Evicted);
}

/// A hold of another client, with a ttl so long that only an alarm can report its end in time.
async fn long_hold(fx: &Fixture, name: &str) -> (Client, Hold) {
    let holder = fx.other_client().await;
    let mutex = holder.mutex(name).ttl(fx.long_ttl());
    let hold = mutex.lock().await.unwrap();
    (holder, hold)
}

/// Told before the next renewal, which is due after a third of the ttl.
async fn is_told(fx: &Fixture, hold: &Hold, reason: LossReason) {
    let limit = SOON.min(fx.long_ttl() / 4);
    let loss = within(limit, "the loss", hold.lost()).await;
    assert_eq!(loss.reason, reason);
    assert!(!hold.is_valid(), "a lost hold is valid");
}

async fn marked_hold_is_told_at_once(fx: Fixture) {
    let (_holder, hold) = long_hold(&fx, "told").await;
    let there = fx.line("told").evict(hold.claim(), Eviction::Mark).await;
    assert!(there, "the holder is there");
    is_told(&fx, &hold, LossReason::Evicted).await;
}

async fn marked_hold_leaves_when_dropped(fx: Fixture) {
    let (_holder, hold) = long_hold(&fx, "told").await;
    let line = fx.line("told");
    let next = line.waiting(Whole).await;
    assert!(line.evict(hold.claim(), Eviction::Mark).await);
    is_told(&fx, &hold, LossReason::Evicted).await;
    // Its owner may still be stopping, so the place is kept until it releases.
    assert_eq!(next.now().await, Place::Waiting);
    drop(hold);
    next.granted().await;
}

async fn a_mark_before_the_answer_is_told_at_once(fx: Fixture) {
    let (spy, holder) = fx.spied_client().await;
    // Others see the claim in its line before its own client has the answer.
    spy.set_enters(Enters::ReplyDelayed(Duration::from_millis(300)));
    let mutex = holder.mutex("early").ttl(fx.long_ttl());
    let lock = tokio::spawn(async move { mutex.lock().await });
    let line = fx.line("early");
    let id = line.until_held().await.holders.remove(0).id;
    assert!(line.evict(id, Eviction::Mark).await);
    match soon("the answer", lock).await.unwrap() {
        Ok(hold) => is_told(&fx, &hold, LossReason::Evicted).await,
        // It was evicted before it became a hold.
        Err(error) => assert_eq!(error.kind(), ErrorKind::Lost, "{error}"),
    }
}

async fn removed_holder_is_replaced(fx: Fixture) {
    let line = fx.line("removed");
    let held = line.held(Whole).await;
    let next = line.waiting(Whole).await;
    assert!(held.evict(Eviction::Remove).await, "the holder is there");
    assert!(next.granted().await > held.sequence());
    assert!(!held.evict(Eviction::Remove).await, "it was there twice");
    held.must_own_lease();
    assert_is!(held.renew().await, Renewal::Lost);
}

async fn removed_waiter_is_skipped(fx: Fixture) {
    let line = fx.line("removed");
    let held = line.held(Whole).await;
    let removed = line.waiting(Whole).await;
    let next = line.waiting(Whole).await;
    assert!(removed.evict(Eviction::Remove).await, "the waiter is there");
    held.leave().await;
    next.granted().await;
}

async fn removed_hold_is_told_at_once(fx: Fixture) {
    let (_holder, hold) = long_hold(&fx, "taken").await;
    let line = fx.line("taken");
    assert!(line.evict(hold.claim(), Eviction::Remove).await);
    is_told(&fx, &hold, LossReason::Taken).await;
}

async fn unknown_id_is_false(fx: Fixture) {
    let (line, elsewhere) = (fx.line("unknown"), fx.line("elsewhere"));
    let held = line.held(Whole).await;
    for eviction in [Eviction::Mark, Eviction::Remove] {
        let unknown = ClaimId::random().to_string();
        for id in [unknown.as_str(), "not an id", ""] {
            assert!(!line.evict(id, eviction).await, "{id:?} is there");
        }
        let there = elsewhere.evict(held.id(), eviction).await;
        assert!(!there, "an id is in a line it never entered");
    }
    let holders = line.shown().await.holders;
    assert!(holders.len() == 1 && !holders[0].evicted, "{holders:?}");
}
