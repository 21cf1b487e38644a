//! `Tx`: one transaction of the store, under the writer lock.
//!
//! It loads a line, settles it by `core::line`, and writes back what changed. Before it lets a
//! claim of another process hold, it looks whether that process lives; the dead lose their
//! seats. Hints are gathered and sent only after the commit: a hint is never a grant.

use std::os::fd::OwnedFd;

use heed::RwTxn;

use super::fault::Fault;
use super::layout;
use super::liveness::{self, Hint, Peer};
use super::lmdb::Data;
use super::record::{self, COUNTERS, Counters, Extra, Saved};
use super::store::Shared;
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::error::Result as CoreResult;
use crate::core::line::{Line, Seat};

type Result<T> = std::result::Result<T, Fault>;

/// A line out of the store.
pub(super) struct Loaded {
    pub(super) line: Line<Extra>,
    /// What its ticket keys begin with.
    prefix: Vec<u8>,
    /// Order of entry, id, process and whether it held, as the store has them.
    before: Vec<(u64, ClaimId, u64, bool)>,
}

/// What remains to be done after the commit.
pub(super) struct Hints {
    /// Whom to tell what.
    pub(super) list: Vec<(u64, Hint)>,
    /// The processes that were looked at; `None` is dead or can't be told anything.
    pub(super) ends: Vec<(u64, Option<OwnedFd>)>,
}

/// See the module's text.
pub(super) struct Tx<'a> {
    pub(super) txn: RwTxn<'a>,
    pub(super) db: heed::Database<'static, heed::types::Bytes, heed::types::Bytes>,
    shared: &'a Shared,
    /// Read after the writer lock was had.
    pub(super) now: BootTime,
    micros: u64,
    pub(super) counters: Counters,
    saved_counters: Option<Counters>,
    wrote: bool,
    hints: Vec<(u64, Hint)>,
    probed: Vec<(u64, Peer)>,
}

impl<'a> Tx<'a> {
    /// Begins. The caller holds the writer lock.
    pub(super) fn begin(data: &'a mut Data, shared: &'a Shared) -> Result<Self> {
        let db = data.db;
        let txn = data.begin()?;
        let saved_counters = db.get(&txn, COUNTERS)?.map(Counters::read).transpose()?;
        let micros = layout::unix_micros();
        let mut counters = match saved_counters {
            Some(counters) => counters,
            None => {
                // A new store, or one whose lines were thrown away: go on above the ceiling.
                let ceiling = layout::read_ceiling(&shared.dir)?;
                Counters {
                    last: ceiling.max(micros),
                    ceiling,
                    ..Counters::default()
                }
            }
        };
        let next = counters.last.max(micros);
        if layout::is_near(next, counters.ceiling) {
            counters.ceiling = layout::raise_ceiling(&shared.dir, next, counters.ceiling)
                .map_err(Fault::while_open)?;
        }
        Ok(Self {
            txn,
            db,
            shared,
            now: BootTime::now(),
            micros,
            counters,
            saved_counters,
            wrote: false,
            hints: Vec::new(),
            probed: Vec::new(),
        })
    }

    /// Commits what was changed, if anything was.
    pub(super) fn commit(mut self) -> Result<Hints> {
        if self.saved_counters != Some(self.counters) {
            self.put(COUNTERS, &self.counters.write())?;
        }
        if self.wrote {
            self.txn.commit().map_err(Fault::Commit)?;
        }
        let end = |(process, peer)| match peer {
            Peer::Alive(end) => (process, Some(end)),
            Peer::Dead | Peer::Unknown => (process, None),
        };
        Ok(Hints {
            list: self.hints,
            ends: self.probed.into_iter().map(end).collect(),
        })
    }

    /// What tickets of this process carry.
    pub(super) fn process(&self) -> u64 {
        self.shared.liveness.process()
    }

    pub(super) fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.wrote = true;
        Ok(self.db.put(&mut self.txn, key, value)?)
    }

    pub(super) fn delete(&mut self, key: &[u8]) -> Result<bool> {
        self.wrote = true;
        Ok(self.db.delete(&mut self.txn, key)?)
    }

    /// Whether the process lives, as of this transaction.
    pub(super) fn is_alive(&mut self, process: u64) -> bool {
        if process == self.process() {
            return true;
        }
        if let Some(dead) = self.known_dead(process) {
            return !dead;
        }
        let procs = self.shared.liveness.procs();
        let peer = liveness::open_to_wake(procs, process);
        let dead = matches!(peer, Peer::Dead);
        if dead {
            liveness::remove(procs, process);
        }
        self.probed.push((process, peer));
        !dead
    }

    /// Whether this transaction found the process dead, if it has looked.
    fn known_dead(&self, process: u64) -> Option<bool> {
        let known = self.probed.iter().find(|(known, _)| *known == process);
        known.map(|(_, peer)| matches!(peer, Peer::Dead))
    }

    /// Sends a hint after the commit.
    pub(super) fn hint(&mut self, process: u64, hint: Hint) {
        self.hints.push((process, hint));
    }

    /// Loads one line.
    pub(super) fn load(&self, namespace: &str, name: &str) -> Result<Loaded> {
        let prefix = record::line_prefix(namespace, name);
        let mut line = Line::default();
        for entry in self.db.prefix_iter(&self.txn, &prefix)? {
            let (key, value) = entry?;
            line.seats
                .push(record::read_seat(record::seq_in_key(key)?, value)?);
        }
        let before = line
            .seats
            .iter()
            .map(|seat| (seat.extra.seq, seat.id, seat.extra.process, seat.is_held()))
            .collect();
        Ok(Loaded {
            line,
            prefix,
            before,
        })
    }

    /// The names of the lines whose name begins with `prefix`.
    pub(super) fn names(&self, namespace: &str, prefix: &str) -> Result<Vec<String>> {
        let mut names: Vec<String> = Vec::new();
        let keys = record::names_prefix(namespace, prefix);
        for entry in self.db.prefix_iter(&self.txn, &keys)? {
            let name = record::name_in_key(namespace, entry?.0)?;
            if names.last().is_none_or(|last| last != name) {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Removes what has expired and grants what has come to the front; a claim of a dead process
    /// is never granted.
    pub(super) fn settle(&mut self, loaded: &mut Loaded) {
        loop {
            let (counters, micros) = (&mut self.counters, self.micros);
            let granted = loaded.line.settle(self.now, || {
                counters.last = (counters.last + 1).max(micros);
                counters.last
            });
            let of_granted: Vec<u64> = granted
                .iter()
                .filter_map(|id| loaded.line.seat(*id).map(|seat| seat.extra.process))
                .collect();
            if !self.bury(loaded, of_granted) {
                return;
            }
        }
    }

    /// Removes the seats of those of `processes` that are dead; says whether there were any.
    fn bury(&mut self, loaded: &mut Loaded, processes: Vec<u64>) -> bool {
        let mut any = false;
        for process in processes {
            if !self.is_alive(process) {
                loaded
                    .line
                    .seats
                    .retain(|seat| seat.extra.process != process);
                any = true;
            }
        }
        any
    }

    /// Settles, and looks for the dead among those that block `id`, until none is left.
    pub(super) fn settle_before(&mut self, loaded: &mut Loaded, id: ClaimId) {
        loop {
            self.settle(loaded);
            let blockers = loaded.line.blockers(id);
            let processes = blockers.iter().map(|seat| seat.extra.process).collect();
            if !self.bury(loaded, processes) {
                return;
            }
        }
    }

    /// Settles, and looks for the dead among all, until none is left.
    pub(super) fn settle_all(&mut self, loaded: &mut Loaded) {
        loop {
            self.settle(loaded);
            let seats = loaded.line.seats.iter();
            let processes = seats.map(|seat| seat.extra.process).collect();
            if !self.bury(loaded, processes) {
                return;
            }
        }
    }

    /// Writes back what changed in a line, and gathers whom to wake. `me` is the claim on whose
    /// behalf this happens: it needs no hint. `claim` is what a new seat was made of.
    pub(super) fn save(
        &mut self,
        loaded: &Loaded,
        me: Option<ClaimId>,
        claim: Option<&Claim>,
    ) -> Result<()> {
        let mut visible = false;
        let mut gone = false;
        let mut key = loaded.prefix.clone();
        let prefix = key.len();
        let mut kept = loaded.line.seats.iter().peekable();
        for &(seq, id, process, held) in &loaded.before {
            if kept.next_if(|seat| seat.extra.seq == seq).is_some() {
                continue;
            }
            gone = true;
            key.truncate(prefix);
            key.extend_from_slice(&seq.to_be_bytes());
            self.delete(&key)?;
            if Some(id) != me && self.known_dead(process) != Some(true) {
                let hint = if held { Hint::Alarm } else { Hint::Look };
                self.hint(process, hint(id));
            }
        }
        let mut granted = false;
        for seat in &loaded.line.seats {
            if seat.extra.saved == Some(Saved::of(seat)) {
                continue;
            }
            key.truncate(prefix);
            key.extend_from_slice(&seat.extra.seq.to_be_bytes());
            let record = match (seat.extra.saved, claim) {
                (None, Some(claim)) => record::new_ticket(seat, claim),
                _ => {
                    let mut record = self.record(&key)?;
                    record::write_seat(&mut record, seat);
                    record
                }
            };
            self.put(&key, &record)?;
            let renewed_only = seat.extra.saved.is_some_and(|saved| {
                (saved.ask, saved.counted, saved.evicted) == (seat.ask, seat.counted, seat.evicted)
            });
            visible |= !renewed_only;
            if seat.is_held() && seat.extra.saved.is_some_and(|saved| saved.counted == 0) {
                granted = true;
                if Some(seat.id) != me {
                    self.hint(seat.extra.process, Hint::Look(seat.id));
                }
            }
        }
        if gone || granted {
            self.hint_moved(loaded, me, granted);
        }
        if gone || visible {
            self.hint_watches(&loaded.prefix)?;
        }
        Ok(())
    }

    /// Hints to whoever waits behind another claim than before: each sleeps on the one just
    /// ahead or, at the front, on all holders, and must hear of new ones to sleep on.
    fn hint_moved(&mut self, loaded: &Loaded, me: Option<ClaimId>, granted: bool) {
        let seats = &loaded.line.seats;
        for (at, seat) in seats.iter().enumerate() {
            if seat.is_held() || seat.extra.saved.is_none() || Some(seat.id) == me {
                continue;
            }
            let before = &loaded.before;
            let Ok(was_at) = before.binary_search_by_key(&seat.extra.seq, |(seq, ..)| *seq) else {
                continue;
            };
            let was_ahead = before[..was_at].last();
            let slept_on_holders = was_ahead.is_none_or(|(.., held)| *held);
            let still = match &seats[..at] {
                // Holders only went away.
                [.., ahead] if ahead.is_held() && slept_on_holders => !granted,
                // One claim ahead, then as now.
                [.., ahead] if !ahead.is_held() || at == 1 => {
                    was_ahead.is_some_and(|(_, id, ..)| *id == ahead.id)
                }
                _ => false,
            };
            if !still {
                self.hint(seat.extra.process, Hint::Look(seat.id));
            }
        }
    }

    /// The record under a ticket key.
    fn record(&self, key: &[u8]) -> Result<Vec<u8>> {
        let found = self.db.get(&self.txn, key)?;
        found.map(<[u8]>::to_vec).ok_or(Fault::Missing)
    }

    /// The whole record of a seat.
    pub(super) fn record_of(&self, loaded: &Loaded, seat: &Seat<Extra>) -> Result<Vec<u8>> {
        self.record(&key_of(loaded, seat))
    }

    /// Replaces the value of a seat that has a record.
    pub(super) fn set_value(
        &mut self,
        loaded: &Loaded,
        seat: &Seat<Extra>,
        value: &str,
    ) -> Result<()> {
        let key = key_of(loaded, seat);
        let mut record = self.record(&key)?;
        record::write_value(&mut record, value);
        self.put(&key, &record)?;
        self.hint_watches(&loaded.prefix)
    }
}

impl Loaded {
    /// A seat for a claim of `process`, behind all others.
    pub(super) fn new_seat(&self, claim: &Claim, process: u64, now: BootTime) -> Seat<Extra> {
        let last = self.line.seats.last().map(|seat| seat.extra.seq);
        let last = last.max(self.before.last().map(|(seq, ..)| *seq));
        Seat {
            id: claim.id,
            ask: claim.ask,
            counted: 0,
            expires: now + claim.ttl,
            ttl: claim.ttl,
            evicted: false,
            extra: Extra {
                seq: last.map_or(0, |last| last + 1),
                process,
                saved: None,
            },
        }
    }

    /// Takes a seat, or says that the line has another capacity.
    pub(super) fn push(&mut self, seat: Seat<Extra>) -> CoreResult<()> {
        self.line.push(seat)
    }
}

fn key_of(loaded: &Loaded, seat: &Seat<Extra>) -> Vec<u8> {
    let mut key = loaded.prefix.clone();
    key.extend_from_slice(&seat.extra.seq.to_be_bytes());
    key
}
