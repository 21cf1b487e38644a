//! `Renewals`: what this client has seen of the renewals of other sessions.
//!
//! ZooKeeper tells nobody when it last heard from a session. So a session with claims of agents has
//! a znode that each of its renewals writes to (`keys`). A client that surveys remembers, by its
//! own clock, since when it has seen that znode unchanged. The lease ends at most one ttl after
//! that. A deadlock is broken only if its members were renewed since.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;

use palisade_core::BootTime;

/// How long a session is remembered after it was last read.
const REMEMBERED: Duration = Duration::from_secs(600);

#[derive(Default)]
pub(super) struct Renewals(Mutex<HashMap<i64, Seen>>);

struct Seen {
    /// The version of its znode; `None` while there is none.
    version: Option<i32>,
    since: BootTime,
    looked: BootTime,
}

impl Renewals {
    /// Records the version of a session's znode as read at `now`; returns since when it is
    /// unchanged.
    pub(super) fn saw(&self, session: i64, version: Option<i32>, now: BootTime) -> BootTime {
        let mut sessions = self.0.lock();
        sessions.retain(|_, seen| now.saturating_since(seen.looked) < REMEMBERED);
        let fresh = Seen {
            version,
            since: now,
            looked: now,
        };
        let seen = sessions.entry(session).or_insert(fresh);
        if seen.version != version {
            (seen.version, seen.since) = (version, now);
        }
        seen.looked = now;
        seen.since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renewal_is_seen_when_the_node_has_changed() {
        let renewals = Renewals::default();
        let at = |seconds: u64| BootTime::from_nanos(seconds * 1_000_000_000);
        for (now, version, since) in [
            (1, None, 1),
            (2, None, 1),
            (3, Some(0), 3),
            (5, Some(0), 3),
            (6, Some(1), 6),
        ] {
            assert_eq!(renewals.saw(7, version, at(now)), at(since), "at {now}");
        }
        assert_eq!(renewals.saw(8, Some(1), at(7)), at(7));
        assert_eq!(renewals.saw(7, Some(1), at(700)), at(700), "forgotten");
    }
}
