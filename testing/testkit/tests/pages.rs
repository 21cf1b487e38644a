//! `docs/adding-an-engine.md` shows whole files: each block under a marker must equal its file.
//! `PALISADE_BLESS=1` writes the files into the page.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

const PAGE: &str = "docs/adding-an-engine.md";

/// The page with every marked block filled from its file, and the files that it shows.
fn filled(root: &Path, page: &str) -> (String, Vec<String>) {
    let (mut filled, mut shown) = (String::new(), Vec::new());
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        filled += &format!("{line}\n");
        let marker = line.strip_prefix("<!-- file: ");
        let Some(file) = marker.and_then(|rest| rest.strip_suffix(" -->")) else {
            continue;
        };
        let text = fs::read_to_string(root.join(file)).unwrap();
        let fence = lines.next().filter(|fence| fence.starts_with("```"));
        let fence = fence.unwrap_or_else(|| panic!("no block below {line}"));
        assert!(
            lines.any(|line| line == "```"),
            "the block of {file} has no end"
        );
        filled += &format!("{fence}\n{text}```\n");
        shown.push(file.to_owned());
    }
    (filled, shown)
}

#[test]
fn the_page_shows_the_engine_that_is_tested() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join(PAGE)).unwrap();
    let (filled, mut shown) = filled(&root, &page);
    if std::env::var_os("PALISADE_BLESS").is_some() {
        fs::write(root.join(PAGE), &filled).unwrap();
    } else {
        assert!(
            page == filled,
            "{PAGE} is stale: run this test with PALISADE_BLESS=1"
        );
    }
    let mut files = Vec::new();
    for folder in ["", "src/", "tests/"] {
        for entry in fs::read_dir(root.join("examples/json-engine").join(folder)).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                let name = entry.file_name().into_string().unwrap();
                files.push(format!("examples/json-engine/{folder}{name}"));
            }
        }
    }
    files.sort();
    shown.sort();
    assert_eq!(shown, files, "every file of the engine is on the page");
}
