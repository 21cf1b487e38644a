//! `fence check`.

use std::process::Output;

use crate::contract;
use crate::support::*;

fn check(store: &Store, args: &[&str]) -> Output {
    finish_soon(store.palisade(&[&["fence", "check"][..], args].concat()))
}

fn said(output: &Output) -> (Option<i32>, String) {
    assert_eq!(stderr(output), "");
    (output.status.code(), stdout(output))
}

#[test]
fn a_token_is_stale_when_a_newer_one_was_accepted() {
    let store = Store::new();
    let answer = said(&check(&store, &["x", "7"]));
    assert_eq!(
        answer,
        (Some(0), "current: x has accepted no token yet\n".into())
    );
    // A check remembers nothing.
    assert_eq!(check(&store, &["x", "5"]).status.code(), Some(0));
    let answer = said(&check(&store, &["x", "7", "--accept"]));
    assert_eq!(
        answer,
        (Some(0), "accepted: 7 is the newest token of x\n".into())
    );
    for (token, more, code, word) in [
        ("6", "", 1, "stale: x has accepted 7"),
        ("6", "--accept", 1, "stale: x has accepted 7"),
        ("7", "", 0, "current"),
        ("7", "--accept", 0, "accepted"),
        ("8", "", 0, "current"),
        ("18446744073709551615", "--accept", 0, "accepted"),
        ("18446744073709551614", "", 1, "stale"),
    ] {
        let args: Vec<_> = ["x", token, more]
            .into_iter()
            .filter(|a| !a.is_empty())
            .collect();
        let (got, text) = said(&check(&store, &args));
        assert_eq!(got, Some(code), "{args:?} {text}");
        assert!(text.starts_with(word), "{text}");
    }
    assert_eq!(
        check(&store, &["y", "1"]).status.code(),
        Some(0),
        "another name"
    );
    let other = format!("{}?namespace=other", store.url());
    let output = check(&store, &["x", "1", "--url", &other]);
    assert_eq!(output.status.code(), Some(0), "another namespace");
}

#[test]
fn the_answer_as_json() {
    let store = Store::new();
    let read = |args: &[&str]| {
        let output = check(&store, &[args, &["--json"]].concat());
        let answer = contract::read(&stdout(&output), contract::FENCE);
        let stale = answer["verdict"] == "stale";
        assert_eq!(output.status.code(), Some(i32::from(stale)));
        (answer["highest"].clone(), answer["accepted"].clone(), stale)
    };
    assert_eq!(read(&["x", "7"]), (().into(), false.into(), false));
    assert_eq!(
        read(&["x", "7", "--accept"]),
        ("7".into(), true.into(), false)
    );
    assert_eq!(read(&["x", "9"]), ("7".into(), false.into(), false));
    assert_eq!(
        read(&["x", "6", "--accept"]),
        ("7".into(), false.into(), true)
    );
}

#[test]
fn the_tokens_of_run_are_compared_across_holders() {
    let store = Store::new();
    let bin = env!("CARGO_BIN_EXE_palisade");
    let script = format!("echo $PALISADE_TOKEN; {bin} fence check x $PALISADE_TOKEN --accept");
    let old = stdout(&finish(store.run("x", &[], &script)));
    let old = old.lines().next().unwrap().to_owned();
    assert_eq!(check(&store, &["x", &old]).status.code(), Some(0));
    assert_eq!(code(store.run("x", &[], &script)), Some(0));
    assert_eq!(check(&store, &["x", &old]).status.code(), Some(1));
    // The lines are another matter.
    std::fs::remove_dir_all(store.path("store/lines")).unwrap();
    store.assert_empty();
    assert_eq!(check(&store, &["x", &old]).status.code(), Some(1));
}

#[test]
fn concurrent_accepts_leave_the_highest() {
    let store = Store::new();
    let all: Vec<_> = (1..=20)
        .rev()
        .map(|token| {
            let token = token.to_string();
            Running::start(store.palisade(&["fence", "check", "x", &token, "--accept"]))
        })
        .collect();
    for running in all {
        assert!(matches!(running.code(), Some(0 | 1)));
    }
    assert_eq!(check(&store, &["x", "19"]).status.code(), Some(1));
    assert_eq!(check(&store, &["x", "20"]).status.code(), Some(0));
}

#[test]
fn what_can_not_be_checked_is_refused() {
    let store = Store::new();
    let long = "/".repeat(100);
    let unknown = format!("{}?tll=1s", store.url());
    for (args, expected, word) in [
        (
            &["x", "1", "--url", "memory:"][..],
            77,
            "only file: keeps a fence",
        ),
        (&["x", "1", "--url", "bananas:"], 78, "scheme"),
        (&["x", "1", "--url", &unknown], 78, "ttl"),
        (&["x", "-1"], 2, "-1"),
        (&["x", "1.5"], 2, "whole number"),
        (&["x", ""], 2, "whole number"),
        (&["x", "18446744073709551616"], 2, "whole number"),
        (&["", "1"], 2, "empty"),
        (&[&long, "1"], 2, "too long"),
        (&["x"], 2, "TOKEN"),
    ] {
        let output = check(&store, args);
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
        assert!(stderr(&output).contains(word), "{word:?} in {output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
        let output = check(&store, &[&["--json"][..], args].concat());
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
        contract::read(&stderr(&output), contract::ERROR);
    }
    // A damaged fence is never free.
    assert_eq!(
        check(&store, &["x", "5", "--accept"]).status.code(),
        Some(0)
    );
    std::fs::write(store.path("store/fences/palisade/x.fence"), "garbage").unwrap();
    for args in [&["x", "9"][..], &["x", "9", "--accept"]] {
        let output = check(&store, args);
        assert_eq!(output.status.code(), Some(70), "{output:?}");
    }
}
