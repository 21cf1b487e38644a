//! `palisade demo`: the fenced file is right, in every run, and nothing is left behind.

use std::process::Command;

use serde_json::json;

use crate::contract;
use crate::support::*;

/// The demo, with its temporary folder in one of ours.
fn demo(store: &Store, args: &str) -> Command {
    let temporary = store.path("temporary");
    std::fs::create_dir_all(&temporary).unwrap();
    let mut command = store.palisade(&format!("demo {args}"));
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

/// Whether there are processes that were started for this folder.
fn works(store: &Store) -> bool {
    let temporary = store.path("temporary").display().to_string();
    let mut processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.any(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&temporary)
    })
}

#[test]
fn the_fenced_file_is_right_in_every_run() {
    for _ in 0..rounds() {
        let store = Store::new();
        let end = finish(demo(&store, "--fast --json"))
            .is(0)
            .silent()
            .json(contract::DEMO);
        let balance = |found, intact| json!({"expected": 150, "found": found, "intact": intact});
        assert_eq!(end["fenced"], balance(150, true));
        assert_eq!(end["unfenced"], balance(110, false));
        let token = |which: &str| end[which].as_str().unwrap().parse::<u64>().unwrap();
        assert!(token("second_token") > token("first_token"));
        assert_clean(&store);
    }
}

#[test]
fn it_is_told_in_plain_words() {
    let store = Store::new();
    let text = finish(demo(&store, "--fast")).is(0).out();
    for words in [
        "is paused",
        "a zombie",
        "stale",
        "the deposit of 50 is gone",
        "fence",
    ] {
        assert!(text.contains(words), "{words} in {text}");
    }
    let ends = |what: &str| -> Vec<String> {
        let line = text.lines().find(|line| line.starts_with(what)).unwrap();
        line.split_whitespace()
            .skip(2)
            .take(2)
            .map(str::to_owned)
            .collect()
    };
    assert_eq!(ends("plain file"), ["110", "wrong:"]);
    assert_eq!(ends("fenced file"), ["150", "right"]);
    assert_clean(&store);
}

#[test]
fn a_signal_ends_it_and_the_worker_that_is_stopped() {
    for (signal, expected) in [("INT", Some(130)), ("TERM", Some(143)), ("KILL", None)] {
        let store = Store::new();
        let mut running = Running::start(demo(&store, ""));
        while !running.line().contains("is paused") {}
        assert!(works(&store));
        running.signal(signal);
        assert_eq!(running.code(), expected, "{signal}");
        until("the workers are gone", || !works(&store));
        if expected.is_some() {
            assert_clean(&store);
        }
    }
}

#[test]
fn a_reader_that_has_gone_is_no_failure_and_a_folder_that_can_not_be_made_is() {
    let store = Store::new();
    for args in ["--fast", "--fast --json"] {
        into_closed_pipe(demo(&store, args)).is(0).silent();
        assert_clean(&store);
    }
    let mut command = demo(&store, "--fast");
    command.env("TMPDIR", store.path("absent"));
    finish_soon(command).is(71).says("temporary folder");
}
