//! `palisade run`: the child, its environment, its exit code.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use crate::support::*;

#[test]
fn the_exit_code_is_the_childs_and_nothing_stays_behind() {
    let store = Store::new();
    for (script, expected) in [
        ("true", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -9 $$", 137),
    ] {
        finish(store.run("x", &[], script)).is(expected);
        let signs = std::fs::read_dir(store.path("store/procs"))
            .unwrap()
            .count();
        assert_eq!(signs, 0, "{script}");
    }
    store.assert_empty();
}

#[test]
fn the_child_owns_stdin_and_stdout() {
    let store = Store::new();
    let input = store.path("input");
    std::fs::write(&input, b"line\n\xff\0end").unwrap();
    for extra in [&[][..], &["--json"]] {
        let mut command = store.run("x", extra, "cat");
        command.stdin(std::fs::File::open(&input).unwrap());
        let output = command.output().unwrap();
        assert_eq!(output.stdout, b"line\n\xff\0end", "{output:?}");
    }
    // And its flags.
    store
        .ran("run x -- echo --json --url -q --")
        .wrote("--json --url -q --\n");
}

#[test]
fn the_child_learns_about_its_lock() {
    let store = Store::new();
    let script = "printf '%s|' \"$PALISADE_LOCK\" \"$PALISADE_TOKEN\" \"$PALISADE_OWNER\" \
                  \"$PALISADE_ENGINE\"; \"$PALISADE\" ls --json";
    let mut command = store.run("a b", &[], script);
    command.env("PALISADE", env!("CARGO_BIN_EXE_palisade"));
    let output = finish(command).out();
    let parts: Vec<_> = output.splitn(5, '|').collect();
    let lines: serde_json::Value = serde_json::from_str(parts[4]).unwrap();
    let holder = &lines[0]["holders"][0];
    assert_eq!(parts[0], "a b");
    assert_eq!(lines[0]["name"], "a b");
    assert_eq!(holder["token"], parts[1]);
    assert!(parts[1].parse::<u64>().unwrap() > 0);
    assert_eq!(holder["owner"], parts[2]);
    assert!(parts[3].starts_with("file:"), "{output}");
}

#[test]
fn an_inner_lock_replaces_what_the_outer_one_said() {
    let store = Store::new();
    let inner = "\"$PALISADE\" run inner -- sh -c 'echo $PALISADE_LOCK $PALISADE_TOKEN'";
    let script = format!("echo $PALISADE_LOCK $PALISADE_TOKEN; {inner}");
    let mut command = store.run("outer", &[], &script);
    command.env("PALISADE", env!("CARGO_BIN_EXE_palisade"));
    let output = finish(command).out();
    let words: Vec<_> = output.split_whitespace().collect();
    assert_eq!((words[0], words[2]), ("outer", "inner"));
    assert_ne!(words[1], words[3]);
}

#[test]
fn tokens_rise() {
    let store = Store::new();
    let token = |_| -> u64 {
        let output = finish(store.run("x", &[], "echo $PALISADE_TOKEN"));
        output.out().trim().parse().unwrap()
    };
    let tokens: Vec<_> = (0..5).map(token).collect();
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[test]
fn the_child_leads_a_process_group_of_its_own() {
    let store = Store::new();
    let output = finish(store.run("x", &[], "echo $$; cut -d' ' -f5 /proc/$$/stat")).out();
    let (pid, group) = output.trim().split_once('\n').unwrap();
    assert_eq!(pid, group);
}

#[test]
fn a_command_that_can_not_be_started_releases_the_lock_at_once() {
    let store = Store::new();
    let script = store.path("plain");
    std::fs::write(&script, "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o644)).unwrap();
    let script = script.to_str().unwrap();
    for (command, expected, word) in [
        ("no-such-command-anywhere", 127, "command_not_found"),
        ("/no/such/path", 127, "command_not_found"),
        (script, 126, "command_not_executable"),
        ("/", 126, "command_not_executable"),
    ] {
        let output = store.soon(&format!("run x -- {command}"));
        output.is(expected).says(command);
        assert!(output.err().starts_with("palisade: "), "{output:?}");
        let output = store.soon(&format!("run --json x -- {command}"));
        assert_eq!(output.error()["code"], word, "{output:?}");
        store.assert_empty();
    }
}

#[test]
fn at_least_keeps_the_lock_and_a_signal_ends_it() {
    let store = Store::new();
    let ended = |running: &Running| {
        until("the child is reaped", || {
            children(running.process.id()).is_empty()
        });
    };
    let began = Instant::now();
    let running = store.start("x", &["--at-least", "700ms"], "echo ready");
    ended(&running);
    store.ran("run x --no-wait -- true").is(75);
    assert_eq!(running.code(), Some(0));
    assert!(began.elapsed() >= Duration::from_millis(700));
    store.assert_empty();

    let began = Instant::now();
    let running = store.start("x", &["--at-least", "60s"], "echo ready; exit 3");
    ended(&running);
    running.signal("TERM");
    assert_eq!(running.code(), Some(3));
    assert!(began.elapsed() < LIMIT);
    store.assert_empty();
}

#[test]
fn what_the_child_leaves_behind_runs_on_after_a_normal_end() {
    let store = Store::new();
    let script = "sleep 60 >/dev/null 2>&1 & echo $!";
    let pid = finish(store.run("x", &[], script)).out().trim().to_owned();
    assert!(runs(&pid));
    kill(pid.parse().unwrap(), "KILL");
    store.assert_empty();
}

#[test]
fn events_are_json_lines_on_stderr() {
    let store = Store::new();
    let output = finish(store.run("x", &["--json"], "echo $PALISADE_TOKEN; exit 4"));
    let events = output.err();
    let events = events
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    let events: Vec<serde_json::Value> = events.collect();
    assert_eq!(events[0]["event"], "acquired");
    assert_eq!(events[0]["token"], output.out().trim());
    assert_eq!(events[1]["event"], "released");
    assert_eq!(events[1]["code"], 4);
}

#[test]
fn the_url_is_the_flags_then_the_environments_then_the_default() {
    let (store, other) = (Store::new(), Store::new());
    let _held = store.hold("x", &[]);
    store.ran("run x --no-wait -- true").is(75);
    for args in [
        "--url URL run x --no-wait -- true",
        "run x --url URL --no-wait -- true",
        "run --url URL x --no-wait -- true",
    ] {
        store.ran(&args.replace("URL", &other.url())).is(0);
    }
    let mut command = palisade();
    command.env("XDG_STATE_HOME", other.path("state"));
    command.args("run x -- true".words());
    finish(command).is(0);
    assert!(other.path("state/palisade").is_dir());
}
