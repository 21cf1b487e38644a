//! Bad histories of losses, late releases and leaks, and the good ones next to them.

use palisade_testkit::lab::check::Invariant as I;
use palisade_testkit::lab::history::{Answer, Event, Released, What};

use crate::support::*;

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
    accepts(I::BelievedExclusion, late(Some(100 * MS)));
    refuses(I::BelievedExclusion, late(None), &[10, 120, 141, 150]);
}
