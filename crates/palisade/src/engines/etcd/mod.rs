//! `etcd://` — lines kept in an etcd cluster, beside Go's `concurrency` package.
//!
//! A place is a key on a lease; the lowest create revision holds, and is the token. All places of
//! a client share one lease per ttl, which the keeper keeps alive. Taking a place and giving it
//! up are one transaction each; waiting is a watch on the nearest one ahead.
//!
//! `keys` and `record` are the layout, `queue` reads a line and asks the core who holds, `rpc`,
//! `endpoints` and `watching` talk to a member, `enter`, `wait`, `change`, `survey`,
//! `audit` and `hints` are the verbs.

mod audit;
#[cfg(feature = "baseline")]
mod baseline;
mod book;
mod change;
mod check;
mod condition;
mod endpoints;
mod enter;
mod hints;
mod keys;
mod leases;
mod offer;
mod ops;
mod own;
mod pool;
mod queue;
mod record;
mod rpc;
mod survey;
mod transport;
mod wait;
mod watching;
mod wire;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::broadcast;

pub use condition::{Condition, EtcdHold};
pub(crate) use offer::FACTORY;

use self::endpoints::Endpoints;
use self::enter::Known;
use self::keys::Keys;
use self::leases::Leases;
use self::pool::Pool;
use self::rpc::Rpc;
use crate::core::capability::Capability;
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::dyn_engine::SharedEngine;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Eviction, Left,
    Place, Renewal,
};
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};
use crate::core::url::{Settings, Url};
use crate::engines::remote::{Host, Links, Login, Tls};

/// The port of etcd's clients.
const PORT: u16 = 2379;

/// A client of a cluster.
struct EtcdEngine(Arc<Inner>);

/// What the verbs share.
struct Inner {
    keys: Keys,
    rpc: Rpc,
    endpoints: Arc<Endpoints>,
    encrypted: bool,
    shown: String,
    leases: Leases,
    /// The claims of this client, from their enter to their leave.
    known: Mutex<HashMap<ClaimId, Known>>,
    /// Keys to be used again.
    pool: Pool,
    /// Whether the user was seen to have the rights that locks need.
    allowed: AtomicBool,
    alarms: broadcast::Sender<Alarm>,
}

/// Opens what the URL names, and sees that a member of it answers.
///
/// # Errors
/// [`Kind::Config`](crate::Kind::Config) for hosts, options or certificates that can't be used;
/// [`Kind::Unreachable`](crate::Kind::Unreachable) when no member answers;
/// [`Kind::Denied`](crate::Kind::Denied) when the login is refused.
async fn open(url: Url, settings: &Settings) -> Result<SharedEngine> {
    let inner = Inner::new(url, settings)?;
    inner.rpc.links.get().await?;
    Ok(Arc::new(EtcdEngine(Arc::new(inner))))
}

impl Inner {
    fn new(mut url: Url, settings: &Settings) -> Result<Self> {
        let encrypted = url.scheme == "etcds";
        let login = Login::take(&mut url)?;
        let tls = Tls::take(&mut url, encrypted)?;
        url.finish(offer::OPTIONS)?;
        offer::refuse_path(&url)?;
        let hosts = Host::all(&url, PORT)?;
        let (several, logs_in) = (hosts.len() > 1, login.user.is_some());
        let limit = settings.connect_timeout;
        let endpoints = Arc::new(Endpoints::new(hosts, tls, login, limit)?);
        let members = Arc::clone(&endpoints);
        let connect = move || -> BoxFuture<_> { Box::pin(Arc::clone(&members).connect()) };
        Ok(Self {
            keys: Keys::new(&settings.namespace)?,
            rpc: Rpc {
                links: Links::new(limit, connect),
                timeout: settings.timeout,
                several,
                logs_in,
            },
            endpoints,
            encrypted,
            shown: url.shown(),
            leases: Leases::default(),
            known: Mutex::default(),
            pool: Pool::default(),
            allowed: AtomicBool::new(false),
            alarms: broadcast::channel(64).0,
        })
    }
}

impl EtcdEngine {
    fn run<T, F>(&self, verb: impl FnOnce(Arc<Inner>) -> F) -> BoxFuture<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        Box::pin(verb(Arc::clone(&self.0)))
    }
}

impl Engine for EtcdEngine {
    fn capability(&self) -> Capability {
        offer::CAPABILITY
    }

    fn describe(&self) -> String {
        self.0.shown.clone()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        self.run(|inner| async move { inner.enter(claim).await })
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        self.run(|inner| async move { inner.wait(ticket, until).await })
    }

    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<Vec<Renewal>> {
        self.run(move |inner| async move { inner.keep(leases, within).await })
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        self.run(|inner| async move { inner.amend(ticket, amendment).await })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        self.run(|inner| async move { inner.leave(ticket).await })
    }

    fn audit(&self, lease: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        self.run(|inner| async move { inner.audit(lease).await })
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        hints::alarms(Arc::clone(&self.0))
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        self.run(|inner| async move { inner.survey(scope).await })
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        hints::watch(Arc::clone(&self.0), scope)
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        self.run(|inner| async move { inner.evict(name, id, eviction).await })
    }

    fn resize(&self, name: Name, capacity: u32) -> BoxFuture<Result<bool>> {
        self.run(move |inner| async move { inner.resize(name, capacity).await })
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        self.run(|inner| async move { inner.check().await })
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.0.key_of(ticket).map(|key| key.as_ref().to_owned())
    }

    fn close(&self) -> BoxFuture<()> {
        self.run(|inner| async move {
            inner.leases.revoke_all(&inner.rpc).await;
            inner.rpc.links.close();
        })
    }
}

/// The longest ttl: far less than etcd takes, and as much as anyone should wait for a machine
/// that is lost.
const LONGEST_TTL: Duration = Duration::from_secs(24 * 60 * 60);
