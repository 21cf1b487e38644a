//! `Snapshot`: a line as its children's names tell it, in the order of their sequences.
//!
//! The write that made its node decides a place. A later read confirms it even if the answer is
//! stale: whoever is ahead can only go, so that a claim that held at any time holds for as long as
//! its node is there. [`Line`] of the core decides who holds.

use std::cmp::Ordering;

use super::keys::{Child, Record};
use palisade_core::engine::{Ask, ClaimId, Line, Seat};
use palisade_core::{BootTime, Result};

/// What is kept of one ticket.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) child: Child,
    /// The capacity of the line and its own, where they differ.
    pub(super) misfit: Option<(u32, u32)>,
    /// What its data say, where they were read: the record of ours, the text of another tool.
    pub(super) record: Option<Record>,
    pub(super) text: Option<String>,
    /// The transaction that made its claim's first node.
    pub(super) token: i64,
    pub(super) version: i32,
    /// The session that it lives with.
    pub(super) session: i64,
    /// When that was last renewed at the latest, where that is known.
    pub(super) renewed: Option<BootTime>,
}

impl Place {
    /// One of which only the name is known.
    fn unread(child: Child) -> Self {
        Self {
            child,
            misfit: None,
            record: None,
            text: None,
            token: 0,
            version: 0,
            session: 0,
            renewed: None,
        }
    }
}

/// Whose change may let a claim in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ahead {
    /// The nearest one that excludes it, by its node's name.
    Child(String),
    /// Anyone: every departure may make room for permits.
    Anyone,
}

/// A line, first come first.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) line: Line<Place>,
}

impl Snapshot {
    /// The line whose children have these names.
    pub(super) fn new(names: &[String]) -> Self {
        let mut children: Vec<Child> = names.iter().filter_map(|name| Child::read(name)).collect();
        children.sort_by(|a, b| match (a.is_before(b), b.is_before(a)) {
            (true, _) => Ordering::Less,
            (_, true) => Ordering::Greater,
            // Both belong to one claim that is being amended; or, never seen, to two tools.
            _ => a.name.cmp(&b.name),
        });
        let mut line = Line::default();
        for child in children {
            let misfit = line.misfit(child.ask);
            // A claim with another capacity excludes everyone.
            let ask = misfit.map_or(child.ask, |_| Ask::Whole);
            let place = Place {
                misfit,
                ..Place::unread(child)
            };
            line.seats.push(Seat::read(line.seats.len(), ask, place));
        }
        Self { line }
    }

    /// Where the node with this name is.
    pub(super) fn find(&self, name: &str) -> Option<usize> {
        self.line
            .seats
            .iter()
            .position(|seat| seat.extra.child.name == name)
    }

    /// The nodes of a claim.
    pub(super) fn nodes_of(&self, claim: ClaimId) -> Vec<String> {
        let children = self.line.seats.iter().map(|seat| &seat.extra.child);
        let own = children.filter(|child| child.claim == Some(claim));
        own.map(|child| child.name.clone()).collect()
    }

    /// Whom the ticket at `at` waits for; `None` when it holds.
    pub(super) fn ahead_of(&self, at: usize) -> Option<Ahead> {
        self.line.ahead_of(at).map(|nearest| match nearest {
            Some(seat) => Ahead::Child(seat.extra.child.name.clone()),
            None => Ahead::Anyone,
        })
    }

    /// Whether a claim for `ask` that came now would hold.
    ///
    /// # Errors
    /// `CapacityMismatch` when the line is in use with another capacity.
    pub(super) fn has_room(mut self, ask: Ask) -> Result<bool> {
        let at = self.line.seats.len();
        let nobody = Place::unread(Child {
            name: String::new(),
            claim: None,
            ask,
            sequence: 0,
        });
        self.line.push(Seat::read(at, ask, nobody))?;
        Ok(self.ahead_of(at).is_none())
    }

    /// Marks the holders: always the first ones, because nobody overtakes.
    pub(super) fn settle(&mut self) {
        self.line.settle(BootTime::PAST, || 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{Keys, Layout};

    fn line(asks: &[Option<Ask>]) -> Snapshot {
        let keys = Keys::new("", "palisade", Layout::Mutex).unwrap();
        let name = |(at, ask): (usize, &Option<Ask>)| match ask {
            Some(ask) => format!("{}{at:010}", keys.ticket(ClaimId::random(), *ask)),
            None => format!("lock-{at:010}"),
        };
        // As they may come: in no order.
        let names: Vec<String> = asks.iter().enumerate().map(name).rev().collect();
        Snapshot::new(&names)
    }

    fn holders(asks: &[Option<Ask>]) -> usize {
        let mut snapshot = line(asks);
        snapshot.settle();
        let seats = snapshot.line.seats.iter();
        seats.take_while(|seat| seat.is_held()).count()
    }

    fn part(weight: u32, capacity: u32) -> Option<Ask> {
        Some(Ask::Part { weight, capacity })
    }

    #[test]
    fn the_first_hold_as_far_as_they_fit() {
        for (asks, held) in [
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
            assert_eq!(holders(&asks), held, "{asks:?}");
        }
    }

    #[test]
    fn a_waiter_watches_the_nearest_that_excludes_it() {
        let readers = line(&[Ask::Whole, Ask::READ, Ask::READ, Ask::Whole].map(Some));
        let nearest = |at: usize| match readers.ahead_of(at)? {
            Ahead::Child(name) => readers.find(&name),
            Ahead::Anyone => None,
        };
        assert_eq!((nearest(2), nearest(3)), (Some(0), Some(2)));
        let permits = line(&[part(2, 3), part(2, 3)]);
        assert_eq!(permits.ahead_of(1), Some(Ahead::Anyone));
        assert!(permits.has_room(Ask::READ).is_err());
    }

    #[test]
    fn children_that_are_no_tickets_are_not_in_the_line() {
        let names = ["b".to_owned(), "lock-0000000001".to_owned()];
        assert_eq!(Snapshot::new(&names).line.seats.len(), 1);
    }
}
