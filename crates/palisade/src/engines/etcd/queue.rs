//! `Queue`: a line as etcd tells it, in the order of create revisions, and who holds in it.
//!
//! A place is decided by the write that made its key. Reading the line afterwards confirms it
//! even if the answer is stale: whoever is ahead can only go, so that a claim that held at any
//! revision holds for as long as its key is there.

use super::keys::{self, Keys};
use super::record::Record;
use super::wire::KeyValue;
use crate::core::admission::{Admission, Standing, admit, capacity};
use crate::core::claim::{Ask, ClaimId};

/// One ticket in a line.
#[derive(Debug, Clone)]
pub(super) struct Seat {
    pub(super) key: Vec<u8>,
    /// What follows the name in its key.
    pub(super) rest: String,
    /// `None` for a ticket of another tool.
    pub(super) claim: Option<ClaimId>,
    pub(super) ask: Ask,
    pub(super) created: i64,
    pub(super) modified: i64,
    pub(super) lease: i64,
    pub(super) record: Option<Record>,
    pub(super) value: Vec<u8>,
}

/// A line, oldest ticket first.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) seats: Vec<Seat>,
    /// What the parts in it are parts of.
    pub(super) capacity: Option<u32>,
}

/// Whose change may let a claim in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ahead {
    /// This one's.
    Key(Vec<u8>),
    /// Anyone's: permits, where every departure may make room.
    Anyone,
}

impl Queue {
    /// Reads the keys of the line that begin with `prefix`.
    pub(super) fn new(keys: &Keys, prefix: &str, kvs: Vec<KeyValue>) -> Self {
        let seat = |kv: KeyValue| {
            let rest = kv.key.get(prefix.len()..).unwrap_or_default();
            let rest = String::from_utf8_lossy(rest).into_owned();
            let named = keys::ours(&rest).map(|(_, claim)| claim);
            let record = named.and_then(|_| Record::read(keys, &kv.value));
            // A key may have been used before by another claim of the same client.
            let told = record.as_ref().and_then(|record| record.id.parse().ok());
            let claim = told.or(named);
            Seat {
                ask: record.as_ref().map_or(Ask::Whole, Record::ask),
                rest,
                claim,
                created: kv.create_revision,
                modified: kv.mod_revision,
                lease: kv.lease,
                record,
                value: kv.value,
                key: kv.key,
            }
        };
        let mut seats: Vec<Seat> = kvs.into_iter().map(seat).collect();
        seats.sort_by_key(|seat| seat.created);
        let capacity = seats.iter().find_map(|seat| match seat.ask {
            Ask::Part { capacity, .. } => Some(capacity),
            Ask::Whole => None,
        });
        Self { seats, capacity }
    }

    /// Where the ticket with this key is.
    pub(super) fn find(&self, key: &[u8]) -> Option<usize> {
        self.seats.iter().position(|seat| seat.key == key)
    }

    fn standing(&self, at: usize) -> Standing {
        let ask = match self.seats[at].ask {
            // A part of another whole is about to leave, or a mistake: it shares with nobody.
            Ask::Part { capacity, .. } if Some(capacity) != self.capacity => Ask::Whole,
            ask => ask,
        };
        Standing {
            id: ClaimId(at as u128 + 1),
            ask,
        }
    }

    /// Where `at` stands: `None` when it holds.
    pub(super) fn behind(&self, at: usize) -> Option<Ahead> {
        if self.seats[at]
            .record
            .as_ref()
            .is_some_and(|record| record.held)
        {
            return None;
        }
        let line = (0..=at).map(|at| self.standing(at));
        let capacity = capacity(line.clone().map(|standing| standing.ask));
        match admit(line, ClaimId(at as u128 + 1), capacity) {
            Admission::Held => None,
            Admission::Behind(_) if self.takes_permits(at) => Some(Ahead::Anyone),
            Admission::Behind(ClaimId(id)) => {
                let ahead = usize::try_from(id).ok().and_then(|id| id.checked_sub(1));
                let seat = ahead.and_then(|ahead| self.seats.get(ahead));
                Some(seat.map_or(Ahead::Anyone, |seat| Ahead::Key(seat.key.clone())))
            }
            Admission::Absent => Some(Ahead::Anyone),
        }
    }

    fn takes_permits(&self, at: usize) -> bool {
        let ask = self.standing(at).ask;
        ask != Ask::Whole && ask != Ask::READ
    }

    /// How many hold: always the first ones, since nobody overtakes.
    pub(super) fn holders(&self) -> usize {
        (0..self.seats.len())
            .take_while(|&at| self.behind(at).is_none())
            .count()
    }

    /// Whether a claim for `ask` that came now would hold.
    pub(super) fn has_room(&self, ask: Ask) -> bool {
        let line = (0..self.seats.len()).map(|at| self.standing(at));
        let me = Standing {
            id: ClaimId(0),
            ask,
        };
        let line = line.chain([me]);
        let capacity = capacity(line.clone().map(|standing| standing.ask));
        admit(line, me.id, capacity) == Admission::Held
    }

    /// The capacity ahead of `at` when it is another one than `at` asks for.
    pub(super) fn mismatch(&self, ask: Ask, at: usize) -> Option<(u32, u32)> {
        let Ask::Part {
            capacity: asked, ..
        } = ask
        else {
            return None;
        };
        let live = self.seats[..at].iter().find_map(|seat| match seat.ask {
            Ask::Part { capacity, .. } => Some(capacity),
            Ask::Whole => None,
        })?;
        (live != asked).then_some((live, asked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::owner::Owner;

    fn queue(asks: &[Option<Ask>]) -> Queue {
        let keys = Keys::new("palisade").unwrap();
        let kv = |(at, ask): (usize, &Option<Ask>)| {
            let (rest, value) = match ask {
                None => (format!("{at:x}"), Vec::new()),
                Some(ask) => {
                    let mut record = Record {
                        id: ClaimId(at as u128).to_string(),
                        owner: Owner::here("me", None),
                        part: None,
                        value: None,
                        held: false,
                    };
                    record.set_ask(*ask);
                    (keys::suffix(1, ClaimId(at as u128)), record.json())
                }
            };
            KeyValue {
                key: format!("palisade/x/{rest}").into_bytes(),
                create_revision: at as i64 + 1,
                value,
                ..Default::default()
            }
        };
        // As they may come: in the order of keys.
        let kvs = asks.iter().enumerate().map(kv).rev().collect();
        Queue::new(&keys, "palisade/x/", kvs)
    }

    fn part(weight: u32, capacity: u32) -> Option<Ask> {
        Some(Ask::Part { weight, capacity })
    }

    #[test]
    fn the_oldest_hold_as_far_as_they_fit() {
        for (asks, holders) in [
            (vec![], 0),
            (vec![Some(Ask::Whole), Some(Ask::Whole)], 1),
            (vec![Some(Ask::READ), Some(Ask::READ), Some(Ask::Whole)], 2),
            (vec![part(1, 3), part(2, 3), part(1, 3)], 2),
            // A ticket of another tool takes the whole line.
            (vec![None, Some(Ask::READ)], 1),
            (vec![Some(Ask::READ), None, Some(Ask::READ)], 1),
            // A part of another whole shares with nobody.
            (vec![part(1, 3), part(1, 2), part(1, 3)], 1),
        ] {
            assert_eq!(queue(&asks).holders(), holders, "{asks:?}");
        }
    }

    #[test]
    fn whoever_held_before_a_resize_holds_and_the_others_wait_until_they_fit() {
        let mut line = queue(&[part(1, 1), part(1, 1), part(1, 1)]);
        for seat in &mut line.seats[..2] {
            seat.record.as_mut().unwrap().held = true;
        }
        assert_eq!(line.holders(), 2);
        line.seats.remove(0);
        assert_eq!(line.holders(), 1);
        line.seats.remove(0);
        assert_eq!(line.holders(), 1);
    }

    #[test]
    fn a_waiter_watches_the_nearest_that_excludes_it() {
        let readers = queue(&[
            Some(Ask::Whole),
            Some(Ask::READ),
            Some(Ask::READ),
            Some(Ask::Whole),
        ]);
        let key = |at: usize| Some(Ahead::Key(readers.seats[at].key.clone()));
        assert_eq!(readers.behind(2), key(0));
        assert_eq!(readers.behind(3), key(2));
        let permits = queue(&[part(2, 3), part(2, 3)]);
        assert_eq!(permits.behind(1), Some(Ahead::Anyone));
        assert_eq!(permits.mismatch(Ask::READ, 1).map(|m| m.0), Some(3));
        assert!(permits.mismatch(Ask::Whole, 1).is_none());
    }
}
