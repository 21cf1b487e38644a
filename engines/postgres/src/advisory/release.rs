//! `leave`, `amend` and `evict` for session locks.

use std::sync::Arc;
use std::time::Duration;

use super::super::error::failed;
use super::super::pooler::no_session_locks;
use super::claim::LocalClaim;
use super::registry::Registry;
use super::session::Verb;
use super::{inspect, owner_record};
use palisade_core::engine::{Amended, Amendment, Ask, ClaimId, Left, Place, Ticket};
use palisade_core::{Error, ErrorKind, Eviction, Name, Result};
use palisade_kit::timed;

pub(super) async fn leave(registry: &Arc<Registry>, ticket: &Ticket) -> Result<Left> {
    let local = registry.remove(ticket.claim, ticket.sequence);
    if ticket.in_doubt || (local.is_none() && ticket.sequence == 0) {
        registry.depart(ticket.claim);
    }
    let Some(local) = local else {
        return Ok(Left::Absent);
    };
    let session = match (local.place(), local.session()) {
        (Place::Waiting, _) => {
            stop_waiting(registry, &local).await;
            return Ok(Left::Done);
        }
        (Place::Gone, _) | (_, None) => return Ok(Left::Absent),
        (Place::Held { .. }, Some(session)) => session,
    };
    let unlocked = session.give(local.statement(Verb::Unlock), &local.key);
    match timed("leave", registry.timeout, unlocked).await? {
        Ok(Some(true)) => {
            registry.spare(Arc::clone(session));
            Ok(Left::Done)
        }
        // A session that did not have the lock is not reused.
        Ok(Some(false)) => Ok(Left::Absent),
        Ok(None) => Err(no_session_locks("leave")),
        // The session has ended, or ends with this connection, and that releases the lock.
        Err(error) => match failed("leave", &error) {
            ended if ended.is_transient() => Ok(Left::Absent),
            other => Err(other),
        },
    }
}

/// Asks the server to cancel the statement that waits, if there is one.
pub(super) async fn cancel(registry: &Registry, local: &LocalClaim) {
    if let Some(session) = local.session() {
        let cancelled = registry.server.cancel(&session.connection);
        // If this fails, the server will notice that the connection has ended.
        let _ = tokio::time::timeout(registry.timeout, cancelled).await;
    }
}

/// Cancels the statement that waits, and ends its session.
async fn stop_waiting(registry: &Registry, local: &LocalClaim) {
    if local.session().is_some() {
        cancel(registry, local).await;
        let ended = local.until(|place| place != Place::Waiting);
        let _ = tokio::time::timeout(Duration::from_millis(500), ended).await;
    }
    local.moved(Place::Gone);
}

pub(super) async fn amend(
    registry: &Registry,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    let local = registry.claim(ticket.claim).filter(|local| {
        let sequence = local.sequence();
        sequence != 0 && sequence == ticket.sequence && local.place() != Place::Gone
    });
    let Some((local, session)) = local.as_ref().and_then(|l| Some((l, l.session()?))) else {
        return Ok(Amended::Gone);
    };
    let asked = match amendment {
        Amendment::Value(value) => {
            local.state.lock().value = Some(value.clone());
            let recorded = owner_record::record(registry, local);
            timed("amend", registry.timeout, recorded).await??;
            return Ok(Amended::Done);
        }
        Amendment::Ask(ask) => *ask,
    };
    let now = local.state.lock().ask;
    let verb = match (now, asked) {
        (Ask::Whole, Ask::READ) => Verb::Downgrade,
        (Ask::READ, Ask::Whole) => Verb::Upgrade,
        (now, asked) if now == asked => return Ok(Amended::Done),
        _ => {
            let message = "session locks are exclusive or shared, and nothing else";
            return Err(Error::new(ErrorKind::Unsupported, "amend", message));
        }
    };
    let changed = timed("amend", registry.timeout, session.whether(verb, &local.key)).await?;
    match changed.map_err(|error| failed("amend", &error))? {
        Some(true) => {
            local.state.lock().ask = asked;
            Ok(Amended::Done)
        }
        Some(false) => Ok(Amended::Busy),
        None => Err(no_session_locks("amend")),
    }
}

/// Evicts a claim: one of this client directly, another by a notification to its session or by
/// ending that session.
pub(super) async fn evict(
    registry: &Registry,
    name: &Name,
    id: &str,
    eviction: Eviction,
) -> Result<bool> {
    let claim = id.parse::<ClaimId>().ok();
    if let Some(local) = claim.and_then(|claim| registry.claim(claim)) {
        if local.claim.name != *name {
            return Ok(false);
        }
        match eviction {
            Eviction::Mark => local.state.lock().evicted = true,
            Eviction::Remove => {
                registry.remove(local.claim.id, 0);
                take_away(registry, &local).await;
            }
        }
        registry.alarm(local.claim.id);
        return Ok(true);
    }
    let Some(pid) = inspect::process_of(registry, name, id, claim).await? else {
        return Ok(false);
    };
    let sql = match eviction {
        Eviction::Mark => format!("NOTIFY palisade_pid_{pid}, 'e{id}'"),
        Eviction::Remove => format!("SELECT pg_terminate_backend({pid})"),
    };
    let shared = registry.shared().await?;
    let asked = shared.connection.connection.here().batch_execute(&sql);
    registry
        .answer("evict", registry.timeout, &shared, asked)
        .await?;
    if eviction == Eviction::Remove {
        inspect::until_gone(registry, name, pid).await?;
    }
    Ok(true)
}

async fn take_away(registry: &Registry, local: &LocalClaim) {
    match (local.place(), local.session()) {
        (Place::Waiting, _) | (_, None) => stop_waiting(registry, local).await,
        (_, Some(session)) => {
            let unlocked = session.give(local.statement(Verb::Unlock), &local.key);
            let _ = timed("evict", registry.timeout, unlocked).await;
            local.moved(Place::Gone);
        }
    }
}
