//! The store of a run: a fenced file, or, for the control, a plain one.
//!
//! A counter keeps a chain: one line per accepted write. A write reads the chain, appends its line
//! and writes the whole back, so that updates destroyed by a wrong order of writes can be named.

use std::path::{Path, PathBuf};

use palisade::fence::FileFence;
use palisade::{Name, Result, Token};

/// The fenced storage of a run.
pub(super) struct Fenced {
    pub(super) fence: FileFence,
    pub(super) resource: Name,
}

impl Fenced {
    pub(super) fn open(dir: &Path) -> Result<Self> {
        Ok(Self {
            fence: FileFence::open(dir)?,
            resource: Name::new("store")?,
        })
    }
}

/// The control's file.
pub(super) fn unfenced(dir: &Path) -> PathBuf {
    dir.join("unfenced")
}

/// One line of a counter's chain, which has all accepted writes in the store's own order.
pub(super) fn entry(token: Token, client: &str, op: u64) -> String {
    format!("{token} {client} {op}\n")
}

/// Parses a chain: (token, client, op) per write.
pub(super) fn entries(chain: &str) -> Option<Vec<(u64, String, u64)>> {
    let entry = |line: &str| {
        let mut words = line.split(' ');
        let (token, client, op) = (words.next()?, words.next()?, words.next()?);
        Some((token.parse().ok()?, client.to_owned(), op.parse().ok()?))
    };
    chain.lines().map(entry).collect()
}
