//! What every verb owes its users, found by asking `--help` for the verbs: a new one is tested by
//! being there, and its line in `SAMPLES` tests more.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

use crate::contract;
use crate::support::*;

/// A use of each verb that does its work, and the code that it ends with on an empty store.
const SAMPLES: &[(&[&str], i32)] = &[
    (&["run", "x", "--", "true"], 0),
    (&["elect", "x", "--", "true"], 0),
    (&["leader", "x"], 1),
    (&["ls"], 0),
    (&["show", "x"], 1),
    (&["evict", "x"], 1),
    (&["fence", "check", "x", "1"], 0),
    (&["config", "show"], 0),
    (&["config", "path"], 0),
    (&["completions", "bash"], 0),
    (&["man"], 0),
];

/// Those that go on until they are ended.
const ENDLESS: &[&[&str]] = &[
    &["run", "x", "--", "sleep", "60"],
    &["elect", "x", "--", "sleep", "60"],
    &["elect", "x"],
    &["leader", "x", "--watch"],
    &["ls", "--watch"],
    &["ls", "--watch", "--json"],
];

/// Those that ask an engine.
fn asks(args: &[&str]) -> bool {
    !matches!(args[0], "config" | "completions" | "man")
}

/// All verbs.
pub(crate) fn verbs() -> Vec<String> {
    let mut command = palisade();
    command.arg("--help");
    let help = stdout(&finish(command));
    let (_, list) = help.split_once("Commands:\n").unwrap();
    let (list, _) = list.split_once("\n\n").unwrap();
    let verbs = list.lines().filter(|line| !line.starts_with("   "));
    let verbs: Vec<_> = verbs
        .filter_map(|line| Some(line.split_whitespace().next()?.to_owned()))
        .collect();
    assert!(verbs.len() > 10, "{verbs:?}");
    verbs
}

/// Runs it with a stdout that nobody reads.
fn unread(mut command: Command) -> Output {
    let mut head = Command::new("true").stdin(Stdio::piped()).spawn().unwrap();
    let closed = head.stdin.take().unwrap();
    head.wait().unwrap();
    let process = command.stdout(closed).stderr(Stdio::piped()).spawn();
    process.unwrap().wait_with_output().unwrap()
}

#[test]
fn help_has_examples() {
    let store = Store::new();
    for verb in verbs() {
        for flag in ["--help", "-h"] {
            let output = finish_soon(store.palisade(&[&verb, flag]));
            assert_eq!(output.status.code(), Some(0), "{output:?}");
            let text = stdout(&output);
            let (_, examples) = text.split_once("Example").expect(&verb);
            assert!(examples.contains(&format!("palisade {verb}")), "{text}");
        }
        let output = unread(store.palisade(&[&verb, "--help"]));
        assert_eq!(
            (output.status.code(), stderr(&output)),
            (Some(0), String::new())
        );
    }
    assert!(!store.path("store").exists(), "none of this opened a store");
}

#[test]
fn an_unknown_flag_is_usage() {
    let store = Store::new();
    for verb in verbs() {
        let output = finish_soon(store.palisade(&[&verb, "--frobnicate"]));
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).starts_with("palisade: "), "{output:?}");
        let output = finish_soon(store.palisade(&[&verb, "--frobnicate", "--json"]));
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        contract::read(&stderr(&output), contract::ERROR);
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_misspelt_verb_is_seen_through() {
    let store = Store::new();
    for verb in verbs().into_iter().filter(|verb| verb.len() > 3) {
        let mut letters: Vec<_> = verb.chars().collect();
        letters.swap(1, 2);
        let misspelt: String = letters.into_iter().collect();
        let output = finish_soon(store.palisade(&[&misspelt]));
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).contains(&format!("'{verb}'")), "{output:?}");
    }
}

/// Bytes that are no text are refused where text is needed, and never a panic.
#[test]
fn arguments_that_are_no_text_are_usage() {
    let store = Store::new();
    let bytes = || OsString::from_vec(b"a\xffb".to_vec());
    for verb in verbs() {
        let mut command = store.palisade(&[&verb]);
        command.arg(bytes());
        let output = finish_soon(command);
        assert_eq!(output.status.code(), Some(2), "{verb} {output:?}");
        let mut command = store.palisade(&[&verb, "--json", "--url"]);
        command.arg(bytes());
        let output = finish_soon(command);
        assert_eq!(output.status.code(), Some(2), "{verb} {output:?}");
        contract::read(&stderr(&output), contract::ERROR);
    }
    let mut command = store.palisade(&["elect", "x", "--value"]);
    let output = finish_soon({
        command.arg(bytes());
        command
    });
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let mut command = store.palisade(&["elect", "x", "--", "printf", "%s"]);
    command.arg(bytes());
    assert_eq!(
        finish(command).stdout,
        b"a\xffb",
        "a command takes any bytes"
    );
    let mut command = store.palisade(&["ls"]);
    command.env("PALISADE_URL", bytes());
    assert_eq!(code(command), Some(78));
}

#[test]
fn samples_end_as_they_should() {
    for (args, expected) in SAMPLES {
        let store = Store::new();
        let output = finish(store.palisade(args));
        assert_eq!(output.status.code(), Some(*expected), "{args:?} {output:?}");
        assert_eq!(stderr(&output), "", "{args:?}");

        // With stdin closed, not just empty.
        let shell = [
            "-c",
            "exec <&-; exec \"$@\"",
            "sh",
            env!("CARGO_BIN_EXE_palisade"),
        ];
        let mut command = Command::new("sh");
        command
            .args(shell)
            .args(*args)
            .env("PALISADE_URL", store.url())
            .env("PALISADE_CONFIG", "/dev/null");
        let output = finish(command);
        assert_eq!(output.status.code(), Some(*expected), "{args:?} {output:?}");

        // A question whose answer nobody reads is answered; a "no" need not be heard.
        if !matches!(args[0], "run" | "elect") {
            let output = unread(store.palisade(args));
            assert_eq!(output.status.code(), Some(0), "{args:?} {output:?}");
            assert_eq!(stderr(&output), "", "{args:?}");
        }
        store.assert_empty();
    }
}

#[test]
fn json_is_one_document() {
    for (args, expected) in SAMPLES {
        let store = Store::new();
        let mut command = store.palisade(&["--json"]);
        command.args(*args);
        let output = finish(command);
        assert_eq!(output.status.code(), Some(*expected), "{args:?} {output:?}");
        if !matches!(args[0], "run" | "elect") {
            assert_eq!(stdout(&output).lines().count(), 1, "{args:?}");
            serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap();
            assert_eq!(stderr(&output), "");
        } else {
            assert!(output.stdout.is_empty());
            for line in stderr(&output).lines() {
                let event: serde_json::Value = serde_json::from_str(line).unwrap();
                contract::read(line, contract::event(event["event"].as_str().unwrap()));
            }
        }
    }
}

#[test]
fn a_bad_url_is_78_for_all_that_ask_an_engine() {
    let store = Store::new();
    let url = "nosuch://me:hunter2@host/0?password=hunter2";
    for (args, _) in SAMPLES.iter().filter(|(args, _)| asks(args)) {
        for json in [&[][..], &["--json"]] {
            let mut command = store.palisade(&["--url", url]);
            command.args(json).args(*args);
            let output = finish_soon(command);
            assert_eq!(output.status.code(), Some(78), "{args:?} {output:?}");
            assert!(!stderr(&output).contains("hunter2"), "{output:?}");
        }
    }
}

#[test]
fn a_signal_ends_those_that_go_on() {
    for args in ENDLESS {
        for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
            let store = Store::new();
            let watched = store.hold("other", &[]);
            let mut running = Running::start(store.palisade(args));
            match (args[0], args.last()) {
                ("run", _) | ("elect", Some(&"60")) => {
                    until("it holds", || store.lines().len() == 2);
                    // The command, which has just been started, must have its own signals.
                    until("it runs", || child_runs(running.process.id()));
                }
                _ => drop(running.line()),
            }
            running.signal(signal);
            let output = running.end();
            let status = output.status;
            let seen = status.signal().or(status.code().map(|code| code - 128));
            assert_eq!(seen, Some(number), "{args:?} {output:?}");
            assert_eq!(stderr(&output), "", "{args:?}");
            drop(watched);
            store.assert_empty();
        }
    }
}

/// Whether `sleep` runs below this process.
fn child_runs(pid: u32) -> bool {
    let children = |pid: &str| {
        let path = format!("/proc/{pid}/task/{pid}/children");
        let children = std::fs::read_to_string(path).unwrap_or_default();
        children
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let mut below = vec![pid.to_string()];
    while let Some(pid) = below.pop() {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if comm.trim() == "sleep" {
            return true;
        }
        below.extend(children(&pid));
    }
    false
}
