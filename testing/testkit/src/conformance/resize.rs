//! What `Engine::resize` promises.

use palisade::engine::Ask::{self, Whole};
use palisade::engine::{Place, Renewal};
use palisade::{BootTime, ErrorKind};

use super::fixture::{assert_is, fails};
use super::{Fixture, SOON, cases, needs, permits, soon};

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

async fn every_claim_has_the_new_capacity(fx: Fixture) {
    let line = fx.line("resized");
    let first = line.held(permits(1, 2)).await;
    let second = line.held(permits(1, 2)).await;
    let third = line.waiting(permits(1, 2)).await;
    assert!(line.resize(1).await.unwrap(), "permits there");
    let shown = line.shown().await;
    assert_eq!(shown.capacity, Some(1));
    for claim in shown.holders.iter().chain(&shown.waiters) {
        assert_eq!(claim.ask, permits(1, 1), "{claim:?}");
    }
    assert_eq!(shown.holders.len(), 2, "holders");
    for (held, shown) in [&first, &second].into_iter().zip(&shown.holders) {
        assert_eq!(Some(held.sequence()), shown.sequence);
        assert_is!(held.renew().await, Renewal::Held(_));
    }
    assert_is!(third.renew().await, Renewal::Held(_));
}

async fn holders_of_too_much_go_before_the_next_is_granted(fx: Fixture) {
    let line = fx.line("shrunk");
    let first = line.held(permits(1, 2)).await;
    let second = line.held(permits(1, 2)).await;
    assert!(line.resize(1).await.unwrap(), "permits there");
    let third = line.waiting(permits(1, 1)).await;
    first.leave().await;
    assert_eq!(third.now().await, Place::Waiting, "two of one");
    line.busy(permits(1, 1)).await;
    second.leave().await;
    third.granted().await;
}

async fn greater_capacity_wakes_the_next(fx: Fixture) {
    let line = fx.line("grown");
    line.held(permits(1, 1)).await;
    let next = line.waiting(permits(1, 1)).await;
    let other = fx.other_client().await;
    let waiter = next.clone();
    // Sleeps so long that only a notification can end it in time.
    let wait = tokio::spawn(async move { waiter.wait(BootTime::now() + SOON * 4).await });
    assert_eq!(next.now().await, Place::Waiting);
    let resized = fx.line_on(&other, "grown").resize(2).await;
    assert!(resized.unwrap(), "permits there");
    let place = soon("the wake-up", wait).await.unwrap().unwrap();
    assert_is!(place, Place::Held { .. });
    line.busy(permits(1, 2)).await;
}

async fn greater_capacity_lets_nobody_overtake(fx: Fixture) {
    let line = fx.line("grown");
    line.held(permits(2, 2)).await;
    let heavy = line.waiting(permits(2, 2)).await;
    let light = line.waiting(permits(1, 2)).await;
    assert!(line.resize(3).await.unwrap(), "permits there");
    for waiting in [&heavy, &light] {
        let place = waiting.now().await;
        assert_eq!(place, Place::Waiting, "the heavy one has no room");
    }
    assert!(line.resize(5).await.unwrap(), "permits there");
    let (heavy, light) = (heavy.granted().await, light.granted().await);
    assert!(light > heavy, "{light} after {heavy}");
}

async fn later_claim_names_the_new_capacity(fx: Fixture) {
    let line = fx.line("named");
    line.held(permits(1, 2)).await;
    assert!(line.resize(3).await.unwrap(), "permits there");
    let old = line.ask(line.claim(permits(1, 2))).await;
    fails(old, ErrorKind::CapacityMismatch);
    line.held(permits(1, 3)).await;
    line.held(permits(1, 3)).await;
    line.busy(permits(1, 3)).await;
}

async fn heavier_claim_is_invalid(fx: Fixture) {
    let line = fx.line("heavy");
    line.held(permits(2, 3)).await;
    line.waiting(permits(3, 3)).await;
    for capacity in [1, 2] {
        fails(line.resize(capacity).await, ErrorKind::InvalidArgument);
        assert_eq!(line.shown().await.capacity, Some(3));
    }
}

async fn readers_are_a_mismatch(fx: Fixture) {
    let line = fx.line("read");
    line.held(Ask::READ).await;
    fails(line.resize(2).await, ErrorKind::CapacityMismatch);
    line.held(Ask::READ).await;
}

async fn line_without_permits_is_false(fx: Fixture) {
    let line = fx.line("whole");
    assert!(!line.resize(2).await.unwrap(), "an empty line");
    assert_eq!(line.shown().await.capacity, None);
    line.held(Whole).await;
    assert!(!line.resize(2).await.unwrap(), "a lock");
    line.busy(Whole).await;
}
