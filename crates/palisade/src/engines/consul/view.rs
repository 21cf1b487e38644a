//! `View`: a line as it was read, who lives in it, and what would give a claim its place.
//!
//! Pure: it reads pairs and makes the operations of one transaction, each guarded by the indexes
//! that were read, so that the write decides and a stale read only costs another try.
//!
//! Whole: the lock itself, held by the session. Readers: the lock's key is an unlocked gate that
//! every reader writes who comes, and each reader a key of its own, held by its session. Permits:
//! Consul's own semaphore. The kinds exclude each other, decided in the same transaction.

use std::collections::BTreeSet;

use super::keys::Line;
use super::wire::{Holders, LOCK, Op, Pair, READERS, Record, SEMAPHORE, session_id};
use crate::core::claim::{Ask, ClaimId, READERS as ALL_READERS};
use crate::core::error::{Error, Kind, Result};
use crate::core::line::capacity_mismatch;

/// How many keys of the dead one transaction sweeps away; Consul takes 64 operations.
const SWEPT: usize = 24;

/// A line as it was read.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    pub(super) lock: Option<Pair>,
    pub(super) tree: Vec<Pair>,
    /// The index of what is below the lock.
    pub(super) tree_index: u64,
}

/// What a claim can do about a line.
#[derive(Debug)]
pub(super) enum Plan {
    /// Apply these; the one that locks answers with the count.
    Take(Vec<Op>),
    /// Others hold; sleep on the lock, or on what is below it.
    Behind {
        /// Below it.
        tree: bool,
    },
}

/// Who asks.
pub(super) struct Asker<'a> {
    pub(super) line: &'a Line,
    pub(super) claim: ClaimId,
    pub(super) session: &'a str,
    pub(super) record: Record,
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
    fn semaphore(&self, line: &Line) -> Option<&Pair> {
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

    /// Whether a session has the lock.
    fn is_locked(&self) -> bool {
        self.lock
            .as_ref()
            .is_some_and(|lock| lock.holder().is_some())
    }

    fn is_gate(&self) -> bool {
        self.lock
            .as_ref()
            .is_some_and(|lock| lock.flags == READERS && lock.holder().is_none())
    }

    /// Whether a reader lives.
    fn is_read(&self, line: &Line) -> bool {
        self.is_gate() && self.readers(line).any(|reader| reader.holder().is_some())
    }

    /// Refuses a key that something else uses.
    fn must_be_ours(&self) -> Result<()> {
        match &self.lock {
            Some(lock) if lock.flags == SEMAPHORE => Err(Error::new(
                Kind::CapacityMismatch,
                "enter",
                "this key belongs to a semaphore; use the name of the semaphore, or another",
            )),
            Some(lock) if lock.flags != LOCK && lock.flags != READERS => Err(Error::new(
                Kind::Unusable,
                "enter",
                "the key of this lock holds something that is no lock; use another name, or remove the key",
            )),
            _ => Ok(()),
        }
    }

    /// What gives `asker` its place, or what it is behind.
    pub(super) fn plan(&self, ask: Ask, asker: &Asker<'_>) -> Result<Plan> {
        self.must_be_ours()?;
        let live = self.holders(asker.line);
        match ask {
            Ask::Whole | Ask::READ => {
                if let Some(holders) = live {
                    return Err(beside_permits(holders.limit, ask));
                }
                if self.is_locked() {
                    return Ok(Plan::Behind { tree: false });
                }
                if ask == Ask::Whole && self.is_read(asker.line) {
                    return Ok(Plan::Behind { tree: true });
                }
                Ok(Plan::Take(match ask {
                    Ask::Whole => self.take_whole(asker),
                    _ => self.take_read(asker),
                }))
            }
            Ask::Part { capacity, .. } => {
                if self.is_read(asker.line) {
                    return Err(capacity_mismatch(ALL_READERS, capacity));
                }
                if self.is_locked() {
                    return Err(Error::new(
                        Kind::CapacityMismatch,
                        "enter",
                        "this line is in use as a lock, not for permits; wait until it is free or use another name",
                    ));
                }
                match live {
                    Some(holders) if holders.limit != capacity => {
                        Err(capacity_mismatch(holders.limit, capacity))
                    }
                    Some(holders) if holders.holders.len() >= capacity as usize => {
                        Ok(Plan::Behind { tree: true })
                    }
                    live => Ok(Plan::Take(self.take_permit(asker, live, capacity))),
                }
            }
        }
    }

    /// Guards for the semaphore's key, and its end if nobody lives in it.
    fn no_permits(&self, line: &Line) -> Vec<Op> {
        let (key, pair) = (line.semaphore(), self.semaphore(line));
        let mut ops = vec![Op::unchanged(&key, pair)];
        if pair.is_some_and(|pair| pair.flags == SEMAPHORE) {
            ops.push(Op::delete(&key));
            ops.extend(self.dead_permits(line));
        }
        ops
    }

    fn dead_permits(&self, line: &Line) -> Vec<Op> {
        self.permits(line)
            .filter(|(_, pair)| pair.holder().is_none())
            .take(SWEPT)
            .map(|(_, pair)| Op::delete(&pair.key))
            .collect()
    }

    fn dead_readers(&self, line: &Line) -> Vec<Op> {
        self.readers(line)
            .filter(|pair| pair.holder().is_none())
            .take(SWEPT)
            .map(|pair| Op::delete(&pair.key))
            .collect()
    }

    fn take_whole(&self, asker: &Asker<'_>) -> Vec<Op> {
        let Asker { line, session, .. } = *asker;
        let mut ops = vec![Op::unchanged(&line.lock, self.lock.as_ref())];
        ops.extend(self.no_permits(line));
        ops.extend(self.dead_readers(line));
        ops.push(Op::lock(&line.lock, session, LOCK, &asker.record.to_json()));
        ops
    }

    fn take_read(&self, asker: &Asker<'_>) -> Vec<Op> {
        let Asker { line, session, .. } = *asker;
        let mut ops = vec![Op::unchanged(&line.lock, self.lock.as_ref())];
        ops.extend(self.no_permits(line));
        ops.extend(self.dead_readers(line));
        ops.push(gate(line));
        let key = line.reader(asker.claim);
        ops.push(Op::lock(&key, session, READERS, &asker.record.to_json()));
        ops
    }

    fn take_permit(&self, asker: &Asker<'_>, live: Option<Holders>, capacity: u32) -> Vec<Op> {
        let Asker { line, session, .. } = *asker;
        let mut ops = vec![Op::unchanged(&line.lock, self.lock.as_ref())];
        // Left behind by a session that ended.
        if self.lock.is_some() {
            ops.push(Op::delete(&line.lock));
            ops.extend(self.dead_readers(line));
        }
        let key = line.semaphore();
        ops.push(Op::unchanged(&key, self.semaphore(line)));
        ops.extend(self.dead_permits(line));
        let mut holders = live.unwrap_or_default();
        holders.limit = capacity;
        holders.holders.insert(session.to_owned(), true);
        ops.push(Op::set(&key, SEMAPHORE, &json(&holders)));
        let key = line.permit(session);
        ops.push(Op::lock(&key, session, SEMAPHORE, &asker.record.to_json()));
        ops
    }

    /// Where a claim holds, by its id and its session.
    pub(super) fn find(&self, line: &Line, claim: ClaimId, session: &str) -> Option<Held> {
        if let Some(lock) = &self.lock
            && let Some(record) = lock.of(claim, session)
        {
            let counted = lock.counted(&record);
            return Some(Held::new(Spot::Whole, counted, record));
        }
        if let Some(pair) = self
            .readers(line)
            .find(|pair| pair.key == line.reader(claim))
            && let Some(record) = pair.of(claim, session)
            && self.is_gate()
        {
            let counted = pair.counted(&record);
            return Some(Held::new(Spot::Reader, counted, record));
        }
        let (_, pair) = self.permits(line).find(|(of, _)| *of == session)?;
        let record = pair.of(claim, session)?;
        let listed = self
            .holders(line)
            .is_some_and(|holders| holders.holders.contains_key(session));
        let counted = pair.counted(&record);
        listed.then(|| Held::new(Spot::Permit, counted, record))
    }

    /// Takes a reader or permit out, guarded by what was read.
    pub(super) fn without(
        &self,
        line: &Line,
        spot: Spot,
        claim: ClaimId,
        session: &str,
    ) -> Vec<Op> {
        match spot {
            Spot::Whole => {
                let mut ops = vec![Op::unchanged(&line.lock, self.lock.as_ref())];
                ops.push(Op::delete(&line.lock));
                ops
            }
            Spot::Reader => {
                let own = line.reader(claim);
                let mut others = self.readers(line).filter(|pair| pair.key != own);
                let gate = match others.any(|pair| pair.holder().is_some()) {
                    true => gate(line),
                    false => Op::delete(&line.lock),
                };
                let mut ops = vec![Op::unchanged(&line.lock, self.lock.as_ref())];
                ops.extend([gate, Op::delete(&own)]);
                ops.extend(self.dead_readers(line));
                ops
            }
            Spot::Permit => {
                let key = line.semaphore();
                let mut holders = self.holders(line).unwrap_or_default();
                holders.holders.remove(session);
                let mut ops = vec![Op::unchanged(&key, self.semaphore(line))];
                ops.push(match holders.holders.is_empty() {
                    true => Op::delete(&key),
                    false => Op::set(&key, SEMAPHORE, &json(&holders)),
                });
                ops.push(Op::delete(&line.permit(session)));
                ops.extend(self.dead_permits(line));
                ops
            }
        }
    }

    /// Removes what is left of a line in which nobody is; `None` when somebody is, or nothing.
    pub(super) fn tidy(&self, line: &Line) -> Option<Vec<Op>> {
        if self.is_gate() && !self.is_read(line) {
            let mut ops = vec![Op::unchanged(&line.lock, self.lock.as_ref())];
            ops.push(Op::delete(&line.lock));
            ops.extend(self.dead_readers(line));
            return Some(ops);
        }
        let semaphore = self.semaphore(line).filter(|pair| pair.flags == SEMAPHORE);
        (semaphore.is_some() && self.holders(line).is_none()).then(|| self.no_permits(line))
    }

    /// Makes a whole line a reader's, with the count that it has.
    pub(super) fn downgrade(&self, asker: &Asker<'_>) -> Vec<Op> {
        let Asker { line, session, .. } = *asker;
        let key = line.reader(asker.claim);
        vec![
            Op::unchanged(&line.lock, self.lock.as_ref()),
            Op::unlock(&line.lock, session),
            gate(line),
            Op::lock(&key, session, READERS, &asker.record.to_json()),
        ]
    }

    /// Makes the one reader the holder of the whole line; `None` when others read.
    pub(super) fn upgrade(&self, asker: &Asker<'_>) -> Option<Vec<Op>> {
        let Asker { line, session, .. } = *asker;
        let own = line.reader(asker.claim);
        let mut others = self.readers(line).filter(|pair| pair.key != own);
        if others.any(|pair| pair.holder().is_some()) {
            return None;
        }
        let mut ops = vec![
            Op::unchanged(&line.lock, self.lock.as_ref()),
            Op::check_session(&own, session),
            Op::delete(&own),
        ];
        ops.extend(self.dead_readers(line));
        ops.push(Op::lock(&line.lock, session, LOCK, &asker.record.to_json()));
        Some(ops)
    }
}

/// How a claim holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spot {
    /// The lock itself.
    Whole,
    /// One of the readers.
    Reader,
    /// One of the permits.
    Permit,
}

/// A claim that holds.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) spot: Spot,
    pub(super) counted: u64,
    pub(super) record: Record,
}

impl Held {
    fn new(spot: Spot, counted: u64, record: Record) -> Self {
        Self {
            spot,
            counted,
            record,
        }
    }
}

/// Writes the gate of readers. Consul leaves a key alone, index included, that is written with
/// the value it has, and then a writer would not see that a reader came.
fn gate(line: &Line) -> Op {
    Op::set(&line.lock, READERS, &ClaimId::random().to_string())
}

fn json(holders: &Holders) -> String {
    let holders = Holders {
        nonce: ClaimId::random().to_string(),
        ..holders.clone()
    };
    // A struct of strings and numbers always serialises.
    serde_json::to_string(&holders).unwrap_or_default()
}

fn beside_permits(limit: u32, ask: Ask) -> Error {
    match ask {
        Ask::READ => capacity_mismatch(limit, ALL_READERS),
        _ => Error::new(
            Kind::CapacityMismatch,
            "enter",
            format!(
                "this line is in use for {limit} permits, not as a lock; wait until it is empty or use another name"
            ),
        ),
    }
}
