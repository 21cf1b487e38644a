//! `file:DIR`: the embedded engine, for all processes of one machine.
//!
//! Lines are kept in LMDB, without any sync on the way: after a reboot they start empty, while
//! tokens go on above a synced ceiling. The death of a holder is noticed by the kernel, not by
//! its ttl. See `tx` for what a transaction does, `store` for how operations get to one,
//! `liveness` for the dead, `watcher` for the sleepers and `layout` for what survives a boot.

#[cfg(feature = "baseline")]
mod baseline;
mod dir;
mod ear;
mod fault;
mod layout;
mod liveness;
mod lmdb;
mod marks;
mod offer;
mod pages;
mod record;
mod store;
mod tx;
mod verbs;
mod watcher;
mod worker;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;

use self::dir::Dir;
pub use self::liveness::Liveness;
pub(crate) use self::offer::OFFER;
use self::offer::{CAPABILITY, OPTIONS};
use self::store::Store;
use self::watcher::Sleeper;
use crate::core::capability::{Capability, DEFAULT_TTL};
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Eviction, Left,
    Place, Renewal, cannot_resize,
};
use crate::core::error::{Error, Kind, Result};
use crate::core::name::Name;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, Ticket};
use crate::core::url::{Settings, Url};

/// Where fences are kept: not among the lines, which end with a boot.
const FENCES: &str = "fences";

/// Whether there is a store where `url` says. Makes nothing.
///
/// # Errors
/// [`Kind::Config`] for a URL or a directory that can't be used.
pub fn exists(mut url: Url) -> Result<bool> {
    url.take_flag("allow_network_fs")?;
    url.finish(OPTIONS)?;
    let path = dir::locate(&url)?;
    match path.join("boot").symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(dir::unusable_dir(&path, error)),
    }
}

/// Opens, and creates where it is missing, the store that `url` names.
///
/// # Errors
/// [`Kind::Config`] for a directory that can't be used, [`Kind::Unusable`] for a damaged or full
/// store, [`Kind::Unreachable`] when a process that is stopped in the store keeps it.
pub async fn open(url: Url, settings: &Settings) -> Result<Arc<dyn Engine>> {
    open_with(url, settings, None).await
}

/// As [`open`], with a sign of life that was made before, by [`sign_of_life`].
///
/// # Errors
/// As [`open`].
pub async fn open_with(
    mut url: Url,
    settings: &Settings,
    liveness: Option<Arc<Liveness>>,
) -> Result<Arc<dyn Engine>> {
    let allow_network_fs = url.take_flag("allow_network_fs")?;
    url.finish(OPTIONS)?;
    let path = dir::locate(&url)?;
    let timeout = settings.connect_timeout;
    let (done, opened) = tokio::sync::oneshot::channel();
    // Opening reads, syncs and may wait for the lock: not on the caller's thread.
    std::thread::Builder::new()
        .name("palisade-open".into())
        .spawn(move || {
            let store = Dir::create(&path, allow_network_fs)
                .and_then(|dir| Store::open(dir, liveness, timeout));
            // Nobody waits any more: the store closes again.
            let _ = done.send(store);
        })
        .map_err(|error| {
            Error::new(Kind::Unreachable, "connect", "no thread can be started").because(error)
        })?;
    let store = opened
        .await
        .map_err(|_| Error::new(Kind::Internal, "connect", "opening the store panicked"))??;
    Ok(Arc::new(FileEngine {
        store,
        namespace: settings.namespace.as_str().into(),
        timeout: settings.timeout,
        remembered: settings.ttl.unwrap_or(DEFAULT_TTL).max(DEFAULT_TTL),
    }))
}

/// Makes this process's sign of life in the store that `url` names, before the store is opened
/// and before any thread exists: a child that is forked after it keeps the holds of this process
/// alive until both are gone. Blocks for `settings.connect_timeout` at the longest.
///
/// # Errors
/// As [`open`].
pub fn sign_of_life(mut url: Url, settings: &Settings) -> Result<Liveness> {
    let allow_network_fs = url.take_flag("allow_network_fs")?;
    url.finish(OPTIONS)?;
    let dir = Dir::create(&dir::locate(&url)?, allow_network_fs)?;
    let _locked = dir.lock(settings.connect_timeout)?;
    dir.sign_of_life()
}

/// The folder of fences in the directory of the store that `url` names, which is created if it is
/// missing.
///
/// # Errors
/// [`Kind::Config`] for a directory that can't be used.
pub fn fences(mut url: Url) -> Result<PathBuf> {
    let allow_network_fs = url.take_flag("allow_network_fs")?;
    url.finish(OPTIONS)?;
    let dir = Dir::create(&dir::locate(&url)?, allow_network_fs)?;
    Ok(dir.path.join(FENCES))
}

struct FileEngine {
    store: Arc<Store>,
    namespace: Arc<str>,
    timeout: Duration,
    /// How long a claim that was left before it came is remembered.
    remembered: Duration,
}

impl Engine for FileEngine {
    fn capability(&self) -> Capability {
        CAPABILITY
    }

    fn describe(&self) -> String {
        format!("file:{}", self.store.shared.dir.path.display())
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        let (store, namespace, timeout) = self.parts();
        Box::pin(async move {
            let sent = BootTime::now();
            store
                .run("enter", timeout, move |tx| {
                    verbs::enter(tx, &namespace, &claim, sent)
                })
                .await
        })
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        let (store, namespace, timeout) = self.parts();
        Box::pin(async move {
            // Before the first look, so that no hint is missed between the two.
            let sleeper = store.watcher.sleeper(ticket.claim.0);
            loop {
                let (namespace, ticket) = (Arc::clone(&namespace), ticket.clone());
                let look = move |tx: &mut tx::Tx<'_>| verbs::look(tx, &namespace, &ticket);
                let (place, sleep) = store.run("wait", timeout, look).await?;
                if place != Place::Waiting || until.has_passed() {
                    return Ok(place);
                }
                sleep_on(&sleeper, &sleep, until).await;
            }
        })
    }

    fn renew(&self, leases: Vec<Lease>, _within: Duration) -> BoxFuture<Vec<Renewal>> {
        let (store, namespace, timeout) = self.parts();
        Box::pin(async move {
            let sent = BootTime::now();
            let count = leases.len();
            let done = store
                .run("renew", timeout, move |tx| {
                    verbs::renew(tx, &namespace, &leases, sent)
                })
                .await;
            match done {
                Ok(renewals) => renewals,
                // The store, and every ticket in it, is no more.
                Err(error) if error.kind() == Kind::Unusable && store.is_deleted() => {
                    (0..count).map(|_| Renewal::Lost).collect()
                }
                Err(error) => (0..count)
                    .map(|_| Renewal::Unknown(again(&error)))
                    .collect(),
            }
        })
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        let (store, namespace, timeout) = self.parts();
        Box::pin(async move {
            store
                .run("amend", timeout, move |tx| {
                    verbs::amend(tx, &namespace, &ticket, &amendment)
                })
                .await
        })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        let (store, namespace, timeout) = self.parts();
        let remembered = self.remembered;
        Box::pin(async move {
            store
                .run("leave", timeout, move |tx| {
                    verbs::leave(tx, &namespace, &ticket, remembered)
                })
                .await
        })
    }

    fn audit(&self, _: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        self.store.watcher.start();
        let alarms = self.store.watcher.alarms();
        Box::pin(stream::unfold(alarms, |mut alarms| async move {
            alarms.recv().await.map(|alarm| (alarm, alarms))
        }))
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        let (store, namespace, timeout) = self.parts();
        Box::pin(async move {
            let survey = move |tx: &mut tx::Tx<'_>| verbs::survey(tx, &namespace, &scope);
            Ok(store.run("survey", timeout, survey).await?.0)
        })
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        let (store, namespace, timeout) = self.parts();
        let watch = Watch {
            id: rand::random(),
            store,
            namespace,
            timeout,
            scope,
            sleeper: None,
        };
        Box::pin(stream::unfold(watch, |mut watch| async move {
            let changed = watch.changed().await;
            Some((changed, watch))
        }))
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        let (store, namespace, timeout) = self.parts();
        Box::pin(async move {
            let Ok(id) = id.parse::<ClaimId>() else {
                return Ok(false);
            };
            store
                .run("evict", timeout, move |tx| {
                    verbs::evict(tx, &namespace, name.as_str(), id, eviction)
                })
                .await
        })
    }

    fn resize(&self, _name: Name, _capacity: u32) -> BoxFuture<Result<bool>> {
        cannot_resize()
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        let store = Arc::clone(&self.store);
        Box::pin(async move {
            Ok(Checkup {
                findings: dir::findings(&store.shared.dir),
                ..Checkup::default()
            })
        })
    }

    fn key(&self, _ticket: &Ticket) -> Option<String> {
        None
    }

    fn close(&self) -> BoxFuture<()> {
        // What is shared is given back when the last engine of the directory is dropped.
        Box::pin(std::future::ready(()))
    }
}

impl FileEngine {
    fn parts(&self) -> (Arc<Store>, Arc<str>, Duration) {
        (
            Arc::clone(&self.store),
            Arc::clone(&self.namespace),
            self.timeout,
        )
    }
}

/// Sleeps until a hint comes, a process that matters dies, a lease that matters ends, or `until`.
async fn sleep_on(sleeper: &Sleeper, sleep: &verbs::Sleep, until: BootTime) {
    sleeper.mind(&sleep.processes);
    let longest = until.min(sleep.earliest).remaining();
    // Timers are a millisecond coarse and may be early by the rest of it.
    let _ = tokio::time::timeout(longest, sleeper.rung()).await;
}

/// The same failure once more, for the next lease of the same request.
fn again(error: &Error) -> Error {
    let copy = Error::new(error.kind(), error.operation(), error.message());
    match error.outcome() {
        crate::core::error::Outcome::NotApplied => copy,
        crate::core::error::Outcome::MaybeApplied => copy.maybe_applied(),
    }
}

/// A watch of a scope: a record in the store, and a sleeper here.
struct Watch {
    id: u128,
    store: Arc<Store>,
    namespace: Arc<str>,
    timeout: Duration,
    scope: Scope,
    sleeper: Option<Sleeper>,
}

impl Watch {
    /// Sleeps until something in the scope may have changed.
    async fn changed(&mut self) -> Result<()> {
        if self.sleeper.is_none() {
            self.sleeper = Some(self.store.watcher.sleeper(self.id));
            let process = self.store.shared.liveness.process();
            let watch = record::write_watch(process, &self.namespace, &self.scope);
            let id = self.id;
            let added = self
                .store
                .run("watch", self.timeout, move |tx| tx.add_watch(id, &watch))
                .await;
            if let Err(error) = added {
                self.sleeper = None;
                return Err(error);
            }
            // What changed before the record was there would be missed otherwise.
            return Ok(());
        }
        let (namespace, scope) = (Arc::clone(&self.namespace), self.scope.clone());
        let survey = move |tx: &mut tx::Tx<'_>| verbs::survey(tx, &namespace, &scope);
        let (_, sleep) = self.store.run("watch", self.timeout, survey).await?;
        if let Some(sleeper) = &self.sleeper {
            sleep_on(sleeper, &sleep, BootTime::NEVER).await;
        }
        Ok(())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.sleeper.is_some() {
            let id = self.id;
            self.store
                .run_detached("watch", move |tx| tx.remove_watch(id));
        }
    }
}
