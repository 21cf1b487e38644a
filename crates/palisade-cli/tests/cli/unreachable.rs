//! An engine that does not answer. The embedded one is made to hang by holding all of its locks.

use std::time::{Duration, Instant};

use crate::support::*;

/// The store's URL, giving up on a request soon.
fn hasty(store: &Store) -> String {
    format!("{}?timeout=200ms&connect_timeout=200ms", store.url())
}

#[test]
fn without_waiting_it_is_69_at_once() {
    let store = Store::new();
    let gate = store.hang();
    let url = hasty(&store);
    for args in ["--no-wait", "--wait 0s"] {
        let output = store.soon(&format!("run x {args} --json --url {url} -- echo no"));
        assert_eq!(output.is(69).wrote("").error()["code"], "unreachable");
    }
    drop(gate);
    store.assert_empty();
}

#[test]
fn it_is_retried_while_patience_lasts_and_until_a_signal() {
    let store = Store::new();
    let gate = store.hang();
    let url = hasty(&store);
    let began = Instant::now();
    store
        .ran(&format!("run x --wait 600ms --url {url} -- echo no"))
        .is(69);
    assert!(began.elapsed() >= Duration::from_millis(600));

    let start = || {
        let mut waiting =
            Running::start(store.palisade(&format!("run x --url {url} -- echo mine")));
        assert!(waiting.stderr_line().contains("waiting for the engine"));
        waiting
    };
    let ended = start();
    ended.signal("TERM");
    let began = Instant::now();
    assert_eq!(ended.code(), Some(143));
    assert!(began.elapsed() < Duration::from_secs(15));

    let mut waiting = start();
    drop(gate);
    assert_eq!(waiting.line(), "mine");
    assert_eq!(waiting.code(), Some(0));
    store.assert_empty();
}

#[test]
fn a_child_whose_lock_can_not_be_renewed_is_asked_to_end_and_then_killed() {
    let store = Store::new();
    let script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.02; done";
    let mut running = store.start("x", &["--ttl", "3s", "--json"], script);
    let gate = store.hang();
    assert_eq!(running.line(), "asked");
    let asked = Instant::now();
    let output = running.end();
    drop(gate);
    output
        .is(76)
        .says("\"expired\"")
        .says("not renewed in time (");
    assert_eq!(output.error()["code"], "lost");
    assert!(
        asked.elapsed() > Duration::from_millis(100),
        "it had time to end"
    );
    until("the rest is gone", || store.lines().is_empty());
}

#[test]
fn a_child_is_killed_before_the_deadline() {
    let store = Store::new();
    let script = "trap '' TERM; echo $$; while :; do sleep 0.02; done";
    let mut running = Running::start(store.run("x", &["--ttl", "5s"], script));
    let child = running.line();
    let gate = store.hang();
    let hung = Instant::now();
    until("it is killed", || !runs(&child));
    // Nothing was renewed since, and the last tenth of the ttl is the margin.
    let took = hung.elapsed();
    assert!(took < Duration::from_millis(4500), "{took:?}");
    drop(gate);
    assert_eq!(running.code(), Some(76));
}

/// A stopped command, too: it is resumed so that it receives the TERM.
#[test]
fn a_child_that_ends_when_asked_has_lost_its_lock_all_the_same() {
    for rest in ["while :; do sleep 0.02; done", "kill -STOP $$; sleep 60"] {
        let store = Store::new();
        let script = format!("trap 'echo asked; exit 0' TERM; echo ready; {rest}");
        let mut running = store.start("x", &["--ttl", "3s"], &script);
        let gate = store.hang();
        assert_eq!(running.line(), "asked");
        drop(gate);
        assert_eq!(running.code(), Some(76), "{rest}");
    }
}

#[test]
fn a_loss_says_why_also_when_the_command_did_not_take_all_of_its_time() {
    let store = Store::new();
    let script = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.02; done";
    let running = store.start("x", &["--ttl", "6s"], script);
    let gate = store.hang();
    running.end().is(76).says("not renewed in time (");
    drop(gate);
}

#[test]
fn a_child_is_left_alone_when_the_engine_comes_back_in_time() {
    let store = Store::new();
    let mut running = store.hold("x", &["--ttl", "2s"]);
    for _ in 0..3 {
        let gate = store.hang();
        let hung = Instant::now();
        // It is asked 1.4 s after the last renewal at the earliest, and one is due 0.7 s after it.
        until("a renewal is missed", || {
            hung.elapsed() > Duration::from_millis(500)
        });
        drop(gate);
        assert_eq!(store.lines().len(), 1);
    }
    running.close_stdin();
    assert_eq!(running.code(), Some(0));
}

#[test]
fn a_release_that_fails_does_not_change_the_childs_code() {
    let store = Store::new();
    let url = hasty(&store);
    let mut running = store.start("x", &["--url", &url], "echo ready; cat >/dev/null; exit 6");
    let gate = store.hang();
    running.close_stdin();
    running.end().is(6).says("not released");
    drop(gate);
    until("the engine notices that its holder is gone", || {
        store.lines().is_empty()
    });
}
