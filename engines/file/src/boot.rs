//! `Home`: a directory that is a store of this boot.
//!
//! The file `boot` records the layout, boot and time namespace of the lines, since absolute times
//! of CLOCK_BOOTTIME and files that were never synced mean nothing in another boot. Creating a
//! store, taking over one of an earlier boot and joining it are one critical section: a process
//! that leaves it has its FIFO in a store of this boot.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use rustix::fs::{AtFlags, OFlags};

use super::dir::{self, Dir, Identity, identity};
use super::error::{unseen_sign, unusable_dir};
use super::line_file::LineFile;
use super::liveness::{self, Liveness, Signs};
use super::promised::{self, EARLIER, PROMISED, Promised};
use super::tokens::{self, CEILING, Tokens};
use palisade_core::engine::config_error;
use palisade_core::{Error, ErrorKind, Result};

/// Layout 1 was a database in one file.
const LAYOUT: u32 = 2;
/// The file that marks a directory as a store.
pub(super) const BOOT: &str = "boot";
const NEW: &str = "boot.new";

pub(super) const LINES: &str = "lines";
pub(super) const PROCS: &str = "procs";
pub(super) const LEASES: &str = "leases";
/// Kept across boots.
pub(super) const QUEUES: &str = "queues";

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Home {
    pub(super) dir: Dir,
    /// A file per line.
    pub(super) lines: OwnedFd,
    pub(super) lines_identity: Identity,
    /// One FIFO per process, which shows that it is alive.
    pub(super) procs: OwnedFd,
    /// One file of renewed leases per process.
    pub(super) leases: OwnedFd,
    pub(super) tokens: Tokens,
    pub(super) promised: Promised,
}

impl Home {
    /// Whether the store's path still leads to the directory of lines that was joined.
    pub(super) fn lines_are_in_place(&self) -> rustix::io::Result<bool> {
        dir::leads_to(&self.dir.path.join(LINES), self.lines_identity)
    }

    pub(super) fn signs(&self) -> Signs<'_> {
        Signs {
            dir: &self.dir,
            procs: &self.procs,
            leases: &self.leases,
        }
    }
}

/// Makes `dir` a store of this boot if it is none, and joins it. Blocks for at most about
/// `timeout`.
///
/// # Errors
/// [`ErrorKind::Config`] for a directory with foreign files or another layout, or one that
/// processes of another time namespace use; [`ErrorKind::Unusable`] for unreadable files;
/// [`ErrorKind::Unreachable`] when a stopped process holds its lock.
pub(super) fn join(dir: Dir, timeout: Duration) -> Result<Liveness> {
    if read(&dir, BOOT)?.is_none()
        && let Err(foreign) = refuse_foreign(&dir)
        // Another process may have created it since: `boot` is written before anything else.
        && read(&dir, BOOT)?.is_none()
    {
        return Err(foreign);
    }
    let locked = dir.lock(timeout)?;
    let now = Boot::current()?;
    let found = match read(&dir, BOOT)? {
        Some(text) => Some(Boot::parse(&dir, &text)?),
        None => None,
    };
    let mut old = Vec::new();
    let boot = match found {
        Some(boot) if boot.id == now.id && boot.time_namespace == now.time_namespace => boot,
        found => {
            match &found {
                Some(found) => refuse_living(&dir, found, &now)?,
                None => refuse_foreign(&dir)?,
            }
            if found.is_some() {
                old = put_away(&dir)?;
            }
            let ceiling = tokens::prepare(&dir, found.is_some())?;
            let boot = Boot {
                base: tokens::base(ceiling),
                grants_from: promised::over_at(&dir, found.map_or(0, |found| found.base))?,
                ..now
            };
            write(&dir, &boot)?;
            boot
        }
    };
    let lines = dir.folder(LINES)?;
    let stat = rustix::fs::fstat(&lines).map_err(|errno| unusable_dir(&dir.path, errno))?;
    let home = Home {
        lines,
        lines_identity: identity(&stat),
        procs: dir.folder(PROCS)?,
        leases: dir.folder(LEASES)?,
        tokens: Tokens::open(&dir, boot.base)?,
        promised: Promised::new(boot.grants_from),
        dir,
    };
    let alone = liveness::sweep(&home);
    promised::remove_waited_for(&home)?;
    if alone {
        LineFile::remove_unfinished(&home);
    }
    let liveness = Liveness::create(home, alone)?;
    drop(locked);
    for name in old {
        // Files of other users may stay, since they do no harm.
        let _ = std::fs::remove_dir_all(liveness.home.dir.path.join(name));
    }
    Ok(liveness)
}

/// Refuses a directory with foreign files.
fn refuse_foreign(dir: &Dir) -> Result<()> {
    for name in dir.entries()? {
        let ours = match name.as_str() {
            "lock" | "fences" | QUEUES | CEILING | PROMISED | EARLIER | BOOT | NEW => true,
            LINES | PROCS | LEASES => {
                // Empty directories are left by a process that was killed here.
                let names = dir::names(dir.folder(&name)?);
                let failed = |errno| unusable_dir(&dir.path.join(&name), errno);
                names.map_err(failed)?.is_empty()
            }
            other => other.starts_with("raw-"),
        };
        if !ours {
            return Err(config_error(format!(
                "directory {} is not empty and no store of palisade (it has {name:?}); use an \
                 empty or a new directory",
                dir.path.display()
            )));
        }
    }
    Ok(())
}

/// FIFOs of another boot belong to dead processes. But a container may have its own boot id or
/// clock, and then the FIFOs of its live processes are locked.
fn refuse_living(dir: &Dir, found: &Boot, now: &Boot) -> Result<()> {
    let (procs, leases) = (dir.folder(PROCS)?, dir.folder(LEASES)?);
    let signs = Signs {
        dir,
        procs: &procs,
        leases: &leases,
    };
    let path = |name: &str| dir.path.join(PROCS).join(name);
    let alive = match liveness::any_alive(signs) {
        Ok(None) => return Ok(()),
        Ok(Some(name)) => path(&name),
        Err((name, errno)) => return Err(unseen_sign(&path(&name.unwrap_or_default()), errno)),
    };
    let what = if found.id == now.id {
        "another time namespace"
    } else {
        "another boot id (a container with its own, or another machine)"
    };
    Err(config_error(format!(
        "directory {} is in use by processes of {what}, as {} shows; use another directory",
        dir.path.display(),
        alive.display()
    )))
}

/// Renames the data of another boot, and returns the new names, which the caller removes.
fn put_away(dir: &Dir) -> Result<Vec<String>> {
    let mut old: Vec<String> = dir.entries()?;
    // Leftovers that an earlier process did not remove.
    old.retain(|name| name.starts_with("old-"));
    for folder in [LINES, PROCS, LEASES] {
        let to = format!("old-{folder}-{:016x}", rand::random::<u64>());
        match rustix::fs::renameat(&dir.fd, folder, &dir.fd, &to) {
            Ok(()) => old.push(to),
            Err(rustix::io::Errno::NOENT) => {}
            Err(errno) => return Err(unusable_dir(&dir.path, errno)),
        }
    }
    Ok(old)
}

#[derive(Debug)]
struct Boot {
    id: String,
    time_namespace: u64,
    /// What the token clock adds to the time since the boot.
    base: u64,
    /// Nothing is granted before this time of the boot, in nanoseconds, because holders may still
    /// rely on promises of an earlier boot.
    grants_from: u64,
}

impl Boot {
    fn current() -> Result<Self> {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|error| {
            config_error("the id of this boot can't be read; file: needs /proc").because(error)
        })?;
        Ok(Self {
            id: id.trim().to_owned(),
            // Kernels without time namespaces don't have this file.
            time_namespace: std::fs::metadata("/proc/self/ns/time").map_or(0, |file| file.ino()),
            base: 0,
            grants_from: 0,
        })
    }

    fn parse(dir: &Dir, text: &str) -> Result<Self> {
        let mut lines = text.lines();
        let layout = lines.next().and_then(|l| l.strip_prefix("palisade store "));
        match layout.and_then(|layout| layout.parse::<u32>().ok()) {
            Some(LAYOUT) => {}
            Some(1) => {
                return Err(config_error(format!(
                    "directory {} was created by an older palisade; stop what uses it, then \
                     remove its `boot`, `lines` and `procs`, but keep `ceiling`: tokens continue \
                     above it",
                    dir.path.display()
                )));
            }
            Some(other) => {
                return Err(config_error(format!(
                    "directory {} has layout {other}, this palisade knows {LAYOUT}; use the \
                     version that created it, or another directory",
                    dir.path.display()
                )));
            }
            None => return Err(garbled(dir)),
        }
        let id = lines.next();
        let mut number = || lines.next().and_then(|line| line.parse().ok());
        match (id, number(), number()) {
            (Some(id), Some(time_namespace), Some(base)) => Ok(Self {
                id: id.to_owned(),
                time_namespace,
                base,
                // Stores that were created before promises existed don't have this line.
                grants_from: number().unwrap_or_default(),
            }),
            _ => Err(garbled(dir)),
        }
    }
}

fn garbled(dir: &Dir) -> Error {
    let message = format!(
        "{} is corrupt; stop what uses the store, then remove it and `lines`: tokens continue \
         above `ceiling`",
        dir.path.join(BOOT).display()
    );
    Error::new(ErrorKind::Unusable, "connect", message)
}

fn read(dir: &Dir, name: &str) -> Result<Option<String>> {
    let mut bytes = Vec::new();
    match dir.open_file(&dir.fd, name, OFlags::RDONLY) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(unusable_dir(&dir.path, errno)),
        Ok(file) => File::from(file)
            .take(4096)
            .read_to_end(&mut bytes)
            .map_err(|error| unusable_dir(&dir.path, error))?,
    };
    Ok(Some(String::from_utf8(bytes).unwrap_or_default()))
}

/// Replaces the file `boot`: new file, sync, rename, sync of the directory.
fn write(dir: &Dir, boot: &Boot) -> Result<()> {
    let text = format!(
        "palisade store {LAYOUT}\n{}\n{}\n{}\n{}\n",
        boot.id, boot.time_namespace, boot.base, boot.grants_from
    );
    let write = || -> std::io::Result<()> {
        // A leftover, or a link that someone placed.
        let _ = rustix::fs::unlinkat(&dir.fd, NEW, AtFlags::empty());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let mut out = File::from(dir.open_file(&dir.fd, NEW, flags)?);
        out.write_all(text.as_bytes())?;
        out.sync_all()?;
        rustix::fs::renameat(&dir.fd, NEW, &dir.fd, BOOT)?;
        rustix::fs::fsync(&dir.fd)?;
        Ok(())
    };
    write().map_err(|error| unusable_dir(&dir.path, error))
}
