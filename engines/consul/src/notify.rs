//! `alarms` and `watch`: changes below a prefix, by blocking queries.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::Consul;
use super::client::Read;
use super::kv::Op;
use super::renew::SWEEP;
use palisade_core::engine::{Alarm, BoxStream};
use palisade_core::report::Scope;
use palisade_core::{BootTime, Result};
use palisade_kit as kit;

/// The wait of one blocking query for marks or changes. A dead connection is noticed after it.
const NAP: Duration = Duration::from_secs(10);

/// The pause after a query that failed.
const FAILED_PAUSE: Duration = Duration::from_millis(250);

/// The pause after a query that returned without a change: the first one, and the longest.
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The alarms of this client, and one for all leases when the eviction marks change.
pub(super) fn alarms(engine: &Arc<Consul>) -> BoxStream<Alarm> {
    let own = kit::alarms::alarms(engine.alarms.subscribe());
    let marks = changes(engine, engine.keys.marks(), true);
    let marks = marks.filter_map(|change| async { change.ok().map(|()| Alarm::All) });
    stream::select(own, marks.boxed()).boxed()
}

pub(super) fn watch(engine: &Arc<Consul>, scope: &Scope) -> BoxStream<Result<()>> {
    match scope {
        Scope::Prefix(prefix) => changes(engine, engine.keys.beginning(prefix), true),
        Scope::Line(name) => match engine.keys.line(name) {
            Ok(line) => {
                let tree = changes(engine, line.tree(), true);
                stream::select(changes(engine, line.lock, false), tree).boxed()
            }
            Err(error) => stream::iter([Err(error)]).boxed(),
        },
    }
}

/// Yields after the first read of a prefix, and whenever a read differs from the one before.
fn changes(engine: &Arc<Consul>, prefix: String, recurse: bool) -> BoxStream<Result<()>> {
    let watched = Watched {
        engine: Arc::clone(engine),
        prefix,
        recurse,
        index: 0,
        last: None,
        pause: PAUSE,
        restored: BootTime::PAST,
        calm: Duration::ZERO,
    };
    stream::unfold(watched, |mut watched| async move {
        let changed = watched.next().await;
        Some((changed, watched))
    })
    .boxed()
}

/// Watched keys, and what was last read of them.
struct Watched {
    engine: Arc<Consul>,
    prefix: String,
    recurse: bool,
    /// Zero to read at once.
    index: u64,
    last: Option<Vec<(String, u64)>>,
    pause: Duration,
    /// When a restored snapshot was last assumed, and for how long it is not reported again.
    restored: BootTime,
    calm: Duration,
}

impl Watched {
    /// Waits for a change. Consul wakes a query for absent keys at every write nearby. Such a
    /// wake-up is no change, and is followed by a pause that grows.
    async fn next(&mut self) -> Result<()> {
        loop {
            let read = match self.index {
                0 => Read::Consistent,
                index => Read::After(index, NAP),
            };
            let asked = BootTime::now();
            let client = &self.engine.client;
            let seen = match client.read("watch", &self.prefix, self.recurse, read).await {
                Ok(seen) => seen,
                Err(error) => {
                    // The cluster may come back with another history.
                    if error.is_transient() {
                        self.engine.sessions.suspect(None);
                    }
                    (self.index, self.last) = (0, None);
                    tokio::time::sleep(FAILED_PAUSE).await;
                    return Err(error);
                }
            };
            let woken = BootTime::now().saturating_since(asked) < NAP;
            if self.index > 0 && woken && seen.index <= self.index {
                // Consul ends all blocking queries when it restores a snapshot.
                (self.index, self.last) = (0, None);
                if self.is_restored() {
                    return Ok(());
                }
                tokio::time::sleep(LONGEST_PAUSE).await;
                continue;
            }
            if seen.index == self.index {
                self.calm = Duration::ZERO;
                continue;
            }
            // Index zero would not block; an index that decreases belongs to another history.
            let goes_back = seen.index < self.index;
            self.index = if goes_back { 0 } else { seen.index.max(1) };
            let now = seen.pairs.into_iter();
            let now: Vec<_> = now.map(|pair| (pair.key, pair.modify_index)).collect();
            if self.last.as_ref() != Some(&now) {
                let absent = now.is_empty();
                (self.last, self.pause) = (Some(now), PAUSE);
                if absent {
                    self.anchor().await;
                }
                return Ok(());
            }
            tokio::time::sleep(self.pause).await;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Reports that a snapshot was restored, unless that seems to happen all the time: then
    /// something between us and Consul ends queries early.
    fn is_restored(&mut self) -> bool {
        let again = (self.restored + self.calm).has_passed();
        if again {
            self.restored = BootTime::now();
            self.calm = (self.calm * 2).clamp(Duration::from_secs(1), SWEEP);
            self.engine.sessions.suspect(None);
        }
        again
    }

    /// Writes a key among the marks if there is none, so that only marks wake the query.
    async fn anchor(&self) {
        let keys = &self.engine.keys;
        if self.prefix == keys.marks() {
            let key = keys.removed_last();
            let ops = [Op::unchanged(&key, None), Op::set(&key, 0, "")];
            // It does no harm if this fails, for lack of rights or because another client was
            // faster.
            let _ = self.engine.client.transact("watch", &ops).await;
        }
    }
}
