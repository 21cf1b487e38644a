//! `Promised`: how long holders may rely on claims that end only with their lease.
//!
//! A gateway passes its holds on to clients elsewhere. A reboot of this machine discards the lines,
//! but these clients still rely on their holds. So the longest ttl of such a claim is synced before
//! the claim enters, and after a boot nothing is granted for that long.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, OFlags};
use rustix::io::Errno;

use super::dir::Dir;
use super::error::unusable_dir;
use palisade_core::{BootTime, Error, ErrorKind, Result};

pub(super) const PROMISED: &str = "promised";
const NEW: &str = "boot.new";
/// How long to wait for processes that are opening the store.
const PATIENCE: Duration = Duration::from_secs(2);

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Promised {
    /// The longest ttl that is synced, in nanoseconds.
    longest: AtomicU64,
    grants_from: BootTime,
}

/// When all promises of earlier boots are over, in nanoseconds of this boot.
pub(super) fn over_at(dir: &Dir) -> Result<u64> {
    match read(dir)? {
        0 => Ok(0),
        longest => Ok((BootTime::now() + Duration::from_nanos(longest)).as_nanos()),
    }
}

impl Promised {
    pub(super) fn open(dir: &Dir, grants_from: u64) -> Result<Self> {
        Ok(Self {
            longest: AtomicU64::new(read(dir)?),
            grants_from: BootTime::from_nanos(grants_from),
        })
    }

    /// Refuses to grant while a client may still rely on a promise of an earlier boot.
    pub(super) fn all_over(&self, operation: &'static str) -> Result<()> {
        let left = self.grants_from.remaining();
        if left.is_zero() {
            return Ok(());
        }
        let message = format!(
            "the machine was rebooted, and clients of a gateway may still rely on earlier holds; \
             nothing is granted for the next {} s",
            left.as_secs() + 1
        );
        Err(Error::new(ErrorKind::Unreachable, operation, message))
    }

    /// Syncs this ttl as promised, unless one at least as long already is.
    pub(super) fn raise(&self, dir: &Dir, ttl: Duration) -> Result<()> {
        let asked = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        if self.longest.load(Ordering::Acquire) >= asked {
            return Ok(());
        }
        let _locked = dir.lock(PATIENCE)?;
        let longest = read(dir)?.max(asked);
        let write = || -> std::io::Result<()> {
            let _ = rustix::fs::unlinkat(&dir.fd, NEW, AtFlags::empty());
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
            let mut out = File::from(dir.open_file(&dir.fd, NEW, flags)?);
            writeln!(out, "{longest}")?;
            out.sync_all()?;
            rustix::fs::renameat(&dir.fd, NEW, &dir.fd, PROMISED)?;
            rustix::fs::fsync(&dir.fd)?;
            Ok(())
        };
        write().map_err(|error| unusable_dir(&dir.path, error))?;
        self.longest.store(longest, Ordering::Release);
        Ok(())
    }
}

/// The longest promised ttl in nanoseconds; 0 if there is none.
fn read(dir: &Dir) -> Result<u64> {
    let mut text = String::new();
    match dir.open_file(&dir.fd, PROMISED, OFlags::RDONLY) {
        Err(Errno::NOENT) => return Ok(0),
        Err(errno) => return Err(unusable_dir(&dir.path, errno)),
        Ok(file) => File::from(file)
            .take(64)
            .read_to_string(&mut text)
            .map_err(|error| unusable_dir(&dir.path, error))?,
    };
    text.trim().parse().map_err(|_| {
        let message = format!(
            "{} is corrupt; stop what uses the store, wait for the longest ttl of its gateways, \
             and remove it",
            dir.path.join(PROMISED).display()
        );
        Error::new(ErrorKind::Unusable, "connect", message)
    })
}
