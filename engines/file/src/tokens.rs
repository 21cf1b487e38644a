//! `Tokens`: the clock that tokens are taken from, and the synced ceiling that they stay below.
//!
//! A token is the greater of the line's last one plus 1 and the token clock: microseconds since the
//! boot plus a base that is fixed once per boot, so that nobody can step it. The base puts the
//! first token of a boot above the ceiling, and every token of that boot stays below the raised
//! ceiling. The ceiling is overwritten in place, alternating between two slots. So a full disk does
//! not matter, and a torn write leaves the other slot intact. A store without a readable ceiling is
//! not used.
//!
//! **What can be read need not be on disk**: the sync after a write may have failed, or its process
//! may have been killed before it. So a third slot says which ceiling was synced, and only that one
//! is relied on. It is not synced itself: without it the ceiling is just written once more.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;

use super::dir::Dir;
use super::error::{busy, file_failed, unusable_dir};
use palisade_core::engine::unix_time;
use palisade_core::{BootTime, Error, ErrorKind, Result};

pub(super) const CEILING: &str = "ceiling";

/// How far the ceiling is raised above the clock: after a boot tokens start this far ahead.
const STEP: u64 = 10 * 60 * 1_000_000;
/// The ceiling is raised when the clock is this near to it.
const NEAR: u64 = STEP / 10;
/// The offset of the second slot, in another sector.
const SLOT: u64 = 512;
/// The offset of the slot with the synced ceiling.
const SYNCED: u64 = 1024;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Tokens {
    base: u64,
    ceiling: AtomicU64,
    file: Mutex<OwnedFd>,
}

/// Creates the ceiling of a new store, or returns the ceiling of an existing one.
///
/// # Errors
/// [`ErrorKind::Unusable`] when an existing store has no readable ceiling.
pub(super) fn prepare(dir: &Dir, existed: bool) -> Result<u64> {
    match dir.open_file(&dir.fd, CEILING, OFlags::RDWR) {
        Ok(file) => Ok(Ceilings::read(dir, &file)?.highest),
        Err(Errno::NOENT) if existed => Err(unreadable(dir)),
        Err(Errno::NOENT) => {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
            let make = || {
                let file = dir.open_file(&dir.fd, CEILING, flags)?;
                write(&file, 0, 0)?;
                write(&file, SLOT, 0)?;
                rustix::fs::fsync(&file)?;
                rustix::fs::fsync(&dir.fd)
            };
            make().map_err(|errno| unusable_dir(&dir.path, errno))?;
            Ok(0)
        }
        Err(errno) => Err(unusable_dir(&dir.path, errno)),
    }
}

/// The base of a boot: the clock starts above the ceiling, and not before the time of day.
pub(super) fn base(ceiling: u64) -> u64 {
    let micros = unix_time().as_micros() as u64;
    let since_boot = BootTime::now().as_nanos() / 1000;
    micros.max(ceiling + 1).saturating_sub(since_boot)
}

impl Tokens {
    pub(super) fn open(dir: &Dir, base: u64) -> Result<Self> {
        let file = match dir.open_file(&dir.fd, CEILING, OFlags::RDWR) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Err(unreadable(dir)),
            Err(errno) => return Err(unusable_dir(&dir.path, errno)),
        };
        Ok(Self {
            base,
            ceiling: AtomicU64::new(Ceilings::read(dir, &file)?.synced),
            file: Mutex::new(file),
        })
    }

    /// What the clock adds to the time since the boot: different in each boot.
    pub(super) fn base(&self) -> u64 {
        self.base
    }

    /// The token clock, after ensuring that the next grants stay below the ceiling.
    ///
    /// # Errors
    /// [`ErrorKind::Unusable`] when the ceiling can't be raised: then nobody can be granted.
    pub(super) fn clock(&self, operation: &'static str, dir: &Dir) -> Result<u64> {
        let now = self.base.saturating_add(BootTime::now().as_nanos() / 1000);
        if now + NEAR > self.ceiling.load(Ordering::Acquire) {
            let raised = self.raise(operation, dir, now)?;
            self.ceiling.fetch_max(raised, Ordering::AcqRel);
        }
        Ok(now)
    }

    fn raise(&self, operation: &'static str, dir: &Dir, now: u64) -> Result<u64> {
        let path = dir.path.join(CEILING);
        let fail = |errno| file_failed(operation, &path, errno);
        let file = self.file.lock();
        lock(&file).map_err(|errno| match errno {
            Errno::WOULDBLOCK => busy(operation, PATIENCE, &path),
            errno => fail(errno),
        })?;
        let raised = Ceilings::read(dir, &file).and_then(|found| {
            // Another process was faster.
            if now + NEAR <= found.synced {
                return Ok(found.synced);
            }
            // Never lower than one that may have reached the disk.
            let ceiling = (now + STEP).max(found.highest);
            let written = write(&file, found.free, ceiling);
            written
                .and_then(|()| rustix::fs::fsync(&*file))
                .map_err(fail)?;
            // If this fails, the next process writes the ceiling once more.
            let _ = write(&file, SYNCED, ceiling);
            Ok(ceiling)
        });
        // Unlocking our own open file can't fail.
        let _ = rustix::fs::flock(&*file, FlockOperation::Unlock);
        raised
    }
}

/// Raising takes a sync; if it takes longer than this, it hangs.
const PATIENCE: Duration = Duration::from_millis(500);

fn lock(file: &OwnedFd) -> std::result::Result<(), Errno> {
    let deadline = BootTime::now() + PATIENCE;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK | Errno::INTR) if !deadline.has_passed() => {
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done,
        }
    }
}

/// What the file says.
struct Ceilings {
    highest: u64,
    /// The one that is known to be on disk; 0 if none is.
    synced: u64,
    /// The slot to write to: not the one that is needed if that write is torn.
    free: u64,
}

impl Ceilings {
    fn read(dir: &Dir, file: &OwnedFd) -> Result<Self> {
        let mut bytes = [0; SYNCED as usize + 64];
        let fail = |errno| file_failed("connect", &dir.path.join(CEILING), errno);
        let length = rustix::io::pread(file, &mut bytes, 0).map_err(fail)?;
        let slot = |at: u64| slot(bytes[..length].get(at as usize..)?);
        let (first, second) = (slot(0), slot(SLOT));
        let highest = first.max(second).ok_or_else(|| unreadable(dir))?;
        let synced = slot(SYNCED).filter(|synced| [first, second].contains(&Some(*synced)));
        let free = if first == Some(synced.unwrap_or(highest)) {
            SLOT
        } else {
            0
        };
        Ok(Self {
            highest,
            synced: synced.unwrap_or(0),
            free,
        })
    }
}

fn slot(bytes: &[u8]) -> Option<u64> {
    let bytes = &bytes[..bytes.len().min(64)];
    let line = bytes.split(|byte| *byte == b'\n').next()?;
    let (value, sum) = std::str::from_utf8(line).ok()?.split_once(' ')?;
    let sum = u64::from_str_radix(sum.trim_end_matches('\0'), 16).ok()?;
    (sum == checksum(value)).then(|| value.parse().ok())?
}

fn write(file: &OwnedFd, at: u64, ceiling: u64) -> std::result::Result<(), Errno> {
    let value = ceiling.to_string();
    let line = format!("{value} {:016x}\n", checksum(&value));
    if rustix::io::pwrite(file, line.as_bytes(), at)? != line.len() {
        return Err(Errno::NOSPC);
    }
    Ok(())
}

/// FNV-1a: detects a torn or edited line.
fn checksum(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn unreadable(dir: &Dir) -> Error {
    let message = format!(
        "{} is missing or corrupt: tokens could decrease; restore it, or use another directory",
        dir.path.join(CEILING).display()
    );
    Error::new(ErrorKind::Unusable, "connect", message)
}
