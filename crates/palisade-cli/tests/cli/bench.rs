//! `palisade bench`: the figures that were asked for, and nothing left behind.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::contract;
use crate::support::*;

const WARM_UP: Duration = Duration::from_millis(50);

/// Quick figures: they are too short to mean anything.
fn bench(store: &Store, args: &[&str]) -> std::process::Output {
    finish(store.palisade(&[&["bench", "--seconds", "0.2"], args].concat()))
}

/// The rows as JSON; stderr may only say that the machine was noisy.
#[track_caller]
fn rows(output: &std::process::Output) -> Vec<Value> {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    for line in stderr(output).lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        assert_eq!(event["event"], "noisy");
        assert!(event["scenarios"].is_object(), "{event}");
    }
    let rows = contract::read(&stdout(output), contract::FIGURES);
    let rows = rows.as_array().unwrap().clone();
    for row in &rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("ops_s") > 0.0 && number("p50_us") > 0.0, "{row}");
        assert!(number("p99_us") >= number("p50_us"), "{row}");
    }
    rows
}

fn names(rows: &[Value]) -> Vec<(&str, &str)> {
    let mut names = Vec::new();
    for row in rows {
        names.push((
            row["scenario"].as_str().unwrap(),
            row["who"].as_str().unwrap(),
        ));
    }
    names
}

/// What a store's directory holds, without what belongs there.
fn strangers(store: &Store) -> Vec<OsString> {
    let entries = std::fs::read_dir(store.path("store")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name());
    names
        .filter(|name| {
            !["boot", "ceiling", "leases", "lines", "lock", "procs"]
                .map(OsStr::new)
                .contains(&&**name)
        })
        .collect()
}

#[test]
fn every_default_scenario_beside_its_raw_operations() {
    let store = Store::new();
    let output = bench(
        &store,
        &["--baseline", "--json", "--waiters", "2,3", "--pin"],
    );
    let rows = rows(&output);
    let scenarios = [
        "uncontended",
        "parallel",
        "handoff-2",
        "handoff-3",
        "pass-2",
        "pass-3",
    ];
    let expected: Vec<_> = scenarios
        .iter()
        .flat_map(|scenario| [(*scenario, "palisade"), (*scenario, "raw")])
        .collect();
    assert_eq!(names(&rows), expected);
    for row in &rows {
        assert_eq!(row["engine"], store.url());
        let ratio = row["ratio_to_raw"].as_f64();
        assert_eq!(
            ratio.is_some_and(|ratio| ratio > 0.0),
            row["who"] == "palisade",
            "{row}"
        );
    }
    store.assert_empty();
    assert_eq!(strangers(&store), Vec::<OsString>::new());
}

#[test]
fn without_a_baseline_there_is_no_ratio() {
    let store = Store::new();
    let args = [
        "--json",
        "--scenario",
        "uncontended,handoff",
        "--waiters",
        "2",
        "--engine-url",
    ];
    let memory = bench(&store, &[&args[..], &["memory:"]].concat());
    let memory = rows(&memory);
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
    let output = bench(&store, &["--scenario", "uncontended", "--baseline"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = stdout(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], store.url());
    let words =
        |line: &str| -> Vec<String> { line.split_whitespace().map(str::to_owned).collect() };
    assert_eq!(
        words(lines[2]),
        ["SCENARIO", "WHO", "OPS/S", "P50", "P99", "RATIO"]
    );
    assert_eq!(words(lines[3])[..2], ["uncontended", "palisade"]);
    assert_eq!(words(lines[4])[..2], ["uncontended", "raw"]);
    assert!(!text.contains('\x1b'));
    let said = stderr(&output);
    assert!(
        said.is_empty() || said.starts_with("palisade: the machine was too noisy"),
        "{said}"
    );
}

#[test]
fn held_locks_are_renewed_and_counted() {
    let store = Store::new();
    let url = format!("{}?ttl=1s", store.url());
    let args = ["--scenario", "held", "--count", "50", "--url", &url];
    let rows = rows(&bench(&store, &[&args[..], &["--json"]].concat()));
    assert_eq!(names(&rows), [("held", "palisade")]);
    // 50 leases are renewed about three times in their ttl.
    let leases = rows[0]["ops_s"].as_f64().unwrap();
    assert!((50.0..500.0).contains(&leases), "{rows:?}");
    store.assert_empty();
    let text = stdout(&bench(&store, &args));
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
    let rows = rows(&bench(
        &store,
        &["--scenario", "cli", "--count", "10", "--json"],
    ));
    assert_eq!(names(&rows), [("cli", "palisade"), ("cli", "raw")]);
    assert!(rows[0]["ratio_to_raw"].as_f64().unwrap() > 0.0);
    store.assert_empty();
}

#[test]
fn a_signal_ends_it_with_all_its_waiters() {
    for (signal, expected) in [("INT", 130), ("TERM", 143)] {
        let store = Store::new();
        let args = [
            "bench",
            "--scenario",
            "pass",
            "--waiters",
            "4",
            "--seconds",
            "600",
        ];
        let running = Running::start(store.palisade(&args));
        until("they pass it on", || store.waiters() > 0);
        // Past the warm-up, which is short: in a round, they would go on for a minute.
        let began = Instant::now();
        until("the first round runs", || began.elapsed() > 6 * WARM_UP);
        running.signal(signal);
        let output = running.end();
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
        assert!(
            output.stdout.is_empty() && output.stderr.is_empty(),
            "{output:?}"
        );
        until("nobody is left", || store.lines().is_empty());
    }
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let store = Store::new();
    for json in [&[][..], &["--json"]] {
        let args = [
            &["bench", "--seconds", "0.05", "--scenario", "uncontended"],
            json,
        ]
        .concat();
        let output = into_closed_pipe(store.palisade(&args));
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn what_can_not_be_measured_is_refused() {
    let store = Store::new();
    for (args, expected, word) in [
        (&["--scenario", "sprint"][..], 2, "uncontended"),
        (&["--seconds", "0"], 2, "0.01"),
        (&["--seconds", "soon"], 2, "number"),
        (&["--count", "0"], 2, "1..="),
        (&["--waiters", "1"], 2, "2..="),
        (&["--waiter-of", "x"], 2, "palisade itself"),
        (&["--processes", "--url", "memory:"], 2, "one process"),
        (
            &["--scenario", "pass", "--seconds", "0.02", "--waiters", "2"],
            2,
            "more --seconds",
        ),
        (&["--url", "bananas:"], 78, "file"),
        (&["extra"], 2, "extra"),
    ] {
        for json in [&[][..], &["--json"]] {
            let output = finish(store.palisade(&[&["bench"], args, json].concat()));
            assert_eq!(output.status.code(), Some(expected), "{output:?}");
            assert!(stderr(&output).contains(word), "{word} in {output:?}");
            assert!(output.stdout.is_empty());
        }
    }
    for verb in ["bench", "demo", "doctor", "guide"] {
        let args = [
            OsString::from(verb),
            OsString::from_vec(b"--ne\xffed".to_vec()),
        ];
        let output = finish_soon(store.palisade(&args));
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
    let args = ["bench", "--scenario"].map(OsString::from);
    let args = args
        .into_iter()
        .chain([OsString::from_vec(b"\xff".to_vec())]);
    let output = finish_soon(store.palisade(&args.collect::<Vec<_>>()));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn every_help_has_examples() {
    let store = Store::new();
    for verb in ["bench", "demo", "doctor", "guide"] {
        let output = finish_soon(store.palisade(&[verb, "--help"]));
        assert_eq!(output.status.code(), Some(0));
        let text = stdout(&output);
        let (_, examples) = text.split_once("Examples:").unwrap();
        assert!(examples.contains(&format!("palisade {verb}")), "{text}");
        assert!(!text.contains("not for people"), "{text}");
    }
    assert!(!store.path("store").exists(), "none of this opened a store");
}
