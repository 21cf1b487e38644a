//! Waiting for a lock, and not getting it.

use std::time::{Duration, Instant};

use crate::support::*;

#[test]
fn the_second_waits_for_the_first() {
    let store = Store::new();
    let mut first = store.hold("x", &[]);
    let mut second = Running::start(store.run("x", &[], "echo mine"));
    until("the second waits", || store.waiters() == 1);
    assert!(second.process.try_wait().unwrap().is_none());
    first.close_stdin();
    assert_eq!(second.line(), "mine");
    assert_eq!((first.code(), second.code()), (Some(0), Some(0)));
    store.assert_empty();
}

#[test]
fn a_lock_that_is_not_free_in_time_is_75() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    for args in ["--no-wait", "--wait 0s", "--wait 300ms"] {
        let with = |more: &str| store.soon(&format!("run x {args} {more} -- echo no"));
        let began = Instant::now();
        with("").is(75).says("palisade: x ").wrote("");
        let waited = began.elapsed() >= Duration::from_millis(300);
        assert_eq!(waited, args.contains("300ms"), "{args:?}");
        with("-E 9").is(9);
        with("-E 0").is(0);
        assert_eq!(with("--json").error()["code"], "not_acquired");
        with("-q").is(75).silent();
        assert_eq!(store.waiters(), 0);
    }
}

#[test]
fn a_waiter_says_who_holds_the_lock() {
    let store = Store::new();
    let held = store.hold("x", &[]);
    let owner = store.lines()[0]["holders"][0].clone();
    let text = |key: &str| owner[key].as_str().unwrap().to_owned();
    let pid = format!("pid {}", held.process.id());

    let mut waiter = Running::start(store.run("x", &[], "true"));
    let line = waiter.stderr_line();
    for part in [
        "palisade: waiting for x",
        &text("owner"),
        &text("host"),
        "since ",
        &pid,
    ] {
        assert!(line.contains(part), "{part} in {line}");
    }
    drop(waiter);

    let mut waiter = Running::start(store.run("x", &["--json"], "true"));
    let event: serde_json::Value = serde_json::from_str(&waiter.stderr_line()).unwrap();
    assert_eq!(event["event"], "waiting");
    assert_eq!(event["holders"][0]["token"], owner["token"]);
    assert_eq!(event["message"], serde_json::Value::Null);
}

/// A changed number of permits may be waited for very long.
#[test]
fn a_waiter_says_that_the_line_has_another_number_of_permits() {
    let store = Store::new();
    let held = store.hold("x", &["--permits", "1/3"]);
    let pid = format!("pid {}", held.process.id());
    let why = "in use for 3 permits, not for 4 permits";
    let mut waiter = Running::start(store.run("x", &["--permits", "1/4"], "true"));
    let line = waiter.stderr_line();
    for part in ["palisade: waiting for x", &pid, why] {
        assert!(line.contains(part), "{part} in {line}");
    }
    drop(waiter);

    let mut waiter = Running::start(store.run("x", &["--permits", "1/4", "--json"], "true"));
    let event: serde_json::Value = serde_json::from_str(&waiter.stderr_line()).unwrap();
    assert_eq!(event["event"], "waiting");
    assert!(event["message"].as_str().unwrap().contains(why), "{event}");
    assert_eq!(event["holders"].as_array().unwrap().len(), 1);
    // When the line is empty, it is granted.
    drop(held);
    let event: serde_json::Value = serde_json::from_str(&waiter.stderr_line()).unwrap();
    assert_eq!(event["event"], "acquired");
    assert_eq!(waiter.code(), Some(0));
}

#[test]
fn readers_share_permits_are_counted_and_their_number_must_agree() {
    let store = Store::new();
    for (held, asked, expected) in [
        ("--shared", "--shared --no-wait", 0),
        ("--shared", "--no-wait", 75),
        ("", "--shared --no-wait", 75),
        ("--permits 2/3", "--permits 1/3 --no-wait", 0),
        ("--permits 2/3", "--permits 2/3 --no-wait", 75),
        ("--permits 2/3", "--permits 1/4 --no-wait", 77),
        ("--permits 2/3", "--shared --wait 200ms", 77),
    ] {
        let holder: Vec<_> = held.split_whitespace().collect();
        let _holder = store.hold("x", &holder);
        let output = store.soon(&format!("run x {asked} --json -- true"));
        output.is(expected);
        if expected == 77 {
            assert_eq!(
                output.error()["code"],
                "capacity_mismatch",
                "{held} {asked}"
            );
        }
    }
}

#[test]
fn a_waiter_that_is_evicted_did_not_acquire() {
    for verb in ["run", "elect"] {
        let store = Store::new();
        let _held = store.hold("x", &[]);
        let waiter = Running::start(store.palisade(&format!("{verb} x --json -- echo no")));
        until("it waits", || store.waiters() == 1);
        let id = store.lines()[0]["waiters"][0]["id"].clone();
        store
            .ran(&["evict", "x", "--id", id.as_str().unwrap()])
            .is(0);
        let output = waiter.end();
        assert_eq!(output.is(75).wrote("").error()["code"], "not_acquired");
        assert_eq!(store.lines()[0]["holders"].as_array().unwrap().len(), 1);
    }
}
