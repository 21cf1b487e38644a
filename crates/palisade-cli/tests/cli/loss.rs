//! Loss: the child is ended before anyone else can be granted, and the code is 76.

use std::time::{Duration, Instant};

use crate::contract;
use crate::support::*;

/// A child that ignores TERM.
const STUBBORN: &str = "trap '' TERM; echo $$; while :; do sleep 0.02; done";

#[test]
fn an_evicted_child_is_asked_to_end() {
    let store = Store::new();
    let script = "trap 'echo asked; exit 0' TERM; echo ready; while :; do sleep 0.02; done";
    let running = store.start("x", &["--json"], script);
    let done = store.ran("evict x --json").is(0).json(contract::EVICTED);
    assert_eq!(
        (&done["name"], &done["forced"]),
        (&"x".into(), &false.into())
    );
    assert_eq!(done["evicted"].as_array().unwrap().len(), 1);
    store.assert_empty();
    let output = running.end();
    assert_eq!(output.is(76).wrote("asked\n").error()["code"], "lost");
}

#[test]
fn an_evicted_child_that_does_not_end_is_killed_before_its_lease_is_over() {
    let store = Store::new();
    let began = Instant::now();
    let mut running = Running::start(store.run("x", &["--ttl", "5s"], STUBBORN));
    let child = running.line();
    let evicted = Instant::now();
    store.ran("evict x").is(0);
    assert!(!runs(&child), "the eviction is over only when the child is");
    assert!(
        began.elapsed() > Duration::from_millis(500),
        "it was asked first"
    );
    let took = evicted.elapsed();
    assert!(took < Duration::from_millis(5500), "{took:?}");
    assert_eq!(running.code(), Some(76));
}

#[test]
fn a_lock_that_is_taken_away_kills_the_whole_group_at_once() {
    let store = Store::new();
    let script = format!("sh -c \"{}\" & {STUBBORN}", STUBBORN.replace('$', "\\$"));
    let mut running = Running::start(store.run("x", &["--ttl", "120s"], &script));
    let pids = [running.line(), running.line()];
    assert!(pids.iter().all(|pid| runs(pid)));
    let began = Instant::now();
    let said = store.soon("evict x --force").out();
    assert!(said.contains("removed at once from x"), "{said}");
    assert_eq!(running.code(), Some(76));
    // Its next renewal, which would notice it too, comes after 40 s.
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "not by a renewal"
    );
    assert!(!pids.iter().any(|pid| runs(pid)));
    store.assert_empty();
}

#[test]
fn a_child_that_ended_while_its_lock_was_lost_is_76_all_the_same() {
    let store = Store::new();
    let script = "echo ready; cat >/dev/null; echo done";
    let mut running = store.start("x", &["--ttl", "1s"], script);
    running.signal("STOP");
    running.close_stdin();
    assert_eq!(running.line(), "done");
    until("its lease ends", || store.lines().is_empty());
    running.signal("CONT");
    assert_eq!(running.code(), Some(76));
}

#[test]
fn a_lock_is_kept_beyond_its_ttl() {
    let store = Store::new();
    let mut running = store.hold("x", &["--ttl", "1s"]);
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(1600) {
        store.ran("run x --no-wait -- true").is(75);
    }
    running.close_stdin();
    assert_eq!(running.code(), Some(0));
}
