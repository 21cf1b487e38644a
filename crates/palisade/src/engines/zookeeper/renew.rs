//! `renew` and `audit`: renews sessions by a write that a majority accepts, and lists their znodes,
//! so that the keeper can leave places that nobody knows.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::Inner;
use super::acquire::unexpected;
use super::error;
use super::keys::{Child, Keys};
use super::proto::{ANY, Lives, Request, code};
use super::session::Session;
use crate::core::engine::{Audited, Renewal};
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::name::Name;
use crate::core::ticket::{Lease, LeaseId, Ticket};
use crate::engines::kit::timed;

pub(super) async fn renew(engine: &Inner, leases: &[Lease], within: Duration) -> Vec<Renewal> {
    join_all(
        leases
            .iter()
            .map(|lease| renew_one(engine, lease.id, within)),
    )
    .await
}

/// Renews a session. A server that is cut off from its leader answers reads, pings and `sync`, so
/// only a write proves that the session is alive. This one checks a znode and changes nothing, and
/// it does not matter whether the znode exists.
async fn renew_one(engine: &Inner, lease: LeaseId, within: Duration) -> Renewal {
    let Some(session) = engine.client.of_lease(lease) else {
        return Renewal::Lost;
    };
    // It was not used for a while, and another session serves requests without a claim.
    let is_idle = session.idle() > session.armed().ttl && !engine.has_claims(session.id());
    if is_idle && engine.client.retire(&session) {
        session.close().await;
        return Renewal::Lost;
    }
    let mut writes = vec![Request::multi(&[Request::check(engine.keys.base(), ANY)])];
    if engine.has_agents(session.id()) {
        // For the deadlock detection of others. It renews like the first write, and its result is
        // ignored.
        let node = engine.keys.session(session.id());
        writes.push(Request::set_data(&node, &[], ANY));
    }
    let (before, generation) = (session.armed(), session.generation());
    // The connection may be dead though the server is healthy, so the next renewal uses another
    // one.
    match timed("renew", within, session.call(writes)).await {
        Err(late) => {
            session.give_up(generation);
            Renewal::Unknown(late)
        }
        Ok(Err(failure)) => match error::failed("renew", failure) {
            over if over.kind() == ErrorKind::Lost => Renewal::Lost,
            error => Renewal::Unknown(error.maybe_applied()),
        },
        Ok(Ok(answers)) => {
            session.answered();
            let shown = answers.get(1);
            if shown.is_some_and(|answer| answer.error == code::NO_NODE) {
                show(engine, &session);
            }
            let armed = session.armed();
            if armed.sent > before.sent {
                return Renewal::Held(armed);
            }
            let message = "the server did not accept the write that renews the session";
            Renewal::Unknown(Error::new(ErrorKind::Unreachable, "renew", message).maybe_applied())
        }
    }
}

/// Creates the znode that shows the renewals of a session. Best effort: without it a deadlock with
/// this session in it is reported, but not broken.
fn show(engine: &Inner, session: &Arc<Session>) {
    let (node, acl) = (engine.keys.session(session.id()), &engine.client.acl);
    let make = |path: &str| {
        let lives = if path == node {
            Lives::Ephemeral
        } else {
            Lives::Container
        };
        Request::create(path, &[], acl, lives)
    };
    let (make, session) = (
        Keys::parents(&node).map(make).collect(),
        Arc::clone(session),
    );
    engine.client.thread.spawn(async move {
        let _ = session.call(make).await;
    });
}

/// The places of a session.
pub(super) async fn audit(engine: &Inner, lease: LeaseId) -> Result<Vec<Audited>> {
    let Some(session) = engine.client.of_lease(lease) else {
        let message = "the session has ended; its renewal will say so";
        return Err(Error::new(ErrorKind::Lost, "audit", message));
    };
    let list = Request::ephemerals(engine.keys.base());
    let answers = engine.client.call(&session, "audit", vec![list]).await?;
    let listed = answers.first().ok_or_else(unexpected)?.ephemerals();
    let listed = listed.map_err(|refused| error::refused("audit", refused))?;
    let audited = |path: String| {
        let (line, child) = path.rsplit_once('/')?;
        let claim = Child::read(child)?.claim?;
        let known = engine.known(claim);
        let node = known.as_ref().and_then(|known| known.node.as_ref());
        let ticket = Ticket {
            name: Name::new(engine.keys.name(line)?).ok()?,
            claim,
            lease,
            sequence: node.map_or(0, |node| node.sequence()),
            native: Some(path.as_str().into()),
            in_doubt: false,
        };
        let evicted = known.is_some_and(|known| known.evicted);
        Some(Audited { ticket, evicted })
    };
    Ok(listed.into_iter().filter_map(audited).collect())
}
