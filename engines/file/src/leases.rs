//! `Leases`: the renewals of this process, in a file of its own, and how others read it.
//!
//! A line records the expiry that a claim had when it entered. Renewals don't touch the line: they
//! go to the claim's slot in the file of its process, so that one write renews many. Others read a
//! slot only when the expiry in the line has passed.
//!
//! **An ended lease is never revived.** A process renews under an exclusive `flock` on its file,
//! and only leases that have not ended by then; others read under a shared one. So a lease that has
//! ended when they read it stays ended, and its owner learns of that at its next renewal.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;

use super::boot::{Home, LEASES};
use super::dir::identity;
use super::liveness::{Liveness, file_name};
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

fn open(home: &Home, process: u64, flags: OFlags) -> Result<OwnedFd, Errno> {
    let (dir, folder) = (&home.dir, &home.leases);
    dir.open_file(folder, &file_name(process), flags)
}

/// Creates the file of a process, with room for its first claims.
pub(super) fn create(home: &Home, process: u64) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let file = open(home, process, flags)?;
    // Writing the first byte allocates a block.
    match rustix::io::pwrite(&file, &[0; SLOT], 0)? {
        SLOT => Ok(file),
        _ => Err(Errno::NOSPC),
    }
}

/// Whether all claims of a process have ended, according to its file.
pub(super) fn all_ended(home: &Home, process: u64) -> bool {
    let mut until = [0; 8];
    let file = open(home, process, OFlags::RDONLY);
    match file.and_then(|file| rustix::io::pread(&file, &mut until, 0)) {
        Ok(8) => BootTime::from_nanos(u64::from_le_bytes(until)).has_passed(),
        _ => true,
    }
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
    /// The file does not exist, or can't be read.
    Missing,
}

/// Looks up a claim of another process.
pub(super) fn look_up(home: &Home, process: u64, slot: u32, id: ClaimId) -> Found {
    let Ok(file) = open(home, process, OFlags::RDONLY) else {
        return Found::Missing;
    };
    let locked = lock_soon(&file, false);
    let mut bytes = [0; SLOT];
    let slot = match rustix::io::pread(&file, &mut bytes, offset(slot)) {
        Ok(SLOT) => Some(Slot::read(&bytes)).filter(|slot| slot.is_of(id)),
        Ok(_) => None,
        Err(_) => return Found::Missing,
    };
    match slot {
        slot if !locked => Found::Busy(slot.map_or(BootTime::PAST, |slot| slot.expires)),
        Some(slot) => Found::Until(slot.expires),
        None => Found::Nothing,
    }
}

/// Marks a claim as evicted in the file of its process, so that its renewals see it. `until` is the
/// expiry in the line. Returns `false` if the file can't be locked or written now: a process that
/// was stopped during a renewal would later renew what was taken away.
#[must_use]
pub(super) fn mark(home: &Home, process: u64, slot: u32, id: ClaimId, until: BootTime) -> bool {
    // A process whose file is gone learns that at its next renewal.
    let Ok(file) = open(home, process, OFlags::RDWR) else {
        return true;
    };
    if !lock_soon(&file, true) {
        return false;
    }
    let mut bytes = [0; SLOT];
    let known = matches!(rustix::io::pread(&file, &mut bytes, offset(slot)), Ok(SLOT));
    let found = Slot::read(&bytes);
    let renewed = known && found.is_of(id) && until != BootTime::PAST;
    let expires = if renewed { found.expires } else { until };
    Slot::new(id, expires, true).write(&mut bytes);
    rustix::io::pwrite(&file, &bytes, offset(slot)) == Ok(SLOT)
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

    /// Whether the file is still at the store's path.
    pub(super) fn is_in_place(&self) -> bool {
        let named = rustix::fs::lstat(self.path());
        match (named, rustix::fs::fstat(self.file())) {
            (Ok(named), Ok(own)) => {
                identity(&named) == identity(&own) && own.st_size >= SLOT as i64
            }
            _ => false,
        }
    }

    /// Registers a claim that is about to get its place, and assigns a slot to it.
    pub(super) fn add(&self, id: ClaimId, mine: Mine) -> Result<u32, Errno> {
        let table = &mut *self.table.lock();
        self.reach(table, mine.expires)?;
        let slot = table.free.pop().unwrap_or(table.slots);
        let end = offset(slot) + SLOT as u64;
        if end > table.reserved.max(4096) {
            let length = (end * 2).next_multiple_of(4096);
            rustix::fs::fallocate(self.file(), FallocateFlags::empty(), 0, length)?;
            table.reserved = length;
        }
        table.slots = table.slots.max(slot + 1);
        if let Some(before) = table.claims.insert(id, Mine { slot, ..mine }) {
            table.free.push(before.slot);
        }
        Ok(slot)
    }

    /// Raises the first word of the file, so that claims of this process may last until then.
    fn reach(&self, table: &mut Table, expires: BootTime) -> Result<(), Errno> {
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

    /// The sequence of a claim of this process; 0 until it is known to be granted.
    pub(super) fn sequence(&self, id: ClaimId) -> Option<u64> {
        self.table.lock().claims.get(&id).map(|mine| mine.sequence)
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
