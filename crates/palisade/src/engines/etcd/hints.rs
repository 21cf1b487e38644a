//! Hints: what the keeper, and whoever shows lines, is told that it is worth looking at.
//!
//! A hint is never a verdict. A watch that broke is begun again, with a hint, since something may
//! have happened in between.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use tokio::sync::broadcast;

use super::Inner;
use super::book::{News, Range};
use super::keys::{self, prefix_end, prefix_start};
use super::watching::Watch;
use crate::core::engine::{Alarm, BoxStream};
use crate::core::error::Result;
use crate::core::report::Scope;

/// The pause before a watch that broke is begun again: no hot loop, and no wait to speak of.
const PAUSE: Duration = Duration::from_millis(200);

impl Inner {
    /// Whether a lease is one of this client.
    fn is_ours(&self, lease: i64) -> bool {
        let is_own = || self.known.lock().values().any(|known| known.lease == lease);
        self.leases.is_ours(lease) || is_own()
    }

    pub(super) fn alarm(&self, alarm: Alarm) {
        // Nobody listens before the first claim.
        let _ = self.alarms.send(alarm);
    }
}

/// Hints for the keeper: what the engine notices by itself, and marks on leases of ours.
pub(super) fn alarms(inner: Arc<Inner>) -> BoxStream<Alarm> {
    let heard = inner.alarms.subscribe();
    let state = (inner, heard, None);
    Box::pin(stream::unfold(
        state,
        |(inner, mut heard, mut marks)| async move {
            let alarm = loop {
                tokio::select! {
                    alarm = heard.recv() => match alarm {
                        Ok(alarm) => break alarm,
                        Err(broadcast::error::RecvError::Lagged(_)) => break Alarm::All,
                        // The sender lives in `inner`.
                        Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
                    },
                    news = next_mark(&inner, &mut marks) => if news {
                        break Alarm::All;
                    },
                }
            };
            Some((alarm, (inner, heard, marks)))
        },
    ))
}

/// Whether a mark may concern us; also when the watch has just begun, since marks may have come
/// before it.
async fn next_mark(inner: &Inner, marks: &mut Option<Watch>) -> bool {
    let Some(watch) = marks else {
        let prefix = format!("{}{}", keys::MARKS, inner.keys.scope(""));
        match inner.begin_watch("evict", under(&prefix)).await {
            Ok(watch) => {
                *marks = Some(watch);
                return true;
            }
            Err(_) => {
                tokio::time::sleep(PAUSE).await;
                return false;
            }
        }
    };
    match watch.next().await {
        News::Changed(_, events) => events.iter().any(|event| {
            let key = event
                .kv
                .as_ref()
                .filter(|_| event.kind == 0)
                .map(|kv| &kv.key);
            let rest = key.and_then(|key| std::str::from_utf8(key).ok()?.rsplit('/').next());
            let ours = rest.and_then(keys::ours);
            ours.is_some_and(|(lease, _)| inner.is_ours(lease))
        }),
        News::Begun(_) => false,
        News::Over => {
            *marks = None;
            tokio::time::sleep(PAUSE).await;
            false
        }
    }
}

/// Hints that a survey of `scope` may show something else.
pub(super) fn watch(inner: Arc<Inner>, scope: Scope) -> BoxStream<Result<()>> {
    let prefix = match &scope {
        Scope::Line(name) => inner.keys.line(name),
        Scope::Prefix(prefix) if inner.keys.shared_with_others() => {
            Ok(format!("{}{prefix}", keys::OWNERS))
        }
        Scope::Prefix(prefix) => Ok(inner.keys.scope(prefix)),
    };
    let prefix = match prefix {
        Ok(prefix) => prefix,
        Err(error) => return Box::pin(stream::iter([Err(error)])),
    };
    let marked = match prefix.strip_prefix(keys::OWNERS) {
        Some(prefix) => format!("{}{prefix}", keys::MARKS),
        None => format!("{}{prefix}", keys::MARKS),
    };
    let state = (inner, prefix, marked, None);
    Box::pin(stream::unfold(
        state,
        |(inner, prefix, marked, mut open)| async move {
            let told = next_change(&inner, &prefix, &marked, &mut open).await;
            Some((told, (inner, prefix, marked, open)))
        },
    ))
}

async fn next_change(
    inner: &Inner,
    prefix: &str,
    marked: &str,
    open: &mut Option<(Watch, Watch)>,
) -> Result<()> {
    let Some((places, marks)) = open else {
        let begin = |prefix: &str| inner.begin_watch("watch", under(prefix));
        let begun = futures_util::future::try_join(begin(prefix), begin(marked)).await;
        match begun {
            // A hint: something may have changed before.
            Ok(both) => *open = Some(both),
            Err(error) => {
                tokio::time::sleep(PAUSE).await;
                return Err(error);
            }
        }
        return Ok(());
    };
    let news = tokio::select! {
        news = places.next() => news,
        news = marks.next() => news,
    };
    if let News::Over = news {
        *open = None;
    }
    Ok(())
}

/// All that begins with `prefix`.
fn under(prefix: &str) -> Range {
    Range {
        key: prefix_start(prefix),
        end: prefix_end(prefix),
        deletes: false,
    }
}
