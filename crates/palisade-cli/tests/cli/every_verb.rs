//! Rules for every verb. The verbs are read from `--help`, so a new one is tested automatically;
//! its line in `SAMPLES` tests more.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::ExitStatusExt;

use serde_json::Value;

use crate::contract;
use crate::support::*;

/// A use of each verb that does its work, and the code that it ends with on an empty store.
const SAMPLES: &[(&str, i32)] = &[
    ("run x -- true", 0),
    ("elect x -- true", 0),
    ("leader x", 1),
    ("ls", 0),
    ("show x", 1),
    ("deadlocks", 0),
    ("evict x", 1),
    ("fence check x 1", 0),
    ("config show", 0),
    ("config path", 0),
    ("completions bash", 0),
    ("man", 0),
    ("doctor", 0),
    ("guide --need permits", 0),
    ("schema postgres", 0),
    ("queue push q", 0),
    ("queue ls", 0),
    ("queue show q", 1),
    ("queue retry q --dead", 1),
    ("queue drop q --all", 1),
    ("queue work q --drain -- true", 0),
];

/// Uses that run until they are ended.
const ENDLESS: &[&str] = &[
    "run x -- sleep 60",
    "elect x -- sleep 60",
    "elect x",
    "leader x --watch",
    "ls --watch",
    "deadlocks --watch",
    "ls --watch --json",
];

fn runs_a_command(args: &str) -> bool {
    ["run", "elect", "queue work"]
        .iter()
        .any(|verb| args.starts_with(verb))
}

/// All verbs.
pub(crate) fn verbs() -> Vec<String> {
    let help = Store::new().ran("--help").out();
    let (_, list) = help.split_once("Commands:\n").unwrap();
    let (list, _) = list.split_once("\n\n").unwrap();
    let verbs = list.lines().filter(|line| !line.starts_with("   "));
    let verbs: Vec<_> = verbs
        .filter_map(|line| Some(line.split_whitespace().next()?.to_owned()))
        .collect();
    assert!(verbs.len() > 10, "{verbs:?}");
    verbs
}

#[test]
fn help_has_examples() {
    let store = Store::new();
    for verb in verbs() {
        for flag in ["--help", "-h"] {
            let output = store.soon(&[&verb, flag]);
            let text = output.is(0).out();
            let (_, examples) = text.split_once("Example").expect(&verb);
            assert!(examples.contains(&format!("palisade {verb}")), "{text}");
            assert!(!text.contains("not for people"), "{text}");
        }
        into_closed_pipe(store.palisade(&[&verb, "--help"]))
            .is(0)
            .silent();
    }
    assert!(!store.path("store").exists(), "none of this opened a store");
}

#[test]
fn an_unknown_flag_is_usage() {
    let store = Store::new();
    for verb in verbs() {
        let output = store.soon(&[&verb, "--frobnicate"]);
        assert!(output.is(2).err().starts_with("palisade: "), "{output:?}");
        let output = store.soon(&[&verb, "--frobnicate", "--json"]);
        output.is(2).wrote("").error();
    }
}

#[test]
fn a_misspelt_verb_is_seen_through() {
    let store = Store::new();
    for verb in verbs().into_iter().filter(|verb| verb.len() > 3) {
        let mut letters: Vec<_> = verb.chars().collect();
        letters.swap(1, 2);
        let misspelt: String = letters.into_iter().collect();
        store.soon(&[misspelt]).is(2).says(&format!("'{verb}'"));
    }
}

/// Bytes that are not UTF-8 are refused where text is needed, and never cause a panic.
#[test]
fn arguments_that_are_no_text_are_usage() {
    let store = Store::new();
    let bytes = || OsString::from_vec(b"a\xffb".to_vec());
    let with_bytes = |args: &str| {
        let mut command = store.palisade(args);
        command.arg(bytes());
        finish_soon(command)
    };
    for verb in verbs() {
        with_bytes(&verb).is(2);
        with_bytes(&format!("{verb} --json --url")).is(2).error();
    }
    for args in ["elect x --value", "bench --scenario", "guide --need"] {
        with_bytes(args).is(2);
    }
    for verb in ["run", "elect"] {
        let output = with_bytes(&format!("{verb} x -- printf %s"));
        assert_eq!(output.stdout, b"a\xffb", "a command takes any bytes");
    }
    let mut command = store.palisade("ls");
    command.env("PALISADE_URL", bytes());
    finish(command).is(78);
}

#[test]
fn samples_end_as_they_should() {
    for (args, expected) in SAMPLES {
        let store = Store::new();
        store.ran(*args).is(*expected).silent();
        // With stdin closed, not just empty.
        finish(in_shell("exec <&-", &store.palisade(*args))).is(*expected);
        // Into a closed pipe the exit code is 0, even if the answer is "no".
        if !runs_a_command(args) {
            into_closed_pipe(store.palisade(*args)).is(0).silent();
            let json = format!("--json {args}");
            into_closed_pipe(store.palisade(&json)).is(0).silent();
        }
        store.assert_empty();
    }
}

#[test]
fn json_is_one_document() {
    for (args, expected) in SAMPLES {
        let output = Store::new().ran(&format!("--json {args}"));
        output.is(*expected);
        if runs_a_command(args) {
            output.wrote("");
            for line in output.err().lines() {
                let event: Value = serde_json::from_str(line).unwrap();
                contract::read(line, contract::event(event["event"].as_str().unwrap()));
            }
        } else {
            assert_eq!(output.silent().out().lines().count(), 1, "{args:?}");
            serde_json::from_slice::<Value>(&output.stdout).unwrap();
        }
    }
}

#[test]
fn a_bad_url_is_78_for_all_that_ask_an_engine() {
    let store = Store::new();
    let url = "nosuch://me:hunter2@host/0?password=hunter2";
    let silent = ["config", "completions", "man", "guide", "schema"];
    for (args, _) in SAMPLES {
        if silent.iter().any(|verb| args.starts_with(verb)) {
            continue;
        }
        for json in ["", "--json"] {
            let output = store.soon(&format!("--url {url} {json} {args}"));
            assert!(!output.is(78).err().contains("hunter2"), "{output:?}");
        }
    }
}

#[test]
fn a_signal_ends_those_that_go_on() {
    for args in ENDLESS {
        for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
            let store = Store::new();
            let watched = store.hold("other", &[]);
            let mut running = Running::start(store.palisade(*args));
            if args.ends_with("60") {
                until("it holds", || store.lines().len() == 2);
                // The command, which has just been started, must have its own signals.
                until("it runs", || child_runs(running.process.id()));
            } else {
                running.line();
            }
            running.signal(signal);
            let output = running.end();
            let status = output.silent().status;
            let seen = status.signal().or(status.code().map(|code| code - 128));
            assert_eq!(seen, Some(number), "{args:?} {output:?}");
            drop(watched);
            store.assert_empty();
        }
    }
}

/// Whether `sleep` runs below this process.
fn child_runs(pid: u32) -> bool {
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
