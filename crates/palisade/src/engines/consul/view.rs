//! `View`: a line as it was read, and who lives in it.
//!
//! Whole: the lock itself, held by the session. Readers: the lock's key is a gate that every
//! reader writes who comes, and each reader a key of its own, held by its session. A writer that
//! waits for readers closes the gate: it holds the key, which stays a gate, so that no reader
//! comes, and is granted by another write once the last one has gone. Permits: Consul's own
//! semaphore. Pure; what is written about it is in `plan` and `parting`.

use std::collections::BTreeSet;

use super::keys::Line;
use super::wire::{Holders, Pair, READERS, Record, SEMAPHORE, session_id};
use crate::core::claim::ClaimId;

/// A line as it was read.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    pub(super) lock: Option<Pair>,
    pub(super) tree: Vec<Pair>,
    /// The index of what is below the lock.
    pub(super) tree_index: u64,
}

impl View {
    /// The readers' keys.
    pub(super) fn readers<'a>(&'a self, line: &Line) -> impl Iterator<Item = &'a Pair> {
        let prefix = format!("{}/.readers/", line.lock);
        self.tree
            .iter()
            .filter(move |pair| pair.key.starts_with(&prefix))
    }

    /// The permits' keys, and the session that each is named after.
    pub(super) fn permits<'a>(&'a self, line: &Line) -> impl Iterator<Item = (&'a str, &'a Pair)> {
        let prefix = line.tree();
        self.tree.iter().filter_map(move |pair| {
            let session = pair.key.strip_prefix(&prefix)?;
            (pair.flags == SEMAPHORE && session_id(session).is_some()).then_some((session, pair))
        })
    }

    /// The semaphore's key, if it is one.
    pub(super) fn semaphore(&self, line: &Line) -> Option<&Pair> {
        let key = line.semaphore();
        self.tree.iter().find(|pair| pair.key == key)
    }

    /// The semaphore's holders that live, and its limit; `None` when nobody does.
    pub(super) fn holders(&self, line: &Line) -> Option<Holders> {
        let pair = self.semaphore(line)?;
        let mut holders: Holders = match pair.flags {
            SEMAPHORE => serde_json::from_slice(&pair.bytes()).ok()?,
            _ => return None,
        };
        let living: BTreeSet<&str> = self
            .permits(line)
            .filter(|(session, pair)| pair.holder() == Some(session))
            .map(|(session, _)| session)
            .collect();
        holders
            .holders
            .retain(|session, holds| *holds && living.contains(session.as_str()));
        (!holders.holders.is_empty()).then_some(holders)
    }

    /// Whether a session has the lock's key: as a lock, or as a gate that it closed.
    pub(super) fn is_locked(&self) -> bool {
        self.lock
            .as_ref()
            .is_some_and(|lock| lock.holder().is_some())
    }

    /// Whether the lock's key is a gate, open or closed.
    pub(super) fn is_gate(&self) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.flags == READERS)
    }

    /// Whether this session keeps the gate closed.
    pub(super) fn is_closed_by(&self, session: &str) -> bool {
        let lock = self.lock.as_ref().filter(|_| self.is_gate());
        lock.is_some_and(|lock| lock.holder() == Some(session))
    }

    /// Whether a reader lives.
    pub(super) fn is_read(&self, line: &Line) -> bool {
        self.is_gate() && self.readers(line).any(|reader| reader.holder().is_some())
    }

    /// Where a claim is, by its id and its session.
    pub(super) fn find(&self, line: &Line, claim: ClaimId, session: &str) -> Option<Found> {
        if let Some(lock) = &self.lock
            && let Some(record) = lock.of(claim, session)
        {
            let spot = match self.is_gate() {
                true => Spot::Gate,
                false => Spot::Whole,
            };
            return Some(Found::new(spot, lock, record));
        }
        let own = line.reader(claim);
        if let Some(pair) = self.tree.iter().find(|pair| pair.key == own)
            && let Some(record) = pair.of(claim, session)
            && self.is_gate()
        {
            return Some(Found::new(Spot::Reader, pair, record));
        }
        let (_, pair) = self.permits(line).find(|(of, _)| *of == session)?;
        let record = pair.of(claim, session)?;
        let listed = self
            .holders(line)
            .is_some_and(|holders| holders.holders.contains_key(session));
        listed.then(|| Found::new(Spot::Permit, pair, record))
    }
}

/// Where a claim is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spot {
    /// It has the lock itself.
    Whole,
    /// It keeps the gate closed, and waits for the readers to go.
    Gate,
    /// It is one of the readers.
    Reader,
    /// It is one of the permits.
    Permit,
}

impl Spot {
    /// The key that is its own.
    pub(super) fn key(self, line: &Line, claim: ClaimId, session: &str) -> String {
        match self {
            Self::Whole | Self::Gate => line.lock.clone(),
            Self::Reader => line.reader(claim),
            Self::Permit => line.permit(session),
        }
    }
}

/// A claim that is in the store.
#[derive(Debug, Clone)]
pub(super) struct Found {
    pub(super) spot: Spot,
    pub(super) sequence: u64,
    /// When its key was written last.
    pub(super) index: u64,
    pub(super) record: Record,
}

impl Found {
    fn new(spot: Spot, pair: &Pair, record: Record) -> Self {
        Self {
            spot,
            sequence: pair.sequence(&record),
            index: pair.modify_index,
            record,
        }
    }

    /// What was counted, if it holds.
    pub(super) fn held(&self) -> Option<u64> {
        (self.spot != Spot::Gate).then_some(self.sequence)
    }
}
