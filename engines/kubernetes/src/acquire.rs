//! `enter` and `wait`: a claim reads its Lease, decides, and takes its place with one conditional
//! write.
//!
//! A Lease is created free and then taken, so that the acquiring write always has a resourceVersion
//! to be conditional on, and that is the token. If the outcome of a write is unknown, a read looks
//! for the claim's id and the time stamp of the write. A waiting claim has nothing in the store. It
//! sleeps until a watch event, a local change, or the end of a holder's lease by our own clock.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use super::Kubernetes;
use super::client::Written;
use super::lease::{Decision, Lease, Write, decide};
use super::lines::{Line, Member, Snapshot, Stage, Turn, Waits};
use super::notify;
use super::release;
use palisade_core::engine::{
    Claim, ClaimId, Entered, LeaseStart, Left, Place, Ticket, look_by, unreachable,
};
use palisade_core::{BootTime, Error, Outcome, Result};
use palisade_kit::cas::Retry;
use palisade_kit::finish::finish;
use palisade_kit::leave::leave_twice;

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

impl Tried {
    /// Others change the line all the time.
    fn busy() -> Self {
        Self::Behind(BootTime::now() + LOOK, false)
    }
}

pub(super) async fn enter(engine: &Arc<Kubernetes>, claim: &Arc<Claim>) -> Result<Entered> {
    let line = engine.line(&claim.name)?;
    let members = &engine.members;
    let known = match members.get(claim.id) {
        Some(_) => members.settled(claim.id, engine.client.timeout).await,
        None => None,
    };
    let Some(member) = members.join(claim) else {
        return Ok(Entered::Busy);
    };
    let waits = member.state().waits;
    let mut tried = attempt(engine, &line, &member, BootTime::now()).await;
    // A holder that is overdue by its own record is observed until it has expired by our clock.
    // Otherwise a caller that never waits would find the line busy for ever.
    while let Ok(Tried::Behind(until, true)) = tried
        && !claim.queue
        && !waits
    {
        let look = until.min(BootTime::now() + LOOK);
        tokio::time::sleep_until(look.to_instant().into()).await;
        tried = attempt(engine, &line, &member, BootTime::now()).await;
    }
    match tried {
        Ok(Tried::Held(sequence, armed)) => Ok(Entered::In {
            ticket: Ticket {
                sequence,
                ..Ticket::own(claim.name.clone(), claim.id)
            },
            armed,
            place: Place::Held { sequence },
        }),
        Ok(Tried::Behind(..)) if claim.queue || waits => {
            member.change(|state| state.waits = true);
            notify::listen(engine, &line);
            Ok(Entered::In {
                ticket: member.ticket(),
                armed: member.state().armed,
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

/// The time limit for one write of this claim: well below its lease.
fn patience(engine: &Kubernetes, claim: &Claim) -> Duration {
    engine.client.timeout.min(claim.ttl / 3)
}

/// Tries to take the place. What was seen of other holders is believed only if its read was sent at
/// `since` or later. What allows the write needs no such check, because the write is conditional.
async fn attempt(
    engine: &Arc<Kubernetes>,
    line: &Arc<Line>,
    member: &Arc<Member>,
    since: BootTime,
) -> Result<Tried> {
    let mut attempt = Attempt {
        engine,
        line,
        member,
        since,
        // A waiting claim has time and tries again later; any other claim needs an answer now.
        retry: if member.claim.queue {
            Retry::times(3)
        } else {
            Retry::until(BootTime::now() + engine.client.timeout)
        },
        turn: line.free_turn().map(Some),
    };
    loop {
        let write = match attempt.choose().await? {
            ControlFlow::Break(tried) => return Ok(tried),
            ControlFlow::Continue(write) => write,
        };
        {
            let mut state = member.state.lock();
            if state.left {
                return Ok(Tried::Left);
            }
            (state.stage, state.doubt) = (Stage::Writing, Some(write.lease.condition()));
        }
        let again = write.again;
        let (engine, line, member) = (Arc::clone(engine), Arc::clone(line), Arc::clone(member));
        // Completed even if the caller is dropped, so that a later leave knows its outcome.
        let tried = finish(async move {
            let (claim, sent) = (&member.claim, BootTime::now());
            let within = patience(&engine, claim);
            let written = match engine.client.replace("enter", &write.lease, within).await {
                Ok(Written::Done(now)) => {
                    line.wrote(*now, &write.stamp, sent);
                    Ok(true)
                }
                Ok(Written::Refused) => Ok(false),
                Err(error) if error.outcome() == Outcome::NotApplied => Err(error),
                Err(error) => find_out(&engine, &line, claim, &write, sent, error).await,
            };
            let unknown =
                matches!(&written, Err(error) if error.outcome() == Outcome::MaybeApplied);
            let (ttl, token) = (claim.ttl, write.token);
            let armed = LeaseStart { sent, ttl };
            let left = {
                let mut state = member.state.lock();
                if let Ok(true) = written {
                    (state.stage, state.armed) = (Stage::Held(token), armed);
                } else {
                    state.stage = Stage::Waiting;
                }
                if !unknown {
                    state.doubt = None;
                }
                state.left
            };
            member.changed.notify_waiters();
            if !written? {
                return Ok(None);
            }
            if left {
                // By a caller that could not wait for the write.
                let ticket = Ticket {
                    sequence: token,
                    ..Ticket::own(claim.name.clone(), claim.id)
                };
                leave_twice(async || {
                    let left = release::take_out(&engine, &line, &ticket, None).await?;
                    Ok(Left::of(left))
                })
                .await?;
                return Ok(Some(Tried::Left));
            }
            Ok::<_, Error>(Some(Tried::Held(token, armed)))
        });
        if let Some(tried) = tried.await? {
            return Ok(tried);
        }
        if !attempt.again().await? {
            if again {
                let message = "others change this line faster than it can be read; try again";
                return Err(unreachable("enter", message).maybe_applied());
            }
            return Ok(Tried::busy());
        }
    }
}

/// One attempt of a claim to take its place.
struct Attempt<'a> {
    engine: &'a Kubernetes,
    line: &'a Line,
    member: &'a Member,
    since: BootTime,
    retry: Retry,
    /// The turn to write; `Some(None)` when another writer does not end.
    turn: Option<Option<Turn>>,
}

impl Attempt<'_> {
    /// The write to send, or the result without one.
    async fn choose(&mut self) -> Result<ControlFlow<Tried, Box<Write>>> {
        let (claim, client) = (&self.member.claim, &self.engine.client);
        let (waits, bare) = (self.member.state().waits, self.engine.keys.is_bare());
        loop {
            let (decision, asked) = {
                let seen = self.line.seen.lock();
                (decide(&seen, claim, waits, bare, &client.clock), seen.asked)
            };
            let is_old = match decision {
                Ok(Decision::Behind { .. }) | Err(_) => asked < Some(self.since),
                Ok(_) => asked.is_none(),
            };
            if is_old {
                // Others may write meanwhile.
                self.turn = None;
                read(self.engine, self.line, "enter", self.since).await?;
                continue;
            }
            match decision? {
                Decision::Behind { until, overdue } => {
                    return Ok(ControlFlow::Break(Tried::Behind(until, overdue)));
                }
                // Other claims of this process may be writing, so the decision is made again
                // afterwards.
                _ if self.turn.is_none() => {
                    self.turn = Some(self.line.turn(client.timeout).await);
                }
                Decision::Create => {
                    if !self.create().await? && !self.again().await? {
                        return Ok(ControlFlow::Break(Tried::busy()));
                    }
                }
                Decision::Evicted(token) => {
                    let armed = self.member.state().armed;
                    return Ok(ControlFlow::Break(Tried::Held(token, armed)));
                }
                Decision::Write(write) => return Ok(ControlFlow::Continue(write)),
            }
        }
    }

    /// Creates the Lease, free; `false` when somebody else did.
    async fn create(&self) -> Result<bool> {
        let (claim, client) = (&self.member.claim, &self.engine.client);
        let (stamp, sent) = (client.clock.stamp(), BootTime::now());
        let lease = Lease::free(&self.line.key, claim.name.as_str(), &stamp);
        let within = patience(self.engine, claim);
        match client.create("enter", &lease, within).await {
            Ok(Written::Done(lease)) => {
                self.line.wrote(*lease, &stamp, sent);
                Ok(true)
            }
            Ok(Written::Refused) => Ok(false),
            // A superfluous free Lease blocks nobody.
            Err(error) => Err(error.not_applied()),
        }
    }

    /// After a refused write: reads the line again; `false` when no retry is left.
    async fn again(&mut self) -> Result<bool> {
        let again = self.retry.again().await;
        if again {
            read(self.engine, self.line, "enter", BootTime::now()).await?;
        }
        Ok(again)
    }
}

/// Whether a write of unknown outcome was applied, by a read.
async fn find_out(
    engine: &Kubernetes,
    line: &Line,
    claim: &Claim,
    write: &Write,
    sent: BootTime,
    error: Error,
) -> Result<bool> {
    let (asked, within) = (BootTime::now(), patience(engine, claim));
    let Ok(now) = engine.client.read("enter", &line.key, within).await else {
        return Err(error);
    };
    let entry = now
        .as_ref()
        .and_then(|now| now.entry(claim.id, write.token));
    match (now, entry) {
        (Some(now), Some(entry)) if entry.renewed == write.stamp => {
            line.wrote(now, &write.stamp, sent);
            Ok(true)
        }
        // The resourceVersion that it is conditional on is gone, so it can't be applied any more.
        (Some(now), None) if now.condition() != write.lease.condition() => {
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
    let line = engine.line(&ticket.name)?;
    let (members, claim) = (&engine.members, ticket.claim);
    let _waits = Waits::on(&line);
    let mut look = look_by(until);
    loop {
        let Some(member) = members.settled(claim, engine.client.timeout).await else {
            return Ok(Place::Gone);
        };
        let state = member.state();
        if let Stage::Held(sequence) = state.stage {
            return stands(engine, &line, claim, sequence).await;
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
        let ends = state.armed.sent + state.armed.ttl;
        let wake = look.min(retry_at).min(ends).to_instant();
        let mut own = std::pin::pin!(member.changed.notified());
        own.as_mut().enable();
        // It may have left during the attempt, whose own notifications must not wake it.
        if member.state().left {
            return Ok(Place::Gone);
        }
        tokio::select! {
            () = &mut changed => {}
            () = &mut own => {}
            () = tokio::time::sleep_until(wake.into()) => {}
        }
    }
}

/// Whether a hold is still in force.
async fn stands(engine: &Kubernetes, line: &Line, claim: ClaimId, sequence: u64) -> Result<Place> {
    let now = read(engine, line, "wait", BootTime::now()).await?;
    let entry = now.and_then(|lease| lease.entry(claim, sequence));
    Ok(match entry {
        Some(_) => Place::Held { sequence },
        None => Place::Gone,
    })
}
