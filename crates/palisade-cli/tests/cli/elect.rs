//! `elect` and `leader`.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use crate::contract;
use crate::support::*;

/// `palisade elect NAME ARGS… -- sh -c SCRIPT`.
fn elect(store: &Store, name: &str, args: &[&str], script: &str) -> Command {
    let mut command = store.palisade(&["elect", name]);
    command.args(args).args(["--", "sh", "-c", script]);
    command
}

/// Who leads, by `leader --json`.
fn leader(store: &Store, name: &str) -> serde_json::Value {
    let output = finish(store.palisade(&["leader", name, "--json"]));
    let answer = contract::read(&stdout(&output), contract::LEADER);
    let expected = i32::from(answer["leader"].is_null());
    assert_eq!(output.status.code(), Some(expected), "{output:?}");
    answer["leader"].clone()
}

/// The next event on stderr, which must be this one.
#[track_caller]
fn event(running: &mut Running, word: &str) -> serde_json::Value {
    let line = running.stderr_line();
    let value = contract::read(&line, contract::event(word));
    assert_eq!(value["event"], word, "{line}");
    value
}

#[test]
fn the_command_gets_its_environment_and_its_code_is_passed_on() {
    let store = Store::new();
    let script = "echo $PALISADE_LOCK $PALISADE_TOKEN $PALISADE_OWNER $PALISADE_ENGINE; \
                  cat >/dev/null; exit 7";
    let mut running = Running::start(elect(&store, "e", &["--value", "here:1"], script));
    let line = running.line();
    let words: Vec<_> = line.split(' ').collect();
    let leads = leader(&store, "e");
    assert_eq!(leads["value"], "here:1");
    assert_eq!(leads["pid"], running.process.id());
    assert_eq!(
        words,
        [
            "e",
            leads["token"].as_str().unwrap(),
            leads["owner"].as_str().unwrap(),
            &store.url()
        ]
    );
    running.close_stdin();
    let output = running.end();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!((stdout(&output), stderr(&output)), Default::default());
    assert!(leader(&store, "e").is_null());
    store.assert_empty();
}

#[test]
fn only_one_leads_and_the_next_follows() {
    let store = Store::new();
    let script = "echo ready; cat >/dev/null";
    let mut first = Running::start(elect(&store, "e", &["--value", "one"], script));
    assert_eq!(first.line(), "ready");
    let mut second = Running::start(elect(&store, "e", &["--value", "two"], script));
    assert!(second.stderr_line().contains("waiting for e, held by"));
    assert_eq!(leader(&store, "e")["value"], "one");
    first.close_stdin();
    assert_eq!(second.line(), "ready");
    assert_eq!(leader(&store, "e")["value"], "two");
    assert_eq!((first.code(), second.code()), (Some(0), Some(0)));
    store.assert_empty();
}

#[test]
fn a_loss_ends_the_command_and_campaigns_again() {
    let store = Store::new();
    // Reads and writes what palisade was given, also in its second term.
    let script = "exec 2>/dev/null; trap 'echo asked; exit 0' TERM; read word; echo \"$word $PALISADE_TOKEN\"; \
                  while :; do sleep 0.02; done";
    let mut running = Running::start(elect(&store, "e", &["--json"], script));
    let mut tokens = Vec::new();
    for word in ["one", "two", "three"] {
        let acquired = event(&mut running, "acquired");
        running.write(&format!("{word}\n"));
        let line = running.line();
        assert_eq!(
            line,
            format!("{word} {}", acquired["token"].as_str().unwrap())
        );
        tokens.push(line.rsplit(' ').next().unwrap().parse::<u64>().unwrap());
        assert_eq!(code(store.palisade(&["evict", "e"])), Some(0));
        assert_eq!(running.line(), "asked");
        assert_eq!(event(&mut running, "lost")["reason"], "evicted");
    }
    assert!(tokens.is_sorted() && tokens[0] < tokens[1] && tokens[1] < tokens[2]);
    event(&mut running, "acquired");
    running.signal("KILL");
    let output = running.end();
    assert_eq!(output.status.signal(), Some(9), "{output:?}");
    until("its guardian ends the command", || store.lines().is_empty());
}

#[test]
fn a_leadership_that_is_taken_away_kills_all_that_the_command_started() {
    let store = Store::new();
    let script = "trap '' TERM; sleep 60 & echo $!; echo $$; cat >/dev/null";
    let mut running = Running::start(elect(&store, "e", &[], script));
    for _ in 0..2 {
        let pids = [running.line(), running.line()];
        assert!(pids.iter().all(|pid| runs(pid)));
        assert_eq!(code(store.palisade(&["evict", "e", "--force"])), Some(0));
        until("all are gone", || !pids.iter().any(|pid| runs(pid)));
        let said = running.stderr_line();
        assert!(
            said.contains("lost e") && said.ends_with("campaigning again"),
            "{said}"
        );
    }
}

#[test]
fn a_killed_elect_leaves_nothing_running_in_a_later_term() {
    let store = Store::new();
    let script = "trap '' TERM; sleep 60 & echo $!; echo $$; cat >/dev/null";
    let mut running = Running::start(elect(&store, "e", &[], script));
    let first = [running.line(), running.line()];
    assert_eq!(code(store.palisade(&["evict", "e", "--force"])), Some(0));
    until("all are gone", || !first.iter().any(|pid| runs(pid)));
    let pids = [running.line(), running.line()];
    running.signal("KILL");
    // Its stdin stays open: a command that ends by itself leaves behind what it likes.
    until("the guardian ends them", || {
        !pids.iter().any(|pid| runs(pid))
    });
    running.end();
}

#[test]
fn once_is_76_after_a_loss() {
    let store = Store::new();
    for command in [&["--", "sh", "-c", "echo ready; sleep 60"][..], &[]] {
        let args = [&["elect", "e", "--once"][..], command].concat();
        let mut running = Running::start(store.palisade(&args));
        running.line();
        assert_eq!(code(store.palisade(&["evict", "e", "--force"])), Some(0));
        let output = running.end();
        assert_eq!(output.status.code(), Some(76), "{output:?}");
        assert!(stderr(&output).contains("lost e"), "{output:?}");
        store.assert_empty();
    }
}

#[test]
fn without_a_command_it_leads_until_a_signal() {
    let store = Store::new();
    for (signal, expected) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let mut running = Running::start(store.palisade(&["elect", "e", "--value", "v"]));
        let line = running.line();
        let token = leader(&store, "e")["token"].clone();
        assert_eq!(
            line,
            format!("leading e (token {})", token.as_str().unwrap())
        );
        running.close_stdin();
        running.signal(signal);
        let output = running.end();
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
        assert_eq!((stdout(&output), stderr(&output)), Default::default());
        store.assert_empty();
    }
    let mut running = Running::start(store.palisade(&["elect", "e", "--json"]));
    event(&mut running, "acquired");
    assert_eq!(code(store.palisade(&["evict", "e"])), Some(0));
    event(&mut running, "lost");
    event(&mut running, "acquired");
    running.signal("TERM");
    assert_eq!(event(&mut running, "released")["code"], 143);
    assert_eq!(running.end().stdout, b"");
}

#[test]
fn a_signal_is_passed_on_or_leaves_the_line() {
    let store = Store::new();
    let script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.02; done";
    let mut leads = Running::start(elect(&store, "e", &[], script));
    leads.line();
    let waits = Running::start(elect(&store, "e", &[], "echo no"));
    until("it waits", || store.waiters() == 1);
    waits.signal("TERM");
    let output = waits.end();
    assert_eq!(
        (output.status.code(), stdout(&output)),
        (Some(143), String::new())
    );
    leads.signal("TERM");
    assert_eq!(leads.code(), Some(9));
    store.assert_empty();
}

/// A signal that comes while it campaigns again is not lost.
#[test]
fn a_signal_after_a_loss_ends_it() {
    let store = Store::new();
    let script = "echo $$; exec sleep 60";
    let mut running = Running::start(elect(&store, "e", &["-q"], script));
    running.line();
    let next = Running::start(store.run("e", &[], "echo mine; sleep 60"));
    until("the next waits", || store.waiters() == 1);
    assert_eq!(code(store.palisade(&["evict", "e"])), Some(0));
    until("it campaigns again", || store.waiters() == 1);
    running.signal("TERM");
    let output = running.end();
    assert_eq!(
        (output.status.code(), stderr(&output)),
        (Some(143), String::new())
    );
    assert_eq!(store.waiters(), 0);
    drop(next);
    store.assert_empty();
}

#[test]
fn an_evicted_candidate_was_not_elected() {
    let store = Store::new();
    let _held = store.hold("e", &[]);
    let waits = Running::start(elect(&store, "e", &["--json"], "echo no"));
    until("it waits", || store.waiters() == 1);
    let id = store.lines()[0]["waiters"][0]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(code(store.palisade(&["evict", "e", "--id", &id])), Some(0));
    let output = waits.end();
    assert_eq!(output.status.code(), Some(75), "{output:?}");
    assert_eq!(json_error(&output)["code"], "not_acquired");
}

#[test]
fn a_command_that_can_not_start_ends_it() {
    let store = Store::new();
    let missing = store.palisade(&["elect", "e", "--", "./no-such-command"]);
    assert_eq!(code(missing), Some(127));
    let directory = store.palisade(&["elect", "e", "--", "/tmp"]);
    assert_eq!(code(directory), Some(126));
    store.assert_empty();
}

#[test]
fn a_killed_guardian_ends_it() {
    let store = Store::new();
    let script = "echo $PPID; echo $$; exec sleep 60";
    let mut running = Running::start(elect(&store, "e", &[], script));
    let (guardian, child) = (running.line(), running.line());
    kill(guardian.parse().unwrap(), "KILL");
    let output = running.end();
    assert_eq!(output.status.code(), Some(70), "{output:?}");
    assert!(!runs(&child));
    store.assert_empty();
}

#[test]
fn the_leader_is_shown_for_people() {
    let store = Store::new();
    let output = finish(store.palisade(&["leader", "e"]));
    assert_eq!(
        (output.status.code(), stdout(&output), stderr(&output)),
        (Some(1), "nobody leads e\n".into(), String::new())
    );
    let mut running = Running::start(store.palisade(&["elect", "e", "--value", "a\x1bb"]));
    running.line();
    let output = finish(store.palisade(&["leader", "e"]));
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(text.starts_with("a\\u{1b}b leads e: "), "{text}");
    assert!(
        text.contains(&format!("pid {}", running.process.id())),
        "{text}"
    );
}

#[test]
fn a_watch_shows_every_change() {
    let store = Store::new();
    let mut watch = Running::start(store.palisade(&["leader", "e", "--watch", "--json"]));
    let next = |watch: &mut Running| {
        let line = watch.line();
        contract::read(&line, contract::LEADER)["leader"].clone()
    };
    assert!(next(&mut watch).is_null());
    for value in ["one", "two"] {
        let mut running = Running::start(store.palisade(&["elect", "e", "--value", value]));
        running.line();
        assert_eq!(next(&mut watch)["value"], value);
        drop(running);
        assert!(next(&mut watch).is_null());
    }
    let mut plain = Running::start(store.palisade(&["leader", "e", "--watch"]));
    assert_eq!(plain.line(), "nobody leads e");
    for watch in [watch, plain] {
        watch.signal("TERM");
        assert_eq!(watch.end().status.signal(), Some(15));
    }
}
