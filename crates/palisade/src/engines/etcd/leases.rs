//! `Leases`: one lease per ttl, shared by all places of a client, and the keys on it that can be
//! used again; beside them leases of single claims.
//!
//! The engine grants a lease when the first claim needs it; only the keeper renews it. From its
//! deadline on (see `LeaseStart::deadline`) it is never used again, whatever etcd says of it: the
//! keeper has told its holders at that moment. A claim that is not renewed while it holds has a
//! lease of its own, which ends with it while the others of its client live on.
//!
//! etcd remembers every key until its history is compacted, and reads of a line pass over all of
//! them: a key of its own for every claim would make a busy line slower and slower. So a key is
//! used again once its place is known to have been left, and only then: etcd confirmed it, the
//! create revision was compared, and no copy of an enter is under way. The create revision tells
//! the claims on one key apart, and the record in its value says whose it is.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::client::Client;
use super::keys;
use super::proto::{Header, LeaseGrantRequest, LeaseRevokeRequest};
use crate::core::claim::Claim;
use crate::core::clock::BootTime;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::ticket::{LeaseId, LeaseStart, Ticket};
use crate::engines::kit::shared_sessions::Maker;

/// How many unused keys a lease keeps at the most.
const MOST_KEYS: usize = 4096;

/// A lease, and until when it is good.
#[derive(Debug, Clone, Copy)]
pub(super) struct Living {
    pub(super) id: i64,
    pub(super) armed: LeaseStart,
}

/// A lease that claims share.
#[derive(Debug)]
struct Shared {
    asked: Duration,
    armed: LeaseStart,
    /// That of the history in which it was granted.
    epoch: u64,
    /// Unused keys by line, and how many there are.
    free: HashMap<String, Vec<Arc<str>>>,
    count: usize,
}

/// What is known of the cluster's history. Writes are in one order, so that one which was sent
/// after another was answered can't be told an earlier revision: unless the cluster was restored
/// from a snapshot, or is another one.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct History {
    /// The id of the cluster; 0 as long as nothing is known.
    cluster: u64,
    /// The highest revision that a write was answered with.
    revision: i64,
    /// How often another history has taken its place.
    pub(super) epoch: u64,
}

/// The shared leases of one client.
#[derive(Default)]
pub(super) struct Leases {
    table: Mutex<HashMap<i64, Shared>>,
    maker: Maker,
    history: Mutex<History>,
}

impl Leases {
    /// The lease for a claim: its own if it is not to be renewed, and else that of all with its
    /// ttl. The same claim again has the same one while it is good.
    ///
    /// # Errors
    /// As [`Leases::grant`].
    pub(super) async fn for_claim(
        &self,
        client: &Client,
        claim: &Claim,
        own: Option<Living>,
    ) -> Result<Living> {
        let ttl = claim.ttl;
        if !claim.renewed {
            return match own {
                Some(own) if !own.armed.deadline().has_passed() => Ok(own),
                _ => self.grant(client, ttl).await,
            };
        }
        let find = || {
            let epoch = self.history.lock().epoch;
            let mut table = self.table.lock();
            table.retain(|_, shared| !shared.armed.deadline().has_passed());
            let fits = |shared: &Shared| shared.asked == ttl && shared.epoch == epoch;
            let (&id, shared) = table.iter().find(|(_, shared)| fits(shared))?;
            let armed = shared.armed;
            Some(Living { id, armed })
        };
        // Granted anew when there is none that lives.
        let grant = async {
            let living = self.grant(client, ttl).await?;
            let shared = Shared {
                asked: ttl,
                armed: living.armed,
                epoch: self.history().epoch,
                free: HashMap::new(),
                count: 0,
            };
            self.table.lock().insert(living.id, shared);
            Ok(living)
        };
        self.maker.find_or_make(client.timeout, find, grant).await
    }

    /// A new lease, for one claim or for many.
    ///
    /// # Errors
    /// Those of the request; nothing is left to undo, since a lease without keys ends by itself.
    pub(super) async fn grant(&self, client: &Client, ttl: Duration) -> Result<Living> {
        let request = LeaseGrantRequest {
            ttl: i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX),
            // We pick the id, so a grant whose reply was lost can't be confused with this one.
            id: rand::random_range(1..i64::MAX),
        };
        let (before, sent) = (self.history(), BootTime::now());
        let granted = client.call("enter", request).await;
        // Not "maybe applied": the lease may be there, but no place was asked for yet.
        let granted =
            granted.map_err(|error| Error::new(error.kind(), "enter", error.message()))?;
        self.observe(before, &granted.header.unwrap_or_default());
        let ttl = seconds(granted.ttl);
        Ok(Living {
            id: granted.id,
            armed: LeaseStart { sent, ttl },
        })
    }

    /// An unused key of this lease in the line whose keys begin with `prefix`.
    pub(super) fn reuse_key(&self, lease: i64, prefix: &str) -> Option<Arc<str>> {
        let mut table = self.table.lock();
        let shared = table.get_mut(&lease)?;
        let key = shared.free.get_mut(prefix)?.pop()?;
        shared.count -= 1;
        Some(key)
    }

    /// Takes back a key whose place is known to have been left.
    pub(super) fn free_key(&self, lease: i64, prefix: String, key: Arc<str>) {
        let mut table = self.table.lock();
        let Some(shared) = table.get_mut(&lease) else {
            return;
        };
        if shared.count >= MOST_KEYS {
            (shared.free, shared.count) = Default::default();
        }
        shared.count += 1;
        shared.free.entry(prefix).or_default().push(key);
    }

    /// Counts a renewal that was answered, unless the lease was past its deadline already.
    pub(super) fn renewed(&self, id: i64, armed: LeaseStart) {
        let mut table = self.table.lock();
        if let Some(shared) = table.get_mut(&id) {
            if shared.armed.deadline().has_passed() {
                table.remove(&id);
            } else if armed.sent > shared.armed.sent {
                shared.armed = armed;
            }
        }
    }

    pub(super) fn is_shared(&self, id: i64) -> bool {
        self.table.lock().contains_key(&id)
    }

    /// Uses it no more.
    pub(super) fn retire(&self, id: i64) {
        self.table.lock().remove(&id);
    }

    /// Gives all leases back, and with them whatever still hangs on them.
    pub(super) async fn revoke_all(&self, client: &Client) {
        let all: Vec<i64> = self.table.lock().drain().map(|(id, _)| id).collect();
        for id in all {
            if revoke(client, "close", id).await.is_err() {
                // Without an answer the ttl ends it.
                break;
            }
        }
    }

    /// What is known of the cluster's history now.
    pub(super) fn history(&self) -> History {
        *self.history.lock()
    }

    /// Compares the answer to a write that was sent when `before` was known.
    pub(super) fn observe(&self, before: History, header: &Header) {
        let mut now = self.history.lock();
        if now.epoch != before.epoch {
            return;
        }
        let is_other = header.cluster_id != before.cluster || header.revision < before.revision;
        if before.cluster != 0 && header.cluster_id != 0 && is_other {
            now.revision = 0;
            now.epoch += 1;
        }
        now.cluster = header.cluster_id;
        now.revision = now.revision.max(header.revision);
    }

    /// Whether it was granted in a history that is over.
    pub(super) fn is_of_the_past(&self, id: i64) -> bool {
        let epoch = self.history().epoch;
        let table = self.table.lock();
        table.get(&id).is_some_and(|shared| shared.epoch < epoch)
    }
}

/// Gives a lease back, with whatever hangs on it. One that has ended is no error.
pub(super) async fn revoke(client: &Client, operation: &'static str, id: i64) -> Result<()> {
    match client.call(operation, LeaseRevokeRequest { id }).await {
        Err(error) if error.kind() == ErrorKind::Lost => Ok(()),
        answer => answer.map(drop),
    }
}

pub(super) fn seconds(ttl: i64) -> Duration {
    Duration::from_secs(u64::try_from(ttl).unwrap_or(0))
}

/// A lease of etcd, as the core names it.
pub(super) fn lease_id(id: i64) -> LeaseId {
    // Never negative: we choose them.
    LeaseId(u128::from(id.unsigned_abs()))
}

/// A lease of the core, as etcd names it; 0, which is none, when it is not of etcd.
pub(super) fn number(id: LeaseId) -> i64 {
    i64::try_from(id.0).unwrap_or(0)
}

/// The lease of a ticket that shares it with nobody: its key has the number.
pub(super) fn own_lease(ticket: &Ticket) -> Option<i64> {
    let key = ticket.native.as_ref().filter(|_| ticket.has_own_lease())?;
    keys::lease_of(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_history_is_noticed_and_answers_out_of_order_are_none() {
        let leases = Leases::default();
        let observe = |before, cluster_id, revision| {
            let header = Header {
                cluster_id,
                revision,
                ..Default::default()
            };
            leases.observe(before, &header);
            (leases.history().epoch, leases.history().revision)
        };
        observe(leases.history(), 7, 10);
        // Two writes at once, answered in the other order.
        let before = leases.history();
        observe(before, 7, 12);
        assert_eq!(observe(before, 7, 11), (0, 12));
        // A snapshot was restored: two renewals at once notice it, and count it once.
        let before = leases.history();
        assert_eq!(observe(before, 7, 5), (1, 5));
        assert_eq!(observe(before, 7, 6).0, 1);
        // Another cluster, though its history is longer.
        assert_eq!(observe(leases.history(), 8, 50).0, 2);
    }

    #[test]
    fn a_key_is_given_to_one_and_only_on_its_own_lease_and_line() {
        let leases = Leases::default();
        for lease in [1, 2] {
            let shared = Shared {
                asked: Duration::ZERO,
                armed: LeaseStart {
                    sent: BootTime::now(),
                    ttl: Duration::from_secs(9),
                },
                epoch: 0,
                free: HashMap::new(),
                count: 0,
            };
            leases.table.lock().insert(lease, shared);
        }
        leases.free_key(1, "a/".into(), "a/1-x".into());
        assert_eq!(leases.reuse_key(2, "a/"), None);
        assert_eq!(leases.reuse_key(1, "b/"), None);
        assert_eq!(leases.reuse_key(1, "a/").as_deref(), Some("a/1-x"));
        assert_eq!(leases.reuse_key(1, "a/"), None);
        for _ in 0..MOST_KEYS * 2 {
            leases.free_key(1, "a/".into(), "a/1-x".into());
        }
        assert!(leases.table.lock()[&1].count <= MOST_KEYS);
    }
}
