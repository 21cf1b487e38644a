//! The linearizability checker against one that tries every order, on thousands of small histories,
//! and on long ones that are linearizable by construction.

use std::time::Duration;

use palisade_testkit::lab::check::{Outcome, Register, RegisterOp as Op, Timed, linearize};
use palisade_testkit::lab::history::{Kept, Written};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const LIMIT: Duration = Duration::from_secs(20);

/// Tries every order of `left` that respects real time.
fn brute(ops: &[Timed<Op>], left: &[usize], state: &Option<Kept>) -> bool {
    use palisade_testkit::lab::check::Model;
    if left.iter().all(|op| ops[*op].returned.is_none()) {
        return true;
    }
    left.iter().any(|&next| {
        let must_wait = left.iter().any(|&other| {
            other != next
                && ops[other]
                    .returned
                    .is_some_and(|back| back < ops[next].called)
        });
        let rest: Vec<usize> = left.iter().copied().filter(|op| *op != next).collect();
        !must_wait
            && Register
                .step(state, &ops[next].op)
                .iter()
                .any(|after| brute(ops, &rest, after))
    })
}

fn kept() -> impl Strategy<Value = Kept> {
    (1u64..4, 0u8..3).prop_map(|(token, value)| Kept {
        token,
        value: match value {
            0 => String::new(),
            value => value.to_string(),
        },
    })
}

fn op() -> impl Strategy<Value = Op> {
    let written = prop_oneof![
        4 => Just(Written::Accepted),
        2 => (1u64..4).prop_map(|highest| Written::Stale { highest }),
        2 => Just(Written::Unknown),
        1 => Just(Written::NotApplied),
    ];
    prop_oneof![
        (kept(), written).prop_map(|(kept, answer)| Op::Write { kept, answer }),
        prop::option::weighted(0.8, kept()).prop_map(Op::Read),
    ]
}

fn timed() -> impl Strategy<Value = Timed<Op>> {
    (op(), 0u64..20, 0u64..8).prop_map(|(op, called, took)| {
        let open = matches!(
            &op,
            Op::Write {
                answer: Written::Unknown,
                ..
            }
        );
        Timed {
            called,
            returned: (!open).then_some(called + took),
            op,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8000, ..ProptestConfig::default() })]

    #[test]
    fn it_agrees_with_trying_every_order(ops in prop::collection::vec(timed(), 1..7)) {
        let all: Vec<usize> = (0..ops.len()).collect();
        let found = linearize(&Register, &ops, LIMIT);
        prop_assert_ne!(found, Outcome::OutOfTime);
        prop_assert_eq!(found == Outcome::Linearizable, brute(&ops, &all, &None), "{:?}", found);
    }
}

/// A long valid history: each operation takes effect at a point between its call and its answer.
fn long(seed: u64, ops: usize, clients: u64) -> Vec<Timed<Op>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut points: Vec<(u64, u64, Option<u64>)> = Vec::new();
    for client in 0..clients {
        let mut now = client;
        for _ in 0..ops / clients as usize {
            let called = now + rng.random_range(1..20);
            let point = called + rng.random_range(0..20);
            let returned = point + rng.random_range(1..20);
            let open = rng.random_bool(0.01);
            points.push((point, called, (!open).then_some(returned)));
            now = returned;
        }
    }
    points.sort_unstable();
    let mut state: Option<Kept> = None;
    let mut history = Vec::new();
    for (at, (_, called, returned)) in points.into_iter().enumerate() {
        let highest = state.as_ref().map_or(0, |kept| kept.token);
        let op = if returned.is_none() || rng.random_bool(0.5) {
            let token = (at as u64).saturating_sub(rng.random_range(0..4)).max(1);
            let kept = Kept {
                token,
                value: at.to_string(),
            };
            let stale = token < highest;
            let answer = match returned {
                None => Written::Unknown,
                Some(_) if stale => Written::Stale { highest },
                Some(_) => Written::Accepted,
            };
            if !stale {
                state = Some(kept.clone());
            }
            Op::Write { kept, answer }
        } else {
            Op::Read(state.clone())
        };
        history.push(Timed {
            called,
            returned,
            op,
        });
    }
    history
}

#[test]
fn long_true_histories_pass_in_time_and_a_wrong_read_in_them_is_named() {
    for seed in 0..5 {
        let mut ops = long(seed, 2000, 6);
        assert_eq!(
            linearize(&Register, &ops, LIMIT),
            Outcome::Linearizable,
            "seed {seed}"
        );
        let read = ops
            .iter()
            .rposition(|timed| matches!(timed.op, Op::Read(Some(_))))
            .unwrap();
        ops[read].op = Op::Read(Some(Kept {
            token: 1,
            value: "never written".into(),
        }));
        assert_eq!(
            linearize(&Register, &ops, LIMIT),
            Outcome::Not(read),
            "seed {seed}"
        );
    }
}

#[test]
fn a_limit_is_a_limit() {
    let ops = long(1, 200, 4);
    assert_eq!(
        linearize(&Register, &ops, Duration::ZERO),
        Outcome::OutOfTime
    );
}
