//! What a hold promises to the one who has it.

use std::time::Duration;

use palisade::core::clock::BootTime;
use palisade::{Kind, LossReason};

use super::bed::held;
use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, SOON, cases, needs, within};

cases! { pub(super) CASES, "hold";
    "It says what was granted, and for how long." => [
        it_shows_the_token_of_the_survey,
        the_era_sits_above_the_count if needs::tokens,
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

async fn it_shows_the_token_of_the_survey(bed: Bed) -> Check {
    let hold = bed.client().mutex("shown").lock().await?;
    ensure_eq!(hold.name().as_str(), "shown", "the name");
    let line = bed.line(hold.name()).await?;
    ensure_eq!(line.holders[0].id, hold.claim().to_string(), "the claim");
    let sequence = line.holders[0].sequence.unwrap_or(0);
    ensure_eq!(bed.client().token(sequence)?, hold.token(), "the token");
    let owner = inside!(&line.holders[0].owner, Some(owner) => owner, "an owner");
    ensure_eq!(owner.owner, bed.client().owner(), "the owner");
    ensure_eq!(owner.pid, std::process::id(), "the process");
    Ok(())
}

async fn the_era_sits_above_the_count(bed: Bed) -> Check {
    let later = bed.client_of(&bed.url_with("era", "3")).await?;
    let hold = later.mutex("era").lock().await?;
    ensure_eq!(hold.token().0 >> 56, 3, "the era");
    let sequence = bed.line(hold.name()).await?.holders[0]
        .sequence
        .unwrap_or(0);
    ensure_eq!(hold.token().0 & ((1 << 56) - 1), sequence, "the count");
    let token = hold.token();
    hold.release().await?;
    // Who still counts in the old era is below all of the new one.
    let old = bed.client().mutex("era").lock().await?;
    ensure!(old.token() < token, "an old era above a new one");
    Ok(())
}

async fn it_is_valid_from_the_start(bed: Bed) -> Check {
    let ttl = bed.long_ttl();
    let before = BootTime::now();
    let hold = bed.client().mutex("valid").ttl(ttl).lock().await?;
    ensure!(hold.is_valid(), "a fresh hold is not valid");
    ensure!(hold.remaining() > Duration::ZERO, "nothing remains");
    ensure!(hold.remaining() < ttl, "more remains than the ttl");
    ensure!(hold.deadline() > before, "the deadline is past");
    ensure!(
        hold.deadline() < before + ttl,
        "no margin before the lease's end"
    );
    Ok(())
}

async fn it_can_move_to_another_task(bed: Bed) -> Check {
    let hold = bed.client().mutex("moved").lock().await?;
    let moved = tokio::spawn(async move {
        let valid = hold.is_valid();
        hold.release().await.map(|()| valid)
    });
    ensure!(moved.await??, "not valid in another task");
    held(bed.client().mutex("moved").try_lock().await?)?
        .release()
        .await?;
    Ok(())
}

async fn run_gives_the_result(bed: Bed) -> Check {
    let hold = bed.client().mutex("work").lock().await?;
    let done = hold
        .run(async {
            tokio::task::yield_now().await;
            42
        })
        .await?;
    ensure_eq!(done, 42, "the result");
    ensure!(hold.is_valid(), "run released the hold");
    hold.release().await?;
    Ok(())
}

async fn run_is_cancelled_by_a_loss(bed: Bed) -> Check {
    let client = bed.other_client().await?;
    let ttl = bed.short_ttl() * 2;
    let hold = client.mutex("work").ttl(bed.fit(ttl)).lock().await?;
    let work = hold.run(std::future::pending::<()>());
    let evict = bed.client();
    let (ended, evicted) = tokio::join!(
        within(bed.fit(ttl) + SOON, "the cancellation", work),
        evict.evict(
            hold.name(),
            palisade::Which::Holders,
            palisade::Eviction::Remove
        )
    );
    ensure!(evicted?, "a holder to evict");
    let error = inside!(ended?, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Lost, "the kind of {error}");
    Ok(())
}

async fn run_of_a_lost_hold_does_nothing(bed: Bed) -> Check {
    let client = bed.other_client().await?;
    let hold = client.mutex("work").lock().await?;
    ensure!(
        bed.client()
            .evict(
                hold.name(),
                palisade::Which::Holders,
                palisade::Eviction::Remove
            )
            .await?,
        "a holder to evict"
    );
    within(SOON * 2, "the loss", hold.lost()).await?;
    let mut ran = false;
    let error = inside!(hold.run(async { ran = true }).await, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Lost, "the kind of {error}");
    ensure!(!ran, "work began after the loss");
    Ok(())
}

async fn lost_is_pending_while_held(bed: Bed) -> Check {
    let ttl = bed.short_ttl();
    let hold = bed.client().mutex("held").ttl(ttl).lock().await?;
    let lost = tokio::time::timeout(ttl * 2, hold.lost()).await;
    ensure!(lost.is_err(), "lost: {lost:?}");
    ensure!(hold.is_valid(), "not valid");
    Ok(())
}

async fn loss_is_remembered(bed: Bed) -> Check {
    let client = bed.other_client().await?;
    let hold = client.mutex("lost").lock().await?;
    ensure!(
        bed.client()
            .evict(
                hold.name(),
                palisade::Which::Holders,
                palisade::Eviction::Remove
            )
            .await?,
        "a holder to evict"
    );
    let first = within(SOON * 2, "the loss", hold.lost()).await?;
    let again = within(SOON, "the loss again", hold.lost()).await?;
    ensure_eq!(first.reason, again.reason, "the loss");
    ensure_eq!(first.lease_ends, again.lease_ends, "the end of the lease");
    ensure_eq!(first.reason, LossReason::Taken, "the reason");
    ensure!(!hold.is_valid(), "a lost hold is valid");
    ensure_eq!(hold.remaining(), Duration::ZERO, "what remains");
    ensure!(hold.deadline().has_passed(), "the deadline is to come");
    Ok(())
}

async fn release_of_a_lost_hold_says_so(bed: Bed) -> Check {
    let client = bed.other_client().await?;
    let hold = client.mutex("lost").lock().await?;
    ensure!(
        bed.client()
            .evict(
                hold.name(),
                palisade::Which::Holders,
                palisade::Eviction::Remove
            )
            .await?,
        "a holder to evict"
    );
    // Also before the loss is known: the place is gone all the same.
    let error = inside!(hold.release().await, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::Lost, "the kind of {error}");
    Ok(())
}

async fn a_lost_hold_does_not_release_the_next(bed: Bed) -> Check {
    let client = bed.other_client().await?;
    let lost = client.mutex("lost").lock().await?;
    ensure!(
        bed.client()
            .evict(
                lost.name(),
                palisade::Which::Holders,
                palisade::Eviction::Remove
            )
            .await?,
        "a holder to evict"
    );
    let next = held(bed.client().mutex("lost").try_lock().await?)?;
    ensure!(next.token() > lost.token(), "the next token is not greater");
    drop(lost);
    within(SOON, "the background leave", client.flush()).await?;
    ensure!(
        client.mutex("lost").try_lock().await?.is_none(),
        "the next was released"
    );
    next.release().await?;
    Ok(())
}
