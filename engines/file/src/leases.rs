//! `Leases`: the renewals of this process, in a file of its own, and how others read it.
//!
//! A line records the expiry that a claim had when it entered. Renewals don't touch the line: they
//! go to the claim's slot in the file of its process, so that one write renews many. Others read a
//! slot only when the expiry in the line has passed.
//!
//! **An ended lease is never revived.** A process renews under an exclusive `flock` on its file,
//! and only leases that have not ended by then; others read under a shared one. So a lease that has
//! ended when they read it stays ended, and its owner learns of that at its next renewal. A reader
//! that is stopped must not end all leases of a process: then it renews under a shared `flock` as
//! well, and such a renewal counts only if it was written before the lease would have ended.
//!
//! **Only a file that does not exist is missing.** A file that can't be read says nothing.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;

use super::boot::{Home, LEASES};
use super::dir::{identity, leads_to};
use super::liveness::{Liveness, Signs, file_name, spare_name};
use super::presence::Seen;
use palisade_core::BootTime;
use palisade_core::engine::ClaimId;

/// A claim id (its lower half), the expiry, and whether it is marked for eviction.
pub(super) const SLOT: usize = 24;

/// How far ahead the first word of the file is set. It bounds the expiry of all claims of this
/// process.
const AHEAD: Duration = Duration::from_secs(60);

/// How often to try for a lock that others hold for microseconds.
pub(super) const TRIES: u32 = 200;

/// See the module documentation.
pub(super) struct Leases {
    liveness: Arc<Liveness>,
    pub(super) table: Mutex<Table>,
}

/// The claims of this process.
#[derive(Default)]
pub(super) struct Table {
    pub(super) claims: HashMap<ClaimId, Mine>,
    free: Vec<u32>,
    slots: u32,
    /// The length of the file.
    reserved: u64,
    /// The value of its first word, in nanoseconds.
    until: u64,
}

/// A claim of this process.
pub(super) struct Mine {
    /// The file of its line.
    pub(super) file: Arc<str>,
    pub(super) inode: u64,
    pub(super) slot: u32,
    pub(super) expires: BootTime,
    pub(super) ttl: Duration,
    /// 0 until it is known to be granted.
    pub(super) sequence: u64,
    /// The state of its line in which it was seen last.
    pub(super) seen: Seen,
}

/// The content of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    tag: u64,
    pub(super) expires: BootTime,
    pub(super) evicted: bool,
}

impl Slot {
    pub(super) fn new(id: ClaimId, expires: BootTime, evicted: bool) -> Self {
        Self {
            tag: id.0 as u64,
            expires,
            evicted,
        }
    }

    pub(super) fn is_of(&self, id: ClaimId) -> bool {
        self.tag == id.0 as u64
    }

    pub(super) fn read(bytes: &[u8; SLOT]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Self {
            tag: word(0),
            expires: BootTime::from_nanos(word(8)),
            evicted: word(16) != 0,
        }
    }

    pub(super) fn write(&self, bytes: &mut [u8; SLOT]) {
        bytes[..8].copy_from_slice(&self.tag.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.expires.as_nanos().to_le_bytes());
        bytes[16..].copy_from_slice(&u64::from(self.evicted).to_le_bytes());
    }
}

/// The offset of a slot in the file.
pub(super) fn offset(slot: u32) -> u64 {
    (u64::from(slot) + 1) * SLOT as u64
}

fn open(signs: Signs<'_>, process: u64, flags: OFlags) -> Result<OwnedFd, Errno> {
    signs
        .dir
        .open_file(signs.leases, &file_name(process), flags)
}

/// Creates the file of a process, with room for its first claims. `sign` is the inode of its FIFO.
pub(super) fn create(signs: Signs<'_>, process: u64, sign: u64) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let file = open(signs, process, flags)?;
    let mut head = [0; SLOT];
    head[8..16].copy_from_slice(&sign.to_le_bytes());
    // Writing the first byte allocates a block.
    match rustix::io::pwrite(&file, &head, 0)? {
        SLOT => Ok(file),
        _ => Err(Errno::NOSPC),
    }
}

/// The first word of a process's file, and the second; `None` without a file.
fn head(signs: Signs<'_>, process: u64) -> Result<Option<[u64; 2]>, Errno> {
    let file = match open(signs, process, OFlags::RDONLY) {
        Err(Errno::NOENT) => return Ok(None),
        opened => opened?,
    };
    let mut head = [[0; 8]; 2];
    let complete = rustix::io::pread(&file, head.as_flattened_mut(), 0)? == 16;
    Ok(complete.then(|| head.map(u64::from_le_bytes)))
}

/// The inode of the FIFO of a process; `None` if nothing tells it.
pub(super) fn sign(signs: Signs<'_>, process: u64) -> Result<Option<u64>, Errno> {
    // Without a readable file, and for processes of earlier versions, the second link decides: it
    // needs no file descriptor.
    if let Ok(Some([_, sign])) = head(signs, process)
        && sign != 0
    {
        return Ok(Some(sign));
    }
    let name = spare_name(process);
    match rustix::fs::statat(signs.leases, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat.st_ino)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Whether all claims of a process have ended, according to its file.
///
/// # Errors
/// [`Errno::NOENT`] without a whole file; when it can't be read.
pub(super) fn all_ended(signs: Signs<'_>, process: u64) -> Result<bool, Errno> {
    let [until, _] = head(signs, process)?.ok_or(Errno::NOENT)?;
    Ok(BootTime::from_nanos(until).has_passed())
}

/// Takes a `flock` that others hold for microseconds at a time. Returns whether it was acquired.
pub(super) fn lock_soon(file: impl AsFd, exclusive: bool) -> bool {
    let how = if exclusive {
        FlockOperation::NonBlockingLockExclusive
    } else {
        FlockOperation::NonBlockingLockShared
    };
    (0..TRIES).any(|_| {
        let locked = rustix::fs::flock(&file, how).is_ok();
        if !locked {
            std::thread::yield_now();
        }
        locked
    })
}

/// What the file of another process says about a claim.
pub(super) enum Found {
    /// It was renewed until then.
    Until(BootTime),
    /// It was not renewed.
    Nothing,
    /// Its process holds the lock, or was stopped while holding it; the value is the last one
    /// written.
    Busy(BootTime),
    /// The file does not exist.
    Missing,
    /// The file can't be read, which says nothing.
    Unreadable(Errno),
}

/// Looks up a claim of another process.
pub(super) fn look_up(home: &Home, process: u64, slot: u32, id: ClaimId) -> Found {
    let read = || {
        let file = open(home.signs(), process, OFlags::RDONLY)?;
        let locked = lock_soon(&file, false);
        let once = || {
            let mut bytes = [0; SLOT];
            let complete = rustix::io::pread(&file, &mut bytes, offset(slot))? == SLOT;
            let slot = Slot::read(&bytes);
            Ok((complete && slot.is_of(id)).then_some(slot))
        };
        let (slot, again) = (once()?, once()?);
        // Its process may be renewing under a shared lock.
        Ok((slot, locked && slot == again))
    };
    match read() {
        Ok((slot, false)) => Found::Busy(slot.map_or(BootTime::PAST, |slot| slot.expires)),
        Ok((Some(slot), true)) => Found::Until(slot.expires),
        Ok((None, true)) => Found::Nothing,
        Err(Errno::NOENT) => Found::Missing,
        Err(errno) => Found::Unreadable(errno),
    }
}

/// Marks a claim as evicted in the file of its process, so that its renewals see it. `until` is the
/// expiry in the line. Returns `false` if the file can't be locked now: a process that was stopped
/// during a renewal would later renew what was taken away.
///
/// # Errors
/// When the file can't be opened, read or written: then the claim is not marked.
pub(super) fn mark(
    home: &Home,
    process: u64,
    slot: u32,
    id: ClaimId,
    until: BootTime,
) -> Result<bool, Errno> {
    let file = match open(home.signs(), process, OFlags::RDWR) {
        // A process whose file is gone learns that at its next renewal.
        Err(Errno::NOENT) => return Ok(true),
        opened => opened?,
    };
    if !lock_soon(&file, true) {
        return Ok(false);
    }
    let mut bytes = [0; SLOT];
    let known = rustix::io::pread(&file, &mut bytes, offset(slot))? == SLOT;
    let found = Slot::read(&bytes);
    let renewed = known && found.is_of(id) && until != BootTime::PAST;
    let expires = if renewed { found.expires } else { until };
    Slot::new(id, expires, true).write(&mut bytes);
    match rustix::io::pwrite(&file, &bytes, offset(slot))? {
        SLOT => Ok(true),
        _ => Err(Errno::NOSPC),
    }
}

impl Leases {
    pub(super) fn new(liveness: Arc<Liveness>) -> Self {
        Self {
            liveness,
            table: Mutex::default(),
        }
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.liveness.leases
    }

    pub(super) fn path(&self) -> PathBuf {
        let home = &self.liveness.home;
        let folder = home.dir.path.join(LEASES);
        folder.join(file_name(self.liveness.process))
    }

    /// Whether the file is still at the store's path, with its content.
    pub(super) fn is_in_place(&self) -> Result<bool, Errno> {
        let own = rustix::fs::fstat(self.file())?;
        Ok(own.st_size >= SLOT as i64 && leads_to(&self.path(), identity(&own))?)
    }

    /// Registers a claim that is about to get its place, and assigns a slot to it.
    pub(super) fn add(&self, id: ClaimId, mine: Mine) -> Result<u32, Errno> {
        let table = &mut *self.table.lock();
        self.reach(table, mine.expires)?;
        let slot = table.free.pop().unwrap_or(table.slots);
        let end = offset(slot) + SLOT as u64;
        if end > table.reserved.max(4096) {
            let length = (end * 2).next_multiple_of(4096);
            match rustix::fs::fallocate(self.file(), FallocateFlags::empty(), 0, length) {
                Ok(()) | Err(Errno::OPNOTSUPP) => table.reserved = length,
                Err(errno) => return Err(errno),
            }
        }
        table.slots = table.slots.max(slot + 1);
        if let Some(before) = table.claims.insert(id, Mine { slot, ..mine }) {
            table.free.push(before.slot);
        }
        Ok(slot)
    }

    /// Raises the first word of the file, so that claims of this process may last until then.
    pub(super) fn reach(&self, table: &mut Table, expires: BootTime) -> Result<(), Errno> {
        if expires.as_nanos() > table.until {
            let until = expires + AHEAD;
            let bytes = until.as_nanos().to_le_bytes();
            rustix::io::pwrite(self.file(), &bytes, 0)?;
            table.until = until.as_nanos();
        }
        Ok(())
    }

    /// Records that something other than a claim of a line lasts until then. So the FIFO of this
    /// process is kept for those that must notice its death.
    #[cfg(feature = "queue")]
    pub(super) fn cover(&self, expires: BootTime) -> Result<(), Errno> {
        self.reach(&mut self.table.lock(), expires)
    }

    /// Forgets a claim that is no longer in any line.
    pub(super) fn forget(&self, id: ClaimId) {
        self.table.lock().forget(id);
    }

    /// The expiry of a claim of this process.
    pub(super) fn expires(&self, id: ClaimId) -> Option<BootTime> {
        self.table.lock().claims.get(&id).map(|mine| mine.expires)
    }

    /// Records a grant.
    pub(super) fn granted(&self, id: ClaimId, sequence: u64) {
        if let Some(mine) = self.table.lock().claims.get_mut(&id) {
            mine.sequence = sequence;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.table.lock().claims.is_empty()
    }
}

impl Table {
    pub(super) fn forget(&mut self, id: ClaimId) {
        if let Some(mine) = self.claims.remove(&id) {
            self.free.push(mine.slot);
        }
    }
}
