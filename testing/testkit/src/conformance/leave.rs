//! What `Engine::leave` promises, and `Engine::audit` where tickets have their own leases.

use palisade::engine::Ask::{self, Whole};
use palisade::engine::{Claim, ClaimId, Entered, Left};

use super::fixture::assert_is;
use super::{Fixture, cases, needs, permits};

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

async fn doubled_leave_is_absent(fx: Fixture) {
    let line = fx.line("doubled");
    let held = line.held(Whole).await;
    assert_eq!(held.leave().await, Left::Done);
    assert_eq!(held.leave().await, Left::Absent);
    line.held(Whole).await;
    assert_eq!(held.leave().await, Left::Absent);
}

async fn late_leave_leaves_the_next_holder_alone(fx: Fixture) {
    let line = fx.line("late");
    let held = line.held(Whole).await;
    held.leave().await;
    let other = fx.other_client().await;
    let next = fx.line_on(&other, "late").held(Whole).await;
    assert_eq!(held.leave().await, Left::Absent);
    assert_eq!(line.ids().await.0, [next.id()]);
}

async fn another_incarnation_does_not_leave(fx: Fixture) {
    let line = fx.line("incarnation");
    let held = line.held(Whole).await;
    assert_eq!(held.another_incarnation().leave().await, Left::Absent);
    line.busy(Whole).await;
    assert_eq!(held.leave().await, Left::Done);
}

async fn unknown_count_leaves_by_id(fx: Fixture) {
    let line = fx.line("unknown");
    let mut unknown = line.held(Whole).await;
    unknown.ticket.sequence = 0;
    assert_eq!(unknown.leave().await, Left::Done);
    line.held(Whole).await;
}

async fn next_in_line_is_granted(fx: Fixture) {
    let line = fx.line("next");
    let held = line.held(Whole).await;
    let next = line.waiting(Whole).await;
    assert_eq!(held.leave().await, Left::Done);
    // The leave itself grants the next claim, before anyone asks again. An engine without a line
    // grants to whoever asks next.
    if !fx.capability().waiters_visible {
        next.granted().await;
    }
    assert_eq!(line.until_held().await.holders[0].id, next.id());
    next.granted().await;
}

async fn leaving_waiter_lets_those_behind_it_in(fx: Fixture) {
    let line = fx.line("between");
    line.held(Ask::READ).await;
    let writer = line.waiting(Whole).await;
    let reader = line.waiting(Ask::READ).await;
    assert_eq!(writer.leave().await, Left::Done);
    reader.granted().await;
}

async fn room_is_given_to_as_many_as_fit(fx: Fixture) {
    let line = fx.line("room");
    let all = line.held(permits(3, 3)).await;
    let one = line.waiting(permits(1, 3)).await;
    let two = line.waiting(permits(2, 3)).await;
    let behind = line.waiting(permits(1, 3)).await;
    all.leave().await;
    one.granted().await;
    two.granted().await;
    let (holders, waiters) = line.ids().await;
    assert_eq!(holders.len(), 2, "holders");
    assert_eq!(waiters, [behind.id()]);
}

async fn enter_under_way_finds_it_was_left(fx: Fixture) {
    let line = fx.line("under-way");
    line.held(Whole).await.must_own_lease();
    let claim = line.claim(Whole);
    assert_eq!(line.leave_unentered(claim.id).await, Left::Absent);
    // Repeated requests are refused as well.
    for _ in 0..2 {
        assert_is!(line.ask(claim.clone()).await.unwrap(), Entered::Busy);
    }
    assert_eq!(line.length().await, (1, 0));
}

async fn copy_under_way_finds_it_was_left(fx: Fixture) {
    let line = fx.line("copied");
    let claim = line.claim(Whole);
    let mut doubtful = line.enter(claim.clone()).await;
    doubtful.must_own_lease();
    doubtful.ticket.sequence = doubtful.sequence();
    doubtful.ticket.in_doubt = true;
    assert_eq!(doubtful.leave().await, Left::Done);
    assert_is!(line.ask(claim).await.unwrap(), Entered::Busy);
    line.held(Whole).await;
}

async fn others_do_not_notice_what_was_left(fx: Fixture) {
    let (line, elsewhere) = (fx.line("left"), fx.line("elsewhere"));
    let id = ClaimId::random();
    line.leave_unentered(id).await;
    line.held(Whole).await;
    // Ids are random, so the same id in another line never happens in practice; it must not break
    // that line.
    let same_id = Claim {
        id,
        ..elsewhere.claim(Whole)
    };
    elsewhere.ask(same_id).await.unwrap();
    line.until_held().await;
}

async fn own_leases_have_an_empty_audit(fx: Fixture) {
    let line = fx.line("audit");
    let held = line.held(Whole).await;
    held.must_own_lease();
    let audit = fx.engine().audit(held.ticket.lease).await.unwrap();
    assert!(audit.is_empty(), "an own lease has {audit:?}");
    line.busy(Whole).await;
}
