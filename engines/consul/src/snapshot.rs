//! `Snapshot`: a line as it was read, and the transactions that change it.
//!
//! Everything but the reads is pure. Every transaction is guarded, so the servers decide, and a
//! stale snapshot only costs another attempt.
//!
//! Whole: the lock's key, locked by the session. Readers: the lock's key is a gate that every new
//! reader writes, and each reader has a key of its own. A writer that waits for readers closes the
//! gate: it locks the key, which stays a gate. Another write makes it the holder once the last
//! reader has gone. Permits: Consul's own semaphore.
//!
//! A reader or a permit counts only while its own key is locked. Deleting that key is the whole
//! release, and it refuses nobody else.

use std::collections::BTreeSet;

use super::client::{Client, Committed, Read};
use super::keys::Line;
use super::kv::{Holders, LOCK, Op, Pair, READERS, Record, SEMAPHORE, session_id};
use super::sessions::Member;
use palisade_core::engine::{Ask, ClaimId, Mode, READERS as ALL_READERS, capacity_mismatch};
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::cas::Retry;

/// How many dead keys of one kind one transaction deletes; Consul takes 64 operations.
const SWEPT: usize = 20;

/// A line as it was read. What was not read is assumed to be empty.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    pub(super) line: Line,
    pub(super) lock: Option<Pair>,
    pub(super) readers: Vec<Pair>,
    /// The permits' keys, each named after a session.
    permits: Vec<Pair>,
    /// The semaphore's list of holders, as it is stored.
    semaphore: Option<Pair>,
    /// The semaphore's live holders, and its limit; `None` when there are none.
    pub(super) holders: Option<Holders>,
    /// The amended values of claims.
    pub(super) values: Vec<Pair>,
    /// The newest index of the keys below the lock, as far as it is known.
    pub(super) tree_index: u64,
}

/// What claims can do on a line.
#[derive(Debug)]
pub(super) enum Decision {
    /// Apply these operations. They put the first so many claims at this spot, where they are
    /// granted; at [`Spot::Gate`] the first one closes the gate and waits.
    Write(Vec<Op>, Spot, usize),
    /// Others hold; wait on this.
    Behind(Watch),
}

/// What a waiting claim waits on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Watch {
    /// Whether it is the keys below the lock, or else the lock itself.
    pub(super) tree: bool,
    pub(super) index: u64,
}

/// Where a claim is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spot {
    /// It has the lock itself.
    Whole,
    /// It keeps the gate closed, and waits for the readers to leave.
    Gate,
    Reader,
    Permit,
}

impl Spot {
    /// The spot of a claim that has what it asks for.
    pub(super) fn of(ask: Ask) -> Self {
        match ask.mode() {
            Mode::Exclusive => Self::Whole,
            Mode::Shared => Self::Reader,
            Mode::Permits => Self::Permit,
        }
    }

    /// Its own key.
    pub(super) fn key(self, line: &Line, claim: ClaimId, session: &str) -> String {
        match self {
            Self::Whole | Self::Gate => line.lock.clone(),
            Self::Reader => line.reader(claim),
            Self::Permit => line.permit(session),
        }
    }
}

/// A claim that is in the store.
#[derive(Debug, Clone)]
pub(super) struct Found {
    pub(super) spot: Spot,
    pub(super) sequence: u64,
    /// The ModifyIndex of its key.
    pub(super) index: u64,
    pub(super) record: Record,
}

impl Found {
    /// Its sequence, if it holds.
    pub(super) fn held(&self) -> Option<u64> {
        (self.spot != Spot::Gate).then_some(self.sequence)
    }
}

impl Snapshot {
    /// A line that was not read, and is assumed to be free, as it is most of the time.
    pub(super) fn unread(line: Line) -> Self {
        Self {
            line,
            lock: None,
            readers: Vec::new(),
            permits: Vec::new(),
            semaphore: None,
            holders: None,
            values: Vec::new(),
            tree_index: 0,
        }
    }

    /// A line with these keys: the lock, and all that is below it.
    pub(super) fn new(line: Line, lock: Option<Pair>, tree: Vec<Pair>) -> Self {
        let below = line.tree();
        let mut found = Self {
            lock,
            tree_index: tree.iter().map(|pair| pair.modify_index).max().unwrap_or(0),
            ..Self::unread(line)
        };
        let mut living = BTreeSet::new();
        for pair in tree {
            let key = pair.key.strip_prefix(&below).unwrap_or_default();
            if key.starts_with(".readers/") {
                found.readers.push(pair);
            } else if key.starts_with(".value/") {
                found.values.push(pair);
            } else if key == ".lock" {
                found.semaphore = Some(pair);
            } else if pair.flags == SEMAPHORE && session_id(key).is_some() {
                living.extend(pair.holder().filter(|id| *id == key).map(str::to_owned));
                found.permits.push(pair);
            }
        }
        let semaphore = found.semaphore.as_ref();
        let list = semaphore.filter(|pair| pair.flags == SEMAPHORE);
        let list = list.and_then(|pair| serde_json::from_slice(&pair.bytes()).ok());
        found.holders = list.and_then(|mut list: Holders| {
            list.holders
                .retain(|id, holds| *holds && living.contains(id));
            (!list.holders.is_empty()).then_some(list)
        });
        found
    }

    /// Reads a line consistently: with one transaction, unless the guess whether the lock exists
    /// was wrong. Next to permits there is no lock.
    ///
    /// # Errors
    /// Those of [`Client::transact`]; [`ErrorKind::Unreachable`] when the lock keeps appearing and
    /// disappearing.
    pub(super) async fn read(client: &Client, line: &Line, mode: Mode) -> Result<Self> {
        let (mut exists, mut retry) = (mode != Mode::Permits, Retry::many());
        loop {
            let lock = if exists {
                Op::get(&line.lock)
            } else {
                Op::unchanged(&line.lock, None)
            };
            let ops = [lock, Op::get_tree(&line.tree())];
            if let Committed::Done(mut tree) = client.look("look", &ops).await? {
                let lock = tree.iter().position(|pair| pair.key == line.lock);
                let lock = lock.map(|at| tree.swap_remove(at));
                return Ok(Self::new(line.clone(), lock, tree));
            }
            exists = !exists;
            retry.or_busy("look").await?;
        }
    }

    /// Reads the lock alone, which usually suffices for readers, of which there may be many.
    pub(super) async fn read_lock(client: &Client, line: &Line) -> Result<Self> {
        let seen = client.read("look", &line.lock, false, Read::Consistent);
        Ok(Self {
            lock: seen.await?.pairs.pop(),
            ..Self::unread(line.clone())
        })
    }

    /// The session that has locked the lock's key, as a lock or as a gate that it closed.
    pub(super) fn locked_by(&self) -> Option<&str> {
        self.lock.as_ref().and_then(Pair::holder)
    }

    /// Whether the lock's key is a gate, open or closed.
    pub(super) fn is_gate(&self) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.flags == READERS)
    }

    /// Whether there is a live reader.
    pub(super) fn is_read(&self) -> bool {
        self.is_gate() && self.readers.iter().any(Pair::is_held)
    }

    /// The keys of claims, dead or alive.
    pub(super) fn claimed(&self) -> impl Iterator<Item = &Pair> {
        let below = self.readers.iter().chain(&self.permits);
        self.lock.iter().chain(below)
    }

    /// Every claim that has locked a key, its spot, and its record, which other tools don't write.
    pub(super) fn claims(&self) -> impl Iterator<Item = (Spot, &Pair, &str, Option<Record>)> {
        let whole = if self.is_gate() {
            Spot::Gate
        } else {
            Spot::Whole
        };
        let lock = self.lock.iter().map(move |pair| (whole, pair));
        let readers = self.readers.iter().map(|pair| (Spot::Reader, pair));
        let permits = self.permits.iter().map(|pair| (Spot::Permit, pair));
        let pairs = lock.chain(readers).chain(permits);
        pairs.filter_map(|(spot, pair)| Some((spot, pair, pair.holder()?, pair.record())))
    }

    /// Finds a claim by its id and its session.
    pub(super) fn find(&self, claim: ClaimId, session: &str) -> Option<Found> {
        let id = claim.to_string();
        self.claims().find_map(|(spot, pair, holder, record)| {
            let record = record.filter(|record| record.claim == id && holder == session)?;
            let counts = match spot {
                Spot::Whole | Spot::Gate => true,
                Spot::Reader => self.is_gate(),
                Spot::Permit => self.holders.as_ref()?.holders.contains_key(session),
            };
            counts.then(|| Found {
                spot,
                sequence: record.granted_at(pair),
                index: pair.modify_index,
                record,
            })
        })
    }

    /// The transaction that grants the first of `members`, and others with it, or what blocks it.
    /// All members ask for the same.
    ///
    /// # Errors
    /// [`ErrorKind::CapacityMismatch`] next to another kind of claim; [`ErrorKind::Unusable`] for a
    /// key that is not a lock.
    pub(super) fn decide(&self, members: &[Member]) -> Result<Decision> {
        let Some(first) = members.first() else {
            let message = "nobody asks (bug)";
            return Err(Error::new(ErrorKind::Internal, "enter", message));
        };
        let ask = first.claim.ask;
        let mismatch =
            |message: &str| Err(Error::new(ErrorKind::CapacityMismatch, "enter", message));
        match &self.lock {
            Some(lock) if lock.flags == SEMAPHORE => {
                return mismatch(
                    "this key belongs to a semaphore; use the name of the semaphore, or another",
                );
            }
            Some(lock) if lock.flags != LOCK && lock.flags != READERS => {
                let message = "the key of this lock holds something that is no lock; use another name, or remove the key";
                return Err(Error::new(ErrorKind::Unusable, "enter", message));
            }
            _ => {}
        }
        match (ask, &self.holders) {
            (Ask::READ, Some(list)) => Err(capacity_mismatch(list.limit, ALL_READERS)),
            (Ask::Whole, Some(list)) => mismatch(&format!(
                "this line is in use for {} permits, not as a lock; wait until it is empty or use another name",
                list.limit
            )),
            (Ask::Whole | Ask::READ, None) => {
                // The gate that this claim closed is locked by its own session.
                let ours = self.is_gate() && self.locked_by() == Some(&first.session_text);
                if self.locked_by().is_some() && !ours {
                    return Ok(self.behind(false));
                }
                if ask == Ask::READ {
                    let ops = self.take_read(members);
                    return Ok(Decision::Write(ops, Spot::Reader, members.len()));
                }
                if !self.is_read() {
                    return Ok(Decision::Write(self.take_whole(first), Spot::Whole, 1));
                }
                if first.claim.queue && !ours {
                    return Ok(Decision::Write(self.close(first), Spot::Gate, 1));
                }
                Ok(self.behind(true))
            }
            (Ask::Part { capacity, .. }, live) => {
                if self.is_read() {
                    return Err(capacity_mismatch(ALL_READERS, capacity));
                }
                if self.locked_by().is_some() {
                    return mismatch(
                        "this line is in use as a lock, not for permits; wait until it is free or use another name",
                    );
                }
                let list = live.clone().unwrap_or_else(|| Holders {
                    limit: capacity,
                    ..Holders::default()
                });
                // A claim that has waited adopts a limit that an operator has changed meanwhile.
                if list.limit != capacity && !(list.resized && first.waited) {
                    return Err(capacity_mismatch(list.limit, capacity));
                }
                let free = (list.limit as usize).saturating_sub(list.holders.len());
                let taken = free.min(members.len());
                if taken == 0 {
                    return Ok(self.behind(true));
                }
                let ops = self.take_permits(&members[..taken], list);
                Ok(Decision::Write(ops, Spot::Permit, taken))
            }
        }
    }

    /// Waits from the newest index that was read. Earlier deletes have a newer index and cause one
    /// superfluous wake-up, with which the query returns that index.
    fn behind(&self, tree: bool) -> Decision {
        let index = if tree {
            self.tree_index
        } else {
            self.lock.as_ref().map_or(0, |lock| lock.modify_index)
        };
        Decision::Behind(Watch { tree, index })
    }

    /// Checks that there are no permits, and removes the semaphore if it has no live holder.
    fn no_permits(&self) -> Vec<Op> {
        let (key, pair) = (self.line.semaphore(), self.semaphore.as_ref());
        let mut ops = vec![Op::unchanged(&key, pair)];
        if pair.is_some_and(|pair| pair.flags == SEMAPHORE) {
            ops.push(Op::delete(&key));
            ops.extend(delete_dead(&self.permits));
        }
        ops
    }

    /// Only together with a guard on the gate's index: a reader that comes again has the same key.
    fn dead_readers(&self) -> impl Iterator<Item = Op> {
        delete_dead(&self.readers)
    }

    fn take_whole(&self, member: &Member) -> Vec<Op> {
        let lock = &self.line.lock;
        let mut ops = vec![Op::unchanged(lock, self.lock.as_ref())];
        ops.extend(self.no_permits());
        ops.extend(self.dead_readers());
        ops.push(member.lock(lock, LOCK));
        ops
    }

    /// Guarded by the gate being open and not by its index, so that readers don't refuse each
    /// other. Each reader writes the gate, so a transaction that relies on its index is refused.
    fn take_read(&self, members: &[Member]) -> Vec<Op> {
        let lock = &self.line.lock;
        let open = match &self.lock {
            Some(_) if self.is_gate() => Op::unlocked(lock),
            seen => Op::unchanged(lock, seen.as_ref()),
        };
        let mut ops = vec![open];
        ops.extend(self.no_permits());
        if self.lock.is_some() && !self.is_gate() {
            // Left behind by a session that ended. Consul checks the lock-delay only for a lock
            // operation.
            let session = &members[0].session_text;
            ops.push(Op::lock(lock, session, READERS, ""));
            ops.push(Op::unlock(lock, session));
        }
        ops.push(Op::gate(lock));
        let lock = |member: &Member| member.lock(&self.line.reader(member.claim.id), READERS);
        ops.extend(members.iter().map(lock));
        ops
    }

    fn take_permits(&self, members: &[Member], mut list: Holders) -> Vec<Op> {
        let mut ops = vec![Op::unchanged(&self.line.lock, self.lock.as_ref())];
        // Left behind by a session that ended.
        if self.lock.is_some() {
            ops.push(Op::delete(&self.line.lock));
            ops.extend(self.dead_readers());
        }
        let key = self.line.semaphore();
        ops.push(Op::unchanged(&key, self.semaphore.as_ref()));
        ops.extend(delete_dead(&self.permits));
        let holds = |member: &Member| (member.session_text.to_string(), true);
        list.holders.extend(members.iter().map(holds));
        ops.push(Op::list(&key, list));
        let lock = |member: &Member| {
            let key = self.line.permit(&member.session_text);
            member.lock(&key, SEMAPHORE)
        };
        ops.extend(members.iter().map(lock));
        ops
    }

    /// Closes the gate. Opening it again, or turning it into something else, changes its index.
    fn close(&self, member: &Member) -> Vec<Op> {
        let lock = &self.line.lock;
        vec![Op::unlocked(lock), member.lock(lock, READERS)]
    }

    /// Removes what is left of a line without live claims. `None` when there are some, when nothing
    /// is left, or when it is not ours.
    pub(super) fn remains(&self) -> Option<Vec<Op>> {
        let ours = |lock: &Pair| match lock.flags {
            LOCK => lock.record().is_some(),
            flags => flags == READERS,
        };
        if !self.lock.as_ref().is_none_or(ours) || self.claimed().any(Pair::is_held) {
            return None;
        }
        let semaphore = self.semaphore.as_ref();
        // A claim that comes meanwhile changes one of these.
        let mut ops = vec![
            Op::unchanged(&self.line.lock, self.lock.as_ref()),
            Op::unchanged(&self.line.semaphore(), semaphore),
        ];
        let semaphore = semaphore.filter(|pair| pair.flags == SEMAPHORE);
        let keys = self.lock.iter().chain(semaphore);
        ops.extend(keys.map(|pair| Op::delete(&pair.key)));
        ops.extend(delete_dead(&self.permits));
        ops.extend(self.dead_readers());
        ops.extend(self.values.iter().take(8).map(|pair| Op::delete(&pair.key)));
        (ops.len() > 2).then_some(ops)
    }

    /// Turns the holder of the whole line into a reader with the same token.
    pub(super) fn downgrade(&self, claim: ClaimId, session: &str, record: &Record) -> Vec<Op> {
        let lock = &self.line.lock;
        vec![
            Op::unchanged(lock, self.lock.as_ref()),
            Op::unlock(lock, session),
            Op::gate(lock),
            Op::claim(&self.line.reader(claim), session, READERS, record),
        ]
    }

    /// Turns the only reader into the holder of the whole line; `None` when there are other
    /// readers, or a writer waits.
    pub(super) fn upgrade(
        &self,
        claim: ClaimId,
        session: &str,
        record: &Record,
    ) -> Option<Vec<Op>> {
        let (lock, own) = (&self.line.lock, self.line.reader(claim));
        let mut others = self.readers.iter().filter(|pair| pair.key != own);
        if self.locked_by().is_some() || others.any(Pair::is_held) {
            return None;
        }
        let mut ops = vec![
            Op::unchanged(lock, self.lock.as_ref()),
            Op::check_session(&own, session),
            Op::delete(&own),
        ];
        ops.extend(self.dead_readers());
        ops.push(Op::claim(lock, session, LOCK, record));
        Some(ops)
    }

    /// Changes the semaphore's limit; `None` when it has no live holder.
    pub(super) fn resize(&self, limit: u32) -> Option<Vec<Op>> {
        let (key, mut list) = (self.line.semaphore(), self.holders.clone()?);
        (list.limit, list.resized) = (limit, true);
        Some(vec![
            Op::unchanged(&key, self.semaphore.as_ref()),
            Op::list(&key, list),
        ])
    }
}

/// Removes a claim, if its key has this ModifyIndex.
pub(super) fn remove(
    spot: Spot,
    index: u64,
    line: &Line,
    claim: ClaimId,
    session: &str,
) -> Vec<Op> {
    let key = spot.key(line, claim, session);
    let mut ops = vec![Op::check_index(&key, index)];
    match spot {
        // The readers stay, and others may come again. An unlock clears the flags, so the gate is
        // written again.
        Spot::Gate => ops.extend([Op::unlock(&key, session), Op::gate(&key)]),
        Spot::Whole | Spot::Reader | Spot::Permit => ops.push(Op::delete(&key)),
    }
    ops
}

fn delete_dead(pairs: &[Pair]) -> impl Iterator<Item = Op> {
    pairs
        .iter()
        .filter(|pair| !pair.is_held())
        .take(SWEPT)
        .map(|pair| Op::delete(&pair.key))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use base64::Engine as _;
    use serde_json::json;

    use super::super::kv::session_text;
    use super::*;
    use palisade_core::Name;
    use palisade_core::engine::Claim;
    use palisade_core::report::Owner;

    fn line() -> Line {
        Line {
            lock: "ns/x".to_owned(),
        }
    }

    fn member(id: u128, ask: Ask) -> Member {
        let claim = Claim {
            id: ClaimId(id),
            name: Name::new("x").unwrap(),
            ask,
            ttl: Duration::from_secs(1),
            renewed: true,
            at_least: Duration::ZERO,
            queue: id != 4,
            owner: Owner::here("me", None),
            value: None,
        };
        Member::new(Arc::new(claim), id, session_text(id).into())
    }

    fn pair(key: &str, flags: u64, value: &str, session: Option<&str>) -> Pair {
        let value = base64::engine::general_purpose::STANDARD.encode(value);
        let pair = json!({
            "Key": key, "Flags": flags, "Session": session, "Value": value, "ModifyIndex": 7,
        });
        serde_json::from_value(pair).unwrap()
    }

    fn locked(key: &str, flags: u64, member: &Member) -> Pair {
        let record = serde_json::to_string(&Record::of(&member.claim)).unwrap();
        pair(key, flags, &record, Some(&member.session_text))
    }

    #[test]
    fn a_writer_closes_the_gate_and_is_granted_when_the_readers_have_gone() {
        let [writer, hurried] = [1, 4].map(|id| member(id, Ask::Whole));
        let [first, late] = [2, 3].map(|id| member(id, Ask::READ));
        let decide = |snapshot: &Snapshot, member: &Member| {
            snapshot.decide(std::slice::from_ref(member)).unwrap()
        };
        let is_behind = |decision, below| match decision {
            Decision::Behind(watch) => watch.tree == below && watch.index == 7,
            _ => false,
        };
        let gate = Some(pair("ns/x", READERS, "", None));
        let tree = vec![locked(&line().reader(first.claim.id), READERS, &first)];
        let open = Snapshot::new(line(), gate, tree);
        assert!(matches!(
            decide(&open, &late),
            Decision::Write(_, Spot::Reader, 1)
        ));
        assert!(matches!(
            decide(&open, &writer),
            Decision::Write(_, Spot::Gate, 1)
        ));
        assert!(is_behind(decide(&open, &hurried), true));

        let closed = Snapshot {
            lock: Some(locked("ns/x", READERS, &writer)),
            ..open
        };
        for other in [&late, &hurried] {
            assert!(is_behind(decide(&closed, other), false));
        }
        assert!(is_behind(decide(&closed, &writer), true));
        let find = |member: &Member| {
            let found = closed.find(member.claim.id, &member.session_text);
            found.map(|found| (found.spot, found.held())).unwrap()
        };
        assert_eq!(find(&writer), (Spot::Gate, None));
        assert_eq!(find(&first), (Spot::Reader, Some(7)));
        let record = Record::of(&first.claim);
        let upgraded = closed.upgrade(first.claim.id, &first.session_text, &record);
        assert!(upgraded.is_none(), "a writer waits");
        assert!(closed.remains().is_none());

        let drained = Snapshot::new(line(), closed.lock, Vec::new());
        assert!(matches!(
            decide(&drained, &writer),
            Decision::Write(_, Spot::Whole, 1)
        ));
        assert!(drained.remains().is_none(), "somebody is about to hold");
    }

    #[test]
    fn permits_are_given_to_as_many_as_fit() {
        let (weight, capacity) = (1, 3);
        let members = [1, 2, 3, 5].map(|id| member(id, Ask::Part { weight, capacity }));
        let decision = Snapshot::unread(line()).decide(&members).unwrap();
        let takes = |decision: &Decision| match decision {
            Decision::Write(_, Spot::Permit, taken) => *taken,
            _ => 0,
        };
        assert_eq!(takes(&decision), 3, "{decision:?}");
        let holds = |member: &Member| (member.session_text.to_string(), true.into());
        let holders: serde_json::Map<_, _> = members[..3].iter().map(holds).collect();
        let list = json!({ "Limit": 3, "Holders": holders }).to_string();
        let mut tree = vec![pair(&line().semaphore(), SEMAPHORE, &list, None)];
        let permit = |member: &Member| line().permit(&member.session_text);
        let permits = members[..3].iter();
        tree.extend(permits.map(|member| locked(&permit(member), SEMAPHORE, member)));
        let decide = |tree| Snapshot::new(line(), None, tree).decide(&members[3..]);
        let decision = decide(tree.clone()).unwrap();
        assert!(matches!(decision, Decision::Behind(_)), "{decision:?}");
        // A listed holder counts only while its own key is locked.
        tree.pop();
        let decision = decide(tree).unwrap();
        assert_eq!(takes(&decision), 1, "{decision:?}");
    }
}
