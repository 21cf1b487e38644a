//! `consul://` and `consuls://` — a Consul agent: sessions that hold keys.
//!
//! The exclusive lock is Consul's own (`api.Lock`), permits are its semaphore, so that with
//! `namespace=` palisade and `consul lock` exclude each other; readers are a line of our own.
//! Ownership is decided by transactions alone, guarded by indexes. The token is the index of the
//! transaction that took the lock. Sessions are shared by all claims of one ttl and renewed by
//! the keeper; a waiting claim has nothing in the store and sleeps on a blocking query.

mod agents;
mod api;
#[cfg(feature = "baseline")]
mod baseline;
mod book;
mod check;
mod enter;
mod finish;
mod give;
mod keep;
mod keys;
mod offer;
mod parting;
mod plan;
mod survey;
mod take;
mod turns;
mod verdict;
mod view;
mod wait;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, broadcast};

use self::api::Api;
use self::book::Book;
use self::keys::Keys;
pub(crate) use self::offer::FACTORY;
use self::turns::Turns;
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
use crate::engines::remote::Host;

/// A namespace of one Consul.
struct ConsulEngine {
    api: Api,
    keys: Keys,
    book: Book,
    turns: Turns,
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

impl ConsulEngine {
    fn alarm(&self, alarm: Alarm) {
        // Nobody listening is no error.
        let _ = self.alarms.send(alarm);
    }
}

/// The engine as it is shared by its requests.
struct Shared(Arc<ConsulEngine>);

impl Shared {
    fn engine(&self) -> Arc<ConsulEngine> {
        Arc::clone(&self.0)
    }
}

impl Engine for Shared {
    fn capability(&self) -> Capability {
        self.0.capability
    }

    fn describe(&self) -> String {
        self.0.shown.clone()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        Box::pin(self.engine().do_enter(claim))
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        Box::pin(self.engine().do_wait(ticket, until))
    }

    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<Vec<Renewal>> {
        Box::pin(self.engine().do_renew(leases, within))
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        Box::pin(self.engine().do_amend(ticket, amendment))
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        Box::pin(self.engine().do_leave(ticket))
    }

    fn audit(&self, lease: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        Box::pin(self.engine().do_audit(lease))
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        self.engine().do_alarms()
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        Box::pin(self.engine().do_survey(scope))
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        self.engine().do_watch(scope)
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        Box::pin(self.engine().do_evict(name, id, eviction))
    }

    fn resize(&self, name: Name, capacity: u32) -> BoxFuture<Result<bool>> {
        Box::pin(self.engine().do_resize(name, capacity))
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        Box::pin(self.engine().do_check())
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.0.key_of(ticket)
    }

    fn close(&self) -> BoxFuture<()> {
        Box::pin(self.engine().do_close())
    }
}
