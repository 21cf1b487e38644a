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

/// Whatever follows `palisade` in a help text is a verb that there is, with options that it has.
#[test]
fn examples_are_of_verbs_and_options_that_exist() {
    let store = Store::new();
    let parts = [
        "queue push",
        "queue work",
        "queue show",
        "fence check",
        "config show",
        "serve token",
    ];
    for verb in verbs().into_iter().chain(parts.map(str::to_owned)) {
        let help = store.soon(&format!("{verb} --help")).is(0).out();
        let (_, examples) = help.split_once("Example").unwrap();
        let lines = examples
            .lines()
            .skip(1)
            .take_while(|line| line.starts_with("  "));
        for example in lines.flat_map(|line| line.split("palisade ").skip(1)) {
            // What the shell or the command would get is not ours.
            let end = |word: &&str| !["--", "|", "||", "&&", ">"].contains(word);
            let words = example.split_whitespace().take_while(end);
            let words: Vec<_> = words
                .map(|word| word.trim_end_matches([')', ';']))
                .collect();
            let verb = words.join(" ").replace("$PALISADE_TOKEN", "1");
            store.soon(&format!("{verb} --help")).is(0);
        }
    }
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
            // What can't be written is a failure, and told.
            for args in [*args, &json] {
                let prints = store.ran(args).out() != "";
                let full = finish(in_shell("exec >/dev/full", &store.palisade(args)));
                full.is(if prints { 74 } else { *expected });
                if prints && args.starts_with("--json") {
                    assert_eq!(full.error()["code"], "output", "{args}");
                }
            }
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

/// Every way to fail has its exit code and its word, in one JSON object.
#[test]
fn errors_are_json_wherever_they_come_from() {
    let store = Store::new();
    let nobody = "redis://127.0.0.1:1?connect_timeout=1s&timeout=1s";
    let below_a_file = "file:/dev/null/store";
    for (args, code, word) in [
        ("run", 2, "invalid_argument"),
        ("run x -- true --json", 0, ""),
        ("acquire", 2, "invalid_argument"),
        ("acquire x --pid 0", 2, "invalid_argument"),
        ("acquire x --pid -1", 2, "invalid_argument"),
        ("release x --pid 2147483647", 2, "invalid_argument"),
        ("run x --ttl 1 -- true", 2, "invalid_argument"),
        ("resize x 0", 2, "invalid_argument"),
        ("resize x 4294967296", 2, "invalid_argument"),
        ("resize x -1", 2, "invalid_argument"),
        ("fence check x 0", 2, "invalid_argument"),
        ("fence check x 9223372036854775808", 2, "invalid_argument"),
        ("fence check x abc", 2, "invalid_argument"),
        ("top", 2, "invalid_argument"),
        ("guide", 2, "invalid_argument"),
        ("completions tcsh", 2, "invalid_argument"),
        ("help nothing", 2, "invalid_argument"),
        ("man nothing", 2, "invalid_argument"),
        ("bench --seconds 0", 2, "invalid_argument"),
        ("bench --count 0", 2, "invalid_argument"),
        ("bench --waiters 0", 2, "invalid_argument"),
        ("queue show q --limit -1", 2, "invalid_argument"),
        ("queue push q /nothing/there", 2, "invalid_argument"),
        ("serve --listen nowhere", 2, "invalid_argument"),
        ("serve --max-claims -1", 2, "invalid_argument"),
        ("schema mysql", 2, "invalid_argument"),
        ("evict x --id", 2, "invalid_argument"),
        ("run x -- ./nothing", 127, "command_not_found"),
        ("run x -- /dev/null", 126, "command_not_executable"),
        ("elect x -- ./nothing", 127, "command_not_found"),
        ("--url memory: run x -- true", 77, "unsupported"),
        ("--url memory: elect x", 77, "unsupported"),
        ("--url memory: queue ls", 77, "unsupported"),
        ("--url memory: fence check x 1", 77, "unsupported"),
        ("--url NOBODY run x --no-wait -- true", 69, "unreachable"),
        (
            "--url NOBODY acquire x --no-wait --pid PID",
            69,
            "unreachable",
        ),
        ("--url NOBODY ls", 69, "unreachable"),
        ("--url NOBODY show x", 69, "unreachable"),
        ("--url NOBODY leader x", 69, "unreachable"),
        ("--url NOBODY deadlocks", 69, "unreachable"),
        ("--url NOBODY evict x", 69, "unreachable"),
        ("--url NOBODY resize x 2", 69, "unreachable"),
        ("--url NOBODY fence check x 1", 69, "unreachable"),
        ("--url NOBODY doctor", 69, "unreachable"),
        ("--url NOBODY bench --seconds 0.01", 69, "unreachable"),
        ("--url NOBODY queue push q --body x", 69, "unreachable"),
        ("--url NOBODY queue ls", 69, "unreachable"),
        (
            "--url NOBODY serve --no-port --socket SOCKET",
            69,
            "unreachable",
        ),
        ("--url BELOW run x -- true", 78, "config"),
        ("--url BELOW ls", 78, "config"),
        ("--url BELOW queue ls", 78, "config"),
        ("serve --no-port --socket /dev/null/socket", 78, "config"),
        (
            "serve --no-port --socket SOCKET --access /nothing",
            78,
            "config",
        ),
        (
            "serve --no-port --socket SOCKET --audit /nothing/x",
            78,
            "config",
        ),
        ("man --out /dev/null/pages", 74, "output"),
    ] {
        let args = args
            .replace("NOBODY", nobody)
            .replace("BELOW", below_a_file);
        let args = args.replace("PID", &std::process::id().to_string());
        let args = args.replace("SOCKET", store.path("run/gateway.sock").to_str().unwrap());
        let output = store.soon(&format!("--json {args}"));
        assert!(!output.err().contains("panicked"), "{output:?}");
        if code == 0 {
            output.is(0);
            continue;
        }
        let error = output.is(code).wrote("").error();
        assert_eq!(error["code"], word, "{args}: {error}");
        assert_ne!(error["message"], "", "{args}");
        // And for people.
        let said = store.soon(&args);
        said.is(code).wrote("").says("palisade: ");
    }
    store.assert_empty();
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
