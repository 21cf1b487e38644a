//! `Liveness`: a process's sign of life, and the way to wake it.
//!
//! Each process has a FIFO in the store that it alone keeps open for reading, with an exclusive
//! `flock` on it. Both hang on one open file description, also across a fork, so that the kernel
//! drops them together when the last process that has it is gone. **The flock decides** who is
//! dead; a write end that reports an error only tells whoever sleeps to look. A FIFO that is not
//! there proves nothing. Bytes in it are hints: a lost one is made up for by the next look.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::boot::Home;
use super::error::unusable_dir;
use super::{dir, leases};
use crate::core::claim::ClaimId;
use crate::core::error::Result;

/// What a hint is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hint {
    /// This waiting claim should look at its place.
    Look(ClaimId),
    /// This claim's keeper should renew it now.
    Alarm(ClaimId),
}

/// The length of a hint. Shorter than PIPE_BUF, so that writes are never torn.
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

    /// Reads a hint; `None` when it is none of ours.
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

/// The sign of life of this process in one store. It lasts until the last copy of its file
/// descriptor is closed: made before a fork, until both processes are gone.
#[derive(Debug)]
pub struct Liveness {
    /// What tickets of this process carry.
    pub(super) process: u64,
    /// Where hints arrive.
    pub(super) fifo: OwnedFd,
    /// The leases that this process has renewed.
    pub(super) leases: OwnedFd,
    pub(super) home: Home,
    /// Whether nobody else was in the store when it was joined.
    pub(super) alone: bool,
    maker: rustix::process::Pid,
    /// Whether claims may be left behind: then it must be seen that their process is gone.
    stays: AtomicBool,
}

impl Liveness {
    /// Makes a FIFO and a file of leases. The caller holds the lock of the directory, since others
    /// sweep what is not flocked yet.
    pub(super) fn create(home: Home, alone: bool) -> Result<Self> {
        // 0 and the greatest are the watcher's own keys.
        let process = rand::random_range(1..u64::MAX - 1);
        let name = file_name(process);
        let make = || {
            let mode = home.dir.audience.file_mode();
            rustix::fs::mknodat(&home.procs, &name, FileType::Fifo, mode, 0)?;
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let fifo = rustix::fs::openat(&home.procs, &name, flags, Mode::empty())?;
            // The umask may have taken what the group needs.
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

    /// Opens the FIFO anew, to hear hints with: no sign of life.
    pub(super) fn open_to_hear(&self) -> std::result::Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let name = file_name(self.process);
        rustix::fs::openat(&self.home.procs, name, flags, Mode::empty())
    }

    /// Puts the FIFO back if it was deleted, by a cleaner of old files, say. Without it nobody can
    /// see that this process lives or dies, or wake it, and all goes by the ttl.
    pub(super) fn restore(&self) {
        let (procs, leases) = (&self.home.procs, &self.home.leases);
        let name = file_name(self.process);
        let found = rustix::fs::statat(procs, &name, AtFlags::SYMLINK_NOFOLLOW);
        if matches!(found, Err(Errno::NOENT)) {
            let spare = spare_name(self.process);
            let _ = rustix::fs::linkat(leases, spare, procs, name, AtFlags::empty());
        }
    }

    /// Leaves the sign, which is that of a dead process then, when this is dropped: whoever waits
    /// behind claims that were left behind is served at once.
    pub(super) fn stay(&self) {
        self.stays.store(true, Ordering::Release);
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        // A forked child closes its copy, which ends nothing.
        if rustix::process::getpid() == self.maker && !self.stays.load(Ordering::Acquire) {
            remove(&self.home, self.process);
        }
    }
}

pub(super) fn file_name(process: u64) -> String {
    format!("{process:016x}")
}

/// Another name of the FIFO, in the folder of leases, to put it back from.
fn spare_name(process: u64) -> String {
    format!("{process:016x}.sign")
}

/// Removes the files of a process that is gone.
fn remove(home: &Home, process: u64) {
    let name = file_name(process);
    // Left behind, they are swept by whoever joins the store next.
    let _ = rustix::fs::unlinkat(&home.procs, &name, AtFlags::empty());
    let _ = rustix::fs::unlinkat(&home.leases, &name, AtFlags::empty());
    let _ = rustix::fs::unlinkat(&home.leases, spare_name(process), AtFlags::empty());
}

/// What became of opening a process's FIFO.
#[derive(Debug)]
pub(super) enum Peer {
    /// It is gone.
    Dead,
    /// It lives; the write end reports an error when that ends.
    Alive(OwnedFd),
    /// It can't be told: the FIFO was deleted, or there are no file descriptors left. It counts as
    /// alive, and its leases end by their ttl.
    Unknown,
}

/// Opens a write end that nothing is ever written to.
pub(super) fn open_to_watch(procs: impl AsFd, process: u64) -> Peer {
    open(procs, process, OFlags::WRONLY)
}

fn open(procs: impl AsFd, process: u64, access: OFlags) -> Peer {
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match rustix::fs::openat(procs, file_name(process), flags, Mode::empty()) {
        Err(Errno::NXIO) => Peer::Dead,
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
pub(super) fn open_to_wake(procs: impl AsFd, process: u64) -> Peer {
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

/// The processes that have a sign of life in this folder, dead or alive.
fn processes(procs: impl AsFd) -> impl Iterator<Item = u64> {
    let names = dir::names(procs).unwrap_or_default().into_iter();
    let hex = names.filter(|name| name.len() == 16);
    hex.filter_map(|name| u64::from_str_radix(&name, 16).ok())
}

/// Whether any process that can be asked lives.
pub(super) fn any_alive(procs: impl AsFd + Copy) -> bool {
    processes(procs).any(|process| matches!(open_to_watch(procs, process), Peer::Alive(_)))
}

/// Removes the files of processes that are dead and whose claims have all ended; says whether all
/// are dead. The caller holds the lock of the directory.
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
