//! Hints: when the keeper should check its leases, and when a survey may have changed.
//!
//! No decision depends on a hint alone. A watch that breaks is restarted, with a hint, because
//! changes in between were missed.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;

use super::Inner;
use super::keys;
use super::proto::RangeRequest;
use super::txn;
use super::watch::{Range, Watch};
use palisade_core::Result;
use palisade_core::engine::{Alarm, BoxStream};
use palisade_core::report::Scope;
use palisade_kit as kit;

/// The pause before a broken watch is restarted: long enough to avoid a hot loop, short enough not
/// to matter.
const PAUSE: Duration = Duration::from_millis(200);

/// A watch of all keys with a prefix, restarted whenever it breaks.
struct Follow {
    operation: &'static str,
    prefix: String,
    /// The watch, and the last revision that it reported.
    open: Option<(Watch, i64)>,
}

impl Follow {
    fn new(operation: &'static str, prefix: String) -> Self {
        Self {
            operation,
            prefix,
            open: None,
        }
    }

    /// Waits until something may have changed; returns at once when the watch has just begun.
    /// Cancel-safe.
    async fn next(&mut self, engine: &Inner) -> Result<()> {
        loop {
            let Some((watch, seen)) = &mut self.open else {
                let range = Range::under(&self.prefix);
                match engine.client.watch(self.operation, range).await {
                    Ok((watch, _)) => self.open = Some((watch, 0)),
                    Err(error) => {
                        tokio::time::sleep(PAUSE).await;
                        return Err(error);
                    }
                }
                continue;
            };
            match watch.changed_since(*seen).await {
                Some(revision) => {
                    *seen = revision;
                    return Ok(());
                }
                None => self.open = None,
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Hints for the keeper: what the engine itself notices, and eviction marks on our places.
pub(super) fn alarms(engine: &Arc<Inner>) -> BoxStream<Alarm> {
    let heard = kit::alarms::alarms(engine.alarms.subscribe());
    let prefix = format!("{}{}", keys::MARKS, engine.keys.scope(""));
    let marks = Follow::new("evict", prefix);
    let marked = stream::unfold(
        (Arc::clone(engine), marks),
        |(engine, mut marks)| async move {
            while marks.next(&engine).await.is_err() || !marks_ours(&engine, &marks).await {}
            Some((Alarm::All, (engine, marks)))
        },
    );
    Box::pin(stream::select(heard, marked))
}

/// Whether a place of this client is marked, or may be.
async fn marks_ours(engine: &Inner, marks: &Follow) -> bool {
    let range = RangeRequest {
        keys_only: true,
        ..txn::all(&marks.prefix)
    };
    let Ok(found) = engine.client.call("evict", range).await else {
        return true;
    };
    let mut marked = found.kvs.iter().filter_map(|kv| {
        let key = std::str::from_utf8(&kv.key).ok()?;
        keys::lease_of(key)
    });
    marked.any(|lease| {
        let is_own = || {
            let known = engine.known.lock();
            known.values().any(|known| known.lease.id == lease)
        };
        engine.leases.is_shared(lease) || is_own()
    })
}

/// Hints that a survey of `scope` may have changed.
pub(super) fn watch(engine: &Arc<Inner>, scope: &Scope) -> BoxStream<Result<()>> {
    let lines = match scope {
        Scope::Line(name) => engine.keys.line(name),
        Scope::Prefix(prefix) => Ok(engine.keys.scope(prefix)),
    };
    let lines = match lines {
        Ok(lines) => lines,
        Err(error) => return Box::pin(stream::iter([Err(error)])),
    };
    let marks = Follow::new("watch", format!("{}{lines}", keys::MARKS));
    // With `namespace=` only keys with our owner records; the rest of the store belongs to others.
    let places = match scope {
        Scope::Prefix(_) if engine.keys.shared_with_others() => {
            format!("{}{lines}", keys::OWNERS)
        }
        _ => lines,
    };
    let places = Follow::new("watch", places);
    let next = |(engine, mut places, mut marks): (Arc<Inner>, Follow, Follow)| async move {
        let told = tokio::select! {
            told = places.next(&engine) => told,
            told = marks.next(&engine) => told,
        };
        Some((told, (engine, places, marks)))
    };
    Box::pin(stream::unfold((Arc::clone(engine), places, marks), next))
}
