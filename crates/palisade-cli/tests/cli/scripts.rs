//! The examples of `docs/scripts.md`, run as they stand there.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::acquire::script;
use crate::support::*;

const PAGE: &str = include_str!("../../../../docs/scripts.md");

/// The example that the page has under this mark.
fn example(mark: &str) -> &'static str {
    let (_, behind) = PAGE
        .split_once(&format!("<!-- test: {mark} -->\n```"))
        .unwrap();
    let (_, behind) = behind.split_once('\n').unwrap();
    behind.split_once("\n```").unwrap().0
}

/// Writes an executable file beside the store.
fn put(store: &Store, name: &str, text: &str) {
    let path = store.path(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
}

/// Runs a line in the store's folder, which is also the first of `PATH`.
fn line(store: &Store, text: &str) -> Command {
    script(store, "sh", &format!("PATH=$PWD:$PATH; {text}"))
}

/// Reports that it runs, checks that no other instance does, and waits to be released.
const ALONE: &str = "#!/bin/sh\nmkdir alone || echo both >>log\necho \"$0\" >>log\necho runs\n\
                     read line\nrmdir alone\n";

#[test]
fn a_script_that_locks_itself_runs_alone() {
    let store = Store::new();
    let text = example("self-locking");
    assert!(text.contains("exec palisade run nightly-report -- \"$0\" \"$@\""));
    put(
        &store,
        "report",
        &format!("{text}\necho \"with $1\"; read line"),
    );
    let mut first = Running::start(line(&store, "./report 'a b'; echo code $?"));
    assert!(first.line().starts_with("the only one, with the token "));
    assert_eq!(first.line(), "with a b");
    let second = Running::start(line(&store, "./report two"));
    until("the second waits", || store.waiters() == 1);
    first.write("go\n");
    let output = first.end();
    assert_eq!(output.out(), "code 0\n", "{output:?}");
    let output = second.end();
    assert!(output.out().ends_with("with two\n"), "{output:?}");
    store.assert_empty();
}

#[test]
fn a_script_holds_the_lock_over_its_commands() {
    let store = Store::new();
    put(&store, "report", example("acquire-release"));
    put(&store, "collect.sh", ALONE);
    put(&store, "publish.sh", ALONE);
    let mut first = Running::start(line(&store, "./report; echo $?"));
    assert_eq!(first.line(), "runs");
    let second = Running::start(line(&store, "./report </dev/null; echo $?"));
    until("the second waits", || store.waiters() == 1);
    first.write("go\n");
    assert_eq!(first.line(), "runs");
    assert_eq!(store.waiters(), 1, "the lock spans both");
    first.write("go\n");
    assert_eq!(first.end().out(), "0\n");
    let output = second.end();
    assert_eq!(output.out(), "runs\nruns\n0\n", "{output:?}");
    let log = std::fs::read_to_string(store.path("log")).unwrap();
    let one = "./collect.sh\n./publish.sh\n";
    assert_eq!(log, format!("{one}{one}"));
    store.assert_empty();
}

#[test]
fn a_script_has_the_token() {
    let store = Store::new();
    put(&store, "stock", example("acquire-token"));
    put(
        &store,
        "write-stock.sh",
        "#!/bin/sh\necho \"$@\"; palisade show stock --json",
    );
    let output = finish(line(&store, "./stock; echo $?"));
    let said = output.out();
    let lines: Vec<_> = said.lines().collect();
    let shown: serde_json::Value = serde_json::from_str(lines[1]).unwrap();
    let token = shown["holders"][0]["token"].as_str().unwrap();
    assert_eq!(lines[0], format!("--fence {token}"));
    assert_eq!(lines[2], "0");
}

#[test]
fn a_line_of_cron_runs_once_and_is_silent() {
    let store = Store::new();
    let job = example("cron").lines().last().unwrap();
    let fields: Vec<_> = job.split_whitespace().collect();
    let job = fields[5..].join(" ");
    assert!(job.starts_with("palisade run "), "{job}");
    put(&store, "cleanup.sh", ALONE);
    let mut first = Running::start(line(&store, &job));
    assert_eq!(first.line(), "runs");
    let output = finish(line(&store, &job));
    let silent = (Some(0), String::new(), String::new());
    assert_eq!((output.status.code(), output.out(), output.err()), silent);
    first.write("go\n");
    assert_eq!(first.code(), Some(0));
    assert_eq!(
        std::fs::read_to_string(store.path("log"))
            .unwrap()
            .lines()
            .count(),
        1
    );
}
