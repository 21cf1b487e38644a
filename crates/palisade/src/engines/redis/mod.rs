//! `redis:` and `rediss:` — lines in one Redis or Valkey server.
//!
//! The user's key is a plain `SET NX PX` string while anyone holds, so that other tools' locks on
//! the same key and ours exclude each other; the line of waiters, the token and the owner records
//! stand beside it in the same hash slot (`lua/line.lua`). One script call per verb decides
//! everything by the server's clock. Waiters are woken by a message to exactly those who were
//! granted, and look now and then in case it was lost.

mod acquire;
#[cfg(feature = "baseline")]
mod baseline;
mod check;
mod client;
mod config;
mod connection;
mod error;
mod inspect;
mod keys;
mod notify;
mod release;
mod renew;
mod scripts;

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use self::client::Client;
use self::config::Target;
use self::connection::Connection;
use self::keys::Keys;
use self::notify::Hub;
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
use crate::core::url::{Settings, Url};
use crate::engines::remote::Links;

pub(crate) use config::OFFER;

/// Connects.
///
/// # Errors
/// [`Kind::Config`] for options that can't be used; [`Kind::Unreachable`], [`Kind::Denied`] and
/// [`Kind::Unusable`] from the server.
async fn open(url: Url, settings: Settings) -> Result<Arc<dyn Engine>> {
    let shown = url.shown();
    let keys = Keys::new(&settings.namespace)?;
    let target = Target::take(url, settings.connect_timeout)?;
    let hub = Arc::new(Hub::new());
    let (server, ear) = (target.server.clone(), Arc::clone(&hub));
    let links = Links::new(settings.connect_timeout, move || {
        Box::pin(Connection::open(server.clone(), Arc::clone(&ear)))
    })
    .to(&target.server.host);
    let client = Client {
        links,
        hub,
        keys,
        target,
        timeout: settings.timeout,
    };
    // What is wrong with the address or the login is said now, not at the first lock.
    client.link().await?;
    Ok(Arc::new(RedisEngine {
        client: Arc::new(client),
        shown,
    }))
}

/// A namespace of one server.
struct RedisEngine {
    client: Arc<Client>,
    shown: String,
}

impl Engine for RedisEngine {
    fn capability(&self) -> Capability {
        config::CAPABILITY
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        let client = Arc::clone(&self.client);
        Box::pin(async move { client.enter(&claim).await })
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        let client = Arc::clone(&self.client);
        Box::pin(async move { client.wait(&ticket, until).await })
    }

    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<Vec<Renewal>> {
        let client = Arc::clone(&self.client);
        Box::pin(async move { client.rearm(leases, within).await })
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        let client = Arc::clone(&self.client);
        Box::pin(async move { client.amend(&ticket, &amendment).await })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        let client = Arc::clone(&self.client);
        Box::pin(async move { client.leave(&ticket).await })
    }

    fn audit(&self, _: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        async { Ok(Vec::new()) }.boxed()
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        notify::alarms(Arc::clone(&self.client))
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        let client = Arc::clone(&self.client);
        Box::pin(async move { client.survey(&scope).await })
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        notify::changes(Arc::clone(&self.client), scope)
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        let client = Arc::clone(&self.client);
        Box::pin(async move { client.evict(&name, &id, eviction).await })
    }

    fn resize(&self, name: Name, capacity: u32) -> BoxFuture<Result<bool>> {
        let client = Arc::clone(&self.client);
        Box::pin(async move { client.resize(&name, capacity).await })
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        let client = Arc::clone(&self.client);
        Box::pin(async move { client.check().await })
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        let keys = self.client.keys.line(&ticket.name).ok()?;
        Some(keys.key)
    }

    fn close(&self) -> BoxFuture<()> {
        self.client.links.close();
        async {}.boxed()
    }
}
