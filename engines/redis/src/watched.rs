//! `Watched`: the lines that a watch has heard of, so that the surveys beside it need no SCAN, which
//! walks the messages of queues and whatever else is in the database.
//!
//! Invariant: after one SCAN since the watch began, a line that is in use is known, whoever wrote
//! it. The server tells of every key that is changed, before it answers the request that changed it:
//! what it had told by the time of a survey has arrived before the reply to a PING. Only for one
//! server: behind Sentinel, or in a Cluster, a watch may listen to another one than the survey asks.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;

use super::keys::LineKeys;
use palisade_core::{BootTime, Name};

/// For how long a SCAN is good. It is repeated so that an error in here is not one for long.
const GOOD: Duration = Duration::from_secs(10);

/// The lines of one prefix, while its watch lasts.
#[derive(Debug, Default)]
pub(super) struct Watched {
    pub(super) prefix: String,
    names: Mutex<Names>,
}

#[derive(Debug, Default)]
struct Names {
    /// Each with the number of when it was last heard of.
    lines: BTreeMap<Name, (LineKeys, u64)>,
    heard: u64,
    /// Until when the last SCAN is good.
    good: Option<BootTime>,
    over: bool,
}

/// A watch and its connection, which ends with the last of these.
pub(super) struct Watch {
    pub(super) lines: Arc<Watched>,
    pub(super) connection: MultiplexedConnection,
}

impl Watch {
    /// All lines that may be in use, if they are known, with those of which the server has told.
    pub(super) async fn all(&self, patience: Duration) -> Option<Vec<Known>> {
        let mut connection = self.connection.clone();
        let ping = redis::cmd("PING");
        let pong = ping.query_async::<String>(&mut connection);
        tokio::time::timeout(patience, pong).await.ok()?.ok()?;
        self.lines.all()
    }
}

/// The watches of one client.
#[derive(Default)]
pub(crate) struct Watches(Mutex<Vec<Weak<Watch>>>);

impl Watches {
    pub(super) fn add(&self, watch: &Arc<Watch>) {
        let mut watches = self.0.lock();
        watches.retain(|watch| watch.strong_count() > 0);
        watches.push(Arc::downgrade(watch));
    }

    /// A watch of this prefix.
    pub(super) fn of(&self, prefix: &str) -> Option<Arc<Watch>> {
        let watches = self.0.lock();
        let mut living = watches.iter().rev().filter_map(Weak::upgrade);
        living.find(|watch| watch.lines.prefix == prefix)
    }
}

/// A line, and the number of when it was last heard of.
pub(super) type Known = (Name, LineKeys, u64);

impl Watched {
    pub(super) fn new(prefix: String) -> Arc<Self> {
        let names = Mutex::default();
        Arc::new(Self { prefix, names })
    }

    /// A line was changed.
    pub(super) fn hear(&self, name: Name, keys: LineKeys) {
        let mut names = self.names.lock();
        names.heard += 1;
        let heard = names.heard;
        names.lines.insert(name, (keys, heard));
    }

    /// The connection has ended: later changes are not heard of.
    pub(super) fn end(&self) {
        self.names.lock().over = true;
    }

    /// All lines that may be in use, if they are known.
    pub(super) fn all(&self) -> Option<Vec<Known>> {
        let names = self.names.lock();
        let good = !names.over && names.good.is_some_and(|good| !good.has_passed());
        let known =
            |(name, (keys, heard)): (&Name, &(LineKeys, u64))| (name.clone(), keys.clone(), *heard);
        good.then(|| names.lines.iter().map(known).collect())
    }

    /// A SCAN that began while the watch lasted has found these.
    pub(super) fn scanned(&self, found: &[(Name, LineKeys)]) {
        let mut names = self.names.lock();
        names.good = Some(BootTime::now() + GOOD);
        for (name, keys) in found {
            let known = names.lines.entry(name.clone());
            known.or_insert_with(|| (keys.clone(), 0));
        }
    }

    /// Nobody was in this line, when it had been heard of so often.
    pub(super) fn is_empty(&self, name: &Name, heard: u64) {
        let mut names = self.names.lock();
        if names.lines.get(name).is_some_and(|(_, now)| *now == heard) {
            names.lines.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys::Keys;
    use super::*;

    #[test]
    fn a_line_is_known_until_it_is_empty_and_not_heard_of_since() {
        let keys = Keys::new("ns").unwrap();
        let line = |name: &str| {
            let name = Name::new(name).unwrap();
            let keys = keys.line(&name).unwrap();
            (name, keys)
        };
        let watched = Watched::new(String::new());
        let names = || {
            let all = watched.all()?;
            Some(
                all.iter()
                    .map(|(name, ..)| name.to_string())
                    .collect::<Vec<_>>(),
            )
        };
        let hear = |name| {
            let (name, keys) = line(name);
            watched.hear(name, keys);
        };
        hear("b");
        assert_eq!(names(), None, "nothing is known of what was before");
        watched.scanned(&[line("a"), line("b")]);
        assert_eq!(names().unwrap(), ["a", "b"]);
        let all = watched.all().unwrap();
        hear("b");
        for (name, _, heard) in &all {
            watched.is_empty(name, *heard);
        }
        assert_eq!(names().unwrap(), ["b"], "it was heard of since");
        hear("a");
        assert_eq!(names().unwrap(), ["a", "b"]);
        watched.end();
        assert_eq!(names(), None);
    }
}
