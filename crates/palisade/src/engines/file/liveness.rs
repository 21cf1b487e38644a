//! `Liveness`: a process's sign of life, and the way to wake it.
//!
//! Each process has a FIFO in the store that it alone keeps open for reading, with an exclusive
//! `flock` on it. Both hang on one open file description, also across a fork, so that the kernel
//! drops them together when the last process that has it is gone. **The flock decides** who is
//! dead; a write end that reports an error only tells whoever sleeps to look. Bytes in the FIFO
//! are hints: a lost one is made up for by the next look.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::core::claim::ClaimId;

/// What a hint is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hint {
    /// This waiting claim should look at its place.
    Look(ClaimId),
    /// This claim's keeper should renew it now.
    Alarm(ClaimId),
    /// This watch should survey.
    Changed(u128),
}

/// The length of a hint. Shorter than PIPE_BUF, so that writes are never torn.
pub(super) const HINT: usize = 17;

impl Hint {
    fn to_bytes(self) -> [u8; HINT] {
        let (kind, id) = match self {
            Self::Look(claim) => (1, claim.0),
            Self::Alarm(claim) => (2, claim.0),
            Self::Changed(watch) => (3, watch),
        };
        let mut bytes = [kind; HINT];
        bytes[1..].copy_from_slice(&id.to_le_bytes());
        bytes
    }

    /// Reads a hint; `None` when it is none of ours.
    pub(super) fn from_bytes(bytes: &[u8; HINT]) -> Option<Self> {
        let mut id = [0; 16];
        id.copy_from_slice(&bytes[1..]);
        let id = u128::from_le_bytes(id);
        match bytes[0] {
            1 => Some(Self::Look(ClaimId(id))),
            2 => Some(Self::Alarm(ClaimId(id))),
            3 => Some(Self::Changed(id)),
            _ => None,
        }
    }
}

/// The sign of life of this process in one store. It lasts until the last copy of its file
/// descriptor is closed: made before a fork, until both processes are gone.
#[derive(Debug)]
pub struct Liveness {
    process: u64,
    procs: OwnedFd,
    fifo: OwnedFd,
    maker: rustix::process::Pid,
}

impl Liveness {
    /// Makes a FIFO in `procs`. The caller holds the writer lock, since others sweep what is not
    /// flocked yet.
    pub(super) fn create(procs: OwnedFd) -> Result<Self, Errno> {
        // 0 and the greatest are the watcher's own keys.
        let process = rand::random_range(1..u64::MAX);
        let name = file_name(process);
        rustix::fs::mknodat(&procs, &name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fifo = rustix::fs::openat(&procs, &name, flags, Mode::empty())?;
        rustix::fs::flock(&fifo, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self {
            process,
            procs,
            fifo,
            maker: rustix::process::getpid(),
        })
    }

    /// What tickets of this process carry.
    pub(super) fn process(&self) -> u64 {
        self.process
    }

    /// Where hints arrive.
    pub(super) fn fifo(&self) -> BorrowedFd<'_> {
        self.fifo.as_fd()
    }

    /// Opens the FIFO anew, to hear hints with: no sign of life.
    pub(super) fn open_to_hear(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat(&self.procs, file_name(self.process), flags, Mode::empty())
    }

    /// The folder of all signs of life.
    pub(super) fn procs(&self) -> BorrowedFd<'_> {
        self.procs.as_fd()
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        // A forked child closes its copy, which ends nothing.
        if rustix::process::getpid() == self.maker {
            remove(self.procs.as_fd(), self.process);
        }
    }
}

fn file_name(process: u64) -> String {
    format!("{process:016x}")
}

/// Removes the FIFO of a process that is gone.
pub(super) fn remove(procs: BorrowedFd<'_>, process: u64) {
    // Left behind, it is swept when the store is opened next.
    let _ = rustix::fs::unlinkat(procs, file_name(process), AtFlags::empty());
}

/// What became of opening a process's FIFO.
#[derive(Debug)]
pub(super) enum Peer {
    /// It is gone.
    Dead,
    /// It lives; the write end reports an error when that ends.
    Alive(OwnedFd),
    /// It can't be told now (no file descriptors left, say), and counts as alive: its leases
    /// still end by their ttl.
    Unknown,
}

/// Opens a write end that nothing is ever written to.
pub(super) fn open_to_watch(procs: BorrowedFd<'_>, process: u64) -> Peer {
    open(procs, process, OFlags::WRONLY)
}

fn open(procs: BorrowedFd<'_>, process: u64, access: OFlags) -> Peer {
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match rustix::fs::openat(procs, file_name(process), flags, Mode::empty()) {
        Err(Errno::NXIO | Errno::NOENT) => Peer::Dead,
        Err(_) => Peer::Unknown,
        // A stray reader may keep the FIFO open; the flock decides.
        Ok(end) => match rustix::fs::flock(&end, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Peer::Dead,
            Err(Errno::WOULDBLOCK) => Peer::Alive(end),
            Err(_) => Peer::Unknown,
        },
    }
}

/// Opens an end to send hints to, for the moment.
///
/// It is open for reading too: a write could otherwise raise SIGPIPE if the process died just
/// now. Meanwhile write ends elsewhere report no error, which the flock makes up for.
pub(super) fn open_to_wake(procs: BorrowedFd<'_>, process: u64) -> Peer {
    open(procs, process, OFlags::RDWR)
}

/// Sends a hint to another process. A full FIFO loses it; the sleeper's own look makes up for it.
pub(super) fn send(end: &OwnedFd, hint: Hint) {
    let _ = rustix::io::write(end, &hint.to_bytes());
}

/// Reads what has arrived and hands each hint on.
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

/// Removes the FIFOs of dead processes; says whether any process but `mine` lives. The
/// caller holds the writer lock.
pub(super) fn sweep(procs: BorrowedFd<'_>, mine: Option<u64>) -> Result<bool, Errno> {
    let mut alive = false;
    for entry in rustix::fs::Dir::read_from(procs)? {
        let entry = entry?;
        let Some(process) = entry
            .file_name()
            .to_str()
            .ok()
            .filter(|name| name.len() == 16)
            .and_then(|name| u64::from_str_radix(name, 16).ok())
        else {
            continue;
        };
        match open_to_watch(procs, process) {
            Peer::Dead => remove(procs, process),
            _ if mine == Some(process) => {}
            _ => alive = true,
        }
    }
    Ok(alive)
}
