//! `leave`, `amend`, and an operator's `resize` and `evict`.
//!
//! Every write is conditional on the Lease as it was read, and checks the incarnation in it, so a
//! late one changes nothing. What was last seen is tried first, because it is usually still
//! current.

use std::sync::Arc;
use std::time::Duration;

use super::Kubernetes;
use super::acquire::read;
use super::client::Written;
use super::lease::{Entry, Lease};
use super::lines::{Doubt, Line, Stage};
use palisade_core::engine::{Alarm, Amended, Amendment, Ask, ClaimId, Left, Ticket};
use palisade_core::{BootTime, Error, Eviction, Name, Outcome, Result};
use palisade_kit::cas::Retry;
use palisade_kit::leave::leave_twice;

/// What to do with a Lease.
enum Change<T> {
    /// Nothing: this is the answer.
    None(T),
    /// Write this, then return this answer.
    Write(Box<Lease>, T),
}

/// Changes a Lease with `change`, and retries when others wrote in between. An answer without a
/// write counts only for a Lease that was read for it.
async fn change<T>(
    engine: &Kubernetes,
    line: &Line,
    operation: &'static str,
    mut change: impl FnMut(Option<&Lease>, &str) -> Result<Change<T>>,
) -> Result<T> {
    let client = &engine.client;
    let (started, mut retry) = (BootTime::now(), Retry::many());
    let _turn = line.turn(client.timeout).await;
    let known = line.known(BootTime::PAST);
    let mut believed = known.is_none();
    let mut snapshot = match known {
        Some(known) => known,
        None => read(engine, line, operation, started).await?,
    };
    loop {
        let stamp = client.clock.stamp();
        let (next, answer) = match change(snapshot.as_deref(), &stamp) {
            Ok(Change::Write(next, answer)) => (next, answer),
            _ if !believed => {
                snapshot = read(engine, line, operation, started).await?;
                believed = true;
                continue;
            }
            Ok(Change::None(answer)) => return Ok(answer),
            Err(error) => return Err(error),
        };
        let sent = BootTime::now();
        match client.replace(operation, &next, client.timeout).await {
            Ok(Written::Done(lease)) => {
                line.wrote(*lease, &stamp, sent);
                return Ok(answer);
            }
            Ok(Written::Refused) => retry.or_busy(operation).await?,
            Err(error) if error.outcome() == Outcome::NotApplied => return Err(error),
            Err(error) => {
                // The caller retries; this read shows then whether the write was applied.
                let asked = BootTime::now();
                let timeout = client.timeout / 2;
                if let Ok(now) = client.read(operation, &line.key, timeout).await {
                    line.saw(now, asked);
                }
                return Err(error);
            }
        }
        snapshot = read(engine, line, operation, BootTime::now()).await?;
    }
}

pub(super) async fn leave(engine: &Kubernetes, ticket: &Ticket) -> Result<Left> {
    leave_twice(|| leave_once(engine, ticket)).await
}

async fn leave_once(engine: &Kubernetes, ticket: &Ticket) -> Result<Left> {
    let line = engine.line(&ticket.name)?;
    let (members, claim) = (&engine.members, ticket.claim);
    let member = members.settled(claim, engine.client.timeout).await;
    let state = member.as_ref().map(|member| member.state());
    let stage = state.as_ref().map(|state| state.stage);
    let held = match stage {
        Some(Stage::Held(held)) => Some(held),
        _ => None,
    };
    if held.is_some_and(|held| ticket.sequence != 0 && ticket.sequence != held) {
        return Ok(Left::Absent);
    }
    let waited = stage == Some(Stage::Waiting);
    if ticket.in_doubt || held.is_none() && ticket.sequence == 0 {
        let lasts = member.map_or(engine.default_ttl, |member| member.claim.ttl);
        members.bury(claim, lasts.max(engine.client.timeout * 4));
    }
    let doubt = state.and_then(|state| state.doubt);
    if waited && doubt.is_none() {
        members.forget(claim);
        line.changed.notify_waiters();
        return Ok(Left::Done);
    }
    let left = take_out(engine, &line, ticket, doubt).await?;
    members.forget(claim);
    Ok(Left::of(left || waited))
}

/// Removes a claim from its Lease; `false` when it is not in it. A request for it that may still be
/// in flight is refused from then on.
pub(super) async fn take_out(
    engine: &Kubernetes,
    line: &Line,
    ticket: &Ticket,
    doubt: Option<Doubt>,
) -> Result<bool> {
    change(engine, line, "leave", |lease, stamp| {
        let Some(lease) = lease else {
            return Ok(Change::None(false));
        };
        if lease.entry(ticket.claim, ticket.sequence).is_some() {
            let without = lease.changed(stamp, |holders, _| {
                holders.retain(|entry| !entry.is(ticket.claim));
            });
            return Ok(Change::Write(Box::new(without), true));
        }
        if doubt.as_ref() == Some(&lease.condition()) {
            return Ok(Change::Write(Box::new(lease.fenced(stamp)), false));
        }
        Ok(Change::None(false))
    })
    .await
}

pub(super) async fn amend(
    engine: &Kubernetes,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    let line = engine.line(&ticket.name)?;
    change(engine, &line, "amend", |lease, stamp| {
        let entry = lease.and_then(|lease| lease.entry(ticket.claim, ticket.sequence));
        let (Some(lease), Some(_)) = (lease, entry) else {
            return Ok(Change::None(Amended::Gone));
        };
        match amendment {
            Amendment::Value(value) => {
                let said = lease.amended(stamp, |holders, _| {
                    let own = holders.iter_mut().filter(|entry| entry.is(ticket.claim));
                    own.for_each(|entry| entry.value = Some(value.clone()));
                });
                Ok(Change::Write(Box::new(said), Amended::Done))
            }
            Amendment::Ask(Ask::Whole) if lease.view().capacity.is_none() => {
                Ok(Change::None(Amended::Done))
            }
            Amendment::Ask(_) => Ok(Change::None(Amended::Busy)),
        }
    })
    .await
}

pub(super) async fn resize(engine: &Kubernetes, name: &Name, capacity: u32) -> Result<bool> {
    let line = engine.line(name)?;
    change(engine, &line, "resize", |lease, stamp| {
        let Some(lease) = lease.filter(|lease| lease.view().capacity.is_some()) else {
            return Ok(Change::None(false));
        };
        let resized = lease.amended(stamp, |_, live| *live = Some(capacity));
        Ok(Change::Write(Box::new(resized), true))
    })
    .await
}

pub(super) async fn evict(
    engine: &Arc<Kubernetes>,
    name: &Name,
    id: &str,
    eviction: Eviction,
) -> Result<bool> {
    let line = engine.line(name)?;
    let claim = id.parse::<ClaimId>().ok();
    let waiting = claim.and_then(|claim| engine.members.get(claim));
    if let Some(member) = waiting.filter(|member| member.state().stage == Stage::Waiting)
        && member.claim.name == *name
    {
        let claim = member.claim.id;
        match eviction {
            Eviction::Mark => member.change(|state| state.evicted = true),
            Eviction::Remove => engine.members.forget(claim),
        }
        line.changed.notify_waiters();
        engine.alarm(Alarm::Lease(claim.into()));
        return Ok(true);
    }
    let evicted = change(engine, &line, "evict", |lease, stamp| {
        let holders = lease.map(|lease| lease.view().holders).unwrap_or_default();
        let found = holders.iter().find(|holder| holder.id == id);
        let (Some(lease), Some(found)) = (lease, found) else {
            return Ok(Change::None(false));
        };
        let own = |entry: &Entry| claim.is_some_and(|claim| entry.is(claim));
        let changed = match (eviction, &found.entry) {
            (Eviction::Mark, Some(_)) => lease.amended(stamp, |holders, _| {
                let own = holders.iter_mut().filter(|entry| own(entry));
                own.for_each(|entry| entry.evicted = true);
            }),
            // The holder of another tool can't be notified.
            (Eviction::Mark, None) => return Ok(Change::None(true)),
            (Eviction::Remove, Some(_)) => {
                lease.changed(stamp, |holders, _| holders.retain(|entry| !own(entry)))
            }
            (Eviction::Remove, None) => lease.emptied(stamp),
        };
        Ok(Change::Write(Box::new(changed.alarming()), true))
    });
    let evicted = evicted.await?;
    if let Some(claim) = claim.filter(|_| evicted) {
        engine.alarm(Alarm::Lease(claim.into()));
    }
    Ok(evicted)
}

/// Leases of ours without a holder for this long are deleted.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);

/// Deletes abandoned Leases, a few at a time. It is no error if others do so first.
pub(super) async fn sweep(engine: &Kubernetes, leases: &[Lease]) -> Result<(), Error> {
    const AT_ONCE: usize = 16;
    let day = i64::try_from(ABANDONED.as_micros()).unwrap_or(i64::MAX);
    let before = engine.client.clock.now() - day;
    let ours = leases
        .iter()
        .filter(|lease| engine.keys.includes(&lease.metadata.name) && lease.is_abandoned(before));
    for lease in ours.take(AT_ONCE) {
        engine.client.delete(lease).await?;
    }
    Ok(())
}
