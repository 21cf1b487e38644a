//! `http://`, `https://` and `http+unix:` — a palisade gateway, and whatever is behind it.
//!
//! A claim belongs to a session at the gateway, which takes its place with the library; this engine
//! sends requests and relies on the promised validity. **A promise counts from before the request
//! was sent, and no margin is subtracted again.** Without a reply, or from a gateway that does not
//! know the session, nothing is learned: a hold stays valid until its own deadline.
//!
//! `acquire` finds a session of the claim's ttl in `sessions`, and `client` sends a document of
//! `api` to the gateway of that session. Claims are identified by the gateway's id
//! (`Ticket::claim`), and by ours within the session (`Ticket::native`).

mod acquire;
mod api;
mod client;
pub(crate) mod config;
mod error;
mod inspect;
mod keys;
mod notify;
mod release;
mod renew;
mod sessions;

use std::sync::Arc;
use std::time::Duration;

use self::client::Client;
pub(crate) use self::config::FACTORY;
use self::keys::Names;
use self::sessions::Sessions;
use crate::core::capability::Capability;
use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxStream, Engine, Entered, Eviction, Left, Place, Renewal,
    cannot_resize,
};
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::queue::SharedQueueStore;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};
use crate::engines::kit::Host;

/// Gateways in front of one engine.
struct Gateway {
    client: Client,
    names: Names,
    sessions: Sessions,
    capability: Capability,
    default_ttl: Duration,
    /// Where it asks over a network.
    hosts: Vec<Host>,
    encrypted: bool,
    shown: String,
}

/// The engine. The listener for alarms keeps it alive.
struct HttpEngine(Arc<Gateway>);

impl Engine for HttpEngine {
    fn capability(&self) -> Capability {
        self.0.capability
    }

    fn describe(&self) -> String {
        self.0.shown.clone()
    }

    async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        acquire::enter(&self.0, &claim).await
    }

    async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        acquire::wait(&self.0, &ticket, until).await
    }

    async fn renew(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        renew::renew(&self.0, &leases, within).await
    }

    async fn amend(&self, ticket: Ticket, amendment: Amendment) -> Result<Amended> {
        release::amend(&self.0, &ticket, &amendment).await
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        release::leave(&self.0, &ticket).await
    }

    /// Every ticket has a lease of its own.
    async fn audit(&self, _: LeaseId) -> Result<Vec<Audited>> {
        Ok(Vec::new())
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        notify::alarms(&self.0)
    }

    async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        inspect::survey(&self.0, &scope).await
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        notify::watch(&self.0, &scope)
    }

    async fn evict(&self, name: Name, id: String, eviction: Eviction) -> Result<bool> {
        release::evict(&self.0, &name, &id, eviction).await
    }

    async fn resize(&self, _: Name, _: u32) -> Result<bool> {
        cannot_resize().await
    }

    fn queues(&self) -> Option<SharedQueueStore> {
        None
    }

    async fn check(&self) -> Result<Checkup> {
        inspect::check(&self.0).await
    }

    fn key(&self, _: &Ticket) -> Option<String> {
        None
    }

    /// Ends all sessions, which releases their claims.
    async fn close(&self) {
        let sessions = self.0.sessions.close();
        let ends = sessions.iter().map(|session| self.0.client.end(session));
        // A session that can't be ended now expires after its ttl.
        futures_util::future::join_all(ends).await;
        self.0.client.close();
    }
}
