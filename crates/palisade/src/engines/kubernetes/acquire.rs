//! `enter` and `wait`: a claim reads its Lease, decides, and takes its place with one conditional
//! write.
//!
//! A Lease is created free and then taken, so that the acquiring write always has a resourceVersion
//! to be conditional on, and that is the token. If the outcome of a write is unknown, a read looks
//! for the claim's id and the time stamp of the write. A waiting claim has nothing in the store. It
//! sleeps until a watch event, a local change, or the end of a holder's lease by our own clock.

use std::sync::Arc;
use std::time::Duration;

use super::Kubernetes;
use super::client::Written;
use super::lease::{Decision, Lease};
use super::lines::{Line, Member, Snapshot, Stage, Waits};
use super::notify;
use super::release;
use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::engine::{Entered, Place};
use crate::core::error::{Error, ErrorKind, Outcome, Result, unreachable};
use crate::core::ticket::{LeaseStart, Ticket};
use crate::core::wait::look_by;
use crate::engines::kit::cas::Retry;
use crate::engines::kit::finish::finish;

/// How old a read may be that several waiters share, in nanoseconds.
const SHARED_READ: u64 = 100_000_000;

/// How long a holder is observed at a time, and how soon a line that others change is tried again.
const LOOK: Duration = Duration::from_secs(1);

/// The result of an attempt.
enum Tried {
    Held(u64, LeaseStart),
    /// Others hold, as in [`Decision::Behind`].
    Behind(BootTime, bool),
    /// It was left meanwhile.
    Left,
}

pub(super) async fn enter(engine: &Arc<Kubernetes>, claim: &Arc<Claim>) -> Result<Entered> {
    let line = engine.lines.get(&engine.keys.lease(&claim.name)?);
    let members = &engine.members;
    let known = members.settled(claim.id, engine.client.timeout).await;
    let Some(member) = members.join(claim) else {
        return Ok(Entered::Busy);
    };
    let mut tried = attempt(engine, &line, &member, BootTime::now()).await;
    // A holder that is overdue by its own record is observed until it has expired by our clock.
    // Otherwise a caller that never waits would find the line busy for ever.
    while let Ok(Tried::Behind(until, true)) = tried
        && !claim.queue
        && !member.waits
    {
        let look = until.min(BootTime::now() + LOOK);
        tokio::time::sleep_until(look.to_instant().into()).await;
        tried = attempt(engine, &line, &member, BootTime::now()).await;
    }
    match tried {
        Ok(Tried::Held(sequence, armed)) => Ok(held(&member, sequence, armed)),
        Ok(Tried::Behind(..)) if claim.queue || member.waits => {
            members.change(claim.id, |member| member.waits = true);
            notify::listen(engine, &line);
            Ok(Entered::In {
                ticket: member.ticket(),
                armed: members.get(claim.id).unwrap_or(member).armed,
                place: Place::Waiting,
            })
        }
        Ok(Tried::Behind(..)) => {
            members.forget(claim.id);
            Ok(Entered::Busy)
        }
        Ok(Tried::Left) => Ok(Entered::Busy),
        Err(error) => {
            if error.outcome() == Outcome::NotApplied && known.is_none() {
                members.forget(claim.id);
            }
            Err(error)
        }
    }
}

fn held(member: &Member, sequence: u64, armed: LeaseStart) -> Entered {
    Entered::In {
        ticket: Ticket {
            sequence,
            ..member.ticket()
        },
        armed,
        place: Place::Held { sequence },
    }
}

/// The time limit for one write of this claim: well below its lease.
fn patience(engine: &Kubernetes, claim: &Claim) -> Duration {
    engine.client.timeout.min(claim.ttl / 3)
}

/// Tries to take the place. A snapshot that shows other holders is believed only if its read was
/// sent at `since` or later. A snapshot that allows the write needs no such check, because the
/// write is conditional.
async fn attempt(
    engine: &Arc<Kubernetes>,
    line: &Arc<Line>,
    member: &Member,
    since: BootTime,
) -> Result<Tried> {
    let (claim, client) = (&member.claim, &engine.client);
    // A waiting claim has time and tries again later; any other claim needs an answer now.
    let mut retry = if claim.queue {
        Retry::times(3)
    } else {
        Retry::until(BootTime::now() + client.timeout)
    };
    let mut turn = None;
    let fresh = line.known(since);
    let mut believed = fresh.is_some();
    let mut snapshot = match fresh.or_else(|| line.known(BootTime::PAST)) {
        Some(known) => known,
        None => read(engine, line, "enter", since).await?,
    };
    loop {
        if let Some(other) = snapshot.as_ref().and_then(|lease| lease.name())
            && other != claim.name.as_str()
            && !engine.keys.is_bare()
        {
            let message = "the Lease of this name belongs to another name; use another name";
            return Err(Error::new(ErrorKind::InvalidName, "enter", message));
        }
        let (stamp, server) = (client.stamp(), client.clock.now());
        let decision = line.decide(&snapshot, claim, member.waits, &stamp, server);
        let refuses = matches!(&decision, Ok(Decision::Behind { .. }) | Err(_));
        if refuses && !believed {
            snapshot = read(engine, line, "enter", since).await?;
            believed = true;
            continue;
        }
        let decision = decision?;
        if let Decision::Behind { until, overdue } = decision {
            return Ok(Tried::Behind(until, overdue));
        }
        if turn.is_none() {
            // Other claims of this process may be writing, so the decision is made again
            // afterwards.
            turn = Some(line.turn(client.timeout).await);
            if let Some(known) = line.known(BootTime::PAST) {
                snapshot = known;
            }
            continue;
        }
        let mine = matches!(decision, Decision::Mine(_));
        let refused = match decision {
            Decision::Create => {
                let lease = Lease::free(&line.key, claim.name.as_str(), &stamp);
                let sent = BootTime::now();
                match client
                    .create("enter", &lease, patience(engine, claim))
                    .await
                {
                    Ok(Written::Done(lease)) => {
                        snapshot = line.wrote(*lease, &stamp, sent);
                        continue;
                    }
                    Ok(Written::Refused) => true,
                    // A superfluous free Lease blocks nobody.
                    Err(error) => return Err(error.not_applied()),
                }
            }
            Decision::Mine(entry) if entry.evicted => {
                let known = engine.members.get(claim.id);
                let armed = known.as_ref().unwrap_or(member).armed;
                return Ok(Tried::Held(entry.token, armed));
            }
            // Renewed, so that the start of its lease is known.
            Decision::Mine(entry) => {
                let Some(lease) = &snapshot else { continue };
                let renewed = lease.changed(&stamp, |holders, _| {
                    let own = holders.iter_mut().filter(|entry| entry.is(claim.id));
                    own.for_each(|entry| entry.renewed.clone_from(&stamp));
                });
                match take(engine, line, member, renewed, entry.token, stamp).await? {
                    Some(tried) => return Ok(tried),
                    None => true,
                }
            }
            Decision::Take(lease, sequence) => {
                match take(engine, line, member, *lease, sequence, stamp).await? {
                    Some(tried) => return Ok(tried),
                    None => true,
                }
            }
            Decision::Behind { .. } => false,
        };
        if refused && !retry.again().await {
            if mine {
                let message = "others change this line faster than it can be read; try again";
                return Err(unreachable("enter", message).maybe_applied());
            }
            return Ok(Tried::Behind(BootTime::now() + LOOK, false));
        }
        snapshot = read(engine, line, "enter", BootTime::now()).await?;
    }
}

/// Sends the write that takes a place; `None` when it was refused. It is completed even if the
/// caller is dropped, so that a later leave knows its outcome.
async fn take(
    engine: &Arc<Kubernetes>,
    line: &Arc<Line>,
    member: &Member,
    lease: Lease,
    sequence: u64,
    stamp: String,
) -> Result<Option<Tried>> {
    let claim = Arc::clone(&member.claim);
    let doubt = (
        lease.metadata.uid.clone(),
        lease.metadata.resource_version.clone(),
    );
    let begun = engine.members.change(claim.id, |member| {
        member.stage = Stage::Writing;
        member.doubt = Some(doubt);
    });
    if !begun {
        return Ok(Some(Tried::Left));
    }
    let (engine, line) = (Arc::clone(engine), Arc::clone(line));
    finish(async move {
        let sent = BootTime::now();
        let written = write(&engine, &line, &claim, &lease, sequence, &stamp, sent).await;
        let armed = LeaseStart {
            sent,
            ttl: claim.ttl,
        };
        let stage = match &written {
            Ok(true) => Stage::Held(sequence),
            Ok(false) | Err(_) => Stage::Waiting,
        };
        let unknown = matches!(&written, Err(error) if error.outcome() == Outcome::MaybeApplied);
        let settled = engine.members.change(claim.id, |member| {
            member.stage = stage;
            if let Stage::Held(_) = stage {
                member.armed = armed;
            }
            if !unknown {
                member.doubt = None;
            }
        });
        match written {
            Ok(true) if settled => Ok(Some(Tried::Held(sequence, armed))),
            Ok(true) => {
                // It was left while the write was in flight, by a caller that could not wait for
                // it.
                let ticket = Ticket::own(claim.name.clone(), claim.id);
                release::leave(&engine, &ticket).await?;
                Ok(Some(Tried::Left))
            }
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        }
    })
    .await
}

/// Whether an acquiring write was applied, by its reply or else by a read.
async fn write(
    engine: &Kubernetes,
    line: &Line,
    claim: &Claim,
    lease: &Lease,
    sequence: u64,
    stamp: &str,
    sent: BootTime,
) -> Result<bool> {
    let within = patience(engine, claim);
    let error = match engine.client.replace("enter", lease, within).await {
        Ok(Written::Done(lease)) => {
            line.wrote(*lease, stamp, sent);
            return Ok(true);
        }
        Ok(Written::Refused) => return Ok(false),
        Err(error) if error.outcome() == Outcome::NotApplied => return Err(error),
        Err(error) => error,
    };
    let asked = BootTime::now();
    let Ok(now) = engine.client.read("enter", &line.key, within).await else {
        return Err(error);
    };
    let entry = now.as_ref().and_then(|now| now.entry(claim.id, sequence));
    match (now, entry) {
        (Some(now), Some(entry)) if entry.renewed == stamp => {
            line.wrote(now, stamp, sent);
            Ok(true)
        }
        // The resourceVersion that it is conditional on is gone, so it can't be applied any more.
        (Some(now), None)
            if (&now.metadata.uid, &now.metadata.resource_version)
                != (&lease.metadata.uid, &lease.metadata.resource_version) =>
        {
            line.saw(Some(now), asked);
            Ok(false)
        }
        (now, _) => {
            line.saw(now, asked);
            Err(error)
        }
    }
}

/// Reads a line, once for all claims of this process that need it at the same time.
pub(super) async fn read(
    engine: &Kubernetes,
    line: &Line,
    operation: &'static str,
    since: BootTime,
) -> Result<Snapshot> {
    let timeout = engine.client.timeout;
    let _one = tokio::time::timeout(timeout / 4, line.reading.lock()).await;
    if let Some(known) = line.known(since) {
        return Ok(known);
    }
    let asked = BootTime::now();
    let lease = engine.client.read(operation, &line.key, timeout).await?;
    Ok(line.saw(lease, asked))
}

pub(super) async fn wait(
    engine: &Arc<Kubernetes>,
    ticket: &Ticket,
    until: BootTime,
) -> Result<Place> {
    let line = engine.lines.get(&engine.keys.lease(&ticket.name)?);
    let (members, claim) = (&engine.members, ticket.claim);
    let _waits = Waits::on(&line);
    let mut look = look_by(until);
    loop {
        let Some(member) = members.settled(claim, engine.client.timeout).await else {
            return Ok(Place::Gone);
        };
        if let Stage::Held(sequence) = member.stage {
            return stands(engine, &line, &member, sequence).await;
        }
        if member.has_ended() {
            members.forget(claim);
            return Ok(Place::Gone);
        }
        let last = until.has_passed();
        // A watch is only a hint, and may have ended, so the line is read from time to time.
        let since = if look.has_passed() {
            look = look_by(until);
            BootTime::from_nanos(BootTime::now().as_nanos() - SHARED_READ)
        } else {
            BootTime::PAST
        };
        let mut changed = std::pin::pin!(line.changed.notified());
        changed.as_mut().enable();
        let retry_at = match attempt(engine, &line, &member, since).await? {
            Tried::Held(sequence, _) => return Ok(Place::Held { sequence }),
            Tried::Left => return Ok(Place::Gone),
            Tried::Behind(retry_at, _) => retry_at,
        };
        if last {
            return Ok(Place::Waiting);
        }
        notify::listen(engine, &line);
        let ends = member.armed.sent + member.armed.ttl;
        let wake = look.min(retry_at).min(ends).to_instant();
        tokio::select! {
            () = &mut changed => {}
            () = members.changed(claim) => {}
            () = tokio::time::sleep_until(wake.into()) => {}
        }
    }
}

/// Whether a hold is still in force.
async fn stands(engine: &Kubernetes, line: &Line, member: &Member, sequence: u64) -> Result<Place> {
    let now = read(engine, line, "wait", BootTime::now()).await?;
    let entry = now.and_then(|lease| lease.entry(member.claim.id, sequence));
    Ok(match entry {
        Some(_) => Place::Held { sequence },
        None => Place::Gone,
    })
}
