//! `Snapshot`: a line as etcd shows it at one revision, in the order of create revisions.
//!
//! The write that made its key decides a place. A later read confirms it even if the answer is
//! stale: whoever is ahead can only go, so that a claim that held at any revision holds for as
//! long as its key is there. [`Line`] of the core decides who holds.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::Inner;
use super::client::revision;
use super::keys::{self, Keys, Record};
use super::proto::KeyValue;
use super::txn;
use palisade_core::engine::{Ask, Line, Seat};
use palisade_core::{BootTime, Result};

/// What etcd keeps of one ticket.
#[derive(Debug, Clone, Default)]
pub(super) struct Place {
    pub(super) key: Vec<u8>,
    /// What operators call it: the claim, or what follows the name in the key of another tool.
    pub(super) id: String,
    /// Whether it is of palisade.
    pub(super) ours: bool,
    pub(super) created: i64,
    pub(super) modified: i64,
    pub(super) lease: i64,
    pub(super) record: Option<Record>,
    pub(super) value: Vec<u8>,
    /// The capacity of the line and its own, where they differ.
    pub(super) misfit: Option<(u32, u32)>,
}

/// A line, oldest ticket first.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) line: Line<Place>,
    pub(super) revision: i64,
}

/// Whose change may let a claim in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ahead {
    /// The key of the nearest place that excludes it; `None` for permits, where any departure may
    /// make room.
    pub(super) key: Option<Vec<u8>>,
    /// The revision at which that was seen.
    pub(super) seen: i64,
}

impl Snapshot {
    /// The line whose keys begin with `prefix`. Readers and permits need the values of all keys;
    /// a claim to the whole line waits for anyone, whatever the values say.
    pub(super) fn new(keys: &Keys, prefix: &str, mut kvs: Vec<KeyValue>, revision: i64) -> Self {
        kvs.sort_by_key(|kv| kv.create_revision);
        let mut line = Line::default();
        for kv in kvs {
            let rest = kv.key.get(prefix.len()..).unwrap_or_default();
            let rest = String::from_utf8_lossy(rest);
            let named = keys::ours(&rest);
            let record = named.and_then(|_| Record::read(keys, &kv.value));
            // The key may be called after an earlier claim of the same client.
            let told = record.as_ref().map(|record| record.id.clone());
            let named = named.map(|(_, claim)| claim.to_string());
            let mut place = Place {
                ours: named.is_some(),
                id: told.or(named).unwrap_or_else(|| rest.into_owned()),
                created: kv.create_revision,
                modified: kv.mod_revision,
                lease: kv.lease,
                record,
                value: kv.value,
                key: kv.key,
                misfit: None,
            };
            let mut ask = place.record.as_ref().map_or(Ask::Whole, Record::ask);
            place.misfit = line.misfit(ask);
            if place.misfit.is_some() {
                // It excludes everyone.
                ask = Ask::Whole;
            }
            line.seats.push(seat(line.seats.len(), ask, place));
        }
        Self { line, revision }
    }

    /// Where the ticket with this key is.
    pub(super) fn find(&self, key: &[u8]) -> Option<usize> {
        let mut seats = self.line.seats.iter();
        seats.position(|seat| seat.extra.key == key)
    }

    /// Whom the ticket at `at` waits for; `None` when it holds.
    pub(super) fn ahead_of(&self, at: usize) -> Option<Ahead> {
        let nearest = self.line.ahead_of(at)?;
        Some(Ahead {
            key: nearest.map(|seat| seat.extra.key.clone()),
            seen: self.revision,
        })
    }

    /// Whether a claim for `ask` that came now would hold.
    ///
    /// # Errors
    /// `CapacityMismatch` when the line is in use with another capacity.
    pub(super) fn has_room(mut self, ask: Ask) -> Result<bool> {
        let at = self.line.seats.len();
        self.line.push(seat(at, ask, Place::default()))?;
        Ok(self.ahead_of(at).is_none())
    }

    /// Marks the holders: always the first ones, because nobody overtakes.
    fn settle(&mut self) {
        self.line.settle(BootTime::PAST, || 1);
        for seat in self.line.seats.iter_mut().filter(|seat| seat.is_held()) {
            seat.sequence = u64::try_from(seat.extra.created).unwrap_or(0);
        }
    }
}

/// A claim that held before a resize is marked in its record, and continues to hold.
fn seat(at: usize, ask: Ask, place: Place) -> Seat<Place> {
    let held = place.record.as_ref().is_some_and(|record| record.held);
    Seat {
        sequence: u64::from(held),
        ..Seat::read(at, ask, place)
    }
}

/// All that is kept of some lines at one revision: places, marks, and owner records kept apart.
struct Found {
    places: Vec<KeyValue>,
    marks: HashSet<Vec<u8>>,
    owners: HashMap<Vec<u8>, Record>,
    revision: i64,
}

impl Found {
    /// Reads what is kept under `prefix`.
    async fn read(engine: &Inner, operation: &'static str, prefix: &str) -> Result<Self> {
        let under = |base: &str| txn::read(txn::all(&format!("{base}{prefix}")));
        let mut reads = vec![under(""), under(keys::MARKS)];
        if engine.keys.shared_with_others() {
            reads.push(under(keys::OWNERS));
        }
        let answer = engine.client.call(operation, txn::plain(reads)).await?;
        let revision = revision(&answer.header);
        let mut found = txn::found(answer);
        let mut next = || found.next().unwrap_or_default();
        Ok(Self {
            places: next(),
            marks: next().into_iter().map(|mark| mark.key).collect(),
            owners: next()
                .into_iter()
                .filter_map(|owner| Some((owner.key, Record::parse(&owner.value)?)))
                .collect(),
            revision,
        })
    }

    /// One of the lines, with whoever holds.
    fn line(&self, keys: &Keys, prefix: &str, places: Vec<KeyValue>) -> Snapshot {
        let mut snapshot = Snapshot::new(keys, prefix, places, self.revision);
        for seat in &mut snapshot.line.seats {
            let place = &mut seat.extra;
            seat.evicted = self.marks.contains(&keys::mark_key(&place.key));
            let apart = || self.owners.get(&keys::owner_key(&place.key)).cloned();
            place.record = place.record.take().or_else(apart);
        }
        snapshot.settle();
        snapshot
    }
}

/// The line whose keys begin with `prefix`, with whoever holds in it.
pub(super) async fn line(
    engine: &Inner,
    operation: &'static str,
    prefix: &str,
) -> Result<Snapshot> {
    let mut found = Found::read(engine, operation, prefix).await?;
    let places = std::mem::take(&mut found.places);
    Ok(found.line(&engine.keys, prefix, places))
}

/// All lines of a namespace of ours whose names begin with `prefix`, by name.
pub(super) async fn lines(engine: &Inner, prefix: &str) -> Result<BTreeMap<String, Snapshot>> {
    let keys = &engine.keys;
    let mut found = Found::read(engine, "survey", &keys.scope(prefix)).await?;
    let mut lines: BTreeMap<String, Vec<KeyValue>> = BTreeMap::new();
    for kv in std::mem::take(&mut found.places) {
        if let Some((name, _)) = keys.parse(&kv.key) {
            lines.entry(name).or_default().push(kv);
        }
    }
    let line = |(name, places): (String, _)| {
        let line = found.line(keys, &(keys.scope(&name) + "/"), places);
        (name, line)
    };
    Ok(lines.into_iter().map(line).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::engine::ClaimId;
    use palisade_core::report::Owner;

    fn line(asks: &[Option<Ask>], held: usize) -> Snapshot {
        let keys = Keys::new("palisade").unwrap();
        let kv = |(at, ask): (usize, &Option<Ask>)| {
            let claim = ClaimId(at as u128);
            let mut kv = KeyValue {
                key: format!("palisade/x/{at:x}").into_bytes(),
                create_revision: at as i64 + 1,
                ..Default::default()
            };
            if let Some(ask) = ask {
                let record = Record {
                    id: claim.to_string(),
                    owner: Owner::here("me", None),
                    part: keys::part(*ask),
                    value: None,
                    held: at < held,
                };
                kv.key = keys::place("palisade/x/", 1, claim).as_bytes().to_vec();
                kv.value = record.values(&keys).unwrap().0;
            }
            kv
        };
        // As they may come: in the order of keys.
        let kvs = asks.iter().enumerate().map(kv).rev().collect();
        let mut snapshot = Snapshot::new(&keys, "palisade/x/", kvs, 9);
        snapshot.settle();
        snapshot
    }

    fn holders(snapshot: &Snapshot) -> usize {
        let seats = snapshot.line.seats.iter();
        seats.take_while(|seat| seat.is_held()).count()
    }

    fn part(weight: u32, capacity: u32) -> Option<Ask> {
        Some(Ask::Part { weight, capacity })
    }

    #[test]
    fn the_oldest_hold_as_far_as_they_fit() {
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
            assert_eq!(holders(&line(&asks, 0)), held, "{asks:?}");
        }
    }

    #[test]
    fn whoever_held_before_a_resize_holds_and_the_others_wait_until_they_fit() {
        let permits = [part(1, 1), part(1, 1), part(1, 1)];
        assert_eq!(holders(&line(&permits, 2)), 2);
        assert_eq!(line(&permits, 2).ahead_of(1), None);
        assert_eq!(holders(&line(&permits[1..], 1)), 1);
        assert_eq!(holders(&line(&permits[2..], 0)), 1);
    }

    #[test]
    fn a_waiter_watches_the_nearest_that_excludes_it() {
        let readers = [Ask::Whole, Ask::READ, Ask::READ, Ask::Whole].map(Some);
        let readers = line(&readers, 0);
        let nearest = |at: usize| readers.find(&readers.ahead_of(at)?.key?);
        assert_eq!((nearest(2), nearest(3)), (Some(0), Some(2)));
        let permits = line(&[part(2, 3), part(2, 3)], 0);
        assert_eq!(permits.ahead_of(1).map(|ahead| ahead.key), Some(None));
        assert!(permits.has_room(Ask::READ).is_err());
    }
}
