//! Bad histories of losses, late releases and leaks, and similar good ones.

use palisade_testkit::lab::check::Invariant as I;
use palisade_testkit::lab::history::{Answer, Event, Released, What};

use crate::support::*;

fn replaced(told: Vec<Event>) -> Vec<Event> {
    let a = vec![ev(0, "a", ask(1)), ev(10, "a", held(1, 1))];
    all(vec![a, turn("b", 2, [5, 120, 150]), told])
}

#[test]
fn a_loss_told_after_the_next_grant_is_refused() {
    I::EarlyLoss.accepts(replaced(vec![ev(105, "a", lost(1, 100))]));
    I::EarlyLoss.refuses(replaced(vec![ev(125, "a", lost(1, 124))]), [10, 120, 125]);
    // A stop does not excuse being valid: the clock runs on.
    let stop = vec![ev(20, "a", What::PauseBegin), ev(140, "a", What::PauseEnd)];
    let valid_again = all(vec![
        stop.clone(),
        vec![ev(141, "a", valid(1)), ev(142, "a", lost(1, 142))],
    ]);
    I::EarlyLoss.refuses(replaced(valid_again), [10, 120, 141]);
    I::EarlyLoss.accepts(replaced(all(vec![stop, vec![ev(141, "a", lost(1, 100))]])));
}

#[test]
fn a_loss_that_is_told_late_or_never_or_taken_back_is_refused() {
    I::EarlyLoss.refuses(replaced(vec![ev(125, "a", lost(1, 100))]), [10, 125]);
    I::EarlyLoss.refuses(replaced(vec![ev(145, "a", release(1))]), [10, 120, 145]);
    let back = vec![ev(101, "a", lost(1, 100)), ev(110, "a", valid(1))];
    I::EarlyLoss.refuses(replaced(back), [10, 101, 110]);
}

#[test]
fn a_late_release_that_claims_success_is_refused() {
    let late = |answer| {
        let told = vec![ev(105, "a", lost(1, 100)), ev(130, "a", release(1))];
        replaced(all(vec![told, vec![ev(131, "a", released(1, answer))]]))
    };
    I::NoForeignRelease.accepts(late(Released::Lost));
    I::NoForeignRelease.refuses(late(Released::Done), [120, 130, 131]);
}

#[test]
fn a_late_release_that_frees_the_next_hold_is_refused() {
    let told = vec![
        ev(105, "a", lost(1, 100)),
        ev(130, "a", release(1)),
        ev(131, "a", released(1, Released::Lost)),
    ];
    let intruder = turn("c", 3, [5, 135, 160]);
    I::NoForeignRelease.refuses(replaced(all(vec![told.clone(), intruder])), [120, 130, 135]);
    let after = turn("c", 3, [5, 151, 160]);
    I::NoForeignRelease.accepts(replaced(all(vec![told, after])));
}

#[test]
fn a_hold_that_ends_early_after_a_late_release_is_refused() {
    let ends = |reason| {
        let next = vec![
            ev(5, "b", ask(1)),
            ev(120, "b", held(1, 2)),
            ev(140, "b", lost_as(reason, 2, 140)),
        ];
        let late = vec![
            ev(0, "a", ask(1)),
            ev(10, "a", held(1, 1)),
            ev(105, "a", lost(1, 100)),
            ev(130, "a", release(1)),
            ev(131, "a", released(1, Released::Lost)),
        ];
        [next, late]
    };
    I::NoForeignRelease.refuses(ends("taken"), [120, 130, 140]);
    I::NoForeignRelease.refuses(ends("evicted"), [120, 130, 140]);
    I::NoForeignRelease.accepts(ends("expired"));
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
    I::HonestUnknown.accepts([fails.clone(), vec![survey(1100, &[(9, "oa")])]]);
    I::HonestUnknown.refuses(
        [fails.clone(), vec![survey(1150, &[(9, "oa")])]],
        [20, 1150],
    );
    I::HonestUnknown.leaves_open(fails);
    let mut done = turn("a", 1, [0, 10, 20]);
    done.push(ev(0, "a", start("oa")));
    done.push(survey(1100, &[(1, "oa")]));
    I::HonestUnknown.refuses(done, [20, 1100]);
}

#[test]
fn one_claim_granted_twice_is_refused() {
    let mut events = all(vec![turn("a", 1, [0, 10, 20]), vec![survey(60, &[])]]);
    let again = Answer::Held {
        token: 7,
        claim: claim(1),
    };
    events.extend([ev(30, "a", ask(2)), ev(40, "a", answer(2, again))]);
    I::HonestUnknown.refuses(events, [10, 40]);
}

#[test]
fn what_a_dropped_acquire_leaves_behind_is_refused() {
    let drops = vec![
        ev(0, "a", start("oa")),
        ev(5, "a", ask(1)),
        ev(20, "a", answer(1, Answer::Cancelled)),
    ];
    I::CancelSafety.accepts([drops.clone(), vec![survey(1000, &[(9, "oa")])]]);
    I::CancelSafety.refuses(
        [drops.clone(), vec![survey(1050, &[(9, "oa")])]],
        [20, 1050],
    );
    I::CancelSafety.leaves_open(drops.clone());
    // An acquire in progress explains it.
    let again = vec![ev(900, "a", ask(2)), survey(1050, &[(9, "oa")])];
    I::CancelSafety.accepts([drops, again]);
    I::CancelSafety.leaves_open([turn("a", 1, [0, 10, 20]), vec![survey(60, &[])]]);
}

#[test]
fn two_leaders_at_once_are_refused() {
    I::Election.accepts([lead("a", 1, 10, 20), lead("b", 2, 20, 30)]);
    I::Election.refuses(
        [lead("a", 1, 10, 25), lead("b", 2, 20, 30)],
        [10, 20, 25, 30],
    );
    let stop = vec![ev(12, "a", What::PauseBegin), ev(40, "a", What::PauseEnd)];
    // It drops its work when it runs again, which takes a moment.
    I::Election.accepts([lead("a", 1, 10, 45), stop.clone(), lead("b", 2, 20, 90)]);
    I::Election.refuses(
        [lead("a", 1, 10, 70), stop, lead("b", 2, 20, 90)],
        [10, 20, 70, 90],
    );
    I::Election.leaves_open(turn("a", 1, [0, 10, 20]));
}

#[test]
fn a_term_used_twice_or_going_back_is_refused() {
    I::Election.refuses([lead("a", 1, 10, 20), lead("b", 1, 30, 40)], [10, 30]);
    I::Election.refuses([lead("a", 2, 10, 20), lead("b", 1, 30, 40)], [10, 30]);
}

#[test]
fn a_loss_without_a_reason_is_refused() {
    let loses = vec![
        ev(0, "a", ask(1)),
        ev(10, "a", held(1, 1)),
        ev(160, "a", lost(1, 160)),
    ];
    I::NoSpuriousLoss.refuses(loses.clone(), [10, 160]);
    let stop = vec![ev(80, "a", What::PauseBegin), ev(150, "a", What::PauseEnd)];
    I::NoSpuriousLoss.accepts([loses.clone(), stop]);
    let starved = vec![ev(150, "a", What::Stall { since: 80 * MS })];
    I::NoSpuriousLoss.accepts([loses.clone(), starved]);
    let both = vec![
        ev(110, "a", What::PauseBegin),
        ev(150, "a", What::PauseEnd),
        ev(150, "a", What::Stall { since: 110 * MS }),
    ];
    I::NoSpuriousLoss.refuses([loses, both], [10, 160]);
}

#[test]
fn a_loss_is_excused_by_a_slow_request_and_not_by_a_late_one() {
    let late = |asked| {
        vec![
            ev(asked, "a", ask(1)),
            ev(130, "a", held(1, 1)),
            ev(160, "a", lost(1, 160)),
        ]
    };
    // It entered late: nobody could have renewed it before. A waiter could.
    I::NoSpuriousLoss.accepts(late(60));
    I::NoSpuriousLoss.refuses([late(60), vec![survey(100, &[(1, "oa")])]], [130, 160]);
    // The time before the request is no excuse.
    I::NoSpuriousLoss.refuses(late(129), [130, 160]);
    // A stall inside the request does not count twice, one after it does.
    let starved = |at, since| vec![ev(at, "a", What::Stall { since: since * MS })];
    I::NoSpuriousLoss.refuses([late(90), starved(125, 100)], [130, 160]);
    I::NoSpuriousLoss.accepts([late(90), starved(145, 100)]);
}

#[test]
fn a_senseless_history_decides_nothing() {
    for invariant in I::ALL {
        (*invariant).leaves_open(vec![ev(0, "a", held(1, 1))]);
        (*invariant).leaves_open(vec![ev(0, "a", release(1))]);
    }
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
    I::BelievedExclusion.accepts(replaced(all(vec![stop.clone(), unknown(141)])));
    let spoke = vec![ev(141, "a", valid(1))];
    I::BelievedExclusion.refuses(
        replaced(all(vec![stop, spoke, unknown(142)])),
        [10, 120, 142, 150],
    );
    I::BelievedExclusion.refuses(replaced(unknown(141)), [10, 120, 141, 150]);
}

#[test]
fn a_release_called_after_a_stop_is_no_belief() {
    let stop = vec![ev(20, "a", What::PauseBegin), ev(140, "a", What::PauseEnd)];
    let late = |valid_until| {
        let release = What::ReleaseCalled {
            token: 1,
            claim: claim(1),
            valid_until,
        };
        replaced(all(vec![stop.clone(), vec![ev(141, "a", release)]]))
    };
    I::BelievedExclusion.accepts(late(Some(100 * MS)));
    I::BelievedExclusion.refuses(late(None), [10, 120, 141, 150]);
}
