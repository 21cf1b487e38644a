//! `redis:` and `rediss:` — lines in one Redis or Valkey server.
//!
//! The user's key is a plain `SET NX PX` string while anyone holds, so that other tools' locks on
//! the same key and ours exclude each other; the line of waiters, the token and the owner records
//! stand beside it in the same hash slot (`lua/line.lua`). One script call per verb decides
//! everything by the server's clock. Waiters are woken by a message to exactly those who were
//! granted, and look now and then in case it was lost.

#[cfg(feature = "baseline")]
mod baseline;
mod check;
mod fault;
mod hub;
mod keys;
mod listen;
mod offer;
mod scripts;
mod store;
mod survey;
mod turns;
mod verbs;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use self::hub::Hub;
use self::keys::Keys;
use self::store::Store;
use self::wire::{Server, Wire};
use crate::core::capability::Capability;
use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Eviction, Left,
    Place, Renewal, cannot_resize,
};
use crate::core::error::{Error, Kind, Result};
use crate::core::name::Name;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};
use crate::core::url::{Settings, Url};
use crate::engines::remote::{Host, Links, Login, Tls};

pub(crate) use offer::OFFER;

/// Where a URL leads, and how.
struct Target {
    host: Host,
    encrypted: bool,
    server: Server,
    /// How many replicas must have a grant before it counts.
    replicas: u32,
}

impl Target {
    fn take(mut url: Url) -> Result<Self> {
        let config = |message| Error::new(Kind::Config, "connect", message);
        let encrypted = url.scheme == "rediss";
        let login = Login::take(&mut url)?;
        let tls = Tls::take(&mut url, encrypted)?;
        let replicas = match url.take("replicas").map(|text| text.parse()) {
            None => 0,
            Some(Ok(replicas @ 0..=100)) => replicas,
            Some(_) => return Err(config("replicas must be a whole number, 0 to 100")),
        };
        url.finish(offer::OPTIONS)?;
        let host = match <[Host; 1]>::try_from(Host::all(&url, 6379)?) {
            Ok([host]) => host,
            Err(_) => return Err(config("redis: takes one host")),
        };
        let db = match url.path.trim_start_matches('/') {
            "" => 0,
            number => number
                .parse::<u16>()
                .map_err(|_| config("the path is the number of a database, as in /0"))?,
        };
        let server = Server::new(&host, &login, tls.as_ref(), i64::from(db))?;
        Ok(Self {
            host,
            encrypted,
            server,
            replicas,
        })
    }
}

/// Connects.
///
/// # Errors
/// [`Kind::Config`] for options that can't be used; [`Kind::Unreachable`], [`Kind::Denied`] and
/// [`Kind::Unusable`] from the server.
async fn open(url: Url, settings: Settings) -> Result<Arc<dyn Engine>> {
    let shown = url.shown();
    let keys = Keys::new(&settings.namespace)?;
    let target = Target::take(url)?;
    let hub = Arc::new(Hub::new());
    let (server, ear) = (target.server.clone(), Arc::clone(&hub));
    let links = Links::new(settings.connect_timeout, move || {
        Box::pin(Wire::connect(server.clone(), Arc::clone(&ear)))
    });
    let store = Store {
        links,
        hub,
        keys,
        target,
        timeout: settings.timeout,
    };
    // What is wrong with the address or the login is said now, not at the first lock.
    store.link().await?;
    Ok(Arc::new(RedisEngine {
        store: Arc::new(store),
        shown,
    }))
}

/// A namespace of one server.
struct RedisEngine {
    store: Arc<Store>,
    shown: String,
}

impl Engine for RedisEngine {
    fn capability(&self) -> Capability {
        offer::CAPABILITY
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        let store = Arc::clone(&self.store);
        Box::pin(async move { store.enter(&claim).await })
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        let store = Arc::clone(&self.store);
        Box::pin(async move { store.wait(&ticket, until).await })
    }

    fn renew(&self, leases: Vec<Lease>, _within: Duration) -> BoxFuture<Vec<Renewal>> {
        let store = Arc::clone(&self.store);
        Box::pin(async move { store.rearm(leases).await })
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        let store = Arc::clone(&self.store);
        Box::pin(async move { store.amend(&ticket, &amendment).await })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        let store = Arc::clone(&self.store);
        Box::pin(async move { store.leave(&ticket).await })
    }

    fn audit(&self, _: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        async { Ok(Vec::new()) }.boxed()
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        listen::alarms(Arc::clone(&self.store))
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        let store = Arc::clone(&self.store);
        Box::pin(async move { store.survey(&scope).await })
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        listen::changes(Arc::clone(&self.store), scope)
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        let store = Arc::clone(&self.store);
        Box::pin(async move { store.evict(&name, &id, eviction).await })
    }

    fn resize(&self, _name: Name, _capacity: u32) -> BoxFuture<Result<bool>> {
        cannot_resize()
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        let store = Arc::clone(&self.store);
        Box::pin(async move { store.check().await })
    }

    fn key(&self, _ticket: &Ticket) -> Option<String> {
        None
    }

    fn close(&self) -> BoxFuture<()> {
        self.store.links.close();
        async {}.boxed()
    }
}
