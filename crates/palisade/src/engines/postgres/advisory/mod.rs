//! `postgres+advisory://` — session advisory locks of a PostgreSQL server.
//!
//! `pg_advisory_lock` of the same number excludes us, and we exclude it. A claim has a connection
//! to itself (`own`, `statement`, `chair`), the server's own queue is the line, and the end of the session is
//! the end of the lock. `hall` keeps connections and claims, `verbs` lock and unlock, `scribe` and
//! `survey` are for people.

#[cfg(feature = "baseline")]
mod baseline;
mod chair;
mod hall;
mod key;
mod offer;
mod own;
mod scribe;
mod statement;
mod survey;
mod verbs;

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, stream};
use tokio::sync::broadcast::error::RecvError;

pub(crate) use offer::FACTORY;

use self::hall::{Hall, Plan};
use self::key::Keys;
use self::offer::{CAPABILITY, MAX_CONNECTIONS, OPTIONS};
use self::scribe::Scribe;
use self::verbs::Locks;
use super::pooler::{Between, no_session_locks};
use super::schema::Schema;
use super::server::Server;
use crate::core::capability::Capability;
use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::dyn_engine::SharedEngine;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Eviction, Left,
    Place, Renewal, cannot_resize,
};
use crate::core::error::{Error, Kind, Result};
use crate::core::name::Name;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};
use crate::core::url::{Settings, Url};

/// How often a watch looks whether anything changed.
const GLANCE: Duration = Duration::from_millis(100);

/// Opens it; nothing is asked of the server before the first verb.
///
/// # Errors
/// [`Kind::Config`] for a URL or option that can't be used.
pub fn open(mut url: Url, settings: &Settings) -> Result<SharedEngine> {
    let schema = match url.take("schema") {
        None => Schema::default(),
        Some(name) => Schema::new(&name)?,
    };
    let keys = Keys::new(url.take("key").as_deref(), &settings.namespace)?;
    let between = Between::take(&mut url)?;
    if between == Some(Between::Pooler) {
        return Err(no_session_locks("connect"));
    }
    let max_connections = match url.take("max_connections").map(|text| text.parse()) {
        None => MAX_CONNECTIONS,
        Some(Ok(count @ 1..=10_000)) => count,
        Some(_) => {
            let message = "option max_connections must be a whole number, 1 to 10000";
            return Err(Error::new(Kind::Config, "connect", message));
        }
    };
    let server = Server::take(&mut url, settings)?;
    url.finish(OPTIONS)?;
    let shown = server.shown(&url.scheme);
    let plan = Plan {
        server,
        schema,
        keys,
        trusted: between == Some(Between::Nothing),
        max_connections,
    };
    let hall = Arc::new(Hall::new(plan, settings));
    let scribe = Arc::new(Scribe::default());
    Ok(Arc::new(AdvisoryEngine {
        locks: Locks { hall, scribe },
        shown,
    }))
}

/// The session locks of one client.
struct AdvisoryEngine {
    locks: Locks,
    shown: String,
}

impl Engine for AdvisoryEngine {
    fn capability(&self) -> Capability {
        CAPABILITY
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        let locks = self.locks.clone();
        Box::pin(async move { locks.enter(claim).await })
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        let locks = self.locks.clone();
        Box::pin(async move { locks.wait(&ticket, until).await })
    }

    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<Vec<Renewal>> {
        let locks = self.locks.clone();
        Box::pin(async move { locks.prolong(leases, within).await })
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        let locks = self.locks.clone();
        Box::pin(async move { locks.amend(&ticket, amendment).await })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        let locks = self.locks.clone();
        Box::pin(async move { locks.leave(&ticket).await })
    }

    fn audit(&self, _: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        async { Ok(Vec::new()) }.boxed()
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        self.locks.hall.settle_here();
        let alarms = self.locks.hall.alarms.subscribe();
        stream::unfold(alarms, |mut alarms| async move {
            match alarms.recv().await {
                Ok(alarm) => Some((alarm, alarms)),
                Err(RecvError::Lagged(_)) => Some((Alarm::All, alarms)),
                Err(RecvError::Closed) => None,
            }
        })
        .boxed()
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        let locks = self.locks.clone();
        Box::pin(async move { locks.survey(&scope).await })
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        let start = (self.locks.clone(), scope, None);
        stream::unfold(start, |(locks, scope, mut seen)| async move {
            loop {
                let look = async {
                    let grants = locks.grants().await?;
                    Ok((grants, locks.survey(&scope).await?))
                };
                match look.await {
                    Ok(now) if seen.as_ref() == Some(&now) => tokio::time::sleep(GLANCE).await,
                    Ok(now) => {
                        seen = Some(now);
                        return Some((Ok(()), (locks, scope, seen)));
                    }
                    Err(error) => {
                        tokio::time::sleep(GLANCE).await;
                        return Some((Err(error), (locks, scope, seen)));
                    }
                }
            }
        })
        .boxed()
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        let locks = self.locks.clone();
        Box::pin(async move { locks.evict(&name, &id, eviction).await })
    }

    fn resize(&self, _name: Name, _capacity: u32) -> BoxFuture<Result<bool>> {
        cannot_resize()
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        let locks = self.locks.clone();
        Box::pin(async move { locks.check().await })
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.locks.hall.keys.shown(&ticket.name)
    }

    fn close(&self) -> BoxFuture<()> {
        let locks = self.locks.clone();
        Box::pin(async move { locks.hall.close() })
    }
}
