//! `renew` and `audit`: renews leases, and lists the keys attached to them, so that the keeper can
//! leave places that nobody knows.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::future::join_all;

use super::Inner;
use super::acquire::Known;
use super::keys::{self, Record};
use super::leases::{number, own_lease, seconds};
use super::proto::LeaseTimeToLiveRequest;
use super::txn;
use palisade_core::engine::{Audited, ClaimId, Lease, LeaseId, LeaseStart, Renewal, Ticket};
use palisade_core::{BootTime, Error, ErrorKind, Name, Result};
use palisade_kit::timed;

/// How many marks without a place one audit removes: fewer than etcd takes in one transaction.
const MOST_SWEPT: usize = 64;

/// Renews leases within a time limit. The connection may be dead though the cluster is healthy, so
/// a connection without a timely reply is dropped, and the next renewal uses another.
pub(super) async fn renew(engine: &Inner, leases: &[Lease], within: Duration) -> Vec<Renewal> {
    let mut over = None;
    let renewed = async {
        over = Some(engine.client.links.get().await?);
        Ok(renew_all(engine, leases).await)
    };
    let error = match timed("renew", within, renewed).await {
        Ok(Ok(renewals)) => return renewals,
        Ok(Err(error)) => error,
        Err(late) => {
            if let Some(link) = over {
                engine.client.links.broken(&link).await;
            }
            late
        }
    };
    leases.iter().map(|_| unknown(&error)).collect()
}

async fn renew_all(engine: &Inner, leases: &[Lease]) -> Vec<Renewal> {
    let verdicts = leases.iter().map(|lease| verdict(engine, lease));
    let mut renewals = join_all(verdicts).await;
    // A new leader may not have applied everything yet, so leases that it does not know are asked
    // for again.
    for last in [false, true] {
        let open: Vec<usize> = (0..leases.len())
            .filter(|&at| renewals[at].is_none())
            .collect();
        let id = |&at: &usize| match &leases[at].ticket {
            Some(ticket) => own_lease(ticket).unwrap_or(0),
            None => number(leases[at].id),
        };
        let ids: Vec<i64> = open.iter().map(id).collect();
        for (at, renewal) in open.into_iter().zip(keep_alive(engine, &ids).await) {
            match renewal {
                Renewal::Lost if !last => {}
                renewal => renewals[at] = Some(renewal),
            }
        }
    }
    let answers = leases.iter().zip(renewals);
    answers
        .map(|(lease, renewal)| {
            if let (Some(Renewal::Lost), None) = (&renewal, &lease.ticket) {
                engine.leases.retire(number(lease.id));
            }
            renewal.unwrap_or_else(unconfirmed)
        })
        .collect()
}

/// What is known of a lease of a single claim before it is renewed: its place may have been removed
/// or marked for eviction. The audit does the same for shared leases.
async fn verdict(engine: &Inner, lease: &Lease) -> Option<Renewal> {
    let ticket = lease.ticket.as_ref()?;
    let Some(key) = &ticket.native else {
        return Some(Renewal::Lost);
    };
    let keys = [key.as_bytes().to_vec(), keys::mark_key(key.as_bytes())];
    let reads = keys.iter().map(|key| txn::read(txn::one(key))).collect();
    let mut found = match engine.client.call("renew", txn::plain(reads)).await {
        Ok(answer) => txn::found(answer),
        Err(error) => return Some(Renewal::Unknown(error)),
    };
    let (place, mark) = (found.next()?.pop(), found.next()?.pop());
    let created = place.and_then(|place| u64::try_from(place.create_revision).ok());
    if created != Some(ticket.sequence) {
        return Some(Renewal::Lost);
    }
    mark.map(|_| Renewal::Evicted)
}

/// Renews leases.
///
/// A leader that was paused may, before it notices that it was replaced, renew leases that the new
/// leader expires earlier, because keepalives need no quorum. So a renewal counts only if a write
/// succeeded afterwards in the same term: a majority then followed the same leader all the while.
async fn keep_alive(engine: &Inner, ids: &[i64]) -> Vec<Renewal> {
    if ids.is_empty() {
        return Vec::new();
    }
    let leases = &engine.leases;
    let (before, sent) = (leases.history(), BootTime::now());
    let (answers, confirmed) = match engine.client.keep_alive(ids).await {
        Ok(answered) => answered,
        Err(error) => return ids.iter().map(|_| unknown(&error)).collect(),
    };
    leases.observe(before, &confirmed);
    let renewal = |&id: &i64| {
        if leases.is_of_the_past(id) {
            return Renewal::Revoked(replaced());
        }
        let answer = answers.iter().find(|answer| answer.id == id);
        let term = |header: &super::proto::Header| header.raft_term;
        match answer {
            Some(answer) if answer.header.as_ref().map_or(0, term) != confirmed.raft_term => {
                unconfirmed()
            }
            Some(answer) if answer.ttl <= 0 => Renewal::Lost,
            Some(answer) => {
                let ttl = seconds(answer.ttl);
                let armed = LeaseStart { sent, ttl };
                leases.renewed(id, armed);
                Renewal::Held(armed)
            }
            None => unconfirmed(),
        }
    };
    ids.iter().map(renewal).collect()
}

fn replaced() -> Error {
    let message = "the etcd cluster is not the one in which this lock was taken: it was restored \
                   from a snapshot, or another has its address; tokens can repeat, so raise era= \
                   before locks are taken again";
    Error::new(ErrorKind::Lost, "renew", message)
}

fn unknown(error: &Error) -> Renewal {
    Renewal::Unknown(Error::new(error.kind(), "renew", error.message()).maybe_applied())
}

fn unconfirmed() -> Renewal {
    let message = "the cluster changed its leader while the lease was renewed";
    Renewal::Unknown(Error::new(ErrorKind::Unreachable, "renew", message).maybe_applied())
}

/// The places on a lease. etcd answers this from one member, which may lag after a change of
/// leader, so a place that should exist and is not listed is read once more.
///
/// Each listed place was read with its create revision and is left by that incarnation alone. A key
/// that was left since then is absent, or is another place.
pub(super) async fn audit(engine: &Inner, lease: LeaseId) -> Result<Vec<Audited>> {
    let id = number(lease);
    let request = LeaseTimeToLiveRequest { id, keys: true };
    let answer = engine.client.call("audit", request).await?;
    if answer.ttl < 0 {
        let message = "the lease has ended; its renewal will say so";
        return Err(Error::new(ErrorKind::Lost, "audit", message));
    }
    let is_mark = |key: &Vec<u8>| key.starts_with(keys::MARKS.as_bytes());
    let (mut marks, mut listed): (HashSet<Vec<u8>>, HashSet<Vec<u8>>) =
        answer.keys.into_iter().partition(is_mark);
    let mut places: Vec<(Vec<u8>, ClaimId, i64)> = Vec::new();
    for (claim, known) in known_on(engine, id) {
        let key = known.key.as_bytes();
        let read = async || engine.client.call("audit", txn::one(key)).await;
        if listed.remove(key) || known.created != 0 && !read().await?.kvs.is_empty() {
            places.push((key.to_vec(), claim, known.created));
        }
    }
    // The keys of unknown claims.
    for key in listed {
        let parsed = engine.keys.parse(&key);
        let Some((_, named)) = parsed.and_then(|(_, rest)| keys::ours(rest)) else {
            continue;
        };
        let kv = engine.client.call("audit", txn::one(&key)).await?.kvs.pop();
        if let Some(kv) = kv.filter(|kv| kv.lease == id) {
            let record = Record::read(&engine.keys, &kv.value);
            let told = record.and_then(|record| record.id.parse().ok());
            places.push((key, told.unwrap_or(named), kv.create_revision));
        }
    }
    let audited = |(key, claim, created): (Vec<u8>, ClaimId, i64)| {
        let evicted = marks.remove(&keys::mark_key(&key));
        let ticket = Ticket {
            name: Name::new(&engine.keys.parse(&key)?.0).ok()?,
            claim,
            lease,
            sequence: u64::try_from(created).unwrap_or(0),
            native: Some(String::from_utf8(key).ok()?.into()),
            in_doubt: false,
        };
        Some(Audited { ticket, evicted })
    };
    let found = places.into_iter().filter_map(audited).collect();
    // Marks whose places are gone. Best effort: they expire with the lease.
    if !marks.is_empty() {
        let sweep = marks
            .into_iter()
            .take(MOST_SWEPT)
            .map(txn::delete)
            .collect();
        let _ = engine.client.call("audit", txn::plain(sweep)).await;
    }
    Ok(found)
}

/// The claims of this client on the lease.
fn known_on(engine: &Inner, lease: i64) -> Vec<(ClaimId, Known)> {
    let known = engine.known.lock();
    let on = known.iter().filter(|(_, known)| known.lease.id == lease);
    on.map(|(claim, known)| (*claim, known.clone())).collect()
}
