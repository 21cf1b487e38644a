//! What `Engine::evict` promises, and what a client makes of it.

use std::time::Duration;

use palisade::core::claim::Ask;
use palisade::core::engine::{Eviction, Place, Renewal};
use palisade::{Kind, LossReason};

use super::bed::Seated;
use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, Failure, SOON, cases, needs, within};
use crate::wrap::Enters;

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

async fn evict(bed: &Bed, seated: &Seated, eviction: Eviction) -> Result<bool, Failure> {
    let (name, id) = (seated.ticket.name.clone(), seated.ticket.claim.to_string());
    Ok(bed.engine().evict(name, id, eviction).await?)
}

async fn marked_place_stays(bed: Bed) -> Check {
    let name = bed.name("marked")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    ensure!(
        evict(&bed, &held, Eviction::Mark).await?,
        "the holder is there"
    );
    let line = bed.line(&name).await?;
    ensure_eq!(line.holders.len(), 1, "holders");
    ensure_eq!(
        line.holders[0].id,
        held.ticket.claim.to_string(),
        "the holder"
    );
    ensure!(line.holders[0].evicted, "the mark is not shown");
    let wait = bed
        .engine()
        .wait(next.ticket, palisade::core::clock::BootTime::PAST);
    ensure_eq!(wait.await?, Place::Waiting, "the next");
    held.must_own_lease()?;
    inside!(bed.renew(&held).await?, Renewal::Evicted => Ok(()), "a marked lease is evicted")
}

async fn marked_hold_is_told_at_once(bed: Bed) -> Check {
    let holder = bed.other_client().await?;
    // A ttl so long that only an alarm can tell in time.
    let hold = holder.mutex("told").ttl(bed.long_ttl()).lock().await?;
    let name = bed.name("told")?;
    let id = hold.claim().to_string();
    ensure!(
        bed.engine().evict(name, id, Eviction::Mark).await?,
        "the holder is there"
    );
    let loss = within(SOON, "the loss", hold.lost()).await?;
    ensure_eq!(loss.reason, LossReason::Evicted, "the reason");
    ensure!(!hold.is_valid(), "a lost hold is valid");
    Ok(())
}

async fn marked_hold_leaves_when_dropped(bed: Bed) -> Check {
    let holder = bed.other_client().await?;
    let hold = holder.mutex("told").ttl(bed.long_ttl()).lock().await?;
    let name = bed.name("told")?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let id = hold.claim().to_string();
    ensure!(
        bed.engine().evict(name.clone(), id, Eviction::Mark).await?,
        "the holder is there"
    );
    within(SOON, "the loss", hold.lost()).await?;
    // Its owner may still be stopping: the place is kept until it lets go.
    let wait = bed
        .engine()
        .wait(next.ticket.clone(), palisade::core::clock::BootTime::PAST);
    ensure_eq!(
        wait.await?,
        Place::Waiting,
        "the next, while the evicted hold lives"
    );
    drop(hold);
    bed.granted(&next).await?;
    Ok(())
}

async fn a_mark_before_the_answer_is_told_at_once(bed: Bed) -> Check {
    let (spy, holder) = bed.spied_client().await?;
    // Others see the claim in its line before its own client knows that it is there.
    spy.set_enters(Enters::ReplyDelayed(Duration::from_millis(300)));
    let mutex = holder.mutex("early").ttl(bed.long_ttl());
    let lock = tokio::spawn(async move { mutex.lock().await });
    let name = bed.name("early")?;
    let line = bed
        .until(&name, "the holder", |line| line.holders.len() == 1)
        .await?;
    let id = line.holders[0].id.clone();
    ensure!(
        bed.engine().evict(name, id, Eviction::Mark).await?,
        "the holder is there"
    );
    match within(SOON, "the answer", lock).await?? {
        Ok(hold) => {
            let loss = within(SOON, "the loss", hold.lost()).await?;
            ensure_eq!(loss.reason, LossReason::Evicted, "the reason");
        }
        // Told before it became a hold.
        Err(error) => ensure_eq!(error.kind(), Kind::Lost, "the kind of {error}"),
    }
    Ok(())
}

async fn removed_holder_is_replaced(bed: Bed) -> Check {
    let name = bed.name("removed")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    ensure!(
        evict(&bed, &held, Eviction::Remove).await?,
        "the holder is there"
    );
    let sequence = bed.granted(&next).await?;
    ensure!(
        sequence > held.sequence(),
        "count {sequence} after {}",
        held.sequence()
    );
    ensure!(
        !evict(&bed, &held, Eviction::Remove).await?,
        "it was there twice"
    );
    held.must_own_lease()?;
    inside!(bed.renew(&held).await?, Renewal::Lost => Ok(()), "a removed lease is lost")
}

async fn removed_waiter_is_skipped(bed: Bed) -> Check {
    let name = bed.name("removed")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    let removed = bed.queue(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    ensure!(
        evict(&bed, &removed, Eviction::Remove).await?,
        "the waiter is there"
    );
    bed.engine().leave(held.ticket).await?;
    bed.granted(&next).await?;
    Ok(())
}

async fn removed_hold_is_told_at_once(bed: Bed) -> Check {
    let holder = bed.other_client().await?;
    // A ttl so long that only an alarm can tell in time.
    let hold = holder.mutex("taken").ttl(bed.long_ttl()).lock().await?;
    let name = bed.name("taken")?;
    let id = hold.claim().to_string();
    ensure!(
        bed.engine().evict(name, id, Eviction::Remove).await?,
        "the holder is there"
    );
    let loss = within(SOON, "the loss", hold.lost()).await?;
    ensure_eq!(loss.reason, LossReason::Taken, "the reason");
    ensure!(!hold.is_valid(), "a lost hold is valid");
    Ok(())
}

async fn unknown_id_is_false(bed: Bed) -> Check {
    let name = bed.name("unknown")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    let elsewhere = bed.name("elsewhere")?;
    for eviction in [Eviction::Mark, Eviction::Remove] {
        let unknown = palisade::core::claim::ClaimId::random().to_string();
        for id in [unknown, "not an id".to_owned(), String::new()] {
            ensure!(
                !bed.engine().evict(name.clone(), id, eviction).await?,
                "an unknown id is there"
            );
        }
        let id = held.ticket.claim.to_string();
        let there = bed.engine().evict(elsewhere.clone(), id, eviction).await?;
        ensure!(!there, "an id is in a line it never entered");
    }
    let line = bed.line(&name).await?;
    ensure!(
        line.holders.len() == 1 && !line.holders[0].evicted,
        "the holder was touched"
    );
    Ok(())
}
