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
use crate::core::claim::ClaimId;
use crate::core::engine::Engine;
use crate::core::ticket::Ticket;
use crate::engines::kit::{absent, rooms};

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

    rooms! { self.0:
        acquire { enter wait }
        renew { renew audit }
        release { leave amend evict }
        notify { alarms watch }
        inspect { survey check }
        absent { resize queues }
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
