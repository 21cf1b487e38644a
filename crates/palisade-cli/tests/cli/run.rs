//! `palisade run`: the child, its environment, its exit code.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use crate::support::*;

#[test]
fn the_exit_code_is_the_childs() {
    let store = Store::new();
    for (script, expected) in [
        ("true", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -9 $$", 137),
    ] {
        assert_eq!(
            code(store.run("x", &[], script)),
            Some(expected),
            "{script}"
        );
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
}

#[test]
fn the_child_learns_about_its_lock() {
    let store = Store::new();
    let script = "printf '%s|' \"$PALISADE_LOCK\" \"$PALISADE_TOKEN\" \"$PALISADE_OWNER\" \
                  \"$PALISADE_ENGINE\"; \"$PALISADE\" ls --json";
    let mut command = store.run("a b", &[], script);
    command.env("PALISADE", env!("CARGO_BIN_EXE_palisade"));
    let output = stdout(&finish(command));
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
    let output = stdout(&finish(command));
    let (outer, inner) = output.split_once('\n').unwrap();
    let (outer, inner) = (
        outer.split_once(' ').unwrap(),
        inner.trim().split_once(' ').unwrap(),
    );
    assert_eq!((outer.0, inner.0), ("outer", "inner"));
    assert_ne!(outer.1, inner.1);
}

#[test]
fn tokens_rise() {
    let store = Store::new();
    let token = || -> u64 {
        let output = finish(store.run("x", &[], "echo $PALISADE_TOKEN"));
        stdout(&output).trim().parse().unwrap()
    };
    let tokens: Vec<_> = (0..5).map(|_| token()).collect();
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[test]
fn arguments_that_are_not_utf8_are_passed_on() {
    let store = Store::new();
    let mut command = store.palisade(&["run", "x", "--", "printf", "%s"]);
    command.arg(OsStr::from_bytes(b"a\xffb"));
    assert_eq!(finish(command).stdout, b"a\xffb");
}

#[test]
fn the_childs_flags_are_its_own() {
    let store = Store::new();
    let command = store.palisade(&["run", "x", "--", "echo", "--json", "--url", "-q", "--"]);
    assert_eq!(stdout(&finish(command)), "--json --url -q --\n");
}

#[test]
fn the_child_leads_a_process_group_of_its_own() {
    let store = Store::new();
    let output = finish(store.run("x", &[], "echo $$; cut -d' ' -f5 /proc/$$/stat"));
    let output = stdout(&output);
    let (pid, group) = output.trim().split_once('\n').unwrap();
    assert_eq!(pid, group);
}

#[test]
fn a_command_that_can_not_be_started_releases_the_lock_at_once() {
    let store = Store::new();
    let script = store.path("plain");
    std::fs::write(&script, "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o644)).unwrap();
    let script = script.to_str().unwrap();
    for (command, expected, word) in [
        ("no-such-command-anywhere", 127, "command_not_found"),
        ("/no/such/path", 127, "command_not_found"),
        (script, 126, "command_not_executable"),
        ("/", 126, "command_not_executable"),
    ] {
        let output = finish_soon(store.palisade(&["run", "x", "--", command]));
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
        let message = stderr(&output);
        assert!(
            message.starts_with("palisade: ") && message.contains(command),
            "{message}"
        );
        let output = finish_soon(store.palisade(&["run", "--json", "x", "--", command]));
        assert_eq!(json_error(&output)["code"], word, "{output:?}");
        store.assert_empty();
    }
}

#[test]
fn at_least_keeps_the_lock_and_the_command() {
    let store = Store::new();
    let began = Instant::now();
    let running = store.start("x", &["--at-least", "700ms"], "echo ready");
    until_childless(&running);
    assert_eq!(code(store.run("x", &["--no-wait"], "true")), Some(75));
    assert_eq!(running.code(), Some(0));
    assert!(began.elapsed() >= Duration::from_millis(700));
    store.assert_empty();
}

#[test]
fn a_signal_ends_at_least() {
    let store = Store::new();
    let began = Instant::now();
    let running = store.start("x", &["--at-least", "60s"], "echo ready; exit 3");
    until_childless(&running);
    running.signal("TERM");
    assert_eq!(running.code(), Some(3));
    assert!(began.elapsed() < LIMIT);
    store.assert_empty();
}

fn until_childless(running: &Running) {
    let children = format!("/proc/{0}/task/{0}/children", running.process.id());
    until("the child is reaped", || {
        std::fs::read_to_string(&children).unwrap().is_empty()
    });
}

#[test]
fn what_the_child_leaves_behind_runs_on_after_a_normal_end() {
    let store = Store::new();
    let script = "sleep 60 >/dev/null 2>&1 & echo $!";
    let output = finish(store.run("x", &[], script));
    let pid = stdout(&output).trim().to_owned();
    assert!(runs(&pid));
    kill(pid.parse().unwrap(), "KILL");
    store.assert_empty();
}

#[test]
fn events_are_json_lines_on_stderr() {
    let store = Store::new();
    let output = finish(store.run("x", &["--json"], "echo $PALISADE_TOKEN; exit 4"));
    let events: Vec<serde_json::Value> = stderr(&output)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(events[0]["event"], "acquired");
    assert_eq!(events[0]["token"], stdout(&output).trim());
    assert_eq!(events[1]["event"], "released");
    assert_eq!(events[1]["code"], 4);
}

#[test]
fn the_url_is_the_flags_then_the_environments_then_the_default() {
    let store = Store::new();
    let other = Store::new();
    let _held = store.hold("x", &[]);
    let busy = |args: &[&str]| code(store.palisade(args));
    assert_eq!(busy(&["run", "x", "--no-wait", "--", "true"]), Some(75));
    let url = other.url();
    assert_eq!(
        busy(&["--url", &url, "run", "x", "--no-wait", "--", "true"]),
        Some(0)
    );
    assert_eq!(
        busy(&["run", "x", "--url", &url, "--no-wait", "--", "true"]),
        Some(0)
    );
    assert_eq!(
        busy(&["run", "--url", &url, "x", "--no-wait", "--", "true"]),
        Some(0)
    );

    let mut command = palisade();
    command.env("XDG_STATE_HOME", other.path("state"));
    command.args(["run", "x", "--", "true"]);
    assert_eq!(code(command), Some(0));
    assert!(other.path("state/palisade").is_dir());
}

#[test]
fn nothing_stays_behind() {
    let store = Store::new();
    let signs = || {
        std::fs::read_dir(store.path("store/procs"))
            .unwrap()
            .count()
    };
    for script in ["true", "exit 3", "kill -9 $$"] {
        finish(store.run("x", &[], script));
        assert_eq!(signs(), 0, "{script}");
    }
}
