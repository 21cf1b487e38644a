//! Makes a doctest of every `rust` block in the pages.
//!
//! - A block is the body of an async function, unless it has a `main` or is a `#[test]`, which is then
//!   called.
//! - What it needs and a reader does not (imports, a table, a function that it calls) stands above it
//!   in `<!-- rust: … -->`; a line `…` there is where the block goes, if not to the end.
//! - A URL in quotes leads to a server of the testkit (`lab::pages::at`).
//! - `rust no-run: REASON` is compiled and not run. Below `<!-- file: … -->` is a file that is
//!   compiled as what it is.

#![allow(missing_docs, unreachable_pub, dead_code)]

#[path = "../../testing/testkit/src/lab/pages/blocks.rs"]
mod blocks;

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

use blocks::Block;

/// What a URL begins with. The last is not followed by `//`.
const SCHEMES: &[&str] = &[
    "consul://",
    "etcd://",
    "kubernetes://",
    "postgres://",
    "postgres+advisory://",
    "redis://",
    "redlock://",
    "zookeeper://",
    "file:",
];

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut made = String::new();
    for folder in ["docs", "docs/engines"] {
        println!("cargo::rerun-if-changed={}", root.join(folder).display());
    }
    for page in blocks::pages(&root) {
        println!("cargo::rerun-if-changed={}", root.join(&page).display());
        let text = fs::read_to_string(root.join(&page)).expect("a page that can be read");
        for block in blocks::blocks(&page.display().to_string(), &text) {
            if block.language == "rust" && block.note("file").is_none() {
                write!(made, "{}", doctest(&block)).expect("memory");
            }
        }
    }
    let out = env::var_os("OUT_DIR").expect("cargo says where");
    fs::write(Path::new(&out).join("pages.rs"), made).expect("a folder of ours");
}

fn doctest(block: &Block) -> String {
    let name = block.place().to_lowercase();
    let name: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect();
    let attributes = match block.info.as_str() {
        "" => "",
        info if info.starts_with("no-run:") => ",no_run",
        info => panic!("{}: a block that is `rust {info}`", block.place()),
    };
    let mut program = program(&block.text, block.note("rust").unwrap_or(""));
    if attributes.is_empty() {
        program = mapped(&program);
    }
    format!(
        "#[doc = {:?}]\nmod {name} {{}}\n",
        format!("```rust{attributes}\n{program}\n```")
    )
}

fn program(text: &str, around: &str) -> String {
    let (before, behind) = around.split_once("\n…").unwrap_or((around, ""));
    let text = format!("{before}\n{text}\n{behind}");
    if text.contains("fn main(") {
        return text;
    }
    if text.contains("#[test]") {
        let calls = text.match_indices("#[test]\nfn ").map(|(at, found)| {
            let name = &text[at + found.len()..];
            format!("{}();", &name[..name.find('(').expect("a function")])
        });
        let calls: String = calls.collect();
        return format!("{}\nfn main() {{ {calls} }}", text.replace("#[test]\n", ""));
    }
    format!(
        "#[tokio::main(flavor = \"current_thread\")]\n\
         async fn main() -> Result<(), Box<dyn std::error::Error>> {{\n{text}\n# Ok(()) }}"
    )
}

/// The text with each URL in quotes as a call.
fn mapped(text: &str) -> String {
    let mut mapped = String::new();
    for (at, part) in text.split('"').enumerate() {
        let quoted = at % 2 == 1;
        let url =
            quoted && !part.contains('{') && SCHEMES.iter().any(|scheme| part.starts_with(scheme));
        match (quoted, url) {
            (false, _) => mapped += part,
            (true, false) => write!(mapped, "\"{part}\"").expect("memory"),
            (true, true) => {
                write!(mapped, "palisade_testkit::lab::pages::at(\"{part}\")").expect("memory")
            }
        }
    }
    mapped
}
