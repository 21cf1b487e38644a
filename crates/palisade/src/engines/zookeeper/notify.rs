//! Hints: when the keeper should check its sessions, and when a survey may have changed. No
//! decision depends on a hint alone.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use tokio::sync::mpsc;

use super::Inner;
use super::keys::is_marked;
use super::proto::{Request, code};
use super::session::Session;
use super::watches::Watched;
use crate::core::claim::ClaimId;
use crate::core::engine::{Alarm, BoxStream};
use crate::core::error::Result;
use crate::core::report::Scope;
use crate::engines::kit;

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
pub(super) fn guard(engine: &Arc<Inner>, claim: ClaimId) {
    let weak = Arc::downgrade(engine);
    engine.client.thread.spawn(async move {
        tokio::time::sleep(NEW).await;
        let mut first = None;
        loop {
            let Some(engine) = weak.upgrade() else { return };
            let Some(known) = engine.known(claim) else {
                return;
            };
            let Some(node) = known.node.as_ref().filter(|_| known.session.is_usable()) else {
                return;
            };
            // An amended claim has another znode, and another guard.
            if first.get_or_insert_with(|| node.clone()) != node {
                return;
            }
            let path = format!("{}/{}", known.line, node.name);
            let fired = known.session.watch(&path, Watched::Node);
            let read = vec![Request::data(&path, true)];
            let answers = engine.client.call(&known.session, "evict", read).await;
            let answer = answers.ok().and_then(|mut answers| answers.pop());
            let Some(answer) = answer else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let marked = answer.data().is_ok_and(|(data, _)| is_marked(&data));
            let gone = answer.error == code::NO_NODE;
            if marked || gone {
                engine.update(claim, |known| known.evicted = marked);
                // An alarm for all leases, because the answer to its enter may still be in flight.
                let _ = engine.client.alarms.send(Alarm::All);
            }
            if answer.error != 0 {
                return;
            }
            drop((engine, known));
            // Also resolves when the connection ends.
            let _ = fired.await;
        }
    });
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
            let session = Arc::clone(&self.session);
            let remove = Request::remove_watches(&self.path);
            // Best effort: without it, events arrive that nobody listens to.
            if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                runtime.spawn(async move { session.call(vec![remove]).await.map(drop) });
            }
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
            let add = vec![Request::add_watch(&self.path)];
            let answers = engine.client.call(&open.session, "watch", add).await?;
            for answer in answers {
                let done = answer.done();
                done.map_err(|refused| super::error::refused("watch", refused))?;
            }
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
