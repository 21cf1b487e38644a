//! `enter` and `wait`: how a claim gets its place, and learns of its grant.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use super::Gateway;
use super::api::{Enter, Standing, words};
use super::client::{Call, Reply};
use super::error::{Problem, parse};
use super::sessions::{Entry, Member, Session, own_id};
use palisade_core::engine::{Claim, Entered, LeaseStart, Place, Ticket, unreachable};
use palisade_core::{BootTime, Error, Outcome, Result};

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
    let (mut tries, mut opened) = (0, None);
    let (sent, standing) = loop {
        let has_others = engine.client.has_others();
        let member = match engine.sessions.enter(claim, opened.take(), has_others) {
            Entry::In(member) => member,
            Entry::Left => return Ok(Entered::Busy),
            Entry::NoSession => {
                opened = Some(open_session(engine, claim.ttl).await?);
                continue;
            }
        };
        tries += 1;
        document.queue = member.queue;
        let (session, document) = (&member.session, json!(document));
        let sent = BootTime::now();
        let asked = ask(
            engine,
            session,
            "enter",
            "/v1/claims",
            document,
            Duration::ZERO,
        );
        let is_last = tries == TRIES;
        match asked.await {
            Ok(Reply::Done(body)) => break (sent, parse::<Standing>("enter", &body)?),
            Ok(Reply::Refused(problem)) => {
                if let Some(over) = refused(engine, claim, session, &problem, is_last)? {
                    return Ok(over);
                }
            }
            Err(error) => {
                unless_applied(engine, claim, &error);
                if error.is_transient() {
                    session.avoid();
                }
                if is_last || !may_move(engine, claim, &error) {
                    return Err(error);
                }
            }
        }
    };
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

/// The result of an enter that its gateway refused; `None` to try again.
fn refused(
    engine: &Gateway,
    claim: &Claim,
    session: &Session,
    problem: &Problem,
    is_last: bool,
) -> Result<Option<Entered>> {
    match problem.code.as_str() {
        "no_session" if !is_last => Ok(None),
        "draining" if !is_last => {
            session.avoid();
            Ok(None)
        }
        _ if problem.is_gone() => {
            engine.sessions.forget(claim.id);
            Ok(Some(Entered::Busy))
        }
        _ => {
            let error = problem.error("enter");
            unless_applied(engine, claim, &error);
            Err(error)
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

/// A session for claims of this ttl, newly opened unless another claim has just opened one.
async fn open_session(engine: &Gateway, ttl: Duration) -> Result<Arc<Session>> {
    let (sessions, timeout) = (&engine.sessions, engine.client.timeout);
    let make = async {
        let opened = match engine.client.open(ttl).await {
            // Another gateway may accept it, and the next attempt asks all of them.
            Err(error) if error.is_transient() && engine.client.has_others() => {
                engine.client.open(ttl).await
            }
            opened => opened,
        };
        Ok(sessions.add(opened?))
    };
    let find = || sessions.find(ttl);
    sessions.maker.find_or_make(timeout, find, make).await
}

/// Sends a document about a claim to its session's gateway.
pub(super) async fn ask(
    engine: &Gateway,
    session: &Session,
    operation: &'static str,
    path: &str,
    document: Value,
    longer: Duration,
) -> Result<Reply> {
    engine
        .client
        .send(Call {
            operation,
            method: Method::POST,
            path,
            session: Some(session),
            body: Some(document),
            within: engine.client.timeout + longer,
        })
        .await
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
            "/v1/claims/wait",
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
