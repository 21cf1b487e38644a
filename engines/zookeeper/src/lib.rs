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
//! `watches` has its listeners, and `proto` is the wire format. `fence` is storage that compares
//! tokens.

mod acquire;
#[cfg(feature = "baseline")]
mod baseline;
mod client;
mod condition;
mod config;
mod connection;
mod driver;
mod error;
mod fence;
mod inspect;
mod keys;
mod notify;
mod proto;
mod release;
mod renew;
mod renewals;
mod session;
mod snapshot;
mod thread;
mod watches;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

pub use condition::{Check, ZooKeeperHold};
pub use config::FACTORY;
pub use config::ZooKeeper;
pub use fence::open as open_fence;

use self::acquire::{Known, Node};
use self::client::Client;
use self::keys::Keys;
use self::renewals::Renewals;
use self::session::Session;
use palisade_core::Capability;
use palisade_core::engine::{ClaimId, Engine, Ticket, TtlRange};
use palisade_kit::{absent, rooms};

/// A client of an ensemble.
struct ZooKeeperEngine(Arc<Inner>);

/// What the verbs share.
struct Inner {
    keys: Keys,
    client: Client,
    shown: String,
    /// The ttls that the servers allow, and the one of claims that name none.
    ttl: TtlRange,
    default_ttl: Duration,
    /// The claims of this client by their lines, each from its enter to its leave.
    claims: Mutex<HashMap<Arc<str>, HashMap<ClaimId, Known>>>,
    renewals: Renewals,
}

impl Inner {
    fn known(&self, line: &str, claim: ClaimId) -> Option<Known> {
        self.claims.lock().get(line)?.get(&claim).cloned()
    }

    fn remember(&self, line: &Arc<str>, claim: ClaimId, known: Known) {
        self.claims
            .lock()
            .entry(Arc::clone(line))
            .or_default()
            .insert(claim, known);
    }

    fn update(&self, line: &str, claim: ClaimId, change: impl FnOnce(&mut Known)) {
        let mut claims = self.claims.lock();
        if let Some(known) = claims.get_mut(line).and_then(|line| line.get_mut(&claim)) {
            change(known);
        }
    }

    fn forget(&self, line: &str, claim: ClaimId) {
        let mut claims = self.claims.lock();
        if let Some(known) = claims.get_mut(line) {
            known.remove(&claim);
            if known.is_empty() {
                claims.remove(line);
            }
        }
    }

    /// Whether other claims of this client are in the line.
    fn has_others(&self, line: &str, claim: ClaimId) -> bool {
        self.claims
            .lock()
            .get(line)
            .is_some_and(|own| own.keys().any(|other| *other != claim))
    }

    /// The last of our znodes in the line before `node`. An older znode is further ahead.
    fn own_before(&self, line: &str, node: &Node) -> Option<String> {
        let claims = self.claims.lock();
        let own = claims.get(line)?.values();
        let own = own.filter_map(|known| known.node.as_ref());
        let ahead = own.filter(|other| other.token < node.token);
        let last = ahead.max_by_key(|other| other.token);
        last.map(|other| other.name.clone())
    }

    /// Whether the session has claims that fit.
    fn has_claims(&self, session: &Session, fits: impl Fn(&Known) -> bool) -> bool {
        let claims = self.claims.lock();
        let mut known = claims.values().flat_map(HashMap::values);
        known.any(|known| known.session.id() == session.id() && fits(known))
    }
}

impl Engine for ZooKeeperEngine {
    fn capability(&self) -> Capability {
        let mut can = config::CAPABILITY;
        can.ttl = self.0.ttl;
        can
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
        let line = self.0.keys.line(&ticket.name).ok()?;
        let node = self
            .0
            .known(&line, ticket.claim)
            .and_then(|known| known.node);
        let node = node.map(|node| format!("{line}/{}", node.name));
        node.or_else(|| ticket.native.as_deref().map(str::to_owned))
    }

    async fn close(&self) {
        self.0.claims.lock().clear();
        self.0.client.close().await;
    }
}
