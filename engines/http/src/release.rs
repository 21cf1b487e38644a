//! `leave`, `amend` and `evict`.

use reqwest::Method;
use serde_json::json;

use super::Gateway;
use super::acquire::ask;
use super::api::words;
use super::client::{Call, Reply};
use super::error::Problem;
use super::sessions::own_id;
use palisade_core::engine::{Amended, Amendment, Left, Mode, Ticket};
use palisade_core::{Error, ErrorKind, Eviction, Name, Result};
use std::time::Duration;

pub(super) async fn leave(engine: &Gateway, ticket: &Ticket) -> Result<Left> {
    let claim = own_id(ticket);
    let Some(member) = engine.sessions.member(claim) else {
        // It was never sent from here, and will not be.
        engine.sessions.bury(claim, engine.default_ttl);
        return Ok(Left::Absent);
    };
    if member.is_other(ticket) {
        return Ok(Left::Absent);
    }
    let document = json!({"id": claim.to_string()});
    let asked = ask(
        engine,
        &member.session,
        "leave",
        "/v1/claims/release",
        document,
        Duration::ZERO,
    );
    let left = match asked.await? {
        Reply::Done(_) => Left::Done,
        // An evicted claim is kept for its owner until it leaves.
        Reply::Refused(problem) if problem.code == "evicted" => Left::Done,
        Reply::Refused(problem) if problem.is_gone() => Left::Absent,
        // What is left at the engine expires after its ttl.
        Reply::Refused(problem) if problem.code == "no_session" => Left::Absent,
        Reply::Refused(problem) => return Err(problem.error("leave")),
    };
    engine.sessions.bury(claim, engine.default_ttl);
    Ok(left)
}

pub(super) async fn amend(
    engine: &Gateway,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    let claim = own_id(ticket);
    let member = engine.sessions.member(claim);
    let Some(member) = member.filter(|member| !member.is_other(ticket)) else {
        return Ok(Amended::Gone);
    };
    let id = claim.to_string();
    let document = match amendment {
        Amendment::Value(value) => json!({"id": id, "value": value}),
        Amendment::Ask(ask) if ask.mode() == Mode::Permits => {
            let message = "a gateway changes no permits; release them and ask for others";
            return Err(Error::new(ErrorKind::Unsupported, "amend", message));
        }
        Amendment::Ask(ask) => json!({"id": id, "mode": words(*ask).0}),
    };
    let asked = ask(
        engine,
        &member.session,
        "amend",
        "/v1/claims/amend",
        document,
        Duration::ZERO,
    );
    match asked.await? {
        Reply::Done(_) => Ok(Amended::Done),
        Reply::Refused(problem) if problem.code == "busy" => Ok(Amended::Busy),
        Reply::Refused(problem) if problem.is_gone() => Ok(Amended::Gone),
        Reply::Refused(problem) => Err(problem.error("amend")),
    }
}

pub(super) async fn evict(
    engine: &Gateway,
    name: &Name,
    id: &str,
    eviction: Eviction,
) -> Result<bool> {
    let how = match eviction {
        Eviction::Mark => "mark",
        Eviction::Remove => "force",
    };
    let document = json!({
        "name": engine.names.there(name)?,
        "claim": id,
        "how": how,
        "reason": "asked for through the http engine",
    });
    let call = Call {
        operation: "evict",
        method: Method::POST,
        path: "/v1/evictions",
        session: None,
        body: Some(document),
        within: engine.client.timeout,
    };
    let absent = |problem: &Problem| problem.code == "absent";
    match engine.client.send(call).await? {
        Reply::Done(_) => Ok(true),
        Reply::Refused(problem) if absent(&problem) => Ok(false),
        Reply::Refused(problem) => Err(problem.error("evict")),
    }
}
