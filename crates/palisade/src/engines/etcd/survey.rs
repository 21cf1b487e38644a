//! `survey`: a line, or all lines, as etcd tells them at one revision.
//!
//! A report is for people: it decides nothing. The times that leases have left are asked for
//! apart, and left out where that would take very many requests.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use super::Inner;
use super::change::mark_key;
use super::keys;
use super::ops;
use super::queue::{Queue, Seat};
use super::record::Record;
use super::wire::{
    KeyValue, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, RequestOp, TxnRequest,
};
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::report::{ClaimReport, LineReport, Scope};

/// Up to how many leases a survey asks for their remaining time, one request each.
const LEASES_ASKED: usize = 64;

impl Inner {
    pub(super) async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        match scope {
            Scope::Line(name) => {
                let found = self.read(&self.keys.line(&name)?).await?;
                let leases = self.remaining(&found.places).await;
                let report = self.report(name.as_str(), found, &leases);
                Ok(report.into_iter().collect())
            }
            // Only what carries our records: the rest of the store belongs to others.
            Scope::Prefix(prefix) if self.keys.shared_with_others() => {
                let mut ours = ops::all(&format!("{}{prefix}", keys::OWNERS));
                ours.keys_only = true;
                let ours = self.rpc.range("survey", ours).await?.kvs.into_iter();
                let line = |kv: KeyValue| {
                    self.keys
                        .parse(kv.key.strip_prefix(keys::OWNERS.as_bytes())?)
                };
                let names: BTreeSet<String> =
                    ours.filter_map(line).map(|parsed| parsed.name).collect();
                let mut lines = Vec::new();
                for name in names {
                    let found = self.read(&format!("{name}/")).await?;
                    let leases = self.remaining(&found.places).await;
                    lines.extend(self.report(&name, found, &leases));
                }
                Ok(lines)
            }
            Scope::Prefix(prefix) => {
                let Found { places, marks, .. } = self.read(&self.keys.scope(&prefix)).await?;
                let leases = self.remaining(&places).await;
                let mut lines: BTreeMap<String, Vec<KeyValue>> = BTreeMap::new();
                for kv in places {
                    if let Some(parsed) = self.keys.parse(&kv.key) {
                        lines.entry(parsed.name).or_default().push(kv);
                    }
                }
                let report = |(name, places): (String, Vec<KeyValue>)| {
                    let marks = marks.clone();
                    let found = Found {
                        places,
                        marks,
                        owners: Vec::new(),
                    };
                    self.report(&name, found, &leases)
                };
                Ok(lines.into_iter().filter_map(report).collect())
            }
        }
    }

    /// Reads all that is kept of the lines whose keys begin with `prefix`, at one revision.
    async fn read(&self, prefix: &str) -> Result<Found> {
        let under = |base: &str| ops::range(ops::all(&format!("{base}{prefix}")));
        let mut success: Vec<RequestOp> = vec![ops::range(ops::all(prefix)), under(keys::MARKS)];
        if self.keys.shared_with_others() {
            success.push(under(keys::OWNERS));
        }
        let request = TxnRequest {
            success,
            ..Default::default()
        };
        let mut found = ops::found(self.rpc.txn("survey", request).await?).into_iter();
        let mut next = || found.next().unwrap_or_default();
        Ok(Found {
            places: next(),
            marks: next().into_iter().map(|mark| mark.key).collect(),
            owners: next(),
        })
    }

    /// How long leases still run, at the most; nothing when it would take very many requests.
    async fn remaining(&self, places: &[KeyValue]) -> HashMap<i64, Duration> {
        let leases: BTreeSet<i64> = places.iter().map(|kv| kv.lease).collect();
        if leases.len() > LEASES_ASKED {
            return HashMap::new();
        }
        let ask = |id: i64| async move {
            let path = "/etcdserverpb.Lease/LeaseTimeToLive";
            let request = LeaseTimeToLiveRequest { id, keys: false };
            let answer: Result<LeaseTimeToLiveResponse> =
                self.rpc.ask("survey", path, request).await;
            let answer = answer.ok().filter(|answer| answer.ttl >= 0)?;
            // etcd tells whole seconds, rounded down.
            let ttl = (answer.ttl + 1).min(answer.granted_ttl);
            Some((id, Duration::from_secs(u64::try_from(ttl).unwrap_or(0))))
        };
        let asked = leases.into_iter().filter(|&lease| lease != 0).map(ask);
        let answers = futures_util::future::join_all(asked).await;
        answers.into_iter().flatten().collect()
    }

    fn report(
        &self,
        name: &str,
        found: Found,
        leases: &HashMap<i64, Duration>,
    ) -> Option<LineReport> {
        let name = Name::new(name).ok()?;
        let queue = Queue::new(&self.keys, &self.keys.line(&name).ok()?, found.places);
        if queue.seats.is_empty() {
            return None;
        }
        let held = queue.holders();
        let show = |(at, seat): (usize, &Seat)| {
            let apart = found
                .owners
                .iter()
                .find(|kv| kv.key == self.owner_key(&seat.key));
            let apart = apart.and_then(|kv| Record::read_apart(&kv.value));
            let record = seat.record.clone().or(apart);
            let value = match (&record, self.keys.shared_with_others()) {
                (Some(record), _) => record.value.clone(),
                // The proposal of another tool's candidate.
                (None, true) if !seat.value.is_empty() => {
                    Some(String::from_utf8_lossy(&seat.value).into_owned())
                }
                (None, _) => None,
            };
            ClaimReport {
                id: seat
                    .claim
                    .map_or_else(|| seat.rest.clone(), |claim| claim.to_string()),
                owner: record.map(|record| record.owner),
                ask: seat.ask,
                value,
                sequence: (at < held).then(|| u64::try_from(seat.created).unwrap_or(0)),
                expires_in: leases.get(&seat.lease).copied(),
                evicted: found.marks.contains(&mark_key(&seat.key)),
            }
        };
        let mut holders: Vec<ClaimReport> = queue.seats.iter().enumerate().map(show).collect();
        let waiters = holders.split_off(held);
        Some(LineReport {
            name: name.as_str().to_owned(),
            capacity: queue.capacity,
            holders,
            waiters,
        })
    }
}

/// What is kept of some lines.
struct Found {
    places: Vec<KeyValue>,
    marks: HashSet<Vec<u8>>,
    owners: Vec<KeyValue>,
}
