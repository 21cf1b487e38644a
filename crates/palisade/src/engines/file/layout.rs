//! What a store remembers across processes and boots: the files `boot` and `ceiling`.
//!
//! `boot` says of which layout, boot and time namespace the lines are, since absolute times of
//! CLOCK_BOOTTIME and a file that was never synced mean nothing in another; and which lock file
//! guards them, so that nobody joins live processes with another one. `ceiling` is the
//! synced bound of all tokens; it only rises, and a store without a readable one is not used.
//! Both are replaced whole (new file, sync, rename, sync of the directory).

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::dir::{Dir, LINES, unusable_dir};
use crate::core::error::{Error, Kind, Result};

const LAYOUT: u32 = 1;
const BOOT: &str = "boot";
const CEILING: &str = "ceiling";

/// What the ceiling is kept ahead of every token, at least: an hour of microseconds.
const AHEAD: u64 = 3_600_000_000;

/// From this size on, lines that nobody is in any more are thrown away when the store is opened:
/// every page is checked then, and a store that was once large would make every start slow.
const LARGE: i64 = 512 * 1024;

fn config(message: String) -> Error {
    Error::new(Kind::Config, "connect", message)
}

/// Makes the directory one of this boot: checks the layout, and throws the lines away if they
/// are of another boot, or large and of nobody who lives. `lock` is the locked writer lock, `alive` says whether any process of the
/// store lives.
///
/// # Errors
/// [`Kind::Config`] for another layout or a time namespace that differs from that of live
/// processes, [`Kind::Unusable`] for files that can't be read or were deleted in use.
pub(super) fn prepare(dir: &Dir, lock: &OwnedFd, alive: bool) -> Result<()> {
    let stat = rustix::fs::fstat(lock).map_err(|errno| unusable_dir(&dir.path, errno))?;
    let now = Boot::current(stat.st_ino)?;
    let data = format!("{LINES}/{}", super::lmdb::FILE);
    let found = match read(dir, BOOT)? {
        Some(text) => Some(Boot::parse(dir, &text)?),
        None => None,
    };
    if found.as_ref() == Some(&now) {
        let size = rustix::fs::statat(&dir.fd, &*data, AtFlags::empty()).map(|stat| stat.st_size);
        return match size {
            Err(_) if alive => Err(deleted(dir)),
            Ok(LARGE..) if !alive => throw_away(dir, &data),
            _ => Ok(()),
        };
    }
    if alive {
        if found.is_none_or(|found| found.same_clock(&now)) {
            return Err(deleted(dir));
        }
        return Err(config(format!(
            "directory {} is in use by processes of another time namespace or machine; \
             use another directory",
            dir.path.display()
        )));
    }
    if read(dir, CEILING)?.is_none() {
        if found.is_some() {
            return Err(no_ceiling(dir));
        }
        write_ceiling(dir, 0)?;
    }
    throw_away(dir, &data)?;
    replace(dir, BOOT, &now.to_text())
}

fn throw_away(dir: &Dir, data: &str) -> Result<()> {
    match rustix::fs::unlinkat(&dir.fd, data, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(unusable_dir(&dir.path, errno)),
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Boot {
    id: String,
    time_namespace: u64,
    lock: u64,
}

impl Boot {
    fn current(lock: u64) -> Result<Self> {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|error| {
            config("the id of this boot can't be read; file: needs /proc".into()).because(error)
        })?;
        // Kernels without time namespaces have no such file.
        let time_namespace = std::fs::metadata("/proc/self/ns/time").map_or(0, |file| file.ino());
        Ok(Self {
            id: id.trim().to_owned(),
            time_namespace,
            lock,
        })
    }

    fn same_clock(&self, other: &Self) -> bool {
        (&self.id, self.time_namespace) == (&other.id, other.time_namespace)
    }

    fn to_text(&self) -> String {
        format!(
            "palisade store {LAYOUT}\n{}\n{}\n{}\n",
            self.id, self.time_namespace, self.lock
        )
    }

    fn parse(dir: &Dir, text: &str) -> Result<Self> {
        let mut lines = text.lines();
        let layout = lines.next().and_then(|l| l.strip_prefix("palisade store "));
        let layout = layout.and_then(|layout| layout.parse::<u32>().ok());
        match layout {
            Some(LAYOUT) => {}
            Some(other) => {
                return Err(config(format!(
                    "directory {} has layout {other}, this palisade knows {LAYOUT}; use the \
                     version that made it, or another directory",
                    dir.path.display()
                )));
            }
            None => return Err(garbled(dir, BOOT)),
        }
        let id = lines.next();
        let mut number = || lines.next().and_then(|line| line.parse().ok());
        match (id, number(), number()) {
            (Some(id), Some(time_namespace), Some(lock)) => Ok(Self {
                id: id.to_owned(),
                time_namespace,
                lock,
            }),
            _ => Err(garbled(dir, BOOT)),
        }
    }
}

fn garbled(dir: &Dir, file: &str) -> Error {
    Error::new(
        Kind::Unusable,
        "connect",
        format!(
            "{} is garbled; {}",
            dir.path.join(file).display(),
            match file {
                BOOT => "remove it: lines start empty then, tokens go on above the ceiling",
                _ => "restore it, or use another directory: tokens could go back",
            }
        ),
    )
}

fn deleted(dir: &Dir) -> Error {
    Error::new(
        Kind::Unusable,
        "connect",
        format!(
            "files of directory {} were deleted or replaced while processes use it; stop those, \
             or use another directory",
            dir.path.display()
        ),
    )
}

fn no_ceiling(dir: &Dir) -> Error {
    Error::new(
        Kind::Unusable,
        "connect",
        format!(
            "{} is missing: tokens could go back; restore it or use another directory",
            dir.path.join(CEILING).display()
        ),
    )
}

/// Reads the ceiling.
///
/// # Errors
/// [`Kind::Unusable`] when it is missing or its checksum is wrong: it is never reset silently.
pub(super) fn read_ceiling(dir: &Dir) -> Result<u64> {
    let text = read(dir, CEILING)?.ok_or_else(|| no_ceiling(dir))?;
    let parsed = text.trim_end().split_once(' ').and_then(|(value, sum)| {
        let sum = u64::from_str_radix(sum, 16).ok()?;
        (sum == checksum(value)).then(|| value.parse().ok())?
    });
    parsed.ok_or_else(|| garbled(dir, CEILING))
}

/// Makes the ceiling durable before any token nears it. Returns what it is now.
pub(super) fn raise_ceiling(dir: &Dir, last: u64, ceiling: u64) -> Result<u64> {
    let raised = read_ceiling(dir)?
        .max(ceiling)
        .max(last.saturating_add(3 * AHEAD));
    write_ceiling(dir, raised)?;
    Ok(raised)
}

/// Whether the ceiling must be raised before tokens above `last` are given.
pub(super) fn is_near(last: u64, ceiling: u64) -> bool {
    last.saturating_add(AHEAD) > ceiling
}

fn write_ceiling(dir: &Dir, ceiling: u64) -> Result<()> {
    let value = ceiling.to_string();
    replace(
        dir,
        CEILING,
        &format!("{value} {:016x}\n", checksum(&value)),
    )
}

/// FNV-1a: tells a torn or edited file from a whole one.
fn checksum(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn read(dir: &Dir, file: &str) -> Result<Option<String>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let mut text = String::new();
    let mut read = || {
        let file = File::from(rustix::fs::openat(&dir.fd, file, flags, Mode::empty())?);
        file.take(4096).read_to_string(&mut text)
    };
    match read() {
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => Ok(Some(String::new())),
        Err(error) => Err(unusable_dir(&dir.path, error)),
    }
}

fn replace(dir: &Dir, file: &str, text: &str) -> Result<()> {
    let new = format!("{file}.new");
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let write = || -> std::io::Result<()> {
        let mode = Mode::RUSR | Mode::WUSR;
        let mut out = File::from(rustix::fs::openat(&dir.fd, &new, flags, mode)?);
        out.write_all(text.as_bytes())?;
        out.sync_all()?;
        rustix::fs::renameat(&dir.fd, &new, &dir.fd, file)?;
        rustix::fs::fsync(&dir.fd)?;
        Ok(())
    };
    write().map_err(|error| unusable_dir(&dir.path, error))
}

/// Microseconds of Unix time.
pub(super) fn unix_micros() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as u64)
}
