//! `enter` and `wait`.

use std::sync::Arc;

use super::FileEngine;
use super::error::file_failed;
use super::leases::Mine;
use super::line_file::{Extra, Missing};
use super::notify::Sleeper;
use super::presence::Seen;
use super::tx::{self, Sleep, Suspects};
use palisade_core::engine::{Claim, Entered, LeaseStart, Place, Seat, Ticket};
use palisade_core::{BootTime, Outcome, Result};

pub(super) async fn enter(engine: &FileEngine, claim: &Claim) -> Result<Entered> {
    let store = &engine.store;
    if !engine.by_lease {
        return take_place(engine, claim).await;
    }
    let home = store.home();
    let promised = &home.promised;
    if promised.raise(home, store.process(), claim.id, claim.ttl)? {
        store.lower_in_time();
    }
    let entered = take_place(engine, claim).await;
    let not_taken = match &entered {
        Ok(Entered::Busy) => true,
        Ok(Entered::In { .. }) => false,
        Err(error) => error.outcome() == Outcome::NotApplied,
    };
    if not_taken {
        promised.left(claim.id);
    }
    entered
}

async fn take_place(engine: &FileEngine, claim: &Claim) -> Result<Entered> {
    let store = &*engine.store;
    let sent = BootTime::now();
    if store.left.lock().has(claim.id, sent) {
        return Ok(Entered::Busy);
    }
    let (name, timeout) = (&claim.name, engine.timeout);
    let mut tx = tx::begin(engine, "enter", name, Missing::Make, timeout).await?;
    let known = tx.state.line.seat(claim.id).is_some_and(|seat| {
        // It may have been renewed since the line was written.
        let renewed = store.leases.expires(claim.id);
        seat.expires.max(renewed.unwrap_or(BootTime::PAST)) > tx.now
    });
    if known {
        // A claim that has a place already does not care whether others can be granted.
        let _ = tx.settle(Suspects::Before(claim.id));
    } else {
        tx.state.line.remove(claim.id, 0);
        let value = serde_json::to_string(&claim.value).unwrap_or_default();
        let expires = tx.now + claim.ttl;
        let seat = Seat {
            id: claim.id,
            ask: claim.ask,
            sequence: 0,
            expires,
            ttl: claim.ttl,
            evicted: false,
            extra: Extra {
                process: store.process(),
                slot: 0,
                until: expires,
                orphan: false,
                by_lease: engine.by_lease,
                who: format!("{}\t{value}", claim.owner.to_json()).into(),
                text: None,
            },
        };
        if let Err(error) = tx.state.line.push(seat.clone()) {
            // Only claims of live processes may determine the capacity of a line.
            tx.settle(Suspects::Everyone)?;
            tx.state.line.push(seat).map_err(|_| error)?;
        }
        tx.settle(Suspects::Before(claim.id))?;
    }
    // The commit is one change.
    let changes = tx.state.changes() + 1;
    let seat = tx.state.line.seat_mut(claim.id);
    let seat = seat.filter(|seat| seat.is_held() || claim.queue || known);
    let (Some(seat), Some(file)) = (seat, &tx.file) else {
        tx.state.line.remove(claim.id, 0);
        let unseen = tx.unseen();
        tx.commit(Some(claim.id))?;
        return unseen.map_or(Ok(Entered::Busy), Err);
    };
    if !known {
        let mine = Mine {
            file: Arc::clone(&file.name),
            inode: file.identity.1,
            slot: 0,
            expires: seat.expires,
            ttl: seat.ttl,
            sequence: seat.sequence,
            seen: Seen::after(changes),
        };
        let slot = store.leases.add(claim.id, mine);
        seat.extra.slot =
            slot.map_err(|errno| file_failed("enter", &store.leases.path(), errno))?;
    }
    // When it was last renewed, if it was known.
    let ttl = u64::try_from(seat.ttl.as_nanos()).unwrap_or(u64::MAX);
    let armed = BootTime::from_nanos(seat.expires.as_nanos().saturating_sub(ttl));
    let entered = Entered::In {
        ticket: Ticket {
            sequence: seat.sequence,
            ..Ticket::own(claim.name.clone(), claim.id)
        },
        armed: LeaseStart {
            sent: if known { armed } else { sent },
            ttl: seat.ttl,
        },
        place: seat.place(),
    };
    let written = tx.commit(Some(claim.id));
    if written.is_err() && !known {
        store.leases.forget(claim.id);
    }
    written.map(|()| entered)
}

pub(super) async fn wait(engine: &FileEngine, ticket: &Ticket, until: BootTime) -> Result<Place> {
    let (store, claim) = (&engine.store, ticket.claim);
    // Registered before the first read, so that no hint in between is missed.
    let sleeper = store.watcher.sleeper(claim.0);
    loop {
        let (place, sleep, unseen) = {
            let looked = tx::look(engine, "wait", &ticket.name, Suspects::Before(claim)).await?;
            let line = &looked.state().line;
            let seat = line.seat(claim);
            let place = seat.map_or(Place::Gone, Seat::place);
            let sleep = Sleep::on(line.blockers(claim).into_iter().chain(seat));
            let unseen = looked.unseen();
            looked.done(Some(claim))?;
            (place, sleep, unseen)
        };
        if let Place::Held { sequence } = place {
            store.leases.granted(claim, sequence);
        }
        // The caller tries again, and can say what is wrong.
        if let (Place::Waiting, Some(unseen)) = (place, unseen) {
            return Err(unseen);
        }
        if place != Place::Waiting || until.has_passed() {
            return Ok(place);
        }
        sleep_on(&sleeper, &sleep, until).await;
    }
}

/// Sleeps until a hint arrives, a process that matters dies, a lease that matters ends, or `until`.
pub(super) async fn sleep_on(sleeper: &Sleeper, sleep: &Sleep, until: BootTime) {
    sleeper.mind(&sleep.processes);
    let longest = until.min(sleep.earliest).remaining();
    // Timers have millisecond resolution and may fire early by a fraction of one.
    let _ = tokio::time::timeout(longest, sleeper.woken()).await;
}
