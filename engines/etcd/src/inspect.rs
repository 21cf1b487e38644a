//! `survey` and `check`: reports for people. No decision depends on them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use futures_util::future::join_all;

use super::config::CAPABILITY;
use super::leases::{self, seconds};
use super::proto::{
    AlarmRequest, CORRUPT, KeyValue, LeaseTimeToLiveRequest, NO_SPACE, RangeRequest, StatusRequest,
    StatusResponse,
};
use super::snapshot::{self, Place, Snapshot};
use super::txn;
use super::{Inner, client, error, keys};
use palisade_core::engine::{Seat, rounded};
use palisade_core::report::{Checkup, ClaimReport, Finding, LineReport, Scope, Severity};
use palisade_core::{ErrorKind, Result};
use palisade_kit as kit;

/// A survey asks for the remaining time of at most this many leases, one request each. With more
/// leases the times are left out.
const LEASES_ASKED: usize = 64;

/// The lines in the scope, as of one revision.
pub(super) async fn survey(engine: &Inner, scope: &Scope) -> Result<Vec<LineReport>> {
    let keys = &engine.keys;
    let mut lines = BTreeMap::new();
    match scope {
        Scope::Line(name) => {
            let line = snapshot::line(engine, "survey", &keys.line(name)?).await?;
            lines.insert(name.to_string(), line);
        }
        // Only keys with our owner records; the rest of the store belongs to others.
        Scope::Prefix(prefix) if keys.shared_with_others() => {
            let ours = RangeRequest {
                keys_only: true,
                ..txn::all(&format!("{}{prefix}", keys::OWNERS))
            };
            let ours = engine.client.call("survey", ours).await?.kvs;
            let name = |kv: &KeyValue| {
                let key = kv.key.strip_prefix(keys::OWNERS.as_bytes())?;
                Some(keys.parse(key)?.0)
            };
            let names: BTreeSet<String> = ours.iter().filter_map(name).collect();
            for name in names {
                let line = snapshot::line(engine, "survey", &format!("{name}/")).await?;
                lines.insert(name, line);
            }
        }
        Scope::Prefix(prefix) => lines = snapshot::lines(engine, prefix).await?,
    }
    lines.retain(|_, line| !line.line.seats.is_empty());
    let remaining = remaining(engine, lines.values()).await;
    let report = |(name, line): (String, Snapshot)| {
        let capacity = line.line.named_capacity();
        let show = |seat| claim(engine, seat, &remaining);
        let (holders, waiters) = line.line.seats.into_iter().partition(Seat::is_held);
        let (holders, waiters): (Vec<_>, Vec<_>) = (holders, waiters);
        let mut line = LineReport::empty(name);
        line.capacity = capacity;
        line.holders = holders.into_iter().map(show).collect();
        line.waiters = waiters.into_iter().map(show).collect();
        line
    };
    Ok(lines.into_iter().map(report).collect())
}

fn claim(engine: &Inner, seat: Seat<Place>, leases: &HashMap<i64, Duration>) -> ClaimReport {
    let (is_held, place) = (seat.is_held(), seat.extra);
    // The value of another tool's key is the proposal of a candidate.
    let foreign = || {
        let is_told = engine.keys.shared_with_others() && !place.value.is_empty();
        is_told.then(|| String::from_utf8_lossy(&place.value).into_owned())
    };
    let value = match &place.record {
        Some(record) => record.value.clone(),
        None => foreign(),
    };
    let mut claim = ClaimReport::new(place.id, seat.ask);
    claim.value = value;
    claim.owner = place.record.map(|record| record.owner);
    claim.sequence = is_held.then_some(seat.sequence);
    claim.expires_in = leases.get(&place.lease).copied();
    claim.evicted = seat.evicted;
    claim
}

/// The time left on leases, at most.
async fn remaining<'a>(
    engine: &Inner,
    lines: impl Iterator<Item = &'a Snapshot>,
) -> HashMap<i64, Duration> {
    let leases = lines.flat_map(|line| line.line.seats.iter().map(|seat| seat.extra.lease));
    let leases: BTreeSet<i64> = leases.filter(|&lease| lease != 0).collect();
    if leases.len() > LEASES_ASKED {
        return HashMap::new();
    }
    let ask = |id: i64| async move {
        let request = LeaseTimeToLiveRequest { id, keys: false };
        let answer = engine.client.call("survey", request).await.ok()?;
        // etcd rounds down to whole seconds.
        let ttl = (answer.ttl + 1).min(answer.granted_ttl);
        (answer.ttl >= 0).then(|| (id, seconds(ttl)))
    };
    let answers = join_all(leases.into_iter().map(ask)).await;
    answers.into_iter().flatten().collect()
}

/// Findings about what is unsafe or broken in this cluster.
pub(super) async fn check(engine: &Inner) -> Result<Checkup> {
    let status = engine.client.call("check", StatusRequest {}).await?;
    let mut findings = Vec::new();
    findings.extend(of_version(&status.version));
    if status.leader == 0 {
        findings.push(Finding::new(
            Severity::Warning,
            "no_quorum",
            "the member that answers knows no leader",
            "start the members that are down; without a majority nothing is granted",
        ));
    }
    if engine.leases.history().epoch > 0 {
        findings.push(Finding::new(
            Severity::Danger,
            "cluster_replaced",
            "since this client connected, the cluster was restored from a snapshot or replaced by \
             another: tokens can repeat",
            "raise era= in the URL of every client",
        ));
    }
    let alarms = alarms_raised(engine).await?;
    let is_full = alarms.iter().any(|alarm| alarm.code == QUOTA_ALARM);
    findings.extend(alarms);
    findings.extend((!is_full).then(|| of_size(&status)).flatten());
    findings.extend(never_compacted(engine, client::revision(&status.header)).await?);
    findings.extend(ttl_floor(engine).await);
    let endpoints = &engine.endpoints;
    findings.extend(kit::plain_text(&endpoints.hosts, endpoints.is_encrypted()));
    Ok({
        let mut checkup = Checkup::default();
        checkup.version = Some(status.version);
        checkup.findings = findings;
        checkup
    })
}

async fn alarms_raised(engine: &Inner) -> Result<Vec<Finding>> {
    let answer = match engine.client.call("check", AlarmRequest {}).await {
        Ok(answer) => answer,
        // Only an operator's role may list alarms.
        Err(error) if error.kind() == ErrorKind::Denied => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let raised = |alarm| answer.alarms.iter().any(|raised| raised.alarm == alarm);
    let quota = Finding::new(
        Severity::Danger,
        QUOTA_ALARM,
        "etcd has used up its quota: no lock can be taken",
        "etcdctl compact, etcdctl defrag, etcdctl alarm disarm; then set \
         --auto-compaction-retention, and raise the quota",
    );
    let corrupt = Finding::new(
        Severity::Danger,
        "corrupt_alarm",
        "the data of the members differ",
        "stop using this cluster and restore the member that is wrong",
    );
    let known = [(NO_SPACE, quota), (CORRUPT, corrupt)].into_iter();
    let known = known.filter(|(alarm, _)| raised(*alarm));
    Ok(known.map(|(_, finding)| finding).collect())
}

/// The finding of an etcd that takes no writes.
const QUOTA_ALARM: &str = "quota_alarm";

/// The quota of an etcd that is not told another, and does not tell (before 3.6).
const USUAL_QUOTA: i64 = 2 << 30;

/// Warns about a database that has used up half of its quota: history grows with every lock.
fn of_size(status: &StatusResponse) -> Option<Finding> {
    let (quota, supposed) = match status.quota {
        0 => (USUAL_QUOTA, ", if that is the default"),
        told => (told, ""),
    };
    let mib = |bytes: i64| bytes >> 20;
    (status.size >= quota / 2).then(|| {
        Finding::new(
            Severity::Warning,
            "quota_near",
            format!(
                "the database has {} MiB ({} MiB in use) of a quota of {} MiB{supposed}: when that \
                 is used up, no lock can be taken",
                mib(status.size),
                mib(status.size_in_use),
                mib(quota)
            ),
            "set --auto-compaction-retention; etcdctl compact and etcdctl defrag free what is there",
        )
    })
}

/// With fewer revisions an etcd may just be young.
const YOUNG: i64 = 10_000;

/// Warns about a history that nobody compacts, which etcd does not do by itself.
async fn never_compacted(engine: &Inner, revision: i64) -> Result<Option<Finding>> {
    if revision <= YOUNG {
        return Ok(None);
    }
    let first = RangeRequest {
        revision: 1,
        serializable: true,
        ..txn::one(keys::NOTHING.as_bytes())
    };
    match engine.client.call("check", first).await {
        Ok(_) => Ok(Some(Finding::new(
            Severity::Warning,
            "never_compacted",
            format!(
                "the history of {revision} revisions was never compacted: it grows with every lock \
                 until the quota is used up"
            ),
            "run etcd with --auto-compaction-retention=1h, or etcdctl compact and etcdctl defrag \
             now and then",
        ))),
        Err(error) if error.message() == error::COMPACTED => Ok(None),
        // A role that may not read this key.
        Err(error) if error.kind() == ErrorKind::Denied => Ok(None),
        Err(error) => Err(error),
    }
}

/// Requests a lease of one second, to see the shortest ttl that is granted.
async fn ttl_floor(engine: &Inner) -> Option<Finding> {
    let second = Duration::from_secs(1);
    let granted = engine.leases.grant(&engine.client, second).await.ok()?;
    // Without a reply the lease expires by itself.
    let _ = leases::revoke(&engine.client, "check", granted.id).await;
    let floor = granted.armed.ttl;
    (floor > CAPABILITY.ttl.min).then(|| {
        let message = format!(
            "a shorter ttl is granted as {}: 1.5 election timeouts",
            rounded(floor)
        );
        let remedy = "plan for it: a lock whose holder died is free after that time";
        Finding::new(Severity::Info, "ttl_floor", message, remedy)
    })
}

/// The known bugs of a version, by issue.
fn of_version(version: &str) -> Option<Finding> {
    let number = |part: &str| -> Option<u32> {
        let end = part.find(|c: char| !c.is_ascii_digit());
        part[..end.unwrap_or(part.len())].parse().ok()
    };
    let parts: Vec<u32> = version.split('.').map_while(number).collect();
    let &[major, minor, patch, ..] = parts.as_slice() else {
        return None;
    };
    let (severity, code, message, remedy) = match (major, minor, patch) {
        (..3, ..) | (3, ..4, _) => (
            Severity::Warning,
            "too_old",
            "is older than what palisade is tested with",
            "run 3.4 or newer",
        ),
        (3, 5, 0..=2) => (
            Severity::Danger,
            "loses_data",
            "can lose writes when a member is killed (etcd #13766)",
            "run a newer 3.5",
        ),
        (3, 4, ..=20) | (3, 5, ..=4) => (
            Severity::Danger,
            "loses_data",
            "can lose acknowledged writes on a cluster of one member (etcd #14370)",
            "run the newest release of the same line",
        ),
        (3, 4, ..=41) | (3, 5, ..=27) | (3, 6, ..=8) => (
            Severity::Info,
            "stale_reads",
            "can answer with stale data while its leader changes (etcd #20418); locks don't \
             depend on it, your own reads may",
            "run 3.4.42, 3.5.28, 3.6.9 or newer",
        ),
        _ => return None,
    };
    let message = format!("etcd {version} {message}");
    Some(Finding::new(severity, code, message, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_is_judged_by_its_quota() {
        let of = |size: i64, quota: i64| {
            of_size(&StatusResponse {
                size: size << 20,
                quota: quota << 20,
                ..StatusResponse::default()
            })
        };
        assert!(of(1023, 0).is_none() && of(4095, 8192).is_none());
        let supposed = of(1024, 0).unwrap().message;
        assert!(
            supposed.contains("1024 MiB (0 MiB in use) of a quota of 2048 MiB, if"),
            "{supposed}"
        );
        let told = of(4096, 8192).unwrap().message;
        assert!(told.contains("of a quota of 8192 MiB:"), "{told}");
    }

    #[test]
    fn versions_are_judged_by_what_is_known_of_them() {
        let code = |version| of_version(version).map(|finding| finding.code);
        assert_eq!(code("3.3.25"), Some("too_old"));
        assert_eq!(code("3.5.1"), Some("loses_data"));
        assert_eq!(code("3.4.23"), Some("stale_reads"));
        assert_eq!(code("3.5.16-k3s1"), Some("stale_reads"));
        assert_eq!(code("3.5.28"), None);
        assert_eq!(code("3.7.0"), None);
        assert_eq!(code("3.7.0-alpha.0"), None);
        assert_eq!(code("unknown"), None);
    }
}
