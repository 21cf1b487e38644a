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
pub(crate) mod config;
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
pub(crate) use self::config::FACTORY;
use self::keys::Keys;
use self::kv::session_text;
use self::sessions::Sessions;
use self::snapshot::Spot;
use crate::core::capability::Capability;
use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxStream, Engine, Entered, Eviction, Left, Place, Renewal,
};
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::queue::SharedQueueStore;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};
use crate::engines::kit::Host;
use crate::engines::kit::shared_sessions::Maker;
use crate::engines::kit::single_flight::SingleFlight;

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

    async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        acquire::enter(&self.0, claim).await
    }

    async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        acquire::wait(&self.0, ticket, until).await
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
        notify::watch(&self.0, scope)
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
