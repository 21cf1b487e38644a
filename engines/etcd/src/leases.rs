//! `Leases`: one lease per ttl, shared by all claims of a client; the keys on it that can be
//! reused; and leases of single claims.
//!
//! The engine grants a lease when the first claim needs it; only the keeper renews it. After its
//! deadline (see `LeaseStart::deadline`) a lease is never used again, whatever etcd says, because
//! the keeper has reported its holds as lost at that moment. A claim that is not renewed while it
//! holds has a lease of its own, which expires without affecting the others.
//!
//! etcd keeps every key until its history is compacted, and a read of a line passes over all of
//! them. A new key for every claim would make a busy line slower and slower, so keys are reused. A
//! key is reused only when its place is known to have been left: etcd confirmed it, the create
//! revision was compared, and no copy of an enter is in flight. The create revision distinguishes
//! the claims on one key, and the record in its value names the claim.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::acquire::Known;
use super::client::Client;
use super::keys;
use super::proto::{Header, LeaseGrantRequest, LeaseRevokeRequest};
use palisade_core::engine::{Claim, LeaseId, LeaseStart, Ticket};
use palisade_core::{BootTime, Error, ErrorKind, Result};
use palisade_kit::shared_sessions::Maker;

/// The most unused keys that a lease keeps.
const MOST_KEYS: usize = 4096;

/// A lease and its start.
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
    /// The epoch of the history in which it was granted.
    epoch: u64,
    /// Unused keys by line, and their number.
    free: HashMap<String, Vec<Arc<str>>>,
    count: usize,
}

impl Shared {
    fn new(asked: Duration, armed: LeaseStart, epoch: u64) -> Self {
        Self {
            asked,
            armed,
            epoch,
            free: HashMap::new(),
            count: 0,
        }
    }

    /// An unused key in the line whose keys begin with `prefix`.
    fn reuse_key(&mut self, prefix: &str) -> Option<Arc<str>> {
        let key = self.free.get_mut(prefix)?.pop()?;
        self.count -= 1;
        Some(key)
    }
}

/// What is known of the cluster's history. Writes are totally ordered, so a write sent after the
/// reply to another can't return a lower revision, unless the cluster was restored from a snapshot
/// or is another one.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct History {
    /// The cluster id; 0 while it is unknown.
    cluster: u64,
    /// The highest revision that a write returned.
    revision: i64,
    /// How many times another history has replaced it.
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
    /// The lease for a claim, one of its own if it is not renewed, else the shared one for its ttl;
    /// and a key on it in the line whose keys begin with `prefix`. A claim that was entered
    /// `before` keeps both while the lease is valid.
    ///
    /// # Errors
    /// As [`Leases::grant`].
    pub(super) async fn for_claim(
        &self,
        client: &Client,
        claim: &Claim,
        prefix: &str,
        before: Option<&Known>,
    ) -> Result<(Living, Arc<str>)> {
        let ttl = claim.ttl;
        let key_on = |id| keys::place(prefix, id, claim.id);
        if !claim.renewed {
            let lives = |known: &&Known| known.own && !known.lease.armed.deadline().has_passed();
            if let Some(known) = before.filter(lives) {
                return Ok((known.lease, Arc::clone(&known.key)));
            }
            let own = self.grant(client, ttl).await?;
            return Ok((own, key_on(own.id)));
        }
        let find = || {
            let epoch = self.history.lock().epoch;
            let mut table = self.table.lock();
            table.retain(|_, shared| !shared.armed.deadline().has_passed());
            let fits = |shared: &Shared| shared.asked == ttl && shared.epoch == epoch;
            let (&id, shared) = table.iter_mut().find(|(_, shared)| fits(shared))?;
            let key = match before {
                Some(known) if known.lease.id == id => Arc::clone(&known.key),
                _ => shared.reuse_key(prefix).unwrap_or_else(|| key_on(id)),
            };
            let armed = shared.armed;
            Some((Living { id, armed }, key))
        };
        if let Some(found) = find() {
            return Ok(found);
        }
        let grant = async {
            let living = self.grant(client, ttl).await?;
            let shared = Shared::new(ttl, living.armed, self.history().epoch);
            self.table.lock().insert(living.id, shared);
            Ok((living, key_on(living.id)))
        };
        self.maker.find_or_make(client.timeout, find, grant).await
    }

    /// Grants a lease, for one claim or for many.
    ///
    /// # Errors
    /// Errors of the request. There is nothing to undo, because a lease without keys expires.
    pub(super) async fn grant(&self, client: &Client, ttl: Duration) -> Result<Living> {
        let request = LeaseGrantRequest {
            ttl: i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX),
            // We pick the id, so a grant whose reply was lost can't be confused with this one.
            id: rand::random_range(1..i64::MAX),
        };
        let (before, sent) = (self.history(), BootTime::now());
        let granted = client.call("enter", request).await;
        // Not "maybe applied": the lease may exist, but no place was requested yet.
        let granted =
            granted.map_err(|error| Error::new(error.kind(), "enter", error.message()))?;
        self.observe(before, &granted.header.unwrap_or_default());
        let ttl = seconds(granted.ttl);
        Ok(Living {
            id: granted.id,
            armed: LeaseStart { sent, ttl },
        })
    }

    /// Takes back the key of a place that is known to have been left.
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

    /// Records a successful renewal, unless the lease was past its deadline already.
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

    /// Stops using a lease.
    pub(super) fn retire(&self, id: i64) {
        self.table.lock().remove(&id);
    }

    /// Revokes all leases, which deletes all keys attached to them.
    pub(super) async fn revoke_all(&self, client: &Client) {
        let all: Vec<i64> = self.table.lock().drain().map(|(id, _)| id).collect();
        for id in all {
            if revoke(client, "close", id).await.is_err() {
                // The remaining leases expire by themselves.
                break;
            }
        }
    }

    /// The current knowledge of the cluster's history.
    pub(super) fn history(&self) -> History {
        *self.history.lock()
    }

    /// Compares the header of the reply to a write that was sent when `before` was known.
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

    /// Whether it was granted in an earlier history.
    pub(super) fn is_of_the_past(&self, id: i64) -> bool {
        let epoch = self.history().epoch;
        let table = self.table.lock();
        table.get(&id).is_some_and(|shared| shared.epoch < epoch)
    }
}

/// Revokes a lease and deletes its keys. A lease that has ended is no error.
pub(super) async fn revoke(client: &Client, operation: &'static str, id: i64) -> Result<()> {
    match client.call(operation, LeaseRevokeRequest { id }).await {
        Err(error) if error.kind() == ErrorKind::Lost => Ok(()),
        answer => answer.map(drop),
    }
}

pub(super) fn seconds(ttl: i64) -> Duration {
    Duration::from_secs(u64::try_from(ttl).unwrap_or(0))
}

/// The core's id of an etcd lease.
pub(super) fn lease_id(id: i64) -> LeaseId {
    // Never negative, because the engine chooses the ids.
    LeaseId(u128::from(id.unsigned_abs()))
}

/// The etcd id of a core lease; 0, which is none, for another kind.
pub(super) fn number(id: LeaseId) -> i64 {
    i64::try_from(id.0).unwrap_or(0)
}

/// The lease of a ticket that has it to itself, read from its key.
pub(super) fn own_lease(ticket: &Ticket) -> Option<i64> {
    let key = ticket.native.as_ref().filter(|_| ticket.has_own_lease())?;
    keys::lease_of(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::Name;
    use palisade_core::engine::{Ask, ClaimId};
    use palisade_core::report::Owner;
    use palisade_kit::PerRuntime;

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
        // Two concurrent writes, answered in reverse order.
        let before = leases.history();
        observe(before, 7, 12);
        assert_eq!(observe(before, 7, 11), (0, 12));
        // A snapshot was restored; two concurrent renewals notice it, and it is counted once.
        let before = leases.history();
        assert_eq!(observe(before, 7, 5), (1, 5));
        assert_eq!(observe(before, 7, 6).0, 1);
        // Another cluster, even with a higher revision.
        assert_eq!(observe(leases.history(), 8, 50).0, 2);
    }

    #[test]
    fn a_key_is_given_to_one_and_only_on_its_own_lease_and_line() {
        let leases = Leases::default();
        for lease in [1, 2] {
            let (sent, ttl) = (BootTime::now(), Duration::from_secs(9));
            let shared = Shared::new(ttl, LeaseStart { sent, ttl }, 0);
            leases.table.lock().insert(lease, shared);
        }
        let reuse = |lease, prefix| leases.table.lock().get_mut(&lease)?.reuse_key(prefix);
        leases.free_key(1, "a/".into(), "a/1-x".into());
        assert_eq!(reuse(2, "a/"), None);
        assert_eq!(reuse(1, "b/"), None);
        assert_eq!(reuse(1, "a/").as_deref(), Some("a/1-x"));
        assert_eq!(reuse(1, "a/"), None);
        for _ in 0..MOST_KEYS * 2 {
            leases.free_key(1, "a/".into(), "a/1-x".into());
        }
        assert!(leases.table.lock()[&1].count <= MOST_KEYS);
    }

    #[tokio::test]
    async fn a_repeated_claim_keeps_its_key_while_its_lease_is_valid() {
        let (sent, ttl) = (BootTime::now(), Duration::from_secs(9));
        let claim = Claim {
            id: ClaimId(7),
            name: Name::new("a").unwrap(),
            ask: Ask::Whole,
            ttl,
            renewed: true,
            at_least: Duration::ZERO,
            queue: true,
            owner: Owner::here("me", None),
            value: None,
        };
        // No call is made.
        let client = Client {
            links: PerRuntime::new(ttl, || Box::pin(std::future::pending())),
            timeout: ttl,
            several: false,
            logs_in: false,
        };
        let leases = Leases::default();
        let shared = Shared::new(ttl, LeaseStart { sent, ttl }, 0);
        leases.table.lock().insert(1, shared);
        let place = async |before: Option<Known>| {
            let before = before.as_ref();
            leases.for_claim(&client, &claim, "a/", before).await
        };
        let (lease, key) = place(None).await.unwrap();
        let before = |lease, key: &Arc<str>| Known {
            lease,
            own: false,
            whole: true,
            key: Arc::clone(key),
            created: 0,
            ahead: None,
        };
        leases.free_key(1, "a/".into(), "a/1-x".into());
        let again = place(Some(before(lease, &key))).await.unwrap();
        assert_eq!((again.0.id, again.1), (1, key));
        let ended = Living { id: 2, ..lease };
        let other = place(Some(before(ended, &"a/2-x".into()))).await.unwrap();
        assert_eq!((other.0.id, &*other.1), (1, "a/1-x"));
    }
}
