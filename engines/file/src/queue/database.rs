//! The database of one queue: its tables, how it is created, opened and locked, and what its errors
//! mean.
//!
//! Times are microseconds of the store's token clock; [`NEVER`] stands for a message that must not
//! be claimed. The connection holds POSIX locks on its files, which would be dropped by closing any
//! other descriptor of them: so nothing here opens these files itself.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, params};
use rustix::fs::{AtFlags, FileType, OFlags};
use rustix::io::Errno;

use crate::boot::QUEUES;
use crate::dir::{self, Identity, identity};
use crate::error::{busy, file_failed, moved, unusable_dir};
use crate::store::Store;
use palisade_core::{BootTime, Error, ErrorKind, Name, Result};

const LAYOUT: i64 = 1;

/// The `due` of a message that must not be claimed.
pub(super) const NEVER: i64 = i64::MAX;

/// The prefix of the name of a file that is not a complete database yet.
const UNFINISHED: &str = ".new-";

const SCHEMA: &str = "
    PRAGMA auto_vacuum = INCREMENTAL;
    PRAGMA journal_mode = WAL;
    BEGIN;
    CREATE TABLE queue (
      layout INTEGER NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
      last INTEGER NOT NULL  -- of the numbers and tokens that were given
    );
    CREATE TABLE message (
      number   INTEGER PRIMARY KEY,
      due      INTEGER NOT NULL,
      token    INTEGER NOT NULL DEFAULT 0,
      ttl      INTEGER NOT NULL DEFAULT 0,
      attempts INTEGER NOT NULL DEFAULT 0,
      dead     INTEGER NOT NULL DEFAULT 0,
      behind   INTEGER NOT NULL DEFAULT 0,  -- another of its key is first
      batch    TEXT,                        -- of the claim
      process  INTEGER,                     -- that has it
      boot     INTEGER,                     -- in which it was claimed
      pushed   INTEGER NOT NULL,            -- in milliseconds of Unix time, for people
      after    INTEGER NOT NULL,            -- kept back until then by its sender
      key TEXT, id TEXT, owner TEXT, why TEXT,
      body     BLOB NOT NULL
    );
    CREATE INDEX message_due ON message (due);
    CREATE INDEX message_claimed ON message (process) WHERE token > 0;
    CREATE INDEX message_key ON message (key, number) WHERE key IS NOT NULL;
    CREATE UNIQUE INDEX message_first ON message (key) WHERE key IS NOT NULL AND behind = 0;
    CREATE TABLE seen (id TEXT PRIMARY KEY, number INTEGER NOT NULL, until INTEGER NOT NULL);
    CREATE INDEX seen_until ON seen (until);
    CREATE TABLE sleeper (id TEXT PRIMARY KEY, process INTEGER NOT NULL, since INTEGER NOT NULL);
    ";

/// Whether the operation must be on disk before it is answered.
pub(super) fn is_durable(operation: &str) -> bool {
    matches!(operation, "push" | "retry" | "drop")
}

/// An open database.
pub(super) struct Opened {
    pub(super) connection: Connection,
    pub(super) path: PathBuf,
    identity: Identity,
    /// The base of the token clock, which identifies the boot.
    pub(super) boot: i64,
    durable: Cell<bool>,
    /// The space that is kept for emptying it, as far as it is known.
    pub(super) room: Cell<u64>,
    changes: Cell<u32>,
    /// Whether the disk was found full since that space was kept.
    pub(super) scarce: Cell<bool>,
    /// When dead consumers were last looked for.
    pub(super) reaped: Cell<i64>,
}

/// Opens the database of a queue, and creates it if it does not exist.
pub(super) fn open(
    store: &Arc<Store>,
    (namespace, name): &(Arc<str>, Name),
    file: &str,
    operation: &'static str,
    until: BootTime,
) -> Result<Opened> {
    let home = store.home();
    match home.dir.is_in_place() {
        Ok(true) => {}
        Ok(false) => return Err(moved(operation, &home.dir.path)),
        Err(errno) => return Err(file_failed(operation, &home.dir.path, errno)),
    }
    let folder = home.dir.folder(QUEUES)?;
    if let Err(Errno::NOENT) = rustix::fs::statat(&folder, file, AtFlags::SYMLINK_NOFOLLOW) {
        // Only one process creates it; the others then find it.
        let _locked = home.dir.lock(until.remaining())?;
        if let Err(Errno::NOENT) = rustix::fs::statat(&folder, file, AtFlags::SYMLINK_NOFOLLOW) {
            create(store, &folder, file, namespace, name)?;
        }
    }
    let opened = connect(store, file, operation, until)?;
    let path = &opened.path;
    let said = patiently(operation, until, path, || {
        let sql = "SELECT layout, namespace, name FROM queue";
        opened.connection.query_row(sql, [], |row| {
            Ok((
                row.get(0)?,
                row.get::<_, String>(1)?,
                row.get::<_, String>(2)?,
            ))
        })
    })?;
    match said {
        (LAYOUT, of, called) if of == **namespace && called == name.as_str() => {}
        (LAYOUT, ..) => return Err(damaged(operation, path)),
        _ => {
            let message = "the queue was created by another version of palisade; use that one";
            return Err(
                Error::new(ErrorKind::Config, operation, message).with("file", path.display())
            );
        }
    }
    // Every consumer of an earlier boot is gone.
    opened.begin(operation, false, until)?;
    let freed = opened.connection.execute_batch(&format!(
        "UPDATE message SET due = 0 WHERE token > 0 AND boot <> {}; COMMIT",
        opened.boot
    ));
    if let Err(error) = freed {
        opened.roll_back();
        return Err(failed(operation, path, &error));
    }
    Ok(opened)
}

fn connect(
    store: &Arc<Store>,
    file: &str,
    operation: &'static str,
    until: BootTime,
) -> Result<Opened> {
    let home = store.home();
    let shown = home.dir.path.join(QUEUES).join(file);
    // The store's own path may contain links; nothing inside the store is a link.
    let real = std::fs::canonicalize(&home.dir.path);
    let real = real.map_err(|error| file_failed(operation, &home.dir.path, error))?;
    let path = real.join(QUEUES).join(file);
    let stat = rustix::fs::lstat(&path).map_err(|errno| file_failed(operation, &shown, errno))?;
    let plain = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !plain || !home.dir.audience.trusts(&stat) {
        let errno = if plain { Errno::PERM } else { Errno::NXIO };
        return Err(file_failed(operation, &shown, errno));
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_NOFOLLOW
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(&path, flags);
    let connection = connection.map_err(|error| failed(operation, &shown, &error))?;
    connection.set_prepared_statement_cache_capacity(64);
    // A process that closes a database as the last one blocks others for a moment.
    patiently(operation, until, &shown, || {
        // `patiently` waits instead, with a limit.
        connection.busy_timeout(Duration::ZERO)?;
        connection.execute_batch("PRAGMA synchronous = NORMAL; PRAGMA temp_store = MEMORY")
    })?;
    Ok(Opened {
        connection,
        path: shown,
        identity: identity(&stat),
        boot: home.tokens.base().cast_signed(),
        durable: Cell::new(false),
        room: Cell::new(0),
        scarce: Cell::new(false),
        changes: Cell::new(0),
        reaped: Cell::new(0),
    })
}

/// Creates the database under another name, and renames it when it is complete. The caller holds
/// the directory's lock.
fn create(
    store: &Arc<Store>,
    folder: &rustix::fd::OwnedFd,
    file: &str,
    namespace: &str,
    name: &Name,
) -> Result<()> {
    let home = store.home();
    let home_dir = &home.dir;
    let failed_dir = |errno: Errno| unusable_dir(&home_dir.path.join(QUEUES), errno);
    for left in dir::names(folder).map_err(failed_dir)? {
        // A leftover of a process that was killed.
        if left.starts_with(UNFINISHED) {
            let _ = rustix::fs::unlinkat(folder, left, AtFlags::empty());
        }
    }
    let new = format!("{UNFINISHED}{:016x}", rand::random::<u64>());
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let made = home_dir
        .open_file(folder, &new, flags)
        .map_err(failed_dir)?;
    let opened = connect(store, &new, "connect", BootTime::NEVER)?;
    let path = opened.path.clone();
    let write = || -> rusqlite::Result<()> {
        opened.connection.execute_batch(SCHEMA)?;
        let queue = "INSERT INTO queue VALUES (?1, ?2, ?3, 0)";
        opened
            .connection
            .execute(queue, params![LAYOUT, namespace, name.as_str()])?;
        opened.connection.execute_batch("COMMIT")
    };
    write().map_err(|error| failed("connect", &path, &error))?;
    // Closing the last connection writes the whole WAL into the one file.
    let closed = opened.connection.close();
    closed.map_err(|(_, error)| failed("connect", &path, &error))?;
    let place = || {
        rustix::fs::fsync(&made)?;
        rustix::fs::renameat(folder, &new, folder, file)?;
        rustix::fs::fsync(folder)
    };
    place().map_err(failed_dir)
}

/// Namespace and name of the queue in a file; `None` if the file is gone.
pub(super) fn name_of(store: &Arc<Store>, file: &str) -> Result<Option<(String, Name)>> {
    let until = BootTime::now() + Duration::from_secs(1);
    let opened = match connect(store, file, "survey", until) {
        Ok(opened) => opened,
        Err(_) if !store.home().dir.path.join(QUEUES).join(file).exists() => return Ok(None),
        Err(error) => return Err(error),
    };
    let said: (String, String) = patiently("survey", until, &opened.path, || {
        let sql = "SELECT namespace, name FROM queue";
        opened
            .connection
            .query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?)))
    })?;
    Ok(Some((said.0, Name::new(said.1)?)))
}

/// Retries while others have the database locked, until `until`.
fn patiently<T>(
    operation: &'static str,
    until: BootTime,
    path: &Path,
    mut ask: impl FnMut() -> rusqlite::Result<T>,
) -> Result<T> {
    let patience = until.remaining();
    let mut pause = Duration::from_micros(20);
    loop {
        match ask() {
            Err(error) if is_busy(&error) => {}
            done => return done.map_err(|error| failed(operation, path, &error)),
        }
        if until.has_passed() {
            return Err(busy(operation, patience, path));
        }
        std::thread::sleep(pause);
        // Changes take some tens of microseconds; a sync takes milliseconds.
        pause = (pause * 2).min(Duration::from_micros(500));
    }
}

fn is_busy(error: &rusqlite::Error) -> bool {
    let code = error.sqlite_error_code();
    matches!(
        code,
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    )
}

impl Opened {
    /// Whether its path still leads to the file that was opened.
    pub(super) fn is_in_place(&self) -> bool {
        rustix::fs::lstat(&self.path).is_ok_and(|stat| identity(&stat) == self.identity)
    }

    /// Begins an exclusive transaction as soon as others allow it, before `until`.
    pub(super) fn begin(
        &self,
        operation: &'static str,
        durable: bool,
        until: BootTime,
    ) -> Result<()> {
        if self.durable.get() != durable {
            let level = if durable { "FULL" } else { "NORMAL" };
            let set = format!("PRAGMA synchronous = {level}");
            patiently(operation, until, &self.path, || {
                self.connection.execute_batch(&set)
            })?;
            self.durable.set(durable);
        }
        patiently(operation, until, &self.path, || {
            self.connection
                .prepare_cached("BEGIN IMMEDIATE")?
                .execute([])
        })?;
        Ok(())
    }

    /// Whether to look after it now: every now and then.
    pub(super) fn is_nth_change(&self) -> bool {
        self.changes.set(self.changes.get() + 1);
        self.changes.get().is_multiple_of(256)
    }

    /// Rolls back an open transaction.
    pub(super) fn roll_back(&self) {
        if !self.connection.is_autocommit() {
            let _ = self.connection.execute_batch("ROLLBACK");
        }
    }
}

/// Converts an error of SQLite. Nothing was changed.
pub(super) fn failed(operation: &'static str, path: &Path, error: &rusqlite::Error) -> Error {
    let cause = match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            return busy(operation, Duration::ZERO, path);
        }
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            return damaged(operation, path);
        }
        // A table is missing: the file was emptied, or is not palisade's.
        Some(ErrorCode::Unknown) => return damaged(operation, path),
        Some(ErrorCode::DiskFull) => Errno::NOSPC,
        // There is no space for the memory that processes share.
        _ if is_extended(error, rusqlite::ffi::SQLITE_IOERR_SHMSIZE) => Errno::NOSPC,
        Some(
            ErrorCode::ReadOnly
            | ErrorCode::PermissionDenied
            | ErrorCode::AuthorizationForStatementDenied,
        ) => Errno::ACCESS,
        Some(ErrorCode::OutOfMemory) => Errno::NOMEM,
        _ => Errno::IO,
    };
    let failed = file_failed(operation, path, cause);
    // SQLite's description of the code says more than the number, and contains no message data.
    match error {
        rusqlite::Error::SqliteFailure(code, _) => failed.because(code.to_string()),
        _ => failed,
    }
}

fn is_extended(error: &rusqlite::Error, code: i32) -> bool {
    error
        .sqlite_error()
        .is_some_and(|error| error.extended_code == code)
}

/// The error for a database that palisade did not write.
pub(super) fn damaged(operation: &'static str, path: &Path) -> Error {
    let message = "the file of this queue is damaged; stop its users, save the output of `sqlite3 \
                   FILE .recover`, then remove it and the files beside it";
    Error::new(ErrorKind::Unusable, operation, message).with("file", path.display())
}
