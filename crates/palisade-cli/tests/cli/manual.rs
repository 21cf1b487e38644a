//! `completions`, `man` and `help`.

use std::process::Command;

use crate::contract;
use crate::every_verb::verbs;
use crate::support::*;

#[test]
fn completions_know_every_verb_and_are_shell() {
    let store = Store::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = store.soon(&["completions", shell]).is(0).silent().out();
        for verb in verbs() {
            assert!(script.contains(&verb), "{verb} in {shell}");
        }
        let answer = store.soon(&["completions", shell, "--json"]);
        let answer = answer.json(contract::COMPLETIONS);
        assert_eq!(
            answer,
            serde_json::json!({"shell": shell, "script": script})
        );
    }
    let path = store.path("completions");
    std::fs::write(&path, store.ran("completions bash").out()).unwrap();
    let line = "source \"$1\"; COMP_WORDS=(palisade elec); COMP_CWORD=1; \
                _palisade palisade elec palisade; echo \"${COMPREPLY[@]}\"";
    let mut bash = Command::new("bash");
    bash.args(["-c", line, "bash"]).arg(&path);
    finish(bash).wrote("elect\n");
    store.soon("completions tcsh").is(2);
    // Those that are installed here can read theirs.
    for shell in ["bash", "zsh", "fish"] {
        let path = store.path(&format!("completions.{shell}"));
        std::fs::write(&path, store.ran(&["completions", shell]).out()).unwrap();
        if let Ok(read) = Command::new(shell).arg("-n").arg(&path).output() {
            Ran(read).is(0).silent();
        }
    }
}

#[test]
fn every_verb_has_a_page_with_its_examples() {
    let store = Store::new();
    let out = store.path("deep/man1");
    let output = store.soon(&format!("man --out {} --json", out.display()));
    let written = output.is(0).json(contract::WRITTEN);
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
        store.soon(&["man", &verb]).is(0).wrote(&page);
    }
    assert!(store.soon("man").out().contains(".TH palisade 1"));
    let page = store.soon("man run --json").json(contract::PAGE);
    assert_eq!(page["page"], "palisade-run");
    store.soon("man rnu").is(2);
    let work = std::fs::read_to_string(out.join("palisade-queue-work.1")).unwrap();
    for words in [
        &["man", "queue", "work"][..],
        &["man", "queue work"],
        &["man", "queue-work"],
    ] {
        store.soon(words).is(0).wrote(&work);
    }
    store.soon("man queue wrk").is(2).says("queue work?");
    store.soon("man queue work x").is(2).says("no verb");
    // Formatted without a complaint, where there is something to format with.
    let mut groff = Command::new("groff");
    groff
        .args(["-man", "-Tascii", "-ww"])
        .arg(out.join("palisade-run.1"));
    if let Ok(output) = groff.output() {
        Ran(output).silent();
    }
    std::fs::write(store.path("file"), "").unwrap();
    let file = store.path("file");
    store
        .soon(&format!("man --out {}", file.display()))
        .is(74)
        .says("file");
}

/// The options that every verb has come after its own, under a heading of theirs.
#[test]
fn options_of_all_verbs_are_last_in_every_help() {
    let store = Store::new();
    let parts = [
        "queue push",
        "queue work",
        "fence check",
        "config show",
        "serve token",
    ];
    let parts = parts.into_iter().map(str::to_owned);
    for verb in verbs().into_iter().chain(parts) {
        for flag in ["-h", "--help"] {
            let help = store.soon(&format!("{verb} {flag}")).is(0).out();
            let (own, global) = help.split_once("\nGlobal options:\n").expect(&verb);
            let starts = |text: &str, option: &str| {
                text.lines()
                    .any(|line| line.trim_start().starts_with(option))
            };
            for option in ["--url", "--json"] {
                assert!(!starts(own, option) && starts(global, option), "{help}");
            }
        }
    }
}

#[test]
fn help_is_the_flag_of_the_same_name() {
    let store = Store::new();
    let same = |words: &str, flags: &str| {
        let asked = store.soon(words);
        asked.is(0).silent().wrote(&store.soon(flags).out());
        assert!(asked.out().contains("Usage: palisade"), "{asked:?}");
    };
    same("help", "--help");
    for verb in verbs() {
        same(&format!("help {verb}"), &format!("{verb} --help"));
    }
    same("help fence check", "fence check --help");
    store.soon("help rnu").is(2).says("rnu").wrote("");
    assert!(!store.path("store").exists(), "none of this opened a store");
}
