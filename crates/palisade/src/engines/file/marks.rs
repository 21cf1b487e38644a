//! Watches and tombstones: the two kinds of records beside tickets.
//!
//! Their numbers are in the counter record, so that a transaction looks for none where none is.

use super::fault::Fault;
use super::liveness::Hint;
use super::record::{self, TOMBSTONE, WATCH};
use super::tx::Tx;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;

type Result<T> = std::result::Result<T, Fault>;

impl Tx<'_> {
    /// Hints to every watch whose scope has the line with these ticket keys.
    pub(super) fn hint_watches(&mut self, line_prefix: &[u8]) -> Result<()> {
        if self.counters.watches == 0 {
            return Ok(());
        }
        let mut found = Vec::new();
        for entry in self.db.prefix_iter(&self.txn, &[WATCH])? {
            let (key, value) = entry?;
            let (process, wants) = record::read_watch(value, line_prefix)?;
            if wants {
                found.push((process, record::id_in_key(key)?));
            }
        }
        for (process, id) in found {
            match self.is_alive(process) {
                true => self.hint(process, Hint::Changed(id)),
                false => self.remove_watch(id)?,
            }
        }
        Ok(())
    }

    /// Adds a watch of this process.
    pub(super) fn add_watch(&mut self, id: u128, record: &[u8]) -> Result<()> {
        self.counters.watches += 1;
        self.put(&record::id_key(WATCH, id), record)
    }

    /// Removes a watch.
    pub(super) fn remove_watch(&mut self, id: u128) -> Result<()> {
        if self.delete(&record::id_key(WATCH, id))? {
            self.counters.watches = self.counters.watches.saturating_sub(1);
        }
        Ok(())
    }

    /// Whether the claim was left before it came.
    pub(super) fn was_left(&self, id: ClaimId) -> Result<bool> {
        if self.counters.tombstones == 0 {
            return Ok(false);
        }
        let found = self.db.get(&self.txn, &record::id_key(TOMBSTONE, id.0))?;
        let ends = found.map(record::read_tombstone).transpose()?;
        Ok(ends.is_some_and(|ends| ends > self.now))
    }

    /// Remembers until `ends` that a claim was left before it came.
    pub(super) fn bury_claim(&mut self, id: ClaimId, ends: BootTime) -> Result<()> {
        if self.counters.tombstones >= self.counters.sweep_at.max(64) {
            self.sweep_tombstones()?;
        }
        let key = record::id_key(TOMBSTONE, id.0);
        if self.db.get(&self.txn, &key)?.is_none() {
            self.counters.tombstones += 1;
        }
        self.put(&key, &ends.as_nanos().to_le_bytes())
    }

    fn sweep_tombstones(&mut self) -> Result<()> {
        let mut ended = Vec::new();
        for entry in self.db.prefix_iter(&self.txn, &[TOMBSTONE])? {
            let (key, value) = entry?;
            if record::read_tombstone(value)? <= self.now {
                ended.push(key.to_vec());
            }
        }
        self.counters.tombstones = self.counters.tombstones.saturating_sub(ended.len() as u64);
        // Twice what is left: each tombstone is looked at a bounded number of times.
        self.counters.sweep_at = 2 * self.counters.tombstones;
        for key in ended {
            self.delete(&key)?;
        }
        Ok(())
    }
}
