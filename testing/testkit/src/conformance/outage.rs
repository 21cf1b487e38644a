//! What is promised while an engine can't be reached. A spy around the engine simulates the outage,
//! so that it works with every engine.

use std::time::Duration;

use palisade::{BootTime, ErrorKind, LossReason};

use super::fixture::{fails, free, granted};
use super::{Fixture, SOON, cases, needs, soon, within};
use crate::spy::{Enters, Verb};

cases! { pub(super) CASES, "outage";
    "An outage shorter than the ttl costs nobody a place." => [
        a_short_outage_is_no_loss,
        a_waiter_keeps_its_place if needs::visible,
    ],
    "An outage longer than the ttl is a loss that is told in time." => [
        a_long_outage_is_told_by_the_deadline,
    ],
    "An unreachable engine is retried while patience lasts." => [
        no_wait_fails_at_once,
        patience_outlasts_an_outage,
        patience_ends_as_unreachable,
        patience_is_a_bound_on_a_silent_engine,
        patience_is_a_bound_on_a_dead_connection if needs::network,
    ],
    "What was let go of during an outage is left when it ends." => [
        a_release_is_done_later,
        a_drop_is_done_later,
    ],
}

async fn a_short_outage_is_no_loss(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let ttl = fx.fit(fx.short_ttl() * 3);
    let hold = client.mutex("kept").ttl(ttl).lock().await.unwrap();
    spy.set_cut(true);
    // The outage lasts until a renewal has failed.
    within(ttl, "a renewal", spy.called(Verb::Renew, 1)).await;
    spy.set_cut(false);
    fx.keeps(&hold, ttl * 3 / 2).await;
    hold.release().await.unwrap();
}

async fn a_waiter_keeps_its_place(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let hold = fx.mutex("kept").lock().await.unwrap();
    let mutex = client.mutex("kept").ttl(fx.long_ttl());
    let waiter = fx
        .queued("kept", 1, async move { mutex.lock().await })
        .await;
    let before = fx.line("kept").ids().await;
    let looked = spy.calls(Verb::Wait).len();
    spy.set_cut(true);
    soon("another look", spy.called(Verb::Wait, looked + 2)).await;
    assert!(!waiter.is_finished(), "the waiter gave up");
    spy.set_cut(false);
    assert_eq!(fx.line("kept").ids().await, before);
    hold.release().await.unwrap();
    drop(granted(waiter).await);
}

async fn a_long_outage_is_told_by_the_deadline(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let ttl = fx.short_ttl();
    let hold = client.mutex("lost").ttl(ttl).lock().await.unwrap();
    let cut = BootTime::now();
    spy.set_cut(true);
    let loss = within(ttl + SOON, "the loss", hold.lost()).await;
    let took = BootTime::now().saturating_since(cut);
    assert_eq!(loss.reason, LossReason::Expired);
    assert!(!hold.is_valid(), "a lost hold is valid");
    let limit = ttl + Duration::from_millis(200);
    assert!(took < limit, "told after {took:?}");
}

async fn no_wait_fails_at_once(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    spy.set_cut(true);
    let mutex = client.mutex("cut");
    fails(
        soon("an answer", mutex.try_lock()).await,
        ErrorKind::Unreachable,
    );
    spy.set_cut(false);
    drop(free(mutex.try_lock().await));
}

async fn patience_outlasts_an_outage(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    spy.set_cut(true);
    let mutex = client.mutex("cut");
    let acquire = tokio::spawn(async move { mutex.lock_timeout(SOON * 2).await });
    soon("a second try", spy.called(Verb::Enter, 2)).await;
    spy.set_cut(false);
    assert!(granted(acquire).await.expect("a hold").is_valid());
}

async fn patience_ends_as_unreachable(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    spy.set_cut(true);
    let wait = Duration::from_millis(300);
    let start = BootTime::now();
    let lock = client.mutex("cut");
    let answer = soon("an answer", lock.lock_timeout(wait)).await;
    let took = BootTime::now().saturating_since(start);
    // It is not busy, since nobody knows whether it is free.
    fails(answer, ErrorKind::Unreachable);
    assert!(took >= wait, "gave up after {took:?}");
    assert!(took < wait + LATE, "only after {took:?}");
}

/// How late an acquire may be: a quarter of a second is promised, the rest allows for a busy
/// machine. A request's timeout is 2 s.
pub(super) const LATE: Duration = Duration::from_millis(1_700);

async fn patience_is_a_bound_on_a_silent_engine(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    spy.set_enters(Enters::Hang);
    let wait = Duration::from_millis(100);
    let start = BootTime::now();
    let lock = client.mutex("silent").ttl(fx.long_ttl());
    let answer = soon("an answer", lock.lock_timeout(wait)).await;
    let took = BootTime::now().saturating_since(start);
    fails(answer, ErrorKind::Unreachable);
    assert!(took < wait + LATE, "only after {took:?}");
    // It was applied nevertheless, and is left in the background.
    fx.line("silent").until_empty().await;
}

async fn patience_is_a_bound_on_a_dead_connection(fx: Fixture) {
    let (proxies, client) = fx.proxied_client().await;
    let lock = client.mutex("dead").ttl(fx.long_ttl());
    free(lock.try_lock().await).release().await.unwrap();
    proxies.silence();
    let wait = Duration::from_millis(100);
    let start = BootTime::now();
    let answer = within(SOON * 2, "an answer", lock.lock_timeout(wait)).await;
    let took = BootTime::now().saturating_since(start);
    assert!(took < wait + LATE, "only after {took:?}");
    match answer {
        // A new connection was made in time.
        Ok(hold) => hold.expect("a hold").release().await.unwrap(),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
    }
    fx.line("dead").until_empty().await;
}

async fn a_release_is_done_later(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let hold = client
        .mutex("left")
        .ttl(fx.long_ttl())
        .lock()
        .await
        .unwrap();
    spy.set_cut(true);
    let released = within(SOON * 2, "an answer", hold.release()).await;
    fails(released, ErrorKind::Unreachable);
    let line = fx.line("left");
    assert_eq!(line.length().await, (1, 0), "during the outage");
    spy.set_cut(false);
    line.until_empty().await;
}

async fn a_drop_is_done_later(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let hold = client
        .mutex("left")
        .ttl(fx.long_ttl())
        .lock()
        .await
        .unwrap();
    spy.set_cut(true);
    drop(hold);
    soon("a leave", spy.called(Verb::Leave, 1)).await;
    let line = fx.line("left");
    assert_eq!(line.length().await, (1, 0), "during the outage");
    spy.set_cut(false);
    line.until_empty().await;
    soon("the close", client.flush()).await;
}
