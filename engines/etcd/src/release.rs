//! `leave`, `amend`, `evict` and `resize`: each is a transaction that compares the create revision,
//! because a key that was deleted and created again is another place (etcd #22082).

use std::time::Duration;

use super::Inner;
use super::keys::{self, Record};
use super::leases::{self, own_lease};
use super::proto::{Compare, RequestOp, TxnRequest};
use super::snapshot::{self, Place, Snapshot};
use super::txn;
use palisade_core::engine::{Amended, Amendment, Ask, Left, Ticket};
use palisade_core::{Error, ErrorKind, Eviction, Name, Result};
use palisade_kit::cas::Retry;
use palisade_kit::leave::leave_twice;

/// The most operations that etcd takes in one transaction (`--max-txn-ops`).
const MOST_OPS: usize = 128;

/// How often a change is retried because the line has changed in between.
const TRIES: u32 = 16;

/// The request of an enter that was dropped may arrive after its leave, over another connection and
/// member. The leave is repeated after these pauses. An enter that arrives even later is left to
/// the audit.
const LATE: [Duration; 4] = [
    Duration::from_millis(10),
    Duration::from_millis(30),
    Duration::from_millis(100),
    Duration::from_millis(300),
];

pub(super) async fn leave(engine: &Inner, ticket: &Ticket) -> Result<Left> {
    let Some(key) = engine.key_of(ticket) else {
        return Ok(Left::Absent);
    };
    let prefix = engine.keys.line(&ticket.name)?;
    let is_incarnation = match i64::try_from(ticket.sequence) {
        Ok(0) => txn::exists(key.as_bytes()),
        Ok(created) => txn::created_at(key.as_bytes(), created),
        // No revision is that large, so nothing matches.
        Err(_) => txn::created_at(key.as_bytes(), -1),
    };
    // The eviction mark must not outlive its place, because the key may be reused.
    let mut deletes = engine.deletes(key.as_bytes());
    deletes.push(txn::delete(keys::mark_key(key.as_bytes())));
    let request = txn::only_if(vec![is_incarnation], deletes);
    let mut left = send_leave(engine, &request).await?;
    let known = engine.known.lock().get(&ticket.claim).cloned();
    // A lease of its own removes a late place when it is revoked.
    let shared = known.as_ref().filter(|known| !known.own);
    if ticket.native.is_none() && shared.is_some() {
        let mut pauses = LATE.iter();
        while let Some(pause) = pauses.next().filter(|_| !left) {
            tokio::time::sleep(*pause).await;
            left = send_leave(engine, &request).await?;
        }
    }
    let certain = ticket.sequence != 0 && !ticket.in_doubt;
    let own = known.as_ref().filter(|known| known.own);
    if let Some(own) = own.map(|known| known.lease.id).or(own_lease(ticket)) {
        let revoked = leases::revoke(&engine.client, "leave", own).await;
        // If the place is known to be gone, nothing is attached to the lease, and it expires by
        // itself.
        if !certain {
            revoked?;
        }
    }
    engine.known.lock().remove(&ticket.claim);
    if !left {
        return Ok(Left::Absent);
    }
    if let Some(shared) = shared.filter(|_| certain) {
        engine.free_key(shared.lease.id, prefix, key);
    }
    Ok(Left::Done)
}

/// Sends a leave, and returns whether the place existed.
async fn send_leave(engine: &Inner, request: &TxnRequest) -> Result<bool> {
    let send = || async {
        let answer = engine.client.call("leave", request.clone()).await?;
        Ok(Left::of(answer.succeeded))
    };
    Ok(leave_twice(send).await? == Left::Done)
}

/// What to do after reading a line.
enum Step<T> {
    Answer(T),
    /// Writes if nothing that it depends on has changed, then returns the answer.
    Write(Vec<Compare>, Vec<RequestOp>, T),
}

/// Reads a line and changes it, until nothing has changed in between.
async fn change<T>(
    engine: &Inner,
    operation: &'static str,
    prefix: &str,
    mut decide: impl FnMut(Snapshot) -> Result<Step<T>>,
) -> Result<T> {
    let mut retry = Retry::times(TRIES);
    loop {
        let line = snapshot::line(engine, operation, prefix).await?;
        let (compare, success, answer) = match decide(line)? {
            Step::Answer(answer) => return Ok(answer),
            Step::Write(compare, success, answer) => (compare, success, answer),
        };
        let request = txn::only_if(compare, success);
        match engine.client.call(operation, request).await {
            Ok(done) if done.succeeded => return Ok(answer),
            Ok(_) => {}
            // A lease has ended meanwhile, and with it the keys attached to it.
            Err(error) if error.kind() == ErrorKind::Lost => {}
            Err(error) => return Err(error),
        }
        retry.or_busy(operation).await?;
    }
}

pub(super) async fn amend(
    engine: &Inner,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    let prefix = engine.keys.line(&ticket.name)?;
    let Some(key) = engine.key_of(ticket) else {
        return Ok(Amended::Gone);
    };
    let decide = |mut found: Snapshot| {
        let line = &mut found.line;
        let is_ticket = |place: &Place| {
            place.key == key.as_bytes() && u64::try_from(place.created) == Ok(ticket.sequence)
        };
        let Some(seat) = line.seats.iter().find(|seat| is_ticket(&seat.extra)) else {
            return Ok(Step::Answer(Amended::Gone));
        };
        let (id, place) = (seat.id, seat.extra.clone());
        let Some(mut record) = place.record.clone() else {
            let message = "the record of this place can't be read; was it changed by hand?";
            return Err(Error::new(ErrorKind::Unusable, "amend", message));
        };
        let mut compare = vec![
            txn::created_at(&place.key, place.created),
            txn::unchanged(&place.key, place.modified),
        ];
        match amendment {
            Amendment::Value(value) => record.value = Some(value.clone()),
            Amendment::Ask(ask) => {
                match line.reweigh(id, ticket.sequence, *ask) {
                    Amended::Done => {}
                    refused => return Ok(Step::Answer(refused)),
                }
                compare.push(txn::nothing_put_since(&prefix, found.revision));
                // The first waiter blocks everyone behind it, so it must still be there. A
                // comparison of the other keys does not notice that it was deleted.
                if let Some(next) = line.seats.iter().find(|seat| !seat.is_held()) {
                    compare.push(txn::created_at(&next.extra.key, next.extra.created));
                }
                record.part = keys::part(*ask);
            }
        }
        let writes = txn::put_place(&place.key, record.values(&engine.keys)?, place.lease);
        Ok(Step::Write(compare, writes, Amended::Done))
    };
    let amended = change(engine, "amend", &prefix, decide).await?;
    if let (Amended::Done, Amendment::Ask(ask)) = (amended, amendment)
        && let Some(known) = engine.known.lock().get_mut(&ticket.claim)
    {
        known.whole = *ask == Ask::Whole;
    }
    Ok(amended)
}

pub(super) async fn evict(
    engine: &Inner,
    name: &Name,
    id: &str,
    eviction: Eviction,
) -> Result<bool> {
    let prefix = engine.keys.line(name)?;
    let decide = |found: Snapshot| {
        let mut places = found.line.seats.into_iter().map(|seat| seat.extra);
        let Some(place) = places.find(|place| !id.is_empty() && place.id == id) else {
            return Ok(Step::Answer(false));
        };
        // The mark notifies the victim's client, which then checks its places.
        let mark = txn::put(keys::mark_key(&place.key), Vec::new(), place.lease);
        let mut writes = match eviction {
            Eviction::Mark if !place.ours => {
                let message = "a ticket of another tool can't be asked to let go; take it away by \
                               force";
                return Err(Error::new(ErrorKind::Unsupported, "evict", message));
            }
            Eviction::Mark => Vec::new(),
            Eviction::Remove => engine.deletes(&place.key),
        };
        writes.extend(place.ours.then_some(mark));
        let is_there = vec![txn::created_at(&place.key, place.created)];
        Ok(Step::Write(is_there, writes, true))
    };
    change(engine, "evict", &prefix, decide).await
}

pub(super) async fn resize(engine: &Inner, name: &Name, capacity: u32) -> Result<bool> {
    let prefix = engine.keys.line(name)?;
    let decide = |mut found: Snapshot| {
        if !found.line.resize(capacity)? {
            return Ok(Step::Answer(false));
        }
        // The new capacity was checked against exactly these places, so none may have come or gone
        // since.
        let mut compare = vec![txn::nothing_put_since(&prefix, found.revision)];
        let mut writes = Vec::new();
        for seat in &found.line.seats {
            let place = &seat.extra;
            compare.push(txn::created_at(&place.key, place.created));
            if let (Ask::Part { weight, .. }, Some(record)) = (seat.ask, &place.record) {
                let record = Record {
                    part: Some((weight, capacity)),
                    held: seat.is_held(),
                    ..record.clone()
                };
                let values = record.values(&engine.keys)?;
                writes.extend(txn::put_place(&place.key, values, place.lease));
            }
        }
        if compare.len().max(writes.len()) > MOST_OPS {
            let message = "too many claims are in this line for one transaction of etcd; try \
                           again when there are fewer";
            return Err(Error::new(ErrorKind::Unsupported, "resize", message));
        }
        Ok(Step::Write(compare, writes, true))
    };
    change(engine, "resize", &prefix, decide).await
}
