//! `fence check`.

use serde_json::{Value, json};

use crate::contract;
use crate::support::*;

#[track_caller]
fn check(store: &Store, args: &str) -> Ran {
    store.soon(&format!("fence check {args}"))
}

#[test]
fn a_token_is_stale_when_a_newer_one_was_accepted() {
    let store = Store::new();
    check(&store, "x 7")
        .is(0)
        .silent()
        .wrote("current: x has accepted no token yet\n");
    // A check remembers nothing.
    check(&store, "x 5").is(0);
    check(&store, "x 7 --accept")
        .is(0)
        .wrote("accepted: 7 is the newest token of x\n");
    for (args, code, word) in [
        ("x 6", 1, "stale: x has accepted 7"),
        ("x 6 --accept", 1, "stale: x has accepted 7"),
        ("x 7", 0, "current"),
        ("x 7 --accept", 0, "accepted"),
        ("x 8", 0, "current"),
        ("x 9223372036854775807 --accept", 0, "accepted"),
        ("x 9223372036854775806", 1, "stale"),
        ("y 1", 0, "current"),
        (
            &format!("x 1 --url {}?namespace=other", store.url()),
            0,
            "current",
        ),
    ] {
        let text = check(&store, args).is(code).silent().out();
        assert!(text.starts_with(word), "{args}: {text}");
    }
}

#[test]
fn the_answer_as_json() {
    let store = Store::new();
    for (args, code, highest, accepted) in [
        ("x 7", 0, Value::Null, false),
        ("x 7 --accept", 0, json!("7"), true),
        ("x 9", 0, json!("7"), false),
        ("x 6 --accept", 1, json!("7"), false),
    ] {
        let answer = check(&store, &format!("{args} --json"))
            .is(code)
            .json(contract::FENCE);
        assert_eq!(
            answer["verdict"],
            if code == 1 { "stale" } else { "current" }
        );
        assert_eq!(
            (&answer["highest"], &answer["accepted"]),
            (&highest, &accepted.into())
        );
    }
}

#[test]
fn the_tokens_of_run_are_compared_across_holders() {
    let store = Store::new();
    let bin = env!("CARGO_BIN_EXE_palisade");
    let script = format!("echo $PALISADE_TOKEN; {bin} fence check x $PALISADE_TOKEN --accept");
    let old = finish(store.run("x", &[], &script)).out();
    let old = format!("x {}", old.lines().next().unwrap());
    check(&store, &old).is(0);
    finish(store.run("x", &[], &script)).is(0);
    check(&store, &old).is(1);
    // The lines are not affected.
    std::fs::remove_dir_all(store.path("store/lines")).unwrap();
    store.assert_empty();
    check(&store, &old).is(1);
}

#[test]
fn concurrent_accepts_leave_the_highest() {
    let store = Store::new();
    let accept = |token| Running::start(store.palisade(&format!("fence check x {token} --accept")));
    let all: Vec<_> = (1..=20).rev().map(accept).collect();
    for running in all {
        assert!(matches!(running.code(), Some(0 | 1)));
    }
    check(&store, "x 19").is(1);
    check(&store, "x 20").is(0);
}

#[test]
fn what_can_not_be_checked_is_refused() {
    let store = Store::new();
    let long = "/".repeat(100);
    let unknown = format!("{}?tll=1s", store.url());
    for (args, expected, word) in [
        (&["x", "1", "--url", "memory:"][..], 77, "keeps no fence"),
        (&["x", "1", "--url", "bananas:"], 78, "scheme"),
        (&["x", "1", "--url", &unknown], 78, "ttl"),
        (&["x", "-1"], 2, "-1"),
        (&["x", "1.5"], 2, "whole number"),
        (&["x", "+1"], 2, "whole number"),
        (&["x", "0x1"], 2, "whole number"),
        (&["x", ""], 2, "whole number"),
        (&["x", "0"], 2, "above 0"),
        (&["x", "9223372036854775808"], 2, "whole number"),
        (&["x", "18446744073709551616"], 2, "whole number"),
        (&["", "1"], 2, "empty"),
        (&[&long, "1"], 2, "too long"),
        (&["x"], 2, "TOKEN"),
    ] {
        store
            .soon(&[&["fence", "check"], args].concat())
            .is(expected)
            .says(word)
            .wrote("");
        store
            .soon(&[&["--json", "fence", "check"], args].concat())
            .is(expected)
            .error();
    }
    // A damaged fence never counts as absent.
    check(&store, "x 5 --accept").is(0);
    std::fs::write(store.path("store/fences/palisade/x.fence"), "garbage").unwrap();
    for args in ["x 9", "x 9 --accept"] {
        check(&store, args).is(70);
    }
}
