//! `redis:` and `rediss:` — lines in one Redis or Valkey server; with `+sentinel` in the master
//! that Sentinel names, with `+cluster` in the masters of a Cluster.
//!
//! The user's key is a plain `SET NX PX` string while anyone holds, so that locks of other tools on
//! the same key and ours exclude each other. The waiters, the token and the owner records are next
//! to it in the same hash slot (`lua/line.lua`). One script call per verb decides everything, by
//! the server's clock. A push wakes exactly the waiters that were granted; waiters also poll, in
//! case it was lost.

mod acquire;
#[cfg(feature = "baseline")]
pub(crate) mod baseline;
pub(crate) mod check;
pub(crate) mod client;
mod cluster;
mod config;
pub(crate) mod connection;
pub(crate) mod error;
mod fence;
pub(crate) mod inspect;
pub(crate) mod keys;
mod limit;
pub(crate) mod notify;
mod queue;
pub mod redlock;
mod release;
mod renew;
mod sentinel;
pub(crate) mod watched;

use std::sync::Arc;

use self::client::{Client, Servers};
use self::cluster::Cluster;
use self::config::{Target, Way};
use self::connection::{Connection, Role};
use self::keys::Keys;
use self::sentinel::Sentinel;
use self::watched::Watches;
use palisade_core::engine::{Engine, Settings, SharedEngine, Ticket, Url};
use palisade_core::queue::SharedQueueStore;
use palisade_core::{Capability, Result};
use palisade_kit::push::PushHub;
use palisade_kit::{PerRuntime, absent, rooms};

pub(crate) use acquire::ROUNDING;
pub use config::Redis;
pub use config::{CLUSTER, FACTORY, SENTINEL};
pub use fence::{Fields, RedisFence};
pub use queue::{Effect, RedisMessage};

/// Connects.
///
/// # Errors
/// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for options that can't be used; [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable),
/// [`ErrorKind::Denied`](palisade_core::ErrorKind::Denied) and [`ErrorKind::Unusable`](palisade_core::ErrorKind::Unusable) from the server.
async fn open(url: Url, settings: Settings) -> Result<SharedEngine> {
    let shown = url.shown();
    let client = connect(url, &settings).await?;
    Ok(Arc::new(RedisEngine { client, shown }))
}

/// A client whose server has answered.
async fn connect(url: Url, settings: &Settings) -> Result<Arc<Client>> {
    let keys = Keys::new(&settings.namespace)?;
    let target = Target::take(url, settings.connect_timeout)?;
    let hub = Arc::new(PushHub::new());
    let limit = settings.connect_timeout;
    let servers = match target.way {
        Way::One(server) => {
            let (to, hub) = (server.clone(), Arc::clone(&hub));
            let links = PerRuntime::new(limit, move || {
                Box::pin(Connection::open(to.clone(), Arc::clone(&hub), Role::Alone))
            });
            let links = links.to(&server.host);
            Servers::One { server, links }
        }
        Way::Sentinel {
            name,
            sentinels,
            access,
            db,
        } => Servers::Sentinel(Sentinel::new(name, access, db, sentinels, &hub, limit)),
        Way::Cluster { seeds, access } => {
            Servers::Cluster(Cluster::new(access, seeds, Arc::clone(&hub), limit))
        }
    };
    let client = Client {
        servers,
        hub,
        keys,
        replicas: target.replicas,
        timeout: settings.timeout,
        watches: Watches::default(),
    };
    // A wrong address or login is reported now and not at the first lock.
    client.link(None).await?;
    Ok(Arc::new(client))
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

    rooms! { self.client:
        Client { enter wait renew leave amend evict resize survey check }
        notify { alarms watch }
        absent { audit }
    }

    fn queues(&self) -> Option<SharedQueueStore> {
        Some(Arc::new(queue::RedisQueues::new(Arc::clone(&self.client))))
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        let keys = self.client.keys.line(&ticket.name).ok()?;
        Some(keys.key)
    }

    async fn close(&self) {
        self.client.servers.close();
    }
}
