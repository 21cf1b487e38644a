//! `leave`, `amend`, `evict` and `resize`: each one a transaction that compares the create revision, since
//! a key that was left and taken again is another place (etcd #22082).

use std::sync::Arc;
use std::time::Duration;

use super::Inner;
use super::keys;
use super::ops;
use super::queue::{Queue, Seat};
use super::record::Record;
use super::rpc::revision;
use super::wire::{Op, PutRequest, RequestOp, TxnRequest};
use crate::core::claim::{Ask, READERS};
use crate::core::engine::{Amended, Amendment, Eviction, Left};
use crate::core::error::{Error, Kind, Outcome, Result};
use crate::core::line::capacity_mismatch;
use crate::core::name::Name;
use crate::core::ticket::Ticket;

/// How many operations etcd takes in one transaction (`--max-txn-ops`).
const MOST_OPS: usize = 128;

/// How often a change is tried again because the line changed in between.
const TRIES: usize = 16;

/// The request of an enter that was dropped may arrive after that of its leave, over another
/// connection and member: the place is looked for again after these times. What comes later still
/// is left to the audit.
const LATE: [Duration; 4] = [
    Duration::from_millis(10),
    Duration::from_millis(30),
    Duration::from_millis(100),
    Duration::from_millis(300),
];

impl Inner {
    pub(super) async fn leave(&self, ticket: Ticket) -> Result<Left> {
        let Some(key) = self.key_of(&ticket) else {
            return Ok(Left::Absent);
        };
        let prefix = self.keys.line(&ticket.name)?;
        // A mark must not outlive its place: the key may be used again.
        let mut success = self.deletes(key.as_bytes());
        success.push(ops::delete(mark_key(key.as_bytes())));
        let request = TxnRequest {
            compare: vec![ops::is_incarnation(key.as_bytes(), ticket.sequence)],
            success,
            failure: Vec::new(),
        };
        let mut left = self.send_leave(&request).await?;
        let known = self.known.lock().get(&ticket.claim).cloned();
        // An own lease takes a late place with it.
        let shares = known.as_ref().is_some_and(|known| known.own.is_none());
        if ticket.native.is_none() && shares {
            let mut pauses = LATE.iter();
            while let Some(pause) = pauses.next().filter(|_| !left) {
                tokio::time::sleep(*pause).await;
                left = self.send_leave(&request).await?;
            }
        }
        self.end_own(&ticket, known.as_ref()).await?;
        self.known.lock().remove(&ticket.claim);
        if !left {
            return Ok(Left::Absent);
        }
        // With `namespace=` the value of a key does not say whose it is.
        let certain = ticket.sequence != 0 && !ticket.in_doubt;
        let used_again = certain && !self.keys.shared_with_others();
        if let Some(known) = known.filter(|known| used_again && known.own.is_none()) {
            self.pool.give(known.lease, prefix, key);
        }
        Ok(Left::Done)
    }

    /// Sends a leave, and says whether the place was there. The connection may be dead while the
    /// server is well: what was not answered is sent once more, over another one. It compares the
    /// incarnation, so that a second copy does no harm.
    async fn send_leave(&self, request: &TxnRequest) -> Result<bool> {
        let error = match self.rpc.txn("leave", request.clone()).await {
            Err(error) if error.is_transient() => error,
            answer => return answer.map(|answer| answer.succeeded),
        };
        let again = self.rpc.txn("leave", request.clone()).await?;
        // Gone since: the first copy did it.
        Ok(again.succeeded || error.outcome() == Outcome::MaybeApplied)
    }

    /// What removes a place, without its mark.
    pub(super) fn deletes(&self, key: &[u8]) -> Vec<RequestOp> {
        let mut deletes = vec![ops::delete(key)];
        if self.keys.shared_with_others() {
            deletes.push(ops::delete(self.owner_key(key)));
        }
        deletes
    }

    pub(super) async fn amend(&self, ticket: Ticket, amendment: Amendment) -> Result<Amended> {
        let prefix = self.keys.line(&ticket.name)?;
        let Some(key) = self.key_of(&ticket) else {
            return Ok(Amended::Gone);
        };
        for _ in 0..TRIES {
            let response = self.rpc.range("amend", ops::all(&prefix)).await?;
            let seen = revision(response.header.as_ref());
            let queue = Queue::new(&self.keys, &prefix, response.kvs);
            let Some(at) = queue.find(key.as_bytes()) else {
                return Ok(Amended::Gone);
            };
            let seat = &queue.seats[at];
            if u64::try_from(seat.created) != Ok(ticket.sequence) {
                return Ok(Amended::Gone);
            }
            let mut compare = vec![
                ops::created_at(&seat.key, seat.created),
                ops::unchanged(&seat.key, seat.modified),
            ];
            let mut record = self.record_of(seat).await?;
            match &amendment {
                Amendment::Value(value) => record.value = Some(value.clone()),
                Amendment::Ask(ask) => {
                    match may_reweigh(&queue, at, *ask) {
                        Amended::Done => {}
                        refused => return Ok(refused),
                    }
                    compare.push(ops::nothing_put_since(&prefix, seen));
                    // Whoever waits first keeps everyone behind it waiting, and must still be
                    // there: a delete leaves no trace in what is left.
                    if let Some(next) = queue.seats.get(queue.holders()) {
                        compare.push(ops::created_at(&next.key, next.created));
                    }
                    record.set_ask(*ask);
                }
            }
            let request = TxnRequest {
                compare,
                success: self.rewrites(seat, &record)?,
                failure: Vec::new(),
            };
            if self.rpc.txn("amend", request).await?.succeeded {
                if let Some(known) = self.known.lock().get_mut(&ticket.claim) {
                    known.ask = record.ask();
                }
                return Ok(Amended::Done);
            }
        }
        let message = "the line changes faster than it can be looked at; try again";
        Err(Error::new(Kind::Unreachable, "amend", message))
    }

    fn rewrites(&self, seat: &Seat, record: &Record) -> Result<Vec<RequestOp>> {
        let rewrite = |key: Vec<u8>, value: Vec<u8>| -> RequestOp {
            let put = PutRequest {
                key,
                value,
                lease: seat.lease,
                ignore_lease: false,
            };
            Op::Put(put).into()
        };
        let mut rewrites = vec![rewrite(seat.key.clone(), record.value(&self.keys)?)];
        if self.keys.shared_with_others() {
            rewrites.push(rewrite(self.owner_key(&seat.key), record.json()));
        }
        Ok(rewrites)
    }

    /// The record of a place of ours, wherever it is kept.
    async fn record_of(&self, seat: &Seat) -> Result<Record> {
        if let Some(record) = &seat.record {
            return Ok(record.clone());
        }
        let apart = ops::one(&self.owner_key(&seat.key));
        let found = self.rpc.range("amend", apart).await?.kvs.pop();
        let record = found.and_then(|kv| Record::read_apart(&kv.value));
        record.ok_or_else(|| {
            let message = "the record of this place can't be read; was it changed by hand?";
            Error::new(Kind::Unusable, "amend", message)
        })
    }

    pub(super) async fn evict(&self, name: Name, id: String, eviction: Eviction) -> Result<bool> {
        let prefix = self.keys.line(&name)?;
        for _ in 0..TRIES {
            let found = self.rpc.range("evict", ops::all(&prefix)).await?.kvs;
            let queue = Queue::new(&self.keys, &prefix, found);
            let is_meant = |seat: &&Seat| match seat.claim {
                Some(claim) => claim.to_string() == id,
                None => !id.is_empty() && seat.rest == id,
            };
            let Some(seat) = queue.seats.iter().find(is_meant) else {
                return Ok(false);
            };
            let ours = seat.claim.is_some();
            // The mark tells the victim's client, which looks after its places.
            let mark = ops::put(mark_key(&seat.key), Vec::new(), seat.lease);
            let success = match eviction {
                Eviction::Mark if !ours => {
                    let message = "a ticket of another tool can't be asked to let go; take it \
                                   away by force";
                    return Err(Error::new(Kind::Unsupported, "evict", message));
                }
                Eviction::Mark => vec![mark],
                Eviction::Remove => {
                    let mut removes = self.deletes(&seat.key);
                    removes.extend(ours.then_some(mark));
                    removes
                }
            };
            let request = TxnRequest {
                compare: vec![ops::created_at(&seat.key, seat.created)],
                success,
                failure: Vec::new(),
            };
            match self.rpc.txn("evict", request).await {
                Ok(response) if response.succeeded => return Ok(true),
                Ok(_) => {}
                // Its lease ended meanwhile, and its key with it.
                Err(error) if error.kind() == Kind::Lost => {}
                Err(error) => return Err(error),
            }
        }
        let message = "the line changes faster than it can be looked at; try again";
        Err(Error::new(Kind::Unreachable, "evict", message))
    }

    pub(super) async fn resize(&self, name: Name, capacity: u32) -> Result<bool> {
        let prefix = self.keys.line(&name)?;
        for _ in 0..TRIES {
            let response = self.rpc.range("resize", ops::all(&prefix)).await?;
            let seen = revision(response.header.as_ref());
            let queue = Queue::new(&self.keys, &prefix, response.kvs);
            match queue.capacity {
                None => return Ok(false),
                Some(READERS) => return Err(capacity_mismatch(READERS, capacity)),
                Some(_) => {}
            }
            // Nobody has come since, and nobody has gone, whom the new capacity may be about.
            let mut compare = vec![ops::nothing_put_since(&prefix, seen)];
            let mut success = Vec::new();
            let holders = queue.holders();
            for (at, seat) in queue.seats.iter().enumerate() {
                compare.push(ops::created_at(&seat.key, seat.created));
                let (Ask::Part { weight, .. }, Some(record)) = (seat.ask, &seat.record) else {
                    continue;
                };
                if weight > capacity {
                    let message = format!("a claim in this line takes {weight} permits");
                    return Err(Error::new(Kind::InvalidArgument, "resize", message));
                }
                let record = Record {
                    part: Some((weight, capacity)),
                    held: at < holders,
                    ..record.clone()
                };
                success.extend(self.rewrites(seat, &record)?);
            }
            if compare.len().max(success.len()) > MOST_OPS {
                let message = "too many claims are in this line for one transaction of etcd; try \
                               again when there are fewer";
                return Err(Error::new(Kind::Unsupported, "resize", message));
            }
            let request = TxnRequest {
                compare,
                success,
                failure: Vec::new(),
            };
            match self.rpc.txn("resize", request).await {
                Ok(response) if response.succeeded => return Ok(true),
                Ok(_) => {}
                // A lease ended meanwhile, and the keys on it.
                Err(error) if error.kind() == Kind::Lost => {}
                Err(error) => return Err(error),
            }
        }
        let message = "the line changes faster than it can be looked at; try again";
        Err(Error::new(Kind::Unreachable, "resize", message))
    }

    /// The key of a ticket: its own, or that of an enter that was never answered.
    pub(super) fn key_of(&self, ticket: &Ticket) -> Option<Arc<str>> {
        if let Some(key) = &ticket.native {
            return Some(Arc::clone(key));
        }
        // Not made of the claim's id: it may be one that was used before.
        let known = self.known.lock();
        known.get(&ticket.claim).map(|known| Arc::clone(&known.key))
    }

    /// Where the owner record of a place is kept when its value belongs to other tools.
    pub(super) fn owner_key(&self, key: &[u8]) -> Vec<u8> {
        [keys::OWNERS.as_bytes(), key].concat()
    }
}

/// Where the mark of a place is kept.
pub(super) fn mark_key(key: &[u8]) -> Vec<u8> {
    [keys::MARKS.as_bytes(), key].concat()
}

/// The rules of `Engine::amend`, on a line as it was seen.
fn may_reweigh(queue: &Queue, at: usize, ask: Ask) -> Amended {
    let holders = queue.holders();
    if at >= holders {
        return Amended::Gone;
    }
    let lighter = match (queue.seats[at].ask, ask) {
        (Ask::Whole, _) => true,
        (Ask::Part { weight: old, .. }, Ask::Part { weight: new, .. }) => new <= old,
        (_, Ask::Whole) => false,
    };
    let mut others = queue.seats.iter().enumerate().filter(|(i, _)| *i != at);
    let other_parts = others.any(|(_, seat)| match (seat.ask, ask) {
        (Ask::Part { capacity: live, .. }, Ask::Part { capacity: new, .. }) => live != new,
        _ => false,
    });
    match (!lighter && holders > 1) || other_parts {
        true => Amended::Busy,
        false => Amended::Done,
    }
}
