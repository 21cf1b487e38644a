//! `enter` and `wait`.

use std::sync::Arc;
use std::time::Duration;

use super::error::file_failed;
use super::leases::Mine;
use super::line_file::{Extra, LineFile};
use super::notify::Sleeper;
use super::store::{LineName, Missing, Store};
use super::tx::{Sleep, Tx};
use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::engine::{Entered, Place};
use crate::core::error::Result;
use crate::core::line::Seat;
use crate::core::ticket::{LeaseStart, Ticket};

pub(super) async fn enter(
    store: Arc<Store>,
    line: LineName,
    claim: Arc<Claim>,
    by_lease: bool,
    timeout: Duration,
) -> Result<Entered> {
    if by_lease {
        store.home().promised.raise(&store.home().dir, claim.ttl)?;
    }
    let sent = BootTime::now();
    if store.was_left(claim.id) {
        return Ok(Entered::Busy);
    }
    let process = store.process();
    let mut slot = None;
    let change = |tx: &mut Tx<'_>, file: Option<&LineFile>| {
        let known = tx.state.line.seat(claim.id).is_some_and(|seat| {
            // What the line says may have been renewed since.
            let renewed = store.leases.expires(claim.id);
            seat.expires.max(renewed.unwrap_or(BootTime::PAST)) > tx.now
        });
        if !known {
            tx.state.line.remove(claim.id, 0);
            let reserved = store.leases.reserve(tx.now + claim.ttl);
            let reserved =
                reserved.map_err(|errno| file_failed("enter", &store.leases.path(), errno))?;
            slot = Some(reserved);
            push(tx, &claim, by_lease, process, reserved)?;
        }
        let settled = tx.settle_before(claim.id);
        if !known {
            settled?;
        }
        let seat = tx.state.line.seat(claim.id);
        if !seat.is_some_and(|seat| seat.is_held() || claim.queue || known) {
            tx.state.line.remove(claim.id, 0);
            return Ok((Entered::Busy, None));
        }
        let (Some(seat), Some(file)) = (tx.state.line.seat(claim.id), file) else {
            return Ok((Entered::Busy, None));
        };
        let armed = LeaseStart {
            sent: if known { armed_at(seat) } else { sent },
            ttl: seat.ttl,
        };
        let ticket = Ticket {
            sequence: seat.sequence,
            ..Ticket::own(claim.name.clone(), claim.id)
        };
        let place = seat.place();
        let entered = Entered::In {
            ticket,
            armed,
            place,
        };
        let mine = slot.map(|slot| Mine {
            file: Arc::clone(&file.name),
            inode: file.identity.1,
            slot,
            expires: seat.expires,
            ttl: seat.ttl,
            sequence: seat.sequence,
        });
        Ok((entered, mine))
    };
    let made = (&line, Missing::Make);
    let done = store.change("enter", timeout, made, Some(claim.id), change);
    match (done.await, slot) {
        (Ok((entered, Some(mine))), _) => {
            store.leases.remember(claim.id, mine);
            Ok(entered)
        }
        (done, slot) => {
            slot.inspect(|slot| store.leases.give_back(*slot));
            done.map(|(entered, _)| entered)
        }
    }
}

/// Takes the last place in the line.
fn push(tx: &mut Tx<'_>, claim: &Claim, by_lease: bool, process: u64, slot: u32) -> Result<()> {
    let seat = Seat {
        id: claim.id,
        ask: claim.ask,
        sequence: 0,
        expires: tx.now + claim.ttl,
        ttl: claim.ttl,
        evicted: false,
        extra: Extra::new(claim, by_lease, process, slot),
    };
    if let Err(error) = tx.state.line.push(seat.clone()) {
        // Only the living may keep a line at their capacity.
        tx.settle_all()?;
        tx.state.line.push(seat).map_err(|_| error)?;
    }
    Ok(())
}

/// When a seat was last armed.
fn armed_at(seat: &Seat<Extra>) -> BootTime {
    let ttl = u64::try_from(seat.ttl.as_nanos()).unwrap_or(u64::MAX);
    BootTime::from_nanos(seat.expires.as_nanos().saturating_sub(ttl))
}

pub(super) async fn wait(
    store: Arc<Store>,
    line: LineName,
    ticket: Ticket,
    until: BootTime,
    timeout: Duration,
) -> Result<Place> {
    // Before the first look, so that no hint is missed between the two.
    let sleeper = store.watcher.sleeper(ticket.claim.0);
    loop {
        let (place, sleep) = look(&store, &line, &ticket, timeout).await?;
        if let Place::Held { sequence } = place {
            store.leases.granted(ticket.claim, sequence);
        }
        if place != Place::Waiting || until.has_passed() {
            return Ok(place);
        }
        sleep_on(&sleeper, &sleep, until).await;
    }
}

/// Where a ticket stands, and what to sleep on if it waits.
async fn look(
    store: &Store,
    line: &LineName,
    ticket: &Ticket,
    timeout: Duration,
) -> Result<(Place, Sleep)> {
    let found = (line, Missing::IsEmpty);
    let look = |tx: &mut Tx<'_>, _: Option<&_>| {
        tx.settle_before(ticket.claim)?;
        let line = &tx.state.line;
        let seat = line.seat(ticket.claim);
        let place = seat.map_or(Place::Gone, Seat::place);
        let blockers = line.blockers(ticket.claim).into_iter();
        Ok((place, Sleep::on(blockers.chain(seat))))
    };
    store
        .change("wait", timeout, found, Some(ticket.claim), look)
        .await
}

/// Sleeps until a hint comes, a process that matters dies, a lease that matters ends, or `until`.
pub(super) async fn sleep_on(sleeper: &Sleeper, sleep: &Sleep, until: BootTime) {
    sleeper.mind(&sleep.processes);
    let longest = until.min(sleep.earliest).remaining();
    // Timers are a millisecond coarse and may be early by the rest of it.
    let _ = tokio::time::timeout(longest, sleeper.rung()).await;
}
