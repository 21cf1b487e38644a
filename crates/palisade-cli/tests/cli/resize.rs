//! `palisade resize`, on the engines that can do it.

use std::process::Command;

use crate::contract::{self, Is};
use crate::redis::Redis;
use crate::support::*;

const RESIZED: Is = Is::Object(&[
    ("name", Is::Text),
    ("capacity", Is::Number),
    ("resized", Is::Bool),
]);

fn at(url: &str, args: &[&str]) -> Command {
    let mut command = palisade();
    command.args(["--url", url]).args(args);
    command
}

fn can_resize(url: &str) -> bool {
    let health = finish(at(url, &["doctor", "--json"]));
    contract::read(&stdout(&health), contract::HEALTH)["capability"]["resize"] == true
}

fn resizes(url: &str) {
    let holder = |permits: &str| {
        let run = ["run", "p", "--permits", permits, "--", "sh", "-c"];
        let mut command = at(url, &run);
        command.arg("echo ready; cat >/dev/null");
        Running::start(command)
    };
    let mut first = holder("1/1");
    first.line();
    let mut second = holder("1/1");
    let resize = |n: &str| finish(at(url, &["resize", "p", n, "--json"]));
    until("the second waits", || {
        let ls = finish(at(url, &["show", "p", "--json"]));
        let line = contract::read(&stdout(&ls), contract::LINE);
        line["waiters"].as_array().is_some_and(|w| w.len() == 1)
    });
    let output = resize("2");
    assert_eq!(output.status.code(), Some(0), "{url} {output:?}");
    let answer = contract::read(&stdout(&output), RESIZED);
    assert_eq!(
        (&answer["capacity"], &answer["resized"]),
        (&2.into(), &true.into())
    );
    // It waited for a permit of one, and there are two now.
    assert_eq!(second.line(), "ready");
    // Whoever asks now names the new number.
    let late = ["run", "p", "--no-wait", "--permits", "1/1", "--", "true"];
    assert_eq!(code(at(url, &late)), Some(77), "{url}");
    let fits = ["run", "p", "--no-wait", "--permits", "1/2", "--", "true"];
    assert_eq!(code(at(url, &fits)), Some(75), "{url}");
    // Nobody loses a permit.
    assert_eq!(resize("1").status.code(), Some(0), "{url}");
    assert_eq!(first.code(), Some(0), "{url}");
    assert_eq!(second.code(), Some(0), "{url}");

    let output = resize("3");
    assert_eq!(output.status.code(), Some(1), "{url} {output:?}");
    assert_eq!(contract::read(&stdout(&output), RESIZED)["resized"], false);

    let mut heavy = holder("3/4");
    heavy.line();
    assert_eq!(resize("2").status.code(), Some(2), "{url}: a claim takes 3");
    drop(heavy);
    let mut reader = Running::start(at(
        url,
        &["run", "p", "--shared", "--", "sh", "-c", "echo; cat"],
    ));
    reader.line();
    let output = resize("2");
    assert_eq!(output.status.code(), Some(77), "{url} {output:?}");
    assert_eq!(json_error(&output)["code"], "capacity_mismatch");
}

#[test]
fn permits_are_resized_while_they_are_in_use() {
    let store = Store::new();
    let redis = Redis::start(&store);
    let urls = [
        Some(store.url()),
        redis.as_ref().map(|redis| redis.url.clone()),
    ];
    let urls: Vec<_> = urls.into_iter().flatten().collect();
    let mut resized = 0;
    for url in &urls {
        // Where there is no store nothing can be resized on any engine.
        assert_eq!(code(at(url, &["run", "x", "--", "true"])), Some(0), "{url}");
        if can_resize(url) {
            resizes(url);
            resized += 1;
        } else {
            let output = finish(at(url, &["resize", "p", "2", "--json"]));
            assert_eq!(output.status.code(), Some(77), "{url} {output:?}");
            assert_eq!(json_error(&output)["code"], "unsupported");
        }
    }
    assert!(resized > 0 || redis.is_none(), "Redis can do it");
}

#[test]
fn a_number_that_permits_can_not_have_is_usage() {
    let store = Store::new();
    for bad in ["0", "-1", "x", "4294967295", "99999999999", ""] {
        let output = finish_soon(store.palisade(&["resize", "p", "--", bad]));
        assert_eq!(output.status.code(), Some(2), "{bad} {output:?}");
    }
    let output = finish_soon(store.palisade(&["resize", "a\nb", "2"]));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(!store.path("store").exists(), "none of this opened a store");
}
