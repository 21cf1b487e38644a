//! `enter` and `wait` for session locks.
//!
//! Invariant: a lease never counts from a later time than the server does. It counts from before
//! the lock was granted, or from before a heartbeat was sent. The server's idle timer starts at the
//! grant. A waiting claim is renewed as of a time at which the server reported that it still
//! waited.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;

use super::super::error::failed;
use super::super::pooler::no_session_locks;
use super::claim::{LocalClaim, statement};
use super::registry::Registry;
use super::release;
use super::session::{Beat, Taken, Verb};
use palisade_core::engine::{Claim, Entered, LeaseStart, Place, Ticket, look_by, sync};
use palisade_core::{BootTime, Error, Result};
use palisade_kit::timed;

/// How long one reply of the server proves to all waiters that it is alive.
const ANSWERED: Duration = Duration::from_secs(1);

/// The pause before another attempt to get a session for a claim whose turn it is.
const RETRY: Duration = Duration::from_millis(100);

pub(super) async fn enter(registry: &Arc<Registry>, claim: &Arc<Claim>) -> Result<Entered> {
    if registry.has_departed(claim.id) {
        return Ok(Entered::Busy);
    }
    if let Some(local) = registry.claim(claim.id) {
        return enter_again(&local).await;
    }
    let key = registry.keys.of(&claim.name)?;
    let permit = registry.permit().await?;
    // If this future is dropped at any await below, the session is dropped, which releases the
    // lock.
    let session = registry.session().await?;
    let sent = BootTime::now();
    let taken = session.take(statement(Verb::Try, claim.ask), &key, claim.ttl);
    let taken = timed("enter", registry.timeout, taken).await?;
    let place = match taken.map_err(|error| failed("enter", &error))? {
        Taken::Token(sequence) => Place::Held { sequence },
        Taken::Busy if claim.queue => Place::Waiting,
        Taken::Busy => {
            registry.spare(session);
            return Ok(Entered::Busy);
        }
        Taken::Away => return Err(no_session_locks("enter")),
    };
    let local = LocalClaim::new(Arc::clone(claim), key, place, sent);
    if place == Place::Waiting {
        registry.insert(Arc::clone(&local));
        let turn = registry.turn(&local.key).try_lock_owned().ok();
        if turn.is_some() {
            local.settle(session, permit);
        } else {
            // Another claim of this client waits at the server already.
            registry.spare(session);
        }
        queue(registry, &local, turn);
    } else {
        local.settle(session, permit);
        registry.insert(Arc::clone(&local));
        registry.note(&local);
    }
    Ok(entered(&local, place, sent))
}

/// The answer to a repeated enter. A hold's lease is restarted by a heartbeat.
async fn enter_again(local: &LocalClaim) -> Result<Entered> {
    let (place, sent) = (local.place(), BootTime::now());
    match (place, local.session()) {
        (Place::Waiting, _) => {
            let waited = local.state.lock().waited;
            Ok(entered(local, place, waited))
        }
        (Place::Gone, _) | (_, None) => Ok(Entered::Busy),
        (Place::Held { .. }, Some(session)) => {
            let beat = timed("enter", local.claim.ttl, session.beat()).await?;
            match beat.map_err(|error| failed("enter", &error))? {
                Beat::Alive => Ok(entered(local, place, sent)),
                Beat::Moved | Beat::Away => Ok(Entered::Busy),
            }
        }
    }
}

fn entered(local: &LocalClaim, place: Place, sent: BootTime) -> Entered {
    Entered::In {
        ticket: Ticket {
            sequence: local.sequence(),
            ..Ticket::own(local.claim.name.clone(), local.claim.id)
        },
        armed: LeaseStart {
            sent,
            ttl: local.claim.ttl,
        },
        place,
    }
}

/// Waits for the lock on the claim's session, in a task of the caller's runtime. If that runtime is
/// blocked or ends, so does the wait, after the ttl.
fn queue(registry: &Arc<Registry>, local: &Arc<LocalClaim>, turn: Option<OwnedMutexGuard<()>>) {
    let (registry, local) = (Arc::clone(registry), Arc::clone(local));
    tokio::spawn(async move {
        let place = tokio::select! {
            taken = block(&registry, &local, turn) => match taken {
                Some(sequence) => Place::Held { sequence },
                None => Place::Gone,
            },
            () = local.until(|place| place == Place::Gone) => Place::Gone,
            () = local.outlived() => {
                release::cancel(&registry, &local).await;
                Place::Gone
            }
        };
        local.moved(place);
        if place == Place::Gone {
            registry.remove(local.claim.id, 0);
            registry.alarm(local.claim.id);
        } else {
            registry.note(&local);
        }
    });
}

/// Waits for the claim's turn among those of this client, then for the lock.
async fn block(
    registry: &Registry,
    local: &LocalClaim,
    turn: Option<OwnedMutexGuard<()>>,
) -> Option<u64> {
    let _turn = match turn {
        Some(turn) => turn,
        None => registry.turn(&local.key).lock_owned().await,
    };
    while local.session().is_none() {
        let connected = async { Ok((registry.permit().await?, registry.session().await?)) };
        match connected.await {
            Ok((permit, session)) => local.settle(session, permit),
            // The claim keeps its place, and `wait` reports the error when it pings.
            Err::<_, Error>(error) if error.is_transient() => tokio::time::sleep(RETRY).await,
            Err(_) => return None,
        }
    }
    let taking = statement(Verb::Block, local.claim.ask);
    match local
        .session()?
        .take(taking, &local.key, local.claim.ttl)
        .await
    {
        Ok(Taken::Token(sequence)) => Some(sequence),
        _ => None,
    }
}

pub(super) async fn wait(
    registry: &Arc<Registry>,
    ticket: &Ticket,
    until: BootTime,
) -> Result<Place> {
    let Some(local) = registry.claim(ticket.claim) else {
        return Ok(Place::Gone);
    };
    if local.place() != Place::Waiting || until.has_passed() {
        return Ok(local.place());
    }
    tokio::select! {
        () = local.until(|place| place != Place::Waiting) => {}
        () = sync::sleep_until(look_by(until)) => {}
    }
    if local.place() == Place::Waiting {
        ping(registry).await?;
    }
    Ok(local.place())
}

/// Whether the server answers at all, which a session that waits for a lock can't tell. One recent
/// reply serves all waiters; without one, each of them asks concurrently.
async fn ping(registry: &Registry) -> Result<()> {
    let answered = *registry.answered.lock();
    if !(answered + ANSWERED).has_passed() {
        return Ok(());
    }
    let sent = BootTime::now();
    let shared = registry.shared().await?;
    let beat = shared.connection.beat();
    registry
        .answer("wait", registry.timeout, &shared, beat)
        .await?;
    let mut answered = registry.answered.lock();
    *answered = sent.max(*answered);
    Ok(())
}
