//! `renew` and `audit`: the keeper's requests about sessions.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;

use super::Consul;
use super::client::Read;
use super::inspect::{lines, marked, sweep_dead};
use super::kv::session_text;
use super::sessions::Stage;
use super::snapshot::{Snapshot, Spot};
use palisade_core::engine::{Audited, ClaimId, Lease, LeaseId, Mode, Renewal, Ticket};
use palisade_core::{BootTime, Name, Result};

/// About how often each session looks for leftovers of other clients.
pub(super) const SWEEP: Duration = Duration::from_secs(6 * 60 * 60);

pub(super) async fn renew(engine: &Consul, leases: &[Lease], within: Duration) -> Vec<Renewal> {
    let leases = leases.iter().map(|lease| lease.id.0);
    join_all(leases.map(|session| renew_one(engine, session, within))).await
}

async fn renew_one(engine: &Consul, id: u128, within: Duration) -> Renewal {
    let (sessions, session) = (&engine.sessions, session_text(id));
    if sessions.retire(id) {
        // It is unused, and there is another one.
        let _ = timeout(within, engine.client.destroy_session(&session)).await;
        return Renewal::Lost;
    }
    let sent = BootTime::now();
    match engine.client.renew_session(&session, within).await {
        Ok(true) => match sessions.renewed(id, sent) {
            Some(armed) => {
                let chance = (armed.ttl / 3).as_secs_f64() / SWEEP.as_secs_f64();
                if !engine.keys.is_bare() && rand::random_bool(chance.min(1.0)) {
                    sessions.suspect(Some(id));
                }
                Renewal::Held(armed)
            }
            None => Renewal::Lost,
        },
        Ok(false) => {
            sessions.ended(id);
            Renewal::Lost
        }
        Err(error) => Renewal::Unknown(error),
    }
}

/// The claims of a session: those that wait or try, from the table; those that hold and writes in
/// doubt, from the store.
pub(super) async fn audit(engine: &Arc<Consul>, lease: LeaseId) -> Result<Vec<Audited>> {
    let (client, session) = (&engine.client, session_text(lease.0));
    let marked = marked(engine).await?;
    let (members, doubts) = engine.sessions.on(lease.0);
    let is_held = |stage| matches!(stage, Stage::Held(_));
    let (held, others): (Vec<_>, Vec<_>) = members
        .into_iter()
        .partition(|member| is_held(member.stage));
    let mut found: Vec<Audited> = Vec::new();
    found.extend(others.iter().map(|member| Audited {
        ticket: member.ticket(),
        evicted: member.evicted,
    }));
    let mut keys = Vec::new();
    for member in &held {
        let line = engine.keys.line(&member.claim.name)?;
        keys.push(Spot::of(member.claim.ask).key(&line, member.claim.id, &session));
    }
    let locked = client.locked_by(&session, &keys).await?;
    for (member, locked) in held.into_iter().zip(locked) {
        let claim = member.claim.id;
        // It is not where it was, but it may have been amended.
        if !locked
            && find(engine, &member.claim.name, claim, &session)
                .await?
                .is_none()
        {
            continue;
        }
        let evicted = marked.iter().any(|mark| mark.claim == claim.to_string());
        if evicted {
            engine
                .sessions
                .change(claim, |member| member.evicted = true);
        }
        let ticket = member.ticket();
        found.push(Audited { ticket, evicted });
    }
    if let Some(suspicion) = engine.sessions.suspicion(lease.0) {
        match strangers(engine, lease).await {
            // The next audit retries.
            Err(error) if error.is_transient() => {}
            strangers => {
                found.extend(strangers.unwrap_or_default());
                engine.sessions.cleared(lease.0, suspicion);
            }
        }
    }
    for (name, claim) in doubts {
        if let Some(sequence) = find(engine, &name, claim, &session).await? {
            found.push(audited(lease, name, claim, sequence));
        }
    }
    Ok(found)
}

/// The sequence of a claim, if the store has it on this session.
async fn find(engine: &Consul, name: &Name, claim: ClaimId, session: &str) -> Result<Option<u64>> {
    let line = engine.keys.line(name)?;
    let snapshot = Snapshot::read(&engine.client, &line, Mode::Exclusive).await?;
    Ok(snapshot.find(claim, session).map(|found| found.sequence))
}

fn audited(lease: LeaseId, name: Name, claim: ClaimId, sequence: u64) -> Audited {
    Audited {
        ticket: Ticket {
            lease,
            sequence,
            ..Ticket::own(name, claim)
        },
        evicted: false,
    }
}

/// Claims that the store has on a session and the table does not, because a snapshot from before
/// their leave was restored. Nobody else would ever remove them, because the session is alive.
async fn strangers(engine: &Arc<Consul>, lease: LeaseId) -> Result<Vec<Audited>> {
    let session = session_text(lease.0);
    let from = engine.keys.beginning("");
    let seen = engine.client.read("audit", &from, true, Read::Consistent);
    let lines = lines(&engine.keys, seen.await?.pairs);
    let mut strangers = Vec::new();
    for (name, snapshot) in &lines {
        for (.., record) in snapshot.claims() {
            let Some(claim) = record.and_then(|record| record.claim.parse().ok()) else {
                continue;
            };
            let member = engine.sessions.member(claim);
            if member.is_none_or(|member| member.session != lease.0)
                && let Some(found) = snapshot.find(claim, &session)
            {
                strangers.push(audited(lease, name.clone(), claim, found.sequence));
            }
        }
    }
    // In the background, because nobody depends on the result.
    let engine = Arc::clone(engine);
    tokio::spawn(async move { sweep_dead(&engine, &lines).await });
    Ok(strangers)
}
