//! The engine and the store of the model. The line is the library's own [`Line`].

use std::collections::BTreeSet;
use std::time::Duration;

use palisade::BootTime;
use palisade::engine::{Ask, ClaimId, Line, Place, Seat};

use crate::protocol::{TTL, Variant};

/// The engine, and flags for what has happened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Engine {
    pub(crate) line: Line<()>,
    /// Claims that were left before they arrived.
    tombstones: BTreeSet<ClaimId>,
    counter: u64,
    /// The highest sequence ever granted.
    highest: u64,
    /// A grant had a lower sequence than an earlier one.
    pub(crate) fell_back: bool,
    /// A leave or a renewal changed another incarnation than its own.
    pub(crate) touched_another: bool,
    /// A held lease was renewed.
    pub(crate) renewed: bool,
    /// A late leave found its place taken by another claim, and did not change it.
    pub(crate) spared_another: bool,
}

/// The data that the lock protects.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Store {
    highest: u64,
    /// A write of an earlier grant was accepted after one of a later grant.
    pub(crate) went_back: bool,
    /// A write was refused.
    pub(crate) refused: bool,
}

impl Engine {
    /// Expires and grants.
    pub(crate) fn settle(&mut self, now: BootTime, variant: Variant) {
        let (counter, highest, fell_back) =
            (&mut self.counter, &mut self.highest, &mut self.fell_back);
        self.line.settle(now, || {
            *counter += 1;
            *fell_back |= *counter <= *highest;
            *highest = (*highest).max(*counter);
            *counter
        });
        if variant == Variant::CounterDiesWithLine && self.line.seats.is_empty() {
            self.counter = 0;
        }
    }

    /// The remaining time of the lease, and the sequence if it is held; `None` for a claim that was
    /// left.
    pub(crate) fn enter(
        &mut self,
        me: ClaimId,
        now: BootTime,
        variant: Variant,
    ) -> Option<(Duration, Option<u64>)> {
        if self.tombstones.contains(&me) {
            return None;
        }
        if self.line.seat(me).is_none() {
            let seat = Seat {
                id: me,
                ask: Ask::Whole,
                sequence: 0,
                expires: now + TTL,
                ttl: TTL,
                evicted: false,
                extra: (),
            };
            // A line of whole claims has no capacity that could mismatch.
            let _ = self.line.push(seat);
            self.settle(now, variant);
        }
        let seat = self.line.seat(me)?;
        let sequence = match seat.place() {
            Place::Held { sequence } => Some(sequence),
            Place::Waiting | Place::Gone => None,
        };
        Some((seat.expires.saturating_since(now), sequence))
    }

    pub(crate) fn renew(
        &mut self,
        me: ClaimId,
        sequence: u64,
        now: BootTime,
        variant: Variant,
    ) -> bool {
        let seat = match variant {
            Variant::RenewByName => self.line.seats.first_mut(),
            _ => self.line.incarnation_mut(me, sequence),
        };
        let Some(seat) = seat else { return false };
        self.touched_another |= is_another(seat, me, sequence);
        seat.expires = now + seat.ttl;
        self.renewed |= seat.is_held();
        true
    }

    pub(crate) fn leave(&mut self, me: ClaimId, sequence: u64, now: BootTime, variant: Variant) {
        let left = match variant {
            Variant::LeaveByName if !self.line.seats.is_empty() => Some(self.line.seats.remove(0)),
            _ => self.line.remove(me, sequence),
        };
        match left {
            Some(seat) => self.touched_another |= is_another(&seat, me, sequence),
            None if sequence == 0 => {
                self.tombstones.insert(me);
            }
            None => self.spared_another |= !self.line.seats.is_empty(),
        }
        self.settle(now, variant);
    }
}

/// Whether a seat is another incarnation than the one a message concerns. A waiting place with the
/// same id is not: it can only come from a late copy of the claim's own enter.
fn is_another(seat: &Seat<()>, me: ClaimId, sequence: u64) -> bool {
    seat.id != me || (sequence != 0 && seat.sequence != 0 && seat.sequence != sequence)
}

impl Store {
    pub(crate) fn write(&mut self, sequence: u64, variant: Variant) {
        if sequence < self.highest && variant != Variant::Unfenced {
            self.refused = true;
            return;
        }
        self.went_back |= sequence < self.highest;
        self.highest = self.highest.max(sequence);
    }
}
