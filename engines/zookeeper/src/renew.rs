//! `renew` and `audit`: renews sessions by a write that a majority accepts, and lists their znodes,
//! so that the keeper can leave places that nobody knows.

use std::time::Duration;

use futures_util::future::join_all;

use super::Inner;
use super::error;
use super::keys::{Child, Keys};
use super::proto::{ANY, Lives, Request, code};
use super::session::Session;
use palisade_core::engine::{Audited, Lease, LeaseId, Renewal, Ticket};
use palisade_core::{Error, ErrorKind, Name, Result};

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
    let is_idle = session.idle() > session.armed().ttl && !engine.has_claims(&session, |_| true);
    if is_idle && engine.client.retire(&session) {
        session.close().await;
        return Renewal::Lost;
    }
    let check = Request::Check(engine.keys.base().to_owned(), ANY);
    let mut writes = vec![Request::Multi(vec![check])];
    if engine.has_claims(&session, |known| known.is_agents) {
        // For the deadlock detection of others. It renews like the first write, and its result is
        // ignored.
        let node = engine.keys.session(session.id());
        writes.push(Request::SetData(node, Vec::new(), ANY));
    }
    let before = session.armed();
    let answers = match session.call("renew", within, writes).await {
        Ok(answers) => answers,
        Err(over) if over.kind() == ErrorKind::Lost => return Renewal::Lost,
        Err(error) => return Renewal::Unknown(error.maybe_applied()),
    };
    if matches!(answers.get(1), Some(Err(refused)) if refused.is(code::NO_NODE)) {
        show(engine, &session);
    }
    let armed = session.armed();
    if armed.sent > before.sent {
        return Renewal::Held(armed);
    }
    let message = "the server did not accept the write that renews the session";
    Renewal::Unknown(Error::new(ErrorKind::Unreachable, "renew", message).maybe_applied())
}

/// Creates the znode that shows the renewals of a session. Best effort: without it a deadlock with
/// this session in it is reported, but not broken.
fn show(engine: &Inner, session: &Session) {
    let node = engine.keys.session(session.id());
    let make = |path: &str| Request::Create {
        path: path.to_owned(),
        data: Vec::new(),
        acl: engine.client.acl,
        lives: if path == node {
            Lives::Ephemeral
        } else {
            Lives::Container
        },
    };
    drop(session.send(Keys::parents(&node).map(make).collect()));
}

/// The places of a session.
pub(super) async fn audit(engine: &Inner, lease: LeaseId) -> Result<Vec<Audited>> {
    let Some(session) = engine.client.of_lease(lease) else {
        let message = "the session has ended; its renewal will say so";
        return Err(Error::new(ErrorKind::Lost, "audit", message));
    };
    if !session.audits() {
        let message = "the places were listed just now";
        return Err(Error::new(ErrorKind::Unreachable, "audit", message));
    }
    let list = Request::Ephemerals(engine.keys.base().to_owned());
    let listed = session.ask("audit", engine.client.timeout, list).await?;
    let listed = listed.map_err(|refused| error::refused("audit", refused))?;
    let audited = |path: String| {
        let (line, child) = path.rsplit_once('/')?;
        let claim = Child::read(child)?.claim?;
        let known = engine.known(line, claim);
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
    Ok(listed.names.into_iter().filter_map(audited).collect())
}
