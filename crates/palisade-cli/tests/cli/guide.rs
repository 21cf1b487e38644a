//! `palisade guide`: a choice with its reasons, by flags and by asking.

use serde_json::{Value, json};

use crate::contract;
use crate::support::*;
use crate::terminal::Session;

#[track_caller]
fn answer(store: &Store, args: &[&str], expected: i32) -> Value {
    let output = finish_soon(store.palisade(&[&["guide", "--json"], args].concat()));
    assert_eq!(output.status.code(), Some(expected), "{output:?}");
    assert_eq!(stderr(&output), "");
    contract::read(&stdout(&output), contract::ADVICE)
}

#[test]
fn the_engine_that_needs_nothing_is_for_one_machine() {
    let store = Store::new();
    let answer = answer(&store, &["--need", "correctness,read-write,one-machine"], 0);
    let advice = &answer["advice"];
    assert_eq!(
        (
            &advice["engine"],
            &advice["url"],
            &advice["ttl_ms"],
            &advice["class"]
        ),
        (&json!("file"), &json!("file:"), &json!(30_000), &json!("B"))
    );
    let memory = answer["others"].as_array().unwrap().iter();
    let memory = memory
        .clone()
        .find(|other| other["engine"] == "memory")
        .unwrap();
    assert_eq!(memory["fits"], false);
    assert!(
        memory["why"][0]
            .as_str()
            .unwrap()
            .starts_with("correctness: "),
        "{memory}"
    );
    assert!(!store.path("store").exists(), "nothing is connected to");
}

#[test]
fn the_advice_works() {
    let store = Store::new();
    let answer = answer(&store, &["--need", "election,one-machine"], 0);
    let url = answer["advice"]["url"].as_str().unwrap();
    assert_eq!(
        (url, &answer["advice"]["ttl_ms"]),
        ("file:?ttl=10s", &json!(10_000))
    );
    let mut command = store.palisade(&["run", "my-lock", "--url", url, "--", "true"]);
    command.env("XDG_STATE_HOME", store.path("state"));
    assert_eq!(code(command), Some(0));
}

#[test]
fn what_the_build_lacks_is_said() {
    let store = Store::new();
    let have = "zk,k8s,consul,kubernetes";
    let answer = answer(&store, &["--need", "efficiency", "--have", have], 0);
    let known = finish_soon(store.palisade(&["ls", "--url", "bananas:"]));
    let known = stderr(&known);
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
    let needs = ["--need", "one-machine,many-machines"];
    assert_eq!(answer(&store, &needs, 1)["advice"], Value::Null);
    let output = finish_soon(store.palisade(&[&["guide"], &needs[..]].concat()));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stdout(&output).starts_with("No engine"), "{output:?}");
}

#[test]
fn for_people_it_says_why() {
    let store = Store::new();
    let output = finish_soon(store.palisade(&["guide", "--need", "permits", "--need", "fair"]));
    assert_eq!(
        (output.status.code(), stderr(&output)),
        (Some(0), String::new())
    );
    let text = stdout(&output);
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
        (
            &["--need", "speed"][..],
            &["correctness", "read-write", "permits"][..],
        ),
        (&["--need", "permts"], &["did you mean permits?"]),
        (
            &["--need", "permits", "--have", "oracle"],
            &["postgres", "redis", "etcd"],
        ),
        (&["--need", ""], &["correctness"]),
        (&[], &["--need", "correctness"]),
    ] {
        for json in [&[][..], &["--json"]] {
            let output = finish_soon(store.palisade(&[&["guide"], args, json].concat()));
            assert_eq!(output.status.code(), Some(2), "{output:?}");
            assert!(output.stdout.is_empty());
            for word in words {
                assert!(stderr(&output).contains(word), "{word} in {output:?}");
            }
        }
    }
}

#[test]
fn in_a_terminal_it_asks() {
    let store = Store::new();
    let mut session = Session::start(&store, "$PALISADE guide");
    session.see("needs, by comma:");
    session.press("corectness\n");
    session.see("did you mean correctness?");
    session.see("needs, by comma:");
    session.press("correctness, one-machine\n");
    session.see("Enter for nothing:");
    session.press("\n");
    session.see("Use file");
    assert_eq!(session.code(), Some(0));

    for (key, expected) in [("\x04", 2), ("\x03", 130)] {
        let mut session = Session::start(&store, "$PALISADE guide");
        session.see("needs, by comma:");
        session.press(key);
        assert_eq!(session.code(), Some(expected));
    }
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let store = Store::new();
    for json in [&[][..], &["--json"]] {
        let args = [&["guide", "--need", "permits"], json].concat();
        let output = into_closed_pipe(store.palisade(&args));
        assert_eq!(
            (output.status.code(), stderr(&output)),
            (Some(0), String::new())
        );
    }
}
