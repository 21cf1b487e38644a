//! Directions inside a crate, which the compiler does not keep: core names no primitive, the gateway
//! names no engine, only the command's entry chooses exit codes. (The crates keep that core names no
//! engine and no engine another; `Lease` keeps that only the keeper renews.)

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

/// Words that files must not contain, with exceptions.
struct Rule {
    under: &'static str,
    words: &'static [&'static str],
    except: &'static [&'static str],
    why: &'static str,
}

const RULES: &[Rule] = &[
    Rule {
        under: "crates/palisade-core/src/core",
        words: &[
            "crate::primitives",
            "crate::client",
            "crate::fence",
            "crate::layers",
            "crate::blocking",
            "crate::memory",
        ],
        except: &[],
        why: "core names no primitive",
    },
    Rule {
        under: "crates/palisade-gateway/src",
        words: &["palisade::engines", "palisade::config", "process::exit"],
        except: &[],
        why: "the gateway knows the library and no single engine",
    },
    Rule {
        under: "crates/palisade-cli/src",
        words: &[
            "process::exit",
            "ExitCode::from",
            "ExitCode::FAILURE",
            "ExitCode::SUCCESS",
        ],
        except: &["main.rs", "exit.rs"],
        why: "exit codes are picked in one place",
    },
    Rule {
        under: "crates/palisade-core/src",
        words: DURATIONS,
        except: &[],
        why: ROUNDED,
    },
    Rule {
        under: "crates/palisade-kit/src",
        words: DURATIONS,
        except: &[],
        why: ROUNDED,
    },
    Rule {
        under: "engines",
        words: DURATIONS,
        except: &[],
        why: ROUNDED,
    },
    Rule {
        under: "crates/palisade-cli/src",
        words: DURATIONS,
        except: &[],
        why: ROUNDED,
    },
    Rule {
        under: "crates/palisade-gateway/src",
        words: DURATIONS,
        except: &[],
        why: ROUNDED,
    },
];

/// How durations are usually called, in a message that shows all of their digits.
const DURATIONS: &[&str] = &[
    "{limit:?}",
    "{timeout:?}",
    "{within:?}",
    "{waited:?}",
    "{patience:?}",
    "{ttl:?}",
    "{delay:?}",
    "{pause:?}",
    "{longest:?}",
    "{floor:?}",
    "{min:?}",
    "within {:?}",
    "after {:?}",
];
const ROUNDED: &str = "durations in messages are rounded, by `rounded` of core/duration.rs";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The code of a file: without comments, and without its tests, which are at its end.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate();
    let code = lines.take_while(|(_, line)| !line.starts_with("#[cfg(test)]"));
    code.map(|(at, line)| (at + 1, line))
        .filter(|(_, line)| !line.trim_start().starts_with("//"))
}

/// Whether it is a file of tests: `tests.rs`, or in a directory `tests` beside the code.
fn is_test(path: &str) -> bool {
    path.ends_with("tests.rs") || path.contains("/tests/")
}

fn breaches(rule: &Rule) -> Vec<String> {
    let dir = root().join(rule.under);
    let mut files = Vec::new();
    sources(&dir, &mut files);
    assert!(!files.is_empty(), "{} has no sources", rule.under);
    let mut breaches = Vec::new();
    for file in files {
        let shown = file
            .strip_prefix(&dir)
            .unwrap()
            .to_string_lossy()
            .into_owned();
        if is_test(&shown) || rule.except.iter().any(|except| shown.starts_with(except)) {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        for (at, line) in code(&text) {
            if let Some(word) = rule.words.iter().find(|word| line.contains(**word)) {
                breaches.push(format!(
                    "{}/{shown}:{at} says {word}: {}",
                    rule.under, rule.why
                ));
            }
        }
    }
    breaches
}

#[test]
fn imports_point_one_way() {
    let found: Vec<String> = RULES.iter().flat_map(breaches).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// The test can fail: without its exceptions it finds where the command chooses exit codes.
#[test]
fn the_exceptions_are_in_use() {
    let rule = RULES.iter().find(|rule| !rule.except.is_empty()).unwrap();
    let bare = Rule {
        except: &[],
        ..*rule
    };
    assert!(!breaches(&bare).is_empty());
    let text = "at\n// process::exit\n    process::exit(1)\n#[cfg(test)]\nprocess::exit(2)";
    let seen: Vec<usize> = code(text)
        .filter(|(_, line)| line.contains("process::exit"))
        .map(|(at, _)| at)
        .collect();
    assert_eq!(seen, [3]);
}
