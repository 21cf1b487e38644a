//! `enter` and `wait`. One transaction takes a place and reads who is ahead. A waiter watches the
//! nearest place that excludes it, and reads the line again when that changes.

use std::sync::Arc;

use futures_util::future::try_join;

use super::Inner;
use super::client::{Connection, revision};
use super::error::NO_RIGHT;
use super::keys::{self, Record, Values};
use super::leases::{self, Living, lease_id};
use super::proto::{KeyValue, RangeRequest, TxnRequest};
use super::snapshot::{Ahead, Snapshot};
use super::txn;
use super::watch::Range;
use palisade_core::engine::sync::sleep_until;
use palisade_core::engine::{
    Alarm, Ask, Claim, Entered, Place, Ticket, capacity_mismatch, look_by,
};
use palisade_core::{BootTime, Error, ErrorKind, Outcome, Result};
use palisade_kit::Link;

/// A claim of this client, from its enter to its leave.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) lease: Living,
    /// Whether this claim has the lease to itself.
    pub(super) own: bool,
    /// Whether it claims the whole line.
    pub(super) whole: bool,
    /// Its key.
    pub(super) key: Arc<str>,
    /// The create revision of its key; 0 until the reply has arrived.
    pub(super) created: i64,
    /// The place whose change may grant it.
    pub(super) ahead: Option<Ahead>,
}

/// How often an enter is repeated because its lease has ended.
const LEASES: usize = 3;

/// The create revision of a claim's key, and whom it waits for, if it does not hold.
type Placed = (i64, Option<Ahead>);

pub(super) async fn enter(engine: &Inner, claim: &Claim) -> Result<Entered> {
    let prefix = engine.keys.line(&claim.name)?;
    let values = Record::new(claim).values(&engine.keys)?;
    for _ in 0..LEASES {
        let before = engine.known.lock().get(&claim.id).cloned();
        let lease = engine
            .leases
            .for_claim(&engine.client, claim, &prefix, before.as_ref());
        // Without the right a lease that was granted meanwhile expires by itself.
        let allowed = engine.allowed.get_or_try_init(|| check_rights(engine));
        let (_, (lease, key)) = try_join(allowed, lease).await?;
        let known = Known {
            lease,
            own: !claim.renewed,
            whole: claim.ask == Ask::Whole,
            key: Arc::clone(&key),
            created: 0,
            ahead: None,
        };
        // Recorded before anything is sent, so that a leave finds the place of an enter that was
        // dropped.
        engine.known.lock().insert(claim.id, known);
        let entry = Entry {
            engine,
            claim,
            prefix: &prefix,
            values: &values,
            lease,
            key: &key,
            before,
        };
        let taken = if claim.queue || claim.ask == Ask::Whole {
            entry.take(claim.queue).await
        } else {
            entry.take_if_free().await
        };
        let (created, ahead) = match taken {
            Ok(Some(placed)) => placed,
            Err(error) if error.kind() == ErrorKind::Lost => {
                entry.lease_ended();
                continue;
            }
            refused => return entry.undo(refused.err()).await,
        };
        let sequence = u64::try_from(created).unwrap_or(0);
        let place = match ahead {
            None => Place::Held { sequence },
            Some(_) => Place::Waiting,
        };
        if let Some(known) = engine.known.lock().get_mut(&claim.id) {
            (known.created, known.ahead) = (created, ahead);
        }
        let mut ticket = Ticket {
            sequence,
            native: Some(key),
            ..Ticket::own(claim.name.clone(), claim.id)
        };
        if claim.renewed {
            ticket.lease = lease_id(lease.id);
        }
        let armed = lease.armed;
        return Ok(Entered::In {
            ticket,
            armed,
            place,
        });
    }
    let message = "leases end as soon as they are granted; does somebody revoke them?";
    Err(Error::new(ErrorKind::Unreachable, "enter", message))
}

/// Checks, once, that the user may write the engine's own records. Without that right renewals and
/// releases would fail, and a lock would be lost at its ttl.
async fn check_rights(engine: &Inner) -> Result<()> {
    let marks = format!("{}{}", keys::MARKS, engine.keys.scope(""));
    let look = RangeRequest {
        limit: 1,
        ..txn::all(&marks)
    };
    // These keys never exist, so the rights are checked and nothing is changed.
    let mut operations = vec![
        txn::read(look),
        txn::delete(marks),
        txn::delete(keys::NOTHING),
    ];
    if engine.keys.shared_with_others() {
        operations.push(txn::delete(keys::OWNERS));
    }
    match engine.client.call("enter", txn::plain(operations)).await {
        Ok(_) => Ok(()),
        Err(error) if error.message() == NO_RIGHT => {
            let message = "etcd denies this user the prefix .palisade/, without which locks can \
                           be neither kept nor released; grant its role readwrite on it: etcdctl \
                           role grant-permission ROLE readwrite .palisade/ --prefix=true";
            Err(Error::new(ErrorKind::Denied, "enter", message))
        }
        // The request was not meant to change anything, so the error is rebuilt as not applied.
        Err(error) => Err(Error::new(error.kind(), "enter", error.message())),
    }
}

/// One attempt of a claim on one lease.
struct Entry<'a> {
    engine: &'a Inner,
    claim: &'a Claim,
    prefix: &'a str,
    values: &'a Values,
    lease: Living,
    key: &'a Arc<str>,
    /// An earlier copy, which may still be in flight.
    before: Option<Known>,
}

impl Entry<'_> {
    /// Takes the last place, or without `queue` only a place in an empty line; `None` if it is not
    /// empty. The same transaction reads the line, because the places ahead decide.
    async fn take(&self, queue: bool) -> Result<Option<Placed>> {
        let (whole, key) = (self.claim.ask == Ask::Whole, self.key.as_bytes());
        let mut success = txn::put_place(key, self.values.clone(), self.lease.id);
        // An earlier copy on a lease that has ended since has another key.
        let stale = self.before.iter().filter(|known| &known.key != self.key);
        for stale in stale.map(|known| known.key.as_bytes()) {
            success.push(txn::delete(keys::owner_key(stale)));
            success.push(txn::delete(stale));
        }
        success.push(txn::read(txn::ahead(self.prefix, whole)));
        let is_free = if queue {
            txn::created_at(key, 0)
        } else {
            txn::is_empty(self.prefix)
        };
        let request = TxnRequest {
            compare: vec![is_free],
            success,
            failure: vec![txn::read(txn::all(self.prefix))],
        };
        let answer = self.engine.client.call("enter", request).await?;
        let (taken, seen) = (answer.succeeded, revision(&answer.header));
        let found = txn::found(answer).next().unwrap_or_default();
        if taken && found.len() == 1 {
            return Ok(Some((seen, None)));
        }
        let line = self.line(found, seen);
        if !taken && !queue && line.find(key).is_none() {
            return Ok(None);
        }
        self.place(line).await
    }

    /// A claim for a part that does not queue takes a place if it would hold at once, and gives
    /// the place back if the line has changed in between.
    async fn take_if_free(&self) -> Result<Option<Placed>> {
        let all = txn::all(self.prefix);
        let found = self.engine.client.call("enter", all).await?;
        let line = self.line(found.kvs, revision(&found.header));
        if line.find(self.key.as_bytes()).is_some() {
            return self.place(line).await;
        }
        if !line.has_room(self.claim.ask)? {
            return Ok(None);
        }
        match self.take(true).await? {
            Some((_, Some(_))) => self.give_back().await.map(|()| None),
            placed => Ok(placed),
        }
    }

    fn line(&self, kvs: Vec<KeyValue>, seen: i64) -> Snapshot {
        Snapshot::new(&self.engine.keys, self.prefix, kvs, seen)
    }

    /// The result for a claim whose key exists, from the line as it was read.
    async fn place(&self, line: Snapshot) -> Result<Option<Placed>> {
        let Some(at) = line.find(self.key.as_bytes()) else {
            // Its lease has ended, or the place was removed.
            let message = "the place was removed while the request was in flight";
            return Err(Error::new(ErrorKind::Unreachable, "enter", message).maybe_applied());
        };
        let place = &line.line.seats[at].extra;
        // As recorded with its key: an operator may have resized the line since.
        if let Some((live, asked)) = place.misfit {
            self.give_back().await?;
            return Err(capacity_mismatch(live, asked));
        }
        Ok(Some((place.created, line.ahead_of(at))))
    }

    async fn give_back(&self) -> Result<()> {
        let exists = vec![txn::exists(self.key.as_bytes())];
        let given = txn::only_if(exists, self.engine.deletes(self.key.as_bytes()));
        let given = self.engine.client.call("enter", given).await;
        // Without a reply the place may still exist.
        given.map(drop).map_err(Error::maybe_applied)
    }

    /// The lease has ended: it was revoked, or a restored cluster does not know it.
    fn lease_ended(self) {
        self.engine.leases.retire(self.lease.id);
        self.engine.alarm(Alarm::Lease(lease_id(self.lease.id)));
        // A lease of its own took the place with it, and is not used again.
        self.restore(|known| !known.own);
    }

    /// The answer to a claim that was refused, or is busy without an `error`. Unless it may have a
    /// place, all is as it was before.
    async fn undo(self, error: Option<Error>) -> Result<Entered> {
        let has_place = |error: &Error| error.outcome() != Outcome::NotApplied;
        if !error.as_ref().is_some_and(has_place) {
            let unreachable = error.as_ref().is_some_and(Error::is_transient);
            // Unless an earlier copy is in flight, nothing is attached to the lease, and the key is
            // unused.
            if self.before.is_none() && !unreachable {
                let (engine, lease) = (self.engine, self.lease.id);
                if self.claim.renewed {
                    engine.free_key(lease, self.prefix.to_owned(), Arc::clone(self.key));
                } else {
                    let _ = leases::revoke(&engine.client, "enter", lease).await;
                }
            }
            self.restore(|_| true);
        }
        error.map_or(Ok(Entered::Busy), Err)
    }

    /// Restores the record of an earlier copy, if there is one to be `kept`; otherwise the claim is
    /// forgotten.
    fn restore(self, kept: impl FnOnce(&Known) -> bool) {
        let mut known = self.engine.known.lock();
        match self.before.filter(kept) {
            Some(before) => known.insert(self.claim.id, before),
            None => known.remove(&self.claim.id),
        };
    }
}

/// Sleeps until the place may have changed, then reads the line. A change after the last read is
/// pushed. If the watch began after that read, the line is read again at once.
pub(super) async fn wait(engine: &Inner, ticket: &Ticket, until: BootTime) -> Result<Place> {
    let prefix = engine.keys.line(&ticket.name)?;
    let Some(key) = engine.key_of(ticket) else {
        return Ok(Place::Gone);
    };
    let known = engine.known.lock().get(&ticket.claim).cloned();
    let waiter = Waiter {
        engine,
        ticket,
        whole: known.as_ref().is_some_and(|known| known.whole),
        prefix: &prefix,
        key: key.as_bytes(),
    };
    // From the enter, or from an earlier read.
    let mut seen = match known.and_then(|known| known.ahead) {
        Some(ahead) if !until.has_passed() => Err(ahead),
        _ => waiter.look(None).await?,
    };
    loop {
        let ahead = match seen {
            Ok(place) => return Ok(place),
            Err(_) if until.has_passed() => return Ok(Place::Waiting),
            Err(ahead) => ahead,
        };
        let told_by = waiter.sleep(ahead, until).await?;
        seen = waiter.look(told_by.as_ref()).await?;
        // A member that lags may not have the key yet, so only a linearizable read may conclude
        // that it is gone.
        if told_by.is_some() && matches!(seen, Ok(Place::Gone)) {
            seen = waiter.look(None).await?;
        }
    }
}

/// One waiting claim.
struct Waiter<'a> {
    engine: &'a Inner,
    ticket: &'a Ticket,
    whole: bool,
    prefix: &'a str,
    key: &'a [u8],
}

impl Waiter<'_> {
    /// Sleeps until the line may have changed, and returns the link to the member that reported it;
    /// `None` when the sleep is over or the watch has ended.
    async fn sleep(&self, ahead: Ahead, until: BootTime) -> Result<Option<Link<Connection>>> {
        let range = match ahead.key {
            Some(key) => Range {
                key,
                end: Vec::new(),
                // A claim to the whole line gains nothing when another place changes its weight.
                deletes: self.whole,
            },
            None => Range::under(self.prefix),
        };
        let (mut watch, link) = self.engine.client.watch("wait", range).await?;
        let changed = tokio::select! {
            changed = watch.changed_since(ahead.seen) => changed,
            () = sleep_until(look_by(until)) => None,
        };
        Ok(changed.map(|_| link))
    }

    /// The claim's place, or the place that it waits for. Only a read that contains its own key
    /// counts.
    ///
    /// A member that reported a change has applied it, so it is asked over its `link` for a
    /// serializable read, without the others. That read may be stale, but places ahead can only go
    /// away: a claim that held at any revision holds as long as its key exists and its lease is
    /// valid.
    async fn look(
        &self,
        link: Option<&Link<Connection>>,
    ) -> Result<std::result::Result<Place, Ahead>> {
        let created = i64::try_from(self.ticket.sequence).unwrap_or(0);
        // Without a create revision to bound the read, the youngest key may not be its own.
        let range = RangeRequest {
            max_create_revision: created,
            serializable: link.is_some(),
            ..txn::ahead(self.prefix, self.whole && created > 0)
        };
        let client = &self.engine.client;
        let found = client.call_over(link, "wait", |connection| connection.call(range));
        let found = found.await?;
        let seen = revision(&found.header);
        let line = Snapshot::new(&self.engine.keys, self.prefix, found.kvs, seen);
        let own = line
            .find(self.key)
            .map(|at| (at, line.line.seats[at].extra.created));
        let Some((at, found)) = own.filter(|(_, found)| created == 0 || *found == created) else {
            return Ok(Ok(Place::Gone));
        };
        let ahead = line.ahead_of(at);
        if let Some(known) = self.engine.known.lock().get_mut(&self.ticket.claim) {
            known.ahead.clone_from(&ahead);
        }
        let sequence = u64::try_from(found).unwrap_or(0);
        Ok(ahead.map_or(Ok(Place::Held { sequence }), Err))
    }
}
