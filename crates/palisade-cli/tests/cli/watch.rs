//! `ls --watch`, in a pipe.

use std::os::unix::process::ExitStatusExt;

use crate::contract;
use crate::support::*;

#[test]
fn objects_one_per_line_for_each_change() {
    let store = Store::new();
    let first = store.hold("a", &[]);
    let mut watch = Running::start(store.palisade(&["ls", "--watch", "--json"]));
    let next = |watch: &mut Running| contract::read(&watch.line(), contract::LINE);
    let line = next(&mut watch);
    assert_eq!(line["name"], "a");
    assert_eq!(line["holders"][0]["pid"], first.process.id());

    let second = store.hold("b", &["--permits", "1/2"]);
    assert_eq!(next(&mut watch)["name"], "b");
    let waiter = Running::start(store.run("a", &[], "true"));
    let line = next(&mut watch);
    assert_eq!(
        (&line["name"], &line["waiters"][0]["pid"]),
        (&"a".into(), &waiter.process.id().into())
    );
    drop(second);
    let line = next(&mut watch);
    assert_eq!(line["name"], "b");
    assert!(line["holders"].as_array().unwrap().is_empty());
    watch.signal("INT");
    let output = watch.end();
    assert_eq!(output.status.signal(), Some(2), "{output:?}");
    assert_eq!((stdout(&output), stderr(&output)), Default::default());
}

#[test]
fn blocks_for_people_in_a_pipe() {
    let store = Store::new();
    let mut watch = Running::start(store.palisade(&["ls", "n", "--watch"]));
    assert_eq!(watch.line(), "nobody holds or waits");
    let _other = store.hold("other", &[]);
    let held = store.hold("name", &[]);
    assert_eq!(watch.line(), "");
    assert!(watch.line().starts_with("NAME"));
    assert!(watch.line().starts_with("name  held"));
    drop(held);
    assert_eq!(watch.line(), "");
    assert_eq!(watch.line(), "nobody holds or waits");
}

/// Also when there is nothing to write, by which it would notice.
#[test]
fn a_watch_ends_when_nobody_reads_any_more() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    for args in [
        &["ls", "--watch"][..],
        &["ls", "--watch", "--json"],
        &["leader", "x", "--watch"],
        &["leader", "x", "--watch", "--json"],
    ] {
        let mut command = store.palisade(args);
        let mut process = command
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = process.stdout.take().unwrap();
        std::io::Read::read_exact(&mut stdout, &mut [0]).unwrap();
        drop(stdout);
        let mut status = None;
        until("it ends", || {
            status = process.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().code(), Some(0), "{args:?}");
    }
}

#[test]
fn a_watch_survives_an_outage() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    let url = format!("{}?timeout=200ms", store.url());
    for args in [&["ls", "--watch"][..], &["leader", "x", "--watch"]] {
        let args = [args, &["--json", "--url", &url]].concat();
        let mut watch = Running::start(store.palisade(&args));
        watch.line();
        let gate = store.hang();
        let said: serde_json::Value = serde_json::from_str(&watch.stderr_line()).unwrap();
        assert_eq!(said["event"], "unreachable");
        drop(gate);
        let name = if args[0] == "ls" { "more" } else { "x" };
        let more = match name {
            "x" => {
                assert_eq!(code(store.palisade(&["evict", "x", "--force"])), Some(0));
                None
            }
            name => Some(store.hold(name, &[])),
        };
        let seen: serde_json::Value = serde_json::from_str(&watch.line()).unwrap();
        assert_eq!(seen["name"], name);
        drop(more);
    }
}
