//! The guardian: a command never works without its lock, also when palisade is stopped or killed.
//!
//! `PALISADE_TEST_FULL=1` runs the rounds that count more often.

use std::time::{Duration, Instant};

use crate::support::*;

/// A command that ignores TERM, as do a background child, one in its own session, and one whose
/// parent is gone as well. It prints all pids, its own first. Each process writes to its own file
/// as long as it runs.
const FAMILY: &str = r#"
    trap '' TERM HUP
    work='trap "" TERM HUP; while :; do echo >>$WORK/$$; sleep 0.01; done'
    sh -c "$work" & background=$!
    setsid sh -c "$work" & session=$!
    orphan=$(setsid sh -c "setsid sh -c '$work' >/dev/null & echo \$!")
    echo $$ $background $session $orphan
    while :; do echo >>$WORK/$$; sleep 0.01; done"#;

/// Starts [`FAMILY`] under the lock `x`, and returns the pids when all of them write.
fn start_family(store: &Store, args: &[&str]) -> (Running, Vec<String>) {
    let work = store.path("work");
    let _ = std::fs::remove_dir_all(&work);
    std::fs::create_dir(&work).unwrap();
    let mut command = store.run("x", args, FAMILY);
    command.env("WORK", &work);
    let mut running = Running::start(command);
    let pids: Vec<_> = running.line().split(' ').map(str::to_owned).collect();
    assert_eq!(pids.len(), 4, "{pids:?}");
    until("all of them work", || {
        pids.iter().all(|pid| work.join(pid).exists())
    });
    (running, pids)
}

/// Starts the next holder, whose command prints which of `pids` exist when it gets the lock.
fn start_next(store: &Store, pids: &[String]) -> Running {
    let script = format!(
        "for pid in {}; do [ ! -e /proc/$pid ] || echo alive $pid; done; echo granted",
        pids.join(" ")
    );
    let next = Running::start(store.run("x", &["-q", "--ttl", "1s"], &script));
    until("the next waits", || store.waiters() == 1);
    next
}

/// The guardian of a palisade: its only child.
fn guardian(running: &Running) -> u32 {
    let children = children(running.process.id());
    assert_eq!(children.len(), 1);
    children[0].parse().unwrap()
}

#[test]
fn a_palisade_that_is_stopped_past_its_ttl_has_ended_all_before_the_next_is_granted() {
    let store = Store::new();
    for round in 0..rounds() {
        let (running, pids) = start_family(&store, &["--ttl", "1s"]);
        let mut next = start_next(&store, &pids);
        running.signal("STOP");
        assert_eq!(next.line(), "granted", "round {round}");
        running.signal("CONT");
        let output = running.end();
        output.is(76);
        output.says("palisade: lost x");
        assert_eq!(next.code(), Some(0));
    }
}

#[test]
fn a_palisade_that_is_killed_has_ended_all_before_the_next_is_granted() {
    let store = Store::new();
    for round in 0..rounds() {
        let (running, pids) = start_family(&store, &["--ttl", "60s"]);
        let mut next = start_next(&store, &pids);
        let killed = Instant::now();
        running.signal("KILL");
        assert_eq!(next.line(), "granted", "round {round}");
        assert!(killed.elapsed() < Duration::from_secs(15), "not by the ttl");
        assert_eq!(next.code(), Some(0));
        drop(running);
    }
    store.assert_empty();
}

#[test]
fn a_guardian_that_is_killed_is_replaced_by_palisade() {
    let store = Store::new();
    let (running, pids) = start_family(&store, &["--json"]);
    let mut next = start_next(&store, &pids);
    kill(guardian(&running), "KILL");
    assert_eq!(next.line(), "granted");
    let output = running.end();
    output.is(70);
    assert_eq!(output.error()["code"], "internal");
    assert_eq!(next.code(), Some(0));
}

#[test]
fn a_guardian_that_is_stopped_is_replaced_when_the_lock_is_lost() {
    let store = Store::new();
    let (running, pids) = start_family(&store, &["--ttl", "2s"]);
    kill(guardian(&running), "STOP");
    assert_eq!(store.code("evict x"), Some(0));
    assert!(!pids.iter().any(|pid| runs(pid)));
    assert_eq!(running.code(), Some(76));
}

/// If both are killed, the kernel kills the command.
#[test]
fn the_command_ends_when_its_guardian_is_killed_while_palisade_is_stopped() {
    let store = Store::new();
    let mut running = Running::start(store.run("x", &[], "trap '' TERM; echo $$; cat"));
    let child = running.line();
    running.signal("STOP");
    kill(guardian(&running), "KILL");
    until("the kernel kills it", || !runs(&child));
    running.signal("CONT");
    assert_eq!(running.code(), Some(70));
    store.assert_empty();
}

/// A process that the command leaves behind by a double fork becomes the guardian's child, which
/// reaps it.
#[test]
fn nothing_is_left_after_a_normal_end() {
    let store = Store::new();
    let script = "(setsid sleep 0 &); echo $$; cat; exit 3";
    let mut running = Running::start(store.run("x", &[], script));
    let child = running.line();
    let guardian = guardian(&running).to_string();
    let comm = std::fs::read_to_string(format!("/proc/{guardian}/comm")).unwrap();
    assert_eq!(comm, "guardian\n", "pkill palisade does not mean it");
    running.close_stdin();
    assert_eq!(running.code(), Some(3));
    for pid in [child, guardian] {
        let there = std::path::Path::new("/proc").join(&pid).exists();
        assert!(!there, "{pid} is left, perhaps as a zombie");
    }
}

#[test]
fn a_waiting_palisade_takes_its_guardian_along() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    for signal in ["TERM", "KILL"] {
        let waiter = Running::start(store.run("x", &[], "echo no"));
        until("it waits", || store.waiters() == 1);
        let guardian = guardian(&waiter).to_string();
        waiter.signal(signal);
        assert!(waiter.end().stdout.is_empty());
        until("the guardian ends", || !runs(&guardian));
        until("its place is left", || store.waiters() == 0);
    }
}

/// The guardian must not keep files open that palisade was started with.
#[test]
fn the_guardian_keeps_no_file_that_palisade_was_given() {
    let store = Store::new();
    let mut running = Running::start(store.run("x", &[], "echo ready; cat"));
    running.line();
    let files = format!("/proc/{}/fd", guardian(&running));
    let given = std::fs::read_link(format!("/proc/{}/fd/1", running.process.id())).unwrap();
    until("it lets go of them", || {
        let open = std::fs::read_dir(&files).unwrap().flatten();
        let mut open = open.filter_map(|file| std::fs::read_link(file.path()).ok());
        !open.any(|file| file == given)
    });
}

/// Children that the shell had before it became palisade are not the command's.
#[test]
fn what_ran_before_palisade_is_left_alone() {
    let store = Store::new();
    let palisade = env!("CARGO_BIN_EXE_palisade");
    let script = format!(
        "sleep 60 >/dev/null 2>&1 & echo $!; \
         exec {palisade} run x --ttl 1s -- sh -c 'echo ready; sleep 60'"
    );
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", &script])
        .env("PALISADE_URL", store.url());
    let mut running = Running::start(command);
    let stranger = running.line();
    assert_eq!(running.line(), "ready");
    let children = children(running.process.id());
    let guardian = children.iter().find(|pid| **pid != stranger);
    kill(guardian.unwrap().parse().unwrap(), "KILL");
    assert_eq!(running.code(), Some(70));
    assert!(runs(&stranger));
    kill(stranger.parse().unwrap(), "KILL");
}
