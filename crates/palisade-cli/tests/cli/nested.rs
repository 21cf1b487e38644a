//! A palisade inside another's command: it must not wait for its own end.

use crate::support::*;

/// Runs `inner`, a palisade's arguments, in the command of `palisade run ARGS`.
fn nested(store: &Store, outer: &str, inner: &str) -> Ran {
    finish(command(store, outer, &format!("\"$PALISADE\" {inner}")))
}

fn command(store: &Store, outer: &str, script: &str) -> std::process::Command {
    let mut command = store.palisade(&format!("run {outer}"));
    command.args(["--", "sh", "-c", script]);
    command.env("PALISADE", env!("CARGO_BIN_EXE_palisade"));
    command
}

#[test]
fn a_lock_of_an_ancestor_is_refused_at_once() {
    let store = Store::new();
    let output = nested(&store, "a", "run a -- echo no");
    output.is(77).says("an ancestor of this process").wrote("");
    // Two levels down, quietly, in JSON, by another spelling of the store, and in an election.
    let spelt = format!("--url file:{}/.", store.path("store").display());
    for inner in [
        "run b -- sh -c '\"$PALISADE\" run a -q -- echo no'",
        &format!("run a {spelt} -- echo no"),
        "elect a -- echo no",
        "run a --shared -- echo no",
    ] {
        nested(&store, "a", inner).is(77);
    }
    // It is refused before it waits: this patience is shorter than the time to the first notice.
    nested(&store, "a", "run a --wait 1ms -- echo no").is(77);
    let json = nested(&store, "a", "run a --json -- echo no");
    assert_eq!(json.error()["code"], "held_by_ancestor", "{json:?}");
    store.assert_empty();
}

#[test]
fn what_does_not_wait_for_an_ancestor_is_as_ever() {
    let store = Store::new();
    nested(&store, "a", "run a --no-wait -- echo no").is(75);
    for (outer, inner) in [
        ("b", "run a -- echo yes"),
        ("a --shared", "run a --shared -- echo yes"),
        ("a --permits 1/2", "run a --permits 1/2 -- echo yes"),
    ] {
        nested(&store, outer, inner).is(0).wrote("yes\n");
    }
    nested(&store, "a --permits 1/1", "run a --permits 1/1 -- echo no").is(77);
    // A lock that an ancestor no longer holds, and permits that others hold.
    let permits = "\"$PALISADE\" run a --permits 1/2 -- echo yes";
    let mut stale = command(&store, "a", "echo yes");
    stale.env("PALISADE_ANCESTORS", "0123456789abcdef");
    for (held, waiting) in [
        (&[][..], stale),
        (
            &["--permits", "1/2"],
            command(&store, "a --permits 1/2", permits),
        ),
    ] {
        let held = store.hold("a", held);
        let mut waiting = Running::start(waiting);
        assert!(waiting.stderr_line().contains("waiting for a"));
        assert_eq!(held.code(), Some(0));
        assert_eq!(waiting.line(), "yes");
        assert_eq!(waiting.code(), Some(0));
    }
}

#[test]
fn locks_in_memory_exclude_nobody_and_are_refused() {
    let store = Store::new();
    for verb in ["run", "elect"] {
        store
            .soon(&format!("{verb} x --url memory: -- true"))
            .is(77)
            .says("file:");
    }
}
