//! `Store`: one directory, opened once per process, and how operations get into it.
//!
//! An operation runs in a transaction under the writer lock: an in-process mutex and the `flock`
//! of all processes. A transaction takes microseconds, so that it is run on the spot, in the
//! first poll of its future, after a short spin. Only when the lock stays taken is it handed to
//! the store's own thread, which may block; see `worker`.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock, OnceLock, Weak, mpsc};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, getpid};

use super::dir::{Dir, LINES};
use super::fault::Fault;
use super::layout;
use super::liveness::{self, Liveness, Peer};
use super::lmdb::{Data, FILE};
use super::tx::{Hints, Tx};
use super::watcher::Watcher;
use super::worker::Job;
use crate::core::clock::BootTime;
use crate::core::error::{Error, Kind, Result};

/// Some transactions of others: longer would only burn what the holder needs to run.
const SPIN: Duration = Duration::from_micros(40);

/// What does not change while the store is open.
pub(super) struct Shared {
    pub(super) dir: Dir,
    pub(super) liveness: Arc<Liveness>,
}

/// The writer lock and what it guards.
pub(super) struct Gate {
    state: Mutex<State>,
    file: OwnedFd,
}

/// What the writer lock guards in this process.
pub(super) struct State {
    data: Option<Data>,
}

/// The writer lock, held by this process.
pub(super) struct Held<'a> {
    gate: &'a Gate,
    state: MutexGuard<'a, State>,
}

/// See the module's text.
pub(super) struct Store {
    pub(super) shared: Arc<Shared>,
    pub(super) gate: Arc<Gate>,
    pub(super) watcher: Watcher,
    pub(super) worker: OnceLock<mpsc::Sender<Job>>,
    pid: Pid,
}

/// The stores of this process by the identity of their directory.
static STORES: LazyLock<Mutex<HashMap<(u64, u64), Slot>>> = LazyLock::new(Mutex::default);

/// Locked while its directory is being opened.
type Slot = Arc<Mutex<Weak<Store>>>;

impl Store {
    /// The store in `dir`: the one that this process has open, or a newly opened one. Blocks for
    /// about `timeout` at the longest.
    pub(super) fn open(
        dir: Dir,
        liveness: Option<Arc<Liveness>>,
        timeout: Duration,
    ) -> Result<Arc<Self>> {
        let slot = {
            let mut stores = STORES.lock();
            // Forgets stores that are closed and that nobody is opening.
            stores.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.lock().strong_count() > 0);
            Arc::clone(stores.entry(dir.identity).or_default())
        };
        let deadline = BootTime::now() + timeout;
        let mut slot = slot.lock();
        if let Some(open) = slot.upgrade()
            && open.pid == getpid()
        {
            return Ok(open);
        }
        let store = Self::open_anew(dir, liveness, deadline)?;
        *slot = Arc::downgrade(&store);
        Ok(store)
    }

    fn open_anew(
        dir: Dir,
        liveness: Option<Arc<Liveness>>,
        deadline: BootTime,
    ) -> Result<Arc<Self>> {
        let file = dir.lock(deadline.remaining())?;
        let alive = dir.sweep(liveness.as_deref())?;
        layout::prepare(&dir, &file, alive)?;
        let liveness = match liveness {
            Some(liveness) => liveness,
            None => Arc::new(dir.sign_of_life()?),
        };
        let lines = dir.path.join(LINES);
        let data = loop {
            match Data::open(&lines).map_err(Fault::from) {
                // The last engine of this process is closing just now.
                Err(Fault::Lmdb(heed::Error::EnvAlreadyOpened)) if !deadline.has_passed() => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                done => break done.map_err(|fault| fault.into_error("connect"))?,
            }
        };
        let shared = Arc::new(Shared { dir, liveness });
        let mut state = State { data: Some(data) };
        // The first transaction proves that the store can be read and written.
        perform(&mut state, &shared, "connect", &mut |_| Ok(()))?;
        // Unlocking an open file of ours can't fail.
        let _ = rustix::fs::flock(&file, FlockOperation::Unlock);
        Ok(Arc::new(Self {
            watcher: Watcher::new(Arc::clone(&shared)),
            shared,
            gate: Arc::new(Gate {
                state: Mutex::new(state),
                file,
            }),
            worker: OnceLock::new(),
            pid: getpid(),
        }))
    }

    /// Runs an operation in a transaction of its own and sends its hints.
    ///
    /// # Cancellation
    /// Dropped before the operation began, it never begins.
    ///
    /// # Errors
    /// [`Kind::Unreachable`] when the writer lock can't be had within `timeout`; nothing was
    /// changed then. `op` may run more than once; only the last time is committed.
    pub(super) async fn run<T, F>(
        self: &Arc<Self>,
        operation: &'static str,
        timeout: Duration,
        mut op: F,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: FnMut(&mut Tx<'_>) -> std::result::Result<T, Fault> + Send + 'static,
    {
        self.check_process(operation)?;
        match self.run_now(operation, &mut op) {
            Some(done) => done,
            None => self.run_later(operation, timeout, op).await,
        }
    }

    /// Runs an operation on the spot, if the writer lock can be had.
    fn run_now<T>(
        &self,
        operation: &'static str,
        op: &mut dyn FnMut(&mut Tx<'_>) -> std::result::Result<T, Fault>,
    ) -> Option<Result<T>> {
        let mut held = match self.gate.try_enter(operation) {
            Ok(held) => held?,
            Err(error) => return Some(Err(error)),
        };
        let done = held.perform(&self.shared, operation, op);
        drop(held);
        Some(done.map(|(answer, hints)| {
            self.deliver(hints);
            answer
        }))
    }

    /// A store can't be used in a forked child: the child would share locks with its parent.
    fn check_process(&self, operation: &'static str) -> Result<()> {
        if getpid() == self.pid {
            return Ok(());
        }
        Err(Error::new(
            Kind::Config,
            operation,
            "the store was opened before a fork; connect again in the child",
        ))
    }

    /// Whether the data file, or the directory with it, was deleted.
    pub(super) fn is_deleted(&self) -> bool {
        !self.shared.dir.path.join(LINES).join(FILE).exists()
    }

    /// Sends hints to whom they concern. Not under the writer lock: whoever is woken wants it.
    pub(super) fn deliver(&self, hints: Hints) {
        let Hints { list, mut ends } = hints;
        for (process, hint) in list {
            if process == self.shared.liveness.process() {
                self.watcher.hand(hint);
                continue;
            }
            let known = ends.iter().position(|(known, _)| *known == process);
            let at = known.unwrap_or_else(|| {
                let end = match liveness::open_to_wake(self.shared.liveness.procs(), process) {
                    Peer::Alive(end) => Some(end),
                    Peer::Dead | Peer::Unknown => None,
                };
                ends.push((process, end));
                ends.len() - 1
            });
            if let Some(end) = &ends[at].1 {
                liveness::send(end, hint);
            }
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if getpid() == self.pid {
            self.watcher.stop();
        }
    }
}

impl Gate {
    /// Takes the writer lock if it can be had at once, or nearly so.
    fn try_enter(&self, operation: &'static str) -> Result<Option<Held<'_>>> {
        let mut spinning_since: Option<Instant> = None;
        loop {
            if let Some(state) = self.state.try_lock() {
                match rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
                    Ok(()) => return Ok(Some(Held { gate: self, state })),
                    Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                    Err(errno) => return Err(lock_failed(operation, errno)),
                }
            }
            let since = *spinning_since.get_or_insert_with(Instant::now);
            if since.elapsed() > SPIN {
                return Ok(None);
            }
            std::hint::spin_loop();
        }
    }

    /// Takes the writer lock however long it takes.
    pub(super) fn enter(&self) -> Result<Held<'_>> {
        let state = self.state.lock();
        loop {
            match rustix::fs::flock(&self.file, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(Held { gate: self, state }),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(lock_failed("lock", errno)),
            }
        }
    }
}

fn lock_failed(operation: &'static str, errno: Errno) -> Error {
    Error::new(Kind::Unreachable, operation, "the store can't be locked").because(errno)
}

impl Held<'_> {
    /// Runs an operation in a transaction.
    pub(super) fn perform<T>(
        &mut self,
        shared: &Shared,
        operation: &'static str,
        op: &mut dyn FnMut(&mut Tx<'_>) -> std::result::Result<T, Fault>,
    ) -> Result<(T, Hints)> {
        perform(&mut self.state, shared, operation, op)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Unlocking an open file of ours can't fail. The mutex is let go of after it.
        let _ = rustix::fs::flock(&self.gate.file, FlockOperation::Unlock);
    }
}

/// Runs an operation in a transaction, again when the map had to grow.
fn perform<T>(
    state: &mut State,
    shared: &Shared,
    operation: &'static str,
    op: &mut dyn FnMut(&mut Tx<'_>) -> std::result::Result<T, Fault>,
) -> Result<(T, Hints)> {
    let mut attempt = |data: &mut Data| {
        let mut tx = Tx::begin(data, shared)?;
        let answer = op(&mut tx)?;
        Ok::<_, Fault>((answer, tx.commit()?))
    };
    // A map that has doubled this often is beyond any address space.
    for _ in 0..48 {
        let data = match &mut state.data {
            Some(data) => data,
            closed => {
                let opened = Data::open(&shared.dir.path.join(LINES)).map_err(Fault::from);
                closed.insert(opened.map_err(|fault| fault.into_error(operation))?)
            }
        };
        match attempt(data) {
            Err(fault) if fault.wants_room() => {
                data.grow()
                    .map_err(|error| Fault::from(error).into_error(operation))?;
            }
            Err(fault) => {
                if fault.wants_reopening() {
                    state.data = None;
                }
                return Err(fault.into_error(operation));
            }
            Ok(done) => return Ok(done),
        }
    }
    Err(Fault::Full.into_error(operation))
}
