//! `enter` and `wait`: a claim gets a session, tries to lock, and waits on a blocking query.
//!
//! Only a transaction grants a place; the result of a query is a hint. While the reply to a write
//! is outstanding its claims are `Trying`, so that a dropped future can be resolved later. A
//! waiting claim has nothing in the store, except a gate that it closed. Of the claims of one
//! process only one per line asks at a time, and its write includes others that wait for the same.

use std::sync::Arc;
use std::time::Duration;

use super::Consul;
use super::client::{Committed, Read};
use super::keys::Line;
use super::kv::TxnError;
use super::sessions::{Begun, Member, Stage};
use super::snapshot::{Decision, Snapshot, Spot, Watch};
use palisade_core::engine::{Ask, Claim, ClaimId, Entered, LeaseStart, Mode, Place, Ticket};
use palisade_core::{BootTime, Error, ErrorKind, Outcome, Result};
use palisade_kit::cas::Retry;
use palisade_kit::finish::finish;

/// A claim that does not wait retries for this fraction of the request timeout: 50 ms by default.
/// Its first read is not counted.
const NO_WAIT: u32 = 40;

/// How many other claims one write includes; Consul takes 64 operations.
const TAKEN_ALONG: usize = 15;

/// The wait of one blocking query: long enough to be cheap, short enough to notice an agent that no
/// longer answers.
const NAP: Duration = Duration::from_secs(1);

/// The pause while a lock-delay is in force, whose end Consul does not announce.
const DELAYED: Duration = Duration::from_millis(500);

/// The result of an attempt.
enum Tried {
    Held(u64),
    /// Others hold; `Member::watch` says what to wait on.
    Behind,
    /// A lock-delay is in force.
    Delayed,
    /// Its session has ended.
    SessionEnded,
    /// It was left during the attempt.
    Left,
}

/// How many sessions an enter tries, in case they end.
const SESSIONS: usize = 2;

pub(super) async fn enter(engine: &Arc<Consul>, claim: &Arc<Claim>) -> Result<Entered> {
    let (line, sessions) = (engine.keys.line(&claim.name)?, &engine.sessions);
    for _ in 0..SESSIONS {
        let member = match sessions.join(claim, None) {
            Some(member) => member,
            None => match rejoin(engine, &line, claim).await? {
                (member, None) => member,
                (member, held) => return Ok(sessions.entered(&member, held)),
            },
        };
        let tried = match claim.ask.mode() {
            Mode::Exclusive => {
                // Assumes that the lock is free, as it is most of the time.
                let free = Snapshot::unread(line.clone());
                attempt(engine, &member, free, patience(engine, claim)).await
            }
            Mode::Shared | Mode::Permits => first_try(engine, &line, &member).await,
        };
        match tried {
            Ok(Tried::Held(sequence)) => return Ok(sessions.entered(&member, Some(sequence))),
            Ok(Tried::Behind | Tried::Delayed) if claim.queue => {
                sessions.change(claim.id, |member| member.waited = true);
                return Ok(sessions.entered(&member, None));
            }
            Ok(Tried::Behind | Tried::Delayed) => {
                sessions.forget(claim.id);
                return Ok(Entered::Busy);
            }
            Ok(Tried::Left) => return Ok(Entered::Busy),
            // By its ttl or by hand, since its last use.
            Ok(Tried::SessionEnded) => {
                sessions.ended(member.session);
                sessions.forget(claim.id);
            }
            Err(error) => {
                let known = sessions.member(claim.id);
                if known.is_some_and(|member| member.closed.is_some()) {
                    // It keeps the gate closed, so it must be left before readers can come again.
                    return Err(error.maybe_applied());
                }
                if error.outcome() == Outcome::NotApplied {
                    sessions.forget(claim.id);
                }
                return Err(error);
            }
        }
    }
    Err(session_ended())
}

fn session_ended() -> Error {
    let message = "the session ended before it was used; try again";
    Error::new(ErrorKind::Unreachable, "enter", message)
}

/// How often a claim tries again when others came first. A waiting claim has time to try later, and
/// all permits contend for one list. A claim that does not wait gets its answer soon.
fn patience(engine: &Consul, claim: &Claim) -> Retry {
    match (claim.queue, claim.ask.mode()) {
        (true, Mode::Permits) => Retry::times(0),
        (true, _) => Retry::times(3),
        (false, _) => Retry::until(BootTime::now() + engine.client.timeout / NO_WAIT),
    }
}

/// Finds the session of a claim that was entered before, with the sequence if it holds; or assigns
/// it to a session that is created for it.
async fn rejoin(engine: &Consul, line: &Line, claim: &Arc<Claim>) -> Result<(Member, Option<u64>)> {
    let (sessions, client) = (&engine.sessions, &engine.client);
    match sessions.settled(claim.id, client.timeout).await {
        None => {}
        Some(member) if member.stage == Stage::Waiting => return Ok((member, None)),
        Some(member) => match stands(engine, line, &member).await? {
            Place::Held { sequence } => return Ok((member, Some(sequence))),
            Place::Waiting => return Ok((member, None)),
            // Its lock was taken away, or its write may still arrive: it needs a new session.
            Place::Gone => sessions.forget(claim.id),
        },
    }
    let find = || sessions.join(claim, None);
    let make = async {
        let (sent, ttl) = (BootTime::now(), claim.ttl);
        let settings = engine.session_settings(ttl);
        let session = client.create_session(&settings).await?;
        let made = (session, LeaseStart { sent, ttl });
        sessions.join(claim, Some(made)).ok_or_else(session_ended)
    };
    let joined = engine.maker.find_or_make(client.timeout, find, make).await;
    Ok((joined?, None))
}

/// The place of a claim whose write was not answered, or whose hold is in question.
async fn stands(engine: &Consul, line: &Line, member: &Member) -> Result<Place> {
    let claim = &member.claim;
    let snapshot = Snapshot::read(&engine.client, line, claim.ask.mode()).await?;
    let Some(found) = snapshot.find(claim.id, &member.session_text) else {
        return Ok(Place::Gone);
    };
    let Some(sequence) = found.held() else {
        engine.sessions.closed(claim.id, found.index);
        return Ok(Place::Waiting);
    };
    engine
        .sessions
        .settle(claim.id, Stage::Held(sequence), false);
    Ok(Place::Held { sequence })
}

/// The first try of a claim for a part.
async fn first_try(engine: &Arc<Consul>, line: &Line, member: &Member) -> Result<Tried> {
    let (claim, client) = (&member.claim, &engine.client);
    let retry = patience(engine, claim);
    if claim.ask.mode() == Mode::Shared {
        let snapshot = Snapshot::read_lock(client, line).await?;
        return attempt(engine, member, snapshot, retry).await;
    }
    let snapshot = Snapshot::read(client, line, Mode::Permits).await?;
    // Claims of one process that write the list of holders concurrently only refuse each other. The
    // one that writes now includes those that wait.
    let decision = snapshot.decide(std::slice::from_ref(member))?;
    let patience = match decision {
        Decision::Write(..) if !claim.queue => client.timeout / NO_WAIT / 2,
        _ => Duration::ZERO,
    };
    let turn = engine.flight.turn(&line.lock, patience).await;
    if turn.is_none() && claim.queue {
        return Ok(Tried::Behind);
    }
    attempt(engine, member, snapshot, retry).await
}

/// The stage of a claim that another claim writes for, once that write was answered.
async fn settled(engine: &Consul, claim: ClaimId) -> Option<Stage> {
    let settled = engine.sessions.settled(claim, engine.client.timeout);
    let stage = settled.await?.stage;
    engine.sessions.tell(claim);
    Some(stage)
}

/// Tries to take the place, and retries when others wrote in between.
async fn attempt(
    engine: &Arc<Consul>,
    member: &Member,
    mut snapshot: Snapshot,
    mut retry: Retry,
) -> Result<Tried> {
    let (claim, sessions) = (&member.claim, &engine.sessions);
    let mut along = if claim.ask == Ask::Whole {
        0
    } else {
        TAKEN_ALONG
    };
    // A line that was not read is assumed to be free. If that was wrong, the line is read without
    // counting a retry, however long the write took.
    let mut assumed = claim.ask.mode() != Mode::Permits;
    loop {
        let mut members = match sessions.begin(claim.id, along) {
            Begun::For(members) => members,
            Begun::Gone => return Ok(Tried::Left),
            Begun::Settled => match settled(engine, claim.id).await {
                Some(Stage::Held(sequence)) => return Ok(Tried::Held(sequence)),
                Some(Stage::Waiting) if retry.again().await => continue,
                Some(_) => return Ok(Tried::Behind),
                None => return Ok(Tried::Left),
            },
        };
        let decision = snapshot.decide(&members);
        let taken = match &decision {
            Ok(Decision::Write(.., taken)) => *taken,
            Ok(Decision::Behind(_)) | Err(_) => 0,
        };
        for member in members.split_off(taken) {
            sessions.settle(member.claim.id, Stage::Waiting, false);
        }
        let (ops, spot) = match decision? {
            Decision::Write(ops, spot, _) => (ops, spot),
            Decision::Behind(watch) => {
                sessions.change(claim.id, |member| member.watch = Some(watch));
                return Ok(Tried::Behind);
            }
        };
        // Completed even if the caller is dropped, so that a later leave knows its outcome.
        let (writer, line) = (Arc::clone(engine), snapshot.line.clone());
        let written = finish(async move {
            let written = writer.client.transact("enter", &ops).await;
            writer.sessions.written(&line, spot, &members, &written);
            written
        });
        match written.await? {
            Committed::Done(_) if spot == Spot::Gate => {}
            Committed::Done(_) => {
                let stage = sessions.member(claim.id).map(|member| member.stage);
                return Ok(match stage {
                    Some(Stage::Held(sequence)) => Tried::Held(sequence),
                    _ => Tried::Left,
                });
            }
            Committed::Refused(errors) => {
                let says = |what: &str| errors.iter().any(|e: &TxnError| e.what.contains(what));
                if says("lock delay") {
                    return Ok(Tried::Delayed);
                }
                if says("invalid session") && says(&member.session_text) {
                    return Ok(Tried::SessionEnded);
                }
                if says("invalid session") {
                    // The session of an included claim; that claim finds out by itself.
                    along = 0;
                }
                if !std::mem::take(&mut assumed) && !retry.again().await {
                    // Others came first each time.
                    sessions.change(claim.id, |member| member.watch = None);
                    return Ok(Tried::Behind);
                }
            }
        }
        let known = snapshot.tree_index;
        snapshot = Snapshot::read(&engine.client, &snapshot.line, claim.ask.mode()).await?;
        snapshot.tree_index = snapshot.tree_index.max(known);
    }
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
            // `Gone`: the lock was taken away; or the write is not applied yet, and then the
            // session can't be used for this name, and a new claim is needed.
            match stands(engine, &line, &member).await? {
                Place::Waiting => continue,
                place => return Ok(place),
            }
        }
        if sessions.is_due(member.session)
            && !engine.client.has_session(&member.session_text).await?
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

/// Waits until the line may be free, when it is this claim's turn, then tries; `None` when nothing
/// happened.
async fn try_when_free(
    engine: &Arc<Consul>,
    line: &Line,
    member: &Member,
    until: BootTime,
) -> Result<Option<Tried>> {
    let _turn = if until.has_passed() {
        // The last attempt before the deadline does not wait for its turn.
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

/// Waits on what blocks the claim; returns the line afterwards, or `None` when nothing happened. If
/// it does not know what to wait on, or has no time, it only reads.
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
    // Cleared until an attempt finds the line in use, so that an attempt that fails halfway is
    // followed by another read and not by a wait.
    let watch = |watch| {
        engine
            .sessions
            .change(claim.id, |member| member.watch = watch)
    };
    watch(None);
    if tree {
        let mut snapshot = match claim.ask.mode() {
            Mode::Permits => Snapshot::new(line.clone(), None, seen.pairs),
            Mode::Exclusive | Mode::Shared => read.await?,
        };
        snapshot.tree_index = snapshot.tree_index.max(seen.index);
        return Ok(Some(snapshot));
    }
    match seen.pairs.into_iter().next() {
        // The next claim holds already. An index that decreases belongs to another history.
        Some(lock) if lock.is_held() && member.closed.is_none() => {
            let index = if seen.index < index { 0 } else { seen.index };
            watch(Some(Watch { tree, index }));
            Ok(None)
        }
        Some(_) if claim.ask == Ask::Whole => read.await.map(Some),
        lock => Ok(Some(Snapshot::new(line.clone(), lock, Vec::new()))),
    }
}

/// The time to wait, bounded by the caller's deadline and by `most`.
fn nap(until: BootTime, most: Duration) -> Duration {
    until.remaining().min(most)
}
