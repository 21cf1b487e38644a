//! `acquire` and `release`: a lock that spans the commands of a script.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::contract::{self, HELD, RELEASED};
use crate::redis::Redis;
use crate::support::*;
use crate::terminal::Session;

/// The common shells that are installed here.
fn shells() -> Vec<&'static str> {
    let here = |shell: &&str| Command::new(shell).args(["-c", "true"]).status().is_ok();
    let shells: Vec<_> = ["sh", "bash", "dash"].into_iter().filter(here).collect();
    assert!(!shells.is_empty());
    shells
}

/// A script that finds `palisade` and the store as a user's does.
pub(crate) fn script(store: &Store, shell: &str, text: &str) -> Command {
    let bin = PathBuf::from(env!("CARGO_BIN_EXE_palisade"));
    let mut path = bin.parent().unwrap().as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap());
    std::fs::create_dir_all(store.path("run")).unwrap();
    let mut command = Command::new(shell);
    command
        .args(["-c", text])
        .env("PATH", path)
        .env("PALISADE_URL", store.url())
        .env("PALISADE_CONFIG", "/dev/null")
        .env("XDG_RUNTIME_DIR", store.path("run"))
        .env_remove("PALISADE_LOCK")
        .current_dir(store.path(""))
        .stdin(Stdio::null());
    command
}

/// Runs a script of `sh` to its end.
#[track_caller]
fn sh(store: &Store, text: &str) -> Ran {
    finish(script(store, "sh", text))
}

/// Nothing is held, and no socket of a holder is left.
#[track_caller]
fn assert_nothing_left(store: &Store) {
    until("the locks are free", || store.lines().is_empty());
    let sockets = || {
        std::fs::read_dir(store.path("run/palisade"))
            .unwrap()
            .count()
    };
    until("the sockets are gone", || sockets() == 0);
}

fn holder_pid(store: &Store) -> u32 {
    let lines = store.lines();
    let pid = lines[0]["holders"][0]["pid"].as_u64().unwrap();
    u32::try_from(pid).unwrap()
}

#[test]
fn a_lock_spans_commands_however_it_is_taken() {
    let forms = [
        "palisade acquire x >token || exit 9",
        "if palisade acquire x >token; then :; else exit 9; fi",
        "if ! palisade acquire x >token; then exit 9; fi",
        "palisade acquire x >token && :",
        "token=$(palisade acquire x) || exit 9; echo \"$token\" >token",
        "token=$(palisade acquire x || echo no; true); echo \"$token\" >token",
        "token=`palisade acquire x`; echo \"$token\" >token",
        "take() { palisade acquire \"$1\" >token; }; take x || exit 9",
        "palisade acquire x | cat >token",
        "{ palisade acquire x; } | { cat >token; }",
        "( palisade acquire x >token ) || exit 9",
        "( ( palisade acquire x; true ) | cat ) >token",
        "for n in 1; do palisade acquire x >token; done",
        "timeout 20 palisade acquire x >token || exit 9",
        "eval 'palisade acquire x >token' || exit 9",
        "palisade acquire x --pid $$ >token || exit 9",
        "palisade acquire x >token & wait $!",
        "set -eu; exec 9>other; palisade acquire x >token",
    ];
    for shell in shells() {
        for form in forms {
            let store = Store::new();
            let text = format!(
                "{form}\n\
                 cat token; echo shell $$\n\
                 palisade run x --no-wait -q -- true; echo other $?\n\
                 true\n\
                 palisade show x --json\n\
                 palisade release x; echo release $?\n\
                 palisade run x --no-wait -q -- true; echo other $?"
            );
            let text = text.replace("set -eu; ", "");
            let output = finish(script(&store, shell, &text));
            let said = output.out();
            let lines: Vec<_> = said.lines().collect();
            assert_eq!(lines.len(), 6, "{shell}: {form}: {output:?}");
            let shown = contract::read(lines[3], contract::LINE);
            assert_eq!(lines[0], shown["holders"][0]["token"], "{shell}: {form}");
            assert_eq!(lines[2], "other 75", "{shell}: {form}: {output:?}");
            assert_eq!(lines[4], "release 0", "{shell}: {form}: {output:?}");
            assert_eq!(lines[5], "other 0", "{shell}: {form}: {output:?}");
            assert_nothing_left(&store);
        }
    }
}

#[test]
fn the_end_of_the_shell_releases_whatever_ends_it() {
    for shell in shells() {
        for (signal, form) in [
            ("KILL", "palisade acquire x -q"),
            ("KILL", "t=$(palisade acquire x)"),
            ("TERM", "palisade acquire x | cat >/dev/null"),
            ("HUP", "( palisade acquire x -q; true )"),
        ] {
            let store = Store::new();
            let text = format!("{form}; echo ready; read line");
            let mut running = Running::start(script(&store, shell, &text));
            assert_eq!(running.line(), "ready");
            assert_eq!(store.lines().len(), 1, "{shell}: {form}");
            running.signal(signal);
            assert_nothing_left(&store);
        }
        // Also if it just ends, even in its last command.
        let store = Store::new();
        let text = "palisade acquire x -q && palisade acquire y -q && palisade release y";
        let output = finish(script(&store, shell, text));
        output.is(0).silent();
        assert_nothing_left(&store);
    }
}

/// A worker that was forked by a program is not that program.
#[test]
fn a_fork_that_is_no_subshell_is_followed_itself() {
    if Command::new("perl").args(["-e", "1"]).status().is_err() {
        return;
    }
    let store = Store::new();
    let worker = "$| = 1; if (my $worker = fork) { waitpid $worker, 0; print \"over\\n\"; <STDIN> } \
                  else { system \"palisade\", \"acquire\", \"-q\", \"x\"; print \"ready\\n\"; <STDIN> }";
    let text = format!("perl -e '{worker}'; true");
    let mut running = Running::start(script(&store, "sh", &text));
    assert_eq!(running.line(), "ready");
    assert_eq!(store.lines().len(), 1);
    running.write("go\n");
    assert_eq!(running.line(), "over");
    assert_nothing_left(&store);
}

#[test]
fn release_follows_the_shell_also_in_its_last_command() {
    for shell in shells() {
        let store = Store::new();
        let text = "palisade acquire x -q; exec palisade release x";
        let output = finish(script(&store, shell, text));
        assert_eq!(output.status.code(), Some(0), "{shell} {output:?}");
        assert_nothing_left(&store);
    }
}

#[test]
fn a_shell_has_a_lock_once_and_may_have_others() {
    let store = Store::new();
    let other = format!("file:{}", store.path("other").display());
    let text = format!(
        "palisade acquire x -q; palisade acquire x --no-wait; echo again $?\n\
         palisade acquire y -q; echo y $?\n\
         palisade acquire x -q --url {other}; echo elsewhere $?\n\
         palisade release x --url {other}; echo released $?\n\
         palisade release x; echo released $?\n\
         palisade release x; echo no $?\n\
         for n in 1 2 3 4 5 6; do palisade acquire x -q && palisade release x || echo $n $?; done\n\
         echo anew $?"
    );
    let output = sh(&store, &text);
    let said = "again 2\ny 0\nelsewhere 0\nreleased 0\nreleased 0\nno 1\nanew 0\n";
    assert_eq!(output.out(), said, "{output:?}");
    let errors = output.err();
    assert!(errors.contains("has acquired x already"), "{errors}");
    assert!(errors.contains("x is not held for this shell"), "{errors}");
    assert_nothing_left(&store);
}

#[test]
fn another_shell_can_not_release_it() {
    let store = Store::new();
    let text = "palisade acquire x -q; sh -c 'palisade release x; echo child $?'; \
                sh -c \"palisade release x --pid $$; echo told \\$?\"; true";
    sh(&store, text).wrote("child 1\ntold 0\n");
}

/// Steps that are separate shells below one process.
#[test]
fn steps_hold_it_together_by_the_process_above_them() {
    let store = Store::new();
    let text = "sh -c 'palisade acquire -q x --pid $PPID; true'\n\
                palisade show x >/dev/null; echo held $?\n\
                sh -c 'palisade release x --pid $PPID; echo released $?; true'";
    sh(&store, text).wrote("held 0\nreleased 0\n");
    assert_nothing_left(&store);
}

/// A shell would wait for its own end.
#[test]
fn what_a_shell_has_acquired_is_not_waited_for_below_it() {
    let store = Store::new();
    let text = "palisade acquire -q x\n\
                palisade run x -- true; echo $?\n\
                sh -c 'palisade run x -- true; echo $?; palisade acquire x; echo $?; true'\n\
                palisade run x --no-wait -q -- true; echo $?\n\
                palisade run y -- true; echo $?";
    sh(&store, text).wrote("77\n77\n77\n75\n0\n");
    // The lock of another shell can be waited for.
    let mut running = Running::start(script(&store, "sh", "palisade acquire x; read line"));
    running.line();
    let other = Running::start(store.palisade("run x -- true"));
    until("it waits", || store.waiters() == 1);
    running.write("go\n");
    assert_eq!(other.code(), Some(0));
}

/// A process of this user connects to the holder, and is stopped or hangs.
#[test]
fn silent_connections_hold_up_no_release() {
    let store = Store::new();
    let text = "palisade acquire x; read line; palisade release x; echo $?";
    let mut running = Running::start(script(&store, "sh", text));
    running.line();
    let sockets = std::fs::read_dir(store.path("run/palisade")).unwrap();
    let sockets: Vec<_> = sockets.map(|socket| socket.unwrap().path()).collect();
    let silent = || UnixStream::connect(&sockets[0]).unwrap();
    let mut silent: Vec<UnixStream> = (0..20).map(|_| silent()).collect();
    // One of them began to say something.
    silent[7].write_all(b"rel").unwrap();
    let begun = Instant::now();
    running.write("go\n");
    assert_eq!(running.line(), "0");
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    drop(silent);
    assert_nothing_left(&store);
}

#[test]
fn json_says_who_holds_it_and_for_whom() {
    let store = Store::new();
    let text = "palisade acquire x --json --permits 2/3; echo $$; palisade release x --json; \
                palisade release x --json; true";
    let output = sh(&store, text);
    let said = output.out();
    let lines: Vec<_> = said.lines().collect();
    let held = contract::read(lines[0], HELD);
    assert_eq!(
        (&held["name"], held["shell"].to_string()),
        (&"x".into(), lines[1].into())
    );
    assert_ne!(held["holder"], held["shell"]);
    assert_eq!(contract::read(lines[2], RELEASED)["released"], true);
    assert_eq!(contract::read(lines[3], RELEASED)["released"], false);
    for line in output.err().lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        contract::read(line, contract::event(event["event"].as_str().unwrap()));
    }
}

#[test]
fn what_can_not_be_acquired_is_said_at_once_with_the_codes_of_run() {
    let store = Store::new();
    let held = store.hold("x", &[]);
    let owner = store.lines()[0]["holders"][0]["owner"].clone();
    let owner = owner.as_str().unwrap();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = closed.local_addr().unwrap();
    drop(closed);
    for (args, expected, word) in [
        ("x --no-wait", 75, &*format!("x is held by {owner} on ")),
        (
            "x --wait 200ms",
            75,
            &format!("not free within 200ms; it is held by {owner} on "),
        ),
        ("x --no-wait -E 9", 9, ""),
        ("x --no-wait --url nosuch://me:hunter2@h", 78, "nosuch"),
        ("y --ttl 1ms", 2, "too short"),
        ("y --pid 2147483647", 2, "no process"),
        ("y --permits 2/1", 2, "permits"),
        (&format!("y --no-wait --url redis://{address}"), 69, ""),
    ] {
        let output = sh(&store, &format!("palisade acquire {args}; echo $?; true"));
        output.wrote(&format!("{expected}\n")).says(word);
        assert!(!output.err().contains("hunter2"), "{output:?}");
        sh(&store, &format!("palisade acquire {args} --json; true"))
            .wrote("")
            .error();
    }
    sh(&store, "palisade acquire x -q --no-wait; echo $?; true")
        .wrote("75\n")
        .silent();
    drop(held);
    assert_nothing_left(&store);
}

/// A lock that no caller learned of is not kept.
#[test]
fn a_token_that_can_not_be_printed_is_a_failure() {
    let store = Store::new();
    let text = "palisade acquire x; echo $? >code; true";
    let full = format!("exec >/dev/full; {text}");
    for text in [text, &full] {
        let output = into_closed_pipe(script(&store, "sh", text));
        let code = std::fs::read_to_string(store.path("code")).unwrap();
        assert_eq!(code, "74\n", "{output:?}");
        output.says("can't write");
        assert_nothing_left(&store);
    }
    // Nothing is printed, so nothing fails.
    let quiet = text.replace("acquire", "acquire -q");
    into_closed_pipe(script(&store, "sh", &quiet));
    assert_eq!(std::fs::read_to_string(store.path("code")).unwrap(), "0\n");
}

/// A waiting `acquire` that is ended leaves the line, and no holder acquires for it later.
#[test]
fn a_caller_that_is_ended_leaves_nothing() {
    for signal in ["INT", "TERM", "KILL"] {
        let store = Store::new();
        let held = store.hold("x", &[]);
        let text = "palisade acquire x 2>/dev/null & echo $!; wait; read line";
        let mut running = Running::start(script(&store, "bash", text));
        let caller: u32 = running.line().parse().unwrap();
        until("it waits", || store.waiters() == 1);
        // A shell makes its background commands ignore INT.
        kill(caller, if signal == "INT" { "HUP" } else { signal });
        until("it left the line", || store.waiters() == 0);
        drop(held);
        assert_nothing_left(&store);
    }
    // The shell ends, and with it the waiting.
    let store = Store::new();
    let held = store.hold("x", &[]);
    let text = "palisade acquire x 2>/dev/null & echo; read line";
    let mut running = Running::start(script(&store, "sh", text));
    running.line();
    until("it waits", || store.waiters() == 1);
    running.signal("KILL");
    until("it left the line", || store.waiters() == 0);
    drop(held);
    assert_nothing_left(&store);
}

#[test]
fn the_holder_keeps_nothing_of_the_script_but_its_stderr() {
    let store = Store::new();
    let text = "exec 9>mine; palisade acquire x -q 2>&9; echo ready; read line";
    let mut running = Running::start(script(&store, "sh", text));
    running.line();
    let pid = holder_pid(&store);
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let link = |name: &str| std::fs::read_link(proc.join(name)).unwrap();
    until("it has let go", || link("cwd").as_os_str() == "/");
    // A shell may have had the file as its own stderr while `acquire` ran.
    until("its stderr is not that of acquire", || {
        link("fd/2") != store.path("mine")
    });
    for file in std::fs::read_dir(proc.join("fd")).unwrap().flatten() {
        let Ok(target) = std::fs::read_link(file.path()) else {
            continue;
        };
        assert_ne!(target, store.path("mine"), "{file:?}");
        let standard = ["0", "1", "2"].iter().any(|nr| file.file_name() == **nr);
        assert!(
            !standard || target.as_os_str() == "/dev/null",
            "{file:?} {target:?}"
        );
    }
    let stat = std::fs::read_to_string(proc.join("stat")).unwrap();
    let session = stat.rsplit(") ").next().unwrap().split(' ').nth(3).unwrap();
    assert_eq!(session, pid.to_string(), "it is in a session of its own");
}

#[test]
fn release_tells_of_a_loss() {
    for shell in shells() {
        for (ending, word) in [
            ("evict", "evicted"),
            // The holder may learn of it by its own release.
            ("evict --force", "lost x"),
            ("KILL", "killed"),
        ] {
            let store = Store::new();
            let text = "palisade acquire x -q --on-loss none --ttl 5s; echo ready; read line; \
                        palisade release x; echo $?; palisade release x; echo $?; true";
            let mut running = Running::start(script(&store, shell, text));
            running.line();
            if ending == "KILL" {
                kill(holder_pid(&store), ending);
            } else {
                let mut evict = store.palisade("evict x");
                evict.args(ending.split(' ').skip(1));
                assert_eq!(code(evict), Some(0));
            }
            until("it is free", || store.lines().is_empty());
            running.write("go\n");
            let output = running.end();
            assert_eq!(output.out(), "76\n1\n", "{ending} {output:?}");
            assert!(output.err().contains(word), "{ending} {output:?}");
        }
    }
}

#[test]
fn a_lost_lock_ends_the_shell_and_what_it_runs() {
    for shell in shells() {
        // A shell without a trap dies at once, one with a trap when its command has ended, and one
        // that ignores it when it is killed.
        for (option, trap, ends) in [
            ("", "", &[Some(15)][..]),
            ("--on-loss kill", "", &[Some(15), Some(9)]),
            ("--on-loss kill", "trap '' TERM;", &[Some(9)]),
            ("", "trap 'echo told; exit 3' TERM;", &[None]),
        ] {
            let store = Store::new();
            let text = format!(
                "{trap} palisade acquire x -q --ttl 3s {option}; \
                 sh -c 'echo $$; exec sleep 300'; echo on"
            );
            let mut running = Running::start(script(&store, shell, &text));
            let child = running.line();
            let evicted = store.code("evict x --force");
            assert_eq!(evicted, Some(0));
            let output = running.end();
            assert!(
                ends.contains(&output.status.signal()),
                "{option} {output:?}"
            );
            if ends == [None] {
                output.is(3);
                assert_eq!(output.out(), "told\n");
            }
            until("its command ended", || !runs(&child));
            assert_nothing_left(&store);
        }
    }
}

/// When no renewal succeeds, the shell is ended before the lock can be granted to another.
#[test]
fn a_lease_that_runs_out_ends_the_shell_first() {
    let store = Store::new();
    let Some(redis) = Redis::start(&store) else {
        return;
    };
    let ttl = Duration::from_secs(10);
    let text = "trap '' TERM; palisade acquire x -q --ttl 10s --on-loss kill; echo ready; \
                while :; do sleep 1; done";
    let mut command = script(&store, "sh", text);
    command.env("PALISADE_URL", &redis.url);
    let mut running = Running::start(command);
    running.line();
    kill(redis.server.id(), "STOP");
    // The last renewal can't have been later.
    let stopped = Instant::now();
    let output = running.end();
    assert_eq!(output.status.signal(), Some(9), "{output:?}");
    assert!(stopped.elapsed() < ttl, "{:?}", stopped.elapsed());
    output.says("palisade: lost x (token ");
    // With its cause.
    output.says("): its lease was not renewed in time (");
}

/// What a script does to its stderr, and the file that it is then.
const STDERRS: &[(&str, Option<&str>)] = &[
    ("palisade acquire -q x", None),
    ("palisade acquire x >token", None),
    ("token=$(palisade acquire x)", None),
    ("all=$(palisade acquire x 2>&1)", None),
    ("palisade acquire -q x 2>/dev/null", None),
    ("( palisade acquire -q x 2>&1 ) | cat", None),
    ("exec 2>log; palisade acquire -q x", Some("log")),
    (
        "exec 2>log; echo before >&2; palisade acquire -q x",
        Some("log"),
    ),
    ("palisade acquire -q x; exec 2>>log", Some("log")),
    (
        "exec 2>log; palisade acquire -q x; rm log; exec 2>>other",
        Some("other"),
    ),
];

#[test]
fn a_lost_lock_is_told_where_the_stderr_of_the_script_goes() {
    for shell in shells() {
        for (form, file) in STDERRS {
            let store = Store::new();
            // Its own words come after ours, and nothing is overwritten.
            let text = format!(
                "trap 'echo behind >&2; exit 3' TERM; {form}; echo ready; while :; do sleep 0.02; done"
            );
            let mut running = Running::start(script(&store, shell, &text));
            running.line();
            assert_eq!(store.code("evict x --force"), Some(0));
            let output = running.end();
            output.is(3);
            let said = match file {
                None => output.err(),
                Some(file) => std::fs::read_to_string(store.path(file)).unwrap(),
            };
            let told: Vec<_> = said
                .lines()
                .filter(|line| line.contains("lost x"))
                .collect();
            assert_eq!(told.len(), 1, "{shell}: {form}: {said:?}");
            for part in [
                "palisade: lost x (token ",
                "it was taken away",
                "asked to end",
            ] {
                assert!(told[0].contains(part), "{shell}: {form}: {said:?}");
            }
            for own in ["before", "behind"] {
                let writes = own == "behind" || form.contains(own);
                assert_eq!(said.contains(own), writes, "{shell}: {form}: {said:?}");
            }
            assert_nothing_left(&store);
        }
    }
}

/// A socket, as of a service manager, and a terminal: neither can be opened again.
#[test]
fn a_lost_lock_is_told_to_sockets_terminals_and_programs() {
    let store = Store::new();
    let text = "palisade acquire -q x; echo; exec sleep 60";
    let (ours, its) = UnixStream::pair().unwrap();
    let mut command = script(&store, "sh", text);
    command.stderr(std::os::fd::OwnedFd::from(its));
    let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
    drop(command);
    let mut out = Pipe::of(process.stdout.take().unwrap());
    out.see("\n");
    assert_eq!(store.code("evict x --force"), Some(0));
    let said = Pipe::of(ours).see("asked to end\n");
    assert!(said.contains("lost x (token "), "{said}");
    assert_eq!(wait(&mut process).signal(), Some(15));

    let store = Store::new();
    std::fs::create_dir_all(store.path("run")).unwrap();
    let line = format!(
        "XDG_RUNTIME_DIR={} sh -c '$PALISADE acquire -q x; echo re''ady; exec sleep 60'",
        store.path("run").display()
    );
    let mut session = Session::start(&store, &line);
    session.see("ready");
    assert_eq!(store.code("evict x --force"), Some(0));
    session.see("lost x (token ");
    session.see("asked to end");

    // As JSON, with the event of `run`, and to those who go on, too.
    let store = Store::new();
    let text = "palisade acquire --json x --on-loss none; echo; read line; exit 4";
    let mut running = Running::start(script(&store, "sh", text));
    running.line();
    running.line();
    assert_eq!(store.code("evict x --force"), Some(0));
    let acquired = running.stderr_line();
    contract::read(&acquired, contract::event("acquired"));
    let lost = contract::read(&running.stderr_line(), contract::event("lost"));
    assert_eq!(lost["reason"], "taken");
    let error = contract::read(&running.stderr_line(), contract::ERROR);
    assert_eq!(error["error"]["code"], "lost");
    running.write("go\n");
    running.end().is(4).silent();
}

/// A pipe that nobody reads must not keep the shell running without its lock.
#[test]
fn a_full_pipe_does_not_hold_back_the_end_of_the_shell() {
    let store = Store::new();
    let text = "palisade acquire -q x --ttl 60s; head -c 65536 /dev/zero >&2; echo; exec sleep 300";
    let mut command = script(&store, "sh", text);
    let mut process = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = Pipe::of(process.stdout.take().unwrap());
    out.see("\n");
    assert_eq!(store.code("evict x --force"), Some(0));
    assert_eq!(wait(&mut process).signal(), Some(15));
    assert_nothing_left(&store);
}

/// A defect of the process that holds the lock is a loss.
#[test]
fn a_holder_that_fails_ends_the_shell() {
    let store = Store::new();
    let text = "PALISADE_TEST_PANIC=1 palisade acquire -q x; exec sleep 300";
    let output = finish(script(&store, "sh", text));
    assert_eq!(output.status.signal(), Some(15), "{output:?}");
    output.says("lost x: the process that held it failed");
    until("the lock is free", || store.lines().is_empty());
}

#[test]
fn at_least_holds_back_the_release() {
    let store = Store::new();
    let text = "palisade acquire x -q --at-least 1s; palisade release x; echo $?; true";
    let began = Instant::now();
    sh(&store, text).wrote("0\n");
    assert!(began.elapsed() >= Duration::from_secs(1));
    // Also when the shell does not wait for it.
    let text = "palisade acquire x -q --at-least 60s";
    let text = format!("{text}; palisade show x --json");
    let output = sh(&store, &text);
    output.is(0);
    assert_eq!(store.lines().len(), 1);
    // TERM cuts it short.
    kill(holder_pid(&store), "TERM");
    assert_nothing_left(&store);
}

#[test]
fn a_place_that_is_not_ours_alone_is_refused() {
    let store = Store::new();
    let run = store.path("run/palisade");
    let refused = |what: &str| {
        let text = "palisade acquire x; echo $?; palisade release x; echo $?; true";
        let output = sh(&store, text);
        assert_eq!(output.out(), "78\n78\n", "{what} {output:?}");
        output.says("XDG_RUNTIME_DIR");
        store.assert_empty();
    };
    std::fs::create_dir_all(&run).unwrap();
    std::fs::set_permissions(&run, PermissionsExt::from_mode(0o770)).unwrap();
    refused("open to others");
    std::fs::remove_dir(&run).unwrap();
    std::fs::create_dir(store.path("elsewhere")).unwrap();
    std::os::unix::fs::symlink(store.path("elsewhere"), &run).unwrap();
    refused("a link");
    // Without it the state directory of the user will do.
    let mut command = script(
        &store,
        "sh",
        "palisade acquire x -q && palisade release x; true",
    );
    command.env_remove("XDG_RUNTIME_DIR");
    command.env("XDG_STATE_HOME", store.path("state"));
    let output = finish(command);
    output.is(0).silent();
    assert!(store.path("state/palisade-acquired").exists());
}
