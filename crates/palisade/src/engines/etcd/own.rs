//! Leases that belong to one claim: of those that are not renewed while they hold.
//!
//! Such a claim ends with its ttl while the others of its client live on. Its lease is granted
//! when it enters, kept alive while it waits, and given back when it leaves; the number of the
//! lease is in the key of the place. Once the lease is given back, an enter that is still under
//! way finds nothing to hang its place on.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::{join_all, try_join};

use super::Inner;
use super::change::mark_key;
use super::enter::Known;
use super::keys;
use super::leases::{self, Living, own_lease};
use super::ops;
use super::rpc::NO_RIGHT;
use super::wire::{RangeRequest, TxnRequest};
use crate::core::claim::Claim;
use crate::core::engine::Renewal;
use crate::core::error::{Error, Kind, Result};
use crate::core::ticket::{Lease, Ticket};
use crate::engines::remote::timed;

impl Inner {
    /// The lease for a claim: its own if it is not to be renewed, and else that of all with its
    /// ttl. The same claim again has the same one while it is good.
    pub(super) async fn lease_for(&self, claim: &Claim, again: Option<&Known>) -> Result<Living> {
        let lease = async {
            if claim.renewed {
                return self.leases.get(&self.rpc, claim.ttl).await;
            }
            match again.and_then(|known| known.own) {
                Some(own) if !own.armed.deadline().has_passed() => Ok(own),
                _ => self.leases.grant(&self.rpc, claim.ttl).await,
            }
        };
        if self.allowed.load(Ordering::Relaxed) {
            return lease.await;
        }
        // Without the right to it a lease that was granted meanwhile ends by itself.
        let ((), lease) = try_join(self.see_that_it_is_allowed(), lease).await?;
        Ok(lease)
    }

    /// Sees, once, that the user may write where the engine keeps its own records: without that
    /// neither a renewal nor a release goes through, and a lock would be lost at its ttl.
    async fn see_that_it_is_allowed(&self) -> Result<()> {
        let lines = self.keys.scope("");
        let marks = format!("{}{lines}", keys::MARKS);
        let look = RangeRequest {
            limit: 1,
            ..ops::all(&marks)
        };
        // Of keys that never are: the rights are checked, and nothing is changed.
        let mut success = vec![
            ops::range(look),
            ops::delete(marks),
            ops::delete(keys::NOTHING),
        ];
        if self.keys.shared_with_others() {
            success.push(ops::delete(keys::OWNERS));
        }
        let request = TxnRequest {
            success,
            ..Default::default()
        };
        match self.rpc.txn("enter", request).await {
            Ok(_) => {
                self.allowed.store(true, Ordering::Relaxed);
                Ok(())
            }
            Err(error) if error.message() == NO_RIGHT => {
                let message = "etcd denies this user the prefix .palisade/, without which locks \
                               can be neither kept nor released; grant its role readwrite on it: \
                               etcdctl role grant-permission ROLE readwrite .palisade/ \
                               --prefix=true";
                Err(Error::new(Kind::Denied, "enter", message))
            }
            // Nothing was to be changed.
            Err(error) => Err(Error::new(error.kind(), "enter", error.message())),
        }
    }

    /// Gives back the lease of a claim that took no place. Without an answer it ends by itself.
    pub(super) async fn end_lease(&self, lease: i64) {
        let _ = leases::revoke(&self.rpc, "enter", lease).await;
    }

    /// Gives the own lease of a ticket back when its place has been left.
    ///
    /// # Errors
    /// Those of the request, when the place may still be asked for. Otherwise nothing hangs on
    /// the lease any more, and it ends by itself.
    pub(super) async fn end_own(&self, ticket: &Ticket, known: Option<&Known>) -> Result<()> {
        let known = known.and_then(|known| known.own).map(|own| own.id);
        let Some(lease) = known.or_else(|| own_lease(ticket)) else {
            return Ok(());
        };
        let ended = leases::revoke(&self.rpc, "leave", lease).await;
        match ticket.sequence == 0 || ticket.in_doubt {
            true => ended,
            false => Ok(()),
        }
    }

    /// Renews leases within a time, and says of each how it went. The server may be well and the
    /// connection dead: one that does not answer in time is given up, so that the next renewal
    /// has another.
    pub(super) async fn keep(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        let count = leases.len();
        let mut over = None;
        let renewed = async {
            over = Some(self.rpc.links.get().await?);
            Ok(self.keep_all(leases).await)
        };
        let renewed = timed("renew", within, renewed).await;
        let error = match renewed {
            Ok(Ok(renewals)) => return renewals,
            Ok(Err(error)) => error,
            Err(late) => {
                if let Some(link) = over {
                    self.rpc.links.broken(&link).await;
                }
                late
            }
        };
        let unknown = || Error::new(error.kind(), "renew", error.message()).maybe_applied();
        (0..count).map(|_| Renewal::Unknown(unknown())).collect()
    }

    async fn keep_all(&self, leases: Vec<Lease>) -> Vec<Renewal> {
        let verdicts = join_all(leases.iter().map(|lease| self.verdict(lease))).await;
        let open = leases.into_iter().zip(&verdicts);
        let open = open.filter_map(|(lease, verdict)| verdict.is_none().then_some(lease));
        let kept = self.leases.keep_alive(&self.rpc, open.collect()).await;
        let mut kept = kept.into_iter();
        let unknown = || {
            let message = "there was no answer for this lease";
            Renewal::Unknown(Error::new(Kind::Unreachable, "renew", message).maybe_applied())
        };
        let verdicts = verdicts.into_iter();
        verdicts
            .map(|verdict| verdict.or_else(|| kept.next()).unwrap_or_else(unknown))
            .collect()
    }

    /// What is known of an own lease without keeping it alive: its place may have been taken
    /// away, or be asked for. What hangs on a shared lease is looked after by the audit.
    async fn verdict(&self, lease: &Lease) -> Option<Renewal> {
        let ticket = lease.ticket.as_ref()?;
        let Some(key) = &ticket.native else {
            return Some(Renewal::Lost);
        };
        let names = [key.as_bytes().to_vec(), mark_key(key.as_bytes())];
        let look = TxnRequest {
            success: names.iter().map(|key| ops::range(ops::one(key))).collect(),
            ..Default::default()
        };
        let mut found = match self.rpc.txn("renew", look).await {
            Ok(response) => ops::found(response).into_iter(),
            Err(error) => return Some(Renewal::Unknown(error)),
        };
        let (place, mark) = (found.next()?.pop(), found.next()?.pop());
        let created = place.and_then(|place| u64::try_from(place.create_revision).ok());
        match mark {
            _ if created != Some(ticket.sequence) => Some(Renewal::Lost),
            Some(_) => Some(Renewal::Evicted),
            None => None,
        }
    }
}
