//! `Watcher`: who sleeps in this process, and the thread that wakes them.
//!
//! The thread sits in epoll on this process's FIFO, where hints of others arrive, and on write
//! ends of the FIFOs of processes that someone sleeps on, which report an error when those die.
//! It is deaf to hints while somebody sleeps in a runtime that hears them itself (see [`Ears`]).
//! It starts with the first sleeper. It decides nothing: whoever is woken looks for itself.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::event::epoll;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::inotify;
use tokio::net::unix::pipe::Receiver;
use tokio::runtime::{Handle, Id};
use tokio::sync::{Notify, broadcast};
use tokio::task::JoinHandle;

use super::boot::LINES;
use super::keys;
use super::liveness::{self, Hint, Liveness, Peer};
use crate::core::engine::Alarm;
use crate::core::report::Scope;

/// The epoll key of this process's own FIFO; no process has it as its id.
const OWN: u64 = 0;
/// The epoll key of the bell; no process has it as its id.
const BELL: u64 = u64::MAX;
/// The epoll key of what tells of changed lines; no process has it as its id.
const LINES_CHANGED: u64 = u64::MAX - 1;

/// See the module's text.
pub(super) struct Watcher {
    inner: Arc<Inner>,
    ears: Ears,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

struct Inner {
    liveness: Arc<Liveness>,
    sleepers: Mutex<HashMap<u128, Vec<Arc<Notify>>>>,
    alarms: broadcast::Sender<Alarm>,
    /// Who wants to hear of changes of which lines.
    scopes: Mutex<HashMap<u128, (Arc<str>, Scope)>>,
    poll: Mutex<Option<Poll>>,
    stopping: AtomicBool,
}

/// What the thread looks at.
struct Poll {
    epoll: Arc<OwnedFd>,
    bell: Arc<OwnedFd>,
    /// How many sleep where hints are heard without the thread.
    hearing: usize,
    peers: HashMap<u64, PeerEnd>,
    /// Tells of changes in the folder of lines, once somebody wants to hear of them.
    lines: Option<Arc<OwnedFd>>,
}

/// A write end of another process's FIFO and who sleeps on it.
struct PeerEnd {
    end: OwnedFd,
    sleepers: Vec<Arc<Notify>>,
}

impl Watcher {
    pub(super) fn new(liveness: Arc<Liveness>) -> Self {
        Self {
            inner: Arc::new(Inner {
                liveness,
                sleepers: Mutex::default(),
                scopes: Mutex::default(),
                alarms: broadcast::channel(64).0,
                poll: Mutex::default(),
                stopping: AtomicBool::new(false),
            }),
            ears: Ears::default(),
            thread: Mutex::default(),
        }
    }

    /// Somebody who sleeps under `id`, a claim or a watch, in the runtime of this call. Hints from
    /// now on wake it, also those that come before it sleeps.
    pub(super) fn sleeper(&self, id: u128) -> Sleeper {
        self.start();
        let hears = self.ears.listen_here(&self.inner);
        if hears {
            self.inner.hearing(1);
        }
        let bell = Arc::new(Notify::new());
        let mut sleepers = self.inner.sleepers.lock();
        sleepers.entry(id).or_default().push(Arc::clone(&bell));
        Sleeper {
            id,
            bell,
            hears,
            inner: Arc::clone(&self.inner),
        }
    }

    /// Rings whoever sleeps under `id` when a line in the scope changes. Says whether it can.
    pub(super) fn watch_lines(&self, id: u128, namespace: &Arc<str>, scope: &Scope) -> bool {
        let watched = (Arc::clone(namespace), scope.clone());
        self.inner.scopes.lock().insert(id, watched);
        let mut poll = self.inner.poll.lock();
        let Some(poll) = poll.as_mut() else {
            return false;
        };
        if poll.lines.is_none() {
            poll.lines = self.inner.watch_folder(&poll.epoll).ok().map(Arc::new);
        }
        poll.lines.is_some()
    }

    /// Ends what [`Watcher::watch_lines`] began.
    pub(super) fn unwatch_lines(&self, id: u128) {
        let mut scopes = self.inner.scopes.lock();
        scopes.remove(&id);
        if scopes.is_empty()
            && let Some(poll) = self.inner.poll.lock().as_mut()
        {
            poll.lines = None;
        }
    }

    /// Hands a hint to whom it concerns in this process.
    pub(super) fn hand(&self, hint: Hint) {
        self.inner.hand(hint);
    }

    /// Where alarms go from now on.
    pub(super) fn alarms(&self) -> broadcast::Receiver<Alarm> {
        self.inner.alarms.subscribe()
    }

    /// Starts the thread unless it runs. Without it everything works by looking again now and
    /// then, so that a failure is not an error.
    pub(super) fn start(&self) {
        let mut thread = self.thread.lock();
        if thread.is_some() || self.inner.stopping.load(Ordering::Acquire) {
            return;
        }
        let Ok(poll) = Poll::new(&self.inner.liveness) else {
            return;
        };
        let epoll = Arc::clone(&poll.epoll);
        *self.inner.poll.lock() = Some(poll);
        let inner = Arc::clone(&self.inner);
        *thread = std::thread::Builder::new()
            .name("palisade-wake".into())
            .spawn(move || inner.watch(&epoll))
            .ok();
    }

    /// Ends the thread and waits for that.
    pub(super) fn stop(&self) {
        self.inner.stopping.store(true, Ordering::Release);
        self.ears.stop();
        let bell = self.inner.poll.lock().as_ref().map(|p| Arc::clone(&p.bell));
        if let Some(bell) = bell {
            // An eventfd that was rung already rings.
            let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
        }
        if let Some(thread) = self.thread.lock().take() {
            // It does not panic; and there is nothing to be done about it here.
            let _ = thread.join();
        }
    }
}

impl Poll {
    fn new(liveness: &Liveness) -> rustix::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(
            &epoll,
            &bell,
            epoll::EventData::new_u64(BELL),
            epoll::EventFlags::IN,
        )?;
        let own = epoll::EventData::new_u64(OWN);
        epoll::add(&epoll, &liveness.fifo, own, epoll::EventFlags::IN)?;
        Ok(Self {
            epoll: Arc::new(epoll),
            bell: Arc::new(bell),
            hearing: 0,
            peers: HashMap::new(),
            lines: None,
        })
    }

    fn forget(&mut self, process: u64) -> Vec<Arc<Notify>> {
        let Some(peer) = self.peers.remove(&process) else {
            return Vec::new();
        };
        // Closing it would do, were it not for a copy in a child that is being forked.
        let _ = epoll::delete(&self.epoll, &peer.end);
        peer.sleepers
    }
}

impl Inner {
    /// Lets the thread hear of every change in the folder of lines.
    fn watch_folder(&self, epoll: &OwnedFd) -> rustix::io::Result<OwnedFd> {
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        let lines = inotify::init(flags)?;
        let path = self.liveness.home.dir.path.join(LINES);
        inotify::add_watch(&lines, path, inotify::WatchFlags::MODIFY)?;
        let data = epoll::EventData::new_u64(LINES_CHANGED);
        epoll::add(epoll, &lines, data, epoll::EventFlags::IN)?;
        Ok(lines)
    }

    fn hand(&self, hint: Hint) {
        let id = match hint {
            Hint::Look(claim) => claim.0,
            Hint::Alarm(claim) => {
                // Without a keeper nobody listens.
                let _ = self.alarms.send(Alarm::Lease(claim.into()));
                claim.0
            }
        };
        self.ring(id);
    }

    fn ring(&self, id: u128) {
        if let Some(sleepers) = self.sleepers.lock().get(&id) {
            sleepers.iter().for_each(|bell| bell.notify_one());
        }
    }

    /// Rings whoever wants to hear of the lines that have changed.
    fn lines_changed(&self) {
        let lines = self
            .poll
            .lock()
            .as_ref()
            .and_then(|poll| poll.lines.clone());
        let Some(lines) = lines else { return };
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&*lines, &mut buffer);
        while let Ok(event) = events.next() {
            let name = event.file_name().and_then(|name| name.to_str().ok());
            let scopes = self.scopes.lock();
            let concerned = scopes.iter().filter(|(_, (namespace, scope))| {
                // Without a name, some were missed.
                name.is_none_or(|name| keys::may_include(namespace, scope, name))
            });
            concerned.for_each(|(id, _)| self.ring(*id));
        }
    }

    /// Counts who hears without the thread, which is deaf meanwhile: a hint would wake both, on
    /// two cores. What nobody has read when the last one is gone, the thread hears at once.
    fn hearing(&self, step: isize) {
        let mut poll = self.poll.lock();
        let Some(poll) = poll.as_mut() else { return };
        poll.hearing = poll.hearing.saturating_add_signed(step);
        let flags = match (poll.hearing, step) {
            (0, _) => epoll::EventFlags::IN,
            (1, 1..) => epoll::EventFlags::empty(),
            _ => return,
        };
        let own = epoll::EventData::new_u64(OWN);
        // What is not heard is found by looking again now and then.
        let _ = epoll::modify(&poll.epoll, &self.liveness.fifo, own, flags);
    }

    fn watch(&self, epoll: &OwnedFd) {
        let mut events = Vec::with_capacity(64);
        while !self.stopping.load(Ordering::Acquire) {
            events.clear();
            // EINTR is the only error that can come here, and means to look again.
            let _ = epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), None);
            for event in &events {
                match event.data.u64() {
                    BELL => {}
                    LINES_CHANGED => self.lines_changed(),
                    OWN => {
                        let fifo = &self.liveness.fifo;
                        let read = |buffer: &mut [u8]| Ok(rustix::io::read(fifo, buffer)?);
                        liveness::receive(read, |hint| self.hand(hint));
                    }
                    process => self.died(process),
                }
            }
        }
    }

    fn died(&self, process: u64) {
        let mut poll = self.poll.lock();
        let sleepers = poll.as_mut().map(|poll| poll.forget(process));
        for bell in sleepers.into_iter().flatten() {
            bell.notify_one();
        }
    }
}

/// Somebody who sleeps; dropped, it is forgotten.
pub(super) struct Sleeper {
    id: u128,
    bell: Arc<Notify>,
    /// Whether its runtime hears hints.
    hears: bool,
    inner: Arc<Inner>,
}

impl Sleeper {
    /// Sleeps until a hint comes, or one has come since the last time.
    pub(super) async fn rung(&self) {
        self.bell.notified().await;
    }

    /// Also wakes it when one of these processes dies. One that is dead already wakes it now.
    pub(super) fn mind(&self, processes: &[u64]) {
        let mut poll = self.inner.poll.lock();
        let Some(poll) = poll.as_mut() else { return };
        self.unmind(poll, processes);
        for &process in processes {
            if process == self.inner.liveness.process {
                continue;
            }
            if let Some(peer) = poll.peers.get_mut(&process) {
                if !peer
                    .sleepers
                    .iter()
                    .any(|bell| Arc::ptr_eq(bell, &self.bell))
                {
                    peer.sleepers.push(Arc::clone(&self.bell));
                }
                continue;
            }
            match liveness::open_to_watch(&self.inner.liveness.home.procs, process) {
                Peer::Dead => self.bell.notify_one(),
                Peer::Unknown => {}
                Peer::Alive(end) => {
                    let data = epoll::EventData::new_u64(process);
                    // Errors are always reported; nothing else is of interest.
                    let added =
                        epoll::add(&poll.epoll, end.as_fd(), data, epoll::EventFlags::empty());
                    if added.is_ok() {
                        let sleepers = vec![Arc::clone(&self.bell)];
                        poll.peers.insert(process, PeerEnd { end, sleepers });
                    }
                }
            }
        }
    }

    /// Stops minding all processes but these.
    fn unmind(&self, poll: &mut Poll, but: &[u64]) {
        let mut lonely = Vec::new();
        for (process, peer) in &mut poll.peers {
            if !but.contains(process) {
                peer.sleepers.retain(|bell| !Arc::ptr_eq(bell, &self.bell));
            }
            if peer.sleepers.is_empty() {
                lonely.push(*process);
            }
        }
        for process in lonely {
            poll.forget(process);
        }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        if self.hears {
            self.inner.hearing(-1);
        }
        if let Some(poll) = self.inner.poll.lock().as_mut() {
            self.unmind(poll, &[]);
        }
        let mut sleepers = self.inner.sleepers.lock();
        if let Some(of_id) = sleepers.get_mut(&self.id) {
            of_id.retain(|bell| !Arc::ptr_eq(bell, &self.bell));
            if of_id.is_empty() {
                sleepers.remove(&self.id);
            }
        }
    }
}

/// Hears hints in the runtimes where somebody sleeps.
///
/// The watcher's thread could hear them, but to wake a runtime from another thread is to wake a
/// second core, which takes as long as the rest of a hand-over. So each runtime that sleeps
/// listens to the FIFO itself, by a task of its own. Whoever reads a hint first hands it on.
///
/// A runtime opens the FIFO anew and does not copy the descriptor, which is the sign of life: a
/// task that has not ended yet when the store is closed must not keep that.
#[derive(Default)]
struct Ears(Mutex<HashMap<Id, Option<JoinHandle<()>>>>);

impl Ears {
    /// Lets the runtime of this call listen. Says whether it does.
    fn listen_here(&self, inner: &Arc<Inner>) -> bool {
        let runtime = Handle::current();
        let mut ears = self.0.lock();
        match ears.get(&runtime.id()) {
            None => {}
            Some(Some(task)) if task.is_finished() => {}
            Some(task) => return task.is_some(),
        }
        // Forgets runtimes that have ended.
        ears.retain(|_, task| !task.as_ref().is_some_and(JoinHandle::is_finished));
        let task = open_ear(inner).map(|ear| runtime.spawn(listen(ear, Arc::downgrade(inner))));
        let listens = task.is_some();
        ears.insert(runtime.id(), task);
        listens
    }

    /// Ends all tasks, when their runtimes get to it.
    fn stop(&self) {
        for task in self.0.lock().drain().filter_map(|(_, task)| task) {
            task.abort();
        }
    }
}

fn open_ear(inner: &Inner) -> Option<Receiver> {
    // That a runtime has no I/O can only be told by the panic that it answers with.
    if cfg!(panic = "abort") {
        return None;
    }
    let ear = inner.liveness.open_to_hear().ok()?;
    std::panic::catch_unwind(|| Receiver::from_owned_fd(ear).ok()).ok()?
}

async fn listen(ear: Receiver, inner: Weak<Inner>) {
    while ear.readable().await.is_ok() {
        let Some(inner) = inner.upgrade() else {
            return;
        };
        liveness::receive(|buffer| ear.try_read(buffer), |hint| inner.hand(hint));
    }
}
