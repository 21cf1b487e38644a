//! `enter` and `wait`: a claim gets a session, tries, and sleeps on a blocking query.
//!
//! A place is taken by one transaction and by nothing else; what a query shows is a hint. While a
//! write is unanswered its claims are `Trying`, so that a dropped future is found out about. A
//! waiting claim has nothing in the store but a gate that it closed. One claim per process and
//! line asks at a time, and takes others along that wait for the same.

use std::sync::Arc;
use std::time::Duration;

use super::Consul;
use super::client::{Committed, Read};
use super::keys::Line;
use super::kv::{Op, TxnError};
use super::sessions::{Begun, Member, Stage};
use super::snapshot::{Decision, Snapshot, Spot, Watch};
use crate::core::claim::{Ask, Claim, Mode};
use crate::core::clock::BootTime;
use crate::core::engine::{Entered, Place};
use crate::core::error::{Error, ErrorKind, Outcome, Result};
use crate::core::ticket::{LeaseStart, Ticket};
use crate::engines::kit::cas::Retry;
use crate::engines::kit::finish::finish;

/// A claim that does not wait tries again for this part of the time that one request may take:
/// 50 ms by default. What it reads first is not counted.
const NO_WAIT: u32 = 40;

/// How many others one write takes along; Consul takes 64 operations.
const TAKEN_ALONG: usize = 15;

/// How long one blocking query sleeps: long enough to be cheap, short enough that an agent that
/// no longer answers is noticed.
const NAP: Duration = Duration::from_secs(1);

/// The pause when a lock-delay is in force, which nothing tells the end of.
const DELAYED: Duration = Duration::from_millis(500);

/// What came of a try.
enum Tried {
    Held(u64),
    /// Others hold, and the member says what to sleep on.
    Behind,
    /// A lock-delay is in force.
    Delayed,
    /// Its session is over.
    SessionEnded,
    /// It was left meanwhile.
    Left,
}

pub(super) async fn enter(engine: &Arc<Consul>, claim: &Arc<Claim>) -> Result<Entered> {
    let line = engine.keys.line(&claim.name)?;
    let sessions = &engine.sessions;
    let known = sessions.settled(claim.id, engine.client.timeout).await;
    let mut member = match known {
        None => join(engine, claim).await?,
        Some(member) if member.stage == Stage::Waiting => member,
        Some(member) => match stands(engine, &line, &member).await? {
            Place::Held { sequence } => return Ok(entered(engine, &member, Some(sequence))),
            Place::Waiting => member,
            // Its lock was taken away, or the write may still come: a new session.
            Place::Gone => {
                sessions.forget(claim.id);
                join(engine, claim).await?
            }
        },
    };
    let mut tried = first_try(engine, &line, &member).await;
    if let Ok(Tried::SessionEnded) = tried {
        // Since it was used last, by its ttl or by hand.
        sessions.ended(member.session);
        sessions.forget(claim.id);
        member = join(engine, claim).await?;
        tried = first_try(engine, &line, &member).await;
    }
    match tried {
        Ok(Tried::Held(sequence)) => Ok(entered(engine, &member, Some(sequence))),
        Ok(Tried::Behind | Tried::Delayed) if claim.queue => {
            sessions.change(claim.id, |member| member.waited = true);
            Ok(entered(engine, &member, None))
        }
        Ok(Tried::Behind | Tried::Delayed) => {
            sessions.forget(claim.id);
            Ok(Entered::Busy)
        }
        Ok(Tried::Left) => Ok(Entered::Busy),
        Ok(Tried::SessionEnded) => {
            sessions.ended(member.session);
            sessions.forget(claim.id);
            let message = "the session ended before it was used; try again";
            Err(Error::new(ErrorKind::Unreachable, "enter", message))
        }
        Err(error) => {
            let known = sessions.member(claim.id);
            if known.is_some_and(|member| member.closed.is_some()) {
                // It must be left, so that readers can come again.
                return Err(error.maybe_applied());
            }
            if error.outcome() == Outcome::NotApplied {
                sessions.forget(claim.id);
            }
            Err(error)
        }
    }
}

/// Puts a claim on a session, which may have to be made first.
async fn join(engine: &Consul, claim: &Arc<Claim>) -> Result<Member> {
    let find = || engine.sessions.join(claim);
    let make = async {
        let (sent, ttl) = (BootTime::now(), claim.ttl);
        let settings = engine.session_settings(ttl);
        let session = engine.client.create_session(&settings).await?;
        Ok(engine
            .sessions
            .add(session, LeaseStart { sent, ttl }, claim))
    };
    let timeout = engine.client.timeout;
    engine.maker.find_or_make(timeout, find, make).await
}

fn entered(engine: &Consul, member: &Member, held: Option<u64>) -> Entered {
    // A session that has ended meanwhile is over at once.
    let armed = engine.sessions.armed(member.session).unwrap_or(LeaseStart {
        sent: BootTime::PAST,
        ttl: member.claim.ttl,
    });
    let sequence = held.unwrap_or(0);
    Entered::In {
        ticket: Ticket {
            sequence,
            ..member.ticket()
        },
        armed,
        place: held.map_or(Place::Waiting, |sequence| Place::Held { sequence }),
    }
}

/// Where a claim stands whose write was not answered, or whose hold is in question.
async fn stands(engine: &Consul, line: &Line, member: &Member) -> Result<Place> {
    let claim = &member.claim;
    let snapshot = Snapshot::read(&engine.client, line, claim.ask.mode()).await?;
    let Some(found) = snapshot.find(claim.id, &member.session_text()) else {
        return Ok(Place::Gone);
    };
    let Some(sequence) = found.held() else {
        engine.sessions.closed(claim.id, found.index);
        return Ok(Place::Waiting);
    };
    engine
        .sessions
        .settle(claim.id, Stage::Held(sequence), false);
    engine.sessions.tell(claim.id);
    Ok(Place::Held { sequence })
}

async fn first_try(engine: &Arc<Consul>, line: &Line, member: &Member) -> Result<Tried> {
    let (claim, client) = (&member.claim, &engine.client);
    // Whoever waits has time to try again, and the list of permits is everyone's; whoever does
    // not is answered soon, and by others who came first each time.
    let hurry = client.timeout / NO_WAIT;
    let retry = match (claim.queue, claim.ask.mode()) {
        (true, Mode::Permits) => Retry::times(0),
        (true, _) => Retry::times(3),
        (false, _) => Retry::until(BootTime::now() + hurry),
    };
    let snapshot = match claim.ask.mode() {
        // Free, as it is most of the time.
        Mode::Exclusive => Snapshot::unread(line.clone()),
        Mode::Shared => Snapshot::read_lock(client, line).await?,
        Mode::Permits => Snapshot::read(client, line, Mode::Permits).await?,
    };
    if claim.ask.mode() != Mode::Permits {
        return attempt(engine, member, snapshot, retry).await;
    }
    // Claims of one process that write the list of holders at once only refuse each other. One
    // that is at it now takes those along that wait.
    let decision = snapshot.decide(std::slice::from_ref(member))?;
    let patience = match decision {
        Decision::Take(..) if !claim.queue => hurry / 2,
        _ => Duration::ZERO,
    };
    let turn = engine.flight.turn(&line.lock, patience).await;
    if turn.is_none() && claim.queue {
        return Ok(Tried::Behind);
    }
    attempt(engine, member, snapshot, retry).await
}

/// Tries to take the place, again when others wrote in between.
async fn attempt(
    engine: &Arc<Consul>,
    member: &Member,
    mut snapshot: Snapshot,
    mut retry: Retry,
) -> Result<Tried> {
    let (claim, session) = (&member.claim, member.session_text());
    let mut along = if claim.ask == Ask::Whole {
        0
    } else {
        TAKEN_ALONG
    };
    // A line that was not read is taken for free. That this is wrong says nothing of others who
    // come first: the line is read, however long the write took.
    let mut assumed = claim.ask.mode() != Mode::Permits;
    loop {
        let mut members = match engine.sessions.begin(claim.id, along) {
            Begun::For(members) => members,
            Begun::Gone => return Ok(Tried::Left),
            Begun::Settled => {
                let settled = engine.sessions.settled(claim.id, engine.client.timeout);
                match settled.await.map(|member| member.stage) {
                    Some(Stage::Held(sequence)) => {
                        engine.sessions.tell(claim.id);
                        return Ok(Tried::Held(sequence));
                    }
                    Some(Stage::Waiting) if retry.again().await => continue,
                    Some(_) => return Ok(Tried::Behind),
                    None => return Ok(Tried::Left),
                }
            }
        };
        let decision = snapshot.decide(&members);
        let taken = match &decision {
            Ok(Decision::Take(_, taken)) => *taken,
            Ok(Decision::Close(_)) => 1,
            Ok(Decision::Behind(_)) | Err(_) => 0,
        };
        for member in members.split_off(taken) {
            let sessions = &engine.sessions;
            sessions.settle(member.claim.id, Stage::Waiting, false);
        }
        let (ops, spot) = match decision? {
            Decision::Take(ops, _) => (ops, Spot::of(claim.ask)),
            Decision::Close(ops) => (ops, Spot::Gate),
            Decision::Behind(watch) => {
                let sessions = &engine.sessions;
                sessions.change(claim.id, |member| member.watch = Some(watch));
                return Ok(Tried::Behind);
            }
        };
        match write(engine, &snapshot.line, ops, spot, members).await? {
            Committed::Done(_) if spot == Spot::Gate => {}
            Committed::Done(_) => match engine.sessions.tell(claim.id) {
                Some(sequence) => return Ok(Tried::Held(sequence)),
                None => return Ok(Tried::Left),
            },
            Committed::Refused(errors) => {
                let says = |what: &str| errors.iter().any(|e: &TxnError| e.what.contains(what));
                if says("lock delay") {
                    return Ok(Tried::Delayed);
                }
                if says("invalid session") && says(&session) {
                    return Ok(Tried::SessionEnded);
                }
                if says("invalid session") {
                    // That of one that was taken along; it finds out by itself.
                    along = 0;
                }
                if !std::mem::take(&mut assumed) && !retry.again().await {
                    // Others came first each time.
                    engine
                        .sessions
                        .change(claim.id, |member| member.watch = None);
                    return Ok(Tried::Behind);
                }
            }
        }
        let known = snapshot.tree_index;
        snapshot = Snapshot::read(&engine.client, &snapshot.line, claim.ask.mode()).await?;
        snapshot.tree_index = known;
    }
}

/// Sends the write that takes places. It goes on when the caller is dropped, so that whoever
/// leaves afterwards knows what became of it.
async fn write(
    engine: &Arc<Consul>,
    line: &Line,
    ops: Vec<Op>,
    spot: Spot,
    members: Vec<Member>,
) -> Result<Committed> {
    let (engine, line) = (Arc::clone(engine), line.clone());
    finish(async move {
        let written = engine.client.transact("enter", &ops).await;
        let failed = match &written {
            Err(error) if error.outcome() != Outcome::NotApplied => Stage::Unknown,
            _ => Stage::Waiting,
        };
        let index = |member: &Member| match &written {
            Ok(Committed::Done(pairs)) => {
                let key = spot.key(&line, member.claim.id, &member.session_text());
                let own = pairs.iter().rev().find(|pair| pair.key == key)?;
                Some(own.modify_index)
            }
            _ => None,
        };
        for (at, member) in members.iter().enumerate() {
            let (sessions, claim) = (&engine.sessions, member.claim.id);
            match index(member) {
                None => sessions.settle(claim, failed, at > 0),
                Some(index) if spot == Spot::Gate => sessions.closed(claim, index),
                Some(index) => sessions.settle(claim, Stage::Held(index), at > 0),
            }
        }
        written
    })
    .await
}

pub(super) async fn wait(engine: &Arc<Consul>, ticket: &Ticket, until: BootTime) -> Result<Place> {
    let line = engine.keys.line(&ticket.name)?;
    let (sessions, claim) = (&engine.sessions, ticket.claim);
    loop {
        let Some(member) = sessions.settled(claim, engine.client.timeout).await else {
            return Ok(Place::Gone);
        };
        let changed = member.changed.notified();
        let Some(member) = sessions.member(claim) else {
            return Ok(Place::Gone);
        };
        if member.stage != Stage::Waiting {
            if let Some(sequence) = sessions.tell(claim) {
                return Ok(Place::Held { sequence });
            }
            // Gone: taken away; or not applied yet, and then its session is spoilt for this
            // name and another claim is needed.
            match stands(engine, &line, &member).await? {
                Place::Waiting => continue,
                place => return Ok(place),
            }
        }
        if sessions.is_due(member.session)
            && !engine.client.has_session(&member.session_text()).await?
        {
            sessions.ended(member.session);
            sessions.forget(claim);
            return Ok(Place::Gone);
        }
        let last = until.has_passed();
        let tried = tokio::select! {
            () = changed => continue,
            tried = try_when_free(engine, &line, &member, until) => tried?,
        };
        match tried {
            Some(Tried::Held(sequence)) => return Ok(Place::Held { sequence }),
            Some(Tried::SessionEnded) => {
                sessions.ended(member.session);
                return Ok(Place::Gone);
            }
            Some(Tried::Left) => return Ok(Place::Gone),
            Some(Tried::Delayed) => tokio::time::sleep(nap(until, DELAYED)).await,
            Some(Tried::Behind) | None => {}
        }
        if last || until.has_passed() {
            return Ok(Place::Waiting);
        }
    }
}

/// Sleeps until the line may be free, in this claim's turn, and tries; `None` when nothing
/// happened.
async fn try_when_free(
    engine: &Arc<Consul>,
    line: &Line,
    member: &Member,
    until: BootTime,
) -> Result<Option<Tried>> {
    let _turn = if until.has_passed() {
        // A last look is never left to others.
        None
    } else {
        let turn = engine.flight.turn(&line.lock, nap(until, NAP)).await;
        if turn.is_none() {
            return Ok(None);
        }
        turn
    };
    let Some(snapshot) = sleep(engine, line, member, nap(until, NAP)).await? else {
        return Ok(None);
    };
    let tried = attempt(engine, member, snapshot, Retry::until(until));
    tried.await.map(Some)
}

/// Sleeps on what the claim is behind; the line as it is then, or `None` when nothing happened.
/// Without knowing what to sleep on, or without time, it only reads.
async fn sleep(
    engine: &Consul,
    line: &Line,
    member: &Member,
    nap: Duration,
) -> Result<Option<Snapshot>> {
    let (claim, client) = (&member.claim, &engine.client);
    let read = Snapshot::read(client, line, claim.ask.mode());
    let watch = member
        .watch
        .filter(|watch| watch.index > 0 && !nap.is_zero());
    let Some(Watch { tree, index }) = watch else {
        return read.await.map(Some);
    };
    let key = if tree { line.tree() } else { line.lock.clone() };
    let seen = client
        .read("wait", &key, tree, Read::After(index, nap))
        .await?;
    if seen.index == index {
        return Ok(None);
    }
    // What to sleep on next is found out by whoever finds the line in use: a try that fails
    // halfway is then followed by another read, not by sleep.
    let watch = |watch| {
        engine
            .sessions
            .change(claim.id, |member| member.watch = watch)
    };
    watch(None);
    if tree {
        let mut snapshot = match claim.ask.mode() {
            Mode::Permits => Snapshot {
                tree: seen.pairs,
                ..Snapshot::unread(line.clone())
            },
            Mode::Exclusive | Mode::Shared => read.await?,
        };
        snapshot.tree_index = seen.index;
        return Ok(Some(snapshot));
    }
    match seen.pairs.into_iter().next() {
        // Held by the next one already. An index that goes back is that of another history.
        Some(lock) if lock.holder().is_some() && member.closed.is_none() => {
            let index = if seen.index < index { 0 } else { seen.index };
            watch(Some(Watch { tree, index }));
            Ok(None)
        }
        Some(_) if claim.ask == Ask::Whole => read.await.map(Some),
        lock => Ok(Some(Snapshot {
            lock,
            ..Snapshot::unread(line.clone())
        })),
    }
}

/// A time to sleep that is bounded both by the caller and by how long one query may sleep.
fn nap(until: BootTime, most: Duration) -> Duration {
    until.remaining().min(most)
}
