//! Renews session locks: a heartbeat on the session of each holder, and a single query about all
//! sessions that wait.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;

use super::super::error::failed;
use super::super::pooler::no_session_locks;
use super::registry::Registry;
use super::session::Beat;
use palisade_core::engine::{Lease, LeaseStart, Place, Renewal};
use palisade_core::{BootTime, Error, ErrorKind, Result};
use palisade_kit::timed;

/// The sessions that were still waiting at the time `sent`.
struct Waiting {
    sent: BootTime,
    pids: Vec<i32>,
}

fn unknown(why: &str) -> Renewal {
    Renewal::Unknown(Error::new(ErrorKind::Unreachable, "renew", why))
}

pub(super) async fn renew(registry: &Registry, leases: &[Lease], within: Duration) -> Vec<Renewal> {
    let limit = within.min(registry.timeout);
    let waiting = timed("renew", limit, look_at_waiters(registry, leases, limit));
    let waiting = waiting.map(|waiting| Arc::new(waiting.flatten())).shared();
    let renewals = leases.iter();
    join_all(renewals.map(|lease| renew_one(registry, lease, waiting.clone(), limit))).await
}

/// Queries which waiting sessions still wait. It uses another session, because theirs are busy.
async fn look_at_waiters(
    registry: &Registry,
    leases: &[Lease],
    limit: Duration,
) -> Result<Waiting> {
    let sent = BootTime::now();
    let tickets = leases.iter().filter_map(|lease| lease.ticket.as_ref());
    let claims = tickets.filter_map(|ticket| registry.claim(ticket.claim));
    let pids: Vec<i32> = claims
        .filter(|local| local.place() == Place::Waiting)
        .filter_map(|local| Some(local.session()?.pid))
        .collect();
    if pids.is_empty() {
        return Ok(Waiting { sent, pids });
    }
    let shared = registry.shared().await?;
    let asked = shared.connection.waiting(&pids);
    let pids = registry.answer("renew", limit, &shared, asked).await?;
    Ok(Waiting { sent, pids })
}

async fn renew_one(
    registry: &Registry,
    lease: &Lease,
    waiting: impl Future<Output = Arc<Result<Waiting>>>,
    limit: Duration,
) -> Renewal {
    let local = lease.ticket.as_ref().and_then(|ticket| {
        let local = registry.claim(ticket.claim)?;
        let same = ticket.sequence == 0 || ticket.sequence == local.sequence();
        same.then_some(local)
    });
    let Some(local) = local else {
        return Renewal::Lost;
    };
    if local.state.lock().evicted {
        return Renewal::Evicted;
    }
    let (sent, ttl) = (BootTime::now(), local.claim.ttl);
    match (local.place(), local.session()) {
        (Place::Waiting, None) => {
            // It is not its turn yet, so it has no request at the server.
            local.want();
            local.state.lock().waited = sent;
            Renewal::Held(LeaseStart { sent, ttl })
        }
        (Place::Gone, _) | (_, None) => Renewal::Lost,
        (Place::Waiting, Some(session)) => {
            local.want();
            match &*waiting.await {
                Ok(Waiting { sent, pids }) if pids.contains(&session.pid) => {
                    let sent = *sent;
                    local.state.lock().waited = sent;
                    Renewal::Held(LeaseStart { sent, ttl })
                }
                // It is being granted, or its statement has not begun yet; the next renewal knows
                // more.
                Ok(_) => unknown("the reply to the lock request is in flight"),
                Err(error) => unknown(error.message()),
            }
        }
        (Place::Held { .. }, Some(session)) => match timed("renew", limit, session.beat()).await {
            Ok(Ok(Beat::Alive)) => Renewal::Held(LeaseStart { sent, ttl }),
            Ok(Ok(Beat::Moved)) => Renewal::Revoked(Error::new(
                ErrorKind::Lost,
                "renew",
                "the server has become a standby or is on another timeline; session locks do not survive that",
            )),
            Ok(Ok(Beat::Away)) => Renewal::Revoked(no_session_locks("renew")),
            Ok(Err(_)) if session.is_over() => Renewal::Lost,
            Ok(Err(error)) => Renewal::Unknown(failed("renew", &error)),
            Err(late) => Renewal::Unknown(late),
        },
    }
}
