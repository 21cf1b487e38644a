//! `PALISADE_KEY`: the engine's own key of the lock, in the command's environment.

use crate::acquire::{HELD, script};
use crate::contract;
use crate::redis::Redis;
use crate::support::*;

#[test]
fn the_command_gets_the_key_of_its_lock_and_no_other() {
    let store = Store::new();
    let redis = Redis::start(&store);
    let urls = [
        Some(store.url()),
        redis.as_ref().map(|redis| redis.url.clone()),
    ];
    for url in urls.into_iter().flatten() {
        // An outer lock's key is not that of an inner one.
        let text = "export PALISADE_KEY=outer\n\
                    palisade run x -- sh -c 'echo \"${PALISADE_KEY-none}\"'\n\
                    palisade elect x -- sh -c 'echo \"${PALISADE_KEY-none}\"'\n\
                    palisade acquire x --json; true";
        let mut command = script(&store, "sh", text);
        command.env("PALISADE_URL", &url);
        let output = finish(command);
        let said = stdout(&output);
        let lines: Vec<_> = said.lines().collect();
        let held = contract::read(lines[2], HELD);
        let key = held["key"].as_str().unwrap_or("none");
        assert_ne!(key, "outer", "{url}");
        // A key may be that of one claim.
        for line in &lines[..2] {
            assert!(!line.is_empty() && *line != "outer", "{url} {output:?}");
            assert_eq!(*line == "none", key == "none", "{url} {output:?}");
        }
        if url.starts_with("redis:") && key != "none" {
            assert_eq!(key, "palisade:x");
        }
    }
}
