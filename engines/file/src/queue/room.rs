//! `Room`: space on the disk that is kept for emptying a queue.
//!
//! Claiming, finishing and dropping messages write to the database's log before anything is freed,
//! so on a full disk nothing could ever be freed. Therefore a push keeps a file beside the database,
//! as large as the log, which must be written into the database first, and some more; where there is
//! no space for it, the push is refused. Whatever else finds the disk full gives this space up,
//! writes the log into the database, and tries again, in small steps. The next push keeps it anew.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use super::database::Opened;
use crate::boot::QUEUES;
use crate::dir::Dir;
use crate::error::file_failed;
use crate::store::Store;
use palisade_core::{BootTime, Result};

/// The suffix of its file, after that of the database.
const SUFFIX: &str = "-room";
/// What some transactions need besides the log, and the step in which the file grows.
const STEP: u64 = 256 << 10;
/// What a process takes of it to join a store on a full disk, for its own files and the database's.
const TAKEN: u64 = 64 << 10;

/// How many messages one transaction drops: usually, and while space is scarce.
pub(super) const MANY: u32 = 10_000;
pub(super) const FEW: u32 = 100;

/// Keeps enough space for emptying the queue, before a push and after it.
pub(super) fn keep(store: &Store, database: &Opened, operation: &'static str) -> Result<()> {
    let log = log(database);
    let needed = (log + STEP).next_multiple_of(STEP);
    if database.room.get() >= needed {
        return Ok(());
    }
    let path = beside(&database.path, SUFFIX);
    let dir = &store.home().dir;
    let kept = match reserve(dir, &path, needed) {
        // A shorter log needs less.
        Err(errno) if is_full(errno) && shorten(store, database) => {
            reserve(dir, &path, STEP).map(|()| STEP)
        }
        reserved => reserved.map(|()| needed),
    };
    let kept = kept.map_err(|errno| file_failed(operation, &path, errno))?;
    database.room.set(kept);
    database.scarce.set(false);
    Ok(())
}

fn is_full(errno: Errno) -> bool {
    matches!(errno, Errno::NOSPC | Errno::DQUOT)
}

fn reserve(dir: &Dir, path: &Path, size: u64) -> rustix::io::Result<()> {
    let file = open(dir, path, OFlags::RDWR | OFlags::CREATE)?;
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size) {
        Err(Errno::OPNOTSUPP) => {
            let block = [0; 4096];
            let from = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
            for at in (from..size).step_by(block.len()) {
                if rustix::io::pwrite(&file, &block, at)? != block.len() {
                    return Err(Errno::NOSPC);
                }
            }
            Ok(())
        }
        done => done,
    }
}

/// Opens the file of a room below the store's directory.
fn open(dir: &Dir, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let folder = dir.folder(QUEUES).map_err(|_| Errno::NOENT)?;
    dir.open_file(&folder, &name, flags)
}

/// The length of the log.
fn log(database: &Opened) -> u64 {
    std::fs::metadata(beside(&database.path, "-wal")).map_or(0, |log| log.len())
}

/// Writes the log into the database, with the space that is kept for it, so that both need less.
/// Returns whether they do.
pub(super) fn shorten(store: &Store, database: &Opened) -> bool {
    let before = log(database);
    let path = beside(&database.path, SUFFIX);
    if let Ok(file) = open(&store.home().dir, &path, OFlags::RDWR)
        && rustix::fs::fstat(&file).is_ok_and(|stat| stat.st_size > STEP as i64)
        && rustix::fs::ftruncate(&file, STEP).is_ok()
    {
        database.room.set(STEP);
    }
    checkpoint(&database.connection);
    log(database) < before
}

/// Gives the space up and writes the log into the database. Returns whether anything may have been
/// freed.
pub(super) fn give_up(database: &Opened) -> bool {
    if database.scarce.replace(true) {
        return false;
    }
    database.room.set(0);
    // Without it the log may still be long.
    let _ = rustix::fs::unlink(beside(&database.path, SUFFIX));
    checkpoint(&database.connection);
    true
}

/// Takes a little of the space of some queue, so that a process can join the store and open the
/// database on a full disk. Returns whether there was any.
pub(crate) fn take_some(dir: &Dir) -> bool {
    let folder = dir.path.join(QUEUES);
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let rooms = names.map(|name| name.path());
    let mut rooms = rooms.filter(|path| path.to_string_lossy().ends_with(SUFFIX));
    rooms.any(|path| {
        let shrink = || {
            let file = open(dir, &path, OFlags::RDWR)?;
            let size = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
            let rest = size.saturating_sub(TAKEN);
            rustix::fs::ftruncate(&file, rest).map(|()| size > 0)
        };
        shrink() == Ok(true)
    })
}

/// Writes the log into the database and empties it, if nobody reads it just now.
pub(super) fn checkpoint(connection: &Connection) {
    // If it fails, the next one does it.
    let _ = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
}

/// Makes the file of a database shorter while most of it is free, for about as long as `patience`.
pub(super) fn shrink(database: &Opened, patience: Duration) {
    let until = BootTime::now() + patience;
    // On a full disk there is only space for small steps at first.
    let mut pages = 32;
    while !until.has_passed() {
        match shrink_by(database, pages) {
            Ok(true) => pages = (pages * 2).min(4096),
            Ok(false) => return,
            Err(error) => {
                let full = error.sqlite_error_code() == Some(ErrorCode::DiskFull);
                if !full || !give_up(database) {
                    return;
                }
            }
        }
    }
}

/// Takes free pages from the end of the file; returns whether there are enough to go on. If others
/// use the database just now, that fails, and the next one does it.
fn shrink_by(database: &Opened, pages: u32) -> rusqlite::Result<bool> {
    let number = |sql: &str| {
        let value = |row: &rusqlite::Row<'_>| row.get::<_, i64>(0);
        database.connection.query_row(sql, [], value)
    };
    let run = |sql: &str| {
        let mut statement = database.connection.prepare(sql)?;
        let mut rows = statement.query([])?;
        while rows.next()?.is_some() {}
        Ok::<(), rusqlite::Error>(())
    };
    let (free, all) = (
        number("PRAGMA freelist_count")?,
        number("PRAGMA page_count")?,
    );
    if free < 64 || free < all / 2 {
        return Ok(false);
    }
    let shrinks = number("PRAGMA auto_vacuum")? == 2;
    if shrinks {
        run(&format!("PRAGMA incremental_vacuum({pages})"))?;
    } else if all - free < 256 {
        // Those of earlier versions can only be written anew, which is quick if little is left.
        run("PRAGMA auto_vacuum = 2")?;
        run("VACUUM")?;
    }
    checkpoint(&database.connection);
    Ok(shrinks)
}

fn beside(path: &Path, suffix: &str) -> std::path::PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
