//! Compares `docs/command.md`, and `docs/queue.md` for `palisade queue`, with the command:
//! documents and events have the keys of the contract, verbs and options are those of the help.
//! (Exit codes are compared in `exit.rs`.)

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::contract::{self, Is};
use crate::support::*;

const PAGE: &str = include_str!("../../../../docs/command.md");
const QUEUE: &str = include_str!("../../../../docs/queue.md");
const GATEWAY: &str = include_str!("../../../../docs/gateway.md");

/// What blocks of JSON show.
const BLOCKS: &[Is] = &[
    contract::CONFIG,
    contract::LEADER,
    contract::LINE,
    contract::DEADLOCKS,
    contract::HEALTH,
    contract::FIGURES,
];

/// What is described in a line: `{"name","released":true|false}`.
const INLINE: &[Is] = &[
    contract::CONFIG_PATH,
    contract::HELD,
    contract::RELEASED,
    contract::EVICTED,
    contract::RESIZED,
    contract::FENCE,
    contract::COMPLETIONS,
    contract::PAGE,
    contract::WRITTEN,
    contract::DEMO,
    contract::ADVICE,
    contract::ERROR,
    "sql:text",
];

/// The same of `palisade queue`; the key of a list is that of its items.
const OF_QUEUES: &[Is] = &[
    contract::PUSHED,
    contract::QUEUE,
    contract::MESSAGE,
    "queue:text pushed:number",
    "queue:text retried:number",
    "queue:text dropped:number",
];

fn keys(is: Is) -> BTreeSet<&'static str> {
    let keys = is.split_whitespace().filter_map(|key| key.split_once(':'));
    keys.map(|(key, _)| key).collect()
}

/// The objects in backticks, as they stand there, alone or in a list.
fn inline(page: &'static str) -> Vec<&'static str> {
    let texts = page.split('`').map(|text| text.trim_start_matches('['));
    let texts = texts.filter(|text| text.starts_with("{\""));
    texts.filter(|text| !text.contains('\n')).collect()
}

/// The keys of an object in the notation of the page: quoted words after its `{` or its own commas.
fn written(object: &str) -> BTreeSet<&str> {
    let (mut depth, mut expects, mut keys) = (0, false, BTreeSet::new());
    let mut parts = object.split('"');
    let mut quoted = false;
    for part in &mut parts {
        if quoted && depth == 1 && expects {
            keys.insert(part);
            expects = false;
        }
        if !quoted {
            for c in part.chars() {
                depth += i32::from("{[".contains(c)) - i32::from("}]".contains(c));
                expects = match c {
                    '{' => depth == 1,
                    ',' => depth == 1,
                    _ => false,
                };
            }
        }
        quoted = !quoted;
    }
    keys
}

#[test]
fn documents_have_the_keys_of_the_contract() {
    let blocks = PAGE.split("```json\n").skip(1);
    let blocks: Vec<Value> = blocks
        .map(|block| serde_json::from_str(block.split("```").next().unwrap()).unwrap())
        .collect();
    assert_eq!(blocks.len(), BLOCKS.len());
    for (block, is) in blocks.iter().zip(BLOCKS) {
        contract::read(&block.to_string(), is);
    }
    let shown: Vec<_> = inline(PAGE)
        .into_iter()
        .filter(|o| !o.contains("\"event\""))
        .collect();
    for (shown, shapes) in [(shown, INLINE), (inline(QUEUE), OF_QUEUES)] {
        for object in &shown {
            let known = shapes.iter().any(|is| keys(is) == written(object));
            assert!(known, "{object} is no document of the contract");
        }
        for is in shapes {
            let there = shown.iter().any(|object| keys(is) == written(object));
            assert!(there, "no document of the page is {is}");
        }
    }
}

#[test]
fn events_have_the_keys_of_the_contract() {
    let word = |object: &'static str| object.split('"').nth(3).unwrap();
    let shown: Vec<_> = inline(PAGE)
        .into_iter()
        .filter(|o| o.starts_with("{\"event\""))
        .collect();
    for object in &shown {
        // Events of `--watch`, which have no name, and of `bench` and `serve`, tested there.
        let own = [
            "{\"event\":\"unreachable\",\"message\"}",
            "{\"event\":\"noisy\"",
            "{\"event\":\"serving\"",
            "{\"event\":\"warning\"",
            "{\"event\":\"ended_at_once\"",
        ];
        if !own.iter().any(|own| object.starts_with(own)) {
            assert_eq!(
                written(object),
                keys(contract::event(word(object))),
                "{object}"
            );
        }
    }
    let shown: BTreeSet<_> = shown.into_iter().map(word).collect();
    assert_eq!(
        shown,
        told("src", "queue").iter().map(String::as_str).collect()
    );
    for word in told("src/verbs/queue", "") {
        contract::queue_event(&word);
        assert!(
            QUEUE.contains(&format!("`{word}`")),
            "{word} is not on the page"
        );
    }
}

/// The words of all events in these sources, without a folder.
fn told(folder: &str, but: &str) -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    let mut open = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.extend((!path.ends_with(but) || but.is_empty()).then_some(path));
                continue;
            }
            let text = std::fs::read_to_string(path).unwrap();
            let behind = text.split("\"event\": \"").skip(1);
            words.extend(behind.map(|rest| rest.split('"').next().unwrap().to_owned()));
        }
    }
    words
}

/// The long options in a text.
fn options(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_lowercase() && c != '-');
    words
        .map(|word| word.trim_end_matches('-'))
        .filter(|word| word.starts_with("--") && word.len() > 3)
        .collect()
}

#[test]
fn verbs_and_options_on_the_page_are_those_of_the_command() {
    let store = Store::new();
    let mut helps = store.ran("--help").out();
    for verb in crate::every_verb::verbs() {
        assert!(
            PAGE.contains(&format!("\npalisade {verb} ")),
            "{verb} is not in the list"
        );
        helps += &store.ran(&format!("{verb} --help")).out();
    }
    for verb in [
        "fence check",
        "queue push",
        "queue work",
        "queue ls",
        "queue show",
        "queue retry",
        "queue drop",
    ] {
        helps += &store.ran(&format!("{verb} --help")).out();
    }
    let page = [PAGE, QUEUE].concat();
    let (known, shown) = (options(&helps), options(&page));
    let untold: Vec<_> = known.difference(&shown).collect();
    let untold: Vec<_> = untold.iter().filter(|o| !GATEWAY.contains(**o)).collect();
    assert!(untold.is_empty(), "on no page: {untold:?}");
    // An alias that help does not show.
    let hidden = ["--engine-url"];
    let unknown = shown.difference(&known);
    let unknown: Vec<_> = unknown.filter(|o| !hidden.contains(o)).collect();
    assert!(unknown.is_empty(), "no verb has {unknown:?}");
}
