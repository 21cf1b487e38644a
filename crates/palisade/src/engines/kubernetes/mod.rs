//! `kubernetes://NAMESPACE` — the Leases of a Kubernetes cluster.
//!
//! A line is one Lease by client-go's rules, so that with `namespace=` palisade and a client-go
//! `LeaderElector` exclude each other. Every write is conditional on uid and resourceVersion, and
//! the token is the resourceVersion that the acquiring write was conditional on. A lease expires by
//! the observer's own clock, when its record has not changed for the record's duration. No decision
//! depends on comparing clocks, or on a watch.
//!
//! `acquire` reads what `lines` remembers of a Lease, `lease` decides, `client` writes.

mod acquire;
#[cfg(feature = "baseline")]
mod baseline;
mod client;
pub(crate) mod config;
mod credentials;
mod error;
mod inspect;
mod keys;
mod kubeconfig;
mod lease;
mod lines;
mod notify;
mod release;
mod renew;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast;

use self::client::Client;
pub(crate) use self::config::FACTORY;
use self::keys::Keys;
use self::lines::{Lines, Members};
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

/// A namespace of palisade in one of Kubernetes.
struct Kubernetes {
    client: Client,
    keys: Keys,
    lines: Lines,
    members: Members,
    alarms: broadcast::Sender<Alarm>,
    default_ttl: Duration,
    shown: String,
}

impl Kubernetes {
    fn alarm(&self, alarm: Alarm) {
        // Nobody listening is no error.
        let _ = self.alarms.send(alarm);
    }
}

/// The engine. A write is completed even if its caller is dropped, and keeps the engine alive.
struct KubernetesEngine(Arc<Kubernetes>);

impl Engine for KubernetesEngine {
    fn capability(&self) -> Capability {
        Kubernetes::CAPABILITY
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
        renew::renew(&self.0, leases, within).await
    }

    async fn amend(&self, ticket: Ticket, amendment: Amendment) -> Result<Amended> {
        release::amend(&self.0, &ticket, &amendment).await
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        release::leave(&self.0, &ticket).await
    }

    async fn audit(&self, _: LeaseId) -> Result<Vec<Audited>> {
        Ok(Vec::new()) // Every ticket has a lease of its own.
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

    /// The name of the Lease, as `kubectl get lease` shows it.
    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.0.keys.lease(&ticket.name).ok()
    }

    async fn close(&self) {
        self.0.client.close();
    }
}
