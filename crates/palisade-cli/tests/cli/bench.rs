//! `palisade bench`: the figures that were asked for, and nothing left behind.

use std::ffi::{OsStr, OsString};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::contract;
use crate::support::*;

const WARM_UP: Duration = Duration::from_millis(50);

/// Quick figures: they are too short to mean anything.
fn bench(store: &Store, args: &str) -> Ran {
    store.ran(&format!("bench --seconds 0.2 {args}"))
}

/// The rows as JSON; stderr may only say that the machine was noisy.
#[track_caller]
fn rows(store: &Store, args: &str) -> Vec<Value> {
    let output = bench(store, &format!("{args} --json"));
    output.is(0);
    for line in output.err().lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        assert_eq!(event["event"], "noisy");
        assert!(event["scenarios"].is_object(), "{event}");
    }
    let rows = output.json(contract::FIGURES);
    let rows = rows.as_array().unwrap().clone();
    for row in &rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("ops_s") > 0.0 && number("p50_us") > 0.0, "{row}");
        assert!(number("p99_us") >= number("p50_us"), "{row}");
    }
    rows
}

fn names(rows: &[Value]) -> Vec<(&str, &str)> {
    rows.iter()
        .map(|row| {
            (
                row["scenario"].as_str().unwrap(),
                row["who"].as_str().unwrap(),
            )
        })
        .collect()
}

#[test]
fn every_default_scenario_beside_its_raw_operations() {
    let store = Store::new();
    let rows = rows(&store, "--baseline --waiters 2,3 --pin");
    let scenarios = "uncontended parallel handoff-2 handoff-3 pass-2 pass-3";
    let both = |scenario| [(scenario, "palisade"), (scenario, "raw")];
    let expected: Vec<_> = scenarios.split(' ').flat_map(both).collect();
    assert_eq!(names(&rows), expected);
    for row in &rows {
        assert_eq!(row["engine"], store.url());
        let positive = row["ratio_to_raw"]
            .as_f64()
            .is_some_and(|ratio| ratio > 0.0);
        assert_eq!(positive, row["who"] == "palisade", "{row}");
    }
    store.assert_empty();
    let known = ["boot", "ceiling", "leases", "lines", "lock", "procs"].map(OsStr::new);
    let entries = std::fs::read_dir(store.path("store")).unwrap();
    let entries = entries.map(|entry| entry.unwrap().file_name());
    let strangers: Vec<OsString> = entries.filter(|name| !known.contains(&&**name)).collect();
    assert_eq!(strangers, Vec::<OsString>::new());
}

#[test]
fn without_a_baseline_there_is_no_ratio() {
    let store = Store::new();
    let args = "--scenario uncontended,handoff --waiters 2 --engine-url memory:";
    let memory = rows(&store, args);
    assert_eq!(
        names(&memory),
        [("uncontended", "palisade"), ("handoff-2", "palisade")]
    );
    assert!(memory.iter().all(|row| row["ratio_to_raw"].is_null()));
    assert!(memory.iter().all(|row| row["engine"] == "memory:"));
    assert!(!store.path("store").exists());
}

#[test]
fn for_people_it_is_a_table() {
    let store = Store::new();
    let output = bench(&store, "--scenario uncontended --baseline");
    let text = output.is(0).out();
    let rows = text.lines().map(|line| line.split_whitespace().collect());
    let rows: Vec<Vec<&str>> = rows.collect();
    assert_eq!(rows[0], [store.url()]);
    assert_eq!(rows[2], ["SCENARIO", "WHO", "OPS/S", "P50", "P99", "RATIO"]);
    assert_eq!(rows[3][..2], ["uncontended", "palisade"]);
    assert_eq!(rows[4][..2], ["uncontended", "raw"]);
    assert!(!text.contains('\x1b'));
    let said = output.err();
    assert!(
        said.is_empty() || said.starts_with("palisade: the machine was too noisy"),
        "{said}"
    );
}

#[test]
fn held_locks_are_renewed_and_counted() {
    let store = Store::new();
    let args = format!("--scenario held --count 50 --url {}?ttl=1s", store.url());
    let rows = rows(&store, &args);
    assert_eq!(names(&rows), [("held", "palisade")]);
    // 50 leases are renewed about three times in their ttl.
    let leases = rows[0]["ops_s"].as_f64().unwrap();
    assert!((50.0..500.0).contains(&leases), "{rows:?}");
    store.assert_empty();
    let text = bench(&store, &args).out();
    for word in [
        "held: 50 locks for 1s",
        "renew calls",
        "% of one core",
        "bytes each",
    ] {
        assert!(text.contains(word), "{word} in {text}");
    }
}

#[test]
fn the_command_is_measured_beside_flock() {
    let store = Store::new();
    let rows = rows(&store, "--scenario cli --count 10");
    assert_eq!(names(&rows), [("cli", "palisade"), ("cli", "raw")]);
    assert!(rows[0]["ratio_to_raw"].as_f64().unwrap() > 0.0);
    store.assert_empty();
}

#[test]
fn a_signal_ends_it_with_all_its_waiters() {
    for (signal, expected) in [("INT", 130), ("TERM", 143)] {
        let store = Store::new();
        let args = "bench --scenario pass --waiters 4 --seconds 600";
        let running = Running::start(store.palisade(args));
        until("they pass it on", || store.waiters() > 0);
        // After the warm-up, which is short: in a round, they would run for a minute.
        let began = Instant::now();
        until("the first round runs", || began.elapsed() > 6 * WARM_UP);
        running.signal(signal);
        running.end().is(expected).silent().wrote("");
        until("nobody is left", || store.lines().is_empty());
    }
}

#[test]
fn what_can_not_be_measured_is_refused() {
    let store = Store::new();
    for (args, expected, word) in [
        ("--scenario sprint", 2, "uncontended"),
        ("--seconds 0", 2, "0.01"),
        ("--seconds soon", 2, "number"),
        ("--count 0", 2, "1..="),
        ("--waiters 1", 2, "2..="),
        ("--waiter-of x", 2, "palisade itself"),
        ("--processes --url memory:", 2, "one process"),
        (
            "--scenario pass --seconds 0.02 --waiters 2",
            2,
            "more --seconds",
        ),
        ("--url bananas:", 78, "file"),
        ("extra", 2, "extra"),
    ] {
        for json in ["", "--json"] {
            store
                .ran(&format!("bench {args} {json}"))
                .is(expected)
                .says(word)
                .wrote("");
        }
    }
    for json in ["", "--json"] {
        let args = format!("bench --seconds 0.05 --scenario uncontended {json}");
        into_closed_pipe(store.palisade(&args)).is(0).silent();
    }
}
