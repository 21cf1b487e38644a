//! `Promised`: how long holders may rely on claims that end only with their lease.
//!
//! A gateway passes its holds on to clients elsewhere. A reboot of this machine discards the lines,
//! but these clients still rely on their holds. So each process has a file of its own in `promised/`
//! with the longest ttl of its claims by lease. It is synced before such a claim enters, and after a
//! boot nothing is granted for the longest of all these. What was waited for is removed.
//!
//! A process lowers only its own promise, and only when none of its claims by lease is left or in
//! doubt: a claim counts until it was left, or until nobody can rely on it any more.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::boot::Home;
use super::dir::{self, Dir};
use super::error::unusable_dir;
use super::liveness::file_name;
use palisade_core::engine::ClaimId;
use palisade_core::{BootTime, Error, ErrorKind, Result};

pub(super) const PROMISED: &str = "promised";
/// One file for all processes, of an earlier version, while it is moved into the folder.
pub(super) const EARLIER: &str = "promised.old";
/// Its name in the folder.
const BEFORE: &str = "before";
/// How long to wait for processes that are opening the store.
const PATIENCE: Duration = Duration::from_secs(2);

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Promised {
    grants_from: BootTime,
    own: Mutex<Own>,
}

/// What this process has promised.
#[derive(Debug, Default)]
struct Own {
    /// The longest ttl that is synced, in nanoseconds.
    longest: u64,
    /// The claims that count, and until when each can be relied on.
    claims: HashMap<ClaimId, BootTime>,
}

/// When all promises of earlier boots are over, in nanoseconds of this boot. `before` identifies the
/// boot that has just ended. The caller holds the directory's lock.
pub(super) fn over_at(dir: &Dir, before: u64) -> Result<u64> {
    move_earlier(dir, before)?;
    let promises = match folder(dir)? {
        Some(folder) => read_all(dir, &folder)?,
        None => Vec::new(),
    };
    let longest = promises.iter().map(|promise| promise.longest).max();
    Ok(match longest.unwrap_or(0) {
        0 => 0,
        longest => (BootTime::now() + Duration::from_nanos(longest)).as_nanos(),
    })
}

/// Removes the promises of earlier boots once they were waited for. The caller holds the directory's
/// lock.
pub(super) fn remove_waited_for(home: &Home) -> Result<()> {
    let from = home.promised.grants_from;
    // There were none when this boot began, or they are not over.
    if from == BootTime::from_nanos(0) || !from.has_passed() {
        return Ok(());
    }
    let Some(folder) = folder(&home.dir)? else {
        return Ok(());
    };
    for promise in read_all(&home.dir, &folder)? {
        if promise.boot != home.tokens.base() {
            // If it stays, the next boot waits for it once more.
            let _ = rustix::fs::unlinkat(&folder, promise.name, AtFlags::empty());
        }
    }
    Ok(())
}

/// Removes the promise of a process that is gone, or that has nothing left to promise. It need not
/// be synced: at worst the next boot waits for it.
pub(super) fn remove(dir: &Dir, process: u64) {
    let name = format!("{PROMISED}/{}", file_name(process));
    let _ = rustix::fs::unlinkat(&dir.fd, name, AtFlags::empty());
}

impl Promised {
    pub(super) fn new(grants_from: u64) -> Self {
        Self {
            grants_from: BootTime::from_nanos(grants_from),
            own: Mutex::default(),
        }
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

    /// Syncs the ttl of a claim that is about to enter as promised, unless one at least as long
    /// already is. Returns whether the first promise was made: then call [`Promised::lower`] from
    /// time to time.
    pub(super) fn raise(
        &self,
        home: &Home,
        process: u64,
        id: ClaimId,
        ttl: Duration,
    ) -> Result<bool> {
        let asked = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        let own = &mut *self.own.lock();
        let first = own.longest == 0;
        if own.longest < asked {
            write(&home.dir, process, asked, home.tokens.base())?;
            own.longest = asked;
        }
        own.claims.insert(id, BootTime::now() + ttl);
        Ok(first)
    }

    /// Records renewals of claims.
    pub(super) fn renewed(&self, renewed: impl Iterator<Item = (ClaimId, BootTime)>) {
        let claims = &mut self.own.lock().claims;
        if claims.is_empty() {
            return;
        }
        for (id, expires) in renewed {
            if let Some(until) = claims.get_mut(&id) {
                *until = expires.max(*until);
            }
        }
    }

    /// Records that a claim was left, or never had a place.
    pub(super) fn left(&self, id: ClaimId) {
        self.own.lock().claims.remove(&id);
    }

    /// Takes the promise back if no claim counts. Returns whether it did.
    pub(super) fn lower(&self, home: &Home, process: u64) -> bool {
        let own = &mut *self.own.lock();
        if own.claims.values().any(|until| !until.has_passed()) {
            return false;
        }
        own.claims.clear();
        remove(&home.dir, process);
        own.longest = 0;
        true
    }
}

/// What one process has promised.
struct Promise {
    name: String,
    /// In nanoseconds.
    longest: u64,
    /// The base of the token clock, which identifies its boot.
    boot: u64,
}

/// The folder of promises; `None` if there are none.
fn folder(dir: &Dir) -> Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(&dir.fd, PROMISED, flags, Mode::empty()) {
        Ok(_) => dir.folder(PROMISED).map(Some),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(unusable_dir(&dir.path.join(PROMISED), errno)),
    }
}

fn read_all(dir: &Dir, folder: &OwnedFd) -> Result<Vec<Promise>> {
    let path = dir.path.join(PROMISED);
    let names = dir::names(folder).map_err(|errno| unusable_dir(&path, errno))?;
    let whole = names.into_iter().filter(|name| !name.ends_with(".new"));
    let mut promises = Vec::new();
    for name in whole {
        let Some(text) = read(dir, folder, &name)? else {
            continue;
        };
        let mut numbers = text.split_whitespace().map(str::parse);
        let (Some(Ok(longest)), Some(Ok(boot))) = (numbers.next(), numbers.next()) else {
            return Err(corrupt(dir, &format!("{PROMISED}/{name}")));
        };
        promises.push(Promise {
            name,
            longest,
            boot,
        });
    }
    Ok(promises)
}

/// The content of a file; `None` if there is none.
fn read(dir: &Dir, folder: &OwnedFd, name: &str) -> Result<Option<String>> {
    let fail = |error: std::io::Error| unusable_dir(&dir.path.join(PROMISED), error);
    let mut text = String::new();
    match dir.open_file(folder, name, OFlags::RDONLY) {
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(fail(errno.into())),
        Ok(file) => File::from(file)
            .take(64)
            .read_to_string(&mut text)
            .map_err(fail)?,
    };
    Ok(Some(text))
}

/// Syncs the promise of a process.
fn write(dir: &Dir, process: u64, longest: u64, boot: u64) -> Result<()> {
    let _locked = dir.lock(PATIENCE)?;
    move_earlier(dir, boot)?;
    let folder = dir.folder(PROMISED)?;
    let placed = place(dir, &folder, &file_name(process), longest, boot);
    placed.map_err(|error| unusable_dir(&dir.path.join(PROMISED), error))
}

fn place(dir: &Dir, folder: &OwnedFd, name: &str, longest: u64, boot: u64) -> std::io::Result<()> {
    let new = format!("{name}.new");
    // A leftover, or a link that someone placed.
    let _ = rustix::fs::unlinkat(folder, &new, AtFlags::empty());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    let mut out = File::from(dir.open_file(folder, &new, flags)?);
    writeln!(out, "{longest} {boot}")?;
    out.sync_all()?;
    rustix::fs::renameat(folder, &new, folder, name)?;
    rustix::fs::fsync(folder)?;
    Ok(rustix::fs::fsync(&dir.fd)?)
}

/// Moves the one promise of an earlier version, made in the boot `boot` at the latest, into the
/// folder. The caller holds the directory's lock.
fn move_earlier(dir: &Dir, boot: u64) -> Result<()> {
    let fail = |errno: Errno| unusable_dir(&dir.path.join(PROMISED), errno);
    match rustix::fs::statat(&dir.fd, PROMISED, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {
            rustix::fs::renameat(&dir.fd, PROMISED, &dir.fd, EARLIER).map_err(fail)?;
            rustix::fs::fsync(&dir.fd).map_err(fail)?;
        }
        Ok(_) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(fail(errno)),
    }
    // A process that was killed here has left it.
    let Some(text) = read(dir, &dir.fd, EARLIER)? else {
        return Ok(());
    };
    let longest = text.trim().parse().map_err(|_| corrupt(dir, EARLIER))?;
    let folder = dir.folder(PROMISED)?;
    let moved = place(dir, &folder, BEFORE, longest, boot);
    moved.map_err(|error| unusable_dir(&dir.path.join(PROMISED), error))?;
    rustix::fs::unlinkat(&dir.fd, EARLIER, AtFlags::empty()).map_err(fail)
}

fn corrupt(dir: &Dir, name: &str) -> Error {
    let message = format!(
        "{} is corrupt; stop what uses the store, wait for the longest ttl of its gateways, and \
         remove it",
        dir.path.join(name).display()
    );
    Error::new(ErrorKind::Unusable, "connect", message)
}
