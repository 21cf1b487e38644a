//! `Watcher`: all watches of one connection, on one stream.
//!
//! A watch starts at the current revision, because etcd serves one that starts in the past only
//! from its sync loop, every 100 ms. So a waiter reads the line again unless its last read is at
//! least as new as the watch's start revision. A push is never a grant: it only says that a read is
//! worthwhile.
//!
//! A watch is shared by all who watch the same range. It stays open for a while without listeners,
//! because keys are reused and the same key is soon ahead again. A later waiter reuses the watch
//! without a fresh read if its last-seen revision is at least the last one that the watch reported.
//! The task that reads the stream belongs to the runtime of its connection and ends with it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use super::client::{Connection, revision};
use super::proto::{NO_PUT, WatchCancelRequest, WatchCreateRequest, WatchRequest};
use super::txn::prefix_range;

/// The most watches that are kept without listeners.
const MOST_IDLE: usize = 16;

/// How many changes an idle watch may report before it is cancelled, because each costs a message.
const MOST_UNHEARD: u32 = 8;

/// The range of keys that a watch covers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Range {
    pub(super) key: Vec<u8>,
    /// Empty for a single key.
    pub(super) end: Vec<u8>,
    /// Whether only deletes are reported.
    pub(super) deletes: bool,
}

impl Range {
    /// All keys that begin with `prefix`.
    pub(super) fn under(prefix: &str) -> Self {
        let (key, end) = prefix_range(prefix);
        Self {
            key,
            end,
            deletes: false,
        }
    }
}

/// The revision of the last possible change; at first the start revision, before which nothing is
/// reported. `None` until the watch has started.
type Changed = Option<i64>;

/// A listener of a watch.
pub(super) struct Watch {
    id: i64,
    changed: watch::Receiver<Changed>,
    watcher: Arc<Watcher>,
}

impl Watch {
    /// Waits until something may have changed after revision `seen`, and returns the revision;
    /// returns at once when the watch started later than that. `None` when the stream broke or etcd
    /// cancelled the watch. Cancel-safe.
    pub(super) async fn changed_since(&mut self, seen: i64) -> Option<i64> {
        let is_later = |changed: &Changed| changed.is_some_and(|at| at > seen);
        *self.changed.wait_for(is_later).await.ok()?
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let useless = self.watcher.table.lock().part(self.id);
        if let Some(useless) = useless {
            let _ = self.watcher.requests.send(cancel(useless));
        }
    }
}

/// The watches of one connection.
pub(super) struct Watcher {
    requests: mpsc::UnboundedSender<WatchRequest>,
    table: Arc<Mutex<Table>>,
    reader: AbortHandle,
}

impl Watcher {
    /// Opens the stream in the background.
    pub(super) fn open(connection: Connection) -> Arc<Self> {
        let (requests, asked) = mpsc::unbounded_channel();
        let table = Arc::default();
        let reader = Reader {
            table: Arc::clone(&table),
            requests: requests.downgrade(),
        };
        Arc::new(Self {
            requests,
            table,
            reader: tokio::spawn(reader.read(connection, asked)).abort_handle(),
        })
    }

    /// Whether the stream has ended.
    pub(super) fn is_over(&self) -> bool {
        self.table.lock().over
    }

    /// Watches a range from now on, or joins an existing watch.
    pub(super) fn watch(self: &Arc<Self>, range: Range) -> Watch {
        let (id, changed, is_new) = self.table.lock().join(&range);
        if is_new {
            let create = WatchCreateRequest {
                key: range.key,
                range_end: range.end,
                filters: range.deletes.then_some(NO_PUT).into_iter().collect(),
                watch_id: id,
            };
            // A stream that has ended notifies its listeners by itself.
            let _ = self.requests.send(WatchRequest {
                create: Some(create),
                cancel: None,
            });
        }
        Watch {
            id,
            changed,
            watcher: Arc::clone(self),
        }
    }
}

fn cancel(watch_id: i64) -> WatchRequest {
    WatchRequest {
        create: None,
        cancel: Some(WatchCancelRequest { watch_id }),
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// The task that reads the stream. However it ends, all listeners are notified.
struct Reader {
    table: Arc<Mutex<Table>>,
    requests: mpsc::WeakUnboundedSender<WatchRequest>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        *self.table.lock() = Table {
            over: true,
            ..Default::default()
        };
    }
}

impl Reader {
    async fn read(self, connection: Connection, asked: mpsc::UnboundedReceiver<WatchRequest>) {
        let requests = stream::unfold(asked, |mut asked| async move {
            asked.recv().await.map(|request| (request, asked))
        });
        let Ok(mut answers) = connection.stream(requests).await else {
            return;
        };
        while let Some(Ok(answer)) = answers.next().await {
            let events = answer.events.iter().filter_map(|event| event.kv.as_ref());
            let last = events.map(|kv| kv.mod_revision).max();
            let useless = match last {
                _ if answer.canceled => {
                    self.table.lock().forget(answer.watch_id);
                    continue;
                }
                _ if answer.created => {
                    let begun = revision(&answer.header);
                    self.table.lock().report(answer.watch_id, begun)
                }
                Some(last) => self.table.lock().report(answer.watch_id, last),
                // Only a progress notification.
                None => continue,
            };
            if let (Some(id), Some(requests)) = (useless, self.requests.upgrade()) {
                let _ = requests.send(cancel(id));
            }
        }
    }
}

/// The listeners of each watch, and what it has reported.
#[derive(Default)]
struct Table {
    over: bool,
    next: i64,
    watches: HashMap<i64, Shared>,
    by_range: HashMap<Range, i64>,
    /// Watches without listeners, the longest idle first.
    idle: VecDeque<i64>,
}

/// One watch on the server.
struct Shared {
    range: Range,
    changed: watch::Sender<Changed>,
    listeners: u32,
    unheard: u32,
}

impl Table {
    /// Adds a listener to a range; the flag says whether etcd must be asked for a new watch.
    fn join(&mut self, range: &Range) -> (i64, watch::Receiver<Changed>, bool) {
        if let Some(id) = self.by_range.get(range)
            && let Some(shared) = self.watches.get_mut(id)
        {
            self.idle.retain(|idle| idle != id);
            shared.listeners += 1;
            shared.unheard = 0;
            return (*id, shared.changed.subscribe(), false);
        }
        self.next += 1;
        let (sender, changed) = watch::channel(None);
        // Without a stream the sender is dropped, so the listener learns at once that it has ended.
        if !self.over {
            let shared = Shared {
                range: range.clone(),
                changed: sender,
                listeners: 1,
                unheard: 0,
            };
            self.watches.insert(self.next, shared);
            self.by_range.insert(range.clone(), self.next);
        }
        (self.next, changed, !self.over)
    }

    /// Removes a listener; returns a watch that is to be cancelled.
    fn part(&mut self, id: i64) -> Option<i64> {
        let shared = self.watches.get_mut(&id)?;
        shared.listeners -= 1;
        if shared.listeners > 0 {
            return None;
        }
        self.idle.push_back(id);
        let oldest = (self.idle.len() > MOST_IDLE).then(|| self.idle[0])?;
        self.forget(oldest);
        Some(oldest)
    }

    /// Reports a change to the listeners; returns a watch that is to be cancelled.
    fn report(&mut self, id: i64, revision: i64) -> Option<i64> {
        let shared = self.watches.get_mut(&id)?;
        let last = (*shared.changed.borrow()).map_or(revision, |last| last.max(revision));
        shared.changed.send_replace(Some(last));
        shared.unheard += u32::from(shared.listeners == 0);
        (shared.unheard > MOST_UNHEARD).then(|| self.forget(id))?;
        Some(id)
    }

    fn forget(&mut self, id: i64) {
        self.idle.retain(|idle| *idle != id);
        if let Some(shared) = self.watches.remove(&id)
            && self.by_range.get(&shared.range) == Some(&id)
        {
            self.by_range.remove(&shared.range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_joins_later_knows_what_was_reported_before() {
        let mut table = Table::default();
        let a = Range::under("a");
        let (id, first, is_new) = table.join(&a);
        assert!(is_new && first.borrow().is_none());
        table.report(id, 10);
        table.report(id, 14);
        // A late reply does not lower the revision.
        table.report(id, 12);
        assert_eq!(*first.borrow(), Some(14));
        assert_eq!(table.part(id), None, "it stays");
        let (same, second, is_new) = table.join(&a);
        assert_eq!((same, is_new, *second.borrow()), (id, false, Some(14)));
        assert!(table.join(&Range::under("b")).2);
    }

    #[test]
    fn idle_watches_are_ended_when_there_are_many_or_when_they_talk_to_nobody() {
        let mut table = Table::default();
        let range = |number: usize| Range::under(&number.to_string());
        let mut ended = Vec::new();
        for number in 0..MOST_IDLE + 3 {
            let (id, ..) = table.join(&range(number));
            ended.extend(table.part(id));
        }
        assert_eq!(ended, [1, 2, 3], "the longest idle go");
        let kept = table.by_range[&range(5)];
        let reports = (0..=MOST_UNHEARD).filter_map(|at| table.report(kept, i64::from(at)));
        assert_eq!(reports.collect::<Vec<_>>(), [kept]);
        assert!(table.join(&range(5)).2);
        // A watch with a listener is kept.
        let (heard, ..) = table.join(&range(6));
        let reports = (0..=MOST_UNHEARD).filter_map(|at| table.report(heard, i64::from(at)));
        assert_eq!(reports.count(), 0);
        assert_eq!(table.watches.len(), table.by_range.len());
    }

    #[tokio::test]
    async fn the_end_is_told_to_everyone_and_nobody_joins_after_it() {
        let mut table = Table::default();
        let a = Range::under("a");
        let ((id, mut one, _), (_, mut two, _)) = (table.join(&a), table.join(&a));
        table.forget(id);
        assert!(one.changed().await.is_err() && two.changed().await.is_err());
        assert!(table.join(&a).2);
        assert_eq!(table.part(id), None, "a late goodbye to another");
        table.over = true;
        let (_, mut late, is_new) = table.join(&Range::under("b"));
        assert!(!is_new && late.changed().await.is_err());
    }
}
