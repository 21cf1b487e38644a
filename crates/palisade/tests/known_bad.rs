//! Proves that the tests of the core see: each known-bad variant of `core/known_bad.rs` must make
//! named tests fail, and without a variant the same tests must pass.
//!
//! This binary holds the tests of the core and runs itself again, one process for each test and
//! variant. Run with `RUSTFLAGS="--cfg palisade_known_bad" cargo test -p palisade --test known_bad`.
#![cfg(palisade_known_bad)]
#![allow(clippy::unwrap_used)]

#[path = "core/deadline.rs"]
mod deadline;
#[path = "core/incarnation.rs"]
mod incarnation;
#[path = "core/keeping.rs"]
mod keeping;
#[path = "core/support.rs"]
mod support;

use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Which variant, and the tests of which each must catch it.
const VARIANTS: [(u8, &str, &[&str]); 10] = [
    (
        1,
        "leave removes whoever holds",
        &[
            "incarnation::a_late_leave_leaves_the_next_holder_alone",
            "incarnation::a_late_release_leaves_the_next_hold_alone",
        ],
    ),
    (
        2,
        "leave compares the key, not the incarnation",
        &["incarnation::a_late_leave_leaves_a_later_incarnation_of_the_same_claim_alone"],
    ),
    (
        3,
        "renew without owner check",
        &["incarnation::a_late_renewal_renews_neither_the_next_holder_nor_a_later_incarnation"],
    ),
    (
        4,
        "grant taken without a look at our own lease",
        &["keeping::a_grant_whose_answer_took_longer_than_the_ttl_is_not_held"],
    ),
    (
        5,
        "deadline counted from the reply",
        &[
            "deadline::the_deadline_counts_from_before_the_request",
            "deadline::the_deadline_of_a_renewal_counts_from_before_the_request",
        ],
    ),
    (
        6,
        "wall clock for the deadline",
        &["a_step_of_the_wall_clock_changes_nothing"],
    ),
    (
        7,
        "lost fires at twice the ttl",
        &["keeping::a_hung_renewal_is_told_before_anyone_else_is_granted"],
    ),
    (
        8,
        "renewal survives release",
        &["keeping::no_renewal_outlives_its_release"],
    ),
    (
        9,
        "renewal stops after one error",
        &["keeping::one_failed_renewal_is_no_loss"],
    ),
    (
        10,
        "no renewal after an outage",
        &["deadline::renewal_comes_back_after_the_engine_was_away_for_most_of_the_ttl"],
    ),
];

#[tokio::test]
async fn a_step_of_the_wall_clock_changes_nothing() {
    let (_engine, client) = support::Faulty::client(Duration::from_secs(5)).await;
    let hold = client.mutex("x").lock().await.unwrap();
    palisade::command::step_wall_clock(Duration::from_secs(3600));
    assert!(hold.is_valid());
    hold.release().await.unwrap();
}

#[test]
fn each_variant_is_caught_and_none_fails_without_one() {
    let start = Instant::now();
    let mut runs = Vec::new();
    for (number, what, tests) in VARIANTS {
        runs.extend(tests.iter().map(|test| (Some(number), what, *test)));
        runs.extend(tests.iter().map(|test| (None, what, *test)));
    }
    let queue = Mutex::new(runs.into_iter());
    let (caught, wrong) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    // Most of the time is spent waiting for leases, but too many at once would be late.
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while let Some((variant, what, test)) = { queue.lock().unwrap().next() } {
                    match (variant, passes(test, variant)) {
                        (Some(number), false) => caught.lock().unwrap().push((number, what, test)),
                        (None, true) => {}
                        (Some(_), true) => {
                            wrong.lock().unwrap().push((what, "not caught by", test))
                        }
                        (None, false) => wrong.lock().unwrap().push(("none", "fails", test)),
                    }
                }
            });
        }
    });
    let (mut caught, wrong) = (caught.into_inner().unwrap(), wrong.into_inner().unwrap());
    caught.sort();
    println!("\n    {:<44} caught by test", "known-bad variant");
    for (number, what, test) in caught {
        println!("{number:>2}  {what:<44} {test}");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    println!("all {} caught in {:?}", VARIANTS.len(), start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(120));
}

/// Runs one test in a process of its own. A test that does not exist is no answer.
fn passes(test: &str, variant: Option<u8>) -> bool {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--test-threads=1"]);
    child.env_remove("PALISADE_KNOWN_BAD");
    if let Some(number) = variant {
        child.env("PALISADE_KNOWN_BAD", number.to_string());
    }
    let output = child.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("running 1 test\n"), "no test {test}: {text}");
    output.status.success()
}
