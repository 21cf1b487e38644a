//! `Watcher`: the sleepers of this process, and the thread that wakes them.
//!
//! The thread waits in epoll for hints on this process's FIFO, and for errors on write ends of
//! other processes' FIFOs, which report their death to those who sleep on them. It ignores hints
//! while someone sleeps in a runtime that receives them itself (see [`Listeners`]). It starts with
//! the first sleeper. It decides nothing: whoever is woken checks for itself.

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
use palisade_core::engine::Alarm;
use palisade_core::report::Scope;

/// The epoll key of this process's own FIFO; no process has this id.
const OWN: u64 = 0;
/// The epoll key of the eventfd that stops the thread; no process has this id.
const STOP: u64 = u64::MAX;
/// The epoll key of the inotify watch on the lines; no process has this id.
const LINES_CHANGED: u64 = u64::MAX - 1;

/// See the module documentation.
pub(super) struct Watcher {
    inner: Arc<Inner>,
    listeners: Listeners,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

struct Inner {
    liveness: Arc<Liveness>,
    sleepers: Mutex<HashMap<u128, Vec<Arc<Notify>>>>,
    alarms: broadcast::Sender<Alarm>,
    /// The scopes that watches subscribed to.
    scopes: Mutex<HashMap<u128, (Arc<str>, Scope)>>,
    poll: Mutex<Option<Poll>>,
    stopping: AtomicBool,
}

/// What the thread waits for.
struct Poll {
    epoll: Arc<OwnedFd>,
    stop: Arc<OwnedFd>,
    /// How many sleepers receive hints without the thread.
    listening: usize,
    peers: HashMap<u64, PeerEnd>,
    /// The inotify watch on the directory of lines, once a watch needs it.
    lines: Option<Arc<OwnedFd>>,
}

/// A write end of another process's FIFO, and those who sleep on it.
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
            listeners: Listeners::default(),
            thread: Mutex::default(),
        }
    }

    /// Registers a sleeper under `id`, a claim or a watch, in the current runtime. Hints wake it
    /// from now on, including those that arrive before it sleeps.
    pub(super) fn sleeper(&self, id: u128) -> Sleeper {
        self.start();
        let listens = self.listeners.listen_here(&self.inner);
        if listens {
            self.inner.count_listening(1);
        }
        let notify = Arc::new(Notify::new());
        let mut sleepers = self.inner.sleepers.lock();
        sleepers.entry(id).or_default().push(Arc::clone(&notify));
        Sleeper {
            id,
            notify,
            listens,
            inner: Arc::clone(&self.inner),
        }
    }

    /// Wakes the sleeper under `id` when a line in the scope changes. Returns whether that is
    /// possible.
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

    /// Passes a hint to its receiver in this process.
    pub(super) fn hand(&self, hint: Hint) {
        self.inner.hand(hint);
    }

    /// Subscribes to alarms.
    pub(super) fn alarms(&self) -> broadcast::Receiver<Alarm> {
        self.inner.alarms.subscribe()
    }

    /// Starts the thread unless it is running. Without it everything still works by periodic
    /// re-checks, so a failure is no error.
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

    /// Stops the thread and waits for its end.
    pub(super) fn stop(&self) {
        self.inner.stopping.store(true, Ordering::Release);
        self.listeners.stop();
        let stop = self.inner.poll.lock().as_ref().map(|p| Arc::clone(&p.stop));
        if let Some(stop) = stop {
            // If the eventfd is already set, the thread wakes anyway.
            let _ = rustix::io::write(&*stop, &1u64.to_ne_bytes());
        }
        if let Some(thread) = self.thread.lock().take() {
            // It does not panic, and nothing could be done about it here.
            let _ = thread.join();
        }
    }
}

impl Poll {
    fn new(liveness: &Liveness) -> rustix::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(
            &epoll,
            &stop,
            epoll::EventData::new_u64(STOP),
            epoll::EventFlags::IN,
        )?;
        let own = epoll::EventData::new_u64(OWN);
        epoll::add(&epoll, &liveness.fifo, own, epoll::EventFlags::IN)?;
        Ok(Self {
            epoll: Arc::new(epoll),
            stop: Arc::new(stop),
            listening: 0,
            peers: HashMap::new(),
            lines: None,
        })
    }

    fn forget(&mut self, process: u64) -> Vec<Arc<Notify>> {
        let Some(peer) = self.peers.remove(&process) else {
            return Vec::new();
        };
        // Closing it is not enough while a child that is being forked has a copy.
        let _ = epoll::delete(&self.epoll, &peer.end);
        peer.sleepers
    }
}

impl Inner {
    /// Subscribes the thread to every change in the directory of lines.
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
        self.wake(id);
    }

    fn wake(&self, id: u128) {
        if let Some(sleepers) = self.sleepers.lock().get(&id) {
            sleepers.iter().for_each(|notify| notify.notify_one());
        }
    }

    /// Wakes the watches of lines that have changed.
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
                // An event without a name means that some were missed.
                name.is_none_or(|name| keys::may_include(namespace, scope, name))
            });
            concerned.for_each(|(id, _)| self.wake(*id));
        }
    }

    /// Counts the sleepers that receive hints without the thread. Meanwhile the thread ignores
    /// them, because a hint would wake both, on two cores. When the last such sleeper is gone, the
    /// thread receives what is still unread.
    fn count_listening(&self, step: isize) {
        let mut poll = self.poll.lock();
        let Some(poll) = poll.as_mut() else { return };
        poll.listening = poll.listening.saturating_add_signed(step);
        let flags = match (poll.listening, step) {
            (0, _) => epoll::EventFlags::IN,
            (1, 1..) => epoll::EventFlags::empty(),
            _ => return,
        };
        let own = epoll::EventData::new_u64(OWN);
        // A hint that nobody receives is made up for by a re-check.
        let _ = epoll::modify(&poll.epoll, &self.liveness.fifo, own, flags);
    }

    fn watch(&self, epoll: &OwnedFd) {
        let mut events = Vec::with_capacity(64);
        while !self.stopping.load(Ordering::Acquire) {
            events.clear();
            // EINTR is the only possible error, and means to try again.
            let _ = epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), None);
            for event in &events {
                match event.data.u64() {
                    STOP => {}
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
        for notify in sleepers.into_iter().flatten() {
            notify.notify_one();
        }
    }
}

/// A registered sleeper; dropping it removes it.
pub(super) struct Sleeper {
    id: u128,
    notify: Arc<Notify>,
    /// Whether its runtime receives hints.
    listens: bool,
    inner: Arc<Inner>,
}

impl Sleeper {
    /// Sleeps until a hint arrives, or returns at once if one arrived since the last call.
    pub(super) async fn woken(&self) {
        self.notify.notified().await;
    }

    /// Also wakes it when one of these processes dies, or now if one is already dead.
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
                    .any(|notify| Arc::ptr_eq(notify, &self.notify))
                {
                    peer.sleepers.push(Arc::clone(&self.notify));
                }
                continue;
            }
            match liveness::open_to_watch(self.inner.liveness.home.signs(), process) {
                Peer::Dead => self.notify.notify_one(),
                Peer::Unknown(_) => {}
                Peer::Alive(end) => {
                    let data = epoll::EventData::new_u64(process);
                    // Errors are always reported; nothing else is of interest.
                    let added =
                        epoll::add(&poll.epoll, end.as_fd(), data, epoll::EventFlags::empty());
                    if added.is_ok() {
                        let sleepers = vec![Arc::clone(&self.notify)];
                        poll.peers.insert(process, PeerEnd { end, sleepers });
                    }
                }
            }
        }
    }

    /// Stops watching all processes except these.
    fn unmind(&self, poll: &mut Poll, but: &[u64]) {
        let mut lonely = Vec::new();
        for (process, peer) in &mut poll.peers {
            if !but.contains(process) {
                peer.sleepers
                    .retain(|notify| !Arc::ptr_eq(notify, &self.notify));
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
        if self.listens {
            self.inner.count_listening(-1);
        }
        if let Some(poll) = self.inner.poll.lock().as_mut() {
            self.unmind(poll, &[]);
        }
        let mut sleepers = self.inner.sleepers.lock();
        if let Some(of_id) = sleepers.get_mut(&self.id) {
            of_id.retain(|notify| !Arc::ptr_eq(notify, &self.notify));
            if of_id.is_empty() {
                sleepers.remove(&self.id);
            }
        }
    }
}

/// Receives hints in the runtimes where someone sleeps.
///
/// The watcher's thread could receive them, but waking a runtime from another thread wakes a second
/// core, which takes as long as the rest of a hand-over. So each such runtime listens to the FIFO
/// itself, with a task of its own. Whichever reads a hint first passes it on.
///
/// A runtime opens the FIFO again instead of copying the descriptor, because that descriptor proves
/// that the process is alive: a task that outlives the store must not keep it.
#[derive(Default)]
struct Listeners(Mutex<HashMap<Id, Option<JoinHandle<()>>>>);

impl Listeners {
    /// Makes the current runtime listen. Returns whether it does.
    fn listen_here(&self, inner: &Arc<Inner>) -> bool {
        let runtime = Handle::current();
        let mut tasks = self.0.lock();
        match tasks.get(&runtime.id()) {
            None => {}
            Some(Some(task)) if task.is_finished() => {}
            Some(task) => return task.is_some(),
        }
        // Forget runtimes that have ended.
        tasks.retain(|_, task| !task.as_ref().is_some_and(JoinHandle::is_finished));
        let task = open_receiver(inner)
            .map(|receiver| runtime.spawn(listen(receiver, Arc::downgrade(inner))));
        let listens = task.is_some();
        tasks.insert(runtime.id(), task);
        listens
    }

    /// Ends all tasks, as soon as their runtimes run them.
    fn stop(&self) {
        for task in self.0.lock().drain().filter_map(|(_, task)| task) {
            task.abort();
        }
    }
}

fn open_receiver(inner: &Inner) -> Option<Receiver> {
    // A runtime without I/O can only be detected by the panic that it raises.
    if cfg!(panic = "abort") {
        return None;
    }
    let fifo = inner.liveness.open_to_hear().ok()?;
    std::panic::catch_unwind(|| Receiver::from_owned_fd(fifo).ok()).ok()?
}

async fn listen(receiver: Receiver, inner: Weak<Inner>) {
    while receiver.readable().await.is_ok() {
        let Some(inner) = inner.upgrade() else {
            return;
        };
        liveness::receive(|buffer| receiver.try_read(buffer), |hint| inner.hand(hint));
    }
}
