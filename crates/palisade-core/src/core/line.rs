//! `Line`: the ordered claims on one name, with their leases; holders first, then waiters.
//!
//! For engines that keep lines themselves (in memory, in a file). [`admit`] makes the decisions.
//! After a change, call [`Line::settle`] within the same atomic step: it removes expired claims and
//! grants those that have come to the front.

use std::time::Duration;

use super::admission::{Admission, Standing, admit, capacity};
use super::claim::{Ask, ClaimId, READERS};
use super::clock::BootTime;
use super::engine::{Amended, Place};
use super::error::{Error, ErrorKind, Result};
use super::known_bad::{self, Bad};
use super::owner::Owner;
use super::report::{ClaimReport, LineReport};

/// One claim's place in a line. `extra` is the engine's own data.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Seat<X> {
    /// The claim.
    pub id: ClaimId,
    /// How much of the line it takes.
    pub ask: Ask,
    /// The sequence of its grant; 0 while it waits.
    pub sequence: u64,
    /// When its lease ends.
    pub expires: BootTime,
    /// The time by which a renewal extends it.
    pub ttl: Duration,
    /// Whether it is marked for eviction.
    pub evicted: bool,
    /// The engine's own data.
    pub extra: X,
}

impl<X> Seat<X> {
    /// A seat of a line that was read from a store. Its id is its position, because other tools have
    /// no claim ids. Ended seats are not read.
    #[allow(dead_code, reason = "some engines need it")]
    pub fn read(at: usize, ask: Ask, extra: X) -> Self {
        Self {
            id: ClaimId(at as u128 + 1),
            ask,
            sequence: 0,
            expires: BootTime::NEVER,
            ttl: Duration::ZERO,
            evicted: false,
            extra,
        }
    }

    /// Whether it holds.
    pub fn is_held(&self) -> bool {
        self.sequence != 0
    }

    /// Where it stands.
    pub fn place(&self) -> Place {
        match self.sequence {
            0 => Place::Waiting,
            sequence => Place::Held { sequence },
        }
    }

    fn standing(&self) -> Standing {
        Standing {
            id: self.id,
            ask: self.ask,
        }
    }
}

/// The seats of one line, in order of entry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Line<X> {
    /// The seats in order of entry.
    pub seats: Vec<Seat<X>>,
}

impl<X> Default for Line<X> {
    fn default() -> Self {
        Self { seats: Vec::new() }
    }
}

impl<X> Line<X> {
    /// The capacity that readers or permits in it name, if any.
    pub fn named_capacity(&self) -> Option<u32> {
        self.seats.iter().find_map(|seat| match seat.ask {
            Ask::Part { capacity, .. } => Some(capacity),
            Ask::Whole => None,
        })
    }

    /// The seat of a claim.
    pub fn seat(&self, id: ClaimId) -> Option<&Seat<X>> {
        self.seats.iter().find(|seat| seat.id == id)
    }

    /// The seat of a claim, to change.
    pub fn seat_mut(&mut self, id: ClaimId) -> Option<&mut Seat<X>> {
        self.seats.iter_mut().find(|seat| seat.id == id)
    }

    /// The seat of an incarnation, to renew: the id, and the sequence unless it is 0 (unknown).
    pub fn incarnation_mut(&mut self, id: ClaimId, sequence: u64) -> Option<&mut Seat<X>> {
        self.seats.iter_mut().find(|seat| {
            seat.id == id && (sequence == 0 || seat.sequence == sequence)
                || known_bad::is(Bad::RenewAnyone)
        })
    }

    /// Takes the last place.
    ///
    /// # Errors
    /// [`ErrorKind::CapacityMismatch`] when the line is in use with another capacity.
    pub fn push(&mut self, seat: Seat<X>) -> Result<()> {
        if let Some((live, capacity)) = self.misfit(seat.ask) {
            return Err(capacity_mismatch(live, capacity));
        }
        self.seats.push(seat);
        Ok(())
    }

    /// The capacity of the line and that of `ask`, if they differ. Such a claim is about to leave, or
    /// a mistake.
    pub fn misfit(&self, ask: Ask) -> Option<(u32, u32)> {
        let Ask::Part { capacity, .. } = ask else {
            return None;
        };
        let live = self.named_capacity()?;
        (live != capacity).then_some((live, capacity))
    }

    /// The seat that the one at `at` waits for; `None` if it holds. It is the nearest one that
    /// excludes it, or `Some(None)` where any departure may make room for permits.
    #[allow(dead_code, reason = "some engines need it")]
    pub fn ahead_of(&self, at: usize) -> Option<Option<&Seat<X>>> {
        let seats = &self.seats[..=at];
        let me = &seats[at];
        let capacity = capacity(seats.iter().map(|seat| seat.ask));
        match admit(seats.iter().map(Seat::standing), me.id, capacity) {
            _ if me.is_held() => None,
            Admission::Held => None,
            Admission::Behind(id) if matches!(me.ask, Ask::Whole | Ask::READ) => {
                Some(self.seat(id))
            }
            Admission::Behind(_) | Admission::Absent => Some(None),
        }
    }

    /// Removes a seat if the incarnation matches: the id, and the sequence unless it is 0
    /// (unknown).
    pub fn remove(&mut self, id: ClaimId, sequence: u64) -> Option<Seat<X>> {
        let at = self.seats.iter().position(|seat| {
            let same = sequence == 0 || seat.sequence == 0 || seat.sequence == sequence;
            seat.id == id && (same || known_bad::is(Bad::LeaveByKey))
                || sequence != 0 && known_bad::is(Bad::LeaveAnyone)
        })?;
        Some(self.seats.remove(at))
    }

    /// Removes seats that have expired by `now`. Then grants, in order, the claims that have come
    /// to the front, each with a sequence from `mint`. Returns the ids of the new holders.
    pub fn settle(&mut self, now: BootTime, mut mint: impl FnMut() -> u64) -> Vec<ClaimId> {
        self.seats.retain(|seat| seat.expires > now);
        let capacity = capacity(self.seats.iter().map(|seat| seat.ask));
        let mut granted = Vec::new();
        for at in 0..self.seats.len() {
            if self.seats[at].is_held() {
                continue;
            }
            let ahead = self.seats[..=at].iter().map(Seat::standing);
            if admit(ahead, self.seats[at].id, capacity) != Admission::Held {
                // Nobody overtakes, so nobody behind it can hold either.
                break;
            }
            self.seats[at].sequence = mint();
            granted.push(self.seats[at].id);
        }
        granted
    }

    /// Changes the weight of a held seat, by the rules of `Engine::amend`. Call `settle`
    /// afterwards.
    pub fn reweigh(&mut self, id: ClaimId, sequence: u64, ask: Ask) -> Amended {
        let alone = self.seats.iter().filter(|seat| seat.is_held()).count() == 1;
        let other_parts = self.seats.iter().any(|seat| match (seat.ask, ask) {
            (Ask::Part { capacity: live, .. }, Ask::Part { capacity: new, .. }) => {
                seat.id != id && live != new
            }
            _ => false,
        });
        let Some(seat) = self
            .seat_mut(id)
            .filter(|seat| seat.sequence == sequence && sequence != 0)
        else {
            return Amended::Gone;
        };
        let lighter = match (seat.ask, ask) {
            (Ask::Whole, _) => true,
            (Ask::Part { weight: old, .. }, Ask::Part { weight: new, .. }) => new <= old,
            (_, Ask::Whole) => false,
        };
        if (!lighter && !alone) || other_parts {
            return Amended::Busy;
        }
        seat.ask = ask;
        Amended::Done
    }

    /// Changes the capacity of the permits in the line, by the rules of `Engine::resize`; `false`
    /// if there are none. Call `settle` afterwards.
    ///
    /// # Errors
    /// [`ErrorKind::CapacityMismatch`] for readers; [`ErrorKind::InvalidArgument`] when a claim
    /// weighs more than `new`.
    pub fn resize(&mut self, new: u32) -> Result<bool> {
        let asks = self.seats.iter_mut().map(|seat| &mut seat.ask);
        resize(asks, new)
    }

    /// Reports the line as of `now`. `who` extracts owner and value from the engine's data.
    pub fn report(
        &self,
        name: &str,
        now: BootTime,
        mut who: impl FnMut(&X) -> (Option<Owner>, Option<String>),
    ) -> LineReport {
        let living = self.seats.iter().filter(|seat| seat.expires > now);
        let (holders, waiters) = living.partition::<Vec<_>, _>(|seat| seat.is_held());
        let mut show = |seat: &Seat<X>| {
            let (owner, value) = who(&seat.extra);
            ClaimReport {
                id: seat.id.to_string(),
                owner,
                ask: seat.ask,
                value,
                sequence: seat.is_held().then_some(seat.sequence),
                expires_in: Some(seat.expires.saturating_since(now)),
                evicted: seat.evicted,
            }
        };
        LineReport {
            name: name.to_owned(),
            capacity: self.named_capacity(),
            holders: holders.into_iter().map(&mut show).collect(),
            waiters: waiters.into_iter().map(&mut show).collect(),
        }
    }

    /// What must change before a waiting claim can be granted: the seat just ahead if that one
    /// waits too, else every holder.
    pub fn blockers(&self, id: ClaimId) -> Vec<&Seat<X>> {
        let Some(at) = self.seats.iter().position(|seat| seat.id == id) else {
            return Vec::new();
        };
        match self.seats[..at].last() {
            Some(ahead) if !ahead.is_held() => vec![ahead],
            _ => self.seats[..at]
                .iter()
                .filter(|seat| seat.is_held())
                .collect(),
        }
    }
}

/// Sets the capacity of every permit among `asks` to `new`, by the rules of `Engine::resize`.
///
/// # Errors
/// [`ErrorKind::CapacityMismatch`] for readers; [`ErrorKind::InvalidArgument`] when a claim weighs
/// more than `new`.
pub fn resize<'a>(asks: impl Iterator<Item = &'a mut Ask>, new: u32) -> Result<bool> {
    let mut parts = Vec::new();
    for ask in asks {
        if let Ask::Part { weight, capacity } = ask {
            if *capacity == READERS {
                return Err(capacity_mismatch(READERS, new));
            }
            parts.push((*weight, capacity));
        }
    }
    if let Some((weight, _)) = parts.iter().find(|(weight, _)| *weight > new) {
        let message = format!("a claim in this line takes {weight} permits, more than {new}");
        return Err(Error::new(ErrorKind::InvalidArgument, "resize", message));
    }
    let any = !parts.is_empty();
    parts.into_iter().for_each(|(_, capacity)| *capacity = new);
    Ok(any)
}

/// The error for a claim whose capacity differs from the live line's.
pub fn capacity_mismatch(live: u32, asked: u32) -> Error {
    let kind = |capacity| match (Ask::Part {
        weight: 1,
        capacity,
    }) {
        Ask::READ => "readers".to_owned(),
        _ => format!("{capacity} permits"),
    };
    Error::new(
        ErrorKind::CapacityMismatch,
        "enter",
        format!(
            "this line is in use for {}, not for {}; wait until it is empty or use another name",
            kind(live),
            kind(asked)
        ),
    )
}
