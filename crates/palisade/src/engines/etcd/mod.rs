//! `etcd://` — lines kept in an etcd cluster, beside Go's `concurrency` package.
//!
//! A place is a key on a lease; the lowest create revision holds, and is the token. All places of a
//! client share one lease per ttl, which the keeper renews. Taking a place and leaving it are one
//! transaction each; waiting is a watch on the nearest place ahead.
//!
//! `acquire`, `release`, `renew`, `notify` and `inspect` are the verbs. `keys` is the layout,
//! `snapshot` a line as read, `leases` the leases of places. `client` makes the calls from the
//! messages of `txn` and `proto`, over `transport`; `watch` shares the watches of a connection.

mod acquire;
#[cfg(feature = "baseline")]
mod baseline;
mod client;
mod condition;
mod config;
mod error;
mod fence;
mod inspect;
mod keys;
mod leases;
mod notify;
mod proto;
mod release;
mod renew;
mod snapshot;
mod transport;
mod txn;
mod watch;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OnceCell, broadcast};

pub use condition::{Condition, EtcdHold};
pub use config::Etcd;
pub(crate) use config::FACTORY;
pub(crate) use fence::open as open_fence;

use self::acquire::Known;
use self::client::Client;
use self::keys::Keys;
use self::leases::Leases;
use self::proto::RequestOp;
use self::transport::Endpoints;
use crate::core::capability::Capability;
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxStream, Engine, Entered, Eviction, Left, Place, Renewal,
};
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::queue::SharedQueueStore;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};

/// A client of a cluster.
struct EtcdEngine(Arc<Inner>);

/// What the verbs share.
struct Inner {
    keys: Keys,
    client: Client,
    endpoints: Arc<Endpoints>,
    shown: String,
    leases: Leases,
    /// The claims of this client, from their enter to their leave.
    known: Mutex<HashMap<ClaimId, Known>>,
    /// Set once the user is known to have the rights that locks need.
    allowed: OnceCell<()>,
    alarms: broadcast::Sender<Alarm>,
}

impl Inner {
    /// The key of a ticket: its own, or that of an enter that was never answered.
    fn key_of(&self, ticket: &Ticket) -> Option<Arc<str>> {
        // It can't be derived from the claim's id, because a reused key contains the id of an
        // earlier claim.
        let known = || Some(Arc::clone(&self.known.lock().get(&ticket.claim)?.key));
        ticket.native.clone().or_else(known)
    }

    /// The operations that delete a place, without its eviction mark.
    fn deletes(&self, key: &[u8]) -> Vec<RequestOp> {
        let mut deletes = vec![txn::delete(key)];
        if self.keys.shared_with_others() {
            deletes.push(txn::delete(keys::owner_key(key)));
        }
        deletes
    }

    /// Takes back a key whose place is known to have been left.
    fn free_key(&self, lease: i64, prefix: String, key: Arc<str>) {
        // With `namespace=` the value of a key does not name its claim, so the key can't be reused.
        if !self.keys.shared_with_others() {
            self.leases.free_key(lease, prefix, key);
        }
    }

    fn alarm(&self, alarm: Alarm) {
        // Nobody listens before the first claim.
        let _ = self.alarms.send(alarm);
    }
}

impl Engine for EtcdEngine {
    fn capability(&self) -> Capability {
        config::CAPABILITY
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
        notify::alarms(Arc::clone(&self.0))
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

    async fn resize(&self, name: Name, capacity: u32) -> Result<bool> {
        release::resize(&self.0, &name, capacity).await
    }

    fn queues(&self) -> Option<SharedQueueStore> {
        None
    }

    async fn check(&self) -> Result<Checkup> {
        inspect::check(&self.0).await
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.0.key_of(ticket).map(|key| key.as_ref().to_owned())
    }

    async fn close(&self) {
        self.0.leases.revoke_all(&self.0.client).await;
        self.0.client.links.close();
    }
}
