//! Passwords: in no message, and in no list of processes.

use crate::support::*;

/// Each with a part before and after, which nobody may see.
const PASSWORDS: &str = "hun?tqr hun/tqr hun#tqr hun@tqr hun%tqr hun:tqr hun?a=tqr hun&tqr 77?tqr \
                         hun%zztqr";

#[test]
fn no_part_of_a_password_is_in_any_message() {
    let store = Store::new();
    let schemes = "redis rediss redis+sentinel redis+cluster redlock postgres postgres+advisory \
                   etcd consul kubernetes zookeeper file nosuch";
    for scheme in schemes.split_whitespace() {
        for password in PASSWORDS.split_whitespace() {
            // Nobody listens there, and nobody can.
            let options = "timeout=1s&connect_timeout=1s";
            let url = format!("{scheme}://me:{password}@127.0.0.1:1/0?{options}");
            for args in ["run x --no-wait -- true", "config show", "doctor"] {
                for json in ["", "--json"] {
                    let output = store.ran(&format!("--url {url} {json} {args}"));
                    let all = output.out() + &output.err();
                    for part in ["hun", "tqr", "77"] {
                        assert!(!all.contains(part), "{url} {args}: {all}");
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
        let mut command = store.palisade("run x");
        match how {
            "--url" => command.args([how, url]),
            _ => command.arg(format!("{how}{url}")),
        };
        command.args(["--", "echo", "redis://me:other@h"]);
        let mut running = Running::start(command);
        let said = running.stderr_line();
        assert!(said.contains("waiting for the engine"), "{said}");
        let palisade = running.process.id();
        let guardian = children(palisade).concat();
        for pid in [palisade.to_string(), guardian] {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
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
