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
pub mod config;
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
pub use self::config::FACTORY;
use self::keys::Keys;
use self::lines::{Line, Lines, Members};
use palisade_core::engine::{Alarm, Engine, Ticket};
use palisade_core::{Capability, Name, Result};
use palisade_kit::{absent, rooms};

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
    fn line(&self, name: &Name) -> Result<Arc<Line>> {
        self.lines.get(&self.keys, name)
    }

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

    rooms! { self.0:
        acquire { enter wait }
        renew { renew }
        release { leave amend evict resize }
        notify { alarms watch }
        inspect { survey check }
        absent { audit queues }
    }

    /// The name of the Lease, as `kubectl get lease` shows it.
    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.0.keys.lease(&ticket.name).ok()
    }

    async fn close(&self) {
        self.0.client.close();
    }
}
