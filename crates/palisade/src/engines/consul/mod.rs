//! `consul://` and `consuls://` — a Consul agent: sessions that hold keys.
//!
//! The exclusive lock is Consul's own (`api.Lock`), permits are its semaphore, so that with
//! `namespace=` palisade and `consul lock` exclude each other; readers are a line of our own.
//! Ownership is decided by transactions alone, guarded by indexes. The token is the index of the
//! transaction that took the lock. Sessions are shared by all claims of one ttl and renewed by
//! the keeper.
//!
//! `acquire` reads a `snapshot` of the line, which decides on a transaction of `kv` operations,
//! which `client` sends; `sessions` knows what became of it.

mod acquire;
#[cfg(feature = "baseline")]
mod baseline;
mod client;
mod config;
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

use tokio::sync::{Mutex, broadcast};

use self::client::{Client, SessionSettings};
pub(crate) use self::config::OFFER;
use self::keys::Keys;
use self::kv::session_text;
use self::sessions::Sessions;
use self::snapshot::Spot;
use crate::core::capability::Capability;
use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Eviction, Left,
    Place, Renewal,
};
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};
use crate::engines::kit::single_flight::SingleFlight;
use crate::engines::remote::Host;

/// A namespace of one Consul.
struct Consul {
    client: Client,
    keys: Keys,
    sessions: Sessions,
    flight: SingleFlight,
    /// One session is made at a time.
    making: Mutex<()>,
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

/// The engine: a write goes on when its caller is dropped, and keeps it alive.
struct ConsulEngine(Arc<Consul>);

impl Engine for ConsulEngine {
    fn capability(&self) -> Capability {
        self.0.capability
    }

    fn describe(&self) -> String {
        self.0.shown.clone()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { acquire::enter(&engine, claim).await })
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { acquire::wait(&engine, ticket, until).await })
    }

    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<Vec<Renewal>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { renew::renew(&engine, &leases, within).await })
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { release::amend(&engine, &ticket, &amendment).await })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { release::leave(&engine, &ticket).await })
    }

    fn audit(&self, lease: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { renew::audit(&engine, lease).await })
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        notify::alarms(&self.0)
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { inspect::survey(&engine, &scope).await })
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        notify::watch(&self.0, scope)
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { release::evict(&engine, &name, &id, eviction).await })
    }

    fn resize(&self, name: Name, capacity: u32) -> BoxFuture<Result<bool>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { release::resize(&engine, &name, capacity).await })
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { inspect::check(&engine).await })
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        let line = self.0.keys.line(&ticket.name).ok()?;
        let member = self.0.sessions.member(ticket.claim);
        let spot = member.map_or(Spot::Whole, |member| Spot::of(member.claim.ask));
        Some(spot.key(&line, ticket.claim, &session_text(ticket.lease.0)))
    }

    /// Ends all sessions, which releases whatever still hangs on them.
    fn close(&self) -> BoxFuture<()> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move {
            let sessions = engine.sessions.close().into_iter().map(session_text);
            let sessions: Vec<String> = sessions.collect();
            let ends = sessions.iter().map(|id| engine.client.destroy_session(id));
            // What can't be ended now ends by its ttl.
            futures_util::future::join_all(ends).await;
            engine.client.close();
        })
    }
}
