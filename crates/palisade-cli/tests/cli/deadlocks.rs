//! Scripts that nest locks in opposite orders, and what `palisade deadlocks` shows of them.

use std::time::{Duration, Instant};

use crate::contract;
use crate::support::*;

/// A script that nests `inner` in `outer`: it prints `ready` when it holds the outer lock, and
/// continues on request.
fn script(store: &Store, outer: &str, inner: &str, options: &str) -> Running {
    let script = format!(
        "echo ready; read go; \"$PALISADE\" run {options} --ttl 6s {inner} -- echo both; \
         echo ended-$?"
    );
    let mut command = store.run(outer, &["--ttl", "6s"], &script);
    command.env("PALISADE", env!("CARGO_BIN_EXE_palisade"));
    let mut running = Running::start(command);
    assert_eq!(running.line(), "ready");
    running
}

/// Two of them, each of which holds its outer lock and waits for the other's.
pub(crate) fn opposite(store: &Store, options: &str) -> [Running; 2] {
    let mut scripts = [
        script(store, "a", "b", options),
        script(store, "b", "a", options),
    ];
    scripts.iter_mut().for_each(|script| script.write("go\n"));
    until("both wait", || store.waiters() == 2);
    scripts
}

#[test]
fn opposite_orders_are_reported_as_likely() {
    let store = Store::new();
    store.ran("deadlocks").is(0).wrote("");
    let mut scripts = opposite(&store, "");
    let began = Instant::now();
    for script in &mut scripts {
        let told = script.stderr.as_mut().unwrap().see("likely deadlock: ");
        assert!(told.contains("waiting for"), "{told}");
        let told = script.stderr_line();
        for part in [
            "run a (",
            "run b (",
            "holds a and runs the next",
            "--nested",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
    }
    // Promised within 5 s; a busy machine has more.
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
    let shown = store.ran("deadlocks");
    let picture = shown.is(1).out();
    for part in [
        "likely deadlock",
        "4 agents",
        "╭─▶ ",
        "holds a",
        "waits for b",
        "╰───╯",
    ] {
        assert!(picture.contains(part), "{part}: {picture}");
    }
    let json = store
        .ran("deadlocks --json")
        .is(1)
        .json(contract::DEADLOCKS);
    assert_eq!(json[0]["likely"], true);
    assert_eq!(json[0]["circle"], 4);
    assert_eq!(json[0]["gives_way"], serde_json::Value::Null);
    // They keep waiting: the cycle is reported, not broken.
    assert_eq!(store.waiters(), 2);
    // Evicting a claim ends the cycle.
    store.ran("evict a --force").is(0);
    store.ran("deadlocks").is(0);
}

#[test]
fn with_nested_one_gives_way_and_both_finish() {
    let store = Store::new();
    let scripts = opposite(&store, "--nested");
    let ended: Vec<String> = scripts
        .into_iter()
        .map(|script| script.end().out())
        .collect();
    let gave_way = ended.iter().filter(|out| out.contains("ended-75")).count();
    let finished = ended
        .iter()
        .filter(|out| out.contains("both\nended-0"))
        .count();
    assert_eq!((gave_way, finished), (1, 1), "{ended:?}");
    store.assert_empty();
}

#[test]
fn it_can_be_silenced_and_switched_off() {
    let store = Store::new();
    let mut scripts = [
        script(&store, "a", "b", "-q --deadlock-after 200ms"),
        script(&store, "b", "a", "--nested --deadlock-after off"),
    ];
    scripts.iter_mut().for_each(|script| script.write("go\n"));
    until("both wait", || store.waiters() == 2);
    // It is seen from outside, but neither run reports it or gives way.
    std::thread::sleep(Duration::from_secs(3));
    let json = store
        .ran("deadlocks --json")
        .is(1)
        .json(contract::DEADLOCKS);
    assert_eq!(json[0]["gives_way"], serde_json::Value::Null);
    for script in &mut scripts {
        let told = script.stderr.as_mut().unwrap().more();
        assert!(!String::from_utf8_lossy(&told).contains("deadlock"));
    }
    store.ran("run x --deadlock-after soon -- true").is(2);
}

#[test]
fn a_watch_shows_each_change() {
    let store = Store::new();
    let mut watch = Running::start(store.palisade("deadlocks --watch --json"));
    assert_eq!(
        contract::read(&watch.line(), contract::DEADLOCKS),
        serde_json::json!([])
    );
    let scripts = opposite(&store, "");
    let found = contract::read(&watch.line(), contract::DEADLOCKS);
    assert_eq!(found[0]["agents"].as_array().unwrap().len(), 4);
    drop(scripts);
    assert_eq!(
        contract::read(&watch.line(), contract::DEADLOCKS),
        serde_json::json!([])
    );
}

#[test]
fn an_engine_that_shows_no_waiters_is_refused() {
    let store = Store::new();
    let refused = store.soon("deadlocks --json --url postgres+advisory://localhost:1/x");
    assert_eq!(refused.is(77).error()["code"], "unsupported");
}
