//! The log of messages that reached the proxy.

use std::collections::VecDeque;
use std::sync::Arc;

use super::message::{Direction, Kind};

/// How many entries are kept; a long run drops its oldest.
const KEPT: usize = 100_000;

/// One message, and how often it was passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Its direction.
    pub direction: Direction,
    /// The number of its connection, from 1.
    pub connection: u64,
    /// Its kind.
    pub kind: Kind,
    /// Its label, if the protocol has one.
    pub label: Option<Arc<str>>,
    /// Its size in bytes, as it arrived.
    pub bytes: usize,
    /// How often it was passed on: 0 if it was lost, 2 if it was duplicated.
    pub copies: u32,
}

#[derive(Default)]
pub(super) struct Log {
    entries: VecDeque<Seen>,
}

impl Log {
    pub(super) fn add(&mut self, entry: Seen) {
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    pub(super) fn list(&self) -> Vec<Seen> {
        self.entries.iter().cloned().collect()
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }

    pub(super) fn passed(&self, direction: Direction, label: &str) -> usize {
        let matching = |it: &&Seen| it.direction == direction && it.label.as_deref() == Some(label);
        self.entries
            .iter()
            .filter(matching)
            .map(|it| it.copies as usize)
            .sum()
    }
}
