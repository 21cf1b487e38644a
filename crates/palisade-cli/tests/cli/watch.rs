//! `ls --watch`, in a pipe.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use serde_json::Value;

use crate::contract;
use crate::support::*;

#[test]
fn objects_one_per_line_for_each_change() {
    let store = Store::new();
    let first = store.hold("a", &[]);
    let mut watch = Running::start(store.palisade("ls --watch --json"));
    let next = |watch: &mut Running| contract::read(&watch.line(), contract::LINE);
    let line = next(&mut watch);
    assert_eq!(line["name"], "a");
    assert_eq!(line["holders"][0]["pid"], first.process.id());

    let second = store.hold("b", &["--permits", "1/2"]);
    assert_eq!(next(&mut watch)["name"], "b");
    let waiter = Running::start(store.run("a", &[], "true"));
    let line = next(&mut watch);
    assert_eq!(line["name"], "a");
    assert_eq!(line["waiters"][0]["pid"], waiter.process.id());
    drop(second);
    let line = next(&mut watch);
    assert_eq!(line["name"], "b");
    assert!(line["holders"].as_array().unwrap().is_empty());
    watch.signal("INT");
    let output = watch.end();
    assert_eq!(output.silent().wrote("").status.signal(), Some(2));
}

#[test]
fn blocks_for_people_in_a_pipe() {
    let store = Store::new();
    let mut watch = Running::start(store.palisade("ls n --watch"));
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

/// Also when there is nothing to write, which would reveal the closed pipe.
#[test]
fn a_watch_ends_when_nobody_reads_any_more() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    for args in [
        "ls --watch",
        "ls --watch --json",
        "leader x --watch",
        "leader x --watch --json",
    ] {
        let mut process = store.palisade(args).stdout(Stdio::piped()).spawn().unwrap();
        process.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        assert_eq!(wait(&mut process).code(), Some(0), "{args:?}");
    }
}

#[test]
fn a_watch_survives_an_outage() {
    let store = Store::new();
    let _held = store.hold("x", &[]);
    for (args, name) in [("ls --watch", "more"), ("leader x --watch", "x")] {
        let args = format!("{args} --json --url {}?timeout=200ms", store.url());
        let mut watch = Running::start(store.palisade(&args));
        watch.line();
        let gate = store.hang();
        let said: Value = serde_json::from_str(&watch.stderr_line()).unwrap();
        assert_eq!(said["event"], "unreachable");
        drop(gate);
        let more = (name == "more").then(|| store.hold(name, &[]));
        if more.is_none() {
            store.ran("evict x --force").is(0);
        }
        let seen: Value = serde_json::from_str(&watch.line()).unwrap();
        assert_eq!(seen["name"], name);
    }
}
