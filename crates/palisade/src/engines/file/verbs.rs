//! The engine's verbs as operations on a transaction: load the line, change it, settle, save.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::fault::Fault;
use super::liveness::Hint;
use super::record::{self, Extra};
use super::tx::{Loaded, Tx};
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::engine::{Amended, Amendment, Entered, Eviction, Left, Place, Renewal};
use crate::core::line::Seat;
use crate::core::report::{LineReport, Scope};
use crate::core::ticket::{Armed, Lease, Ticket};

type Result<T> = std::result::Result<T, Fault>;

/// What sleepers wait for besides a hint.
pub(super) struct Sleep {
    /// The processes whose death may change the place.
    pub(super) processes: Vec<u64>,
    /// When the first lease that matters ends.
    pub(super) earliest: BootTime,
}

impl Sleep {
    fn on<'a>(seats: impl Iterator<Item = &'a Seat<Extra>>) -> Self {
        let mut sleep = Self {
            processes: Vec::new(),
            earliest: BootTime::NEVER,
        };
        for seat in seats {
            sleep.earliest = sleep.earliest.min(seat.expires);
            if !sleep.processes.contains(&seat.extra.process) {
                sleep.processes.push(seat.extra.process);
            }
        }
        sleep
    }
}

fn ticket(claim: &Claim, seat: &Seat<Extra>) -> Ticket {
    Ticket {
        counted: seat.counted,
        ..Ticket::own(claim.name.clone(), claim.id)
    }
}

pub(super) fn enter(
    tx: &mut Tx<'_>,
    namespace: &str,
    claim: &Arc<Claim>,
    sent: BootTime,
) -> Result<Entered> {
    if tx.was_left(claim.id)? {
        return Ok(Entered::Busy);
    }
    let mut loaded = tx.load(namespace, claim.name.as_str())?;
    let now = tx.now;
    let known = loaded.line.seat(claim.id);
    if known.is_none_or(|seat| seat.expires <= now) {
        let seat = loaded.new_seat(claim, tx.process(), now);
        loaded.line.seats.retain(|seat| seat.expires > now);
        if let Err(error) = loaded.push(seat.clone()) {
            // Only the living may keep a line at their capacity.
            tx.settle_all(&mut loaded);
            loaded.push(seat).map_err(|_| error)?;
        }
    }
    tx.settle_before(&mut loaded, claim.id);
    let Some(seat) = loaded.line.seat(claim.id) else {
        // It could only have been removed as expired, with no ttl at all.
        return Ok(Entered::Busy);
    };
    let new = seat.extra.saved.is_none();
    if new && !seat.is_held() && !claim.queue {
        loaded.line.remove(claim.id, 0);
        tx.save(&loaded, Some(claim.id), None)?;
        return Ok(Entered::Busy);
    }
    let armed = Armed {
        sent: match new {
            true => sent,
            false => armed_at(seat),
        },
        ttl: seat.ttl,
    };
    let entered = Entered::In {
        ticket: ticket(claim, seat),
        armed,
        place: seat.place(),
    };
    tx.save(&loaded, Some(claim.id), Some(claim))?;
    Ok(entered)
}

/// When a seat was last armed.
fn armed_at(seat: &Seat<Extra>) -> BootTime {
    let ttl = u64::try_from(seat.ttl.as_nanos()).unwrap_or(u64::MAX);
    BootTime::from_nanos(seat.expires.as_nanos().saturating_sub(ttl))
}

/// Where a ticket stands, and what to sleep on if it waits.
pub(super) fn look(tx: &mut Tx<'_>, namespace: &str, ticket: &Ticket) -> Result<(Place, Sleep)> {
    let mut loaded = tx.load(namespace, ticket.name.as_str())?;
    tx.settle_before(&mut loaded, ticket.claim);
    tx.save(&loaded, Some(ticket.claim), None)?;
    let seat = loaded.line.seat(ticket.claim);
    let place = seat.map_or(Place::Gone, Seat::place);
    let own = seat.into_iter();
    let blockers = loaded.line.blockers(ticket.claim);
    Ok((place, Sleep::on(blockers.into_iter().chain(own))))
}

/// The seat of a ticket, if it is the same incarnation.
fn same<'a>(loaded: &'a mut Loaded, ticket: &Ticket) -> Option<&'a mut Seat<Extra>> {
    loaded.line.incarnation_mut(ticket.claim, ticket.counted)
}

pub(super) fn renew(
    tx: &mut Tx<'_>,
    namespace: &str,
    leases: &[Lease],
    sent: BootTime,
) -> Result<Vec<Renewal>> {
    let mut renewals = Vec::with_capacity(leases.len());
    for lease in leases {
        let Some(ticket) = &lease.ticket else {
            // Tickets of this engine have their own leases: there is no such lease.
            renewals.push(Renewal::Lost);
            continue;
        };
        let mut loaded = tx.load(namespace, ticket.name.as_str())?;
        tx.settle(&mut loaded);
        let now = tx.now;
        renewals.push(match same(&mut loaded, ticket) {
            None => Renewal::Lost,
            Some(seat) if seat.evicted => Renewal::Evicted,
            Some(seat) => {
                seat.expires = now + seat.ttl;
                Renewal::Held(Armed {
                    sent,
                    ttl: seat.ttl,
                })
            }
        });
        tx.save(&loaded, Some(ticket.claim), None)?;
    }
    Ok(renewals)
}

pub(super) fn amend(
    tx: &mut Tx<'_>,
    namespace: &str,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    let mut loaded = tx.load(namespace, ticket.name.as_str())?;
    tx.settle(&mut loaded);
    let amended = match amendment {
        Amendment::Ask(ask) => {
            let counted = match ticket.counted {
                0 => loaded.line.seat(ticket.claim).map_or(0, |s| s.counted),
                known => known,
            };
            let mut amended = loaded.line.reweigh(ticket.claim, counted, *ask);
            if amended == Amended::Busy {
                // Perhaps only the dead hold beside it.
                tx.settle_all(&mut loaded);
                amended = loaded.line.reweigh(ticket.claim, counted, *ask);
            }
            tx.settle(&mut loaded);
            amended
        }
        Amendment::Value(_) => match same(&mut loaded, ticket) {
            Some(_) => Amended::Done,
            None => Amended::Gone,
        },
    };
    tx.save(&loaded, Some(ticket.claim), None)?;
    if let (Amendment::Value(value), Amended::Done) = (amendment, amended)
        && let Some(seat) = loaded.line.seat(ticket.claim)
    {
        tx.set_value(&loaded, seat, value)?;
    }
    Ok(amended)
}

pub(super) fn leave(
    tx: &mut Tx<'_>,
    namespace: &str,
    ticket: &Ticket,
    remembered: Duration,
) -> Result<Left> {
    let mut loaded = tx.load(namespace, ticket.name.as_str())?;
    let known = loaded.line.seat(ticket.claim).is_some();
    let left = match loaded.line.remove(ticket.claim, ticket.counted) {
        Some(seat) if seat.expires > tx.now => Left::Done,
        _ => Left::Absent,
    };
    tx.settle(&mut loaded);
    tx.save(&loaded, Some(ticket.claim), None)?;
    if !known || ticket.in_doubt {
        tx.bury_claim(ticket.claim, tx.now + remembered)?;
    }
    Ok(left)
}

pub(super) fn evict(
    tx: &mut Tx<'_>,
    namespace: &str,
    name: &str,
    id: ClaimId,
    eviction: Eviction,
) -> Result<bool> {
    let mut loaded = tx.load(namespace, name)?;
    tx.settle_all(&mut loaded);
    let found = loaded.line.seat_mut(id).map(|seat| {
        seat.evicted = true;
        seat.extra.process
    });
    if found.is_some() && eviction == Eviction::Remove {
        loaded.line.remove(id, 0);
        tx.settle(&mut loaded);
    }
    tx.save(&loaded, None, None)?;
    if let (Some(process), Eviction::Mark) = (found, eviction) {
        tx.hint(process, Hint::Alarm(id));
    }
    Ok(found.is_some())
}

/// The lines in a scope, and what a watch of it sleeps on.
pub(super) fn survey(
    tx: &mut Tx<'_>,
    namespace: &str,
    scope: &Scope,
) -> Result<(Vec<LineReport>, Sleep)> {
    let names = match scope {
        Scope::Prefix(prefix) => tx.names(namespace, prefix)?,
        Scope::Line(name) => vec![name.as_str().to_owned()],
    };
    let mut reports = Vec::new();
    let mut seats = Vec::new();
    for name in names {
        let mut loaded = tx.load(namespace, &name)?;
        tx.settle_all(&mut loaded);
        tx.save(&loaded, None, None)?;
        if loaded.line.seats.is_empty() {
            continue;
        }
        let mut who = HashMap::new();
        for seat in &loaded.line.seats {
            let rest = record::read_rest(&tx.record_of(&loaded, seat)?);
            who.insert(seat.extra.seq, rest);
        }
        let now = tx.now;
        reports.push(loaded.line.report(&name, now, |extra| {
            who.remove(&extra.seq).unwrap_or_default()
        }));
        seats.append(&mut loaded.line.seats);
    }
    Ok((reports, Sleep::on(seats.iter())))
}
