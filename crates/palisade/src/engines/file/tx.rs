//! `Tx`: one change of one line, under the line's lock.
//!
//! It settles the line by `core::line`. Before it lets a claim of another process hold, it looks
//! whether that process lives; the dead lose their seats. What the line says has ended is looked
//! up among the renewals first. Hints are gathered and sent only after the write: a hint is never
//! a grant.

use std::time::Duration;

use super::leases::{self, Found};
use super::line_file::{Extra, LineFile, State};
use super::liveness::{self, Hint, Peer};
use super::store::Store;
use crate::core::claim::{Ask, ClaimId};
use crate::core::clock::BootTime;
use crate::core::error::Result;
use crate::core::line::Seat;

/// When to look again at a process that renews just now.
const SOON: Duration = Duration::from_millis(10);

/// A seat as the file has it.
#[derive(Clone, Copy, PartialEq)]
struct Before {
    id: ClaimId,
    process: u64,
    sequence: u64,
    ask: Ask,
    evicted: bool,
}

impl Before {
    fn of(seat: &Seat<Extra>) -> Self {
        Self {
            id: seat.id,
            process: seat.extra.process,
            sequence: seat.sequence,
            ask: seat.ask,
            evicted: seat.evicted,
        }
    }
}

/// Whom to tell what after the write, and the processes that were looked at.
#[derive(Default)]
pub(super) struct Hints {
    pub(super) list: Vec<(u64, Hint)>,
    pub(super) peers: Vec<(u64, Peer)>,
}

/// See the module's text.
pub(super) struct Tx<'a> {
    store: &'a Store,
    pub(super) state: &'a mut State,
    /// Read after the lock was had.
    pub(super) now: BootTime,
    operation: &'static str,
    before: Vec<Before>,
    /// Whether something changed that `before` does not tell.
    pub(super) touched: bool,
    /// Whether an end in memory is not the one to go by next time.
    read_again: bool,
    hints: Hints,
}

impl<'a> Tx<'a> {
    pub(super) fn begin(store: &'a Store, operation: &'static str, state: &'a mut State) -> Self {
        Self {
            before: state.line.seats.iter().map(Before::of).collect(),
            store,
            state,
            now: BootTime::now(),
            operation,
            touched: false,
            read_again: false,
            hints: Hints::default(),
        }
    }

    /// Writes what was changed, if anything was. `me` is the claim on whose behalf this happens:
    /// it needs no hint.
    pub(super) fn commit(mut self, file: &LineFile, me: Option<ClaimId>) -> Result<Hints> {
        let after = self.state.line.seats.iter().map(Before::of);
        if self.touched || !after.eq(self.before.iter().copied()) {
            file.store(self.operation, self.state)?;
            self.gather(me);
        }
        if self.read_again {
            self.state.forget();
        }
        Ok(self.hints)
    }

    /// What tickets of this process carry.
    pub(super) fn process(&self) -> u64 {
        self.store.process()
    }

    /// Whether the process lives, as of this transaction.
    fn is_alive(&mut self, process: u64) -> bool {
        if process == self.process() {
            return true;
        }
        if let Some(dead) = self.known_dead(process) {
            return !dead;
        }
        let peer = liveness::open_to_wake(&self.store.home().procs, process);
        let dead = matches!(peer, Peer::Dead);
        self.hints.peers.push((process, peer));
        !dead
    }

    /// Whether this transaction found the process dead, if it has looked.
    fn known_dead(&self, process: u64) -> Option<bool> {
        let known = self.hints.peers.iter();
        let known = known.into_iter().find(|(known, _)| *known == process);
        known.map(|(_, peer)| matches!(peer, Peer::Dead))
    }

    /// Sends a hint after the write.
    pub(super) fn hint(&mut self, process: u64, hint: Hint) {
        self.hints.list.push((process, hint));
    }

    /// Looks up whether what the line says has ended was renewed.
    fn look_up_renewals(&mut self) {
        let (now, mine) = (self.now, self.process());
        for seat in &mut self.state.line.seats {
            if seat.expires > now || seat.extra.orphan {
                continue;
            }
            if seat.extra.process == mine {
                seat.expires = self.store.leases.expires(seat.id).unwrap_or(seat.expires);
                continue;
            }
            let Extra { process, slot, .. } = seat.extra;
            match leases::look_up(self.store.home(), process, slot, seat.id) {
                Found::Until(expires) => seat.expires = expires,
                Found::Nothing => {}
                // A process that is stopped in the middle of a renewal can't believe in it when a
                // further ttl has passed.
                Found::Busy(said) if seat.expires.max(said) + seat.ttl > now => {
                    seat.expires = now + SOON;
                    self.read_again = true;
                }
                Found::Busy(_) => {}
                Found::Missing => {
                    seat.extra.orphan = true;
                    seat.expires = now + seat.ttl;
                    self.touched = true;
                }
            }
        }
    }

    /// Removes what has ended and grants what has come to the front; a claim of a dead process
    /// is never granted. Where tokens can't be had, nobody is granted.
    ///
    /// # Errors
    /// Why tokens can't be had.
    pub(super) fn settle(&mut self) -> Result<()> {
        let home = self.store.home();
        let ready = match self.state.line.seats.iter().all(Seat::is_held) {
            true => Ok(()),
            false => home
                .promised
                .all_over(self.operation)
                .and_then(|()| home.tokens.prepare_grant(self.operation, &home.dir)),
        };
        loop {
            self.look_up_renewals();
            if ready.is_err() {
                self.state.line.seats.retain(|seat| seat.expires > self.now);
                return ready;
            }
            let State { line, last, .. } = &mut *self.state;
            let tokens = &home.tokens;
            let granted = line.settle(self.now, || {
                *last = (*last + 1).max(tokens.now());
                *last
            });
            let of_granted: Vec<u64> = granted
                .iter()
                .filter_map(|id| line.seat(*id).map(|seat| seat.extra.process))
                .collect();
            if !self.bury(of_granted) {
                return Ok(());
            }
        }
    }

    /// Removes the seats of those of `processes` that are dead; says whether there were any. What
    /// is kept by its lease alone stays if it held before: its process may have told somebody.
    fn bury(&mut self, processes: Vec<u64>) -> bool {
        let mut any = false;
        for process in processes {
            if !self.is_alive(process) {
                let (seats, before) = (&mut self.state.line.seats, &self.before);
                let held = |id| before.iter().any(|old| old.id == id && old.sequence != 0);
                let count = seats.len();
                seats.retain(|seat| {
                    seat.extra.process != process || (seat.extra.by_lease && held(seat.id))
                });
                any |= seats.len() < count;
            }
        }
        any
    }

    /// Settles, and looks for the dead among those that block `id`, until none is left.
    ///
    /// # Errors
    /// As [`Tx::settle`].
    pub(super) fn settle_before(&mut self, id: ClaimId) -> Result<()> {
        loop {
            let settled = self.settle();
            let blockers = self.state.line.blockers(id);
            let processes = blockers.iter().map(|seat| seat.extra.process).collect();
            if !self.bury(processes) {
                return settled;
            }
        }
    }

    /// Settles, and looks for the dead among all, until none is left.
    ///
    /// # Errors
    /// As [`Tx::settle`].
    pub(super) fn settle_all(&mut self) -> Result<()> {
        loop {
            let settled = self.settle();
            let seats = self.state.line.seats.iter();
            let mut processes: Vec<u64> = seats.map(|seat| seat.extra.process).collect();
            processes.dedup();
            if !self.bury(processes) {
                return settled;
            }
        }
    }

    /// Gathers whom to wake: who is gone, who is granted, and who waits behind another claim than
    /// before, since each sleeps on the one just ahead or, at the front, on all holders.
    fn gather(&mut self, me: Option<ClaimId>) {
        let before = std::mem::take(&mut self.before);
        let mut old = before.iter().enumerate().peekable();
        let mut hints = Vec::new();
        let (mut gone, mut granted) = (false, false);
        // Where each seat was; removals and grants don't change the order.
        let mut was_at = Vec::with_capacity(self.state.line.seats.len());
        for seat in &self.state.line.seats {
            while let Some((_, left)) = old.next_if(|(_, old)| old.id != seat.id) {
                gone = true;
                hints.push((left.process, left.id, left.sequence != 0));
            }
            let at = old.next().map(|(at, _)| at);
            was_at.push(at);
            if seat.is_held() && at.is_some_and(|at| before[at].sequence == 0) {
                granted = true;
                hints.push((seat.extra.process, seat.id, false));
            }
        }
        for (_, left) in old {
            gone = true;
            hints.push((left.process, left.id, left.sequence != 0));
        }
        if gone || granted {
            let seats = &self.state.line.seats;
            for (at, seat) in seats.iter().enumerate() {
                let Some(was_at) = was_at[at].filter(|_| !seat.is_held()) else {
                    continue;
                };
                let was_ahead = before[..was_at].last();
                let slept_on_holders = was_ahead.is_none_or(|ahead| ahead.sequence != 0);
                let still = match &seats[..at] {
                    // Holders only went away.
                    [.., ahead] if ahead.is_held() && slept_on_holders => !granted,
                    // One claim ahead, then as now.
                    [.., ahead] if !ahead.is_held() || at == 1 => {
                        was_ahead.is_some_and(|was| was.id == ahead.id)
                    }
                    _ => false,
                };
                if !still {
                    hints.push((seat.extra.process, seat.id, false));
                }
            }
        }
        for (process, id, alarm) in hints {
            if Some(id) != me && self.known_dead(process) != Some(true) {
                let hint = if alarm { Hint::Alarm } else { Hint::Look };
                self.hint(process, hint(id));
            }
        }
    }
}

/// What sleepers wait for besides a hint.
pub(super) struct Sleep {
    /// The processes whose death may change the place.
    pub(super) processes: Vec<u64>,
    /// When the first lease that matters ends.
    pub(super) earliest: BootTime,
}

impl Sleep {
    pub(super) fn on<'a>(seats: impl Iterator<Item = &'a Seat<Extra>>) -> Self {
        let mut sleep = Self {
            processes: Vec::new(),
            earliest: BootTime::NEVER,
        };
        for seat in seats {
            sleep.earliest = sleep.earliest.min(seat.expires);
            // Such a seat outlives its process: a dead one would wake the sleeper for ever.
            let outlives = seat.extra.by_lease && seat.is_held();
            if !outlives && !sleep.processes.contains(&seat.extra.process) {
                sleep.processes.push(seat.extra.process);
            }
        }
        sleep
    }
}
