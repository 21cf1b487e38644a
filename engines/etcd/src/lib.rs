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

use parking_lot::Mutex;
use tokio::sync::{OnceCell, broadcast};

pub use condition::{Condition, EtcdHold};
pub use config::Etcd;
pub use config::FACTORY;
pub use fence::open as open_fence;

use self::acquire::Known;
use self::client::Client;
use self::keys::Keys;
use self::leases::Leases;
use self::proto::RequestOp;
use self::transport::Endpoints;
use palisade_core::Capability;
use palisade_core::engine::{Alarm, ClaimId, Engine, Ticket};
use palisade_kit::{absent, rooms};

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

    rooms! { self.0:
        acquire { enter wait }
        renew { renew audit }
        release { leave amend evict resize }
        notify { alarms watch }
        inspect { survey check }
        absent { queues }
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.0.key_of(ticket).map(|key| key.as_ref().to_owned())
    }

    async fn close(&self) {
        self.0.leases.revoke_all(&self.0.client).await;
        self.0.client.links.close();
    }
}
