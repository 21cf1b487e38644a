//! Signals: passed on to the child's whole group, and handled while waiting.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::*;

#[test]
fn a_signal_reaches_the_whole_group_and_the_lock_is_released() {
    let comm = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/comm"));
    let sleeps = |pid: &str| comm(pid).is_ok_and(|comm| comm == "sleep\n");
    for (signal, expected) in [("INT", 130), ("TERM", 143), ("HUP", 129), ("QUIT", 131)] {
        let store = Store::new();
        // A shell's background job ignores INT and QUIT; env puts them back.
        let sleep = "env --default-signal=INT,QUIT sleep 60";
        let script = format!("ulimit -c 0; {sleep} & echo $!; echo $$; exec {sleep}");
        let mut running = Running::start(store.run("x", &[], &script));
        let (grandchild, child) = (running.line(), running.line());
        until("both sleep", || sleeps(&grandchild) && sleeps(&child));
        running.signal(signal);
        assert_eq!(running.code(), Some(expected), "{signal}");
        until("the grandchild ends", || !runs(&grandchild));
        store.assert_empty();
    }
}

#[test]
fn a_child_that_handles_a_signal_decides_the_code() {
    for signal in ["TERM", "USR1", "USR2", "WINCH"] {
        let store = Store::new();
        let trap = format!("trap 'echo got; exit 7' {signal}");
        let script = format!("{trap}; echo ready; while :; do sleep 0.02; done");
        let mut running = store.start("x", &[], &script);
        running.signal(signal);
        assert_eq!(running.line(), "got", "{signal}");
        assert_eq!(running.code(), Some(7), "{signal}");
        store.assert_empty();
    }
}

#[test]
fn the_lock_is_held_while_the_child_takes_its_time_and_a_second_signal_is_passed_on_too() {
    let store = Store::new();
    let script = "trap 'echo one; trap \"exit 20\" TERM' TERM; echo ready; \
                  while :; do sleep 0.02; done";
    let mut running = store.start("x", &[], script);
    running.signal("TERM");
    assert_eq!(running.line(), "one");
    store.ran("run x --no-wait -- true").is(75);
    running.signal("TERM");
    assert_eq!(running.code(), Some(20));
    store.assert_empty();
}

#[test]
fn a_signal_while_waiting_leaves_the_line() {
    let store = Store::new();
    let held = store.hold("x", &[]);
    for (signal, expected) in [
        ("INT", 130),
        ("TERM", 143),
        ("HUP", 129),
        ("USR1", 138),
        ("USR2", 140),
    ] {
        let waiter = Running::start(store.run("x", &[], "echo no"));
        until("it waits", || store.waiters() == 1);
        waiter.signal("WINCH");
        waiter.signal(signal);
        waiter.end().is(expected).wrote("");
        assert_eq!(store.waiters(), 0);
    }
    assert_eq!(held.code(), Some(0));
    store.assert_empty();
}

#[test]
fn a_signal_for_the_command_does_not_cut_at_least_short() {
    let store = Store::new();
    let began = Instant::now();
    let mut running = Running::start(store.run("x", &["--at-least", "2s"], "echo $$"));
    let child = running.line();
    until("the command has ended", || !runs(&child));
    running.signal("USR1");
    assert_eq!(running.code(), Some(0));
    assert!(began.elapsed() >= Duration::from_secs(2));
}

#[test]
fn a_signal_that_was_ignored_stays_ignored() {
    let store = Store::new();
    let palisade = store.run("x", &[], "kill -HUP $$; echo ready; cat");
    let mut command = Command::new("env");
    command
        .arg("--ignore-signal=HUP")
        .arg(palisade.get_program());
    command
        .args(palisade.get_args())
        .env("PALISADE_URL", store.url());
    command.process_group(0);
    let mut running = Running::start(command);
    assert_eq!(running.line(), "ready", "the child ignores it too");
    running.signal("HUP");
    assert_eq!(running.code(), Some(0));
}
