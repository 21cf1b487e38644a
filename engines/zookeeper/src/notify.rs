//! Hints: when the keeper should check its sessions, and when a survey may have changed. No
//! decision depends on a hint alone.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream;
use tokio::sync::mpsc;

use super::Inner;
use super::keys::is_marked;
use super::proto::{Request, code};
use super::session::Session;
use super::watches::Watched;
use palisade_core::Result;
use palisade_core::engine::{Alarm, BoxStream, ClaimId};
use palisade_core::report::Scope;
use palisade_kit as kit;

/// A place is watched for an eviction mark only after this time: one that is left sooner costs no
/// watch, and no operator is that fast.
const NEW: Duration = Duration::from_millis(50);

/// The pause before a broken watch is restarted: long enough to avoid a hot loop, short enough not
/// to matter.
const PAUSE: Duration = Duration::from_millis(200);

/// Hints for the keeper.
pub(super) fn alarms(engine: &Inner) -> BoxStream<Alarm> {
    kit::alarms::alarms(engine.client.alarms.subscribe())
}

/// Watches for an operator who marks or removes the znode of a claim, while it has one.
pub(super) async fn guard(weak: Weak<Inner>, line: String, claim: ClaimId) {
    tokio::time::sleep(NEW).await;
    let mut first = None;
    loop {
        let Some(engine) = weak.upgrade() else { return };
        let Some(known) = engine.known(&line, claim) else {
            return;
        };
        let Some(node) = known.node.filter(|_| known.session.is_usable()) else {
            return;
        };
        let path = format!("{line}/{}", node.name);
        // An amended claim has another znode, and another guard.
        if *first.get_or_insert_with(|| node.clone()) != node {
            return;
        }
        let fired = known.session.watch(&path, Watched::Node);
        let read = Request::Data(path, true);
        let timeout = engine.client.timeout;
        let Ok(answer) = known.session.ask("evict", timeout, read).await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let marked = answer.as_ref().is_ok_and(|read| is_marked(&read.data));
        let gone = matches!(&answer, Err(refused) if refused.is(code::NO_NODE));
        if marked || gone {
            engine.update(&line, claim, |known| known.evicted = marked);
            known.session.suspect();
            // An alarm for all leases, because the answer to its enter may still be in flight.
            let _ = engine.client.alarms.send(Alarm::All);
        }
        if answer.is_err() {
            return;
        }
        drop((engine, known.session));
        // Also resolves when the connection ends.
        let _ = fired.await;
    }
}

/// A watch of a subtree, restarted whenever it breaks.
struct Follow {
    path: String,
    open: Option<Open>,
}

struct Open {
    session: Arc<Session>,
    path: String,
    told: mpsc::Receiver<()>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.told.close();
        if self.session.unwatch_tree(&self.path) {
            // Best effort: without it, events arrive that nobody listens to.
            let remove = Request::RemoveWatches(self.path.clone());
            drop(self.session.send(vec![remove]));
        }
    }
}

impl Follow {
    /// Waits until something may have changed; returns at once when the watch has just begun.
    /// Cancel-safe.
    async fn next(&mut self, engine: &Inner) -> Result<()> {
        if let Some(open) = &mut self.open {
            if open.told.recv().await.is_some() {
                return Ok(());
            }
            self.open = None;
            tokio::time::sleep(PAUSE).await;
        }
        let begun = async {
            let session = engine.client.any().await?;
            let told = session.watch_tree(&self.path);
            let open = Open {
                path: self.path.clone(),
                told,
                session,
            };
            let (add, timeout) = (Request::AddWatch(self.path.clone()), engine.client.timeout);
            let added = open.session.ask("watch", timeout, add).await?;
            added.map_err(|refused| super::error::refused("watch", refused))?;
            Ok(open)
        };
        match begun.await {
            Ok(open) => {
                self.open = Some(open);
                Ok(())
            }
            Err(error) => {
                tokio::time::sleep(PAUSE).await;
                Err(error)
            }
        }
    }
}

/// Hints that a survey of `scope` may have changed.
pub(super) fn watch(engine: &Arc<Inner>, scope: &Scope) -> BoxStream<Result<()>> {
    let path = match scope {
        Scope::Line(name) => match engine.keys.line(name) {
            Ok(line) => line,
            Err(error) => return Box::pin(stream::iter([Err(error)])),
        },
        Scope::Prefix(prefix) => engine.keys.above(prefix),
    };
    let follow = Follow { path, open: None };
    let next = |(engine, mut follow): (Arc<Inner>, Follow)| async move {
        let told = follow.next(&engine).await;
        Some((told, (engine, follow)))
    };
    Box::pin(stream::unfold((Arc::clone(engine), follow), next))
}
