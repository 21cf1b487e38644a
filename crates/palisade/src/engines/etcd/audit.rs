//! `audit`: what hangs on a lease, so that the keeper can leave the places that nobody knows.
//!
//! Whatever is listed was read with its create revision, and is left by its incarnation alone: a
//! key that was left since the list was made is not there, or is another place.

use std::collections::HashSet;

use super::Inner;
use super::change::mark_key;
use super::enter::Known;
use super::keys;
use super::leases::number;
use super::ops;
use super::record::Record;
use super::wire::{LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, RequestOp, TxnRequest};
use crate::core::claim::ClaimId;
use crate::core::engine::Audited;
use crate::core::error::{Error, Kind, Result};
use crate::core::name::Name;
use crate::core::ticket::{LeaseId, Ticket};

impl Inner {
    /// What a lease owns. etcd answers this from one member, which may lag after a change of
    /// leaders: a place that should be there and is not listed is read once more.
    pub(super) async fn audit(&self, lease: LeaseId) -> Result<Vec<Audited>> {
        let id = number(lease);
        let path = "/etcdserverpb.Lease/LeaseTimeToLive";
        let request = LeaseTimeToLiveRequest { id, keys: true };
        let answer: LeaseTimeToLiveResponse = self.rpc.ask("audit", path, request).await?;
        if answer.ttl < 0 {
            let message = "the lease has ended; its renewal will say so";
            return Err(Error::new(Kind::Lost, "audit", message));
        }
        let (marks, places): (Vec<Vec<u8>>, Vec<Vec<u8>>) = answer
            .keys
            .into_iter()
            .partition(|key| key.starts_with(keys::MARKS.as_bytes()));
        let marks: HashSet<Vec<u8>> = marks.into_iter().collect();
        let listed: HashSet<Vec<u8>> = places.into_iter().collect();
        let mut found = Vec::new();
        // Those of claims that are known; what the list does not have is read once more.
        let known = self.known_on(id);
        for (claim, known) in &known {
            let key = known.key.as_bytes();
            let is_there = listed.contains(key)
                || known.created != 0
                    && !self.rpc.range("audit", ops::one(key)).await?.kvs.is_empty();
            if is_there {
                found.extend(self.audited(lease, *claim, key, known.created, &marks));
            }
        }
        // Strangers: read, so that they are left by their incarnation. A key that was left since
        // the list was made is not there, or is somebody else's by now.
        let in_use: HashSet<&[u8]> = known
            .iter()
            .map(|(_, known)| known.key.as_bytes())
            .collect();
        for key in listed.iter().filter(|key| !in_use.contains(key.as_slice())) {
            let Some(parsed) = self.keys.parse(key) else {
                continue;
            };
            let Some((_, named)) = parsed.ours else {
                continue;
            };
            let kv = self.rpc.range("audit", ops::one(key)).await?.kvs.pop();
            if let Some(kv) = kv.filter(|kv| kv.lease == id) {
                let record = Record::read(&self.keys, &kv.value);
                let told = record.and_then(|record| record.id.parse().ok());
                let claim = told.unwrap_or(named);
                found.extend(self.audited(lease, claim, key, kv.create_revision, &marks));
            }
        }
        self.sweep(marks, &found).await;
        Ok(found)
    }

    fn audited(
        &self,
        lease: LeaseId,
        claim: ClaimId,
        key: &[u8],
        created: i64,
        marks: &HashSet<Vec<u8>>,
    ) -> Option<Audited> {
        let parsed = self.keys.parse(key)?;
        let ticket = Ticket {
            name: Name::new(&parsed.name).ok()?,
            claim,
            lease,
            sequence: u64::try_from(created).unwrap_or(0),
            native: Some(String::from_utf8(key.to_vec()).ok()?.into()),
            in_doubt: false,
        };
        let evicted = marks.contains(&mark_key(key));
        Some(Audited { ticket, evicted })
    }

    /// The claims of this client on the lease.
    fn known_on(&self, lease: i64) -> Vec<(ClaimId, Known)> {
        let known = self.known.lock();
        let on = known.iter().filter(|(_, known)| known.lease == lease);
        on.map(|(claim, known)| (*claim, known.clone())).collect()
    }

    /// Removes marks whose places are gone. Best effort: the lease ends them otherwise.
    async fn sweep(&self, marks: HashSet<Vec<u8>>, found: &[Audited]) {
        let places = found
            .iter()
            .filter_map(|found| found.ticket.native.as_ref());
        let in_use: HashSet<Vec<u8>> = places.map(|key| mark_key(key.as_bytes())).collect();
        let success: Vec<RequestOp> = marks
            .difference(&in_use)
            .take(64)
            .map(|mark| ops::delete(mark.clone()))
            .collect();
        if !success.is_empty() {
            let request = TxnRequest {
                success,
                ..Default::default()
            };
            let _ = self.rpc.txn("audit", request).await;
        }
    }
}
