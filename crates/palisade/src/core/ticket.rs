//! `Ticket`: the engine's record of a claim, both the hold and the place in line.
//! `Lease`: what must be renewed to keep tickets alive.

use std::sync::Arc;
use std::time::Duration;

use super::claim::ClaimId;
use super::clock::BootTime;
use super::keeper::RenewalPermit;
use super::known_bad::{self, Bad};
use super::name::Name;

/// Names a lease: an etcd lease, a ZooKeeper or Consul session, or the one ticket it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u128);

impl From<ClaimId> for LeaseId {
    /// The lease of a ticket that has its own.
    fn from(claim: ClaimId) -> Self {
        Self(claim.0)
    }
}

/// A place in a line, as the engine knows it.
#[derive(Debug, Clone)]
pub struct Ticket {
    /// The line.
    pub name: Name,
    /// The claim, as surveys show it. A gateway calls it by another id than it was asked with.
    pub claim: ClaimId,
    /// What keeps it alive.
    pub lease: LeaseId,
    /// What the engine counted for it: with the claim id, its incarnation. 0 until it is known.
    pub sequence: u64,
    /// The engine's own key for it, where it can't be derived.
    pub native: Option<Arc<str>>,
    /// Whether a request for it was never answered and another was: the first may still be under
    /// way when the place has been left.
    pub in_doubt: bool,
}

impl Ticket {
    /// A ticket with a lease of its own that the engine has not counted yet.
    pub fn own(name: Name, claim: ClaimId) -> Self {
        Self {
            name,
            claim,
            lease: claim.into(),
            sequence: 0,
            native: None,
            in_doubt: false,
        }
    }

    /// Whether nothing but this ticket hangs on its lease.
    pub fn has_own_lease(&self) -> bool {
        self.lease == self.claim.into()
    }
}

/// A lease to be renewed. Only the keeper makes one, so only the keeper renews.
#[derive(Debug, Clone)]
pub struct Lease {
    /// Which one.
    pub id: LeaseId,
    /// The one ticket that it belongs to, or `None` when many share it.
    pub ticket: Option<Ticket>,
    _permit: RenewalPermit,
}

impl Lease {
    pub(super) fn new(id: LeaseId, ticket: Option<Ticket>, permit: RenewalPermit) -> Self {
        Self {
            id,
            ticket,
            _permit: permit,
        }
    }
}

/// An acknowledged create or renew of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseStart {
    /// Read **before** the request was sent.
    pub sent: BootTime,
    /// What the engine granted, not what was asked for.
    pub ttl: Duration,
}

impl LeaseStart {
    /// One that a holder may believe in for `valid` from `sent` on, because whoever says so, a
    /// gateway, has taken the margin already.
    pub fn promised(sent: BootTime, valid: Duration) -> Self {
        let ms = Duration::from_millis;
        // What `ttl - margin(ttl)` is `valid` for, rounded down.
        let ttl = if valid < ms(100) {
            valid * 3 / 2
        } else if valid < ms(450) {
            valid + ms(50)
        } else {
            valid * 10 / 9
        };
        Self { sent, ttl }
    }

    /// Counts from `called`, read before the request was made, unless the engine says an earlier
    /// time: whatever it says, the earlier one is safe.
    #[must_use]
    pub(crate) fn not_after(self, called: BootTime) -> Self {
        let sent = if known_bad::is(Bad::DeadlineFromReply) {
            BootTime::now()
        } else {
            self.sent.min(called)
        };
        Self { sent, ..self }
    }

    /// Until when a holder may believe in it: the engine can't end the lease before
    /// `sent + ttl`, and the margin covers drift and the time it takes to stop working.
    pub fn deadline(&self) -> BootTime {
        if known_bad::is(Bad::LossAtTwiceTtl) {
            return self.sent + 2 * self.ttl;
        }
        self.sent + (self.ttl - margin(self.ttl))
    }
}

/// max(ttl/10, 50 ms), at most ttl/3: enough to stop working in, without eating a short lease.
fn margin(ttl: Duration) -> Duration {
    (ttl / 10).max(Duration::from_millis(50)).min(ttl / 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_margin_is_a_tenth_but_bounded_on_both_sides() {
        let ms = Duration::from_millis;
        assert_eq!(margin(ms(30_000)), ms(3_000));
        assert_eq!(margin(ms(300)), ms(50));
        assert_eq!(margin(ms(90)), ms(30));
    }

    #[test]
    fn a_promise_is_believed_as_long_as_it_says_and_no_longer() {
        let sent = BootTime::now();
        for micros in (0..2_000_000)
            .step_by(997)
            .chain([99_999, 100_000, 450_000])
        {
            let valid = Duration::from_micros(micros);
            let believed = LeaseStart::promised(sent, valid).deadline();
            assert!(believed <= sent + valid, "{valid:?}");
            let short = (sent + valid).saturating_since(believed);
            assert!(short < Duration::from_nanos(5), "{valid:?} less {short:?}");
        }
        let full = Duration::from_secs(30);
        let start = LeaseStart::promised(sent, full - margin(full));
        assert_eq!(start.ttl, full);
    }
}
