//! Signals: passed on to the child's whole group, and obeyed while waiting.

use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::support::*;

#[test]
fn a_signal_reaches_the_whole_group_and_the_lock_is_released() {
    for (signal, expected) in [("INT", 130), ("TERM", 143), ("HUP", 129), ("QUIT", 131)] {
        let store = Store::new();
        // A shell's background job ignores INT and QUIT; env puts them back.
        let sleep = "env --default-signal=INT,QUIT sleep 60";
        let script = format!("ulimit -c 0; {sleep} & echo $!; echo $$; exec {sleep}");
        let mut running = Running::start(store.run("x", &[], &script));
        let (grandchild, child) = (running.line(), running.line());
        until("both sleep", || {
            comm(&grandchild) == "sleep" && comm(&child) == "sleep"
        });
        running.signal(signal);
        assert_eq!(running.code(), Some(expected), "{signal}");
        until("the grandchild ends", || !runs(&grandchild));
        store.assert_empty();
    }
}

fn comm(pid: &str) -> String {
    let comm = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    comm.unwrap_or_default().trim().to_owned()
}

#[test]
fn a_child_that_handles_the_signal_decides_the_code() {
    let store = Store::new();
    let script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.02; done";
    let running = store.start("x", &[], script);
    running.signal("TERM");
    assert_eq!(running.code(), Some(9));
    store.assert_empty();
}

#[test]
fn the_lock_is_held_while_the_child_takes_its_time_and_a_second_signal_is_passed_on_too() {
    let store = Store::new();
    let script = "trap 'echo one; trap \"exit 20\" TERM' TERM; echo ready; \
                  while :; do sleep 0.02; done";
    let mut running = store.start("x", &[], script);
    running.signal("TERM");
    assert_eq!(running.line(), "one");
    assert_eq!(code(store.run("x", &["--no-wait"], "true")), Some(75));
    running.signal("TERM");
    assert_eq!(running.code(), Some(20));
    store.assert_empty();
}

#[test]
fn a_signal_while_waiting_leaves_the_line() {
    for (signal, expected) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let store = Store::new();
        let held = store.hold("x", &[]);
        let waiter = Running::start(store.run("x", &[], "echo no"));
        until("it waits", || store.waiters() == 1);
        waiter.signal(signal);
        let output = waiter.end();
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
        assert!(output.stdout.is_empty());
        assert_eq!(store.waiters(), 0);
        assert_eq!(held.code(), Some(0));
        store.assert_empty();
    }
}

#[test]
fn a_signal_that_was_ignored_stays_ignored() {
    let store = Store::new();
    let mut command = Command::new("env");
    command.args([
        "--ignore-signal=HUP",
        env!("CARGO_BIN_EXE_palisade"),
        "run",
        "x",
        "--url",
    ]);
    command.args([
        &store.url(),
        "--",
        "sh",
        "-c",
        "kill -HUP $$; echo ready; cat",
    ]);
    command.process_group(0);
    let mut running = Running::start(command);
    assert_eq!(running.line(), "ready", "the child ignores it too");
    running.signal("HUP");
    assert_eq!(running.code(), Some(0));
}

#[test]
fn signals_with_a_meaning_of_their_own_reach_the_command() {
    for signal in ["USR1", "USR2", "WINCH"] {
        let store = Store::new();
        let script =
            format!("trap 'echo got; exit 7' {signal}; echo ready; while :; do sleep 0.02; done");
        let mut running = store.start("x", &[], &script);
        running.signal(signal);
        assert_eq!(running.line(), "got", "{signal}");
        assert_eq!(running.code(), Some(7), "{signal}");
        store.assert_empty();
    }
}

#[test]
fn while_waiting_they_do_what_they_do_by_default() {
    let store = Store::new();
    let held = store.hold("x", &[]);
    for (signal, expected) in [("USR1", 138), ("USR2", 140)] {
        let waiter = Running::start(store.run("x", &[], "echo no"));
        until("it waits", || store.waiters() == 1);
        waiter.signal("WINCH");
        waiter.signal(signal);
        assert_eq!(waiter.code(), Some(expected));
        assert_eq!(store.waiters(), 0);
    }
    // Nor do they cut --at-least short.
    assert_eq!(held.code(), Some(0));
    let began = std::time::Instant::now();
    let mut running = Running::start(store.run("x", &["--at-least", "2s"], "echo $$"));
    let child = running.line();
    until("the command has ended", || !runs(&child));
    running.signal("USR1");
    assert_eq!(running.code(), Some(0));
    assert!(began.elapsed() >= std::time::Duration::from_secs(2));
}
