//! `enter`: one transaction that takes the place if it is not taken, and reads who is ahead.

use std::sync::Arc;

use super::Inner;
use super::leases::{Living, lease_id};
use super::ops;
use super::queue::{Ahead, Queue};
use super::record::Record;
use super::rpc::revision;
use super::wire::{RequestOp, TxnRequest};
use crate::core::claim::{Ask, Claim};
use crate::core::engine::{Alarm, Entered, Place};
use crate::core::error::{Error, Kind, Outcome, Result};
use crate::core::line::capacity_mismatch;
use crate::core::ticket::Ticket;

/// What is known of a claim of this client from its enter to its leave.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) lease: i64,
    /// The same lease, if it is of this claim alone.
    pub(super) own: Option<Living>,
    pub(super) ask: Ask,
    /// The key of its place.
    pub(super) key: Arc<str>,
    /// The create revision of its place; 0 until it was answered.
    pub(super) created: i64,
    /// Whose change may let it in, and the revision at which it was last seen waiting.
    pub(super) ahead: Option<(Ahead, i64)>,
}

/// How often an enter is repeated when the lease it was to hang on has ended.
const LEASES: usize = 3;

impl Inner {
    pub(super) async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        let prefix = self.keys.line(&claim.name)?;
        for _ in 0..LEASES {
            let again = self.known.lock().get(&claim.id).cloned();
            let lease = self.lease_for(&claim, again.as_ref()).await?;
            let key = match again {
                // The same claim again has the same key, unless its lease has ended since.
                Some(known) if known.lease == lease.id => known.key,
                _ => match self.pool.take(lease.id, &prefix) {
                    Some(key) => key,
                    None => self.keys.place(&claim.name, lease.id, claim.id)?,
                },
            };
            let entry = Entry {
                inner: self,
                claim: &claim,
                prefix: &prefix,
                lease,
                key: Arc::clone(&key),
                record: Record::new(&claim),
            };
            let known = Known {
                lease: lease.id,
                own: (!claim.renewed).then_some(lease),
                ask: claim.ask,
                key,
                created: 0,
                ahead: None,
            };
            // Before anything is sent: a leave must find the place of an enter that was dropped.
            let before = self.known.lock().insert(claim.id, known);
            let old = before.clone().filter(|known| known.lease != lease.id);
            let entered = entry.enter(old.map(|known| known.key)).await;
            match &entered {
                // Nothing hangs on a lease that has ended: it was revoked, or forgotten.
                Err(error) if error.kind() == Kind::Lost => {
                    self.leases.retire(lease.id);
                    self.alarm(Alarm::Lease(lease_id(lease.id)));
                    // An own lease took its place with it, and is not used again.
                    self.restore(&claim, before.filter(|known| known.own.is_none()));
                    continue;
                }
                Ok(Entered::Busy) => {
                    // No place was taken, and no earlier copy is under way.
                    match before.is_none() {
                        true if !claim.renewed => self.end_lease(lease.id).await,
                        true if !self.keys.shared_with_others() => {
                            self.pool.give(lease.id, prefix.clone(), entry.key.clone());
                        }
                        _ => {}
                    }
                    self.restore(&claim, before);
                }
                Err(error) if error.outcome() == Outcome::NotApplied => {
                    if before.is_none() && !claim.renewed && !error.is_transient() {
                        self.end_lease(lease.id).await;
                    }
                    self.restore(&claim, before);
                }
                _ => {}
            }
            return entered;
        }
        let message = "leases end as soon as they are granted; does somebody revoke them?";
        Err(Error::new(Kind::Unreachable, "enter", message))
    }

    /// An earlier copy of the claim may still be under way; without one there is nothing to know.
    fn restore(&self, claim: &Claim, before: Option<Known>) {
        let mut known = self.known.lock();
        match before {
            Some(before) => known.insert(claim.id, before),
            None => known.remove(&claim.id),
        };
    }
}

/// One try of one claim on one lease.
struct Entry<'a> {
    inner: &'a Inner,
    claim: &'a Claim,
    prefix: &'a str,
    lease: Living,
    key: Arc<str>,
    record: Record,
}

impl Entry<'_> {
    async fn enter(&self, old: Option<Arc<str>>) -> Result<Entered> {
        match (self.claim.queue, self.claim.ask) {
            (true, _) => self.take(old).await,
            (false, Ask::Whole) => self.take_if_free(old).await,
            (false, Ask::Part { .. }) => self.take_if_room(old).await,
        }
    }

    /// What makes the place; an earlier copy on a lease that has ended since goes.
    fn writes(&self, old: Option<Arc<str>>) -> Result<Vec<RequestOp>> {
        let keys = &self.inner.keys;
        let key = self.key.as_bytes();
        let mut writes = vec![ops::put(key, self.record.value(keys)?, self.lease.id)];
        if keys.shared_with_others() {
            let apart = self.inner.owner_key(key);
            writes.push(ops::put(apart, self.record.json(), self.lease.id));
        }
        if let Some(old) = old {
            writes.push(ops::delete(self.inner.owner_key(old.as_bytes())));
            writes.push(ops::delete(old.as_bytes()));
        }
        Ok(writes)
    }

    /// Takes the last place, and looks at who is ahead if there was anyone: a read inside of a
    /// write. Conditions, also those inside, are about what was there before the writes.
    async fn take(&self, old: Option<Arc<str>>) -> Result<Entered> {
        let whole = self.claim.ask == Ask::Whole;
        let ahead = match whole {
            // Everyone ahead excludes it: the nearest is all it needs to know.
            true => ops::youngest(self.prefix, 2),
            false => ops::all(self.prefix),
        };
        let look = TxnRequest {
            compare: vec![ops::is_empty(self.prefix)],
            success: Vec::new(),
            failure: vec![ops::range(ahead)],
        };
        let mut success = self.writes(old)?;
        success.push(ops::txn(look));
        let request = TxnRequest {
            compare: vec![ops::created_at(self.key.as_bytes(), 0)],
            success,
            failure: vec![ops::range(ops::all(self.prefix))],
        };
        let response = self.inner.rpc.txn("enter", request).await?;
        let seen = revision(response.header.as_ref());
        let taken = response.succeeded;
        let found = match taken {
            true => ops::inner(response),
            false => Some(response),
        };
        let Some(found) = found else {
            let message = "the answer to a lock can't be read";
            return Err(Error::new(Kind::Internal, "enter", message).maybe_applied());
        };
        if taken && found.succeeded {
            return Ok(self.entered(seen, None));
        }
        let found = ops::found(found).pop().unwrap_or_default();
        if !(taken && whole) {
            let queue = Queue::new(&self.inner.keys, self.prefix, found);
            return self.place(queue, seen).await;
        }
        let ahead = found.into_iter().find(|kv| kv.key != self.key.as_bytes());
        let ahead = ahead.map(|kv| (Ahead::Key(kv.key), seen));
        Ok(self.entered(seen, ahead))
    }

    /// Takes the place only if the line is empty.
    async fn take_if_free(&self, old: Option<Arc<str>>) -> Result<Entered> {
        let request = TxnRequest {
            compare: vec![ops::is_empty(self.prefix)],
            success: self.writes(old)?,
            failure: vec![ops::range(ops::one(self.key.as_bytes()))],
        };
        let response = self.inner.rpc.txn("enter", request).await?;
        if response.succeeded {
            return Ok(self.entered(revision(response.header.as_ref()), None));
        }
        match ops::found(response).pop() {
            // In the line already: where does it stand now?
            Some(own) if !own.is_empty() => {
                let (queue, seen) = self.look().await?;
                self.place(queue, seen).await
            }
            _ => Ok(Entered::Busy),
        }
    }

    /// Takes the place if a look says that it holds at once, and leaves it if that has changed.
    async fn take_if_room(&self, old: Option<Arc<str>>) -> Result<Entered> {
        let (queue, seen) = self.look().await?;
        if queue.find(self.key.as_bytes()).is_some() {
            return self.place(queue, seen).await;
        }
        if let Some((live, asked)) = queue.mismatch(self.claim.ask, queue.seats.len()) {
            return Err(capacity_mismatch(live, asked));
        }
        if !queue.has_room(self.claim.ask) {
            return Ok(Entered::Busy);
        }
        match self.take(old).await? {
            Entered::In {
                place: Place::Waiting,
                ..
            } => {
                self.give_back().await?;
                Ok(Entered::Busy)
            }
            entered => Ok(entered),
        }
    }

    /// The line, and the revision at which it is read.
    async fn look(&self) -> Result<(Queue, i64)> {
        let range = self.inner.rpc.range("enter", ops::all(self.prefix));
        let found = range.await?;
        let seen = revision(found.header.as_ref());
        Ok((Queue::new(&self.inner.keys, self.prefix, found.kvs), seen))
    }

    /// Where the claim, whose key is there, stands in the line as it was seen.
    async fn place(&self, queue: Queue, seen: i64) -> Result<Entered> {
        let Some(at) = queue.find(self.key.as_bytes()) else {
            // Gone since: its lease ended, or it was taken away.
            return Err(Error::new(
                Kind::Unreachable,
                "enter",
                "the place was taken away while it was asked for",
            ));
        };
        // As its key says: an operator may have given the line another capacity since it came.
        if let Some((live, asked)) = queue.mismatch(queue.seats[at].ask, at) {
            self.give_back().await?;
            return Err(capacity_mismatch(live, asked));
        }
        let ahead = queue.behind(at).map(|ahead| (ahead, seen));
        Ok(self.entered(queue.seats[at].created, ahead))
    }

    async fn give_back(&self) -> Result<()> {
        let request = TxnRequest {
            compare: vec![ops::exists(self.key.as_bytes())],
            success: self.inner.deletes(self.key.as_bytes()),
            failure: Vec::new(),
        };
        let given = self.inner.rpc.txn("enter", request).await;
        // Without an answer the place may still be there.
        given.map(drop).map_err(Error::maybe_applied)
    }

    fn entered(&self, created: i64, ahead: Option<(Ahead, i64)>) -> Entered {
        let sequence = u64::try_from(created).unwrap_or(0);
        let place = match ahead {
            None => Place::Held { sequence },
            Some(_) => Place::Waiting,
        };
        if let Some(known) = self.inner.known.lock().get_mut(&self.claim.id) {
            known.ahead = ahead;
            known.created = created;
        }
        let ticket = Ticket {
            name: self.claim.name.clone(),
            claim: self.claim.id,
            lease: match self.claim.renewed {
                true => lease_id(self.lease.id),
                false => self.claim.id.into(),
            },
            sequence,
            native: Some(Arc::clone(&self.key)),
            in_doubt: false,
        };
        Entered::In {
            ticket,
            armed: self.lease.armed,
            place,
        }
    }
}
