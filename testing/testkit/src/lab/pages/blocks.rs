//! `Block`: one fenced block of a page, with the notes in HTML comments right above it.
//!
//! The first line of a block states its language and, if it is not run, the reason
//! (`sh no-run: needs Docker`). Everything that reads pages uses this file, including the build
//! script of `palisade-docs`, so it uses only the standard library.

use std::path::{Path, PathBuf};

/// A fenced block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The page, relative to the root of the project.
    pub page: String,
    /// The line number of its opening fence.
    pub line: usize,
    /// `sh`, `rust`, `json`, …; may be empty.
    pub language: String,
    /// The text after the language in the same line.
    pub info: String,
    /// The comments right above, as `WORD: TEXT`, in order.
    pub notes: Vec<(String, String)>,
    /// The content.
    pub text: String,
}

impl Block {
    /// The text of the first note with this word.
    pub fn note(&self, word: &str) -> Option<&str> {
        let found = self.notes.iter().find(|(known, _)| known == word);
        found.map(|(_, text)| text.as_str())
    }

    /// The reason why it is not run, if it states one.
    pub fn not_run(&self) -> Option<&str> {
        self.info.strip_prefix("no-run:").map(str::trim)
    }

    /// Page and line.
    pub fn place(&self) -> String {
        format!("{}:{}", self.page, self.line)
    }
}

/// The pages of the project, relative to its root: those at the top, everything in `docs`, and
/// those of the clients.
///
/// # Panics
/// If a directory can't be read.
pub fn pages(root: &Path) -> Vec<PathBuf> {
    let folders = ["", "docs", "docs/engines", "clients/python"];
    let mut pages: Vec<PathBuf> = folders
        .into_iter()
        .flat_map(|folder| in_folder(root, folder))
        .collect();
    pages.sort();
    pages
}

fn in_folder(root: &Path, folder: &str) -> Vec<PathBuf> {
    let files = std::fs::read_dir(root.join(folder));
    let files = files.unwrap_or_else(|error| panic!("{folder}: {error}"));
    let names = files
        .flatten()
        .map(|file| Path::new(folder).join(file.file_name()));
    names
        .filter(|name| name.extension().is_some_and(|end| end == "md"))
        .collect()
}

/// The blocks of a page.
///
/// # Panics
/// If a block or a comment does not end.
pub fn blocks(page: &str, text: &str) -> Vec<Block> {
    let (mut found, mut notes) = (Vec::new(), Vec::new());
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        if let Some(said) = line.strip_prefix("<!-- ") {
            let mut said = said.to_owned();
            while !said.contains("-->") {
                let more = lines
                    .next()
                    .unwrap_or_else(|| panic!("{page}:{}: a comment without end", at + 1));
                said = format!("{said}\n{}", more.1);
            }
            let said = said.split("-->").next().unwrap_or_default();
            let (word, rest) = said.split_once(':').unwrap_or((said, ""));
            notes.push((word.trim().to_owned(), rest.trim().to_owned()));
        } else if let Some(info) = line.strip_prefix("```") {
            let mut inside = String::new();
            loop {
                match lines.next() {
                    Some((_, "```")) => break,
                    Some((_, line)) => inside += &format!("{line}\n"),
                    None => panic!("{page}:{}: a block without end", at + 1),
                }
            }
            let cut = info.find([' ', ',']).unwrap_or(info.len());
            found.push(Block {
                page: page.to_owned(),
                line: at + 1,
                language: info[..cut].to_owned(),
                info: info[cut..].trim_matches([' ', ',']).to_owned(),
                notes: std::mem::take(&mut notes),
                text: inside,
            });
        } else if !line.is_empty() {
            notes.clear();
        }
    }
    found
}
