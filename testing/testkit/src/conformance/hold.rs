//! What a hold promises to its owner.

use std::time::Duration;

use palisade::{BootTime, Client, ErrorKind, Eviction, Hold, LossReason, Which};

use super::fixture::{fails, free, taken};
use super::{Fixture, SOON, cases, needs, soon, within};

cases! { pub(super) CASES, "hold";
    "It says what was granted, and for how long." => [
        it_shows_the_token_of_the_survey,
        the_era_sits_above_the_count if needs::era_of_tokens,
        it_is_valid_from_the_start,
        it_can_move_to_another_task,
    ],
    "`run` ends with the work, or with the hold." => [
        run_gives_the_result,
        run_is_cancelled_by_a_loss,
        run_of_a_lost_hold_does_nothing,
    ],
    "A loss is told once and for all." => [
        lost_is_pending_while_held,
        loss_is_remembered,
        release_of_a_lost_hold_says_so,
        a_lost_hold_does_not_release_the_next,
    ],
}

async fn it_shows_the_token_of_the_survey(fx: Fixture) {
    let hold = fx.mutex("shown").lock().await.unwrap();
    assert_eq!(hold.name().as_str(), "shown");
    let holder = fx.line("shown").shown().await.holders.remove(0);
    assert_eq!(holder.id, hold.claim().to_string());
    let sequence = holder.sequence.unwrap_or(0);
    assert_eq!(fx.client().token(sequence).unwrap(), hold.token());
    let owner = holder.owner.expect("an owner");
    assert_eq!(owner.owner, fx.client().owner());
    assert_eq!(owner.pid, std::process::id());
}

async fn the_era_sits_above_the_count(fx: Fixture) {
    let later = fx.client_with("era", "3").await.unwrap();
    let hold = later.mutex("era").lock().await.unwrap();
    let token = hold.token();
    assert_eq!(token.0 >> 56, 3, "the era");
    let sequence = fx.line("era").shown().await.holders[0].sequence;
    assert_eq!(Some(token.0 & ((1 << 56) - 1)), sequence);
    hold.release().await.unwrap();
    // A token of the old era is below all tokens of the new one.
    let old = fx.mutex("era").lock().await.unwrap();
    assert!(old.token() < token, "an old era above a new one");
}

async fn it_is_valid_from_the_start(fx: Fixture) {
    let ttl = fx.long_ttl();
    let before = BootTime::now();
    let hold = fx.mutex("valid").ttl(ttl).lock().await.unwrap();
    assert!(hold.is_valid());
    assert!(hold.remaining() > Duration::ZERO, "nothing remains");
    assert!(hold.remaining() < ttl, "more remains than the ttl");
    assert!(hold.deadline() > before, "the deadline is past");
    assert!(hold.deadline() < before + ttl, "no margin before the end");
}

async fn it_can_move_to_another_task(fx: Fixture) {
    let hold = fx.mutex("moved").lock().await.unwrap();
    let moved = tokio::spawn(async move {
        assert!(hold.is_valid());
        hold.release().await
    });
    moved.await.unwrap().unwrap();
    drop(free(fx.mutex("moved").try_lock().await));
}

async fn run_gives_the_result(fx: Fixture) {
    let hold = fx.mutex("work").lock().await.unwrap();
    let work = async {
        tokio::task::yield_now().await;
        42
    };
    assert_eq!(hold.run(work).await.unwrap(), 42);
    assert!(hold.is_valid(), "run released the hold");
    hold.release().await.unwrap();
}

async fn run_is_cancelled_by_a_loss(fx: Fixture) {
    let client = fx.other_client().await;
    let ttl = fx.fit(fx.short_ttl() * 2);
    let mutex = client.mutex("work").ttl(ttl);
    let hold = mutex.lock().await.unwrap();
    let work = hold.run(std::future::pending::<()>());
    let operator = fx.client();
    let (ended, evicted) = tokio::join!(
        within(ttl + SOON, "the cancellation", work),
        operator.evict(hold.name(), Which::Holders, Eviction::Remove)
    );
    assert!(evicted.unwrap(), "a holder to evict");
    fails(ended, ErrorKind::Lost);
}

/// A hold of another client that an operator has evicted.
async fn evicted(fx: &Fixture, name: &str) -> (Client, Hold) {
    let client = fx.other_client().await;
    let hold = client.mutex(name).lock().await.unwrap();
    let evicted = fx
        .client()
        .evict(hold.name(), Which::Holders, Eviction::Remove)
        .await;
    assert!(evicted.unwrap(), "a holder to evict");
    (client, hold)
}

async fn run_of_a_lost_hold_does_nothing(fx: Fixture) {
    let (_client, hold) = evicted(&fx, "work").await;
    within(SOON * 2, "the loss", hold.lost()).await;
    let mut ran = false;
    fails(hold.run(async { ran = true }).await, ErrorKind::Lost);
    assert!(!ran, "work began after the loss");
}

async fn lost_is_pending_while_held(fx: Fixture) {
    let ttl = fx.short_ttl();
    let hold = fx.mutex("held").ttl(ttl).lock().await.unwrap();
    fx.keeps(&hold, ttl * 2).await;
}

async fn loss_is_remembered(fx: Fixture) {
    let (_client, hold) = evicted(&fx, "lost").await;
    let first = within(SOON * 2, "the loss", hold.lost()).await;
    let again = soon("the loss again", hold.lost()).await;
    assert_eq!(first.reason, again.reason);
    assert_eq!(first.lease_ends, again.lease_ends);
    assert_eq!(first.reason, LossReason::Taken);
    assert!(!hold.is_valid(), "a lost hold is valid");
    assert_eq!(hold.remaining(), Duration::ZERO);
    assert!(hold.deadline().has_passed(), "the deadline is to come");
}

async fn release_of_a_lost_hold_says_so(fx: Fixture) {
    let (_client, hold) = evicted(&fx, "lost").await;
    // This also applies before the loss is known, because the place is gone already.
    fails(hold.release().await, ErrorKind::Lost);
}

async fn a_lost_hold_does_not_release_the_next(fx: Fixture) {
    let (client, lost) = evicted(&fx, "lost").await;
    let next = free(fx.mutex("lost").try_lock().await);
    assert!(next.token() > lost.token(), "the next token is not greater");
    drop(lost);
    soon("the background leave", client.flush()).await;
    taken(client.mutex("lost").try_lock().await);
    next.release().await.unwrap();
}
