//! The engine as core knows it: every verb is given to the [`Desk`](super::desk::Desk).

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, stream};

use super::PostgresEngine;
use super::offer::CAPABILITY;
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

/// How often a watch looks whether anything changed: at one row, or at those with its prefix.
/// Pushes would have to be sent for every change, also when nobody watches.
const GLANCE: Duration = Duration::from_millis(200);

impl Engine for PostgresEngine {
    fn capability(&self) -> Capability {
        CAPABILITY
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.enter(&claim).await })
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.wait(&ticket, until).await })
    }

    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<Vec<Renewal>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.renew(&leases, within).await })
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.amend(&ticket, amendment).await })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.leave(ticket).await })
    }

    fn audit(&self, _: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        async { Ok(Vec::new()) }.boxed()
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        let start = (Arc::clone(&self.desk), None);
        stream::unfold(start, |(desk, mut listening)| async move {
            let alarm = desk.alarm(&mut listening).await;
            Some((alarm, (desk, listening)))
        })
        .boxed()
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.survey(&scope).await })
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        let start = (Arc::clone(&self.desk), scope, None);
        stream::unfold(start, |(desk, scope, mut seen)| async move {
            loop {
                match desk.fingerprint(&scope).await {
                    Ok(now) if seen.as_ref() == Some(&now) => tokio::time::sleep(GLANCE).await,
                    Ok(now) => {
                        seen = Some(now);
                        return Some((Ok(()), (desk, scope, seen)));
                    }
                    Err(error) => {
                        tokio::time::sleep(GLANCE).await;
                        return Some((Err(error), (desk, scope, seen)));
                    }
                }
            }
        })
        .boxed()
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.evict(&name, &id, eviction).await })
    }

    fn resize(&self, name: Name, capacity: u32) -> BoxFuture<Result<bool>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.resize(&name, capacity).await })
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.check().await })
    }

    /// The row of the ticket's line: table, namespace and name.
    fn key(&self, ticket: &Ticket) -> Option<String> {
        let (schema, namespace) = (&self.desk.schema, &self.desk.namespace);
        Some(format!(
            "{}.line/{namespace}/{}",
            schema.name(),
            ticket.name
        ))
    }

    fn close(&self) -> BoxFuture<()> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.close() })
    }
}
