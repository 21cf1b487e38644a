//! `Renewals`: what a client has seen of the renewals of other sessions.
//!
//! ZooKeeper tells nobody when it last heard from a session. So a session that claims of agents
//! live with has a node that each of its renewals writes to (`keys`), and whoever surveys
//! remembers, by its own clock, since when it has seen that node as it is. The lease ends no later
//! than one ttl after that. Deadlocks are broken only among those who were renewed since.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;

use crate::core::clock::BootTime;

/// How long a session is remembered that was not looked at again.
const REMEMBERED: Duration = Duration::from_secs(600);

/// See the module's text.
#[derive(Default)]
pub(super) struct Renewals(Mutex<HashMap<i64, Seen>>);

struct Seen {
    /// How often its node was written to; `None` while there is none.
    version: Option<i32>,
    since: BootTime,
    looked: BootTime,
}

impl Renewals {
    /// Remembers how the node of a session was read, at `now`; since when it is as it is.
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
