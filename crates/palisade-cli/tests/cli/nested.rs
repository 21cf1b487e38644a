//! A palisade inside another's command: it must not wait for its own end.

use crate::support::*;

/// `palisade run NAME ARGS… -- sh -c SCRIPT`, as text for a shell.
fn run(name: &str, args: &str, script: &str) -> String {
    format!("\"$PALISADE\" run {name} {args} -- {script}")
}

fn outer(store: &Store, name: &str, args: &[&str], script: &str) -> std::process::Output {
    let mut command = store.run(name, args, script);
    command.env("PALISADE", env!("CARGO_BIN_EXE_palisade"));
    finish(command)
}

#[test]
fn a_lock_of_an_ancestor_is_refused_at_once() {
    let store = Store::new();
    let output = outer(&store, "a", &[], &run("a", "", "echo no"));
    assert_eq!(output.status.code(), Some(77), "{output:?}");
    assert!(
        stderr(&output).contains("what runs this palisade"),
        "{output:?}"
    );
    assert!(output.stdout.is_empty(), "{output:?}");

    // Two levels down, quietly, in JSON, by another spelling of the store, and in an election.
    let deep = run("b", "", &format!("sh -c '{}'", run("a", "-q", "echo no")));
    assert_eq!(outer(&store, "a", &[], &deep).status.code(), Some(77));
    let json = outer(&store, "a", &[], &run("a", "--json", "echo no"));
    assert_eq!(json_error(&json)["code"], "held_by_ancestor", "{json:?}");
    let spelt = format!("--url file:{}/.", store.path("store").display());
    assert_eq!(
        outer(&store, "a", &[], &run("a", &spelt, "echo no"))
            .status
            .code(),
        Some(77)
    );
    let elect = "\"$PALISADE\" elect a -- echo no";
    assert_eq!(outer(&store, "a", &[], elect).status.code(), Some(77));
    let shared = run("a", "--shared", "echo no");
    assert_eq!(outer(&store, "a", &[], &shared).status.code(), Some(77));
    store.assert_empty();
}

#[test]
fn what_does_not_wait_for_an_ancestor_is_as_ever() {
    let store = Store::new();
    let no_wait = outer(&store, "a", &[], &run("a", "--no-wait", "echo no"));
    assert_eq!(no_wait.status.code(), Some(75), "{no_wait:?}");
    for (name, args, nested) in [
        ("b", &[][..], run("a", "", "echo yes")),
        ("a", &["--shared"], run("a", "--shared", "echo yes")),
        (
            "a",
            &["--permits", "1/2"],
            run("a", "--permits 1/2", "echo yes"),
        ),
    ] {
        let output = outer(&store, name, args, &nested);
        assert_eq!(
            (output.status.code(), stdout(&output).as_str()),
            (Some(0), "yes\n"),
            "{output:?}"
        );
    }
    let too_many = run("a", "--permits 1/1", "echo no");
    let output = outer(&store, "a", &["--permits", "1/1"], &too_many);
    assert_eq!(output.status.code(), Some(77), "{output:?}");
    // One that an ancestor held and holds no more.
    let mut command = store.run("a", &[], "echo yes");
    command.env("PALISADE_ANCESTORS", "0123456789abcdef");
    let held = store.hold("a", &[]);
    let mut waiting = Running::start(command);
    assert!(waiting.stderr_line().contains("waiting for a"));
    assert_eq!(held.code(), Some(0));
    assert_eq!(waiting.line(), "yes");
}

#[test]
fn permits_of_others_are_waited_for() {
    let store = Store::new();
    let held = store.hold("a", &["--permits", "1/2"]);
    let mut command = store.run(
        "a",
        &["--permits", "1/2"],
        &run("a", "--permits 1/2", "echo yes"),
    );
    command.env("PALISADE", env!("CARGO_BIN_EXE_palisade"));
    let mut waiting = Running::start(command);
    assert!(waiting.stderr_line().contains("waiting for a"));
    assert_eq!(held.code(), Some(0));
    assert_eq!(waiting.line(), "yes");
    assert_eq!(waiting.code(), Some(0));
}

#[test]
fn locks_in_memory_exclude_nobody_and_are_refused() {
    let store = Store::new();
    for verb in ["run", "elect"] {
        let output = finish_soon(store.palisade(&[verb, "x", "--url", "memory:", "--", "true"]));
        assert_eq!(output.status.code(), Some(77), "{output:?}");
        assert!(stderr(&output).contains("file:"), "{output:?}");
    }
    let output = finish_soon(store.palisade(&["doctor", "--url", "memory:", "--json"]));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stdout(&output).contains("excludes_nobody"), "{output:?}");
}
