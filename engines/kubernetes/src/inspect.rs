//! `survey` and `check`: holders as Leases show them, and what our identity may do.
//!
//! Waiters have nothing in the store and are not shown. Holders that are overdue by their own
//! record are not shown either, although nobody may replace them before they were observed for
//! their whole duration.

use std::time::Duration;

use super::Kubernetes;
use super::lease::{Holder, Lease};
use super::release;
use palisade_core::engine::Ask;
use palisade_core::report::{Checkup, ClaimReport, Finding, LineReport, Scope, Severity};
use palisade_core::{BootTime, Error, ErrorKind, Name, Result};
use palisade_kit::{clock_off, plain_text};

pub(super) async fn survey(engine: &Kubernetes, scope: &Scope) -> Result<Vec<LineReport>> {
    let (keys, client) = (&engine.keys, &engine.client);
    match scope {
        Scope::Line(name) => {
            let line = engine.line(name)?;
            let asked = BootTime::now();
            let lease = client.read("survey", &line.key, client.timeout).await?;
            let lease = line.saw(lease, asked);
            let report = lease.and_then(|lease| report(engine, name, &lease));
            Ok(report.into_iter().collect())
        }
        Scope::Prefix(_) => {
            let leases = client.list("survey").await?;
            let mut reports = Vec::new();
            for lease in &leases {
                let name = keys.name(&lease.metadata.name, lease.name());
                let Some(name) = name.and_then(|name| Name::new(name).ok()) else {
                    continue;
                };
                // With `namespace=`, Leases without records of palisade belong to others.
                let records = || {
                    lease
                        .view()
                        .holders
                        .iter()
                        .any(|holder| holder.entry.is_some())
                };
                let ours = !keys.is_bare() || lease.name().is_some() || records();
                if ours && scope.includes(name.as_str()) {
                    reports.extend(report(engine, &name, lease));
                }
            }
            // It does no harm if the right to delete is missing.
            let _ = release::sweep(engine, &leases).await;
            Ok(reports)
        }
    }
}

/// Deletes Leases of ours that nobody has held for a day.
pub(super) async fn sweep(engine: &Kubernetes) {
    if let Ok(leases) = engine.client.list("sweep").await {
        let _ = release::sweep(engine, &leases).await;
    }
}

/// The report of one line; `None` when nobody holds.
fn report(engine: &Kubernetes, name: &Name, lease: &Lease) -> Option<LineReport> {
    let line = engine.line(name).ok()?;
    let server = engine.client.clock.now();
    let view = lease.view();
    let ask = match view.capacity {
        None => Ask::Whole,
        Some(capacity) => Ask::Part {
            weight: 1,
            capacity,
        },
    };
    let living = view.holders.into_iter().filter(|holder| {
        let known = holder.id.parse().ok().and_then(|id| engine.members.get(id));
        let over = match known {
            Some(member) => member.has_ended(),
            None => holder.is_overdue(server),
        };
        !over && !line.has_ended(holder)
    });
    let show = |holder: Holder| {
        let expires_in = holder.left(server).map(|left| later(left).min(holder.ttl));
        let mut claim = ClaimReport::new(holder.id, ask);
        claim.expires_in = expires_in;
        claim.owner = holder.entry.as_ref().map(|entry| entry.owner.clone());
        claim.value = holder.entry.as_ref().and_then(|entry| entry.value.clone());
        claim.sequence = holder.entry.as_ref().map(|entry| entry.token);
        claim.evicted = holder.entry.as_ref().is_some_and(|entry| entry.evicted);
        claim
    };
    let mut holders: Vec<ClaimReport> = living.map(show).collect();
    holders.sort_by_key(|holder| holder.sequence);
    (!holders.is_empty()).then(|| {
        let mut line = LineReport::empty(name.to_string());
        line.capacity = view.capacity;
        line.holders = holders;
        line
    })
}

/// Records are truncated to a microsecond, and the clocks are not read at the same time.
fn later(left: Duration) -> Duration {
    left + Duration::from_millis(1)
}

/// What fails without each verb; a lock needs the first three.
const VERBS: &[(&str, &str)] = &[
    ("get", "nothing can be locked"),
    ("create", "a new name can't be locked"),
    ("update", "nothing can be locked"),
    (
        "watch",
        "a grant is noticed up to a second later, and an eviction at the next renewal",
    ),
    ("list", "`palisade ls` can't show what is locked"),
    ("delete", "Leases that nobody uses any more stay"),
];

pub(super) async fn check(engine: &Kubernetes) -> Result<Checkup> {
    let client = &engine.client;
    let version = client.version().await?;
    let ahead = client.clock.ahead();
    let mut findings: Vec<Finding> = clock_off(ahead).into_iter().collect();
    let (host, encrypted) = client.host();
    findings.extend(host.and_then(|host| plain_text(&[host], encrypted)));
    for (verb, otherwise) in VERBS {
        let needed = matches!(*verb, "get" | "create" | "update");
        match client.may(verb).await {
            Ok(true) => {}
            Ok(false) => findings.push(Finding::new(
                if needed {
                    Severity::Warning
                } else {
                    Severity::Info
                },
                "missing_right",
                format!("this identity may not {verb} leases: {otherwise}"),
                format!("add {verb} to the verbs of its Role for leases in coordination.k8s.io"),
            )),
            Err(error) if error.kind() == ErrorKind::Denied => {
                findings.push(unknown_rights(&error));
                break;
            }
            Err(error) => return Err(error),
        }
    }
    Ok({
        let mut checkup = Checkup::default();
        checkup.version = version;
        checkup.clock_ahead_us = Some(ahead);
        checkup.findings = findings;
        checkup
    })
}

fn unknown_rights(error: &Error) -> Finding {
    Finding::new(Severity::Info, "rights_unknown", format!("the API server does not say what this identity may do: {}", error.message()), "allow create on selfsubjectaccessreviews in authorization.k8s.io, as the role system:basic-user does".to_owned())
}
