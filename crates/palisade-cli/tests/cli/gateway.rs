//! The command through a gateway, with no other way to the engine.

use serde_json::json;

use crate::contract;
use crate::support::*;
use crate::terminal::Session;

#[test]
fn a_lock_is_the_same_through_the_gateway_and_past_it() {
    let store = Store::behind_a_gateway();
    let direct = store.direct_url();
    let held = store.hold("a/lock", &["--ttl", "20s"]);
    assert_eq!(store.code("run a/lock --no-wait -- true"), Some(75));
    let past = ["--url", &direct, "run", "a/lock", "--no-wait", "--", "true"];
    assert_eq!(store.code(&past), Some(75));
    let _shared = store.hold("b", &["--shared"]);
    let _permits = store.hold("c", &["--permits", "2/5"]);
    let waiting = Running::start(store.run("a/lock", &[], "echo mine $PALISADE_TOKEN"));
    until("it waits", || store.waiters() == 1);

    let lines = store.lines();
    let shown = store.ran(&["--url", &direct, "ls", "--json"]);
    let shown = shown.is(0).json(contract::LINES);
    for (line, shown) in lines.iter().zip(shown.as_array().unwrap()) {
        for key in ["name", "kind", "capacity"] {
            assert_eq!(line[key], shown[key]);
        }
        for key in [
            "id", "owner", "host", "pid", "mode", "weight", "token", "since",
        ] {
            assert_eq!(line["holders"][0][key], shown["holders"][0][key], "{key}");
        }
    }
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[0]["holders"][0]["pid"], held.process.id());
    let shown = store.ran("show a/lock --json").is(0).json(contract::LINE);
    assert_eq!(shown["waiters"][0]["pid"], waiting.process.id());
    let prefixed = store.ran("ls a/ --json").json(contract::LINES);
    assert_eq!(prefixed.as_array().unwrap().len(), 1);

    // The holder ends itself when an operator asks, and the next has its turn.
    let evicted = store
        .ran("evict a/lock --json")
        .is(0)
        .json(contract::EVICTED);
    assert_eq!(evicted["evicted"][0]["pid"], held.process.id());
    assert_eq!(held.code(), Some(76));
    assert!(waiting.end().is(0).out().starts_with("mine "));
    store.ran("evict a/lock").is(1);
    store.ran("evict c --force").is(0);
}

#[test]
fn an_election_is_seen_through_the_gateway() {
    let store = Store::behind_a_gateway();
    store.ran("leader chair").is(1);
    let elect = [
        "elect",
        "chair",
        "--value",
        "one",
        "--",
        "sh",
        "-c",
        "echo leads; cat",
    ];
    let mut leader = Running::start(store.palisade(&elect));
    assert_eq!(leader.line(), "leads");
    let seen = store
        .ran("leader chair --json")
        .is(0)
        .json(contract::LEADER);
    assert_eq!(seen["leader"]["value"], "one");
    assert_eq!(seen["leader"]["pid"], leader.process.id());
    leader.close_stdin();
    assert_eq!(leader.code(), Some(0));
    store.ran("leader chair").is(1);
    store.assert_empty();
}

#[test]
fn what_is_not_passed_through_is_refused() {
    let store = Store::behind_a_gateway();
    let health = store.ran("doctor --json").is(0).json(contract::HEALTH);
    assert_eq!(health["class"], "B");
    let able = &health["capability"];
    let passed = ["shared", "fair", "waiters_visible", "resize", "detached"];
    let passed = passed.map(|key| able[key].clone());
    assert_eq!(
        passed,
        [true, true, true, false, false].map(|yes| json!(yes))
    );
    let _permits = store.hold("p", &["--permits", "1/2"]);
    store.ran("resize p 3").is(77).says("capacity");
    store.ran("fence check x 1").is(77).says("fence");
    let era = format!("{}?era=1", store.url());
    store.ran(&["--url", &era, "ls"]).is(78).says("era");
}

#[test]
fn opposite_orders_are_a_deadlock_through_the_gateway() {
    let store = Store::behind_a_gateway();
    store.ran("deadlocks").is(0).wrote("");
    let script = |outer: &str, inner: &str| {
        let script = format!(
            "echo ready; read go; \"$PALISADE\" run --ttl 6s {inner} -- echo both; echo ended-$?"
        );
        let mut command = store.run(outer, &["--ttl", "6s"], &script);
        command.env("PALISADE", env!("CARGO_BIN_EXE_palisade"));
        let mut running = Running::start(command);
        assert_eq!(running.line(), "ready");
        running
    };
    let mut scripts = [script("a", "b"), script("b", "a")];
    scripts.iter_mut().for_each(|script| script.write("go\n"));
    until("both wait", || store.waiters() == 2);
    let shown = store.ran("deadlocks --json");
    let shown = shown.is(1).json(contract::DEADLOCKS);
    assert_eq!(
        (&shown[0]["circle"], &shown[0]["likely"]),
        (&json!(4), &json!(true))
    );
    for script in &mut scripts {
        script.stderr.as_mut().unwrap().see("likely deadlock: ");
    }
    store.ran("evict a --force").is(0);
}

#[test]
fn top_shows_what_is_held_through_the_gateway() {
    let store = Store::behind_a_gateway();
    let _held = store.hold("held-for-all-to-see", &[]);
    let mut session = Session::start(&store, "stty rows 24 cols 100; $PALISADE top; echo code-$?");
    let mut seen = String::new();
    until("it is on the screen", || {
        seen.push_str(&String::from_utf8_lossy(&session.more()));
        seen.contains("held-for-all-to-see")
    });
    session.press("q");
    until("it has ended", || {
        seen.push_str(&String::from_utf8_lossy(&session.more()));
        seen.contains("code-0")
    });
}

#[test]
fn a_gateway_that_is_not_there_is_unreachable() {
    let store = Store::new();
    let gone = format!("http+unix:{}", store.path("gone.sock").display());
    let refused = store.soon(&["--url", &gone, "run", "x", "--no-wait", "--", "true"]);
    refused.is(69).says("no such socket");
    let shown = store.soon(&["--url", "http://user:hunter2@127.0.0.1:1", "ls"]);
    shown.is(78).says("token_file=");
    assert!(!shown.err().contains("hunter2"), "{shown:?}");
}
