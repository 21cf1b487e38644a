//! `palisade doctor`: what the engine is, and a code for danger.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;

use serde_json::Value;

use crate::contract;
use crate::support::*;

/// A store that exists.
fn store() -> Store {
    let store = Store::new();
    store.ran("run first -- true").is(0);
    store
}

/// What is said of a store without danger.
fn health(store: &Store) -> Value {
    let ran = store.ran("doctor --json");
    let health = ran.is(0).silent().json(contract::HEALTH);
    assert_eq!(health["engine"], store.url());
    assert_eq!(health["class"], "B");
    health
}

#[test]
fn a_store_that_is_not_there_is_not_made() {
    let store = Store::new();
    let health = health(&store);
    assert!(health["round_trip_us"].is_null());
    assert_eq!(health["findings"][0]["code"], "no_store_yet");
    assert!(!store.path("store").exists());
}

#[test]
fn a_config_file_that_shows_its_password_is_a_warning() {
    let store = store();
    let config = store.path("config.toml");
    // The embedded engine ignores a login.
    let url = store.url().replacen("file:", "file://me:hunter2@", 1);
    std::fs::write(&config, format!("url = '{url}'")).unwrap();
    for (mode, told) in [(0o644, true), (0o600, false)] {
        std::fs::set_permissions(&config, Permissions::from_mode(mode)).unwrap();
        let mut command = store.palisade("doctor --json");
        command.env("PALISADE_CONFIG", &config);
        let text = finish(command).is(0).out();
        assert_eq!(text.contains("exposed_password"), told, "{text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
}

#[test]
fn a_healthy_engine_is_0() {
    let store = store();
    let health = health(&store);
    assert!(health["round_trip_us"].as_f64().unwrap() > 0.0);
    let mut findings = health["findings"].as_array().unwrap().iter();
    assert!(
        findings.all(|finding| finding["severity"] != "danger"),
        "{health}"
    );

    let text = store.ran("doctor").is(0).silent().out();
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
fn danger_is_1_with_its_remedy_and_a_bad_url_is_78() {
    let store = Store::new();
    let health = store
        .ran("doctor --url memory: --json")
        .is(1)
        .json(contract::HEALTH);
    let worst = &health["findings"][0];
    assert_eq!(worst["code"], "excludes_nobody", "the worst comes first");
    assert_eq!(worst["severity"], "danger");
    let text = store.ran("doctor --url memory:").is(1).out();
    assert!(
        text.contains("danger excludes_nobody") && text.contains("remedy: use file:"),
        "{text}"
    );
    store
        .soon("doctor --url fil:/x --json")
        .is(78)
        .says("file")
        .error();
}

#[test]
fn an_engine_that_does_not_answer_is_69_and_a_signal_ends_the_wait() {
    let store = store();
    let gate = File::open(store.path("store/lock")).unwrap();
    gate.lock().unwrap();
    let hasty = "timeout=200ms&connect_timeout=200ms";
    let output = store.ran(&format!("doctor --json --url {}?{hasty}", store.url()));
    assert_eq!(output.is(69).wrote("").error()["code"], "unreachable");

    for (signal, number) in [("INT", 2), ("TERM", 15)] {
        let patient = format!("doctor --url {}?connect_timeout=60s", store.url());
        let running = Running::start(store.palisade(&patient));
        let tasks = format!("/proc/{}/task", running.process.id());
        until("it opens the store", || {
            std::fs::read_dir(&tasks).unwrap().count() > 1
        });
        running.signal(signal);
        assert_eq!(running.end().status.signal(), Some(number));
    }
}
