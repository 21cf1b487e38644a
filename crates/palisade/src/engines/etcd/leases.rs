//! `Leases`: one lease per ttl, shared by all places of a client.
//!
//! The engine makes a lease when the first claim needs it; only the keeper keeps it alive. From
//! its deadline on (see `LeaseStart::deadline`) it is never used again, whatever etcd says of it: the
//! keeper has told its holders at that moment.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;

use super::keys;
use super::rpc::{Rpc, term};
use super::wire::{Empty, Header, LeaseGrantRequest, LeaseGrantResponse, LeaseRequest};
use crate::core::clock::BootTime;
use crate::core::engine::Renewal;
use crate::core::error::{Error, Kind, Result};
use crate::core::ticket::{Lease, LeaseId, LeaseStart, Ticket};

/// A lease, and until when it is good.
#[derive(Debug, Clone, Copy)]
pub(super) struct Living {
    pub(super) id: i64,
    pub(super) armed: LeaseStart,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    asked: Duration,
    armed: LeaseStart,
    /// That of the history in which it was granted.
    epoch: u64,
}

/// What is known of the cluster's history. Writes are in one order, so that one which was sent
/// after another was answered can't be told an earlier revision: unless the cluster was restored
/// from a snapshot, or is another one.
#[derive(Debug, Clone, Copy, Default)]
struct History {
    /// Its id; 0 as long as nothing is known.
    cluster: u64,
    /// The highest revision that a write was answered with.
    revision: i64,
    /// How often another history has taken its place.
    epoch: u64,
}

impl History {
    /// Whether the answer to a write that was sent when this was known is of another history.
    fn is_not_that_of(&self, header: &Header) -> bool {
        let other = header.cluster_id != self.cluster || header.revision < self.revision;
        self.cluster != 0 && header.cluster_id != 0 && other
    }
}

/// The leases of one client.
#[derive(Default)]
pub(super) struct Leases {
    table: Mutex<HashMap<i64, Kept>>,
    /// One is made at a time, so that claims that come together share it.
    making: AsyncMutex<()>,
    history: Mutex<History>,
}

impl Leases {
    /// The lease for claims of this ttl, made anew when there is none that lives.
    ///
    /// # Errors
    /// Those of the request; nothing is left to undo, since a lease without keys ends by itself.
    pub(super) async fn get(&self, rpc: &Rpc, ttl: Duration) -> Result<Living> {
        if let Some(living) = self.living(ttl) {
            return Ok(living);
        }
        let busy = |_| {
            let message = "no lease was granted in time";
            Error::new(Kind::Unreachable, "enter", message)
        };
        let making = tokio::time::timeout(rpc.timeout, self.making.lock());
        let _making = making.await.map_err(busy)?;
        if let Some(living) = self.living(ttl) {
            return Ok(living);
        }
        let living = self.grant(rpc, ttl).await?;
        let kept = Kept {
            asked: ttl,
            armed: living.armed,
            epoch: self.epoch(),
        };
        self.table.lock().insert(living.id, kept);
        Ok(living)
    }

    /// A new lease, for whoever asks: the one of a claim that is not renewed, which ends with it.
    ///
    /// # Errors
    /// Those of the request; nothing is left to undo, since a lease without keys ends by itself.
    pub(super) async fn grant(&self, rpc: &Rpc, ttl: Duration) -> Result<Living> {
        // An id of our own choice: one that was asked for and never heard of again is another.
        let id = rand::random_range(1..i64::MAX);
        let request = LeaseGrantRequest {
            ttl: i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX),
            id,
        };
        let before = *self.history.lock();
        let sent = BootTime::now();
        let path = "/etcdserverpb.Lease/LeaseGrant";
        let granted: LeaseGrantResponse =
            rpc.ask("enter", path, request).await.map_err(|error| {
                // The lease may be there, but no place was asked for yet.
                Error::new(error.kind(), "enter", error.message())
            })?;
        self.observe(before, &granted.header.unwrap_or_default());
        let armed = LeaseStart {
            sent,
            ttl: seconds(granted.ttl),
        };
        Ok(Living {
            id: granted.id,
            armed,
        })
    }

    fn living(&self, ttl: Duration) -> Option<Living> {
        let epoch = self.epoch();
        let mut table = self.table.lock();
        table.retain(|_, kept| !kept.armed.deadline().has_passed());
        let fits = |kept: &Kept| kept.asked == ttl && kept.epoch == epoch;
        let found = table.iter().find(|(_, kept)| fits(kept));
        found.map(|(&id, kept)| Living {
            id,
            armed: kept.armed,
        })
    }

    /// How often the cluster was seen to have become another, or to be restored from a snapshot.
    pub(super) fn epoch(&self) -> u64 {
        self.history.lock().epoch
    }

    /// Takes note of the answer to a write that was sent when `before` was known.
    fn observe(&self, before: History, header: &Header) {
        let mut now = self.history.lock();
        if before.is_not_that_of(header) {
            if now.epoch == before.epoch {
                *now = History {
                    cluster: header.cluster_id,
                    revision: header.revision,
                    epoch: before.epoch + 1,
                };
            }
        } else if now.epoch == before.epoch {
            now.cluster = header.cluster_id;
            now.revision = now.revision.max(header.revision);
        }
    }

    /// Whether it was granted in a history that is over.
    fn is_of_the_past(&self, id: i64) -> bool {
        let epoch = self.epoch();
        let table = self.table.lock();
        table.get(&id).is_some_and(|kept| kept.epoch < epoch)
    }

    /// Whether it is one of ours.
    pub(super) fn is_ours(&self, id: i64) -> bool {
        self.table.lock().contains_key(&id)
    }

    /// Uses it no more.
    pub(super) fn retire(&self, id: i64) {
        self.table.lock().remove(&id);
    }

    /// Renews leases, and says of each how it went.
    ///
    /// A leader that was stopped and goes on may, before it notices that another has taken over,
    /// answer for leases that the new one ends earlier: it renews without asking the others. So
    /// an answer counts only if a write went through afterwards in the same term, for which a
    /// majority must have followed the same leader all the while.
    pub(super) async fn keep_alive(&self, rpc: &Rpc, leases: Vec<Lease>) -> Vec<Renewal> {
        let ids: Vec<i64> = leases.iter().map(etcd_lease).collect();
        if ids.is_empty() {
            return Vec::new();
        }
        let mut renewals = self.ask(rpc, &ids).await;
        // A new leader may not have applied everything yet: what it does not know is asked again.
        let lost: Vec<usize> = (0..ids.len())
            .filter(|&at| matches!(renewals[at], Renewal::Lost))
            .collect();
        if !lost.is_empty() {
            let again: Vec<i64> = lost.iter().map(|&at| ids[at]).collect();
            for (at, renewal) in lost.into_iter().zip(self.ask(rpc, &again).await) {
                if matches!(renewal, Renewal::Lost) {
                    self.retire(ids[at]);
                }
                renewals[at] = renewal;
            }
        }
        renewals
    }

    async fn ask(&self, rpc: &Rpc, ids: &[i64]) -> Vec<Renewal> {
        let before = *self.history.lock();
        let sent = BootTime::now();
        let (answers, confirmed) = match rpc.keep_alive(ids).await {
            Ok(answered) => answered,
            Err(error) => {
                let unknown = || Error::new(error.kind(), "renew", error.message());
                let unknown = |_| Renewal::Unknown(unknown().maybe_applied());
                return ids.iter().map(unknown).collect();
            }
        };
        self.observe(before, &confirmed);
        let renewal = |&id: &i64| match answers.iter().find(|answer| answer.id == id) {
            _ if self.is_of_the_past(id) => Renewal::Revoked(replaced()),
            Some(answer) if term(answer.header.as_ref()) != confirmed.raft_term => unconfirmed(),
            Some(answer) if answer.ttl <= 0 => Renewal::Lost,
            Some(answer) => self.rearmed(id, sent, seconds(answer.ttl)),
            None => unconfirmed(),
        };
        ids.iter().map(renewal).collect()
    }

    fn rearmed(&self, id: i64, sent: BootTime, ttl: Duration) -> Renewal {
        let armed = LeaseStart { sent, ttl };
        let mut table = self.table.lock();
        if let Some(kept) = table.get_mut(&id) {
            if kept.armed.deadline().has_passed() {
                table.remove(&id);
            } else if sent > kept.armed.sent {
                kept.armed = armed;
            }
        }
        Renewal::Held(armed)
    }

    /// Gives all leases back, and with them whatever still hangs on them.
    pub(super) async fn revoke_all(&self, rpc: &Rpc) {
        let all: Vec<i64> = self.table.lock().drain().map(|(id, _)| id).collect();
        for id in all {
            if revoke(rpc, "close", id).await.is_err() {
                // Without an answer the ttl ends it.
                break;
            }
        }
    }
}

/// Gives a lease back, with whatever hangs on it. One that has ended is no error.
pub(super) async fn revoke(rpc: &Rpc, operation: &'static str, id: i64) -> Result<()> {
    let path = "/etcdserverpb.Lease/LeaseRevoke";
    let asked: Result<Empty> = rpc.ask(operation, path, LeaseRequest { id }).await;
    match asked {
        Err(error) if error.kind() == Kind::Lost => Ok(()),
        asked => asked.map(drop),
    }
}

fn replaced() -> Error {
    let message = "the etcd cluster is not the one in which this lock was taken: it was restored \
                   from a snapshot, or another has its address; tokens can repeat, so raise era= \
                   before locks are taken again";
    Error::new(Kind::Lost, "renew", message)
}

fn unconfirmed() -> Renewal {
    let message = "the cluster changed its leader while the lease was renewed";
    Renewal::Unknown(Error::new(Kind::Unreachable, "renew", message).maybe_applied())
}

fn seconds(ttl: i64) -> Duration {
    Duration::from_secs(u64::try_from(ttl).unwrap_or(0))
}

/// A lease of etcd, as the core names it.
pub(super) fn lease_id(id: i64) -> LeaseId {
    // Never negative: we choose them.
    LeaseId(u128::from(id.unsigned_abs()))
}

/// A lease that the keeper looks after, as etcd names it. That of a ticket which has its own is
/// in the ticket's key.
fn etcd_lease(lease: &Lease) -> i64 {
    match &lease.ticket {
        Some(ticket) => own_lease(ticket).unwrap_or(0),
        None => number(lease.id),
    }
}

/// The lease of a ticket that shares it with nobody.
pub(super) fn own_lease(ticket: &Ticket) -> Option<i64> {
    let key = ticket.native.as_ref().filter(|_| ticket.has_own_lease())?;
    let (_, rest) = key.rsplit_once('/')?;
    keys::ours(rest).map(|(lease, _)| lease)
}

/// A lease of the core, as etcd names it; 0, which is none, when it is not of etcd.
pub(super) fn number(id: LeaseId) -> i64 {
    i64::try_from(id.0).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(cluster_id: u64, revision: i64) -> Header {
        Header {
            cluster_id,
            revision,
            ..Default::default()
        }
    }

    #[test]
    fn another_history_is_noticed_and_answers_out_of_order_are_none() {
        let leases = Leases::default();
        let before = *leases.history.lock();
        leases.observe(before, &header(7, 10));
        // Two writes at once, answered in the other order.
        let before = *leases.history.lock();
        leases.observe(before, &header(7, 12));
        leases.observe(before, &header(7, 11));
        assert_eq!((leases.epoch(), leases.history.lock().revision), (0, 12));
        // A snapshot was restored: two renewals at once notice it, and count it once.
        let before = *leases.history.lock();
        leases.observe(before, &header(7, 5));
        leases.observe(before, &header(7, 6));
        assert_eq!(leases.epoch(), 1);
        // Another cluster, though its history is longer.
        let before = *leases.history.lock();
        leases.observe(before, &header(8, 50));
        assert_eq!(leases.epoch(), 2);
    }
}
