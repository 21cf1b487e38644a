//! `file:DIR`: the embedded engine, for the processes of one machine.
//!
//! Each line is a small file (`line_file`), changed under its own `flock` (`tx`) and never synced:
//! after a reboot lines start empty, while tokens continue above a synced ceiling (`tokens`). The
//! kernel notices the death of a holder (`liveness`), before its ttl ends. A holder that is alive
//! but does not renew (`leases`) ends by its ttl. `boot` creates and joins a store, `dir` checks
//! who may use it, `notify` wakes sleepers. Work queues (`queue`) are separate databases, synced
//! and kept across boots.

mod acquire;
#[cfg(feature = "baseline")]
mod baseline;
mod boot;
mod config;
mod dir;
mod error;
mod fence;
mod inspect;
mod keys;
mod leases;
mod line_file;
mod liveness;
mod notify;
mod presence;
mod promised;
#[cfg(feature = "queue")]
mod queue;
mod release;
mod renew;
mod renewer;
mod store;
mod tokens;
mod tx;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use self::config::{CAPABILITY, Config};
pub use self::config::{FACTORY, File, locate};
use self::dir::Dir;
pub use self::fence::FileFence;
#[doc(hidden)]
pub use self::fence::encode;
pub use self::liveness::Liveness;
use self::store::Store;
use palisade_core::engine::{
    Alarm, BoxStream, DEFAULT_TTL, EndsWith, Engine, Lease, Renewal, Settings, SharedEngine,
    Ticket, Url, no_connection,
};
use palisade_core::queue::SharedQueueStore;
use palisade_core::{Capability, Error, ErrorKind, Result};
use palisade_kit::alarms::alarms;
use palisade_kit::{absent, rooms};

/// The directory of fences, apart from the lines, which end with a boot.
const FENCES: &str = "fences";

/// Whether there is a store at `url`. Creates nothing.
///
/// # Errors
/// [`ErrorKind::Config`] for an invalid URL or directory.
pub fn exists(url: Url) -> Result<bool> {
    let path = Config::from_url(url)?.path;
    // A relative path in a directory that was removed leads nowhere.
    let path = std::path::absolute(&path).map_err(|error| error::no_current_dir(&path, error))?;
    match path.join(boot::BOOT).symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error::unusable_dir(&path, error)),
    }
}

/// Opens the store at `url`, and creates it if it does not exist.
///
/// # Errors
/// [`ErrorKind::Config`] for an unusable directory, [`ErrorKind::Unusable`] for a damaged store or
/// a full disk, [`ErrorKind::Unreachable`] when a stopped process holds the store's lock.
pub async fn open(url: Url, settings: &Settings) -> Result<SharedEngine> {
    open_with(url, settings, None).await
}

/// As [`open`], with the result of an earlier [`sign_of_life`].
///
/// # Errors
/// As [`open`].
pub async fn open_with(
    url: Url,
    settings: &Settings,
    liveness: Option<Arc<Liveness>>,
) -> Result<SharedEngine> {
    let config = Config::from_url(url)?;
    let (timeout, by_lease) = (settings.connect_timeout, config.by_lease);
    let (done, opened) = tokio::sync::oneshot::channel();
    // Opening reads, syncs and may wait for the lock, so it does not run on the caller's thread.
    std::thread::Builder::new()
        .name("palisade-open".into())
        .spawn(move || {
            let store = match liveness {
                Some(liveness) => Store::open_joined(liveness),
                None => Dir::open(&config).and_then(|dir| Store::open(dir, timeout)),
            };
            // If nobody waits any more, the store is closed again.
            let _ = done.send(store);
        })
        .map_err(|error| no_connection("no thread can be started").because(error))?;
    let store = opened
        .await
        .map_err(|_| Error::new(ErrorKind::Internal, "connect", "opening the store panicked"))??;
    Ok(Arc::new(FileEngine {
        store,
        namespace: settings.namespace.as_str().into(),
        timeout: settings.timeout,
        by_lease,
        remembered: settings.ttl.unwrap_or(DEFAULT_TTL).max(DEFAULT_TTL),
    }))
}

/// Joins the store at `url` before it is opened and before any thread exists. A child that is
/// forked afterwards keeps the holds of this process alive until both are gone. Blocks for at most
/// `settings.connect_timeout`.
///
/// # Errors
/// As [`open`].
pub fn sign_of_life(url: Url, settings: &Settings) -> Result<Liveness> {
    let dir = Dir::open(&Config::from_url(url)?)?;
    boot::join(dir, settings.connect_timeout)
}

/// The directory of fences in the store at `url`, which is created if it does not exist.
///
/// # Errors
/// [`ErrorKind::Config`] for an unusable directory.
pub fn fences(url: Url) -> Result<PathBuf> {
    let dir = Dir::open(&Config::from_url(url)?)?;
    Ok(dir.path.join(FENCES))
}

#[derive(Clone)]
struct FileEngine {
    store: Arc<Store>,
    namespace: Arc<str>,
    timeout: Duration,
    /// Whether its holds outlive the process.
    by_lease: bool,
    /// How long a claim that was left before it arrived is remembered.
    remembered: Duration,
}

impl Engine for FileEngine {
    fn capability(&self) -> Capability {
        let ends_with = if self.by_lease {
            EndsWith::Lease
        } else {
            EndsWith::Process
        };
        let mut can = CAPABILITY;
        can.ends_with = ends_with;
        can.queue = CAPABILITY.queue && !self.by_lease;
        can
    }

    fn describe(&self) -> String {
        format!("file:{}", self.store.home().dir.path.display())
    }

    rooms! { self:
        acquire { enter wait }
        release { leave amend evict resize }
        inspect { survey watch check }
        absent { audit }
    }

    async fn renew(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        renew::renew(self, leases, within).await
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        self.store.watcher.start();
        alarms(self.store.watcher.alarms())
    }

    #[cfg(feature = "queue")]
    fn queues(&self) -> Option<SharedQueueStore> {
        // A message is ready again when its consumer's process dies, which contradicts `by_lease`.
        (!self.by_lease).then(|| Arc::new(queue::FileQueues::new(self)) as _)
    }

    #[cfg(not(feature = "queue"))]
    fn queues(&self) -> Option<SharedQueueStore> {
        None
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        let file = keys::file_name(&self.namespace, ticket.name.as_str());
        let path = self.store.home().dir.path.join(boot::LINES).join(file);
        Some(path.display().to_string())
    }

    /// Shared state is released when the last engine of the directory is dropped.
    async fn close(&self) {}
}
