//! What `Engine::leave` promises, and `Engine::audit` where tickets have their own leases.

use std::sync::Arc;

use palisade::core::claim::{Ask, Claim, ClaimId};
use palisade::core::engine::{Entered, Left};
use palisade::core::ticket::Ticket;

use super::bed::enter_on;
use super::failure::{ensure, ensure_eq, inside};
use super::{Bed, Check, cases, needs};

cases! { pub(super) CASES, "leave";
    "Compares the incarnation (claim id, and the count where it is known), never just the name: a late or doubled leave changes nothing." => [
        doubled_leave_is_absent,
        late_leave_leaves_the_next_holder_alone,
        another_incarnation_does_not_leave,
        unknown_count_leaves_by_id,
    ],
    "The next in line is granted and woken." => [
        next_in_line_is_granted,
        leaving_waiter_lets_those_behind_it_in if needs::fair_shared,
        room_is_given_to_as_many_as_fit if needs::fair_weighted,
    ],
    "An unknown claim id is remembered at least for the claim's usual ttl, so that an enter still under way finds it was left. On shared leases [`Engine::audit`] does this instead." => [
        enter_under_way_finds_it_was_left,
        others_do_not_notice_what_was_left,
        own_leases_have_an_empty_audit,
    ],
    "A ticket in doubt is remembered in the same way, though it was found: an earlier copy of its enter may still arrive." => [
        copy_under_way_finds_it_was_left,
    ],
}

async fn doubled_leave_is_absent(bed: Bed) -> Check {
    let name = bed.name("doubled")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    ensure_eq!(
        bed.engine().leave(held.ticket.clone()).await?,
        Left::Done,
        "the first leave"
    );
    ensure_eq!(
        bed.engine().leave(held.ticket.clone()).await?,
        Left::Absent,
        "the second"
    );
    bed.hold(&name, Ask::Whole).await?;
    ensure_eq!(
        bed.engine().leave(held.ticket).await?,
        Left::Absent,
        "the third"
    );
    Ok(())
}

async fn late_leave_leaves_the_next_holder_alone(bed: Bed) -> Check {
    let name = bed.name("late")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    bed.engine().leave(held.ticket.clone()).await?;
    let other = bed.other_client().await?;
    let next = enter_on(other.engine(), bed.claim(&name, Ask::Whole)).await?;
    ensure_eq!(
        bed.engine().leave(held.ticket).await?,
        Left::Absent,
        "a late leave"
    );
    let line = bed.line(&name).await?;
    ensure_eq!(line.holders.len(), 1, "holders");
    ensure_eq!(
        line.holders[0].id,
        next.ticket.claim.to_string(),
        "the holder"
    );
    Ok(())
}

async fn another_incarnation_does_not_leave(bed: Bed) -> Check {
    let name = bed.name("incarnation")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    let mut wrong = held.ticket.clone();
    wrong.sequence += 1;
    ensure_eq!(
        bed.engine().leave(wrong).await?,
        Left::Absent,
        "another incarnation"
    );
    bed.is_busy(&name, Ask::Whole).await?;
    ensure_eq!(
        bed.engine().leave(held.ticket).await?,
        Left::Done,
        "the right one"
    );
    Ok(())
}

async fn unknown_count_leaves_by_id(bed: Bed) -> Check {
    let name = bed.name("unknown")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    let mut unknown = held.ticket;
    unknown.sequence = 0;
    ensure_eq!(
        bed.engine().leave(unknown).await?,
        Left::Done,
        "a ticket not yet counted"
    );
    bed.hold(&name, Ask::Whole).await?;
    Ok(())
}

async fn next_in_line_is_granted(bed: Bed) -> Check {
    let name = bed.name("next")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    ensure_eq!(
        bed.engine().leave(held.ticket).await?,
        Left::Done,
        "the leave"
    );
    // Granted by the leave itself, before anyone asks again; without a line in the engine, to
    // whoever asks next.
    if !bed.capability().waiters_visible {
        bed.granted(&next).await?;
    }
    let line = bed
        .until(&name, "the grant", |line| line.holders.len() == 1)
        .await?;
    ensure_eq!(
        line.holders[0].id,
        next.ticket.claim.to_string(),
        "the holder"
    );
    bed.granted(&next).await?;
    Ok(())
}

async fn leaving_waiter_lets_those_behind_it_in(bed: Bed) -> Check {
    let name = bed.name("between")?;
    bed.hold(&name, Ask::READ).await?;
    let writer = bed.queue(&name, Ask::Whole).await?;
    let reader = bed.queue(&name, Ask::READ).await?;
    ensure_eq!(
        bed.engine().leave(writer.ticket).await?,
        Left::Done,
        "the waiter's leave"
    );
    bed.granted(&reader).await?;
    Ok(())
}

async fn room_is_given_to_as_many_as_fit(bed: Bed) -> Check {
    let name = bed.name("room")?;
    let all = bed.hold(&name, super::permits(3, 3)).await?;
    let one = bed.queue(&name, super::permits(1, 3)).await?;
    let two = bed.queue(&name, super::permits(2, 3)).await?;
    let behind = bed.queue(&name, super::permits(1, 3)).await?;
    bed.engine().leave(all.ticket).await?;
    bed.granted(&one).await?;
    bed.granted(&two).await?;
    let line = bed.line(&name).await?;
    ensure_eq!((line.holders.len(), line.waiters.len()), (2, 1), "the line");
    ensure_eq!(
        line.waiters[0].id,
        behind.ticket.claim.to_string(),
        "who waits"
    );
    Ok(())
}

async fn enter_under_way_finds_it_was_left(bed: Bed) -> Check {
    let name = bed.name("under-way")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    held.must_own_lease()?;
    let claim = Arc::new(bed.claim(&name, Ask::Whole));
    let left = bed
        .engine()
        .leave(Ticket::own(name.clone(), claim.id))
        .await?;
    ensure_eq!(left, Left::Absent, "leaving a place never taken");
    // Repeated requests are refused as well.
    for _ in 0..2 {
        let entered = bed.engine().enter(Arc::clone(&claim)).await?;
        inside!(entered, Entered::Busy => (), "a claim that was left is busy");
    }
    let line = bed.line(&name).await?;
    ensure_eq!((line.holders.len(), line.waiters.len()), (1, 0), "the line");
    Ok(())
}

async fn copy_under_way_finds_it_was_left(bed: Bed) -> Check {
    let name = bed.name("copied")?;
    let claim = bed.claim(&name, Ask::Whole);
    let held = enter_on(bed.engine(), claim.clone()).await?;
    held.must_own_lease()?;
    let doubtful = Ticket {
        sequence: held.sequence(),
        in_doubt: true,
        ..held.ticket
    };
    ensure_eq!(bed.engine().leave(doubtful).await?, Left::Done, "the leave");
    let copy = bed.engine().enter(Arc::new(claim)).await?;
    inside!(copy, Entered::Busy => (), "a copy that arrives late is busy");
    bed.hold(&name, Ask::Whole).await?;
    Ok(())
}

async fn others_do_not_notice_what_was_left(bed: Bed) -> Check {
    let (name, elsewhere) = (bed.name("left")?, bed.name("elsewhere")?);
    let id = ClaimId::random();
    bed.engine().leave(Ticket::own(name.clone(), id)).await?;
    bed.hold(&name, Ask::Whole).await?;
    let same_id = Claim {
        id,
        ..bed.claim(&elsewhere, Ask::Whole)
    };
    // An id is random, so that the same one elsewhere is no use; it must not break that line.
    bed.engine().enter(Arc::new(same_id)).await?;
    bed.until(&name, "one holder", |line| line.holders.len() == 1)
        .await?;
    Ok(())
}

async fn own_leases_have_an_empty_audit(bed: Bed) -> Check {
    let name = bed.name("audit")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    held.must_own_lease()?;
    let audit = bed.engine().audit(held.ticket.lease).await?;
    ensure!(audit.is_empty(), "an own lease has {audit:?}");
    bed.is_busy(&name, Ask::Whole).await
}
