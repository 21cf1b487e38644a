//! `palisade resize` and `PALISADE_KEY`, on the engines that have them.

use crate::acquire::script;
use crate::contract::{self, HELD, RESIZED};
use crate::redis::Redis;
use crate::support::*;

/// The embedded engine and, where there is one, a Redis server.
fn urls(store: &Store) -> (Option<Redis>, Vec<String>) {
    let redis = Redis::start(store);
    let server = redis.as_ref().map(|redis| redis.url.clone());
    let urls = [Some(store.url()), server].into_iter().flatten().collect();
    (redis, urls)
}

fn resizes(store: &Store, url: &str) {
    let at = |args: &str| store.ran(&format!("--url {url} {args}"));
    let holder = |permits: &str| {
        let mut command = store.palisade(&format!("run p --url {url} {permits}"));
        command.args(["--", "sh", "-c", "echo ready; cat >/dev/null"]);
        Running::start(command)
    };
    let mut first = holder("--permits 1/1");
    first.line();
    let mut second = holder("--permits 1/1");
    let resize = |n: &str| at(&format!("resize p {n} --json"));
    until("the second waits", || {
        let line = at("show p --json").json(contract::LINE);
        line["waiters"]
            .as_array()
            .is_some_and(|waiters| waiters.len() == 1)
    });
    let answer = resize("2").is(0).json(RESIZED);
    assert_eq!(
        (&answer["capacity"], &answer["resized"]),
        (&2.into(), &true.into())
    );
    // It waited for the only permit, and there are two now.
    assert_eq!(second.line(), "ready");
    // Later requests name the new number.
    at("run p --no-wait --permits 1/1 -- true").is(77);
    at("run p --no-wait --permits 1/2 -- true").is(75);
    // Nobody loses a permit.
    resize("1").is(0);
    assert_eq!((first.code(), second.code()), (Some(0), Some(0)), "{url}");
    assert_eq!(resize("3").is(1).json(RESIZED)["resized"], false);

    let mut heavy = holder("--permits 3/4");
    heavy.line();
    resize("2").is(2);
    drop(heavy);
    let mut reader = holder("--shared");
    reader.line();
    assert_eq!(resize("2").is(77).error()["code"], "capacity_mismatch");
}

#[test]
fn permits_are_resized_while_they_are_in_use() {
    let store = Store::new();
    let (redis, urls) = urls(&store);
    let mut resized = 0;
    for url in &urls {
        // Without a store there is nothing to resize.
        store.ran(&format!("--url {url} run x -- true")).is(0);
        let health = store
            .ran(&format!("--url {url} doctor --json"))
            .json(contract::HEALTH);
        if health["capability"]["resize"] == true {
            resizes(&store, url);
            resized += 1;
        } else {
            let output = store.ran(&format!("--url {url} resize p 2 --json"));
            assert_eq!(output.is(77).error()["code"], "unsupported");
        }
    }
    assert!(resized > 0 || redis.is_none(), "Redis can do it");
}

#[test]
fn a_number_that_permits_can_not_have_is_usage() {
    let store = Store::new();
    for bad in ["0", "-1", "x", "4294967295", "99999999999", ""] {
        store.soon(&["resize", "p", "--", bad]).is(2);
    }
    store.soon(&["resize", "a\nb", "2"]).is(2);
    assert!(!store.path("store").exists(), "none of this opened a store");
}

/// `PALISADE_KEY`: the engine's own key of the lock, in the command's environment.
#[test]
fn the_command_gets_the_key_of_its_lock_and_no_other() {
    let store = Store::new();
    let (_redis, urls) = urls(&store);
    for url in urls {
        // An outer lock's key is not that of an inner one.
        let text = "export PALISADE_KEY=outer\n\
                    palisade run x -- sh -c 'echo \"${PALISADE_KEY-none}\"'\n\
                    palisade elect x -- sh -c 'echo \"${PALISADE_KEY-none}\"'\n\
                    palisade acquire x --json; true";
        let mut command = script(&store, "sh", text);
        command.env("PALISADE_URL", &url);
        let said = finish(command).out();
        let lines: Vec<_> = said.lines().collect();
        let held = contract::read(lines[2], HELD);
        let key = held["key"].as_str().unwrap_or("none");
        assert_ne!(key, "outer", "{url}");
        // A key may be that of one claim.
        for line in &lines[..2] {
            assert!(!line.is_empty() && *line != "outer", "{url} {said}");
            assert_eq!(*line == "none", key == "none", "{url} {said}");
        }
        if url.starts_with("redis:") && key != "none" {
            assert_eq!(key, "palisade:x");
        }
    }
}
