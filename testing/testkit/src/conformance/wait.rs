//! What `Engine::wait` promises.

use std::time::Duration;

use palisade::engine::Ask::{self, Whole};
use palisade::engine::Place;
use palisade::{BootTime, ErrorKind, Eviction};
use tokio::task::JoinHandle;

use super::fixture::{Line, RECHECK, Seat, assert_is, fails};
use super::{Fixture, NotApplicable, cases, needs, soon, within};

/// A notification arrives well before the re-check after one second would find the grant.
const PUSHED: Duration = Duration::from_millis(700);

/// How late after the end of a lease the next claim may be granted.
const LATE: Duration = Duration::from_millis(1500);

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

/// Waits in a task, again after spurious wake-ups (as the core does). Returns the place and when it
/// was reported.
async fn asleep(seat: &Seat) -> JoinHandle<palisade::Result<(Place, BootTime)>> {
    let seat = seat.clone();
    let waiter = tokio::spawn(async move {
        loop {
            match seat.wait(far()).await? {
                Place::Waiting => {}
                place => return Ok((place, BootTime::now())),
            }
        }
    });
    tokio::task::yield_now().await;
    waiter
}

/// Leaves with `first`, and asserts that the waiter behind it is notified. `first` may belong to
/// another client.
async fn pushed(fx: &Fixture, first: Seat, line: &Line) {
    let next = line.waiting(Whole).await;
    let woken = asleep(&next).await;
    let left = BootTime::now();
    first.leave().await;
    let (place, at) = within(PUSHED, "the push", woken).await.unwrap().unwrap();
    assert_is!(place, Place::Held { .. });
    fx.note("push_us", at.saturating_since(left).as_micros() as f64);
}

async fn grant_is_pushed(fx: Fixture) {
    let line = fx.line("push");
    pushed(&fx, line.held(Whole).await, &line).await;
}

async fn grant_is_pushed_from_another_client(fx: Fixture) {
    let other = fx.other_client().await;
    let first = fx.line_on(&other, "push").held(Whole).await;
    pushed(&fx, first, &fx.line("push")).await;
}

async fn readers_are_all_woken(fx: Fixture) {
    let line = fx.line("push");
    let writer = line.held(Whole).await;
    let mut woken = Vec::new();
    for _ in 0..5 {
        woken.push(asleep(&line.waiting(Ask::READ).await).await);
    }
    writer.leave().await;
    for reader in woken {
        let (place, _) = soon("the push", reader).await.unwrap().unwrap();
        assert_is!(place, Place::Held { .. });
    }
}

async fn held_ticket_is_told_at_once(fx: Fixture) {
    let held = fx.line("held").held(Whole).await;
    let place = within(PUSHED, "the answer", held.wait(far())).await;
    assert_eq!(place.unwrap(), held.place);
}

async fn until_is_kept(fx: Fixture) {
    let line = fx.line("until");
    line.held(Whole).await;
    let next = line.waiting(Whole).await;
    let mut least = Duration::MAX;
    // A busy machine may delay one or two of them.
    for _ in 0..3 {
        let until = BootTime::now() + Duration::from_millis(300);
        // A wait may return early; the last read is the one at `until`.
        while !until.has_passed() {
            let place = soon("the last look", next.wait(until)).await.unwrap();
            assert_eq!(place, Place::Waiting, "nothing changed");
        }
        least = least.min(BootTime::now().saturating_since(until));
        if least < RECHECK {
            return;
        }
    }
    panic!("{least:?} after `until`");
}

async fn until_in_the_past_answers_at_once(fx: Fixture) {
    let line = fx.line("until");
    line.held(Whole).await;
    let next = line.waiting(Whole).await;
    let place = within(PUSHED, "the answer", next.now()).await;
    assert_eq!(place, Place::Waiting);
}

async fn end_of_the_blocking_lease_is_noticed(fx: Fixture) {
    let line = fx.line("expiry");
    let brief = line.brief().held(Whole).await;
    let next = line.waiting(Whole).await;
    let woken = asleep(&next).await;
    let (place, at) = within(brief.after_its_end(), "the grant", woken)
        .await
        .unwrap()
        .unwrap();
    assert_is!(place, Place::Held { .. });
    let late = at.saturating_since(brief.ends());
    fx.note("late_ms", late.as_secs_f64() * 1e3);
    assert!(late < LATE, "granted {late:?} after the lease's end");
}

async fn end_of_a_waiting_lease_ahead_is_noticed(fx: Fixture) {
    if !fx.capability().fair || !fx.capability().shared {
        NotApplicable::because("waiters have no order, or no readers");
    }
    let line = fx.line("expiry");
    line.held(Ask::READ).await;
    let writer = line.brief().waiting(Whole).await;
    let reader = line.waiting(Ask::READ).await;
    let limit = writer.armed.ttl + LATE;
    let (place, _) = within(limit, "the grant", asleep(&reader).await)
        .await
        .unwrap()
        .unwrap();
    assert_is!(place, Place::Held { .. });
}

async fn dropping_keeps_the_place(fx: Fixture) {
    let line = fx.line("dropped");
    let first = line.held(Whole).await;
    let next = line.waiting(Whole).await;
    let mut behind = None;
    // Without an order of waiters, the one behind might be served first.
    if fx.capability().fair {
        behind = Some(line.waiting(Whole).await);
    }
    for millis in [0, 1, 20] {
        let dropped = tokio::time::timeout(Duration::from_millis(millis), next.wait(far())).await;
        assert!(dropped.is_err(), "nothing changed, but {dropped:?}");
    }
    first.leave().await;
    next.granted().await;
    if let Some(behind) = behind {
        assert_eq!(behind.now().await, Place::Waiting);
    }
}

async fn left_ticket_is_gone(fx: Fixture) {
    let line = fx.line("gone");
    line.held(Whole).await;
    let next = line.waiting(Whole).await;
    next.leave().await;
    let place = within(PUSHED, "the answer", next.wait(far())).await;
    assert_eq!(place.unwrap(), Place::Gone);
}

async fn ended_ticket_is_gone(fx: Fixture) {
    let line = fx.line("gone");
    line.held(Whole).await;
    let brief = line.brief().waiting(Whole).await;
    let gone = async {
        loop {
            match brief.wait(BootTime::now() + RECHECK).await.unwrap() {
                Place::Gone => return,
                Place::Waiting => {}
                held => panic!("a second holder: {held:?}"),
            }
        }
    };
    within(brief.after_its_end(), "the end of a waiting lease", gone).await;
}

async fn removal_wakes_the_waiter(fx: Fixture) {
    let line = fx.line("gone");
    line.held(Whole).await;
    let next = line.waiting(Whole).await;
    let woken = asleep(&next).await;
    assert!(next.evict(Eviction::Remove).await, "the waiter is there");
    let (place, _) = soon("the answer", woken).await.unwrap().unwrap();
    assert_eq!(place, Place::Gone);
}

async fn cut_off_engine_is_unreachable(fx: Fixture) {
    let line = fx.line("cut");
    line.held(Whole).await;
    let next = line.waiting(Whole).await;
    let cut_off = fx.site().cut_off.clone().unwrap();
    let woken = asleep(&next).await;
    cut_off.begin();
    let answer = tokio::time::timeout(Duration::from_secs(10), woken).await;
    cut_off.end();
    fails(answer.expect("an error").unwrap(), ErrorKind::Unreachable);
}
