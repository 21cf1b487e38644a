//! `renew`: one keep-alive for all claims of a session.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;

use super::Gateway;
use super::api::{Kept, Standing};
use super::client::{Call, Reply};
use super::error::parse;
use super::sessions::{Member, Session, own_id};
use palisade_core::engine::{ClaimId, Lease, LeaseStart, Renewal, unreachable};
use palisade_core::{BootTime, Error, Result};

/// The most claims in one keep-alive: some 40 KiB, where a gateway accepts 1 MiB.
const CLAIMS: usize = 1024;

/// A lease to renew: its index in the request, and its claim.
type Due = (usize, ClaimId);

pub(super) async fn renew(engine: &Gateway, leases: &[Lease], within: Duration) -> Vec<Renewal> {
    let mut renewals: Vec<Renewal> = leases.iter().map(|_| Renewal::Lost).collect();
    // A linear search is enough, because a client has few sessions.
    let mut due: Vec<(Arc<Session>, Vec<Due>)> = Vec::new();
    for (at, lease) in leases.iter().enumerate() {
        let Some(ticket) = &lease.ticket else {
            continue;
        };
        let claim = own_id(ticket);
        let member = engine.sessions.member(claim);
        // An unknown claim was left or lost before.
        if let Some(member) = member.filter(|member| !member.is_other(ticket)) {
            let known = due
                .iter_mut()
                .find(|(session, _)| Arc::ptr_eq(session, &member.session));
            match known {
                Some((_, due)) => due.push((at, claim)),
                None => due.push((member.session, vec![(at, claim)])),
            }
        }
    }
    let batches = due.iter().flat_map(|(session, due)| {
        let batches = due.chunks(CLAIMS);
        batches.map(move |due| keep_alive(engine, session, due, within))
    });
    for (at, renewal) in join_all(batches).await.into_iter().flatten() {
        renewals[at] = renewal;
    }
    renewals
}

async fn keep_alive(
    engine: &Gateway,
    session: &Session,
    due: &[Due],
    within: Duration,
) -> Vec<(usize, Renewal)> {
    let sent = BootTime::now();
    let kept = asked(engine, session, due, within).await;
    if let Ok(kept) = &kept
        && kept.draining
        && engine.client.has_others()
    {
        session.avoid();
    }
    let said: Result<HashMap<&str, &Standing>, &Error> = kept.as_ref().map(|kept| {
        let claims = kept.claims.iter();
        claims.map(|said| (said.id.as_str(), said)).collect()
    });
    let renewals = due.iter().map(|(at, claim)| {
        let renewal = match &said {
            Ok(said) => said_of(engine, *claim, said.get(claim.to_string().as_str()), sent),
            Err(error) => unknown(engine, *claim, error),
        };
        (*at, renewal)
    });
    renewals.collect()
}

async fn asked(engine: &Gateway, session: &Session, due: &[Due], within: Duration) -> Result<Kept> {
    let claims: Vec<String> = due.iter().map(|(_, claim)| claim.to_string()).collect();
    let call = Call {
        operation: "renew",
        method: Method::POST,
        path: "/v1/sessions/keepalive",
        session: Some(session),
        body: Some(json!({"claims": claims})),
        within: within.min(engine.client.timeout),
    };
    match engine.client.send(call).await? {
        Reply::Done(body) => parse("renew", &body),
        Reply::Refused(problem) => Err(problem.error("renew")),
    }
}

/// The renewal of a claim, from the reply of a gateway that knows the session.
fn said_of(engine: &Gateway, claim: ClaimId, said: Option<&&Standing>, sent: BootTime) -> Renewal {
    let Some(said) = said else {
        let message = "the gateway's reply does not mention this claim";
        return Renewal::Unknown(unreachable("renew", message));
    };
    match (said.state.as_str(), said.valid()) {
        ("held" | "waiting", Some(valid)) => {
            let armed = LeaseStart::promised(sent, valid);
            let sessions = &engine.sessions;
            sessions.stands(claim, None, said.sequence(), Some(armed));
            Renewal::Held(armed)
        }
        ("evicted", _) => Renewal::Evicted,
        _ => {
            engine.sessions.forget(claim);
            Renewal::Lost
        }
    }
}

/// Without a reply, or if the gateway does not know the session, the outcome is unknown until the
/// claim's own lease has ended.
fn unknown(engine: &Gateway, claim: ClaimId, error: &Error) -> Renewal {
    let over = |member: Member| member.ends.has_passed();
    if engine.sessions.member(claim).is_none_or(over) {
        return Renewal::Lost;
    }
    Renewal::Unknown(error.clone())
}
