//! `postgres://` — lines in a table of a PostgreSQL database, one statement per verb.
//!
//! Everything that decides a line is in its one row, and functions in the database decide it
//! (`schema.sql`); this module calls them. Times are the server's. Invariant: a request is retried
//! only when the server said that it was rolled back.
//!
//! `acquire`, `renew`, `release` and `inspect` are the verbs. They send requests through `client`,
//! which keeps one session (`statements`) per runtime. `connect` makes connections, `pooler`
//! detects a pooler in between, `local_queue` keeps a crowd of waiters out of the server's line,
//! and `notify` handles NOTIFY. `shedlock` is another layout of the table, and `advisory` another
//! engine that shares connections, errors, findings and schema. `fence` is fenced storage next to
//! the locks, `guard` a hold as a condition of the user's own transaction, `queue` the work queues.

mod acquire;
pub mod advisory;
#[cfg(feature = "baseline")]
mod baseline;
mod client;
mod config;
mod connect;
mod connection;
mod error;
mod fence;
mod guard;
mod inspect;
mod local_queue;
mod notify;
mod pooler;
mod queue;
mod release;
mod renew;
mod schema;
mod shedlock;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod statements;

use std::sync::Arc;
use std::time::Duration;

pub use config::FACTORY;
pub use config::Postgres;
pub use config::open;
pub use fence::open as open_fence;
pub use fence::{present, refused};
pub use guard::{PostgresHold, is_guard_failure, lock_in_transaction, try_lock_in_transaction};
pub use queue::{PostgresMessage, PostgresQueue};
pub use schema::Schema;

use self::client::Client;
use self::config::CAPABILITY;
use palisade_core::Capability;
use palisade_core::engine::{Ask, Engine, Ticket};
use palisade_core::queue::SharedQueueStore;
use palisade_kit::{absent, rooms};

/// A namespace of one database.
struct PostgresEngine {
    client: Arc<Client>,
    shown: String,
}

impl Engine for PostgresEngine {
    fn capability(&self) -> Capability {
        CAPABILITY
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    rooms! { self.client:
        acquire { enter wait }
        renew { renew }
        release { leave amend evict resize }
        notify { alarms }
        inspect { survey watch check }
        absent { audit }
    }

    fn queues(&self) -> Option<SharedQueueStore> {
        Some(Arc::new(queue::PostgresQueues::new(Arc::clone(
            &self.client,
        ))))
    }

    /// The row of the ticket's line: table, namespace and name.
    fn key(&self, ticket: &Ticket) -> Option<String> {
        let (schema, namespace) = (self.client.schema.name(), &self.client.namespace);
        Some(format!("{schema}.line/{namespace}/{}", ticket.name))
    }

    async fn close(&self) {
        self.client.close();
    }
}

/// How the table keeps a duration.
fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

fn from_micros(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0).unsigned_abs())
}

/// How the table keeps a token.
fn signed(sequence: u64) -> i64 {
    i64::try_from(sequence).unwrap_or(i64::MAX)
}

/// A weight and a capacity as the table keeps them: two zeroes are the whole line.
fn from_ask(ask: Ask) -> (i64, i64) {
    let (weight, capacity) = ask.numbers();
    (weight.into(), capacity.into())
}

fn to_ask(weight: i64, capacity: i64) -> Ask {
    match (u32::try_from(weight), u32::try_from(capacity)) {
        (Ok(weight), Ok(capacity)) if capacity > 0 => Ask::Part { weight, capacity },
        _ => Ask::Whole,
    }
}
