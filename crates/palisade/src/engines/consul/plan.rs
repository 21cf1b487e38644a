//! `Plan`: what would give claims their places in a line as it was read.
//!
//! Pure: it makes the operations of one transaction, guarded so that the write decides and a
//! stale read only costs another try. A reader is guarded by the gate being open, not by its
//! index, so that readers don't refuse each other; it writes the gate, so that whoever counted
//! on an index of it is refused. Permits are guarded by the index of the list of holders.

use super::keys::Line;
use super::view::View;
use super::wire::{Holders, LOCK, Op, READERS, Record, SEMAPHORE};
use crate::core::claim::{Ask, ClaimId, READERS as ALL_READERS};
use crate::core::error::{Error, Kind, Result};
use crate::core::line::capacity_mismatch;

/// How many keys of the dead one transaction sweeps away; Consul takes 64 operations.
const SWEPT: usize = 24;

/// Where the operations of a plan guard the lock, and that there are no permits.
pub(super) const LOCK_GUARD: usize = 0;
pub(super) const PERMITS_GUARD: usize = 1;

/// What claims can do about a line.
#[derive(Debug)]
pub(super) enum Plan {
    /// Apply these, which give so many of the askers their places, the first ones.
    Take(Vec<Op>, usize),
    /// Apply these, which close the gate, and wait for the readers to go.
    Close(Vec<Op>),
    /// Others hold; sleep on the lock, or on what is below it.
    Behind {
        /// Below it.
        tree: bool,
    },
}

/// Who asks.
pub(super) struct Asker {
    pub(super) claim: ClaimId,
    pub(super) session: String,
    pub(super) record: Record,
    /// Whether it waits.
    pub(super) queue: bool,
    /// Whether it has waited before, so that a limit that an operator changes is its own too.
    pub(super) waited: bool,
}

impl View {
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

    /// What gives the first of `askers` its place, and others with it, or what it is behind. All
    /// ask for the same.
    pub(super) fn plan(&self, line: &Line, ask: Ask, askers: &[Asker]) -> Result<Plan> {
        self.must_be_ours()?;
        let live = self.holders(line);
        let Some(first) = askers.first() else {
            return Ok(Plan::Behind { tree: false });
        };
        match ask {
            Ask::Whole | Ask::READ => {
                if let Some(holders) = live {
                    return Err(beside_permits(holders.limit, ask));
                }
                if self.is_locked() && !self.is_closed_by(&first.session) {
                    return Ok(Plan::Behind { tree: false });
                }
                if ask != Ask::Whole {
                    return Ok(Plan::Take(self.take_read(line, askers), askers.len()));
                }
                match self.is_read(line) {
                    false => Ok(Plan::Take(self.take_whole(line, first), 1)),
                    true if first.queue && !self.is_locked() => Ok(Plan::Close(close(line, first))),
                    true => Ok(Plan::Behind { tree: true }),
                }
            }
            Ask::Part { capacity, .. } => {
                if self.is_read(line) {
                    return Err(capacity_mismatch(ALL_READERS, capacity));
                }
                if self.is_locked() {
                    return Err(Error::new(
                        Kind::CapacityMismatch,
                        "enter",
                        "this line is in use as a lock, not for permits; wait until it is free or use another name",
                    ));
                }
                let follows = |holders: &Holders| holders.resized && first.waited;
                let (live, capacity) = match live {
                    None => (Holders::default(), capacity),
                    Some(holders) if holders.limit == capacity || follows(&holders) => {
                        let limit = holders.limit;
                        (holders, limit)
                    }
                    Some(holders) => return Err(capacity_mismatch(holders.limit, capacity)),
                };
                let free = (capacity as usize).saturating_sub(live.holders.len());
                match &askers[..free.min(askers.len())] {
                    [] => Ok(Plan::Behind { tree: true }),
                    some => Ok(Plan::Take(
                        self.take_permits(line, some, live, capacity),
                        some.len(),
                    )),
                }
            }
        }
    }

    /// Guards for the semaphore's key, and its end if nobody lives in it.
    pub(super) fn no_permits(&self, line: &Line) -> Vec<Op> {
        let (key, pair) = (line.semaphore(), self.semaphore(line));
        let mut ops = vec![Op::unchanged(&key, pair)];
        if pair.is_some_and(|pair| pair.flags == SEMAPHORE) {
            ops.push(Op::delete(&key));
            ops.extend(self.dead_permits(line));
        }
        ops
    }

    pub(super) fn dead_permits(&self, line: &Line) -> Vec<Op> {
        self.permits(line)
            .filter(|(_, pair)| pair.holder().is_none())
            .take(SWEPT)
            .map(|(_, pair)| Op::delete(&pair.key))
            .collect()
    }

    /// Only beside a guard of the gate's index: a reader that comes again has the same key.
    pub(super) fn dead_readers(&self, line: &Line) -> Vec<Op> {
        self.readers(line)
            .filter(|pair| pair.holder().is_none())
            .take(SWEPT)
            .map(|pair| Op::delete(&pair.key))
            .collect()
    }

    fn take_whole(&self, line: &Line, asker: &Asker) -> Vec<Op> {
        let mut ops = vec![Op::unchanged(&line.lock, self.lock.as_ref())];
        ops.extend(self.no_permits(line));
        ops.extend(self.dead_readers(line));
        let record = asker.record.to_json();
        ops.push(Op::lock(&line.lock, &asker.session, LOCK, &record));
        ops
    }

    fn take_read(&self, line: &Line, askers: &[Asker]) -> Vec<Op> {
        let mut ops = vec![match &self.lock {
            Some(_) if self.is_gate() => Op::unlocked(&line.lock),
            lock => Op::unchanged(&line.lock, lock.as_ref()),
        }];
        ops.extend(self.no_permits(line));
        if self.lock.is_some() && !self.is_gate() {
            // Left by a session that ended: only a lock asks for its lock-delay.
            let session = &askers[0].session;
            ops.push(Op::lock(&line.lock, session, READERS, ""));
            ops.push(Op::unlock(&line.lock, session));
        }
        ops.push(gate(line));
        ops.extend(askers.iter().map(|asker| {
            let (key, record) = (line.reader(asker.claim), asker.record.to_json());
            Op::lock(&key, &asker.session, READERS, &record)
        }));
        ops
    }

    fn take_permits(
        &self,
        line: &Line,
        askers: &[Asker],
        mut holders: Holders,
        capacity: u32,
    ) -> Vec<Op> {
        let mut ops = vec![Op::unchanged(&line.lock, self.lock.as_ref())];
        // Left behind by a session that ended.
        if self.lock.is_some() {
            ops.push(Op::delete(&line.lock));
            ops.extend(self.dead_readers(line));
        }
        let key = line.semaphore();
        ops.push(Op::unchanged(&key, self.semaphore(line)));
        ops.extend(self.dead_permits(line));
        holders.limit = capacity;
        let sessions = askers.iter().map(|asker| (asker.session.clone(), true));
        holders.holders.extend(sessions);
        ops.push(Op::set(&key, SEMAPHORE, &json(&holders)));
        ops.extend(askers.iter().map(|asker| {
            let (key, record) = (line.permit(&asker.session), asker.record.to_json());
            Op::lock(&key, &asker.session, SEMAPHORE, &record)
        }));
        ops
    }
}

/// Writes the list of holders, if it is as it was read.
pub(super) fn list(view: &View, line: &Line, holders: &Holders) -> Vec<Op> {
    let key = line.semaphore();
    vec![
        Op::unchanged(&key, view.semaphore(line)),
        Op::set(&key, SEMAPHORE, &json(holders)),
    ]
}

/// Closes the gate. Whoever opens it again, or makes it something else, moves its index.
fn close(line: &Line, asker: &Asker) -> Vec<Op> {
    let record = asker.record.to_json();
    vec![
        Op::unlocked(&line.lock),
        Op::lock(&line.lock, &asker.session, READERS, &record),
    ]
}

/// Writes the gate of readers. Consul leaves a key alone, index included, that is written with
/// the value it has, and then a writer would not see that a reader came.
pub(super) fn gate(line: &Line) -> Op {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::core::claim::Claim;
    use crate::core::name::Name;
    use crate::core::owner::Owner;
    use crate::engines::consul::view::Spot;
    use crate::engines::consul::wire::{Pair, session_text};

    fn line() -> Line {
        Line {
            lock: "ns/x".to_owned(),
        }
    }

    fn asker(id: u128) -> Asker {
        let claim = Claim {
            id: ClaimId(id),
            name: Name::new("x").unwrap(),
            ask: Ask::Whole,
            ttl: Duration::from_secs(1),
            renewed: true,
            at_least: Duration::ZERO,
            queue: true,
            owner: Owner::here("me", None),
            value: None,
        };
        Asker {
            claim: claim.id,
            session: session_text(id),
            record: Record::of(&claim),
            queue: true,
            waited: false,
        }
    }

    fn pair(key: &str, flags: u64, holder: Option<&Asker>) -> Pair {
        let session = holder.map(|holder| holder.session.clone());
        let value = holder.map(|holder| super::super::wire::base64(&holder.record.to_json()));
        let pair = json!({
            "Key": key, "Flags": flags, "Session": session, "Value": value, "ModifyIndex": 7,
        });
        serde_json::from_value(pair).unwrap()
    }

    fn reader(asker: &Asker) -> Pair {
        pair(&line().reader(asker.claim), READERS, Some(asker))
    }

    #[test]
    fn a_writer_closes_the_gate_and_is_granted_when_the_readers_have_gone() {
        let [writer, first, late] = [asker(1), asker(2), asker(3)];
        let line = line();
        let plan = |view: &View, ask, asker: &Asker| {
            let asker = std::slice::from_ref(asker);
            view.plan(&line, ask, asker).unwrap()
        };
        let open = View {
            lock: Some(pair("ns/x", READERS, None)),
            tree: vec![reader(&first)],
            tree_index: 9,
        };
        assert!(matches!(plan(&open, Ask::READ, &late), Plan::Take(_, 1)));
        assert!(matches!(plan(&open, Ask::Whole, &writer), Plan::Close(_)));
        let hurried = Asker {
            queue: false,
            ..asker(4)
        };
        let refused = plan(&open, Ask::Whole, &hurried);
        assert!(matches!(refused, Plan::Behind { tree: true }));

        let closed = View {
            lock: Some(pair("ns/x", READERS, Some(&writer))),
            ..open
        };
        for other in [(Ask::READ, &late), (Ask::Whole, &late)] {
            let behind = plan(&closed, other.0, other.1);
            assert!(matches!(behind, Plan::Behind { tree: false }));
        }
        let waits = plan(&closed, Ask::Whole, &writer);
        assert!(matches!(waits, Plan::Behind { tree: true }));
        let found = closed.find(&line, writer.claim, &writer.session).unwrap();
        assert_eq!((found.spot, found.held()), (Spot::Gate, None));
        let inside = closed.find(&line, first.claim, &first.session).unwrap();
        assert_eq!((inside.spot, inside.held()), (Spot::Reader, Some(7)));
        assert!(closed.upgrade(&line, &first).is_none(), "a writer waits");
        assert!(closed.tidy(&line).is_none());

        let drained = View {
            tree: Vec::new(),
            ..closed
        };
        assert!(matches!(
            plan(&drained, Ask::Whole, &writer),
            Plan::Take(_, 1)
        ));
        assert!(drained.tidy(&line).is_none(), "somebody is about to hold");
    }

    #[test]
    fn permits_are_given_to_as_many_as_fit() {
        let askers: Vec<Asker> = (1..=4).map(asker).collect();
        let ask = Ask::Part {
            weight: 1,
            capacity: 3,
        };
        let plan = View::default().plan(&line(), ask, &askers).unwrap();
        assert!(matches!(plan, Plan::Take(_, 3)), "{plan:?}");
        let full = json(&Holders {
            limit: 3,
            holders: askers[..3]
                .iter()
                .map(|asker| (asker.session.clone(), true))
                .collect(),
            ..Holders::default()
        });
        let list = json!({
            "Key": line().semaphore(), "Flags": SEMAPHORE, "ModifyIndex": 7,
            "Value": super::super::wire::base64(&full),
        });
        let mut tree: Vec<Pair> = vec![serde_json::from_value(list).unwrap()];
        tree.extend(askers[..3].iter().map(|asker| {
            let key = line().permit(&asker.session);
            pair(&key, SEMAPHORE, Some(asker))
        }));
        let mut view = View {
            lock: None,
            tree,
            tree_index: 9,
        };
        let plan = view.plan(&line(), ask, &askers[3..]).unwrap();
        assert!(matches!(plan, Plan::Behind { tree: true }), "{plan:?}");
        // One that is listed counts only while its own key is held.
        view.tree.pop();
        let plan = view.plan(&line(), ask, &askers[3..]).unwrap();
        assert!(matches!(plan, Plan::Take(_, 1)), "{plan:?}");
    }
}
