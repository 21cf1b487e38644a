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
    for args in [&["--no-wait"][..], &["--wait", "0s"], &["--wait", "300ms"]] {
        let began = Instant::now();
        let output = finish_soon(store.run("x", args, "echo no"));
        assert_eq!(output.status.code(), Some(75), "{args:?} {output:?}");
        assert!(output.stdout.is_empty());
        assert!(stderr(&output).contains("palisade: x "), "{output:?}");
        let waits = args.contains(&"300ms");
        assert_eq!(
            began.elapsed() >= Duration::from_millis(300),
            waits,
            "{args:?}"
        );

        let with = |more: &[&str]| finish_soon(store.run("x", &[args, more].concat(), "true"));
        assert_eq!(with(&["-E", "9"]).status.code(), Some(9));
        assert_eq!(with(&["-E", "0"]).status.code(), Some(0));
        assert_eq!(json_error(&with(&["--json"]))["code"], "not_acquired");
        assert_eq!(stderr(&with(&["-q"])), "");
        assert_eq!(store.waiters(), 0);
    }
}

#[test]
fn a_waiter_says_who_holds_the_lock() {
    let store = Store::new();
    let held = store.hold("x", &[]);
    let owner = store.lines()[0]["holders"][0].clone();
    let text = |key: &str| owner[key].as_str().unwrap().to_owned();

    let mut waiter = Running::start(store.run("x", &[], "true"));
    let line = waiter.stderr_line();
    for part in [
        "palisade: waiting for x",
        &text("owner"),
        &text("host"),
        "since ",
    ] {
        assert!(line.contains(part), "{part} in {line}");
    }
    assert!(
        line.contains(&format!("pid {}", held.process.id())),
        "{line}"
    );
    drop(waiter);

    let mut waiter = Running::start(store.run("x", &["--json"], "true"));
    let event: serde_json::Value = serde_json::from_str(&waiter.stderr_line()).unwrap();
    assert_eq!(event["event"], "waiting");
    assert_eq!(event["holders"][0]["token"], owner["token"]);
    drop(waiter);

    let quiet = finish(store.run("x", &["-q", "--wait", "300ms"], "true"));
    assert_eq!(
        (quiet.status.code(), stderr(&quiet)),
        (Some(75), String::new())
    );
}

#[test]
fn readers_share_and_writers_do_not() {
    let store = Store::new();
    let reader = store.hold("x", &["--shared"]);
    assert_eq!(
        code(store.run("x", &["--shared", "--no-wait"], "true")),
        Some(0)
    );
    assert_eq!(code(store.run("x", &["--no-wait"], "true")), Some(75));
    drop(reader);
    let _writer = store.hold("x", &[]);
    assert_eq!(
        code(store.run("x", &["--shared", "--no-wait"], "true")),
        Some(75)
    );
}

#[test]
fn permits_are_counted_and_their_number_must_agree() {
    let store = Store::new();
    let _two = store.hold("x", &["--permits", "2/3"]);
    assert_eq!(
        code(store.run("x", &["--permits", "1/3", "--no-wait"], "true")),
        Some(0)
    );
    assert_eq!(
        code(store.run("x", &["--permits", "2/3", "--no-wait"], "true")),
        Some(75)
    );
    for other in [
        &["--permits", "1/4", "--no-wait"][..],
        &["--shared", "--wait", "200ms"],
    ] {
        let args = [other, &["--json"]].concat();
        let output = finish_soon(store.run("x", &args, "true"));
        assert_eq!(output.status.code(), Some(77), "{output:?}");
        assert_eq!(json_error(&output)["code"], "capacity_mismatch");
    }
}

#[test]
fn a_waiter_that_is_evicted_did_not_acquire() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    let waiter = Running::start(store.run("x", &["--json"], "echo no"));
    until("it waits", || store.waiters() == 1);
    let id = store.lines()[0]["waiters"][0]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(code(store.palisade(&["evict", "x", "--id", &id])), Some(0));
    let output = waiter.end();
    assert_eq!(output.status.code(), Some(75), "{output:?}");
    assert!(output.stdout.is_empty());
    assert_eq!(store.lines()[0]["holders"].as_array().unwrap().len(), 1);
}
