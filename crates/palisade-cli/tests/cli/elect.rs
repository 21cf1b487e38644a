//! `elect` and `leader`.

use std::os::unix::process::ExitStatusExt;

use serde_json::Value;

use crate::contract;
use crate::support::*;

/// `palisade elect e ARGS… -- sh -c SCRIPT`.
fn elect(store: &Store, args: &[&str], script: &str) -> Running {
    let mut command = store.palisade("elect e");
    command.args(args).args(["--", "sh", "-c", script]);
    Running::start(command)
}

/// Who leads, by `leader --json`.
fn leader(store: &Store) -> Value {
    let output = store.ran("leader e --json");
    let leader = output.json(contract::LEADER)["leader"].clone();
    output.is(i32::from(leader.is_null()));
    leader
}

/// The next event on stderr, which must be this one.
#[track_caller]
fn event(running: &mut Running, word: &str) -> Value {
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
    let mut running = elect(&store, &["--value", "here:1"], script);
    let line = running.line();
    let leads = leader(&store);
    assert_eq!(leads["value"], "here:1");
    assert_eq!(leads["pid"], running.process.id());
    let text = |key: &str| leads[key].as_str().unwrap();
    assert_eq!(
        line,
        format!("e {} {} {}", text("token"), text("owner"), store.url())
    );
    running.close_stdin();
    running.end().is(7).silent().wrote("");
    assert!(leader(&store).is_null());
    store.assert_empty();
}

#[test]
fn only_one_leads_and_the_next_follows() {
    let store = Store::new();
    let script = "echo ready; cat >/dev/null";
    let mut first = elect(&store, &["--value", "one"], script);
    assert_eq!(first.line(), "ready");
    let mut second = elect(&store, &["--value", "two"], script);
    assert!(second.stderr_line().contains("waiting for e, held by"));
    assert_eq!(leader(&store)["value"], "one");
    first.close_stdin();
    assert_eq!(second.line(), "ready");
    assert_eq!(leader(&store)["value"], "two");
    assert_eq!((first.code(), second.code()), (Some(0), Some(0)));
    store.assert_empty();
}

#[test]
fn a_loss_ends_the_command_and_campaigns_again() {
    let store = Store::new();
    // Reads and writes what palisade was given, also in its second term.
    let script = "exec 2>/dev/null; trap 'echo asked; exit 0' TERM; read word; \
                  echo \"$word $PALISADE_TOKEN\"; while :; do sleep 0.02; done";
    let mut running = elect(&store, &["--json"], script);
    let mut tokens: Vec<u64> = Vec::new();
    for word in ["one", "two", "three"] {
        let token = event(&mut running, "acquired")["token"].clone();
        running.write(&format!("{word}\n"));
        let token = token.as_str().unwrap();
        assert_eq!(running.line(), format!("{word} {token}"));
        tokens.push(token.parse().unwrap());
        store.ran("evict e").is(0);
        assert_eq!(running.line(), "asked");
        assert_eq!(event(&mut running, "lost")["reason"], "evicted");
    }
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
    event(&mut running, "acquired");
    running.signal("KILL");
    assert_eq!(running.end().status.signal(), Some(9));
    until("its guardian ends the command", || store.lines().is_empty());
}

/// Also in a later term, and also when palisade is killed in it.
#[test]
fn a_leadership_that_is_taken_away_kills_all_that_the_command_started() {
    let store = Store::new();
    let script = "trap '' TERM; sleep 60 & echo $!; echo $$; cat >/dev/null";
    let mut running = elect(&store, &[], script);
    let gone = |pids: &[String]| until("all are gone", || !pids.iter().any(|pid| runs(pid)));
    for _ in 0..2 {
        let pids = [running.line(), running.line()];
        assert!(pids.iter().all(|pid| runs(pid)));
        store.ran("evict e --force").is(0);
        gone(&pids);
        let said = running.stderr_line();
        assert!(
            said.contains("lost e") && said.ends_with("campaigning again"),
            "{said}"
        );
    }
    let pids = [running.line(), running.line()];
    running.signal("KILL");
    // Its stdin stays open: a command that ends by itself may leave processes behind.
    gone(&pids);
    running.end();
}

#[test]
fn once_is_76_after_a_loss() {
    let store = Store::new();
    for command in [&["--", "sh", "-c", "echo ready; sleep 60"][..], &[]] {
        let args = [&["elect", "e", "--once"][..], command].concat();
        let mut running = Running::start(store.palisade(&args));
        running.line();
        store.ran("evict e --force").is(0);
        running.end().is(76).says("lost e");
        store.assert_empty();
    }
}

#[test]
fn without_a_command_it_leads_until_a_signal() {
    let store = Store::new();
    for (signal, expected) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let mut running = Running::start(store.palisade("elect e --value v"));
        let line = running.line();
        let token = leader(&store)["token"].clone();
        assert_eq!(
            line,
            format!("leading e (token {})", token.as_str().unwrap())
        );
        running.close_stdin();
        running.signal(signal);
        running.end().is(expected).silent().wrote("");
        store.assert_empty();
    }
    let mut running = Running::start(store.palisade("elect e --json"));
    event(&mut running, "acquired");
    store.ran("evict e").is(0);
    event(&mut running, "lost");
    event(&mut running, "acquired");
    running.signal("TERM");
    assert_eq!(event(&mut running, "released")["code"], 143);
    running.end().is(143).wrote("");
}

#[test]
fn a_signal_is_passed_on_or_leaves_the_line() {
    let store = Store::new();
    let script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.02; done";
    let mut leads = elect(&store, &[], script);
    leads.line();
    let waits = elect(&store, &[], "echo no");
    until("it waits", || store.waiters() == 1);
    waits.signal("TERM");
    waits.end().is(143).wrote("");
    leads.signal("TERM");
    assert_eq!(leads.code(), Some(9));
    store.assert_empty();
}

/// A signal that comes while it campaigns again is not lost.
#[test]
fn a_signal_after_a_loss_ends_it() {
    let store = Store::new();
    let mut running = elect(&store, &["-q"], "echo $$; exec sleep 60");
    running.line();
    let next = Running::start(store.run("e", &[], "echo mine; sleep 60"));
    until("the next waits", || store.waiters() == 1);
    store.ran("evict e").is(0);
    until("it campaigns again", || store.waiters() == 1);
    running.signal("TERM");
    running.end().is(143).silent();
    assert_eq!(store.waiters(), 0);
    drop(next);
    store.assert_empty();
}

#[test]
fn a_command_that_can_not_start_or_whose_guardian_is_killed_ends_it() {
    let store = Store::new();
    store.ran("elect e -- ./no-such-command").is(127);
    store.ran("elect e -- /tmp").is(126);
    let mut running = elect(&store, &[], "echo $PPID; echo $$; exec sleep 60");
    let (guardian, child) = (running.line(), running.line());
    kill(guardian.parse().unwrap(), "KILL");
    running.end().is(70);
    assert!(!runs(&child));
    store.assert_empty();
}

#[test]
fn the_leader_is_shown_for_people() {
    let store = Store::new();
    store
        .ran("leader e")
        .is(1)
        .silent()
        .wrote("nobody leads e\n");
    let mut running = Running::start(store.palisade("elect e --value a\x1bb"));
    running.line();
    let text = store.ran("leader e").is(0).out();
    assert!(text.starts_with("a\\u{1b}b leads e: "), "{text}");
    assert!(
        text.contains(&format!("pid {}", running.process.id())),
        "{text}"
    );
}

#[test]
fn a_watch_shows_every_change() {
    let store = Store::new();
    let mut watch = Running::start(store.palisade("leader e --watch --json"));
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
    let mut plain = Running::start(store.palisade("leader e --watch"));
    assert_eq!(plain.line(), "nobody leads e");
}
