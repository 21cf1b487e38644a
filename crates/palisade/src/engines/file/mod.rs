//! `file:DIR`: the embedded engine, for the processes of one machine.
//!
//! Each line is a small file of its own (`line_file`), changed under its own `flock` (`tx`) and
//! never synced: after a reboot lines start empty, while tokens go on above a synced
//! ceiling (`tokens`). The death of a holder is noticed by the kernel (`liveness`), not by its
//! ttl; a holder that lives but does not renew (`leases`) ends by its ttl. `boot` makes and joins
//! a store, `dir` says who may, `notify` wakes the sleepers. Work queues (`queue`) are databases of
//! their own, synced and kept across boots.

mod acquire;
#[cfg(feature = "baseline")]
mod baseline;
mod boot;
mod config;
mod dir;
mod error;
mod inspect;
mod keys;
mod leases;
mod line_file;
mod liveness;
mod notify;
mod promised;
#[cfg(feature = "file-queue")]
mod queue;
mod release;
mod renew;
mod store;
mod tokens;
mod tx;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::config::FACTORY;
pub use self::config::File;
use self::config::{CAPABILITY, Config};
use self::dir::Dir;
pub use self::liveness::Liveness;
use self::store::Store;
use crate::core::capability::{Capability, DEFAULT_TTL, EndsWith};
use crate::core::dyn_engine::SharedEngine;
use crate::core::engine::{Alarm, BoxStream, Engine};
use crate::core::error::{Error, ErrorKind, Result, no_connection};
use crate::core::queue::SharedQueueStore;
use crate::core::ticket::Ticket;
use crate::core::url::{Settings, Url};
use crate::engines::kit::alarms::alarms;
use crate::engines::kit::{absent, rooms};

/// Where fences are kept: not among the lines, which end with a boot.
const FENCES: &str = "fences";

/// Whether there is a store where `url` says. Makes nothing.
///
/// # Errors
/// [`ErrorKind::Config`] for a URL or a directory that can't be used.
pub fn exists(url: Url) -> Result<bool> {
    let path = Config::from_url(url)?.path;
    match path.join(boot::BOOT).symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error::unusable_dir(&path, error)),
    }
}

/// Opens, and creates where it is missing, the store that `url` names.
///
/// # Errors
/// [`ErrorKind::Config`] for a directory that can't be used, [`ErrorKind::Unusable`] for a damaged store or
/// a full disk, [`ErrorKind::Unreachable`] when a process that is stopped in the store keeps it.
pub async fn open(url: Url, settings: &Settings) -> Result<SharedEngine> {
    open_with(url, settings, None).await
}

/// As [`open`], with a sign of life that was made before, by [`sign_of_life`].
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
    // Opening reads, syncs and may wait for the lock: not on the caller's thread.
    std::thread::Builder::new()
        .name("palisade-open".into())
        .spawn(move || {
            let store = match liveness {
                Some(liveness) => Store::open_joined(liveness),
                None => Dir::open(&config).and_then(|dir| Store::open(dir, timeout)),
            };
            // Nobody waits any more: the store closes again.
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

/// Joins the store that `url` names, before it is opened and before any thread exists: a child
/// that is forked afterwards keeps the holds of this process alive until both are gone. Blocks
/// for `settings.connect_timeout` at the longest.
///
/// # Errors
/// As [`open`].
pub fn sign_of_life(url: Url, settings: &Settings) -> Result<Liveness> {
    let dir = Dir::open(&Config::from_url(url)?)?;
    boot::join(dir, settings.connect_timeout)
}

/// The folder of fences in the directory of the store that `url` names, which is created if it is
/// missing.
///
/// # Errors
/// [`ErrorKind::Config`] for a directory that can't be used.
pub fn fences(url: Url) -> Result<PathBuf> {
    let dir = Dir::open(&Config::from_url(url)?)?;
    Ok(dir.path.join(FENCES))
}

#[derive(Clone)]
struct FileEngine {
    store: Arc<Store>,
    namespace: Arc<str>,
    timeout: Duration,
    /// Whether what it holds outlives the process.
    by_lease: bool,
    /// How long a claim that was left before it came is remembered.
    remembered: Duration,
}

impl Engine for FileEngine {
    fn capability(&self) -> Capability {
        let ends_with = if self.by_lease {
            EndsWith::Lease
        } else {
            EndsWith::Process
        };
        Capability {
            ends_with,
            queue: CAPABILITY.queue && !self.by_lease,
            ..CAPABILITY
        }
    }

    fn describe(&self) -> String {
        format!("file:{}", self.store.home().dir.path.display())
    }

    rooms! { self:
        acquire { enter wait }
        renew { renew }
        release { leave amend evict resize }
        inspect { survey watch check }
        absent { audit }
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        self.store.watcher.start();
        alarms(self.store.watcher.alarms())
    }

    #[cfg(feature = "file-queue")]
    fn queues(&self) -> Option<SharedQueueStore> {
        // A message is ready when its consumer's process is dead, and nobody is promised more.
        (!self.by_lease).then(|| Arc::new(queue::FileQueues::new(self)) as _)
    }

    #[cfg(not(feature = "file-queue"))]
    fn queues(&self) -> Option<SharedQueueStore> {
        None
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        let file = keys::file_name(&self.namespace, ticket.name.as_str());
        let path = self.store.home().dir.path.join(boot::LINES).join(file);
        Some(path.display().to_string())
    }

    /// What is shared is given back when the last engine of the directory is dropped.
    async fn close(&self) {}
}
