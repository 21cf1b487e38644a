//! `enter` and `wait`: how a claim gets its place, and learns of its grant.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use super::Gateway;
use super::api::{Enter, Standing, words};
use super::client::{Call, Reply};
use super::error::parse;
use super::sessions::{Member, Session, own_id};
use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::engine::{Entered, Place};
use crate::core::error::{Error, Outcome, Result, unreachable};
use crate::core::ticket::{LeaseStart, Ticket};

/// How many sessions an enter tries when a session has ended or its gateway fails. After that the
/// caller retries.
const TRIES: u32 = 2;

pub(super) async fn enter(engine: &Gateway, claim: &Claim) -> Result<Entered> {
    let id = claim.id.to_string();
    let (mode, weight, capacity) = words(claim.ask);
    let mut document = Enter {
        name: engine.names.there(&claim.name)?,
        id: &id,
        mode,
        weight,
        capacity,
        queue: claim.queue,
        value: claim.value.as_deref(),
        owner: engine.names.owner_there(&claim.owner),
    };
    let mut tries = 0;
    loop {
        tries += 1;
        let session = session(engine, claim).await?;
        let Some(member) = engine.sessions.enter(claim.id, &session, claim.queue) else {
            return Ok(Entered::Busy);
        };
        document.queue = member.queue;
        let sent = BootTime::now();
        let asked = ask(
            engine,
            &session,
            "enter",
            "claims",
            json!(document),
            Duration::ZERO,
        );
        match asked.await {
            Ok(Reply::Done(body)) => {
                let standing: Standing = parse("enter", &body)?;
                return entered_as(engine, claim, &id, sent, &standing);
            }
            Ok(Reply::Refused(problem)) if problem.code == "no_session" && tries < TRIES => {}
            Ok(Reply::Refused(problem)) if problem.code == "draining" && tries < TRIES => {
                session.avoid();
            }
            Ok(Reply::Refused(problem)) if problem.is_gone() => {
                engine.sessions.forget(claim.id);
                return Ok(Entered::Busy);
            }
            Ok(Reply::Refused(problem)) => {
                let error = problem.error("enter");
                unless_applied(engine, claim, &error);
                return Err(error);
            }
            Err(error) => {
                unless_applied(engine, claim, &error);
                if error.is_transient() {
                    session.avoid();
                }
                if !may_move(engine, claim, &error) || tries >= TRIES {
                    return Err(error);
                }
            }
        }
    }
}

/// Marks the claim as in doubt if the request may have been applied; otherwise forgets it.
fn unless_applied(engine: &Gateway, claim: &Claim, error: &Error) {
    match error.outcome() {
        Outcome::MaybeApplied => engine.sessions.doubt(claim.id),
        Outcome::NotApplied if !in_doubt(engine, claim) => engine.sessions.forget(claim.id),
        Outcome::NotApplied => {}
    }
}

fn in_doubt(engine: &Gateway, claim: &Claim) -> bool {
    let member = engine.sessions.member(claim.id);
    member.is_some_and(|member| member.in_doubt)
}

/// Whether a claim that failed with this error may be entered in another session at once.
fn may_move(engine: &Gateway, claim: &Claim, error: &Error) -> bool {
    let sure = error.outcome() == Outcome::NotApplied && !in_doubt(engine, claim);
    error.is_transient() && (sure || engine.client.has_others())
}

/// The session of a claim: its own if it was entered before, else one of its ttl.
///
/// A claim in doubt stays in its session, where a retry finds it. It moves only if that gateway is
/// down and there are others. What it may have left behind expires after its ttl, and nobody relies
/// on it.
async fn session(engine: &Gateway, claim: &Claim) -> Result<Arc<Session>> {
    if let Some(member) = engine.sessions.member(claim.id) {
        let moves = member.session.is_avoided() && (!member.in_doubt || engine.client.has_others());
        if !member.session.is_over() && !moves {
            return Ok(member.session);
        }
    }
    let (sessions, timeout) = (&engine.sessions, engine.client.timeout);
    let make = async {
        let opened = match engine.client.open(claim.ttl).await {
            // Another gateway may accept it, and the next attempt asks all of them.
            Err(error) if error.is_transient() && engine.client.has_others() => {
                engine.client.open(claim.ttl).await
            }
            opened => opened,
        };
        Ok(sessions.add(opened?))
    };
    let find = || sessions.find(claim.ttl);
    sessions.maker.find_or_make(timeout, find, make).await
}

fn entered_as(
    engine: &Gateway,
    claim: &Claim,
    id: &str,
    sent: BootTime,
    standing: &Standing,
) -> Result<Entered> {
    let known_as = standing.claim.as_ref().and_then(|id| id.parse().ok());
    let (Some(known_as), Some(valid)) = (known_as, standing.valid()) else {
        return Err(unreachable("enter", "the gateway's reply is incomplete").maybe_applied());
    };
    let sequence = standing.sequence();
    let armed = LeaseStart::promised(sent, valid);
    let sessions = &engine.sessions;
    sessions.stands(claim.id, Some(known_as), sequence, Some(armed));
    Ok(Entered::In {
        ticket: Ticket {
            sequence: sequence.unwrap_or(0),
            native: Some(id.into()),
            ..Ticket::own(claim.name.clone(), known_as)
        },
        armed,
        place: sequence.map_or(Place::Waiting, |sequence| Place::Held { sequence }),
    })
}

/// Sends a document about a claim to its session's gateway.
pub(super) async fn ask(
    engine: &Gateway,
    session: &Session,
    operation: &'static str,
    verb: &str,
    document: Value,
    longer: Duration,
) -> Result<Reply> {
    let call = Call {
        operation,
        method: Method::POST,
        path: &format!("/v1/{verb}"),
        session: Some(session),
        body: Some(document),
        within: engine.client.timeout + longer,
    };
    engine.client.send(call).await
}

pub(super) async fn wait(engine: &Gateway, ticket: &Ticket, until: BootTime) -> Result<Place> {
    let claim = own_id(ticket);
    loop {
        let Some(member) = engine.sessions.member(claim) else {
            return Ok(Place::Gone);
        };
        let nap = until.remaining().min(member.session.longest_wait());
        let nap = Duration::from_millis(nap.as_millis() as u64);
        // The reply does not extend the lease: only renewals do.
        let document = json!({
            "id": claim.to_string(),
            "wait": format!("{}ms", nap.as_millis()),
            "keep": false,
        });
        let asked = ask(
            engine,
            &member.session,
            "wait",
            "claims/wait",
            document,
            nap,
        );
        match asked.await? {
            Reply::Done(body) => {
                let standing: Standing = parse("wait", &body)?;
                if let Some(sequence) = standing.sequence() {
                    engine.sessions.stands(claim, None, Some(sequence), None);
                    return Ok(Place::Held { sequence });
                }
                if until.remaining() < Duration::from_millis(1) {
                    return Ok(Place::Waiting);
                }
            }
            // Left to the keeper, which learns of it by its next renewal, and that comes at once.
            Reply::Refused(problem) if problem.code == "evicted" => {
                engine.sessions.alarm(&member.session, claim);
                tokio::time::sleep(until.remaining()).await;
                return Ok(Place::Waiting);
            }
            Reply::Refused(problem) if problem.is_gone() => return Ok(Place::Gone),
            Reply::Refused(problem) => return unknown(&member, &problem.error("wait")),
        }
    }
}

/// The result of a refusal that is not about the place: unknown until the claim's lease has ended.
fn unknown(member: &Member, error: &Error) -> Result<Place> {
    if member.session.is_over() && member.ends.has_passed() {
        return Ok(Place::Gone);
    }
    Err(error.clone())
}
