//! `admit` and `Line` against the simple model of lines, over random lines and random operations.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use palisade::BootTime;
use palisade::engine::{
    Admission, Amended, Ask, ClaimId, Line, READERS, Seat, Standing, admit, capacity,
};
use palisade_testkit::model::{self, Bench, Entry};
use proptest::prelude::*;

/// `PROPTEST_CASES` raises the number for a longer search.
fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    let asked = std::env::var_os("PROPTEST_CASES").is_some();
    ProptestConfig {
        cases: if asked { default.cases } else { cases },
        failure_persistence: None,
        ..default
    }
}

/// A claim that fits a line of `capacity`.
fn ask(capacity: u32) -> impl Strategy<Value = Ask> {
    let heaviest = if capacity == READERS { 1 } else { capacity };
    prop_oneof![
        1 => Just(Ask::Whole),
        3 => (1..=heaviest).prop_map(move |weight| Ask::Part { weight, capacity }),
    ]
}

fn asks() -> impl Strategy<Value = Vec<Ask>> {
    prop_oneof![4 => 1u32..=6, 1 => Just(READERS)]
        .prop_flat_map(|capacity| prop::collection::vec(ask(capacity), 0..12))
}

fn standings(asks: &[Ask]) -> Vec<Standing> {
    let ids = 1u128..;
    ids.zip(asks)
        .map(|(id, ask)| Standing {
            id: ClaimId(id),
            ask: *ask,
        })
        .collect()
}

fn admitted(asks: &[Ask]) -> Vec<Admission> {
    let line = standings(asks);
    let capacity = capacity(asks.iter().copied());
    let admit = |me: &Standing| admit(line.iter().copied(), me.id, capacity);
    line.iter().map(admit).collect()
}

fn holders(asks: &[Ask]) -> usize {
    admitted(asks)
        .iter()
        .filter(|a| **a == Admission::Held)
        .count()
}

proptest! {
    #![proptest_config(config(2000))]

    #[test]
    fn those_hold_who_would_sit(asks in asks()) {
        let expected = model::holders(&asks);
        for (index, admission) in admitted(&asks).into_iter().enumerate() {
            prop_assert_eq!(admission == Admission::Held, index < expected, "{} of {:?}", index, asks);
        }
    }

    #[test]
    fn the_first_in_line_holds(asks in asks()) {
        let first = admitted(&asks).first().copied();
        prop_assert!(first.is_none_or(|first| first == Admission::Held));
    }

    #[test]
    fn capacity_is_never_exceeded_and_the_whole_line_is_held_alone(asks in asks()) {
        let capacity = u64::from(capacity(asks.iter().copied()));
        let held = &asks[..holders(&asks)];
        let weight: u64 = held.iter().map(|ask| u64::from(ask.weight_in(capacity as u32))).sum();
        prop_assert!(weight <= capacity);
        prop_assert!(held.len() <= 1 || !held.contains(&Ask::Whole));
    }

    #[test]
    fn who_holds_goes_on_holding(asks in asks(), leaves in any::<prop::sample::Index>()) {
        // A claim enters behind.
        let before = holders(&asks);
        let mut more = asks.clone();
        more.push(Ask::Whole);
        prop_assert!(holders(&more) >= before);
        // A claim leaves, at any position.
        if !asks.is_empty() {
            let at = leaves.index(asks.len());
            let mut fewer = asks.clone();
            // The line keeps its capacity as long as any claim names it.
            fewer.remove(at);
            let kept = before - usize::from(at < before);
            prop_assert!(holders(&fewer) >= kept, "{:?} without {}", asks, at);
        }
    }

    #[test]
    fn behind_names_somebody_ahead(asks in asks()) {
        for (index, admission) in admitted(&asks).into_iter().enumerate() {
            if let Admission::Behind(ClaimId(ahead)) = admission {
                prop_assert!((1..=index as u128).contains(&ahead), "{} behind {}", index + 1, ahead);
            }
        }
    }

    #[test]
    fn a_stranger_is_absent(asks in asks()) {
        let line = standings(&asks);
        let capacity = capacity(asks.iter().copied());
        prop_assert_eq!(admit(line, ClaimId(0), capacity), Admission::Absent);
    }
}

/// An operation on a line. Claims are chosen among all that ever entered, including those that
/// left.
#[derive(Debug, Clone)]
enum Step {
    Enter(Ask, u64),
    Leave(prop::sample::Index),
    LeaveAnother(prop::sample::Index),
    Renew(prop::sample::Index),
    Pass(u64),
    Reweigh(prop::sample::Index, Ask),
}

fn step(capacity: u32) -> impl Strategy<Value = Step> {
    let claim = any::<prop::sample::Index>;
    prop_oneof![
        6 => (ask(capacity), 1..40u64).prop_map(|(ask, ttl)| Step::Enter(ask, ttl)),
        1 => (ask(capacity + 1), 1..40u64).prop_map(|(ask, ttl)| Step::Enter(ask, ttl)),
        3 => claim().prop_map(Step::Leave),
        1 => claim().prop_map(Step::LeaveAnother),
        2 => claim().prop_map(Step::Renew),
        2 => (0..15u64).prop_map(Step::Pass),
        2 => (claim(), ask(capacity)).prop_map(|(claim, ask)| Step::Reweigh(claim, ask)),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    (1u32..=5).prop_flat_map(|capacity| prop::collection::vec(step(capacity), 1..60))
}

fn at(tick: u64) -> BootTime {
    BootTime::from_nanos(tick)
}

/// The line and the model, in parallel.
struct Pair {
    line: Line<()>,
    bench: Bench,
    entered: u32,
    now: u64,
    minted: u64,
}

impl Pair {
    fn settle(&mut self) {
        let minted = &mut self.minted;
        let granted = self.line.settle(at(self.now), || {
            *minted += 1;
            *minted
        });
        // Grants come in the order of the line.
        let counts: Vec<u64> = granted
            .iter()
            .filter_map(|id| self.line.seat(*id))
            .map(|s| s.sequence)
            .collect();
        assert!(counts.is_sorted() && counts.len() == granted.len());
    }

    fn claim(&self, index: &prop::sample::Index) -> u32 {
        index.index(self.entered.max(1) as usize) as u32
    }

    fn sequence(&self, id: u32) -> u64 {
        self.line
            .seat(ClaimId(id.into()))
            .map_or(0, |seat| seat.sequence)
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Enter(ask, ttl) => {
                let id = self.entered;
                self.entered += 1;
                let seat = Seat {
                    id: ClaimId(id.into()),
                    ask: *ask,
                    sequence: 0,
                    expires: at(self.now + ttl),
                    ttl: Duration::from_nanos(*ttl),
                    evicted: false,
                    extra: (),
                };
                let pushed = self.line.push(seat);
                self.settle();
                let entry = self.bench.enter(id, *ask, true, (self.now, *ttl));
                assert_eq!(pushed.is_err(), entry == Entry::Mismatch, "{entry:?}");
            }
            Step::Leave(index) => {
                let id = self.claim(index);
                let sequence = self.sequence(id);
                let removed = self.line.remove(ClaimId(id.into()), sequence);
                self.settle();
                assert_eq!(removed.is_some(), self.bench.leave(id));
            }
            Step::LeaveAnother(index) => {
                // A leave of another incarnation than the holder changes nothing.
                let id = self.claim(index);
                if self.bench.get(id).is_some_and(|sitter| sitter.held) {
                    let sequence = self.sequence(id) + 1;
                    assert_eq!(self.line.remove(ClaimId(id.into()), sequence), None);
                }
            }
            Step::Renew(index) => {
                let id = self.claim(index);
                let now = self.now;
                if let Some(seat) = self.line.seat_mut(ClaimId(id.into())) {
                    seat.expires = at(now) + seat.ttl;
                }
                if let Some(sitter) = self.bench.get_mut(id) {
                    sitter.expires = now + sitter.ttl;
                }
            }
            Step::Pass(ticks) => {
                self.now += ticks;
                self.settle();
                self.bench.expire(self.now);
            }
            Step::Reweigh(index, ask) => {
                let id = self.claim(index);
                let sequence = self.sequence(id);
                let amended = self.line.reweigh(ClaimId(id.into()), sequence, *ask);
                self.settle();
                assert_eq!(amended, self.bench.reweigh(id, *ask), "{id} to {ask:?}");
                if amended == Amended::Done {
                    assert_eq!(self.sequence(id), sequence, "the count stays");
                }
            }
        }
    }

    fn compare(&self) {
        let line: Vec<_> = self
            .line
            .seats
            .iter()
            .map(|s| (s.id.0 as u32, s.ask, s.is_held()))
            .collect();
        let bench: Vec<_> = self.bench.0.iter().map(|s| (s.id, s.ask, s.held)).collect();
        assert_eq!(line, bench);
        let counts: Vec<u64> = self
            .line
            .seats
            .iter()
            .map(|s| s.sequence)
            .filter(|c| *c > 0)
            .collect();
        assert!(
            counts.is_sorted_by(|a, b| a < b),
            "counts rise along the line: {counts:?}"
        );
        for seat in self.line.seats.iter().filter(|seat| !seat.is_held()) {
            let blockers = self.line.blockers(seat.id);
            assert!(!blockers.is_empty(), "a waiter that nobody blocks");
        }
    }
}

proptest! {
    #![proptest_config(config(1000))]

    #[test]
    fn a_line_is_a_bench(steps in steps()) {
        let mut pair = Pair { line: Line::default(), bench: Bench::default(), entered: 0, now: 1, minted: 0 };
        for step in &steps {
            pair.apply(step);
            pair.compare();
        }
    }
}
