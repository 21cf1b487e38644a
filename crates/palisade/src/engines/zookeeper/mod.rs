//! `zookeeper://` — lines kept in a ZooKeeper ensemble, beside Curator and kazoo.
//!
//! A place is an ephemeral sequential znode with Curator's name. The lowest sequence holds, and the
//! znode's czxid is the token. All places of a client with one ttl belong to one session, which the
//! keeper renews by a write. Taking a place and reading who is ahead take one round trip, leaving
//! it is one delete; waiting is a watch on the nearest place ahead.
//!
//! `acquire`, `release`, `renew`, `notify` and `inspect` are the verbs. `keys` is the layout,
//! `snapshot` a line as read, `renewals` what was seen of other sessions. `client` has the
//! sessions. The `driver` of a `session` keeps it on a `connection`, on the engine's `thread`;
//! `watches` has its listeners, and `touches` what the leader knows of it. `proto` and `jute` are
//! the wire format. `fence` is storage that compares tokens.

mod acquire;
#[cfg(feature = "baseline")]
mod baseline;
mod claims;
mod client;
mod condition;
mod config;
mod connection;
mod driver;
mod error;
mod fence;
mod inspect;
mod jute;
mod keys;
mod notify;
mod proto;
mod release;
mod renew;
mod renewals;
mod session;
mod snapshot;
mod thread;
mod touches;
mod watches;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

pub use condition::{Check, ZooKeeperHold};
pub(crate) use config::FACTORY;
pub use config::ZooKeeper;
pub(crate) use fence::open as open_fence;

use self::acquire::Known;
use self::claims::Claims;
use self::client::Client;
use self::keys::Keys;
use self::proto::Acl;
use self::renewals::Renewals;
use crate::core::capability::{Capability, TtlRange};
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Eviction, Left,
    Place, Renewal, cannot_resize,
};
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::queue::SharedQueueStore;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};

/// A client of an ensemble.
struct ZooKeeperEngine(Arc<Inner>);

/// What the verbs share.
struct Inner {
    keys: Keys,
    client: Client,
    shown: String,
    /// The ttls that the servers allow.
    ttl: TtlRange,
    known: Mutex<Claims>,
    renewals: Renewals,
}

impl Inner {
    fn known(&self, claim: ClaimId) -> Option<Known> {
        self.known.lock().get(claim).cloned()
    }

    fn update(&self, claim: ClaimId, change: impl FnOnce(&mut Known)) {
        if let Some(known) = self.known.lock().get_mut(claim) {
            change(known);
        }
    }

    /// Whether the session has claims.
    fn has_claims(&self, session: i64) -> bool {
        self.known.lock().of_session(session).next().is_some()
    }

    /// Whether the session has claims of agents.
    fn has_agents(&self, session: i64) -> bool {
        let known = self.known.lock();
        known.of_session(session).any(|known| known.is_agents)
    }

    /// Whether everyone may change the znodes that this client creates.
    fn makes_open_nodes(&self) -> bool {
        self.client.acl == Acl::open()
    }
}

impl Engine for ZooKeeperEngine {
    fn capability(&self) -> Capability {
        Capability {
            ttl: self.0.ttl,
            ..config::CAPABILITY
        }
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
        release::amend(&self.0, &ticket, amendment).await
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        release::leave(&self.0, &ticket).await
    }

    async fn audit(&self, lease: LeaseId) -> Result<Vec<Audited>> {
        renew::audit(&self.0, lease).await
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        notify::alarms(&self.0)
    }

    async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        inspect::survey(&self.0, &scope).await
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        notify::watch(Arc::clone(&self.0), &scope)
    }

    async fn evict(&self, name: Name, id: String, eviction: Eviction) -> Result<bool> {
        release::evict(&self.0, &name, &id, eviction).await
    }

    /// What a ticket weighs is in its node's name, which only its own session can change.
    fn resize(&self, _: Name, _: u32) -> BoxFuture<Result<bool>> {
        cannot_resize()
    }

    fn queues(&self) -> Option<SharedQueueStore> {
        None
    }

    async fn check(&self) -> Result<Checkup> {
        inspect::check(&self.0).await
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        // An amended claim has another znode than its ticket says.
        let known = self.0.known(ticket.claim);
        let node = known.and_then(|known| Some(format!("{}/{}", known.line, known.node?.name)));
        node.or_else(|| ticket.native.as_deref().map(str::to_owned))
    }

    async fn close(&self) {
        self.0.known.lock().clear();
        self.0.client.close().await;
    }
}
