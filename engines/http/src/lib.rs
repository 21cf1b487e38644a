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
pub mod config;
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
pub use self::config::FACTORY;
use self::keys::Names;
use self::sessions::Sessions;
use palisade_core::Capability;
use palisade_core::engine::{Engine, Ticket};
use palisade_kit::{Host, absent, rooms};

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

    rooms! { self.0:
        acquire { enter wait }
        renew { renew }
        release { leave amend evict }
        notify { alarms watch }
        inspect { survey check }
        absent { audit resize queues }
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
