//! `Leasing`: what the keeper requires of anything that grants leases: an engine for the places in
//! its lines, a queue store for its messages.

use std::time::Duration;

use futures_util::future::BoxFuture;

use super::dyn_engine::DynEngine;
use super::engine::{Alarm, Audited, BoxStream, Left, Renewal};
use super::error::Result;
use super::ticket::{Lease, LeaseId, Ticket};

/// A store of leases that a keeper renews. Every [`Engine`](super::engine::Engine) is one, and its
/// methods of the same names describe the behavior; so is every
/// [`QueueStore`](super::queue::QueueStore).
pub trait Leasing: Send + Sync + 'static {
    /// Renews many leases with one call. The results are in the order of the leases. A lease that
    /// has ended is never revived.
    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<'_, Vec<Renewal>>;

    /// Leaves a ticket. Compares the incarnation, so a late or repeated leave changes nothing.
    fn leave(&self, ticket: Ticket) -> BoxFuture<'_, Result<Left>>;

    /// Lists the tickets of a shared lease; empty where tickets have leases of their own.
    fn audit(&self, lease: LeaseId) -> BoxFuture<'_, Result<Vec<Audited>>>;

    /// Hints that leases may be lost, so that the keeper checks them at once.
    fn alarms(&self) -> BoxStream<Alarm>;

    /// Releases what all tickets share. Best effort.
    fn close(&self) -> BoxFuture<'_, ()>;
}

impl Leasing for dyn DynEngine {
    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<'_, Vec<Renewal>> {
        DynEngine::renew(self, leases, within)
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<'_, Result<Left>> {
        DynEngine::leave(self, ticket)
    }

    fn audit(&self, lease: LeaseId) -> BoxFuture<'_, Result<Vec<Audited>>> {
        DynEngine::audit(self, lease)
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        DynEngine::alarms(self)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        DynEngine::close(self)
    }
}
