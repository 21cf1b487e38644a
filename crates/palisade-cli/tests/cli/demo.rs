//! `palisade demo`: the fenced file is right, in every run, and nothing is left behind.

use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::contract;
use crate::support::*;

/// The demo, with its temporary folder in one of ours.
fn demo(store: &Store, args: &[&str]) -> Command {
    let temporary = store.path("temporary");
    std::fs::create_dir_all(&temporary).unwrap();
    let mut command = store.palisade(&[&["demo"], args].concat());
    command.env("TMPDIR", temporary);
    command
}

#[track_caller]
fn assert_clean(store: &Store) {
    let left = std::fs::read_dir(store.path("temporary")).unwrap().count();
    assert_eq!(left, 0, "the folder was not removed");
    assert!(
        !store.path("store").exists(),
        "the user's own store was opened"
    );
}

/// Processes that were started for this folder.
fn workers(store: &Store) -> Vec<u32> {
    let temporary = store.path("temporary").display().to_string();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| {
            let cmdline = std::fs::read(Path::new("/proc").join(pid.to_string()).join("cmdline"));
            String::from_utf8_lossy(&cmdline.unwrap_or_default()).contains(&temporary)
        })
        .collect()
}

#[test]
fn the_fenced_file_is_right_in_every_run() {
    let runs = match std::env::var_os("PALISADE_TEST_FULL") {
        Some(_) => 50,
        None => 5,
    };
    for run in 0..runs {
        let store = Store::new();
        let output = finish(demo(&store, &["--fast", "--json"]));
        assert_eq!(output.status.code(), Some(0), "run {run}: {output:?}");
        assert_eq!(stderr(&output), "");
        let end = contract::read(&stdout(&output), contract::DEMO);
        assert_eq!(
            end["fenced"],
            json!({"expected": 150, "found": 150, "intact": true})
        );
        assert_eq!(
            end["unfenced"],
            json!({"expected": 150, "found": 110, "intact": false})
        );
        let token = |which: &str| end[which].as_str().unwrap().parse::<u64>().unwrap();
        assert!(token("second_token") > token("first_token"));
        assert_clean(&store);
    }
}

#[test]
fn it_is_told_in_plain_words() {
    let store = Store::new();
    let output = finish(demo(&store, &["--fast"]));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = stdout(&output);
    for words in [
        "is paused",
        "a zombie",
        "stale",
        "the deposit of 50 is gone",
        "fence",
    ] {
        assert!(text.contains(words), "{words} in {text}");
    }
    let ends = |what: &str| {
        let line = text.lines().find(|line| line.starts_with(what)).unwrap();
        line.split_whitespace()
            .skip(2)
            .take(2)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(ends("plain file"), ["110", "wrong:"]);
    assert_eq!(ends("fenced file"), ["150", "right"]);
    assert_clean(&store);
}

#[test]
fn a_signal_ends_it_and_the_worker_that_is_stopped() {
    for (signal, expected) in [("INT", Some(130)), ("TERM", Some(143)), ("KILL", None)] {
        let store = Store::new();
        let mut running = Running::start(demo(&store, &[]));
        while !running.line().contains("is paused") {}
        assert!(!workers(&store).is_empty());
        running.signal(signal);
        assert_eq!(running.code(), expected, "{signal}");
        until("the workers are gone", || workers(&store).is_empty());
        if expected.is_some() {
            assert_clean(&store);
        }
    }
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    for args in [&["--fast"][..], &["--fast", "--json"]] {
        let store = Store::new();
        let output = into_closed_pipe(demo(&store, args));
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert_eq!(stderr(&output), "");
        assert_clean(&store);
    }
}

#[test]
fn a_folder_that_can_not_be_made_is_said() {
    let store = Store::new();
    let mut command = demo(&store, &["--fast"]);
    command.env("TMPDIR", store.path("absent"));
    let output = finish_soon(command);
    assert_eq!(output.status.code(), Some(71), "{output:?}");
    assert!(stderr(&output).contains("temporary folder"), "{output:?}");
}
