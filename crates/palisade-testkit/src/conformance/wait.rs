//! What `Engine::wait` promises.

use std::sync::Arc;
use std::time::Duration;

use palisade::Kind;
use palisade::core::claim::{Ask, Claim};
use palisade::core::clock::BootTime;
use palisade::core::engine::{Eviction, Place};

use super::bed::{RECHECK, Seated, enter_on};
use super::failure::{ensure, ensure_eq};
use super::{Bed, Check, Failure, SOON, cases, needs, within};

/// A push arrives well before the bounded re-check of one second would find the grant.
const PUSHED: Duration = Duration::from_millis(700);

cases! { pub(super) CASES, "wait";
    "Returns soon after the place changed: pushed by the engine, not polled." => [
        grant_is_pushed,
        grant_is_pushed_from_another_client,
        readers_are_all_woken if needs::shared,
        held_ticket_is_told_at_once,
    ],
    "Looks once more when `until` has come, and earlier when the lease of a claim that blocks it is due to end: a push can be lost and is never a grant." => [
        until_is_kept,
        until_in_the_past_answers_at_once,
        end_of_the_blocking_lease_is_noticed,
        end_of_a_waiting_lease_ahead_is_noticed,
    ],
    "Dropping it keeps the place." => [
        dropping_keeps_the_place,
    ],
    "A ticket that is no longer in the line is [`Place::Gone`]." => [
        left_ticket_is_gone,
        ended_ticket_is_gone,
        removal_wakes_the_waiter,
    ],
    "Fails as unreachable rather than sleeping while the engine can't be asked." => [
        cut_off_engine_is_unreachable if needs::outage,
    ],
}

fn far() -> BootTime {
    BootTime::now() + Duration::from_secs(20)
}

/// Waits in a task; answers with the place and when it came.
fn waiting(
    bed: &Bed,
    seated: &Seated,
) -> tokio::task::JoinHandle<palisade::Result<(Place, BootTime)>> {
    let (engine, ticket) = (Arc::clone(bed.engine()), seated.ticket.clone());
    tokio::spawn(async move { Ok((engine.wait(ticket, far()).await?, BootTime::now())) })
}

async fn grant_is_pushed(bed: Bed) -> Check {
    let name = bed.name("push")?;
    let first = bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let woken = waiting(&bed, &next);
    tokio::task::yield_now().await;
    let left = BootTime::now();
    bed.engine().leave(first.ticket).await?;
    let (place, at) = within(PUSHED, "the push", woken).await???;
    ensure!(matches!(place, Place::Held { .. }), "woken but {place:?}");
    bed.note("push_us", at.saturating_since(left).as_micros() as f64);
    Ok(())
}

async fn grant_is_pushed_from_another_client(bed: Bed) -> Check {
    let name = bed.name("push")?;
    let other = bed.other_client().await?;
    let first = enter_on(other.engine(), bed.claim(&name, Ask::Whole)).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let woken = waiting(&bed, &next);
    tokio::task::yield_now().await;
    let left = BootTime::now();
    other.engine().leave(first.ticket).await?;
    let (place, at) = within(PUSHED, "the push", woken).await???;
    ensure!(matches!(place, Place::Held { .. }), "woken but {place:?}");
    bed.note("push_us", at.saturating_since(left).as_micros() as f64);
    Ok(())
}

async fn readers_are_all_woken(bed: Bed) -> Check {
    let name = bed.name("push")?;
    let writer = bed.hold(&name, Ask::Whole).await?;
    let mut woken = Vec::new();
    for _ in 0..5 {
        let reader = bed.queue(&name, Ask::READ).await?;
        woken.push(waiting(&bed, &reader));
    }
    tokio::task::yield_now().await;
    bed.engine().leave(writer.ticket).await?;
    for reader in woken {
        let (place, _) = within(SOON, "the push", reader).await???;
        ensure!(matches!(place, Place::Held { .. }), "woken but {place:?}");
    }
    Ok(())
}

async fn held_ticket_is_told_at_once(bed: Bed) -> Check {
    let held = bed.hold(&bed.name("held")?, Ask::Whole).await?;
    let place = bed.engine().wait(held.ticket.clone(), far());
    let place = within(PUSHED, "the answer", place).await??;
    ensure_eq!(place, held.place, "where it stands");
    Ok(())
}

async fn until_is_kept(bed: Bed) -> Check {
    let name = bed.name("until")?;
    bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let until = BootTime::now() + Duration::from_millis(300);
    // A wait may return early; the last look is the one at `until`.
    while !until.has_passed() {
        let wait = bed.engine().wait(next.ticket.clone(), until);
        let place = within(SOON, "the last look", wait).await??;
        ensure_eq!(place, Place::Waiting, "nothing changed");
    }
    let late = BootTime::now().saturating_since(until);
    ensure!(
        late < Duration::from_secs(1),
        "returned {late:?} after `until`"
    );
    Ok(())
}

async fn until_in_the_past_answers_at_once(bed: Bed) -> Check {
    let name = bed.name("until")?;
    bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let wait = bed.engine().wait(next.ticket, BootTime::PAST);
    let place = within(PUSHED, "the answer", wait).await??;
    ensure_eq!(place, Place::Waiting, "nothing changed");
    Ok(())
}

async fn end_of_the_blocking_lease_is_noticed(bed: Bed) -> Check {
    let name = bed.name("expiry")?;
    let ttl = bed.short_ttl();
    let brief = bed
        .enter(Claim {
            ttl,
            ..bed.claim(&name, Ask::Whole)
        })
        .await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let (place, at) = within(brief.armed.ttl + SOON, "the grant", waiting(&bed, &next)).await???;
    ensure!(matches!(place, Place::Held { .. }), "woken but {place:?}");
    let late = at.saturating_since(brief.armed.sent + brief.armed.ttl);
    bed.note("late_ms", late.as_secs_f64() * 1e3);
    ensure!(
        late < Duration::from_millis(1500),
        "granted {late:?} after the lease's end"
    );
    Ok(())
}

async fn end_of_a_waiting_lease_ahead_is_noticed(bed: Bed) -> Check {
    if !bed.capability().fair || !bed.capability().shared {
        return Err(Failure::not_applicable(
            "waiters have no order, or no readers",
        ));
    }
    let name = bed.name("expiry")?;
    bed.hold(&name, Ask::READ).await?;
    let ttl = bed.short_ttl();
    let writer = bed
        .enter(Claim {
            ttl,
            ..bed.claim(&name, Ask::Whole)
        })
        .await?;
    ensure_eq!(writer.place, Place::Waiting, "a writer behind a reader");
    let reader = bed.queue(&name, Ask::READ).await?;
    let limit = writer.armed.ttl + Duration::from_millis(1500);
    let (place, _) = within(limit, "the grant", waiting(&bed, &reader)).await???;
    ensure!(matches!(place, Place::Held { .. }), "woken but {place:?}");
    Ok(())
}

async fn dropping_keeps_the_place(bed: Bed) -> Check {
    let name = bed.name("dropped")?;
    let first = bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    // Where waiters have no order, one behind might be served first.
    let behind = match bed.capability().fair {
        true => Some(bed.queue(&name, Ask::Whole).await?),
        false => None,
    };
    for millis in [0, 1, 20] {
        let wait = bed.engine().wait(next.ticket.clone(), far());
        let dropped = tokio::time::timeout(Duration::from_millis(millis), wait).await;
        ensure!(
            dropped.is_err(),
            "a wait returned with nothing changed: {dropped:?}"
        );
    }
    bed.engine().leave(first.ticket).await?;
    bed.granted(&next).await?;
    if let Some(behind) = behind {
        let place = bed.engine().wait(behind.ticket, BootTime::PAST).await?;
        ensure_eq!(place, Place::Waiting, "the one behind");
    }
    Ok(())
}

async fn left_ticket_is_gone(bed: Bed) -> Check {
    let name = bed.name("gone")?;
    bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    bed.engine().leave(next.ticket.clone()).await?;
    let wait = bed.engine().wait(next.ticket, far());
    let place = within(PUSHED, "the answer", wait).await??;
    ensure_eq!(place, Place::Gone, "a ticket that left");
    Ok(())
}

async fn ended_ticket_is_gone(bed: Bed) -> Check {
    let name = bed.name("gone")?;
    bed.hold(&name, Ask::Whole).await?;
    let ttl = bed.short_ttl();
    let brief = bed
        .enter(Claim {
            ttl,
            ..bed.claim(&name, Ask::Whole)
        })
        .await?;
    let limit = brief.armed.ttl + SOON;
    let gone = async {
        loop {
            match bed
                .engine()
                .wait(brief.ticket.clone(), BootTime::now() + RECHECK)
                .await?
            {
                Place::Gone => return Ok::<_, Failure>(()),
                Place::Waiting => continue,
                held => return Err(Failure::new(format!("a second holder: {held:?}"))),
            }
        }
    };
    within(limit, "the end of a waiting lease", gone).await?
}

async fn removal_wakes_the_waiter(bed: Bed) -> Check {
    let name = bed.name("gone")?;
    bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let woken = waiting(&bed, &next);
    tokio::task::yield_now().await;
    let id = next.ticket.claim.to_string();
    let engine = Arc::clone(bed.client().engine());
    ensure!(
        engine.evict(name, id, Eviction::Remove).await?,
        "the waiter is there"
    );
    let (place, _) = within(SOON, "the answer", woken).await???;
    ensure_eq!(place, Place::Gone, "a ticket that was taken away");
    Ok(())
}

async fn cut_off_engine_is_unreachable(bed: Bed) -> Check {
    let name = bed.name("cut")?;
    bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let Some(outage) = bed.site().outage.clone() else {
        return Err(Failure::not_applicable("nothing that could be cut off"));
    };
    let woken = waiting(&bed, &next);
    outage.begin();
    let answer = within(Duration::from_secs(10), "an error", woken).await;
    outage.end();
    match answer?? {
        Err(error) => ensure_eq!(error.kind(), Kind::Unreachable, "the kind of {error}"),
        Ok((place, _)) => return Err(Failure::new(format!("{place:?} of an engine cut off"))),
    }
    Ok(())
}
