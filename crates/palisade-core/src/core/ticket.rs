//! `Ticket`: the engine's record of a claim, both the hold and the place in line.
//! `Lease`: what must be renewed to keep tickets alive.

use std::sync::Arc;
use std::time::Duration;

use super::claim::ClaimId;
use super::clock::BootTime;
use super::keeper::RenewalPermit;
use super::known_bad::{self, Bad};
use super::name::Name;

/// The id of a lease: an etcd lease, a ZooKeeper or Consul session, or the lease of one ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u128);

impl From<ClaimId> for LeaseId {
    /// The lease of a ticket that has its own.
    fn from(claim: ClaimId) -> Self {
        Self(claim.0)
    }
}

/// A place in a line, as the engine records it.
#[derive(Debug, Clone)]
pub struct Ticket {
    /// The line.
    pub name: Name,
    /// The claim's id in surveys. A gateway may assign another id than the one that entered.
    pub claim: ClaimId,
    /// The lease that keeps it alive.
    pub lease: LeaseId,
    /// The sequence that the engine assigned; with the claim id it is the incarnation. 0 if
    /// unknown.
    pub sequence: u64,
    /// The engine's own key, if it can't be derived from the other fields.
    pub native: Option<Arc<str>>,
    /// Whether an enter went unanswered and was repeated: the first copy may still be in flight
    /// after the place was left.
    pub in_doubt: bool,
}

impl Ticket {
    /// A ticket with a lease of its own and no sequence yet.
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

    /// Whether its lease belongs to this ticket alone.
    pub fn has_own_lease(&self) -> bool {
        self.lease == self.claim.into()
    }
}

/// A lease to renew. Only the keeper can create one, so only the keeper renews.
#[derive(Debug, Clone)]
pub struct Lease {
    /// The id.
    pub id: LeaseId,
    /// The ticket that it belongs to, or `None` if it is shared.
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
    /// The ttl that the engine granted, which may differ from the requested one.
    pub ttl: Duration,
}

impl LeaseStart {
    /// A lease start whose deadline is `sent + valid`, for a gateway's promise, from which the
    /// gateway has already subtracted the margin.
    pub fn promised(sent: BootTime, valid: Duration) -> Self {
        let ms = Duration::from_millis;
        // Inverts `ttl - margin(ttl) == valid`, rounded down.
        let ttl = if valid < ms(100) {
            valid * 3 / 2
        } else if valid < ms(450) {
            valid + ms(50)
        } else {
            valid * 10 / 9
        };
        Self { sent, ttl }
    }

    /// Counts from `called`, which was read before the call, unless the engine reports an earlier
    /// time. The earlier of the two is always safe.
    #[must_use]
    pub(crate) fn not_after(self, called: BootTime) -> Self {
        let sent = if known_bad::is(Bad::DeadlineFromReply) {
            BootTime::now()
        } else {
            self.sent.min(called)
        };
        Self { sent, ..self }
    }

    /// The time until which a holder may rely on it. The engine can't end the lease before
    /// `sent + ttl`; the margin covers clock drift and the time that stopping work takes.
    pub fn deadline(&self) -> BootTime {
        if known_bad::is(Bad::LossAtTwiceTtl) {
            return self.sent + 2 * self.ttl;
        }
        self.sent + (self.ttl - margin(self.ttl))
    }
}

/// max(ttl/10, 50 ms), at most ttl/3: time to stop working, without using up a short lease.
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
