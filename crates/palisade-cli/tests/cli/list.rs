//! `ls`, `show` and `evict`.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::contract;
use crate::support::*;

#[test]
fn ls_shows_holders_and_waiters() {
    let store = Store::new();
    let held = store.hold("a/lock", &[]);
    let _permits = store.hold("b", &["--permits", "2/5"]);
    let _shared = store.hold("c", &["--shared"]);
    let waiting = Running::start(store.run("a/lock", &["--shared"], "true"));
    until("it waits", || store.waiters() == 1);

    let lines = store.lines();
    let names: Vec<_> = lines.iter().map(|line| line["name"].clone()).collect();
    assert_eq!(names, ["a/lock", "b", "c"]);
    let kinds: Vec<_> = lines.iter().map(|line| line["kind"].clone()).collect();
    assert_eq!(kinds, ["lock", "permits", "lock"]);
    assert_eq!(lines[1]["capacity"], 5);

    let holder = &lines[0]["holders"][0];
    assert_eq!(holder["pid"], held.process.id());
    assert_eq!(holder["mode"], "exclusive");
    assert!(holder["token"].as_str().unwrap().parse::<u64>().is_ok());
    let since: jiff::Timestamp = holder["since"].as_str().unwrap().parse().unwrap();
    let age = jiff::Timestamp::now().as_second() - since.as_second();
    assert!((0..60).contains(&age), "{since}");
    assert!((1..=30_000).contains(&holder["expires_in_ms"].as_u64().unwrap()));
    let waiter = &lines[0]["waiters"][0];
    assert_eq!(
        (&waiter["pid"], &waiter["position"]),
        (&json!(waiting.process.id()), &json!(1))
    );
    assert_eq!(
        (&waiter["token"], &waiter["mode"]),
        (&Value::Null, &json!("shared"))
    );
    let permits = &lines[1]["holders"][0];
    assert_eq!(
        (&permits["weight"], &permits["mode"]),
        (&json!(2), &json!("permits"))
    );

    let output = finish(store.palisade(&["show", "a/lock", "--json"]));
    let shown = contract::read(&stdout(&output), contract::LINE);
    assert_eq!(
        (&shown["name"], output.status.code()),
        (&json!("a/lock"), Some(0))
    );
    assert_eq!(shown["waiters"][0]["id"], waiter["id"]);

    let prefixed = finish(store.palisade(&["ls", "a/", "--json"]));
    let prefixed: Vec<Value> = serde_json::from_slice(&prefixed.stdout).unwrap();
    assert_eq!(prefixed.len(), 1);
}

#[test]
fn the_table_is_plain_when_piped() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    let _permits = store.hold("y", &["--permits", "2/5"]);
    let output = finish(store.palisade(&["ls"]));
    let text = stdout(&output);
    assert!(!text.contains('\x1b'), "{text:?}");
    let rows: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows[0][..3], ["NAME", "STATE", "MODE"]);
    assert_eq!(rows[1][..3], ["x", "held", "exclusive"]);
    assert_eq!(rows[2][..3], ["y", "held", "2/5"]);
}

#[test]
fn an_absent_name_is_no() {
    let store = Store::new();
    for args in [
        &["show", "x"][..],
        &["evict", "x"],
        &["evict", "x", "--force"],
    ] {
        assert_eq!(code(store.palisade(args)), Some(1), "{args:?}");
        let output = finish(store.palisade(&[args, &["--json"]].concat()));
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let expected = match args[0] {
            "show" => contract::LINE,
            _ => contract::EVICTED,
        };
        let answer = contract::read(&stdout(&output), expected);
        assert_eq!(answer["name"], "x");
    }
    let _held = store.hold("x", &[]);
    let args = ["evict", "x", "--id", "00000000000000000000000000000000"];
    assert_eq!(code(store.palisade(&args)), Some(1));
    assert_eq!(store.lines()[0]["holders"].as_array().unwrap().len(), 1);
}

#[test]
fn an_empty_store_is_an_empty_list() {
    let store = Store::new();
    store.assert_empty();
    let output = finish(store.palisade(&["ls"]));
    assert_eq!(
        (output.status.code(), stdout(&output)),
        (Some(0), String::new())
    );
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    for args in [&["ls"][..], &["ls", "--json"], &["show", "x"], &["--help"]] {
        let mut head = Command::new("true").stdin(Stdio::piped()).spawn().unwrap();
        let closed = head.stdin.take().unwrap();
        head.wait().unwrap();
        let mut command = store.palisade(args);
        let output = command
            .stdout(closed)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn output_that_can_not_be_written_is_a_failure() {
    let store = Store::new();
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut command = store.palisade(&["ls", "--json"]);
    let output = command
        .stdout(full)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(74), "{output:?}");
}

#[test]
fn looking_makes_no_store() {
    let store = Store::new();
    for (args, expected) in [
        (&["ls"][..], 0),
        (&["ls", "--json"], 0),
        (&["show", "x"], 1),
        (&["leader", "x"], 1),
        (&["evict", "x"], 1),
        (&["doctor"], 0),
    ] {
        assert_eq!(code(store.palisade(args)), Some(expected), "{args:?}");
    }
    let mut watches: Vec<_> = [
        &["ls", "--watch", "--json"][..],
        &["leader", "x", "--watch"],
    ]
    .map(|args| Running::start(store.palisade(args)))
    .into();
    assert!(watches[1].line().contains("nobody leads"));
    assert!(!store.path("store").exists());
    // They see what comes.
    let _held = store.hold("x", &[]);
    assert!(watches[0].line().contains("\"x\""));
    assert!(watches[1].line().contains(" leads x"));
}

#[test]
fn what_could_mislead_is_written_out() {
    let store = Store::new();
    let name = "a\u{202e}b\u{200b}c\u{e0041}";
    let _held = store.hold(name, &[]);
    for args in [
        &["ls"][..],
        &["ls", "--json"],
        &["show", name],
        &["show", "x\u{202e}"],
        &["leader", name],
        &["leader", name, "--json"],
        &["evict", "y\u{202e}"],
        &["run", name, "--no-wait", "--", "true"],
        &["run", name, "--no-wait", "--json", "--", "true"],
        &["show", "x", "\u{202e}"],
        &["\u{202e}ls"],
        &["run", "x", "--ttl=\u{202e}", "--", "true"],
        &["ls", "--url", "file:/\u{202e}/\u{202e}?x\u{202e}=1"],
        &["run", "x", "--", "\u{202e}no-such-command"],
    ] {
        let output = finish(store.palisade(args));
        let said = stdout(&output) + &stderr(&output);
        let raw = ['\u{202e}', '\u{200b}', '\u{e0041}'];
        assert!(!said.is_empty() && !said.contains(raw), "{args:?} {said:?}");
    }
    let lines = store.lines();
    assert_eq!(lines[0]["name"], name, "a program reads it as it is");
}
