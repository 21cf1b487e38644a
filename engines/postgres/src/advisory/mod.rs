//! `postgres+advisory://` — session advisory locks of a PostgreSQL server.
//!
//! `pg_advisory_lock` of the same key conflicts with our locks. A claim (`claim`) has a session to
//! itself (`session`), the server's own queue is the line, and the lock ends with the session.
//! `registry` keeps claims and sessions; `acquire`, `renew`, `release` and `inspect` are the verbs;
//! `owner_record` is for people.

mod acquire;
mod claim;
pub(super) mod config;
mod inspect;
mod keys;
mod owner_record;
mod registry;
mod release;
mod renew;
mod session;

use std::sync::Arc;

pub use config::FACTORY;
pub use config::open;
pub(super) use keys::Keys;

use self::config::CAPABILITY;
use self::registry::Registry;
use palisade_core::Capability;
use palisade_core::engine::{Alarm, BoxStream, Engine, Ticket};
use palisade_kit::alarms::alarms;
use palisade_kit::{absent, rooms};

/// The session locks of one client.
struct AdvisoryEngine {
    registry: Arc<Registry>,
    shown: String,
}

impl Engine for AdvisoryEngine {
    fn capability(&self) -> Capability {
        CAPABILITY
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    rooms! { self.registry:
        acquire { enter wait }
        renew { renew }
        release { leave amend evict }
        inspect { survey watch check }
        absent { audit resize queues }
    }

    /// The keeper calls this, in its own runtime.
    fn alarms(&self) -> BoxStream<Alarm> {
        self.registry.settle_here();
        alarms(self.registry.alarms.subscribe())
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        self.registry.keys.shown(&ticket.name)
    }

    async fn close(&self) {
        self.registry.close();
    }
}
