//! `ls`, `show` and `evict`.

use std::time::Duration;

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
    let all = |key: &str| {
        lines
            .iter()
            .map(|line| line[key].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(all("name"), ["a/lock", "b", "c"]);
    assert_eq!(all("kind"), ["lock", "permits", "lock"]);
    assert_eq!(lines[1]["capacity"], 5);

    let holder = &lines[0]["holders"][0];
    assert_eq!(holder["pid"], held.process.id());
    assert_eq!(holder["mode"], "exclusive");
    assert!(holder["token"].as_str().unwrap().parse::<u64>().is_ok());
    let since = humantime::parse_rfc3339(holder["since"].as_str().unwrap()).unwrap();
    assert!(
        since.elapsed().unwrap() < Duration::from_secs(60),
        "{since:?}"
    );
    assert!((1..=30_000).contains(&holder["expires_in_ms"].as_u64().unwrap()));
    let waiter = &lines[0]["waiters"][0];
    let of = |claim: &Value, keys: [&str; 2]| keys.map(|key| claim[key].clone());
    assert_eq!(
        of(waiter, ["pid", "position"]),
        [json!(waiting.process.id()), json!(1)]
    );
    assert_eq!(
        of(waiter, ["token", "mode"]),
        [Value::Null, json!("shared")]
    );
    let permits = &lines[1]["holders"][0];
    assert_eq!(
        of(permits, ["weight", "mode"]),
        [json!(2), json!("permits")]
    );

    let shown = store.ran("show a/lock --json").is(0).json(contract::LINE);
    assert_eq!(shown["name"], "a/lock");
    assert_eq!(shown["waiters"][0]["id"], waiter["id"]);
    let prefixed = store.ran("ls a/ --json").json(contract::LINES);
    assert_eq!(prefixed.as_array().unwrap().len(), 1);
}

#[test]
fn the_table_is_plain_when_piped() {
    let store = Store::new();
    store.ran("ls").is(0).wrote("");
    let _held = store.hold("x", &[]);
    let _permits = store.hold("y", &["--permits", "2/5"]);
    let text = store.ran("ls").out();
    assert!(!text.contains('\x1b'), "{text:?}");
    let rows = text.lines().map(|line| line.split_whitespace().collect());
    let rows: Vec<Vec<&str>> = rows.collect();
    assert_eq!(rows[0][..3], ["NAME", "STATE", "MODE"]);
    assert_eq!(rows[1][..3], ["x", "held", "exclusive"]);
    assert_eq!(rows[2][..3], ["y", "held", "2/5"]);
}

#[test]
fn an_absent_name_is_no() {
    let store = Store::new();
    for (args, answer) in [
        ("show x", contract::LINE),
        ("evict x", contract::EVICTED),
        ("evict x --force", contract::EVICTED),
    ] {
        store.ran(args).is(1);
        let answer = store.ran(&format!("{args} --json")).is(1).json(answer);
        assert_eq!(answer["name"], "x");
    }
    let _held = store.hold("x", &[]);
    store
        .ran("evict x --id 00000000000000000000000000000000")
        .is(1);
    assert_eq!(store.lines()[0]["holders"].as_array().unwrap().len(), 1);
}

#[test]
fn looking_makes_no_store() {
    let store = Store::new();
    for (args, expected) in [
        ("ls", 0),
        ("ls --json", 0),
        ("show x", 1),
        ("leader x", 1),
        ("evict x", 1),
        ("doctor", 0),
    ] {
        store.ran(args).is(expected);
    }
    let mut lines = Running::start(store.palisade("ls --watch --json"));
    let mut leader = Running::start(store.palisade("leader x --watch"));
    assert!(leader.line().contains("nobody leads"));
    assert!(!store.path("store").exists());
    // They show what comes later.
    let _held = store.hold("x", &[]);
    assert!(lines.line().contains("\"x\""));
    assert!(leader.line().contains(" leads x"));
}

#[test]
fn what_could_mislead_is_written_out() {
    let store = Store::new();
    let name = "a\u{202e}b\u{200b}c\u{e0041}";
    let _held = store.hold(name, &[]);
    for args in [
        "ls",
        "ls --json",
        "show NAME",
        "show x\u{202e}",
        "leader NAME",
        "leader NAME --json",
        "evict y\u{202e}",
        "run NAME --no-wait -- true",
        "run NAME --no-wait --json -- true",
        "show x \u{202e}",
        "\u{202e}ls",
        "run x --ttl=\u{202e} -- true",
        "ls --url file:/\u{202e}/\u{202e}?x\u{202e}=1",
        "run x -- \u{202e}no-such-command",
    ] {
        let output = store.ran(&args.replace("NAME", name));
        let said = output.out() + &output.err();
        let raw = ['\u{202e}', '\u{200b}', '\u{e0041}'];
        assert!(!said.is_empty() && !said.contains(raw), "{args:?} {said:?}");
    }
    assert_eq!(
        store.lines()[0]["name"],
        name,
        "a program reads it as it is"
    );
}
