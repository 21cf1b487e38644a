//! `leave`, `amend`, `evict` and `resize`.

use super::FileEngine;
use super::boot::LEASES;
use super::error::{busy, file_failed};
use super::leases;
use super::line_file::Missing::IsEmpty;
use super::liveness::{Hint, file_name};
use super::tx::{self, Suspects};
use palisade_core::engine::{Amended, Amendment, ClaimId, Left, Ticket};
use palisade_core::{BootTime, Eviction, Name, Result};

pub(super) async fn leave(engine: &FileEngine, ticket: &Ticket) -> Result<Left> {
    let (store, claim) = (&engine.store, ticket.claim);
    let mut tx = tx::begin(engine, "leave", &ticket.name, IsEmpty, engine.timeout).await?;
    let now = tx.now;
    let known = tx.state.line.seat(claim).is_some();
    let left = tx.state.line.remove(claim, ticket.sequence);
    // If the next in line can't be granted now, it will find out itself.
    let _ = tx.settle(Suspects::Nobody);
    tx.commit(Some(claim))?;
    if !known || ticket.in_doubt {
        store.left.lock().add(claim, now, engine.remembered);
    }
    let expires = left
        .as_ref()
        .map(|seat| store.leases.expires(claim).unwrap_or(seat.expires));
    if left.is_some() || !known {
        store.leases.forget(claim);
        if engine.by_lease {
            store.home().promised.left(claim);
        }
    }
    let lasted = expires.is_some_and(|expires| expires > now);
    Ok(Left::of(lasted))
}

pub(super) async fn amend(
    engine: &FileEngine,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    let claim = ticket.claim;
    let mut tx = tx::begin(engine, "amend", &ticket.name, IsEmpty, engine.timeout).await?;
    tx.settle(Suspects::Nobody)?;
    let amended = match amendment {
        Amendment::Ask(ask) => {
            let sequence = match ticket.sequence {
                0 => tx.state.line.seat(claim).map_or(0, |seat| seat.sequence),
                known => known,
            };
            let mut amended = tx.state.line.reweigh(claim, sequence, *ask);
            if amended == Amended::Busy {
                // Perhaps only claims of dead processes hold beside it.
                tx.settle(Suspects::Everyone)?;
                amended = tx.state.line.reweigh(claim, sequence, *ask);
            }
            tx.settle(Suspects::Nobody)?;
            amended
        }
        Amendment::Value(value) => match tx.state.line.incarnation_mut(claim, ticket.sequence) {
            Some(seat) => {
                seat.extra.set_value(value);
                tx.touched = true;
                Amended::Done
            }
            None => Amended::Gone,
        },
    };
    tx.commit(Some(claim)).map(|()| amended)
}

pub(super) async fn evict(
    engine: &FileEngine,
    name: &Name,
    id: &str,
    eviction: Eviction,
) -> Result<bool> {
    let Ok(id) = id.parse::<ClaimId>() else {
        return Ok(false);
    };
    let mut tx = tx::begin(engine, "evict", name, IsEmpty, engine.timeout).await?;
    tx.settle(Suspects::Everyone)?;
    let Some(seat) = tx.state.line.seat_mut(id) else {
        return tx.commit(None).map(|()| false);
    };
    seat.evicted = true;
    let (process, slot, expires) = (seat.extra.process, seat.extra.slot, seat.expires);
    let until = match eviction {
        Eviction::Mark => expires,
        Eviction::Remove => BootTime::PAST,
    };
    let home = engine.store.home();
    // Mark the lease before the line: if only one of the two is written, the claim still ends.
    let file = || home.dir.path.join(LEASES).join(file_name(process));
    match leases::mark(home, process, slot, id, until) {
        Ok(true) => {}
        Ok(false) => return Err(busy("evict", engine.timeout, &file())),
        Err(errno) => return Err(file_failed("evict", &file(), errno)),
    }
    match eviction {
        Eviction::Mark => tx.hint(process, Hint::Alarm(id)),
        Eviction::Remove => {
            tx.state.line.remove(id, 0);
            tx.settle(Suspects::Nobody)?;
        }
    }
    tx.commit(None).map(|()| true)
}

pub(super) async fn resize(engine: &FileEngine, name: &Name, capacity: u32) -> Result<bool> {
    let mut tx = tx::begin(engine, "resize", name, IsEmpty, engine.timeout).await?;
    tx.settle(Suspects::Everyone)?;
    let resized = tx.state.line.resize(capacity)?;
    tx.settle(Suspects::Nobody)?;
    tx.commit(None).map(|()| resized)
}
