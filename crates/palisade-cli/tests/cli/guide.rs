//! `palisade guide`: a choice with its reasons, by flags and by asking.

use serde_json::{Value, json};

use crate::contract;
use crate::support::*;
use crate::terminal::Session;

#[track_caller]
fn answer(store: &Store, args: &str, expected: i32) -> Value {
    let output = store.soon(&format!("guide --json {args}"));
    output.is(expected).silent().json(contract::ADVICE)
}

#[test]
fn the_engine_that_needs_nothing_is_for_one_machine() {
    let store = Store::new();
    let answer = answer(&store, "--need correctness,read-write,one-machine", 0);
    let advice = &answer["advice"];
    let parts = ["engine", "url", "ttl_ms", "class"].map(|key| advice[key].clone());
    assert_eq!(
        parts,
        [json!("file"), json!("file:"), json!(30_000), json!("B")]
    );
    let mut others = answer["others"].as_array().unwrap().iter();
    let memory = others.find(|other| other["engine"] == "memory").unwrap();
    assert_eq!(memory["fits"], false);
    let why = memory["why"][0].as_str().unwrap();
    assert!(why.starts_with("correctness: "), "{memory}");
    assert!(!store.path("store").exists(), "nothing is connected to");
}

#[test]
fn the_advice_works() {
    let store = Store::new();
    let answer = answer(&store, "--need election,one-machine", 0);
    assert_eq!(answer["advice"]["url"], "file:?ttl=10s");
    assert_eq!(answer["advice"]["ttl_ms"], 10_000);
    let mut command = store.palisade("run my-lock --url file:?ttl=10s -- true");
    command.env("XDG_STATE_HOME", store.path("state"));
    finish(command).is(0);
}

#[test]
fn what_the_build_lacks_is_said() {
    let store = Store::new();
    let answer = answer(
        &store,
        "--need efficiency --have zk,k8s,consul,kubernetes",
        0,
    );
    let known = store.soon("ls --url bananas:").err();
    for name in ["zookeeper", "consul", "kubernetes"] {
        let lacks = answer["lacking"].as_array().unwrap().contains(&json!(name));
        assert_eq!(
            lacks,
            !known.contains(&format!("{name}:")),
            "{name}: {answer}"
        );
    }
}

#[test]
fn nothing_that_fits_is_no() {
    let store = Store::new();
    let needs = "--need one-machine,many-machines";
    assert_eq!(answer(&store, needs, 1)["advice"], Value::Null);
    let text = store.soon(&format!("guide {needs}")).is(1).out();
    assert!(text.starts_with("No engine"), "{text}");
}

/// Class C with a fence is what somebody can do who has nothing else; and a gateway has no class.
#[test]
fn what_comes_near_is_said() {
    let store = Store::new();
    let needs = "--need correctness,many-machines --have";
    let about = |have: &str, name: &str| {
        let answer = answer(&store, &format!("{needs} {have}"), 1);
        let mut others = answer["others"].as_array().unwrap().iter();
        let other = others.find(|other| other["engine"] == name).unwrap();
        other["why"].to_string()
    };
    assert!(about("redis", "redis").contains("a fence refuses a late writer"));
    let gateway = about("gateway", "gateway");
    assert!(
        gateway.contains("the engine behind it decides"),
        "{gateway}"
    );
    assert!(!gateway.contains("class C"), "{gateway}");
    let text = |have: &str| store.soon(&format!("guide {needs} {have}")).is(1).out();
    assert!(text("redis").contains("\nNearest is redis with a fence"));
    assert!(!text("gateway").contains("Nearest"));
    assert!(text("gateway").contains("- gateway (depends): "));
    let advised = answer(&store, "--need waiters,many-machines --have gateway", 0);
    assert_eq!(advised["advice"]["engine"], "gateway");
    assert_eq!(advised["advice"]["class"], Value::Null);
}

#[test]
fn for_people_it_says_why() {
    let store = Store::new();
    let text = store
        .soon("guide --need permits --need fair")
        .is(0)
        .silent()
        .out();
    for words in [
        "Use file",
        "- permits: ",
        "- fair: ",
        "- class B",
        "ttl 30s",
        "palisade run",
    ] {
        assert!(text.contains(words), "{words} in {text}");
    }
}

#[test]
fn unknown_words_list_the_known_ones() {
    let store = Store::new();
    for (args, words) in [
        ("--need speed", "correctness read-write permits"),
        ("--need permts", "permits?"),
        ("--need permits --have oracle", "postgres redis etcd"),
        ("--need=", "correctness"),
        ("", "--need correctness"),
    ] {
        for json in ["", "--json"] {
            let output = store.soon(&format!("guide {args} {json}"));
            output.is(2).wrote("");
            for word in words.split(' ') {
                output.says(word);
            }
        }
    }
}

#[test]
fn in_a_terminal_it_asks() {
    let store = Store::new();
    let mut session = Session::start(&store, "$PALISADE guide");
    session.see("needs, separated by commas:");
    session.press("corectness\n");
    session.see("did you mean correctness?");
    session.see("needs, separated by commas:");
    session.press("correctness, one-machine\n");
    session.see("Enter for nothing:");
    session.press("\n");
    session.see("Use file");
    assert_eq!(session.code(), Some(0));

    for (key, expected) in [("\x04", 2), ("\x03", 130)] {
        let mut session = Session::start(&store, "$PALISADE guide");
        session.see("needs, separated by commas:");
        session.press(key);
        assert_eq!(session.code(), Some(expected));
    }
}
