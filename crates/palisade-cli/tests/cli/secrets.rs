//! Passwords: in no message, and in no list of processes.

use std::path::Path;

use crate::support::*;

const SCHEMES: [&str; 8] = [
    "redis",
    "rediss",
    "postgres",
    "postgres+advisory",
    "etcd",
    "consul",
    "file",
    "nosuch",
];

/// Each with a part before and after, which nobody may see.
const PASSWORDS: [&str; 10] = [
    "hun?ter",
    "hun/ter",
    "hun#ter",
    "hun@ter",
    "hun%ter",
    "hun:ter",
    "hun?a=ter",
    "hun&ter",
    "77?ter",
    "hun%zzter",
];

#[test]
fn no_part_of_a_password_is_in_any_message() {
    let store = Store::new();
    for scheme in SCHEMES {
        for password in PASSWORDS {
            // Nobody listens there, and nobody can.
            let url =
                format!("{scheme}://me:{password}@127.0.0.1:1/0?timeout=1s&connect_timeout=1s");
            for args in [
                &["run", "x", "--no-wait", "--", "true"][..],
                &["config", "show"],
                &["doctor"],
            ] {
                for json in [&[][..], &["--json"]] {
                    let args = [args, json].concat();
                    let (own, command) = match args.iter().position(|arg| *arg == "--") {
                        Some(at) => (args[..at].to_vec(), vec!["--", "true"]),
                        None => (args, Vec::new()),
                    };
                    let own = own.into_iter().chain(json.iter().copied());
                    let mut own: Vec<_> = own.collect();
                    own.dedup();
                    let mut line = store.palisade(&own);
                    line.args(["--url", &url]).args(command);
                    let output = finish(line);
                    let all = stdout(&output) + &stderr(&output);
                    for part in ["hun", "ter", "77"] {
                        assert!(!all.contains(part), "{url} {own:?}: {all}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_password_is_not_in_the_list_of_processes() {
    let store = Store::new();
    for how in ["--url", "--url="] {
        // Nobody listens there: it waits, with its guardian.
        let url = "redis://me:hunter2@127.0.0.1:1/0?timeout=1s";
        let mut command = store.palisade(&["run", "x"]);
        match how {
            "--url" => command.args([how, url]),
            _ => command.arg(format!("{how}{url}")),
        };
        command.args(["--", "echo", "redis://me:other@h"]);
        let mut running = Running::start(command);
        let said = running.stderr_line();
        assert!(said.contains("waiting for the engine"), "{said}");
        let palisade = running.process.id();
        let children = format!("/proc/{palisade}/task/{palisade}/children");
        let children = std::fs::read_to_string(children).unwrap();
        let guardian: u32 = children.trim().parse().unwrap();
        for pid in [palisade, guardian] {
            let line = std::fs::read(Path::new("/proc").join(pid.to_string()).join("cmdline"));
            let line = String::from_utf8(line.unwrap()).unwrap();
            assert!(!line.contains("hunter2"), "{line:?}");
            assert!(
                line.contains("redis://me:*******@127.0.0.1:1/0?timeout=1s\0"),
                "{line:?}"
            );
            assert!(
                line.ends_with("\0--\0echo\0redis://me:other@h\0"),
                "{line:?}"
            );
        }
        running.signal("TERM");
        assert_eq!(running.code(), Some(143));
    }
}
