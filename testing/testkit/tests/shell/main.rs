//! Runs the shell examples in the pages: every `sh` block of README and docs, with the real
//! command, each in its own directory. URLs lead to real servers, which all blocks share.
//!
//! | in a page | means |
//! |---|---|
//! | `sh no-run: REASON` | not run here; counted and printed |
//! | a line `#> TEXT` | what the command above prints |
//! | a block `text output` below | what the whole block prints |
//! | `<!-- each: line -->` | lines are examples, each run for itself; 1, the "no" of a question, is fine |
//! | `<!-- setup: SHELL -->`, `<!-- after: SHELL -->` | run before, and after, as a part of it |
//! | `<!-- exit: N -->` | the exit code of the block, if it is not 0 |
//! | `<!-- run: SHELL -->` | the block, whatever its language, is what this reads |
//! | `<!-- test: NAME -->` | `tests/cli/scripts.rs` of the command tries it, with competitors |
//!
//! In expected output `…` stands for anything, and a number for any number. A `./program` that does
//! not exist is created, and must have been called.

#![allow(clippy::unwrap_used)]

mod output;
mod sandbox;

use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use palisade_testkit::lab::launch;
use palisade_testkit::lab::pages::{self, Block, Servers};

use sandbox::Sandbox;

/// The allowed languages. Without a language rustdoc would treat a block as Rust.
const LANGUAGES: &[&str] = &[
    "dockerfile",
    "hcl",
    "ini",
    "json",
    "python",
    "rust",
    "sh",
    "sql",
    "text",
    "toml",
    "yaml",
];

/// Other programs that a block may need.
const TOOLS: &[&str] = &["curl", "man", "openssl", "psql", "sqlite3"];

fn main() -> ExitCode {
    let (arguments, servers) = (Arguments::from_args(), Arc::new(Servers::default()));
    let blocks = pages::all_blocks();
    let mut trials = vec![
        Trial::test("every_block_says_what_it_is", languages),
        Trial::test("what_differs_is_told_apart", || {
            output::tells_apart();
            Ok(())
        }),
    ];
    let mut left_out = Vec::new();
    for (at, block) in blocks.iter().enumerate() {
        let name = block.place();
        if let Some(why) = block.not_run() {
            left_out.push(format!("{name}: {why}"));
            continue;
        }
        let runs = ["run", "test"]
            .iter()
            .any(|word| block.note(word).is_some());
        if block.language != "sh" && !runs {
            continue;
        }
        if let Some(test) = block.note("test") {
            let test = test.to_owned();
            trials.push(Trial::test(name, move || has_a_test(&test)));
            continue;
        }
        let shown = blocks.get(at + 1).filter(|next| is_output_of(next, block));
        let shown = shown.map(|next| next.text.clone());
        let (block, servers) = (block.clone(), servers.clone());
        trials.push(Trial::ignorable_test(name, move || {
            tried(&block, shown.as_deref(), &servers)
        }));
    }
    let ran = libtest_mimic::run(&arguments, trials);
    println!(
        "{} blocks are not run:\n  {}",
        left_out.len(),
        left_out.join("\n  ")
    );
    ran.exit_code()
}

fn is_output_of(next: &Block, block: &Block) -> bool {
    next.page == block.page && next.language == "text" && next.info == "output"
}

fn languages() -> Result<(), Failed> {
    let unknown = pages::all_blocks().into_iter();
    let unknown = unknown.filter(|block| !LANGUAGES.contains(&block.language.as_str()));
    let unknown: Vec<String> = unknown
        .map(|block| format!("{} is {:?}", block.place(), block.language))
        .collect();
    if unknown.is_empty() {
        Ok(())
    } else {
        Err(unknown.join("\n").into())
    }
}

/// Checks that a block with a `test` note has that test.
fn has_a_test(name: &str) -> Result<(), Failed> {
    let tests = pages::root().join("crates/palisade-cli/tests/cli/scripts.rs");
    let there = std::fs::read_to_string(tests)?.contains(&format!("example(\"{name}\")"));
    if there {
        Ok(())
    } else {
        Err(format!("no test tries {name}").into())
    }
}

fn tried(block: &Block, shown: Option<&str>, servers: &Servers) -> Result<Completion, Failed> {
    let said: String = block
        .notes
        .iter()
        .map(|(_, text)| text.as_str())
        .chain([block.text.as_str()])
        .collect();
    let words: Vec<&str> = said.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    for tool in TOOLS.iter().filter(|tool| words.contains(tool)) {
        if !sandbox::installed(tool) {
            launch::skip(tool, "not installed");
            return Ok(Completion::ignored_with(format!("{tool} is not installed")));
        }
    }
    if words.contains(&"psycopg") && launch::need_tool("psycopg").is_none() {
        return Ok(Completion::ignored_with("psycopg is not here"));
    }
    // These blocks use databases with the same names.
    static DATABASES: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let databases = words.contains(&"psql");
    let _turn = databases.then(|| {
        DATABASES
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    });
    let Some(sandbox) = Sandbox::new(block, servers, databases)? else {
        return Ok(Completion::ignored_with("a server is not here"));
    };
    sandbox.run(shown)?;
    Ok(Completion::Completed)
}
