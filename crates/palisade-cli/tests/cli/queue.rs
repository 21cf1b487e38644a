//! `palisade queue` on the embedded store: input, answers, exit codes and events. What workers do
//! on every store, killed and stopped, is in the testkit (`tests/queue/command.rs`).

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;

use serde_json::Value;

use crate::contract;
use crate::support::*;
use crate::terminal::Session;

/// `palisade queue push q ARGS…` with this on stdin.
#[track_caller]
fn push(store: &Store, args: &str, body: &[u8]) -> Ran {
    let mut command = store.palisade(&format!("queue push q {args}"));
    let (out, err) = (Stdio::piped(), Stdio::piped());
    let command = command.stdin(Stdio::piped()).stdout(out).stderr(err);
    let mut child = command.spawn().unwrap();
    // What is refused before it is read may close the pipe.
    let _ = child.stdin.take().unwrap().write_all(body);
    Ran(child.wait_with_output().unwrap())
}

/// `palisade queue work q ARGS… -- sh -c SCRIPT`.
fn work(store: &Store, args: &str, script: &str) -> std::process::Command {
    let mut command = store.palisade(&format!("queue work q {args}"));
    command.args(["--", "sh", "-c", script]);
    command
}

fn listed(store: &Store) -> Vec<Value> {
    let listed = store.ran("queue show q --json");
    let listed = contract::read(&listed.out(), contract::MESSAGES);
    listed.as_array().unwrap().clone()
}

#[test]
fn whoever_only_looks_makes_no_store() {
    let store = Store::new();
    store.ran("queue ls").is(0).silent().wrote("");
    store.ran("queue ls --json").is(0).wrote("[]\n");
    for args in [
        "show q",
        "show q x",
        "show q --dead",
        "retry q --dead",
        "drop q --all",
    ] {
        store.ran(&format!("queue {args}")).is(1).silent();
        store.ran(&format!("queue {args} --json")).is(1).silent();
    }
    assert!(!store.path("store").exists());
}

#[test]
fn bad_input_is_usage_and_says_why() {
    let store = Store::new();
    for (args, text) in [
        ("push", "NAME"),
        ("push q --id @1", "begin with @"),
        ("push q --delay soon", "soon"),
        ("push q --delay 5000d", "ten years"),
        ("push q --lines --id x", "--lines"),
        ("push q no/such/file", "No such file"),
        ("push q hello", "write it after --body"),
        ("push q hello world", "--body 'hello world'"),
        ("push q hello --body hello", "--body"),
        ("push q --lines --body hello", "--body"),
        ("push q /", "Is a directory"),
        ("work q", "CMD"),
        ("work q true", "palisade queue work NAME -- CMD"),
        ("work q --parallel 0 -- true", "--parallel"),
        ("work q --parallel 257 -- true", "--parallel"),
        ("work q --attempts 0 -- true", "--attempts"),
        ("work q --ttl 999ms -- true", "at least 1s"),
        ("retry q", "IDS"),
        ("drop q", "IDS"),
        ("drop q x --all", "--all"),
        ("show q --body", "ID"),
    ] {
        let output = store.soon(&format!("queue {args}"));
        output.is(2).wrote("").says(text);
    }
    for args in [
        ["queue", "push", "a\nb"],
        ["queue", "push", ""],
        ["queue", "show", "a\u{7}"],
    ] {
        store.soon(&args).is(2);
    }
    push(&store, "", &vec![b'x'; (16 << 20) + 1])
        .is(2)
        .says("16777216 bytes");
    let short = in_shell("ulimit -n 64", &work(&store, "--parallel 64", "true"));
    finish(short).is(71).says("ulimit -n");
}

#[test]
fn an_engine_without_queues_is_refused() {
    let store = Store::new();
    for verb in [
        "push q",
        "ls",
        "show q",
        "retry q --dead",
        "work q --drain -- true",
    ] {
        let output = store.soon(&format!("--url memory: queue {verb}"));
        output.is(77).says("inside one process");
    }
    let store = Store::behind_a_gateway();
    for verb in ["push q", "ls", "work q --drain -- true"] {
        store
            .soon(&format!("queue {verb}"))
            .is(77)
            .says("no work queues");
    }
}

#[test]
fn answers_are_documents() {
    let store = Store::new();
    let pushed = push(&store, "--json --id one --key k", b"hello");
    assert_eq!(pushed.is(0).json(contract::PUSHED)["duplicate"], false);
    let pushed = push(&store, "--json --id one", b"hello");
    assert_eq!(
        pushed.is(0).silent().json(contract::PUSHED)["duplicate"],
        true
    );
    push(&store, "--lines --json", b"a\nb\n\nc")
        .is(0)
        .wrote("{\"pushed\":4,\"queue\":\"q\"}\n");
    push(&store, "--lines", b"").is(0).wrote("0 messages\n");
    push(&store, "--delay 1h --id bytes", b"\xff\0")
        .is(0)
        .wrote("bytes\n");
    let queues = store.ran("queue ls --json").is(0).json(contract::QUEUES);
    assert_eq!(
        (&queues[0]["ready"], &queues[0]["delayed"]),
        (&5.into(), &1.into())
    );
    assert_eq!(listed(&store).len(), 6);
    let one = store
        .ran("queue show q one --json")
        .is(0)
        .json(contract::MESSAGE_AND_BODY);
    assert_eq!((&one["body"], &one["key"]), (&"hello".into(), &"k".into()));
    let bytes = store
        .ran("queue show q bytes --json")
        .is(0)
        .json(contract::MESSAGE_AND_BODY);
    assert_eq!(
        (&bytes["body"], &bytes["body_base64"]),
        (&Value::Null, &"/wA=".into())
    );
    assert_eq!(
        store.ran("queue show q bytes --body").is(0).stdout,
        b"\xff\0"
    );
    let text = store.ran("queue show q bytes").is(0).out();
    assert!(
        text.contains("delayed") && text.contains("not UTF-8 text"),
        "{text}"
    );
    let text = store.ran("queue ls").is(0).out();
    assert!(text.contains("READY") && text.contains("q "), "{text}");
    assert_eq!(
        store
            .ran("queue show q --limit 2")
            .is(0)
            .out()
            .lines()
            .count(),
        3
    );
    store
        .ran("queue retry q bytes --json")
        .is(0)
        .wrote("{\"queue\":\"q\",\"retried\":1}\n");
    store
        .ran("queue drop q one nothing --json")
        .is(0)
        .wrote("{\"dropped\":1,\"queue\":\"q\"}\n");
    store
        .ran("queue drop q nothing")
        .is(1)
        .wrote("no such message in q\n");
    store
        .ran("queue drop q --all")
        .is(0)
        .wrote("5 messages removed\n");
}

#[test]
fn a_message_can_be_an_argument_and_is_asked_for_at_a_terminal() {
    let store = Store::new();
    for (id, body) in [("text", &b"-a \xff"[..]), ("nothing", b"")] {
        let mut command = store.palisade(&format!("queue push q --id {id} --body"));
        command.arg(OsStr::from_bytes(body));
        finish(command).is(0).wrote(&format!("{id}\n"));
        let shown = store.ran(&format!("queue show q {id} --body"));
        assert_eq!(shown.is(0).stdout, body);
    }
    let mut session = Session::start(&store, "$PALISADE queue push q --id typed");
    session.see("Ctrl-D");
    session.press("hello\n\x04");
    session.see("typed");
    assert_eq!(session.code(), Some(0));
    store.ran("queue show q typed --body").wrote("hello\n");
}

#[test]
fn events_of_a_worker_are_json_lines() {
    let store = Store::new();
    push(&store, "--key k", b"true").is(0);
    push(&store, "", b"exit 7").is(0);
    let worked = finish(work(
        &store,
        "--drain --json --attempts 1",
        "eval \"$(cat)\"",
    ));
    let mut seen = Vec::new();
    for line in worked.is(1).wrote("").err().lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        let word = event["event"].as_str().unwrap().to_owned();
        let event = contract::read(line, contract::queue_event(&word));
        if word == "failed" {
            assert_eq!((&event["code"], &event["dead"]), (&7.into(), &true.into()));
        }
        seen.push(word);
    }
    assert_eq!(seen, ["claimed", "done", "claimed", "failed", "left"]);
    finish(work(&store, "--drain --quiet", "true"))
        .is(1)
        .silent();
}

#[test]
fn a_command_that_cant_be_started_leaves_its_message_untried() {
    let store = Store::new();
    push(&store, "--id it", b"x").is(0);
    for (command, code) in [("./none", 127), ("/dev/null", 126)] {
        store
            .ran(&format!("queue work q -- {command}"))
            .is(code)
            .says(command);
        let listed = listed(&store);
        let told = (&listed[0]["state"], &listed[0]["attempts"]);
        assert_eq!(told, (&"ready".into(), &0.into()));
    }
}

#[test]
fn a_message_can_be_large_and_need_not_be_read() {
    let store = Store::new();
    let body: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    push(&store, "", &body).is(0);
    let out = store.path("out");
    let script = format!("cat >{}", out.display());
    finish(work(&store, "--drain", &script)).is(0).silent();
    assert!(std::fs::read(out).unwrap() == body);
    push(&store, "", &body).is(0);
    finish(work(&store, "--drain", "true")).is(0).silent();
}

#[test]
fn a_message_that_an_operator_drops_ends_its_command() {
    let store = Store::new();
    push(&store, "--id it", b"x").is(0);
    let script = "trap '' TERM; echo $$; while :; do sleep 0.02; done";
    let mut worker = Running::start(work(&store, "--ttl 2s", script));
    let pid = worker.line();
    store.ran("queue drop q it").is(1);
    assert_eq!(listed(&store)[0]["state"], "claimed");
    store.ran("queue drop q it --force").is(0);
    until("the command ends", || !runs(&pid));
    worker.signal("TERM");
    worker.end().is(0).says("lost message it");
}

#[test]
fn a_killed_guardian_ends_the_work_and_all_that_its_command_started() {
    let store = Store::new();
    push(&store, "--lines", b"stubborn\nquick").is(0);
    let gate = store.path("gate");
    let script = format!(
        "if [ $(cat) = quick ]; then echo quick; while [ ! -e {} ]; do sleep 0.02; done; else \
         trap '' TERM; setsid sh -c 'while :; do sleep 0.02; done' & echo $$ $!; \
         while :; do sleep 0.02; done; fi",
        gate.display()
    );
    let mut worker = Running::start(work(&store, "--parallel 2", &script));
    let mut lines = [worker.line(), worker.line()];
    lines.sort();
    let (command, orphan) = lines[0].split_once(' ').unwrap();
    let guardian = std::fs::read_to_string(format!("/proc/{command}/status")).unwrap();
    let guardian = guardian
        .lines()
        .find_map(|line| line.strip_prefix("PPid:\t"));
    kill(guardian.unwrap().parse().unwrap(), "KILL");
    until("its command ends", || !runs(command));
    let stubborn = || {
        let all = listed(&store);
        let claimed = all.iter().filter(|one| one["state"] == "claimed");
        claimed.count()
    };
    assert_eq!(stubborn(), 2, "it is kept while something of it may run");
    std::fs::write(&gate, "").unwrap();
    worker.end().is(70).says("guardian");
    assert!(!runs(orphan));
    let left = listed(&store);
    assert_eq!(left.len(), 1, "the other command ended by itself");
    assert_eq!(
        (&left[0]["state"], &left[0]["attempts"]),
        (&"ready".into(), &1.into())
    );
}

#[test]
fn a_worker_waits_for_messages_and_its_commands_hear_signals_of_their_own() {
    let store = Store::new();
    push(&store, "", b"x").is(0);
    let script = "trap 'echo heard; exit 0' USR1; echo ready; while :; do sleep 0.02; done";
    let mut worker = Running::start(work(&store, "", script));
    for _ in 0..2 {
        assert_eq!(worker.line(), "ready");
        worker.signal("USR1");
        assert_eq!(worker.line(), "heard");
        push(&store, "", b"y").is(0);
    }
    assert_eq!(worker.line(), "ready");
    worker.signal("USR1");
    assert_eq!(worker.line(), "heard");
    until("all is done", || listed(&store).is_empty());
    worker.signal("TERM");
    worker.end().is(0);
}

#[test]
fn an_unreachable_engine_is_waited_for_until_a_signal() {
    let store = Store::new();
    let url = "redis://127.0.0.1:1/";
    let mut command = work(&store, "", "true");
    command.env("PALISADE_URL", url);
    let mut worker = Running::start(command);
    assert!(worker.stderr_line().contains("waiting for the engine"));
    worker.signal("TERM");
    assert_eq!(worker.code(), Some(0));
    store.soon(&format!("--url {url} queue push q")).is(69);
}

#[test]
fn a_terminal_shows_progress() {
    let store = Store::new();
    push(&store, "--lines", b"1\n2\n3").is(0);
    let line = "$PALISADE queue work q --drain -- sh -c '[ $(cat) != 2 ]'; echo code-$?";
    let mut session = Session::start(&store, line);
    session.see("failed (exit code 1), retried in");
    session.see("q: 2 done, 1 failed, 0 running");
    session.see("code-1");
    assert_eq!(session.code(), Some(0));
}
