//! `Liveness`: how others see that a process is alive, and how they wake it.
//!
//! Each process has a FIFO in the store that it alone keeps open for reading, with an exclusive
//! `flock` on it. Both belong to one open file description, also across a fork, so the kernel drops
//! them together when the last process that has it is gone. **The flock decides** whether a process
//! is dead; an error on a write end only tells sleepers to check. Bytes in it are hints: if one is
//! lost, the next re-check makes up for it.
//!
//! A missing FIFO proves nothing, and neither does an unlocked one that was put in its place: the
//! process has written the inode of its own into its file of leases, and only that one can show that
//! it is dead. As long as the process lives, no other file can get this number.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::boot::Home;
use super::dir::{self, Dir, identity};
use super::error::unusable_dir;
use super::{leases, promised};
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
            let sign = rustix::fs::fstat(&fifo)?.st_ino;
            Ok((fifo, leases::create(home.signs(), process, sign)?))
        };
        #[cfg_attr(
            not(feature = "queue"),
            allow(unused_mut, reason = "only queues keep space")
        )]
        let mut made = make();
        #[cfg(feature = "queue")]
        if matches!(made, Err(Errno::NOSPC | Errno::DQUOT)) && super::queue::take_some(&home.dir) {
            remove(&home, process);
            made = make();
        }
        let (fifo, leases) = made.map_err(|errno: Errno| {
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
    /// is alive. Not by its name, where another may have been put.
    pub(super) fn open_to_hear(&self) -> std::result::Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let own = format!("/proc/self/fd/{}", self.fifo.as_raw_fd());
        rustix::fs::open(own, flags, Mode::empty())
    }

    /// Restores the FIFO, or the second link to it, if it was deleted (for example by a cleaner of
    /// old files) or replaced. Without it nobody could see whether this process is alive, or wake
    /// it, and everything would depend on the ttl.
    pub(super) fn restore(&self) {
        let Ok(own) = rustix::fs::fstat(&self.fifo) else {
            return;
        };
        let places = self.home.signs().places(self.process);
        let has_own = places.each_ref().map(|(folder, name)| {
            match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) => identity(&found) == identity(&own),
                // It can't be seen now, which is no reason to replace it.
                Err(errno) => errno != Errno::NOENT,
            }
        });
        let ((to, name), (from, other)) = match (has_own, &places) {
            ([false, true], [fifo, spare]) => (fifo, spare),
            ([true, false], [fifo, spare]) => (spare, fifo),
            _ => return,
        };
        // If this fails, the next renewal tries again.
        let new = format!("{name}.new");
        let _ = rustix::fs::unlinkat(to, &new, AtFlags::empty());
        let _ = rustix::fs::linkat(from, other, to, &new, AtFlags::empty())
            .and_then(|()| rustix::fs::renameat(to, &new, to, name));
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
            promised::remove(&self.home.dir, self.process);
        }
    }
}

pub(super) fn file_name(process: u64) -> String {
    format!("{process:016x}")
}

/// A second link to the FIFO, in the directory of leases, to restore it from.
pub(super) fn spare_name(process: u64) -> String {
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

/// Where the signs of life of a store are.
#[derive(Clone, Copy)]
pub(super) struct Signs<'a> {
    pub(super) dir: &'a Dir,
    pub(super) procs: &'a OwnedFd,
    pub(super) leases: &'a OwnedFd,
}

impl<'a> Signs<'a> {
    /// The two links to the FIFO of a process: folder and name.
    fn places(self, process: u64) -> [(&'a OwnedFd, String); 2] {
        let spare = (self.leases, spare_name(process));
        [(self.procs, file_name(process)), spare]
    }
}

/// The state of another process.
#[derive(Debug)]
pub(super) enum Peer {
    /// It is gone.
    Dead,
    /// It is alive; the write end reports an error when it dies.
    Alive(OwnedFd),
    /// Unknown, for this reason: [`Errno::NOENT`] if the FIFO was deleted, [`Errno::STALE`] if it
    /// was replaced, otherwise why it can't be looked at. The process counts as alive, and its
    /// leases end by their ttl.
    Unknown(Errno),
}

/// Opens a write end that is only watched, never written to.
pub(super) fn open_to_watch(signs: Signs<'_>, process: u64) -> Peer {
    open(signs, process, OFlags::WRONLY)
}

fn open(signs: Signs<'_>, process: u64, access: OFlags) -> Peer {
    let mut unknown = Errno::NOENT;
    for (folder, name) in signs.places(process) {
        match open_end(folder, &name, access) {
            Ok(End::Locked(end)) => return Peer::Alive(end),
            Ok(End::Free(inode)) => match leases::sign(signs, process) {
                Ok(Some(sign)) if sign == inode => return Peer::Dead,
                Ok(_) => unknown = Errno::STALE,
                Err(errno) => unknown = errno,
            },
            Err(Errno::NOENT) => {}
            Err(errno) => unknown = errno,
        }
    }
    Peer::Unknown(unknown)
}

/// A FIFO that another process may have locked.
enum End {
    Locked(OwnedFd),
    /// Nobody has it locked; its inode.
    Free(u64),
}

fn open_end(folder: &OwnedFd, name: &str, access: OFlags) -> std::result::Result<End, Errno> {
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let free = |stat: rustix::fs::Stat| {
        let fifo = FileType::from_raw_mode(stat.st_mode) == FileType::Fifo;
        // Something else was put in its place.
        if fifo {
            Ok(End::Free(stat.st_ino))
        } else {
            Err(Errno::STALE)
        }
    };
    match rustix::fs::openat(folder, name, flags, Mode::empty()) {
        // Nobody has it open for reading.
        Err(Errno::NXIO) => {
            rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).and_then(free)
        }
        Err(errno) => Err(errno),
        // Another reader may keep the FIFO open; the flock decides.
        Ok(end) => match rustix::fs::flock(&end, FlockOperation::NonBlockingLockShared) {
            Ok(()) => rustix::fs::fstat(&end).and_then(free),
            Err(Errno::WOULDBLOCK) => Ok(End::Locked(end)),
            Err(errno) => Err(errno),
        },
    }
}

/// Opens an end to send hints to, for a short time.
///
/// It is also open for reading: otherwise a write could raise SIGPIPE if the process died just now.
/// Meanwhile write ends elsewhere report no error, but the flock still decides.
pub(super) fn open_to_wake(signs: Signs<'_>, process: u64) -> Peer {
    open(signs, process, OFlags::RDWR)
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
fn processes(procs: &OwnedFd) -> std::result::Result<impl Iterator<Item = u64>, Errno> {
    let hex = dir::names(procs)?
        .into_iter()
        .filter(|name| name.len() == 16);
    Ok(hex.filter_map(|name| u64::from_str_radix(&name, 16).ok()))
}

/// The name of the FIFO of a process that lives.
///
/// # Errors
/// When it can't be known whether one does; with the FIFO's name, or none if there is no list.
pub(super) fn any_alive(
    signs: Signs<'_>,
) -> std::result::Result<Option<String>, (Option<String>, Errno)> {
    for process in processes(signs.procs).map_err(|errno| (None, errno))? {
        match open_to_watch(signs, process) {
            Peer::Alive(_) => return Ok(Some(file_name(process))),
            // A FIFO that is gone, or that came with a copy of the store, is nobody's.
            Peer::Dead | Peer::Unknown(Errno::NOENT | Errno::STALE) => {}
            Peer::Unknown(errno) => return Err((Some(file_name(process)), errno)),
        }
    }
    Ok(None)
}

/// Removes the files of dead processes whose claims have all ended; returns whether all processes
/// are dead. The caller holds the directory's lock.
pub(super) fn sweep(home: &Home) -> bool {
    let Ok(processes) = processes(&home.procs) else {
        return false;
    };
    let mut alone = true;
    for process in processes {
        match open_to_watch(home.signs(), process) {
            Peer::Dead => match leases::all_ended(home.signs(), process) {
                Ok(true) => {
                    remove(home, process);
                    promised::remove(&home.dir, process);
                }
                // Without its leases nobody knows how long its promise lasts.
                Err(Errno::NOENT) => remove(home, process),
                Ok(false) | Err(_) => {}
            },
            Peer::Alive(_) | Peer::Unknown(_) => alone = false,
        }
    }
    alone
}
