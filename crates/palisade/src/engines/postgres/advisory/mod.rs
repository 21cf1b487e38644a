//! `postgres+advisory://` — session advisory locks of a PostgreSQL server.
//!
//! `pg_advisory_lock` of the same key conflicts with our locks. A claim (`claim`) has a session to
//! itself (`session`, `statements`), the server's own queue is the line, and the lock ends with the
//! session. `registry` keeps claims and sessions; `acquire`, `renew`, `release` and `inspect` are
//! the verbs; `owner_record` is for people.

mod acquire;
mod claim;
pub(super) mod config;
mod inspect;
mod keys;
mod owner_record;
mod registry;
mod release;
mod renew;
mod session;
mod statements;

use std::sync::Arc;
use std::time::Duration;

pub(crate) use config::FACTORY;
pub use config::open;
pub(super) use keys::Keys;

use self::config::CAPABILITY;
use self::registry::Registry;
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
use crate::engines::kit::alarms::alarms;

/// The session locks of one client.
struct AdvisoryEngine {
    registry: Arc<Registry>,
    shown: String,
}

impl Engine for AdvisoryEngine {
    fn capability(&self) -> Capability {
        CAPABILITY
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        acquire::enter(&self.registry, claim).await
    }

    async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        acquire::wait(&self.registry, &ticket, until).await
    }

    async fn renew(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        renew::renew(&self.registry, &leases, within).await
    }

    async fn amend(&self, ticket: Ticket, amendment: Amendment) -> Result<Amended> {
        release::amend(&self.registry, &ticket, amendment).await
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        release::leave(&self.registry, &ticket).await
    }

    async fn audit(&self, _: LeaseId) -> Result<Vec<Audited>> {
        Ok(Vec::new())
    }

    /// The keeper calls this, in its own runtime.
    fn alarms(&self) -> BoxStream<Alarm> {
        self.registry.settle_here();
        alarms(self.registry.alarms.subscribe())
    }

    async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        inspect::survey(&self.registry, &scope).await
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        inspect::watch(Arc::clone(&self.registry), scope)
    }

    async fn evict(&self, name: Name, id: String, eviction: Eviction) -> Result<bool> {
        release::evict(&self.registry, &name, &id, eviction).await
    }

    async fn resize(&self, _name: Name, _capacity: u32) -> Result<bool> {
        cannot_resize().await
    }

    fn queues(&self) -> Option<SharedQueueStore> {
        None
    }

    async fn check(&self) -> Result<Checkup> {
        inspect::check(&self.registry).await
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.registry.keys.shown(&ticket.name)
    }

    async fn close(&self) {
        self.registry.close();
    }
}
