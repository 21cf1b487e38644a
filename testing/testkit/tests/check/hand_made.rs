//! One bad history for each way to violate an invariant, and a similar good one.

use palisade_testkit::lab::check::Invariant as I;
use palisade_testkit::lab::history::{Answer, What};

use crate::support::*;

#[test]
fn two_believers_at_once_are_refused() {
    let one = turn("a", 1, [0, 10, 50]);
    I::BelievedExclusion.refuses([one.clone(), turn("b", 2, [5, 40, 60])], [10, 40, 50, 60]);
    I::BelievedExclusion.accepts([one, turn("b", 2, [5, 50, 60])]);
}

#[test]
fn who_is_stopped_or_invalid_or_dead_believes_nothing() {
    let a = [ev(0, "a", ask(1)), ev(10, "a", held(1, 1))];
    let b = turn("b", 2, [5, 120, 130]);
    let stopped = [
        ev(20, "a", What::PauseBegin),
        ev(140, "a", What::PauseEnd),
        ev(141, "a", lost(1, 100)),
    ];
    I::BelievedExclusion.accepts([a.to_vec(), b.clone(), stopped.to_vec()]);
    let invalid = [ev(140, "a", lost(1, 110))];
    I::BelievedExclusion.accepts([a.to_vec(), b.clone(), invalid.to_vec()]);
    let dead = [ev(110, "a", What::Kill)];
    I::BelievedExclusion.accepts([a.to_vec(), b.clone(), dead.to_vec()]);
    // The same without the stop.
    let told_late = [ev(140, "a", lost(1, 125))];
    I::BelievedExclusion.refuses([a.to_vec(), b, told_late.to_vec()], [10, 120, 130, 140]);
}

#[test]
fn a_grant_just_before_the_signal_of_a_stop_is_no_belief_after_it() {
    let invalid = What::Invalid {
        token: 1,
        claim: claim(1),
        valid_until: None,
    };
    let found = vec![ev(143, "a", invalid)];
    let b = turn("b", 2, [5, 120, 150]);
    let stopped = vec![ev(9, "a", What::PauseBegin), ev(140, "a", What::PauseEnd)];
    let granted = |at| vec![ev(0, "a", ask(1)), ev(at, "a", held(1, 1))];
    I::BelievedExclusion.accepts([stopped.clone(), granted(10), b.clone(), found.clone()]);
    let spoke = vec![ev(142, "a", valid(1))];
    let parts = [
        stopped.clone(),
        granted(10),
        b.clone(),
        spoke,
        found.clone(),
    ];
    I::BelievedExclusion.refuses(parts, [10, 120, 143, 150]);
    // The stop was over when it was granted.
    let parts = [stopped, granted(141), b, found];
    I::BelievedExclusion.refuses(parts, [120, 141, 143, 150]);
}

#[test]
fn an_overlap_behind_a_long_hold_is_found() {
    // The first overlaps the third, with a short second one in between.
    let events = all(vec![
        turn("a", 1, [0, 10, 100]),
        turn("b", 2, [0, 20, 30]),
        turn("c", 3, [0, 40, 50]),
    ]);
    let verdict = I::BelievedExclusion.check(
        &palisade_testkit::lab::history::History::of(events),
        &params(),
    );
    assert_eq!(verdict.violations().len(), 2, "{verdict}");
}

#[test]
fn more_than_the_capacity_is_refused() {
    let two = all(vec![
        part("a", 1, 2, [0, 10, 50]),
        part("b", 2, 2, [0, 20, 60]),
    ]);
    I::Capacity.accepts(two.clone());
    I::Capacity.refuses(
        [two, part("c", 3, 1, [0, 30, 70])],
        [10, 20, 30, 50, 60, 70],
    );
}

#[test]
fn a_writer_beside_a_reader_is_refused() {
    let reader = part("a", 1, 1, [0, 10, 50]);
    I::Capacity.refuses(
        [reader.clone(), turn("b", 2, [0, 40, 60])],
        [10, 40, 50, 60],
    );
    I::Capacity.accepts([reader, turn("b", 2, [0, 50, 60])]);
}

#[test]
fn tokens_that_go_back_or_stand_still_are_refused() {
    let first = turn("a", 5, [0, 10, 20]);
    I::TokenOrder.refuses([first.clone(), turn("b", 4, [30, 40, 50])], [10, 30, 40]);
    // Requested before the first was answered, so the engine may choose their order.
    I::TokenOrder.accepts([first.clone(), turn("b", 4, [5, 40, 50])]);
    let mut same = turn("b", 5, [30, 40, 50]);
    for event in &mut same {
        if let What::AcquireReturned {
            answer: Answer::Held { claim, .. },
            ..
        }
        | What::ReleaseCalled { claim, .. }
        | What::ReleaseReturned { claim, .. } = &mut event.what
        {
            *claim = "another".to_owned();
        }
    }
    I::TokenOrder.refuses([first, same], [10, 40]);
}

#[test]
fn a_slow_hand_over_after_a_death_is_refused() {
    let dies = vec![
        ev(0, "a", ask(1)),
        ev(10, "a", held(1, 1)),
        ev(20, "a", What::Kill),
    ];
    // Due 10 + 20 ms after the kill.
    I::BoundedLeak.accepts([dies.clone(), turn("b", 2, [5, 45, 60])]);
    I::BoundedLeak.refuses([dies.clone(), turn("b", 2, [5, 55, 60])], [5, 10, 20]);
    I::BoundedLeak.leaves_open(dies);
}

#[test]
fn a_slow_hand_over_after_a_stop_is_refused() {
    let stopped = vec![
        ev(0, "a", ask(1)),
        ev(10, "a", held(1, 1)),
        ev(20, "a", What::PauseBegin),
        ev(300, "a", What::PauseEnd),
        ev(300, "a", lost(1, 100)),
    ];
    // Due 100 + 20 ms after the stop.
    I::BoundedLeak.accepts([stopped.clone(), turn("b", 2, [5, 130, 140])]);
    I::BoundedLeak.refuses([stopped, turn("b", 2, [5, 150, 160])], [5, 10, 20]);
}

#[test]
fn what_the_dead_leave_in_the_line_is_refused() {
    let dies = vec![
        ev(0, "a", start("oa")),
        ev(5, "a", ask(1)),
        ev(20, "a", What::Kill),
    ];
    I::BoundedLeak.accepts([
        dies.clone(),
        vec![survey(30, &[(1, "oa")]), survey(60, &[])],
    ]);
    I::BoundedLeak.refuses([dies, vec![survey(60, &[(1, "oa")])]], [20, 60]);
}

#[test]
fn an_acquire_without_an_end_is_refused() {
    I::Progress.refuses(vec![ev(0, "a", ask(1)), ev(9, "b", What::End)], [0]);
    I::Progress.accepts(vec![ev(0, "a", ask(1)), ev(9, "a", What::Kill)]);
    I::Progress.leaves_open(vec![ev(9, "b", What::End)]);
}

#[test]
fn an_acquire_beyond_its_patience_is_refused() {
    let waits = |until| {
        vec![
            ev(0, "a", ask_within(1, 50)),
            ev(until, "a", answer(1, Answer::Busy)),
        ]
    };
    I::Progress.accepts(waits(69));
    I::Progress.refuses(waits(90), [0, 90]);
    let stopped = vec![ev(10, "a", What::PauseBegin), ev(60, "a", What::PauseEnd)];
    I::Progress.accepts([waits(90), stopped]);
    // Another process was stopped, maybe inside the engine: this allows one more request (2 s).
    let other = vec![ev(10, "b", What::PauseBegin), ev(60, "b", What::PauseEnd)];
    I::Progress.accepts([waits(1500), other.clone()]);
    I::Progress.refuses([waits(2500), other], [0, 2500]);
    // The harness itself was answered late: this allows twelve times that delay.
    let look = |ms: u64, took: u64| {
        let (asked, line) = ((ms - took) * MS, Vec::new());
        vec![ev(ms, "harness", What::Survey { asked, line })]
    };
    I::Progress.accepts([waits(90), look(60, 10)]);
    I::Progress.refuses([waits(90), look(60, 1)], [0, 90]);
    I::Progress.refuses([waits(90), look(200, 50)], [0, 90]);
}

#[test]
fn a_lost_wake_up_is_refused() {
    let first = turn("a", 1, [0, 10, 20]);
    I::Progress.accepts([first.clone(), turn("b", 2, [5, 80, 90])]);
    I::Progress.refuses([first, turn("b", 2, [5, 95, 99])], [5, 20, 20]);
}

#[test]
fn overtaking_is_refused() {
    let turns = all(vec![
        turn("a", 1, [0, 1, 20]),
        turn("b", 2, [2, 22, 30]),
        turn("c", 3, [8, 32, 40]),
    ]);
    I::Fifo.accepts([
        turns.clone(),
        vec![survey(10, &[(1, "a"), (2, "b"), (3, "c")])],
    ]);
    I::Fifo.refuses(
        [
            turns.clone(),
            vec![survey(10, &[(1, "a"), (3, "c"), (2, "b")])],
        ],
        [10, 22, 32],
    );
    I::Fifo.leaves_open(turns);
}

#[test]
fn a_later_caller_that_is_served_first_is_refused() {
    // A survey shows 3 in line at 10; 2 asks at 15 and is granted first.
    let events = all(vec![
        turn("a", 1, [0, 1, 20]),
        turn("c", 3, [2, 32, 40]),
        turn("b", 2, [15, 22, 30]),
        vec![survey(10, &[(1, "a"), (3, "c")])],
    ]);
    I::Fifo.refuses(events, [10, 15, 22, 32]);
}
