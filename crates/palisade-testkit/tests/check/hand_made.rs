//! One bad history per way to break an invariant, and the good one next to it.

use palisade_testkit::check::Invariant as I;
use palisade_testkit::history::{Answer, Event, Grip, Released, What};

use crate::support::*;

fn all(parts: Vec<Vec<Event>>) -> Vec<Event> {
    parts.into_iter().flatten().collect()
}

#[test]
fn two_believers_at_once_are_refused() {
    let one = turn("a", 1, 1, [0, 10, 50]);
    refuses(
        I::BelievedExclusion,
        all(vec![one.clone(), turn("b", 1, 2, [5, 40, 60])]),
        &[10, 40, 50, 60],
    );
    accepts(
        I::BelievedExclusion,
        all(vec![one, turn("b", 1, 2, [5, 50, 60])]),
    );
}

#[test]
fn who_is_stopped_or_invalid_or_dead_believes_nothing() {
    let a = [ev(0, "a", ask(1)), ev(10, "a", held(1, 1))];
    let b = turn("b", 1, 2, [5, 120, 130]);
    let stopped = [
        ev(20, "a", What::PauseBegin),
        ev(140, "a", What::PauseEnd),
        ev(141, "a", lost(1, 100)),
    ];
    accepts(
        I::BelievedExclusion,
        all(vec![a.to_vec(), b.clone(), stopped.to_vec()]),
    );
    let invalid = [ev(140, "a", lost(1, 110))];
    accepts(
        I::BelievedExclusion,
        all(vec![a.to_vec(), b.clone(), invalid.to_vec()]),
    );
    let dead = [ev(110, "a", What::Kill)];
    accepts(
        I::BelievedExclusion,
        all(vec![a.to_vec(), b.clone(), dead.to_vec()]),
    );
    // The same without an excuse.
    let told_late = [ev(140, "a", lost(1, 125))];
    refuses(
        I::BelievedExclusion,
        all(vec![a.to_vec(), b, told_late.to_vec()]),
        &[10, 120, 130, 140],
    );
}

#[test]
fn an_overlap_behind_a_long_hold_is_found() {
    // The first overlaps the third, with a short second in between.
    let events = all(vec![
        turn("a", 1, 1, [0, 10, 100]),
        turn("b", 1, 2, [0, 20, 30]),
        turn("c", 1, 3, [0, 40, 50]),
    ]);
    let verdict =
        I::BelievedExclusion.check(&palisade_testkit::history::History::of(events), &params());
    assert_eq!(verdict.violations().len(), 2, "{verdict}");
}

fn part(client: &str, token: u64, weight: u32, times: [u64; 3]) -> Vec<Event> {
    let mut turn = turn(client, 1, token, times);
    turn[0].what = ask_for(
        1,
        Grip::Part {
            weight,
            capacity: 4,
        },
    );
    turn
}

#[test]
fn more_than_the_capacity_is_refused() {
    let two = all(vec![
        part("a", 1, 2, [0, 10, 50]),
        part("b", 2, 2, [0, 20, 60]),
    ]);
    accepts(I::Capacity, two.clone());
    refuses(
        I::Capacity,
        all(vec![two, part("c", 3, 1, [0, 30, 70])]),
        &[10, 20, 30, 50, 60, 70],
    );
}

#[test]
fn a_writer_beside_a_reader_is_refused() {
    let reader = part("a", 1, 1, [0, 10, 50]);
    refuses(
        I::Capacity,
        all(vec![reader.clone(), turn("b", 1, 2, [0, 40, 60])]),
        &[10, 40, 50, 60],
    );
    accepts(I::Capacity, all(vec![reader, turn("b", 1, 2, [0, 50, 60])]));
}

#[test]
fn tokens_that_go_back_or_stand_still_are_refused() {
    let first = turn("a", 1, 5, [0, 10, 20]);
    refuses(
        I::TokenOrder,
        all(vec![first.clone(), turn("b", 1, 4, [30, 40, 50])]),
        &[10, 30, 40],
    );
    // Asked for before the first was answered: their order is the engine's own.
    accepts(
        I::TokenOrder,
        all(vec![first.clone(), turn("b", 1, 4, [5, 40, 50])]),
    );
    let mut same = turn("b", 1, 5, [30, 40, 50]);
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
    refuses(I::TokenOrder, all(vec![first, same]), &[10, 40]);
}

#[test]
fn a_slow_hand_over_after_a_death_is_refused() {
    let dies = vec![
        ev(0, "a", ask(1)),
        ev(10, "a", held(1, 1)),
        ev(20, "a", What::Kill),
    ];
    // Due 10 + 20 ms after the kill.
    accepts(
        I::BoundedLeak,
        all(vec![dies.clone(), turn("b", 1, 2, [5, 45, 60])]),
    );
    refuses(
        I::BoundedLeak,
        all(vec![dies.clone(), turn("b", 1, 2, [5, 55, 60])]),
        &[5, 10, 20],
    );
    leaves_open(I::BoundedLeak, dies);
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
    accepts(
        I::BoundedLeak,
        all(vec![stopped.clone(), turn("b", 1, 2, [5, 130, 140])]),
    );
    refuses(
        I::BoundedLeak,
        all(vec![stopped, turn("b", 1, 2, [5, 150, 160])]),
        &[5, 10, 20],
    );
}

#[test]
fn what_the_dead_leave_in_the_line_is_refused() {
    let dies = vec![
        ev(0, "a", start("oa")),
        ev(5, "a", ask(1)),
        ev(20, "a", What::Kill),
    ];
    accepts(
        I::BoundedLeak,
        all(vec![
            dies.clone(),
            vec![survey(30, &[(1, "oa")]), survey(60, &[])],
        ]),
    );
    refuses(
        I::BoundedLeak,
        all(vec![dies, vec![survey(60, &[(1, "oa")])]]),
        &[20, 60],
    );
}

#[test]
fn an_acquire_without_an_end_is_refused() {
    refuses(
        I::Progress,
        vec![ev(0, "a", ask(1)), ev(9, "b", What::End)],
        &[0],
    );
    accepts(
        I::Progress,
        vec![ev(0, "a", ask(1)), ev(9, "a", What::Kill)],
    );
    leaves_open(I::Progress, vec![ev(9, "b", What::End)]);
}

#[test]
fn an_acquire_beyond_its_patience_is_refused() {
    let waits = |until| {
        vec![
            ev(0, "a", ask_within(1, 50)),
            ev(until, "a", answer(1, Answer::Busy)),
        ]
    };
    accepts(I::Progress, waits(69));
    refuses(I::Progress, waits(90), &[0, 90]);
    let stopped = vec![ev(10, "a", What::PauseBegin), ev(60, "a", What::PauseEnd)];
    accepts(I::Progress, all(vec![waits(90), stopped]));
    // Another was stopped, maybe inside the engine: one request (2 s) more.
    let other = vec![ev(10, "b", What::PauseBegin), ev(60, "b", What::PauseEnd)];
    accepts(I::Progress, all(vec![waits(1500), other.clone()]));
    refuses(I::Progress, all(vec![waits(2500), other]), &[0, 2500]);
}

#[test]
fn a_loss_of_unknown_time_is_excused_only_by_a_stop() {
    let unknown = |at| {
        let invalid = What::Invalid {
            token: 1,
            claim: claim(1),
            valid_until: None,
        };
        vec![ev(at, "a", invalid)]
    };
    let stop = vec![ev(20, "a", What::PauseBegin), ev(140, "a", What::PauseEnd)];
    accepts(
        I::BelievedExclusion,
        replaced(all(vec![stop.clone(), unknown(141)])),
    );
    let spoke = vec![ev(141, "a", valid(1))];
    refuses(
        I::BelievedExclusion,
        replaced(all(vec![stop, spoke, unknown(142)])),
        &[10, 120, 142, 150],
    );
    refuses(
        I::BelievedExclusion,
        replaced(unknown(141)),
        &[10, 120, 141, 150],
    );
}

#[test]
fn a_lost_wake_up_is_refused() {
    let first = turn("a", 1, 1, [0, 10, 20]);
    accepts(
        I::Progress,
        all(vec![first.clone(), turn("b", 1, 2, [5, 80, 90])]),
    );
    refuses(
        I::Progress,
        all(vec![first, turn("b", 1, 2, [5, 95, 99])]),
        &[5, 20, 20],
    );
}

#[test]
fn overtaking_is_refused() {
    let turns = all(vec![
        turn("a", 1, 1, [0, 1, 20]),
        turn("b", 1, 2, [2, 22, 30]),
        turn("c", 1, 3, [8, 32, 40]),
    ]);
    accepts(
        I::Fifo,
        all(vec![
            turns.clone(),
            vec![survey(10, &[(1, "a"), (2, "b"), (3, "c")])],
        ]),
    );
    refuses(
        I::Fifo,
        all(vec![
            turns.clone(),
            vec![survey(10, &[(1, "a"), (3, "c"), (2, "b")])],
        ]),
        &[10, 22, 32],
    );
    leaves_open(I::Fifo, turns);
}

#[test]
fn a_later_caller_that_is_served_first_is_refused() {
    // 3 is seen in line at 10, 2 asks at 15 and is granted first.
    let events = all(vec![
        turn("a", 1, 1, [0, 1, 20]),
        turn("c", 1, 3, [2, 32, 40]),
        turn("b", 1, 2, [15, 22, 30]),
        vec![survey(10, &[(1, "a"), (3, "c")])],
    ]);
    refuses(I::Fifo, events, &[10, 15, 22, 32]);
}

fn replaced(told: Vec<Event>) -> Vec<Event> {
    let a = vec![ev(0, "a", ask(1)), ev(10, "a", held(1, 1))];
    all(vec![a, turn("b", 1, 2, [5, 120, 150]), told])
}

#[test]
fn a_loss_told_after_the_next_grant_is_refused() {
    accepts(I::EarlyLoss, replaced(vec![ev(105, "a", lost(1, 100))]));
    refuses(
        I::EarlyLoss,
        replaced(vec![ev(125, "a", lost(1, 124))]),
        &[10, 120, 125],
    );
    // A stop is no excuse for being valid: the clock runs on.
    let stop = vec![ev(20, "a", What::PauseBegin), ev(140, "a", What::PauseEnd)];
    let valid_again = all(vec![
        stop.clone(),
        vec![ev(141, "a", valid(1)), ev(142, "a", lost(1, 142))],
    ]);
    refuses(I::EarlyLoss, replaced(valid_again), &[10, 120, 141]);
    accepts(
        I::EarlyLoss,
        replaced(all(vec![stop, vec![ev(141, "a", lost(1, 100))]])),
    );
}

#[test]
fn a_loss_that_is_told_late_or_never_or_taken_back_is_refused() {
    refuses(
        I::EarlyLoss,
        replaced(vec![ev(125, "a", lost(1, 100))]),
        &[10, 125],
    );
    refuses(
        I::EarlyLoss,
        replaced(vec![ev(145, "a", release(1))]),
        &[10, 120, 145],
    );
    let back = vec![ev(101, "a", lost(1, 100)), ev(110, "a", valid(1))];
    refuses(I::EarlyLoss, replaced(back), &[10, 101, 110]);
}

#[test]
fn a_late_release_that_claims_success_is_refused() {
    let late = |answer| {
        let told = vec![ev(105, "a", lost(1, 100)), ev(130, "a", release(1))];
        replaced(all(vec![told, vec![ev(131, "a", released(1, answer))]]))
    };
    accepts(I::NoForeignRelease, late(Released::Lost));
    refuses(I::NoForeignRelease, late(Released::Done), &[120, 130, 131]);
}

#[test]
fn a_late_release_that_frees_the_next_hold_is_refused() {
    let told = vec![
        ev(105, "a", lost(1, 100)),
        ev(130, "a", release(1)),
        ev(131, "a", released(1, Released::Lost)),
    ];
    let intruder = turn("c", 1, 3, [5, 135, 160]);
    refuses(
        I::NoForeignRelease,
        replaced(all(vec![told.clone(), intruder])),
        &[120, 130, 135],
    );
    let after = turn("c", 1, 3, [5, 151, 160]);
    accepts(I::NoForeignRelease, replaced(all(vec![told, after])));
}

#[test]
fn an_answer_that_hides_a_place_is_refused() {
    let error = Answer::Error {
        kind: "unreachable".into(),
        maybe_applied: true,
    };
    let fails = vec![
        ev(0, "a", start("oa")),
        ev(5, "a", ask(1)),
        ev(20, "a", answer(1, error)),
    ];
    // The lease, one second and the slack.
    accepts(
        I::HonestUnknown,
        all(vec![fails.clone(), vec![survey(1100, &[(9, "oa")])]]),
    );
    refuses(
        I::HonestUnknown,
        all(vec![fails.clone(), vec![survey(1150, &[(9, "oa")])]]),
        &[20, 1150],
    );
    leaves_open(I::HonestUnknown, fails);
    let mut done = turn("a", 1, 1, [0, 10, 20]);
    done.push(ev(0, "a", start("oa")));
    done.push(survey(1100, &[(1, "oa")]));
    refuses(I::HonestUnknown, done, &[20, 1100]);
}

#[test]
fn one_claim_granted_twice_is_refused() {
    let mut events = all(vec![turn("a", 1, 1, [0, 10, 20]), vec![survey(60, &[])]]);
    let again = Answer::Held {
        token: 7,
        claim: claim(1),
    };
    events.extend([ev(30, "a", ask(2)), ev(40, "a", answer(2, again))]);
    refuses(I::HonestUnknown, events, &[10, 40]);
}

#[test]
fn what_a_dropped_acquire_leaves_behind_is_refused() {
    let drops = vec![
        ev(0, "a", start("oa")),
        ev(5, "a", ask(1)),
        ev(20, "a", answer(1, Answer::Cancelled)),
    ];
    accepts(
        I::CancelSafety,
        all(vec![drops.clone(), vec![survey(1000, &[(9, "oa")])]]),
    );
    refuses(
        I::CancelSafety,
        all(vec![drops.clone(), vec![survey(1050, &[(9, "oa")])]]),
        &[20, 1050],
    );
    leaves_open(I::CancelSafety, drops.clone());
    // One that is under way explains it.
    let again = vec![ev(900, "a", ask(2)), survey(1050, &[(9, "oa")])];
    accepts(I::CancelSafety, all(vec![drops, again]));
    leaves_open(
        I::CancelSafety,
        all(vec![turn("a", 1, 1, [0, 10, 20]), vec![survey(60, &[])]]),
    );
}

fn lead(client: &str, token: u64, begin: u64, end: u64) -> Vec<Event> {
    vec![
        ev(begin, client, What::LeadBegin { token }),
        ev(end, client, What::LeadEnd { token }),
    ]
}

#[test]
fn two_leaders_at_once_are_refused() {
    accepts(
        I::Election,
        all(vec![lead("a", 1, 10, 20), lead("b", 2, 20, 30)]),
    );
    refuses(
        I::Election,
        all(vec![lead("a", 1, 10, 25), lead("b", 2, 20, 30)]),
        &[10, 20, 25, 30],
    );
    let stop = vec![ev(12, "a", What::PauseBegin), ev(40, "a", What::PauseEnd)];
    // It drops its work when it runs again, which takes a moment.
    accepts(
        I::Election,
        all(vec![
            lead("a", 1, 10, 45),
            stop.clone(),
            lead("b", 2, 20, 90),
        ]),
    );
    refuses(
        I::Election,
        all(vec![lead("a", 1, 10, 70), stop, lead("b", 2, 20, 90)]),
        &[10, 20, 70, 90],
    );
    leaves_open(I::Election, turn("a", 1, 1, [0, 10, 20]));
}

#[test]
fn a_term_used_twice_or_going_back_is_refused() {
    refuses(
        I::Election,
        all(vec![lead("a", 1, 10, 20), lead("b", 1, 30, 40)]),
        &[10, 30],
    );
    refuses(
        I::Election,
        all(vec![lead("a", 2, 10, 20), lead("b", 1, 30, 40)]),
        &[10, 30],
    );
}

#[test]
fn a_loss_without_a_reason_is_refused() {
    let loses = vec![
        ev(0, "a", ask(1)),
        ev(10, "a", held(1, 1)),
        ev(160, "a", lost(1, 160)),
    ];
    refuses(I::NoSpuriousLoss, loses.clone(), &[10, 160]);
    let stop = vec![ev(80, "a", What::PauseBegin), ev(150, "a", What::PauseEnd)];
    accepts(I::NoSpuriousLoss, all(vec![loses.clone(), stop]));
    let starved = vec![ev(150, "a", What::Stall { since: 80 * MS })];
    accepts(I::NoSpuriousLoss, all(vec![loses.clone(), starved]));
    let both = vec![
        ev(110, "a", What::PauseBegin),
        ev(150, "a", What::PauseEnd),
        ev(150, "a", What::Stall { since: 110 * MS }),
    ];
    refuses(I::NoSpuriousLoss, all(vec![loses, both]), &[10, 160]);
}

#[test]
fn a_senseless_history_decides_nothing() {
    for invariant in I::ALL {
        leaves_open(*invariant, vec![ev(0, "a", held(1, 1))]);
        leaves_open(*invariant, vec![ev(0, "a", release(1))]);
    }
}
