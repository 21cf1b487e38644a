//! The engines' verbs as plain `async fn`s, boxed for core.

use std::sync::Arc;
use std::time::Duration;

use crate::core::capability::Capability;
use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine as Boxed, Entered, Eviction,
    Left, Place, Renewal,
};
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};

pub(super) trait Engine: Send + Sync + 'static {
    fn capability(&self) -> Capability;
    fn describe(&self) -> String;
    fn alarms(&self) -> BoxStream<Alarm>;
    fn watch(&self, scope: Scope) -> BoxStream<Result<()>>;
    fn key(&self, ticket: &Ticket) -> Option<String>;
    fn enter(&self, claim: Arc<Claim>) -> impl Future<Output = Result<Entered>> + Send;
    fn wait(&self, ticket: Ticket, until: BootTime) -> impl Future<Output = Result<Place>> + Send;
    fn renew(
        &self,
        leases: Vec<Lease>,
        within: Duration,
    ) -> impl Future<Output = Vec<Renewal>> + Send;
    fn amend(
        &self,
        ticket: Ticket,
        amendment: Amendment,
    ) -> impl Future<Output = Result<Amended>> + Send;
    fn leave(&self, ticket: Ticket) -> impl Future<Output = Result<Left>> + Send;
    fn audit(&self, lease: LeaseId) -> impl Future<Output = Result<Vec<Audited>>> + Send;
    fn survey(&self, scope: Scope) -> impl Future<Output = Result<Vec<LineReport>>> + Send;
    fn evict(
        &self,
        name: Name,
        id: String,
        eviction: Eviction,
    ) -> impl Future<Output = Result<bool>> + Send;
    fn resize(&self, name: Name, capacity: u32) -> impl Future<Output = Result<bool>> + Send;
    fn check(&self) -> impl Future<Output = Result<Checkup>> + Send;
    fn close(&self) -> impl Future<Output = ()> + Send;
}

pub(super) struct Shim<E>(pub(super) Arc<E>);

impl<E: Engine> Boxed for Shim<E> {
    fn capability(&self) -> Capability {
        self.0.capability()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        self.0.alarms()
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        self.0.watch(scope)
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.0.key(ticket)
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.enter(claim).await })
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.wait(ticket, until).await })
    }

    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<Vec<Renewal>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.renew(leases, within).await })
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.amend(ticket, amendment).await })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.leave(ticket).await })
    }

    fn audit(&self, lease: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.audit(lease).await })
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.survey(scope).await })
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.evict(name, id, eviction).await })
    }

    fn resize(&self, name: Name, capacity: u32) -> BoxFuture<Result<bool>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.resize(name, capacity).await })
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.check().await })
    }

    fn close(&self) -> BoxFuture<()> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.close().await })
    }
}
