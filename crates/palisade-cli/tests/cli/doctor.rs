//! `palisade doctor`: what the engine is, and a code for danger.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;

use serde_json::Value;

use crate::contract;
use crate::support::*;

#[track_caller]
fn health(store: &Store, expected: i32) -> Value {
    let output = finish(store.palisade(&["doctor", "--json"]));
    assert_eq!(output.status.code(), Some(expected), "{output:?}");
    assert_eq!(stderr(&output), "");
    contract::read(&stdout(&output), contract::HEALTH)
}

/// A store that is there.
fn store() -> Store {
    let store = Store::new();
    assert_eq!(code(store.run("first", &[], "true")), Some(0));
    store
}

#[test]
fn a_store_that_is_not_there_is_not_made() {
    let store = Store::new();
    let health = health(&store, 0);
    assert_eq!(
        (&health["engine"], &health["class"]),
        (&store.url().into(), &"B".into())
    );
    assert!(health["round_trip_us"].is_null());
    assert_eq!(health["findings"][0]["code"], "no_store_yet");
    assert!(!store.path("store").exists());
}

#[test]
fn a_config_file_that_shows_its_password_is_a_warning() {
    let store = store();
    let config = store.path("config.toml");
    let url = store.url().replacen("file:", "file://me:hunter2@", 1);
    std::fs::write(&config, format!("url = '{url}'")).unwrap();
    for (mode, told) in [(0o644, true), (0o600, false)] {
        std::fs::set_permissions(&config, Permissions::from_mode(mode)).unwrap();
        let mut command = store.palisade(&["doctor", "--json"]);
        command.env("PALISADE_CONFIG", &config);
        let output = finish(command);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert_eq!(
            stdout(&output).contains("exposed_password"),
            told,
            "{output:?}"
        );
        assert!(!stdout(&output).contains("hunter2"), "{output:?}");
    }
}

#[test]
fn a_healthy_engine_is_0() {
    let store = store();
    let health = health(&store, 0);
    assert_eq!(health["engine"], store.url());
    assert_eq!(health["class"], "B");
    assert!(health["round_trip_us"].as_f64().unwrap() > 0.0);
    let dangers = health["findings"].as_array().unwrap().iter();
    assert_eq!(
        dangers
            .filter(|finding| finding["severity"] == "danger")
            .count(),
        0
    );

    let output = finish(store.palisade(&["doctor"]));
    assert_eq!(
        (output.status.code(), stderr(&output)),
        (Some(0), String::new())
    );
    let text = stdout(&output);
    for words in [
        "engine",
        "class",
        "round trip",
        "µs",
        "permits",
        "tokens",
        "never go back",
    ] {
        assert!(text.contains(words), "{words} in {text}");
    }
    assert!(!text.contains('\x1b'), "{text:?}");
    store.assert_empty();
}

#[test]
fn danger_is_1_with_its_remedy() {
    let store = Store::new();
    let output = finish(store.palisade(&["doctor", "--url", "memory:", "--json"]));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let health = contract::read(&stdout(&output), contract::HEALTH);
    assert_eq!(
        health["findings"][0]["code"], "excludes_nobody",
        "the worst comes first"
    );
    assert_eq!(health["findings"][0]["severity"], "danger");
    let output = finish(store.palisade(&["doctor", "--url", "memory:"]));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = stdout(&output);
    assert!(
        text.contains("danger excludes_nobody") && text.contains("remedy: use file:"),
        "{text}"
    );
}

#[test]
fn an_engine_that_does_not_answer_is_69_and_a_signal_ends_the_wait() {
    let store = store();
    health(&store, 0);
    let gate = File::open(store.path("store/lock")).unwrap();
    gate.lock().unwrap();
    let url = format!("{}?timeout=200ms&connect_timeout=200ms", store.url());
    let output = finish(store.palisade(&["doctor", "--json", "--url", &url]));
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    assert_eq!(json_error(&output)["code"], "unreachable");
    assert!(output.stdout.is_empty());

    for (signal, number) in [("INT", 2), ("TERM", 15)] {
        let url = format!("{}?connect_timeout=60s", store.url());
        let running = Running::start(store.palisade(&["doctor", "--url", &url]));
        let tasks = format!("/proc/{}/task", running.process.id());
        until("it opens the store", || {
            std::fs::read_dir(&tasks).unwrap().count() > 1
        });
        running.signal(signal);
        assert_eq!(running.end().status.signal(), Some(number));
    }
}

#[test]
fn a_bad_url_is_78() {
    let store = Store::new();
    let output = finish_soon(store.palisade(&["doctor", "--url", "fil:/x", "--json"]));
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    assert!(
        json_error(&output)["message"]
            .as_str()
            .unwrap()
            .contains("file")
    );
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let store = Store::new();
    for args in [&["doctor"][..], &["doctor", "--json"]] {
        let output = into_closed_pipe(store.palisade(args));
        assert_eq!(
            (output.status.code(), stderr(&output)),
            (Some(0), String::new())
        );
    }
}
