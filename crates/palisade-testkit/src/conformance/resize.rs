//! What `Engine::resize` promises.

use std::sync::Arc;

use palisade::Kind;
use palisade::core::claim::Ask;
use palisade::core::clock::BootTime;
use palisade::core::engine::{Place, Renewal};

use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, SOON, cases, needs, permits, within};

cases! { pub(super) CASES, "resize";
    "Every claim in the line has the new capacity; holders keep what they hold, even if it is more than fits now, and nobody is granted until it fits." => [
        every_claim_has_the_new_capacity if needs::resize,
        holders_of_too_much_go_before_the_next_is_granted if needs::resize,
    ],
    "A greater capacity grants the next in line at once and wakes them." => [
        greater_capacity_wakes_the_next if needs::resize,
        greater_capacity_lets_nobody_overtake if needs::resize_weighted,
    ],
    "A later claim must name the new capacity." => [
        later_claim_names_the_new_capacity if needs::resize,
    ],
    "A claim that weighs more than the new capacity is `InvalidArgument`, and nothing changes." => [
        heavier_claim_is_invalid if needs::resize_weighted,
    ],
    "A line of readers is `CapacityMismatch`; one without permits answers `false`." => [
        readers_are_a_mismatch if needs::resize_shared,
        line_without_permits_is_false if needs::resize,
    ],
}

async fn every_claim_has_the_new_capacity(bed: Bed) -> Check {
    let name = bed.name("resized")?;
    let first = bed.hold(&name, permits(1, 2)).await?;
    let second = bed.hold(&name, permits(1, 2)).await?;
    let third = bed.queue(&name, permits(1, 2)).await?;
    ensure!(bed.engine().resize(name.clone(), 1).await?, "permits there");
    let line = bed.line(&name).await?;
    ensure_eq!(line.capacity, Some(1), "the capacity");
    for claim in line.holders.iter().chain(&line.waiters) {
        ensure_eq!(claim.ask, permits(1, 1), "the ask of {claim:?}");
    }
    ensure_eq!(line.holders.len(), 2, "holders");
    for (held, shown) in [&first, &second].into_iter().zip(&line.holders) {
        ensure_eq!(Some(held.sequence()), shown.sequence, "the count");
        inside!(bed.renew(held).await?, Renewal::Held(_) => (), "a holder goes on holding");
    }
    inside!(bed.renew(&third).await?, Renewal::Held(_) => Ok(()), "a waiter goes on waiting")
}

async fn holders_of_too_much_go_before_the_next_is_granted(bed: Bed) -> Check {
    let name = bed.name("shrunk")?;
    let first = bed.hold(&name, permits(1, 2)).await?;
    let second = bed.hold(&name, permits(1, 2)).await?;
    ensure!(bed.engine().resize(name.clone(), 1).await?, "permits there");
    let third = bed.queue(&name, permits(1, 1)).await?;
    bed.engine().leave(first.ticket).await?;
    let look = bed.engine().wait(third.ticket.clone(), BootTime::PAST);
    ensure_eq!(look.await?, Place::Waiting, "two of one");
    bed.is_busy(&name, permits(1, 1)).await?;
    bed.engine().leave(second.ticket).await?;
    bed.granted(&third).await?;
    Ok(())
}

async fn greater_capacity_wakes_the_next(bed: Bed) -> Check {
    let name = bed.name("grown")?;
    bed.hold(&name, permits(1, 1)).await?;
    let next = bed.queue(&name, permits(1, 1)).await?;
    let other = bed.other_client().await?;
    // Sleeps so long that only a push can end it in time.
    let (engine, ticket) = (Arc::clone(bed.engine()), next.ticket.clone());
    let wait = tokio::spawn(async move { engine.wait(ticket, BootTime::now() + SOON * 4).await });
    let asleep = bed.engine().wait(next.ticket.clone(), BootTime::PAST);
    ensure_eq!(asleep.await?, Place::Waiting, "the next");
    ensure!(
        other.engine().resize(name.clone(), 2).await?,
        "permits there"
    );
    let place = within(SOON, "the wake-up", wait).await???;
    inside!(place, Place::Held { .. } => (), "the next is granted");
    bed.is_busy(&name, permits(1, 2)).await
}

async fn greater_capacity_lets_nobody_overtake(bed: Bed) -> Check {
    let name = bed.name("grown")?;
    bed.hold(&name, permits(2, 2)).await?;
    let heavy = bed.queue(&name, permits(2, 2)).await?;
    let light = bed.queue(&name, permits(1, 2)).await?;
    let looks = async |ticket| bed.engine().wait(ticket, BootTime::PAST).await;
    ensure!(bed.engine().resize(name.clone(), 3).await?, "permits there");
    for waiting in [&heavy, &light] {
        let place = looks(waiting.ticket.clone()).await?;
        ensure_eq!(place, Place::Waiting, "the heavy one has no room");
    }
    ensure!(bed.engine().resize(name.clone(), 5).await?, "permits there");
    let (heavy, light) = (bed.granted(&heavy).await?, bed.granted(&light).await?);
    ensure!(light > heavy, "count {light} after {heavy}");
    Ok(())
}

async fn later_claim_names_the_new_capacity(bed: Bed) -> Check {
    let name = bed.name("named")?;
    bed.hold(&name, permits(1, 2)).await?;
    ensure!(bed.engine().resize(name.clone(), 3).await?, "permits there");
    let old = bed
        .engine()
        .enter(Arc::new(bed.claim(&name, permits(1, 2))));
    let error = inside!(old.await, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::CapacityMismatch, "the kind of {error}");
    bed.hold(&name, permits(1, 3)).await?;
    bed.hold(&name, permits(1, 3)).await?;
    bed.is_busy(&name, permits(1, 3)).await
}

async fn heavier_claim_is_invalid(bed: Bed) -> Check {
    let name = bed.name("heavy")?;
    bed.hold(&name, permits(2, 3)).await?;
    bed.queue(&name, permits(3, 3)).await?;
    for capacity in [1, 2] {
        let answer = bed.engine().resize(name.clone(), capacity).await;
        let error = inside!(answer, Err(error) => error, "an error");
        ensure_eq!(error.kind(), Kind::InvalidArgument, "the kind of {error}");
        ensure_eq!(bed.line(&name).await?.capacity, Some(3), "the capacity");
    }
    Ok(())
}

async fn readers_are_a_mismatch(bed: Bed) -> Check {
    let name = bed.name("read")?;
    bed.hold(&name, Ask::READ).await?;
    let answer = bed.engine().resize(name.clone(), 2).await;
    let error = inside!(answer, Err(error) => error, "an error");
    ensure_eq!(error.kind(), Kind::CapacityMismatch, "the kind of {error}");
    bed.hold(&name, Ask::READ).await?;
    Ok(())
}

async fn line_without_permits_is_false(bed: Bed) -> Check {
    let name = bed.name("whole")?;
    ensure!(
        !bed.engine().resize(name.clone(), 2).await?,
        "an empty line"
    );
    ensure_eq!(bed.line(&name).await?.capacity, None, "a capacity");
    bed.hold(&name, Ask::Whole).await?;
    ensure!(!bed.engine().resize(name.clone(), 2).await?, "a lock");
    bed.is_busy(&name, Ask::Whole).await
}
