//! `Store`: one directory, opened once per process and shared by all its engines.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Pid, getpid};

use super::boot::{self, Home};
use super::dir::{Dir, Identity, names};
use super::error::{moved, unusable_dir};
use super::leases::Leases;
use super::line_file::{LineFile, Lock, OpenFiles, UNFINISHED};
use super::liveness::Liveness;
use super::notify::Watcher;
use super::renewer::Renewer;
use super::tx::{Suspects, Tx};
use palisade_core::Result;
use palisade_kit::tombstones::Tombstones;

/// The maximum number of lines to check when a store is opened, which takes some milliseconds.
const SWEPT: usize = 200;

/// How often to look whether anyone relies on a promise: not after each claim, since the next
/// promise is synced.
const LOWERED: Duration = Duration::from_secs(1);

/// See the module documentation.
pub(super) struct Store {
    pub(super) liveness: Arc<Liveness>,
    pub(super) leases: Leases,
    pub(super) watcher: Watcher,
    pub(super) renewer: Renewer,
    /// Claims that were left before they arrived, and until when each is remembered. Only this
    /// process can still have their enter in flight.
    pub(super) left: Mutex<Tombstones>,
    pub(super) files: OpenFiles,
    /// The number of messages that this process has claimed.
    pub(super) messages: AtomicI64,
    /// The process that opened it: a forked child would share locks with its parent.
    pub(super) pid: Pid,
}

/// The open stores of this process, by the identity of their directory.
static STORES: LazyLock<Mutex<HashMap<Identity, Slot>>> = LazyLock::new(Mutex::default);

/// Locked while its directory is being opened.
type Slot = Arc<Mutex<Weak<Store>>>;

impl Store {
    /// The store in `dir`: the one that this process has open, or a newly opened one. Blocks for at
    /// most about `timeout`.
    pub(super) fn open(dir: Dir, timeout: Duration) -> Result<Arc<Self>> {
        Self::in_slot(dir.identity, || boot::join(dir, timeout).map(Arc::new))
    }

    /// The store that `liveness` belongs to.
    pub(super) fn open_joined(liveness: Arc<Liveness>) -> Result<Arc<Self>> {
        let dir = &liveness.home.dir;
        match dir.is_in_place() {
            Ok(true) => {}
            Ok(false) => return Err(moved("connect", &dir.path)),
            Err(errno) => return Err(unusable_dir(&dir.path, errno)),
        }
        Self::in_slot(dir.identity, || Ok(liveness))
    }

    fn in_slot(
        identity: Identity,
        join: impl FnOnce() -> Result<Arc<Liveness>>,
    ) -> Result<Arc<Self>> {
        let slot = {
            let mut stores = STORES.lock();
            // Forget stores that are closed and that nobody is opening.
            stores.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.lock().strong_count() > 0);
            Arc::clone(stores.entry(identity).or_default())
        };
        let mut slot = slot.lock();
        if let Some(open) = slot.upgrade()
            && open.pid == getpid()
        {
            return Ok(open);
        }
        let liveness = join()?;
        let store = Arc::new(Self {
            leases: Leases::new(Arc::clone(&liveness)),
            watcher: Watcher::new(Arc::clone(&liveness)),
            renewer: Renewer::default(),
            liveness,
            left: Mutex::default(),
            files: OpenFiles::default(),
            messages: AtomicI64::new(0),
            pid: getpid(),
        });
        *slot = Arc::downgrade(&store);
        if store.liveness.alone {
            store.sweep();
        }
        Ok(store)
    }

    /// Removes claims of killed processes from lines that nobody has used since.
    fn sweep(&self) {
        let home = self.home();
        let names = names(&home.lines).unwrap_or_default().into_iter();
        // A process that has joined meanwhile may be about to complete one.
        let whole = names.filter(|name| !name.starts_with(UNFINISHED));
        for name in whole.take(SWEPT) {
            let Ok(Some(file)) = LineFile::open(home, &name) else {
                continue;
            };
            let file = Arc::new(file);
            // An unreadable line is left to whoever uses it next.
            if let Ok(Lock::Had(state)) = file.lock("connect") {
                let mut tx = Tx::new(self, "connect", Some(Arc::clone(&file)), state);
                let settled = tx.settle(Suspects::Everyone);
                let _ = settled.and_then(|()| tx.commit(None));
            }
            file.remove_if_idle(home);
        }
    }

    /// Takes back what this process has promised once nobody relies on it.
    pub(super) fn lower_in_time(self: &Arc<Self>) {
        let store = Arc::downgrade(self);
        self.renewer.later(LOWERED, move || {
            let store = store.upgrade()?;
            let lowered = store.home().promised.lower(store.home(), store.process());
            (!lowered).then_some(LOWERED)
        });
    }

    pub(super) fn home(&self) -> &Home {
        &self.liveness.home
    }

    /// The id of this process in its seats.
    pub(super) fn process(&self) -> u64 {
        self.liveness.process
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if getpid() != self.pid {
            return;
        }
        self.watcher.stop();
        self.files.close(self.home(), 0);
        if !self.leases.is_empty() || self.messages.load(Ordering::Acquire) > 0 {
            self.liveness.stay();
        }
    }
}
