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

/// What a command gets of our own secrets: nothing; a URL is passed on, or it would use another
/// engine.
#[test]
fn a_token_is_not_passed_on_to_the_command() {
    let store = Store::new();
    store.ran("queue push q --body x").is(0);
    for verb in ["run x", "elect x", "queue work q --drain"] {
        let mut command = store.palisade(&format!("{verb} -- env"));
        command.env("PALISADE_GATEWAY_TOKEN", "hunter2");
        let output = finish(command);
        let said = output.is(0).out();
        assert!(!said.contains("hunter2"), "{verb}: {said}");
        assert!(said.contains(&format!("PALISADE_URL={}\n", store.url())));
        // Its own way to pass it on.
        let mut command = store.palisade(&format!("{verb} -- sh -c"));
        command.arg("PALISADE_GATEWAY_TOKEN=$OURS env");
        command.env("OURS", "hunter2");
        store.ran("queue push q --body x").is(0);
        let said = finish(command).is(0).out();
        assert!(said.contains("PALISADE_GATEWAY_TOKEN=hunter2\n"));
        store.ran("queue push q --body x").is(0);
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
