//! What `Engine::enter` promises.

use palisade::engine::Ask::{self, Whole};
use palisade::engine::{Claim, Entered, Place};
use palisade::{BootTime, ErrorKind};

use super::fixture::{Line, assert_is, fails};
use super::{Fixture, cases, needs, permits};

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

async fn free_line_is_held_at_once(fx: Fixture) {
    let line = fx.line("free");
    let held = line.held(Whole).await;
    let shown = line.shown().await.holders;
    assert_eq!(shown.len(), 1, "holders shown");
    assert_eq!(shown[0].id, held.id());
    assert_eq!(shown[0].sequence, Some(held.sequence()));
    assert_eq!(held.ticket.sequence, held.sequence(), "the ticket's count");
}

async fn counts_rise_with_every_grant(fx: Fixture) {
    let other = fx.other_client().await;
    let lines = [fx.line("rising"), fx.line_on(&other, "rising")];
    let mut last = 0;
    for line in lines.iter().cycle().take(10) {
        let held = line.held(Whole).await;
        assert!(held.sequence() > last, "{} after {last}", held.sequence());
        last = held.sequence();
        held.leave().await;
    }
}

async fn counts_rise_along_the_line(fx: Fixture) {
    let line = fx.line("rising");
    let mut held = line.held(Whole).await;
    let mut last = held.sequence();
    for _ in 0..5 {
        let next = line.waiting(Whole).await;
        held.leave().await;
        let sequence = next.granted().await;
        assert!(sequence > last, "{sequence} after {last}");
        last = sequence;
        held = next;
    }
}

async fn counts_rise_after_a_lease_ended(fx: Fixture) {
    let line = fx.line("rising");
    let first = line.brief().held(Whole).await;
    let next = line.waiting(Whole).await;
    let sequence = next.granted_within(first.after_its_end()).await;
    assert!(sequence > first.sequence());
}

async fn queued_claim_waits(fx: Fixture) {
    let line = fx.line("queue");
    let first = line.held(Whole).await;
    let second = line.waiting(Whole).await;
    first.leave().await;
    second.granted().await;
}

async fn queued_claim_takes_the_last_place(fx: Fixture) {
    let line = fx.line("queue");
    line.held(Whole).await;
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(line.waiting(Whole).await.id());
        assert_eq!(line.ids().await.1, waiting);
        let shown = line.shown().await.waiters;
        assert!(shown.iter().all(|w| w.sequence.is_none()), "{shown:?}");
    }
}

async fn busy_claim_leaves_no_trace(fx: Fixture) {
    let line = fx.line("busy");
    let held = line.held(Whole).await;
    line.busy(Whole).await;
    assert_eq!(line.length().await, (1, 0));
    held.leave().await;
    line.held(Whole).await;
}

async fn busy_claim_does_not_pass_those_who_wait(fx: Fixture) {
    let line = fx.line("busy");
    line.held(permits(2, 3)).await;
    line.waiting(permits(3, 3)).await;
    line.busy(permits(1, 3)).await;
}

async fn same_id_is_the_same_ticket(fx: Fixture) {
    let line = fx.line("again");
    let claim = line.claim(Whole);
    let first = line.enter(claim.clone()).await;
    // This also applies to a claim that would not queue, since it is in the line already.
    for queue in [true, true, true, false] {
        let claim = Claim {
            queue,
            ..claim.clone()
        };
        let again = line.enter(claim).await;
        assert_eq!(again.place, first.place);
        assert_eq!(again.ticket.claim, first.ticket.claim);
        assert_eq!(again.ticket.lease, first.ticket.lease);
        assert_eq!(again.ticket.sequence, first.ticket.sequence);
    }
    assert_eq!(line.length().await, (1, 0));
}

async fn same_id_keeps_its_place(fx: Fixture) {
    let line = fx.line("again");
    line.held(Whole).await;
    let claim = line.claim(Whole);
    let first = line.enter(claim.clone()).await;
    let behind = line.waiting(Whole).await;
    let again = line.enter(claim).await;
    assert_eq!(again.place, Place::Waiting);
    assert_eq!(line.ids().await.1, [first.id(), behind.id()]);
}

async fn same_id_says_where_it_stands_now(fx: Fixture) {
    let line = fx.line("again");
    let first = line.held(Whole).await;
    let claim = line.claim(Whole);
    let waiting = line.enter(claim.clone()).await;
    assert_eq!(waiting.place, Place::Waiting);
    first.leave().await;
    let sequence = waiting.granted().await;
    assert_eq!(line.enter(claim).await.place, Place::Held { sequence });
}

async fn left_before_it_arrived_is_busy(fx: Fixture) {
    fx.line("probe").held(Whole).await.must_own_lease();
    let line = fx.line("late");
    let claim = line.claim(Whole);
    line.leave_unentered(claim.id).await;
    assert_is!(line.ask(claim).await.unwrap(), Entered::Busy);
    assert_eq!(line.length().await, (0, 0));
    line.held(Whole).await;
}

async fn mismatched(line: &Line, ask: Ask) {
    for queue in [true, false] {
        let claim = Claim {
            queue,
            ..line.claim(ask)
        };
        fails(line.ask(claim).await, ErrorKind::CapacityMismatch);
    }
}

async fn another_capacity_is_a_mismatch(fx: Fixture) {
    let line = fx.line("capacity");
    line.held(permits(1, 2)).await;
    mismatched(&line, permits(1, 3)).await;
    line.held(permits(1, 2)).await;
}

async fn readers_beside_permits_are_a_mismatch(fx: Fixture) {
    for (there, asked) in [(permits(1, 2), Ask::READ), (Ask::READ, permits(1, 2))] {
        let line = fx.line(&format!("{}-first", there.mode()));
        line.held(there).await;
        mismatched(&line, asked).await;
    }
}

async fn mismatch_leaves_no_trace(fx: Fixture) {
    let line = fx.line("capacity");
    let held = line.held(permits(1, 2)).await;
    mismatched(&line, permits(1, 3)).await;
    assert_eq!(line.shown().await.capacity, Some(2));
    assert_eq!(line.length().await, (1, 0));
    held.leave().await;
    line.until_empty().await;
}

async fn an_empty_line_takes_any_capacity(fx: Fixture) {
    let line = fx.line("capacity");
    line.held(permits(1, 2)).await.leave().await;
    line.held(permits(1, 3)).await;
}

async fn armed_counts_from_before_the_request(fx: Fixture) {
    let line = fx.line("armed");
    let before = BootTime::now();
    let held = line.held(Whole).await;
    assert!(held.armed.sent <= BootTime::now(), "armed in the future");
    if held.ticket.has_own_lease() {
        assert!(held.armed.sent >= before, "armed before it was asked for");
        let (granted, ttl) = (fx.granted(fx.long_ttl()), held.armed.ttl);
        assert!(granted.contains(&ttl), "granted for {ttl:?}");
    }
    if let Some(expires_in) = line.shown().await.holders[0].expires_in {
        let ends = BootTime::now() + expires_in;
        assert!(ends >= held.ends(), "it ends before its holder thinks");
    }
}

async fn a_lease_does_not_end_before_its_time(fx: Fixture) {
    let line = fx.line("armed");
    let first = line.brief().held(Whole).await;
    let next = line.waiting(Whole).await;
    next.granted_within(first.after_its_end()).await;
    let early = first.ends().remaining();
    assert!(early.is_zero(), "granted {early:?} too early");
}
