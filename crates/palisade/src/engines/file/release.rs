//! `leave`, `amend`, `evict` and `resize`.

use std::sync::Arc;
use std::time::Duration;

use super::boot::LEASES;
use super::error::busy;
use super::leases;
use super::liveness::{Hint, file_name};
use super::store::{LineName, Missing, Store};
use super::tx::Tx;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::engine::{Amended, Amendment, Eviction, Left};
use crate::core::error::Result;
use crate::core::ticket::Ticket;

pub(super) async fn leave(
    store: Arc<Store>,
    line: LineName,
    ticket: Ticket,
    remembered: Duration,
    timeout: Duration,
) -> Result<Left> {
    let change = |tx: &mut Tx<'_>, _: Option<&_>| {
        let known = tx.state.line.seat(ticket.claim).is_some();
        let left = tx.state.line.remove(ticket.claim, ticket.sequence);
        // Whether the next in line can be granted is the next one's business.
        let _ = tx.settle();
        Ok((known, left, tx.now))
    };
    let found = (&line, Missing::IsEmpty);
    let done = store.change("leave", timeout, found, Some(ticket.claim), change);
    let (known, left, now) = done.await?;
    if !known || ticket.in_doubt {
        store.remember_left(ticket.claim, remembered);
    }
    let lasts = |seat: &crate::core::line::Seat<_>| {
        store.leases.expires(ticket.claim).unwrap_or(seat.expires) > now
    };
    let answer = match left.as_ref().is_some_and(lasts) {
        true => Left::Done,
        false => Left::Absent,
    };
    if left.is_some() || !known {
        store.leases.forget(ticket.claim);
    }
    Ok(answer)
}

pub(super) async fn amend(
    store: Arc<Store>,
    line: LineName,
    ticket: Ticket,
    amendment: Amendment,
    timeout: Duration,
) -> Result<Amended> {
    let change = |tx: &mut Tx<'_>, _: Option<&_>| {
        tx.settle()?;
        let sequence = match ticket.sequence {
            0 => tx.state.line.seat(ticket.claim).map_or(0, |s| s.sequence),
            known => known,
        };
        match &amendment {
            Amendment::Ask(ask) => {
                let mut amended = tx.state.line.reweigh(ticket.claim, sequence, *ask);
                if amended == Amended::Busy {
                    // Perhaps only the dead hold beside it.
                    tx.settle_all()?;
                    amended = tx.state.line.reweigh(ticket.claim, sequence, *ask);
                }
                tx.settle()?;
                Ok(amended)
            }
            Amendment::Value(value) => {
                match tx.state.line.incarnation_mut(ticket.claim, ticket.sequence) {
                    Some(seat) => {
                        seat.extra.set_value(value);
                        tx.touched = true;
                        Ok(Amended::Done)
                    }
                    None => Ok(Amended::Gone),
                }
            }
        }
    };
    let found = (&line, Missing::IsEmpty);
    store
        .change("amend", timeout, found, Some(ticket.claim), change)
        .await
}

pub(super) async fn evict(
    store: Arc<Store>,
    line: LineName,
    id: ClaimId,
    eviction: Eviction,
    timeout: Duration,
) -> Result<bool> {
    let change = |tx: &mut Tx<'_>, _: Option<&_>| {
        tx.settle_all()?;
        let Some(seat) = tx.state.line.seat_mut(id) else {
            return Ok(false);
        };
        seat.evicted = true;
        let (process, slot, expires) = (seat.extra.process, seat.extra.slot, seat.expires);
        let until = match eviction {
            Eviction::Mark => expires,
            Eviction::Remove => BootTime::PAST,
        };
        // Before the line says so: whoever finds one without the other ends it all the same.
        if !leases::mark(store.home(), process, slot, id, until) {
            let home = store.home();
            let file = home.dir.path.join(LEASES).join(file_name(process));
            return Err(busy("evict", timeout, &file));
        }
        match eviction {
            Eviction::Mark => tx.hint(process, Hint::Alarm(id)),
            Eviction::Remove => {
                tx.state.line.remove(id, 0);
                tx.settle()?;
            }
        }
        Ok(true)
    };
    let found = (&line, Missing::IsEmpty);
    store.change("evict", timeout, found, None, change).await
}

pub(super) async fn resize(
    store: Arc<Store>,
    line: LineName,
    capacity: u32,
    timeout: Duration,
) -> Result<bool> {
    let change = |tx: &mut Tx<'_>, _: Option<&_>| {
        tx.settle_all()?;
        let resized = tx.state.line.resize(capacity)?;
        tx.settle()?;
        Ok(resized)
    };
    let found = (&line, Missing::IsEmpty);
    store.change("resize", timeout, found, None, change).await
}
