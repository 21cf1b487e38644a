//! What `Engine::enter` promises.

use std::sync::Arc;

use palisade::Kind;
use palisade::core::claim::{Ask, Claim};
use palisade::core::clock::BootTime;
use palisade::core::engine::{Entered, Place};
use palisade::core::ticket::Ticket;

use super::bed::{enter_on, granted_on};
use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, Failure, SOON, cases, needs, permits};

cases! { pub(super) CASES, "enter";
    "A free line is held at once, with a count greater than any before on that name." => [
        free_line_is_held_at_once,
        counts_rise_with_every_grant if needs::tokens,
        counts_rise_along_the_line if needs::tokens,
        counts_rise_after_a_lease_ended if needs::tokens,
    ],
    "A claim that can't be held at once takes the last place, or, if it does not queue, leaves no trace and answers [`Entered::Busy`]." => [
        queued_claim_waits,
        queued_claim_takes_the_last_place if needs::visible,
        busy_claim_leaves_no_trace,
        busy_claim_does_not_pass_those_who_wait if needs::fair_weighted,
    ],
    "The same claim id again answers with the same ticket, never with a second place, and says where it stands now." => [
        same_id_is_the_same_ticket,
        same_id_keeps_its_place if needs::visible,
        same_id_says_where_it_stands_now,
    ],
    "A claim that was left before it arrived (see [`Engine::leave`]) answers [`Entered::Busy`] and leaves no trace." => [
        left_before_it_arrived_is_busy,
    ],
    "Another capacity, or another kind, than the live line's is `CapacityMismatch`." => [
        another_capacity_is_a_mismatch if needs::any_permits,
        readers_beside_permits_are_a_mismatch if needs::shared_and_permits,
        mismatch_leaves_no_trace if needs::any_permits,
        an_empty_line_takes_any_capacity if needs::any_permits,
    ],
    "`armed` counts from before the request that created or re-armed the lease was sent; entering extends a shared lease only if the same atomic step re-arms it." => [
        armed_counts_from_before_the_request,
        a_lease_does_not_end_before_its_time,
    ],
}

async fn free_line_is_held_at_once(bed: Bed) -> Check {
    let name = bed.name("free")?;
    let seated = bed.hold(&name, Ask::Whole).await?;
    let line = bed.line(&name).await?;
    ensure_eq!(line.holders.len(), 1, "holders shown");
    ensure_eq!(
        line.holders[0].id,
        seated.ticket.claim.to_string(),
        "the id shown"
    );
    ensure_eq!(
        line.holders[0].sequence,
        Some(seated.sequence()),
        "the count shown"
    );
    ensure_eq!(
        seated.ticket.sequence,
        seated.sequence(),
        "the ticket's count"
    );
    Ok(())
}

async fn counts_rise_with_every_grant(bed: Bed) -> Check {
    let name = bed.name("rising")?;
    let other = bed.other_client().await?;
    let mut last = 0;
    for round in 0..10 {
        let engine = if round % 2 == 0 {
            bed.engine()
        } else {
            other.engine()
        };
        let seated = enter_on(engine, bed.claim(&name, Ask::Whole)).await?;
        ensure!(
            seated.sequence() > last,
            "count {} after {last}",
            seated.sequence()
        );
        last = seated.sequence();
        engine.leave(seated.ticket).await?;
    }
    Ok(())
}

async fn counts_rise_along_the_line(bed: Bed) -> Check {
    let name = bed.name("rising")?;
    let mut held = bed.hold(&name, Ask::Whole).await?;
    let mut last = held.sequence();
    for _ in 0..5 {
        let next = bed.queue(&name, Ask::Whole).await?;
        bed.engine().leave(held.ticket).await?;
        let sequence = bed.granted(&next).await?;
        ensure!(sequence > last, "count {sequence} after {last}");
        last = sequence;
        held = next;
    }
    Ok(())
}

async fn counts_rise_after_a_lease_ended(bed: Bed) -> Check {
    let name = bed.name("rising")?;
    let brief = Claim {
        ttl: bed.short_ttl(),
        ..bed.claim(&name, Ask::Whole)
    };
    let first = bed.enter(brief).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let limit = bed.short_ttl() + SOON;
    let sequence = granted_on(bed.engine(), &next.ticket, limit).await?;
    ensure!(
        sequence > first.sequence(),
        "count {sequence} after {}",
        first.sequence()
    );
    Ok(())
}

async fn queued_claim_waits(bed: Bed) -> Check {
    let name = bed.name("queue")?;
    let first = bed.hold(&name, Ask::Whole).await?;
    let second = bed.queue(&name, Ask::Whole).await?;
    bed.engine().leave(first.ticket).await?;
    bed.granted(&second).await?;
    Ok(())
}

async fn queued_claim_takes_the_last_place(bed: Bed) -> Check {
    let name = bed.name("queue")?;
    bed.hold(&name, Ask::Whole).await?;
    let mut waiting = Vec::new();
    for _ in 0..4 {
        let seated = bed.queue(&name, Ask::Whole).await?;
        waiting.push(seated.ticket.claim.to_string());
        let line = bed.line(&name).await?;
        let shown: Vec<_> = line.waiters.iter().map(|w| w.id.clone()).collect();
        ensure_eq!(shown, waiting, "the waiters");
        ensure!(
            line.waiters.iter().all(|w| w.sequence.is_none()),
            "waiters have a count"
        );
    }
    Ok(())
}

async fn busy_claim_leaves_no_trace(bed: Bed) -> Check {
    let name = bed.name("busy")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    bed.is_busy(&name, Ask::Whole).await?;
    let line = bed.line(&name).await?;
    ensure_eq!((line.holders.len(), line.waiters.len()), (1, 0), "the line");
    bed.engine().leave(held.ticket).await?;
    bed.hold(&name, Ask::Whole).await?;
    Ok(())
}

async fn busy_claim_does_not_pass_those_who_wait(bed: Bed) -> Check {
    let name = bed.name("busy")?;
    bed.hold(&name, permits(2, 3)).await?;
    bed.queue(&name, permits(3, 3)).await?;
    bed.is_busy(&name, permits(1, 3)).await
}

async fn same_id_is_the_same_ticket(bed: Bed) -> Check {
    let name = bed.name("again")?;
    let claim = bed.claim(&name, Ask::Whole);
    let first = bed.enter(claim.clone()).await?;
    for _ in 0..3 {
        let again = bed.enter(claim.clone()).await?;
        ensure_eq!(again.place, first.place, "where it stands");
        ensure_eq!(again.ticket.claim, first.ticket.claim, "the claim");
        ensure_eq!(again.ticket.lease, first.ticket.lease, "the lease");
        ensure_eq!(again.ticket.sequence, first.ticket.sequence, "the count");
    }
    // Also for a claim that would not queue: it is in the line already.
    let again = bed
        .enter(Claim {
            queue: false,
            ..claim
        })
        .await?;
    ensure_eq!(again.place, first.place, "where it stands");
    let line = bed.line(&name).await?;
    ensure_eq!((line.holders.len(), line.waiters.len()), (1, 0), "the line");
    Ok(())
}

async fn same_id_keeps_its_place(bed: Bed) -> Check {
    let name = bed.name("again")?;
    bed.hold(&name, Ask::Whole).await?;
    let claim = bed.claim(&name, Ask::Whole);
    bed.enter(claim.clone()).await?;
    let behind = bed.queue(&name, Ask::Whole).await?;
    let again = bed.enter(claim.clone()).await?;
    ensure_eq!(again.place, Place::Waiting, "where it stands");
    let shown: Vec<_> = bed
        .line(&name)
        .await?
        .waiters
        .into_iter()
        .map(|w| w.id)
        .collect();
    let expected = [claim.id.to_string(), behind.ticket.claim.to_string()];
    ensure_eq!(shown, expected, "the waiters");
    Ok(())
}

async fn same_id_says_where_it_stands_now(bed: Bed) -> Check {
    let name = bed.name("again")?;
    let first = bed.hold(&name, Ask::Whole).await?;
    let claim = bed.claim(&name, Ask::Whole);
    let waiting = bed.enter(claim.clone()).await?;
    ensure_eq!(waiting.place, Place::Waiting, "behind a holder");
    bed.engine().leave(first.ticket).await?;
    let sequence = bed.granted(&waiting).await?;
    let again = bed.enter(claim).await?;
    ensure_eq!(again.place, Place::Held { sequence }, "after the grant");
    Ok(())
}

async fn left_before_it_arrived_is_busy(bed: Bed) -> Check {
    let name = bed.name("late")?;
    let probe = bed.hold(&bed.name("probe")?, Ask::Whole).await?;
    probe.must_own_lease()?;
    let claim = bed.claim(&name, Ask::Whole);
    bed.engine()
        .leave(Ticket::own(name.clone(), claim.id))
        .await?;
    let entered = bed.engine().enter(Arc::new(claim)).await?;
    inside!(entered, Entered::Busy => (), "a claim that was left before is busy");
    let line = bed.line(&name).await?;
    ensure_eq!((line.holders.len(), line.waiters.len()), (0, 0), "the line");
    bed.hold(&name, Ask::Whole).await?;
    Ok(())
}

async fn refused(bed: &Bed, claim: Claim) -> Check {
    match bed.engine().enter(Arc::new(claim)).await {
        Err(error) => {
            ensure_eq!(error.kind(), Kind::CapacityMismatch, "the kind of {error}");
            Ok(())
        }
        Ok(entered) => Err(Failure::new(format!("not a mismatch but {entered:?}"))),
    }
}

async fn another_capacity_is_a_mismatch(bed: Bed) -> Check {
    let name = bed.name("capacity")?;
    bed.hold(&name, permits(1, 2)).await?;
    refused(&bed, bed.claim(&name, permits(1, 3))).await?;
    let unqueued = Claim {
        queue: false,
        ..bed.claim(&name, permits(1, 3))
    };
    refused(&bed, unqueued).await?;
    bed.hold(&name, permits(1, 2)).await?;
    Ok(())
}

async fn readers_beside_permits_are_a_mismatch(bed: Bed) -> Check {
    let permitted = bed.name("permits")?;
    bed.hold(&permitted, permits(1, 2)).await?;
    refused(&bed, bed.claim(&permitted, Ask::READ)).await?;
    let read = bed.name("readers")?;
    bed.hold(&read, Ask::READ).await?;
    refused(&bed, bed.claim(&read, permits(1, 2))).await
}

async fn mismatch_leaves_no_trace(bed: Bed) -> Check {
    let name = bed.name("capacity")?;
    let held = bed.hold(&name, permits(1, 2)).await?;
    let before = bed.line(&name).await?;
    refused(&bed, bed.claim(&name, permits(1, 3))).await?;
    let after = bed.line(&name).await?;
    ensure_eq!(after.capacity, Some(2), "the capacity");
    ensure_eq!(after.holders.len(), before.holders.len(), "the holders");
    ensure_eq!(after.waiters.len(), 0, "the waiters");
    bed.engine().leave(held.ticket).await?;
    bed.until_empty(&name).await
}

async fn an_empty_line_takes_any_capacity(bed: Bed) -> Check {
    let name = bed.name("capacity")?;
    let held = bed.hold(&name, permits(1, 2)).await?;
    bed.engine().leave(held.ticket).await?;
    bed.hold(&name, permits(1, 3)).await?;
    Ok(())
}

async fn armed_counts_from_before_the_request(bed: Bed) -> Check {
    let name = bed.name("armed")?;
    let before = BootTime::now();
    let seated = bed.hold(&name, Ask::Whole).await?;
    let after = BootTime::now();
    ensure!(seated.armed.sent <= after, "armed in the future");
    if seated.ticket.has_own_lease() {
        ensure!(seated.armed.sent >= before, "armed before it was asked for");
        ensure_eq!(seated.armed.ttl, bed.long_ttl(), "the ttl granted");
    }
    let line = bed.line(&name).await?;
    let shown = line.holders.first().and_then(|holder| holder.expires_in);
    if let Some(expires_in) = shown {
        let ends = BootTime::now() + expires_in;
        let believed = seated.armed.sent + seated.armed.ttl;
        ensure!(
            ends >= believed,
            "the engine ends the lease before its holder thinks"
        );
    }
    Ok(())
}

async fn a_lease_does_not_end_before_its_time(bed: Bed) -> Check {
    let name = bed.name("armed")?;
    let brief = Claim {
        ttl: bed.short_ttl(),
        ..bed.claim(&name, Ask::Whole)
    };
    let first = bed.enter(brief).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let limit = first.armed.ttl + SOON;
    granted_on(bed.engine(), &next.ticket, limit).await?;
    let granted = BootTime::now();
    let ends = first.armed.sent + first.armed.ttl;
    ensure!(
        granted >= ends,
        "granted {:?} too early",
        ends.saturating_since(granted)
    );
    Ok(())
}
