//! What a server that was stopped takes away when it continues is its own doing, and nothing else
//! is.

use std::sync::Arc;

use palisade::Capability;
use palisade_testkit::engine::{Outage, Outages, Site};
use palisade_testkit::lab::check::{Invariant as I, Params, Verdict};
use palisade_testkit::lab::faults::{Cell, Fault, Workload, cell};
use palisade_testkit::lab::history::{Event, History, Released, What};

use crate::support::*;

/// How long a resumed server is excused after the outage has ended.
const AFTERMATH: u64 = 4000;

fn fault(name: &str, [begin, heal, end]: [u64; 3]) -> Vec<Event> {
    let fault = || name.to_owned();
    vec![
        ev(begin, "harness", What::FaultBegin { fault: fault() }),
        ev(heal, "harness", What::FaultHeal { fault: fault() }),
        ev(end, "harness", What::FaultEnd { fault: fault() }),
    ]
}

/// A server that is stopped, continued and ready again.
fn stop(times: [u64; 3]) -> Vec<Event> {
    fault("engine-stop", times)
}

/// A hold from 10 on whose release at `until` gets this answer.
fn believed(until: u64, answer: Released) -> Vec<Event> {
    let mut turn = turn("a", 1, [0, 10, until]);
    turn[3].what = released(1, answer);
    turn
}

/// A hold from 10 on that is reported lost at 145.
fn ends(reason: &str) -> Vec<Event> {
    let mut turn = turn("a", 1, [0, 10, 145]);
    turn.truncate(2);
    turn.push(ev(144, "a", valid(1)));
    turn.push(ev(145, "a", lost_as(reason, 1, 145)));
    turn
}

fn check(invariant: I, parts: &[Vec<Event>]) -> Verdict {
    let params = Params {
        takes_away: true,
        ..params()
    };
    invariant.check(&History::of(parts.concat()), &params)
}

/// Whether I2 and I9 accept that another is granted the lock at `granted`, while `hold` is believed
/// in.
#[track_caller]
fn excused(outage: &[Event], hold: Vec<Event>, granted: u64) -> bool {
    let next = turn("b", 2, [5, granted, granted + 20]);
    let parts = [outage.to_vec(), hold, next];
    let verdicts = [I::BelievedExclusion, I::EarlyLoss].map(|one| check(one, &parts).is_ok());
    assert_eq!(verdicts[0], verdicts[1], "I2 and I9 differ");
    verdicts[0]
}

#[test]
fn a_hold_that_a_resumed_server_takes_is_excused() {
    let lost = || believed(145, Released::Lost);
    // Before the server is ready, and after.
    assert!(excused(&stop([15, 110, 140]), lost(), 120));
    assert!(excused(&stop([15, 110, 119]), lost(), 120));
    assert!(excused(&stop([15, 110, 119]), ends("taken"), 120));
    let parts = [stop([15, 110, 119]), lost(), turn("b", 2, [5, 120, 140])].concat();
    let (_, strict) = I::BelievedExclusion.judge(parts);
    assert!(!strict.is_ok(), "an engine that does no such thing");
}

#[test]
fn a_hold_that_was_not_taken_is_not_excused() {
    let stop = stop([15, 110, 119]);
    assert!(!excused(&stop, believed(145, Released::Done), 120));
    assert!(!excused(&stop, ends("expired"), 120));
    assert!(!excused(&stop, ends("evicted"), 120));
}

#[test]
fn a_grant_at_another_time_is_not_excused() {
    let lost = || believed(145, Released::Lost);
    assert!(!excused(&[], lost(), 120), "nothing was stopped");
    assert!(!excused(&stop([15, 121, 130]), lost(), 120), "during it");
    let end = 119 + AFTERMATH;
    let long = || believed(end + 30, Released::Lost);
    assert!(excused(&stop([15, 110, 119]), long(), end - 1));
    assert!(!excused(&stop([15, 110, 119]), long(), end));
}

#[test]
fn another_outage_is_no_excuse() {
    let lost = || believed(145, Released::Lost);
    let kill = fault("engine-kill", [15, 110, 119]);
    assert!(!excused(&kill, lost(), 120));
    // Two thirds of the lease of 100 ms.
    assert!(excused(&stop([43, 110, 119]), lost(), 120));
    assert!(!excused(&stop([44, 110, 119]), lost(), 120));
    // A history that was recorded before resumptions were.
    let mut old = stop([15, 110, 119]);
    old.remove(1);
    assert!(!excused(&old, lost(), 120));
}

#[test]
fn an_overlap_behind_an_excused_hold_is_found() {
    let parts = [
        stop([15, 110, 119]),
        believed(200, Released::Lost),
        turn("b", 2, [5, 120, 180]),
        turn("c", 3, [5, 150, 160]),
    ];
    let verdict = check(I::BelievedExclusion, &parts);
    let [one] = verdict.violations() else {
        panic!("{verdict}");
    };
    assert!(one.text.contains("b's hold") && one.text.contains("c's hold"));
}

#[test]
fn permits_that_a_resumed_server_takes_are_excused() {
    let held = |answer| {
        let mut part = part("a", 1, 3, [0, 10, 145]);
        part[3].what = released(1, answer);
        part
    };
    let judged = |times, answer| {
        let next = part("b", 2, 2, [5, 120, 140]);
        check(I::Capacity, &[stop(times), held(answer), next]).is_ok()
    };
    assert!(judged([15, 110, 119], Released::Lost));
    assert!(!judged([15, 110, 119], Released::Done));
    assert!(!judged([15, 121, 130], Released::Lost), "during the stop");
}

#[test]
fn a_leader_whose_term_a_resumed_server_ends_is_excused() {
    let judged = |times, answer| {
        let leads = [lead("a", 1, 11, 144), lead("b", 2, 121, 180)].concat();
        let holds = [believed(145, answer), turn("b", 2, [5, 120, 190])].concat();
        check(I::Election, &[stop(times), holds, leads]).is_ok()
    };
    assert!(judged([15, 110, 119], Released::Lost));
    assert!(!judged([15, 110, 119], Released::Done));
    assert!(!judged([15, 125, 130], Released::Lost), "during the stop");
    let third = [turn("c", 3, [5, 150, 170]), lead("c", 3, 151, 169)].concat();
    let leads = [lead("a", 1, 11, 199), lead("b", 2, 121, 180)].concat();
    let holds = [
        believed(200, Released::Lost),
        turn("b", 2, [5, 120, 190]),
        third,
    ];
    let verdict = check(I::Election, &[stop([15, 110, 119]), holds.concat(), leads]);
    assert_eq!(verdict.violations().len(), 1, "terms 2 and 3: {verdict}");
}

struct AnyOutage;

impl Outages for AnyOutage {
    fn can(&self, _: Outage) -> bool {
        true
    }

    fn begin(&self, _: Outage) -> Result<(), String> {
        Ok(())
    }

    fn end(&self, _: Outage) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn only_a_fence_keeps_updates_when_a_resumed_server_takes_holds() {
    let keeps = |takes_away, workload, outage| {
        let site = Site {
            processes: true,
            takes_away,
            outages: Some(Arc::new(AnyOutage)),
            ..Site::new("any:")
        };
        let cell = cell(&site, &Capability::FULL, workload, Fault::Engine(outage));
        matches!(cell, Cell::Checked(all) if all.contains(&I::NoLostUpdate))
    };
    assert!(!keeps(true, Workload::UnfencedCounter, Outage::Stop));
    assert!(keeps(true, Workload::UnfencedCounter, Outage::Kill));
    assert!(keeps(false, Workload::UnfencedCounter, Outage::Stop));
    assert!(keeps(true, Workload::FencedCounter, Outage::Stop));
}
