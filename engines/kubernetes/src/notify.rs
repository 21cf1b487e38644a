//! Watches: for waiters, for the keeper's alarms, and for surveys.
//!
//! A watch is only a hint: it may lag, fall silent or end at any time. Any end of it (also 410,
//! which comes as an event) only means that another is started.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use serde::Deserialize;
use tokio::time::timeout;

use super::Kubernetes;
use super::client::encoded;
use super::lease::{EVICT, Lease};
use super::lines::Line;
use palisade_core::engine::{Alarm, BoxStream};
use palisade_core::report::Scope;
use palisade_core::{ErrorKind, Result};
use palisade_kit as kit;
use palisade_kit::replies::REPLY;

/// The duration of one watch; the next one proves that the server is still there.
const LASTS: Duration = Duration::from_secs(300);

/// A watch without any event, not even a bookmark, is dropped after this. The server sends a
/// bookmark every minute.
const SILENCE: Duration = Duration::from_secs(100);

/// The pause before a watch is restarted, and the pause without the right to watch.
const PAUSE: Duration = Duration::from_millis(250);
const DENIED: Duration = Duration::from_secs(5);

/// How long a waiters' watch outlives the last waiter, because the next one may come soon.
const LINGER: Duration = Duration::from_secs(2);

/// How often a client without the right to watch is told to poll.
const POLL: Duration = Duration::from_secs(1);

/// A change of a Lease.
struct Event {
    lease: Lease,
    deleted: bool,
}

/// A stream of events.
struct Watch {
    response: reqwest::Response,
    buffer: Vec<u8>,
    /// How much of the buffer has no end of a line.
    searched: usize,
}

impl Watch {
    async fn begin(engine: &Kubernetes, selector: &str) -> Result<Self> {
        let response = engine.client.watch(selector, LASTS).await?;
        Ok(Self {
            response,
            buffer: Vec::new(),
            searched: 0,
        })
    }

    /// The next change; `None` when the watch has ended for any reason.
    async fn next(&mut self) -> Option<Event> {
        #[derive(Deserialize)]
        struct Line {
            r#type: String,
            object: serde_json::Value,
        }
        loop {
            // What has no end yet was searched before.
            let unsearched = &self.buffer[self.searched..];
            if let Some(end) = unsearched.iter().position(|byte| *byte == b'\n') {
                let end = self.searched + end;
                self.searched = 0;
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let line: Line = serde_json::from_slice(&line).ok()?;
                let deleted = match line.r#type.as_str() {
                    "ADDED" | "MODIFIED" => false,
                    "DELETED" => true,
                    "BOOKMARK" => continue,
                    // 410, or an unknown type: start again.
                    _ => return None,
                };
                let lease = serde_json::from_value(line.object).ok()?;
                return Some(Event { lease, deleted });
            }
            self.searched = self.buffer.len();
            let chunk = timeout(SILENCE, self.response.chunk()).await.ok()?.ok()??;
            if self.buffer.len() + chunk.len() > REPLY {
                return None;
            }
            self.buffer.extend_from_slice(&chunk);
        }
    }
}

fn one(key: &str) -> String {
    format!("&fieldSelector=metadata.name%3D{key}")
}

/// Watches a line for its waiters, if no task does yet. The task ends after the last waiter.
pub(super) fn listen(engine: &Arc<Kubernetes>, line: &Arc<Line>) {
    if line.watched.swap(true, Ordering::AcqRel) {
        return;
    }
    /// However the task ends, also with its runtime, another may start.
    struct Watched(Arc<Line>);
    impl Drop for Watched {
        fn drop(&mut self) {
            self.0.watched.store(false, Ordering::Release);
        }
    }
    let watched = Watched(Arc::clone(line));
    let engine = Arc::downgrade(engine);
    tokio::spawn(async move {
        let line = &watched.0;
        let selector = one(&line.key);
        let wanted = || line.waiters.load(Ordering::Relaxed) > 0;
        let mut idle = false;
        while let Some(engine) = engine.upgrade() {
            let begun = Watch::begin(&engine, &selector).await;
            drop(engine);
            match begun {
                Ok(mut watch) => loop {
                    match timeout(LINGER, watch.next()).await {
                        Ok(Some(event)) => line.heard(event.lease, event.deleted),
                        Ok(None) => break,
                        Err(_) if wanted() => {}
                        Err(_) => return,
                    }
                },
                // Waiters poll by themselves.
                Err(error) if error.kind() == ErrorKind::Denied => {
                    tokio::time::sleep(DENIED).await;
                }
                Err(_) => {}
            }
            if !wanted() && std::mem::replace(&mut idle, true) {
                return;
            }
            idle &= !wanted();
            tokio::time::sleep(PAUSE).await;
        }
    });
}

/// The alarms of this client, and one for all leases when an operator evicts a holder.
pub(super) fn alarms(engine: &Arc<Kubernetes>) -> BoxStream<Alarm> {
    let own = kit::alarms::alarms(engine.alarms.subscribe());
    let selector = format!("&labelSelector={}", encoded(EVICT));
    let marks = changes(engine, selector, |event| {
        // The first events show what is already marked.
        event.is_some_and(|event| !event.deleted).then_some(())
    });
    let marks = marks.filter_map(|change| async { change.ok().map(|()| Alarm::All) });
    stream::select(own, marks.boxed()).boxed()
}

pub(super) fn watch(engine: &Arc<Kubernetes>, scope: &Scope) -> BoxStream<Result<()>> {
    let selector = match scope {
        Scope::Prefix(_) => String::new(),
        Scope::Line(name) => match engine.keys.lease(name) {
            Ok(key) => one(&key),
            Err(error) => return stream::iter([Err(error)]).boxed(),
        },
    };
    let (keys, scope) = (engine.keys.clone(), scope.clone());
    // A survey does not show renewals.
    let mut last: HashMap<String, String> = HashMap::new();
    changes(engine, selector, move |event| {
        let Some(Event { lease, deleted }) = event else {
            last.clear();
            return Some(());
        };
        let key = lease.metadata.name.clone();
        let name = keys.name(&key, lease.name())?;
        if !scope.includes(&name) {
            return None;
        }
        if deleted {
            return last.remove(&key).map(drop);
        }
        let shown = shown(&lease);
        (last.insert(key, shown.clone()) != Some(shown)).then_some(())
    })
}

/// What a survey would show of a Lease, without times.
fn shown(lease: &Lease) -> String {
    let view = lease.view();
    let holders = view.holders.iter().map(|holder| {
        let entry = holder.entry.as_ref();
        let said = entry.map(|entry| (entry.evicted, entry.token, entry.value.clone()));
        format!("{} {said:?}", holder.id)
    });
    let holders: Vec<String> = holders.collect();
    format!("{:?} {holders:?}", view.capacity)
}

/// A hint for each event that `pick` accepts. `pick` gets `None` when a watch starts, because
/// earlier changes were missed.
fn changes(
    engine: &Arc<Kubernetes>,
    selector: String,
    pick: impl FnMut(Option<Event>) -> Option<()> + Send + 'static,
) -> BoxStream<Result<()>> {
    let state = (Arc::clone(engine), selector, pick, None::<Watch>, false);
    stream::unfold(
        state,
        |(engine, selector, mut pick, mut watch, mut paused)| async move {
            let hint = loop {
                let Some(open) = &mut watch else {
                    if std::mem::replace(&mut paused, true) {
                        tokio::time::sleep(PAUSE).await;
                    }
                    match Watch::begin(&engine, &selector).await {
                        Ok(begun) => watch = Some(begun),
                        Err(error) if error.kind() == ErrorKind::Denied => {
                            tokio::time::sleep(POLL).await;
                        }
                        Err(error) => break Err(error),
                    }
                    if pick(None).is_some() {
                        break Ok(());
                    }
                    continue;
                };
                match open.next().await {
                    None => watch = None,
                    Some(event) => {
                        if pick(Some(event)).is_some() {
                            break Ok(());
                        }
                    }
                }
            };
            Some((hint, (engine, selector, pick, watch, paused)))
        },
    )
    .boxed()
}
