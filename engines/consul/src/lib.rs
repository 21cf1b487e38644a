//! `consul://` and `consuls://` — a Consul agent: sessions that hold keys.
//!
//! The exclusive lock is Consul's own (`api.Lock`), and permits are its semaphore, so that with
//! `namespace=` palisade and `consul lock` exclude each other. Readers have a layout of our own.
//! Only transactions decide who holds, guarded by the ModifyIndex. The token is the ModifyIndex of
//! the transaction that took the lock. All claims of one ttl share sessions, which the keeper
//! renews.
//!
//! `acquire` reads a `snapshot` of the line, which decides on a transaction of `kv` operations;
//! `client` sends it, and `sessions` records its outcome.

mod acquire;
#[cfg(feature = "baseline")]
mod baseline;
mod client;
pub mod config;
mod error;
mod inspect;
mod keys;
mod kv;
mod notify;
mod release;
mod renew;
mod sessions;
mod snapshot;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast;

use self::client::{Client, SessionSettings};
pub use self::config::FACTORY;
use self::keys::Keys;
use self::kv::session_text;
use self::sessions::Sessions;
use self::snapshot::Spot;
use palisade_core::Capability;
use palisade_core::engine::{Alarm, Engine, Ticket};
use palisade_kit::shared_sessions::Maker;
use palisade_kit::single_flight::SingleFlight;
use palisade_kit::{Host, absent, rooms};

/// A namespace of one Consul.
struct Consul {
    client: Client,
    keys: Keys,
    sessions: Sessions,
    flight: SingleFlight,
    maker: Maker,
    alarms: broadcast::Sender<Alarm>,
    capability: Capability,
    default_ttl: Duration,
    lock_delay: Duration,
    checks: Vec<String>,
    hosts: Vec<Host>,
    encrypted: bool,
    shown: String,
}

impl Consul {
    fn alarm(&self, alarm: Alarm) {
        // Nobody listening is no error.
        let _ = self.alarms.send(alarm);
    }

    fn session_settings(&self, ttl: Duration) -> SessionSettings {
        SessionSettings {
            ttl,
            lock_delay: self.lock_delay,
            checks: self.checks.clone(),
        }
    }
}

/// The engine. A write is completed even if its caller is dropped, and keeps the engine alive.
struct ConsulEngine(Arc<Consul>);

impl Engine for ConsulEngine {
    fn capability(&self) -> Capability {
        self.0.capability
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
        let line = self.0.keys.line(&ticket.name).ok()?;
        let member = self.0.sessions.member(ticket.claim);
        let spot = member.map_or(Spot::Whole, |member| Spot::of(member.claim.ask));
        Some(spot.key(&line, ticket.claim, &session_text(ticket.lease.0)))
    }

    /// Ends all sessions, which releases the locks that they still hold.
    async fn close(&self) {
        let client = &self.0.client;
        let sessions = self.0.sessions.close().into_iter().map(session_text);
        let sessions: Vec<String> = sessions.collect();
        let ends = sessions.iter().map(|id| client.destroy_session(id));
        // A session that can't be ended now expires after its ttl.
        futures_util::future::join_all(ends).await;
        client.close();
    }
}
