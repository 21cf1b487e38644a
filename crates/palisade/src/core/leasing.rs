//! `Leasing`: what the keeper asks of whatever hands out leases. An engine does so for places in
//! its lines, a queue for its messages.

use std::time::Duration;

use futures_util::future::BoxFuture;

use super::dyn_engine::DynEngine;
use super::engine::{Alarm, Audited, BoxStream, Left, Renewal};
use super::error::Result;
use super::ticket::{Lease, LeaseId, Ticket};

/// What has leases that a keeper keeps. Every [`Engine`](super::engine::Engine) is one, and its
/// verbs of the same names say how each behaves; so is every
/// [`QueueStore`](super::queue::QueueStore).
pub trait Leasing: Send + Sync + 'static {
    /// Renews many leases with one call, and answers for each, in order. One that has ended is
    /// never revived.
    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<'_, Vec<Renewal>>;

    /// Gives up what a ticket stands for. Compares the incarnation: a late or doubled leave
    /// changes nothing.
    fn leave(&self, ticket: Ticket) -> BoxFuture<'_, Result<Left>>;

    /// Lists the tickets that hang on a shared lease; none where tickets have leases of their own.
    fn audit(&self, lease: LeaseId) -> BoxFuture<'_, Result<Vec<Audited>>>;

    /// Hints that leases may be lost: the keeper looks after them at once.
    fn alarms(&self) -> BoxStream<Alarm>;

    /// Gives back what is shared by all tickets. Best effort.
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
