//! What is promised while an engine can't be reached. The outage is played by a wrapper around
//! the engine, so that it can be had on every one.

use std::time::Duration;

use palisade::core::claim::Ask;
use palisade::core::clock::BootTime;
use palisade::{Kind, LossReason, Patience};

use super::bed::held;
use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, SOON, cases, needs, within};
use crate::wrap::{Enters, Verb};

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

async fn a_short_outage_is_no_loss(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let ttl = bed.fit(bed.short_ttl() * 3);
    let hold = client.mutex("kept").ttl(ttl).lock().await?;
    spy.set_cut(true);
    // Lasts until a renewal has failed.
    within(ttl, "a renewal", spy.called(Verb::Renew, 1)).await?;
    spy.set_cut(false);
    let lost = tokio::time::timeout(ttl * 3 / 2, hold.lost()).await;
    ensure!(lost.is_err(), "lost: {lost:?}");
    hold.release().await?;
    Ok(())
}

async fn a_waiter_keeps_its_place(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let name = bed.name("kept")?;
    let hold = bed.client().mutex("kept").lock().await?;
    let mutex = client.mutex("kept").ttl(bed.long_ttl());
    let waiter = tokio::spawn(async move { mutex.lock().await });
    bed.until_waiting(&name, 1).await?;
    let before = bed.line(&name).await?.waiters[0].id.clone();
    let looked = spy.calls(Verb::Wait).len();
    spy.set_cut(true);
    within(SOON, "another look", spy.called(Verb::Wait, looked + 2)).await?;
    ensure!(!waiter.is_finished(), "the waiter gave up");
    spy.set_cut(false);
    let waiters = bed.line(&name).await?.waiters;
    ensure_eq!(waiters.len(), 1, "waiters");
    ensure_eq!(waiters[0].id, before, "the waiter");
    hold.release().await?;
    within(SOON, "the grant", waiter).await???.release().await?;
    Ok(())
}

async fn a_long_outage_is_told_by_the_deadline(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let ttl = bed.short_ttl();
    let hold = client.mutex("lost").ttl(ttl).lock().await?;
    let cut = BootTime::now();
    spy.set_cut(true);
    let loss = within(ttl + SOON, "the loss", hold.lost()).await?;
    let took = BootTime::now().saturating_since(cut);
    ensure_eq!(loss.reason, LossReason::Expired, "the reason");
    ensure!(!hold.is_valid(), "a lost hold is valid");
    ensure!(
        took < ttl + Duration::from_millis(200),
        "told after {took:?}"
    );
    Ok(())
}

async fn no_wait_fails_at_once(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    spy.set_cut(true);
    let answer = within(SOON, "an answer", client.mutex("cut").try_lock()).await?;
    let error = inside!(answer, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Unreachable, "the kind of {error}");
    spy.set_cut(false);
    held(client.mutex("cut").try_lock().await?)?
        .release()
        .await?;
    Ok(())
}

async fn patience_outlasts_an_outage(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    spy.set_cut(true);
    let line = client.line("cut", Ask::Whole);
    let acquire = tokio::spawn(async move { line.acquire(Patience::For(SOON * 2)).await });
    within(SOON, "a second try", spy.called(Verb::Enter, 2)).await?;
    spy.set_cut(false);
    let hold = held(within(SOON, "the hold", acquire).await???)?;
    ensure!(hold.is_valid(), "a fresh hold is not valid");
    hold.release().await?;
    Ok(())
}

async fn patience_ends_as_unreachable(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    spy.set_cut(true);
    let wait = Duration::from_millis(300);
    let start = BootTime::now();
    let lock = client.mutex("cut");
    let answer = within(SOON, "an answer", lock.lock_timeout(wait)).await?;
    let took = BootTime::now().saturating_since(start);
    // Not busy: nobody knows whether it is free.
    let error = inside!(answer, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Unreachable, "the kind of {error}");
    ensure!(took >= wait, "gave up after {took:?}");
    ensure!(
        took < wait + Duration::from_secs(1),
        "gave up after {took:?} only"
    );
    Ok(())
}

/// How late an acquire may be: a quarter of a second is promised, the rest is for a busy machine,
/// and a request's timeout is 2 s.
const LATE: Duration = Duration::from_millis(1_200);

async fn patience_is_a_bound_on_a_silent_engine(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    spy.set_enters(Enters::Hang);
    let wait = Duration::from_millis(100);
    let start = BootTime::now();
    let lock = client.mutex("silent").ttl(bed.long_ttl());
    let answer = within(SOON, "an answer", lock.lock_timeout(wait)).await?;
    let took = BootTime::now().saturating_since(start);
    let error = inside!(answer, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Unreachable, "the kind of {error}");
    ensure!(took < wait + LATE, "gave up after {took:?} only");
    // It was applied all the same, and is left in the background.
    bed.until_empty(&bed.name("silent")?).await
}

async fn patience_is_a_bound_on_a_dead_connection(bed: Bed) -> Check {
    let (proxies, client) = bed.proxied_client().await?;
    let lock = client.mutex("dead").ttl(bed.long_ttl());
    held(lock.try_lock().await?)?.release().await?;
    proxies.silence();
    let wait = Duration::from_millis(100);
    let start = BootTime::now();
    let answer = within(SOON * 2, "an answer", lock.lock_timeout(wait)).await?;
    let took = BootTime::now().saturating_since(start);
    ensure!(took < wait + LATE, "gave up after {took:?} only");
    match answer {
        // A new connection was there in time.
        Ok(hold) => held(hold)?.release().await?,
        Err(error) => ensure_eq!(error.kind(), Kind::Unreachable, "the kind of {error}"),
    }
    bed.until_empty(&bed.name("dead")?).await
}

async fn a_release_is_done_later(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let hold = client.mutex("left").ttl(bed.long_ttl()).lock().await?;
    let name = hold.name().clone();
    spy.set_cut(true);
    let released = within(SOON * 2, "an answer", hold.release()).await?;
    let error = inside!(released, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Unreachable, "the kind of {error}");
    ensure_eq!(
        bed.line(&name).await?.holders.len(),
        1,
        "holders during the outage"
    );
    spy.set_cut(false);
    bed.until_empty(&name).await
}

async fn a_drop_is_done_later(bed: Bed) -> Check {
    let (spy, client) = bed.spied_client().await?;
    let hold = client.mutex("left").ttl(bed.long_ttl()).lock().await?;
    let name = hold.name().clone();
    spy.set_cut(true);
    drop(hold);
    within(SOON, "a leave", spy.called(Verb::Leave, 1)).await?;
    ensure_eq!(
        bed.line(&name).await?.holders.len(),
        1,
        "holders during the outage"
    );
    spy.set_cut(false);
    bed.until_empty(&name).await?;
    within(SOON, "the close", client.close()).await
}
