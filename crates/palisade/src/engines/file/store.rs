//! `Store`: one directory, opened once per process, and how changes get into its lines.
//!
//! A change runs under the lock of its line: an in-process mutex and the `flock` of all processes.
//! It takes microseconds, so that it is run on the spot, in the first poll of its future, after a
//! short spin. Where the lock stays taken, it is tried again until the timeout: a process that is
//! stopped inside a change makes others fail on that one name, and never hang.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, getpid, getrlimit};

use super::boot::{self, Home};
use super::dir::{Dir, Identity};
use super::error::{busy, damaged, file_failed, moved};
use super::keys;
use super::leases::Leases;
use super::line_file::{LineFile, State, is_unfinished};
use super::liveness::{self, Liveness, Peer};
use super::notify::Watcher;
use super::tx::{Hints, Tx};
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::name::Name;

/// Some changes of others: longer would only burn what the holder needs to run.
const SPIN: Duration = Duration::from_micros(40);
/// How long to sleep where spinning did not help.
const PAUSE: Duration = Duration::from_millis(1);
/// How many lines are looked at when a store is opened, at the most: some milliseconds.
const SWEPT: usize = 200;
/// How many files are kept open, at the most.
const OPEN_FILES: usize = 256;

/// See the module's text.
pub(super) struct Store {
    pub(super) liveness: Arc<Liveness>,
    pub(super) leases: Leases,
    pub(super) watcher: Watcher,
    /// Claims that were left before they came, and until when that is remembered. Only this
    /// process can still have an enter of them under way.
    left: Mutex<HashMap<ClaimId, BootTime>>,
    files: Mutex<Files>,
    pid: Pid,
}

/// The files that are open.
#[derive(Default)]
struct Files {
    open: HashMap<Arc<str>, (Arc<LineFile>, u64)>,
    /// Counts the uses.
    clock: u64,
}

/// A line by its namespace and name.
#[derive(Debug, Clone)]
pub(super) struct LineName {
    pub(super) namespace: Arc<str>,
    pub(super) name: Name,
}

/// What is done to a line; there is no file where an empty line has none.
pub(super) type Change<'a, T> =
    &'a mut (dyn FnMut(&mut Tx<'_>, Option<&LineFile>) -> Result<T> + Send);

/// What became of a try.
pub(super) enum Tried<T> {
    Done(T),
    /// The line's lock can't be had now.
    Locked,
    /// The file is not the one with its name any more.
    Gone,
}

/// What to do about a line that has no file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    Make,
    IsEmpty,
}

/// The stores of this process by the identity of their directory.
static STORES: LazyLock<Mutex<HashMap<Identity, Slot>>> = LazyLock::new(Mutex::default);

/// Locked while its directory is being opened.
type Slot = Arc<Mutex<Weak<Store>>>;

impl Store {
    /// The store in `dir`: the one that this process has open, or a newly opened one. Blocks for
    /// about `timeout` at the longest.
    pub(super) fn open(dir: Dir, timeout: Duration) -> Result<Arc<Self>> {
        Self::in_slot(dir.identity, || boot::join(dir, timeout).map(Arc::new))
    }

    /// The store that `liveness` was made in.
    pub(super) fn open_joined(liveness: Arc<Liveness>) -> Result<Arc<Self>> {
        let dir = &liveness.home.dir;
        if !dir.is_in_place() {
            return Err(moved("connect", &dir.path));
        }
        Self::in_slot(dir.identity, || Ok(liveness))
    }

    fn in_slot(
        identity: Identity,
        join: impl FnOnce() -> Result<Arc<Liveness>>,
    ) -> Result<Arc<Self>> {
        let slot = {
            let mut stores = STORES.lock();
            // Forgets stores that are closed and that nobody is opening.
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
            liveness,
            left: Mutex::default(),
            files: Mutex::default(),
            pid: getpid(),
        });
        *slot = Arc::downgrade(&store);
        if store.liveness.alone {
            store.sweep();
        }
        Ok(store)
    }

    /// Removes what processes that were killed have left in lines that nobody has asked for since.
    fn sweep(&self) {
        let home = self.home();
        let names = super::dir::names(&home.lines).unwrap_or_default();
        // Somebody who has come meanwhile may be about to finish one.
        let whole = names.into_iter().filter(|name| !is_unfinished(name));
        for name in whole.take(SWEPT) {
            if let Ok(Some(file)) = LineFile::open(home, &name.into()) {
                // One that can't be read is left to whoever asks for it.
                let settle = &mut |tx: &mut Tx<'_>, _: Option<&LineFile>| tx.settle_all();
                let _ = self.try_change_file("connect", &file, None, settle);
                self.remove_idle(&file);
            }
        }
    }

    pub(super) fn home(&self) -> &Home {
        &self.liveness.home
    }

    /// What tickets of this process carry.
    pub(super) fn process(&self) -> u64 {
        self.liveness.process()
    }

    /// A store can't be used in a forked child: the child would share locks with its parent.
    pub(super) fn check_process(&self, operation: &'static str) -> Result<()> {
        if getpid() == self.pid {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Config,
            operation,
            "the store was opened before a fork; connect again in the child",
        ))
    }

    /// Changes a line, on behalf of the claim `me`, and sends hints to whom it concerns. `change`
    /// is run once.
    ///
    /// # Cancellation
    /// Dropped before the change began, it never begins.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] when the line's lock can't be had within `timeout`; nothing was
    /// changed then.
    pub(super) async fn change<T>(
        &self,
        operation: &'static str,
        timeout: Duration,
        (line, missing): (&LineName, Missing),
        me: Option<ClaimId>,
        mut change: impl FnMut(&mut Tx<'_>, Option<&LineFile>) -> Result<T> + Send,
    ) -> Result<T> {
        self.check_process(operation)?;
        let file: Arc<str> = keys::file_name(&line.namespace, line.name.as_str()).into();
        let deadline = BootTime::now() + timeout;
        loop {
            let done = self.try_change(operation, &file, (line, missing), me, &mut change);
            if let Some(done) = done.transpose() {
                return done;
            }
            if deadline.has_passed() {
                let path = self.home().dir.path.join(boot::LINES).join(&*file);
                return Err(busy(operation, timeout, &path));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Changes a line on the spot; `None` when its lock can't be had.
    fn try_change<T>(
        &self,
        operation: &'static str,
        file: &Arc<str>,
        (line, missing): (&LineName, Missing),
        me: Option<ClaimId>,
        change: Change<'_, T>,
    ) -> Result<Option<T>> {
        let Some(file) = self.file(operation, file, line, missing)? else {
            let mut state = State::empty(&line.namespace, line.name.as_str());
            return change(&mut Tx::begin(self, operation, &mut state), None).map(Some);
        };
        let mut checked = |tx: &mut Tx<'_>, file: Option<&LineFile>| {
            let told = (tx.state.namespace.as_str(), tx.state.name.as_str());
            match file {
                Some(file) if told != (&*line.namespace, line.name.as_str()) => {
                    Err(damaged(operation, &file.path))
                }
                file => change(tx, file),
            }
        };
        match self.try_change_file(operation, &file, me, &mut checked)? {
            Tried::Done(answer) => Ok(Some(answer)),
            Tried::Locked => Ok(None),
            Tried::Gone => self.file_has_gone(operation, &file).map(|()| None),
        }
    }

    /// Changes the line in an open file on the spot.
    pub(super) fn try_change_file<T>(
        &self,
        operation: &'static str,
        file: &LineFile,
        me: Option<ClaimId>,
        change: Change<'_, T>,
    ) -> Result<Tried<T>> {
        let Some(mut locked) = Locked::take(operation, file)? else {
            return Ok(Tried::Locked);
        };
        file.load(operation, &mut locked.state)?;
        // The last one may leave wherever it is: nobody is granted after it.
        let last_leaves = operation == "leave" && locked.state.line.seats.len() == 1;
        if !last_leaves && !file.is_in_place() {
            return Ok(Tried::Gone);
        }
        let mut tx = Tx::begin(self, operation, &mut locked.state);
        let done = change(&mut tx, Some(file)).and_then(|answer| {
            let hints = tx.commit(file, me)?;
            Ok((answer, hints))
        });
        if done.is_err() {
            locked.state.forget();
        }
        drop(locked);
        let (answer, hints) = done?;
        self.deliver(hints);
        Ok(Tried::Done(answer))
    }

    /// What to do when a file that is open is not the one with its name any more: look again, if
    /// it was removed because nobody was in the line.
    fn file_has_gone(&self, operation: &'static str, file: &LineFile) -> Result<()> {
        self.files.lock().open.remove(&file.name);
        match self.home().lines_are_in_place() {
            true => Ok(()),
            false => Err(moved(operation, &self.home().dir.path)),
        }
    }

    /// The file of a line, open.
    fn file(
        &self,
        operation: &'static str,
        name: &Arc<str>,
        line: &LineName,
        missing: Missing,
    ) -> Result<Option<Arc<LineFile>>> {
        {
            let mut files = self.files.lock();
            files.clock += 1;
            let now = files.clock;
            if let Some((file, used)) = files.open.get_mut(name) {
                *used = now;
                return Ok(Some(Arc::clone(file)));
            }
        }
        let home = self.home();
        // Another may make or remove it at the same moment; nobody is that quick many times.
        let open = || {
            for _ in 0..100 {
                let opened = LineFile::open(home, name)?;
                if opened.is_some() || missing == Missing::IsEmpty {
                    return Ok(opened);
                }
                let state = State::empty(&line.namespace, line.name.as_str());
                LineFile::create(home, name, state)?;
            }
            Err(Errno::BUSY)
        };
        let opened = match open() {
            Err(Errno::MFILE | Errno::NFILE) => {
                self.close_files(0);
                open()
            }
            done => done,
        };
        let file = match opened {
            Ok(Some(file)) => Arc::new(file),
            Ok(None) if missing == Missing::IsEmpty => return Ok(None),
            // There is no folder to make it in.
            Ok(None) | Err(Errno::NOENT) => return Err(moved(operation, &home.dir.path)),
            Err(errno) => {
                let path = home.dir.path.join(boot::LINES).join(&**name);
                return Err(file_failed(operation, &path, errno));
            }
        };
        let (file, full) = {
            let mut files = self.files.lock();
            let now = files.clock;
            // Another caller may have been quicker: everyone here takes the same one.
            let kept = files.open.entry(Arc::clone(name)).or_insert((file, now));
            (Arc::clone(&kept.0), files.open.len() > most_files())
        };
        if full {
            self.close_files(most_files() / 2);
        }
        Ok(Some(file))
    }

    /// Closes the files that were not used for longest, down to `keep`, and removes those of
    /// lines that nobody is in.
    fn close_files(&self, keep: usize) {
        let mut files = self.files.lock();
        let mut idle: Vec<(u64, Arc<str>)> = files
            .open
            .iter()
            .filter(|(_, (file, _))| Arc::strong_count(file) == 1)
            .map(|(name, (_, used))| (*used, Arc::clone(name)))
            .collect();
        idle.sort_unstable();
        idle.truncate(files.open.len().saturating_sub(keep));
        let closed: Vec<_> = idle
            .iter()
            .filter_map(|(_, name)| files.open.remove(name))
            .collect();
        drop(files);
        closed.iter().for_each(|(file, _)| self.remove_idle(file));
    }

    /// Removes the file of a line that nobody is in.
    fn remove_idle(&self, file: &LineFile) {
        // Whoever has it locked is in the line.
        if let Ok(Some(mut locked)) = Locked::take("close", file)
            && file.is_in_place()
            && file.load("close", &mut locked.state).is_ok()
        {
            file.remove_if_empty(self.home(), &locked.state);
        }
    }

    /// Whether the claim was left before it came.
    pub(super) fn was_left(&self, id: ClaimId) -> bool {
        let left = self.left.lock();
        left.get(&id).is_some_and(|until| !until.has_passed())
    }

    /// Remembers that a claim was left before it came.
    pub(super) fn remember_left(&self, id: ClaimId, remembered: Duration) {
        let mut left = self.left.lock();
        if left.len() == left.capacity() {
            left.retain(|_, until| !until.has_passed());
        }
        left.insert(id, BootTime::now() + remembered);
    }

    /// Sends hints to whom they concern. Not under the line's lock: whoever is woken wants it.
    fn deliver(&self, hints: Hints) {
        let Hints { list, mut peers } = hints;
        for (process, hint) in list {
            if process == self.process() {
                self.watcher.hand(hint);
                continue;
            }
            let known = peers.iter().position(|(known, _)| *known == process);
            let at = known.unwrap_or_else(|| {
                let peer = liveness::open_to_wake(&self.home().procs, process);
                peers.push((process, peer));
                peers.len() - 1
            });
            if let Peer::Alive(end) = &peers[at].1 {
                liveness::send(end, hint);
            }
        }
    }
}

/// How many files may be open: a part of what this process may have.
fn most_files() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    OPEN_FILES.min(usize::try_from(limit / 4).unwrap_or(OPEN_FILES))
}

impl Drop for Store {
    fn drop(&mut self) {
        if getpid() != self.pid {
            return;
        }
        self.watcher.stop();
        self.close_files(0);
        if !self.leases.is_empty() {
            self.liveness.stay();
        }
    }
}

/// A line, locked.
struct Locked<'a> {
    file: &'a LineFile,
    state: MutexGuard<'a, State>,
}

impl<'a> Locked<'a> {
    /// Takes the lock of a line if it can be had at once, or nearly so.
    fn take(operation: &'static str, file: &'a LineFile) -> Result<Option<Self>> {
        let mut spinning_since: Option<Instant> = None;
        loop {
            if let Some(state) = file.state.try_lock() {
                match file.try_lock() {
                    Ok(true) => return Ok(Some(Self { file, state })),
                    Ok(false) => {}
                    Err(errno) => return Err(file_failed(operation, &file.path, errno)),
                }
            }
            let since = *spinning_since.get_or_insert_with(Instant::now);
            if since.elapsed() > SPIN {
                return Ok(None);
            }
            std::hint::spin_loop();
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // The mutex is let go of after it.
        self.file.unlock();
    }
}
