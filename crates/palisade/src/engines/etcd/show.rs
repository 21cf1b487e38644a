//! `survey`, `watch`, `audit` and `alarms`: what is in the lines, and hints that it changed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use tokio::sync::broadcast;

use super::Inner;
use super::change::mark_key;
use super::enter::Known;
use super::keys::{self, prefix_end, prefix_start};
use super::leases::number;
use super::ops;
use super::queue::{Queue, Seat};
use super::record::Record;
use super::watching::{News, Watch};
use super::wire::{
    KeyValue, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, RequestOp, TxnRequest,
};
use crate::core::claim::ClaimId;
use crate::core::engine::{Alarm, Audited, BoxStream};
use crate::core::error::{Error, Kind, Result};
use crate::core::name::Name;
use crate::core::report::{ClaimReport, LineReport, Scope};
use crate::core::ticket::{LeaseId, Ticket};

/// The pause before a watch that broke is begun again.
const PAUSE: Duration = Duration::from_millis(200);

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
                counted: (at < held).then(|| u64::try_from(seat.created).unwrap_or(0)),
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
            counted: u64::try_from(created).unwrap_or(0),
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

    pub(super) fn alarm(&self, alarm: Alarm) {
        // Nobody listens before the first claim.
        let _ = self.alarms.send(alarm);
    }
}

/// What is kept of some lines.
struct Found {
    places: Vec<KeyValue>,
    marks: HashSet<Vec<u8>>,
    owners: Vec<KeyValue>,
}

/// Hints for the keeper: what the engine notices by itself, and marks on leases of ours.
pub(super) fn alarms(inner: Arc<Inner>) -> BoxStream<Alarm> {
    let heard = inner.alarms.subscribe();
    let state = (inner, heard, None);
    Box::pin(stream::unfold(
        state,
        |(inner, mut heard, mut marks)| async move {
            let alarm = loop {
                tokio::select! {
                    alarm = heard.recv() => match alarm {
                        Ok(alarm) => break alarm,
                        Err(broadcast::error::RecvError::Lagged(_)) => break Alarm::All,
                        // The sender lives in `inner`.
                        Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
                    },
                    news = next_mark(&inner, &mut marks) => if news {
                        break Alarm::All;
                    },
                }
            };
            Some((alarm, (inner, heard, marks)))
        },
    ))
}

/// Whether a mark may concern us; also when the watch has just begun, since marks may have come
/// before it.
async fn next_mark(inner: &Inner, marks: &mut Option<Watch>) -> bool {
    let Some(watch) = marks else {
        let prefix = format!("{}{}", keys::MARKS, inner.keys.scope(""));
        let begun = inner.begin_watch("evict", prefix_start(&prefix), prefix_end(&prefix));
        match begun.await {
            Ok(watch) => {
                *marks = Some(watch);
                return true;
            }
            Err(_) => {
                tokio::time::sleep(PAUSE).await;
                return false;
            }
        }
    };
    match watch.next().await {
        News::Changed(events) => events.iter().any(|event| {
            let key = event
                .kv
                .as_ref()
                .filter(|_| event.kind == 0)
                .map(|kv| &kv.key);
            let rest = key.and_then(|key| std::str::from_utf8(key).ok()?.rsplit('/').next());
            let ours = rest.and_then(keys::ours);
            ours.is_some_and(|(lease, _)| inner.leases.is_ours(lease))
        }),
        News::Begun => false,
        News::Over => {
            *marks = None;
            tokio::time::sleep(PAUSE).await;
            false
        }
    }
}

/// Hints that a survey of `scope` may show something else.
pub(super) fn watch(inner: Arc<Inner>, scope: Scope) -> BoxStream<Result<()>> {
    let prefix = match &scope {
        Scope::Line(name) => inner.keys.line(name),
        Scope::Prefix(prefix) if inner.keys.shared_with_others() => {
            Ok(format!("{}{prefix}", keys::OWNERS))
        }
        Scope::Prefix(prefix) => Ok(inner.keys.scope(prefix)),
    };
    let prefix = match prefix {
        Ok(prefix) => prefix,
        Err(error) => return Box::pin(stream::iter([Err(error)])),
    };
    let marked = match prefix.strip_prefix(keys::OWNERS) {
        Some(prefix) => format!("{}{prefix}", keys::MARKS),
        None => format!("{}{prefix}", keys::MARKS),
    };
    let state = (inner, prefix, marked, None);
    Box::pin(stream::unfold(
        state,
        |(inner, prefix, marked, mut open)| async move {
            let told = next_change(&inner, &prefix, &marked, &mut open).await;
            Some((told, (inner, prefix, marked, open)))
        },
    ))
}

async fn next_change(
    inner: &Inner,
    prefix: &str,
    marked: &str,
    open: &mut Option<(Watch, Watch)>,
) -> Result<()> {
    let Some((places, marks)) = open else {
        let begin =
            |prefix: &str| inner.begin_watch("watch", prefix_start(prefix), prefix_end(prefix));
        let begun = futures_util::future::try_join(begin(prefix), begin(marked)).await;
        match begun {
            // A hint: something may have changed before.
            Ok(both) => *open = Some(both),
            Err(error) => {
                tokio::time::sleep(PAUSE).await;
                return Err(error);
            }
        }
        return Ok(());
    };
    let news = tokio::select! {
        news = places.next() => news,
        news = marks.next() => news,
    };
    if let News::Over = news {
        *open = None;
    }
    Ok(())
}
