//! `Liveness`: how others see that a process is alive, and how they wake it.
//!
//! Each process has a FIFO in the store that it alone keeps open for reading, with an exclusive
//! `flock` on it. Both belong to one open file description, also across a fork, so the kernel drops
//! them together when the last process that has it is gone. **The flock decides** whether a process
//! is dead; an error on a write end only tells sleepers to check. A missing FIFO proves nothing.
//! Bytes in it are hints: if one is lost, the next re-check makes up for it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::boot::Home;
use super::error::unusable_dir;
use super::{dir, leases};
use palisade_core::Result;
use palisade_core::engine::ClaimId;

/// A message to another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hint {
    /// This waiting claim should read its place.
    Look(ClaimId),
    /// This claim's keeper should renew it now.
    Alarm(ClaimId),
}

/// The length of a hint: shorter than PIPE_BUF, so that writes are atomic.
pub(super) const HINT: usize = 17;

impl Hint {
    fn to_bytes(self) -> [u8; HINT] {
        let (kind, id) = match self {
            Self::Look(claim) => (1, claim.0),
            Self::Alarm(claim) => (2, claim.0),
        };
        let mut bytes = [kind; HINT];
        bytes[1..].copy_from_slice(&id.to_le_bytes());
        bytes
    }

    /// Parses a hint; `None` for anything else.
    pub(super) fn from_bytes(bytes: &[u8; HINT]) -> Option<Self> {
        let mut id = [0; 16];
        id.copy_from_slice(&bytes[1..]);
        let id = u128::from_le_bytes(id);
        match bytes[0] {
            1 => Some(Self::Look(ClaimId(id))),
            2 => Some(Self::Alarm(ClaimId(id))),
            _ => None,
        }
    }
}

/// The FIFO of this process in one store, which proves that it is alive. It lasts until the last
/// copy of its file descriptor is closed: if it was created before a fork, until both processes are
/// gone.
#[derive(Debug)]
pub struct Liveness {
    /// The id of this process in its seats.
    pub(super) process: u64,
    /// The FIFO where hints arrive.
    pub(super) fifo: OwnedFd,
    /// The file of leases that this process has renewed.
    pub(super) leases: OwnedFd,
    pub(super) home: Home,
    /// Whether no other process was in the store when this one joined.
    pub(super) alone: bool,
    maker: rustix::process::Pid,
    /// Whether claims may be left behind: then others must be able to see that their process is
    /// gone.
    stays: AtomicBool,
}

impl Liveness {
    /// Creates a FIFO and a file of leases. The caller holds the directory's lock, because others
    /// sweep FIFOs that are not locked yet.
    pub(super) fn create(home: Home, alone: bool) -> Result<Self> {
        // 0 and the two greatest values are the watcher's own epoll keys.
        let process = rand::random_range(1..u64::MAX - 1);
        let name = file_name(process);
        let make = || {
            let mode = home.dir.audience.file_mode();
            rustix::fs::mknodat(&home.procs, &name, FileType::Fifo, mode, 0)?;
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let fifo = rustix::fs::openat(&home.procs, &name, flags, Mode::empty())?;
            // The umask may have removed permissions that the group needs.
            rustix::fs::fchmod(&fifo, mode)?;
            rustix::fs::flock(&fifo, FlockOperation::NonBlockingLockExclusive)?;
            let (procs, leases) = (&home.procs, &home.leases);
            rustix::fs::linkat(procs, &name, leases, spare_name(process), AtFlags::empty())?;
            Ok((fifo, leases::create(&home, process)?))
        };
        let (fifo, leases) = make().map_err(|errno: Errno| {
            remove(&home, process);
            unusable_dir(&home.dir.path, errno)
        })?;
        Ok(Self {
            process,
            fifo,
            leases,
            home,
            alone,
            maker: rustix::process::getpid(),
            stays: AtomicBool::new(false),
        })
    }

    /// Opens the FIFO again, only to receive hints: this descriptor does not prove that the process
    /// is alive.
    pub(super) fn open_to_hear(&self) -> std::result::Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let name = file_name(self.process);
        rustix::fs::openat(&self.home.procs, name, flags, Mode::empty())
    }

    /// Restores the FIFO if it was deleted, for example by a cleaner of old files. Without it
    /// nobody could see whether this process is alive, or wake it, and everything would depend on
    /// the ttl.
    pub(super) fn restore(&self) {
        let (procs, leases) = (&self.home.procs, &self.home.leases);
        let name = file_name(self.process);
        let found = rustix::fs::statat(procs, &name, AtFlags::SYMLINK_NOFOLLOW);
        if matches!(found, Err(Errno::NOENT)) {
            let spare = spare_name(self.process);
            let _ = rustix::fs::linkat(leases, spare, procs, name, AtFlags::empty());
        }
    }

    /// Keeps the FIFO when this is dropped. Others then see a dead process, and waiters behind its
    /// remaining claims are served at once.
    pub(super) fn stay(&self) {
        self.stays.store(true, Ordering::Release);
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        // A forked child closes only its own copy.
        if rustix::process::getpid() == self.maker && !self.stays.load(Ordering::Acquire) {
            remove(&self.home, self.process);
        }
    }
}

pub(super) fn file_name(process: u64) -> String {
    format!("{process:016x}")
}

/// A second link to the FIFO, in the directory of leases, to restore it from.
fn spare_name(process: u64) -> String {
    format!("{process:016x}.sign")
}

/// Removes the files of a process that is gone.
fn remove(home: &Home, process: u64) {
    let name = file_name(process);
    // If they remain, the next process that joins the store sweeps them.
    let _ = rustix::fs::unlinkat(&home.procs, &name, AtFlags::empty());
    let _ = rustix::fs::unlinkat(&home.leases, &name, AtFlags::empty());
    let _ = rustix::fs::unlinkat(&home.leases, spare_name(process), AtFlags::empty());
}

/// The state of another process.
#[derive(Debug)]
pub(super) enum Peer {
    /// It is gone.
    Dead,
    /// It is alive; the write end reports an error when it dies.
    Alive(OwnedFd),
    /// Unknown: the FIFO was deleted, or no file descriptors are left. The process counts as alive,
    /// and its leases end by their ttl.
    Unknown,
}

/// Opens a write end that is only watched, never written to.
pub(super) fn open_to_watch(procs: impl AsFd, process: u64) -> Peer {
    open(procs, process, OFlags::WRONLY)
}

fn open(procs: impl AsFd, process: u64, access: OFlags) -> Peer {
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match rustix::fs::openat(procs, file_name(process), flags, Mode::empty()) {
        Err(Errno::NXIO) => Peer::Dead,
        Err(_) => Peer::Unknown,
        // Another reader may keep the FIFO open; the flock decides.
        Ok(end) => match rustix::fs::flock(&end, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Peer::Dead,
            Err(Errno::WOULDBLOCK) => Peer::Alive(end),
            Err(_) => Peer::Unknown,
        },
    }
}

/// Opens an end to send hints to, for a short time.
///
/// It is also open for reading: otherwise a write could raise SIGPIPE if the process died just now.
/// Meanwhile write ends elsewhere report no error, but the flock still decides.
pub(super) fn open_to_wake(procs: impl AsFd, process: u64) -> Peer {
    open(procs, process, OFlags::RDWR)
}

/// Sends a hint to another process. If the FIFO is full the hint is lost; the sleeper re-checks
/// anyway.
pub(super) fn send(end: &OwnedFd, hint: Hint) {
    let _ = rustix::io::write(end, &hint.to_bytes());
}

/// Reads what has arrived and passes each hint on.
pub(super) fn receive(
    mut read: impl FnMut(&mut [u8]) -> std::io::Result<usize>,
    mut hand: impl FnMut(Hint),
) {
    // A multiple of whole hints, so that a read never ends inside one.
    let mut buffer = [0; HINT * 64];
    while let Ok(length) = read(&mut buffer) {
        for bytes in buffer[..length].as_chunks().0 {
            if let Some(hint) = Hint::from_bytes(bytes) {
                hand(hint);
            }
        }
        if length < buffer.len() {
            return;
        }
    }
}

/// The processes that have a FIFO in this directory, dead or alive.
fn processes(procs: impl AsFd) -> impl Iterator<Item = u64> {
    let names = dir::names(procs).unwrap_or_default().into_iter();
    let hex = names.filter(|name| name.len() == 16);
    hex.filter_map(|name| u64::from_str_radix(&name, 16).ok())
}

/// Whether any process is known to be alive.
pub(super) fn any_alive(procs: impl AsFd + Copy) -> bool {
    processes(procs).any(|process| matches!(open_to_watch(procs, process), Peer::Alive(_)))
}

/// Removes the files of dead processes whose claims have all ended; returns whether all processes
/// are dead. The caller holds the directory's lock.
pub(super) fn sweep(home: &Home) -> bool {
    let mut alone = true;
    for process in processes(&home.procs) {
        match open_to_watch(&home.procs, process) {
            Peer::Dead if leases::all_ended(home, process) => remove(home, process),
            Peer::Dead => {}
            Peer::Alive(_) | Peer::Unknown => alone = false,
        }
    }
    alone
}
