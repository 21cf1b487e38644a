//! `completions` and `man`.

use std::process::{Command, Stdio};

use crate::contract;
use crate::every_verb::verbs;
use crate::support::*;

#[test]
fn completions_know_every_verb_and_are_shell() {
    let store = Store::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = finish_soon(store.palisade(&["completions", shell]));
        assert_eq!(
            (output.status.code(), stderr(&output)),
            (Some(0), String::new())
        );
        let script = stdout(&output);
        for verb in verbs() {
            assert!(script.contains(&verb), "{verb} in {shell}");
        }
        let json = finish_soon(store.palisade(&["completions", shell, "--json"]));
        let answer = contract::read(&stdout(&json), contract::COMPLETIONS);
        assert_eq!(
            (&answer["shell"], &answer["script"]),
            (&shell.into(), &script.into())
        );
    }
    let path = store.path("completions");
    std::fs::write(
        &path,
        stdout(&finish(store.palisade(&["completions", "bash"]))),
    )
    .unwrap();
    let line = "source \"$1\"; COMP_WORDS=(palisade elec); COMP_CWORD=1; \
                _palisade palisade elec palisade; echo \"${COMPREPLY[@]}\"";
    let output = Command::new("bash")
        .args(["-c", line, "bash"])
        .arg(&path)
        .output()
        .unwrap();
    assert_eq!(stdout(&output), "elect\n", "{output:?}");
    let output = finish_soon(store.palisade(&["completions", "tcsh"]));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn every_verb_has_a_page_with_its_examples() {
    let store = Store::new();
    let out = store.path("deep/man1");
    let shown = out.display().to_string();
    let output = finish_soon(store.palisade(&["man", "--out", &shown, "--json"]));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let written = contract::read(&stdout(&output), contract::WRITTEN);
    let written = written["written"].as_array().unwrap();
    assert!(written.len() > verbs().len());
    for path in written {
        let page = std::fs::read_to_string(path.as_str().unwrap()).unwrap();
        assert!(
            page.contains("\n.SH NAME\n") && page.contains("xample"),
            "{path}"
        );
    }
    for verb in verbs() {
        let page = std::fs::read_to_string(out.join(format!("palisade-{verb}.1"))).unwrap();
        let output = finish_soon(store.palisade(&["man", &verb]));
        assert_eq!((output.status.code(), stdout(&output)), (Some(0), page));
    }
    let output = finish_soon(store.palisade(&["man"]));
    assert!(stdout(&output).contains(".TH palisade 1"), "{output:?}");
    let output = finish_soon(store.palisade(&["man", "run", "--json"]));
    assert_eq!(
        contract::read(&stdout(&output), contract::PAGE)["page"],
        "palisade-run"
    );
    let output = finish_soon(store.palisade(&["man", "rnu"]));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    // Formatted without a complaint, where there is something to format with.
    if let Ok(output) = Command::new("groff")
        .args(["-man", "-Tascii", "-ww"])
        .arg(out.join("palisade-run.1"))
        .stdin(Stdio::null())
        .output()
    {
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn a_directory_that_can_not_be_written_is_a_failure() {
    let store = Store::new();
    std::fs::write(store.path("file"), "").unwrap();
    let out = store.path("file").display().to_string();
    let output = finish_soon(store.palisade(&["man", "--out", &out]));
    assert_eq!(output.status.code(), Some(74), "{output:?}");
    assert!(stderr(&output).contains("file"), "{output:?}");
}
