//! The database of one queue: its tables, how it is made and opened, and its verbs (`Tx`).
//!
//! The rules are those of `core::queue`. There is one writer at a time, so that each verb is plain
//! reading and writing. Times are microseconds of the store's token clock; `NEVER` stands for a
//! message that must not be claimed. The connection has locks of POSIX on its files, which closing
//! any other descriptor of them would drop: nothing here opens them by itself.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Row, params};
use rustix::fs::{AtFlags, FileType, OFlags};
use rustix::io::Errno;

use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::name::Name;
use crate::core::owner::Owner;
use crate::core::queue::{
    DEDUPLICATED, Delivery, Draft, FullReport, MessageReport, MessageState, Pick, Pushed,
    QueueReport, Receipt, Settlement, Take, Taken,
};
use crate::engines::file::boot::QUEUES;
use crate::engines::file::dir::{Identity, identity};
use crate::engines::file::error::{busy, file_failed, moved, unusable_dir};
use crate::engines::file::liveness::{self, Hint, Peer};
use crate::engines::file::store::Store;

const LAYOUT: i64 = 1;

/// What is due then must not be claimed.
const NEVER: i64 = i64::MAX;

/// Who fell asleep longer ago has said so again, or is gone.
const ASLEEP: i64 = 3_000_000;

/// How often the dead are looked for while there is enough to do.
const REAPED: i64 = 1_000_000;

/// What the name of a file begins with that is not a whole database yet.
const UNFINISHED: &str = ".new-";

const SCHEMA: &str = "
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

/// Whether what was asked for must have reached the disk when it is answered.
pub(super) fn is_durable(operation: &str) -> bool {
    matches!(operation, "push" | "retry" | "drop")
}

/// An open database.
pub(super) struct Opened {
    connection: Connection,
    path: PathBuf,
    identity: Identity,
    /// What tells this boot from others: the base of its token clock.
    boot: i64,
    durable: Cell<bool>,
    /// When the dead were last looked for.
    reaped: Cell<i64>,
}

/// Opens the database of a queue, and makes it if it is missing.
pub(super) fn open(
    store: &Arc<Store>,
    (namespace, name): &(Arc<str>, Name),
    file: &str,
    operation: &'static str,
    until: BootTime,
) -> Result<Opened> {
    let home = store.home();
    if !home.dir.is_in_place() {
        return Err(moved(operation, &home.dir.path));
    }
    let folder = home.dir.folder(QUEUES)?;
    if let Err(Errno::NOENT) = rustix::fs::statat(&folder, file, AtFlags::SYMLINK_NOFOLLOW) {
        // One at a time makes it: the others find it then.
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
            let message = "the queue is of another version of palisade; use that one";
            return Err(
                Error::new(ErrorKind::Config, operation, message).with("file", path.display())
            );
        }
    }
    // Whoever claimed in an earlier boot is gone.
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
    // Its own parts may be links; nothing in the store is.
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
    // Whoever closes a database last keeps it from others for a moment.
    patiently(operation, until, &shown, || {
        // Waiting is ours, and bounded.
        connection.busy_timeout(Duration::ZERO)?;
        connection.execute_batch("PRAGMA synchronous = NORMAL; PRAGMA temp_store = MEMORY")
    })?;
    Ok(Opened {
        connection,
        path: shown,
        identity: identity(&stat),
        boot: home.tokens.base().cast_signed(),
        durable: Cell::new(false),
        reaped: Cell::new(0),
    })
}

/// Makes the database under another name and puts it in its place whole. The caller holds the lock
/// of the directory.
fn create(
    store: &Arc<Store>,
    folder: &rustix::fd::OwnedFd,
    file: &str,
    namespace: &str,
    name: &Name,
) -> Result<()> {
    let home = store.home();
    let dir = &home.dir;
    let failed_dir = |errno: Errno| unusable_dir(&dir.path.join(QUEUES), errno);
    for left in super::dir::names(folder).map_err(failed_dir)? {
        // What somebody who was killed has left.
        if left.starts_with(UNFINISHED) {
            let _ = rustix::fs::unlinkat(folder, left, AtFlags::empty());
        }
    }
    let new = format!("{UNFINISHED}{:016x}", rand::random::<u64>());
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let made = dir.open_file(folder, &new, flags).map_err(failed_dir)?;
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
    // The last one to close it writes all of it into the one file.
    let closed = opened.connection.close();
    closed.map_err(|(_, error)| failed("connect", &path, &error))?;
    let place = || {
        rustix::fs::fsync(&made)?;
        rustix::fs::renameat(folder, &new, folder, file)?;
        rustix::fs::fsync(folder)
    };
    place().map_err(failed_dir)
}

/// Namespace and name of the queue in a file; `None` when it is gone.
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

/// Tries again while others keep the database, until then.
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
    /// Whether its file still is the one with its name.
    pub(super) fn is_in_place(&self) -> bool {
        rustix::fs::lstat(&self.path).is_ok_and(|stat| identity(&stat) == self.identity)
    }

    /// Begins a transaction, alone, as soon as the others let it, and before `until`.
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

    /// Takes back what was not committed.
    pub(super) fn roll_back(&self) {
        if !self.connection.is_autocommit() {
            let _ = self.connection.execute_batch("ROLLBACK");
        }
    }
}

/// Whom to wake after the commit.
#[derive(Default)]
pub(super) struct Hints(Vec<(u64, ClaimId)>);

impl Hints {
    pub(super) fn send(self, store: &Store) {
        for (process, sleeper) in self.0 {
            let hint = Hint::Look(sleeper);
            if process == store.process() {
                store.watcher.hand(hint);
            } else if let Peer::Alive(end) = liveness::open_to_wake(&store.home().procs, process) {
                liveness::send(&end, hint);
            }
        }
    }
}

/// One transaction on the database of a queue.
pub(super) struct Tx<'a> {
    store: &'a Store,
    database: &'a Opened,
    operation: &'static str,
    now: i64,
    /// The last number or token that was given.
    last: i64,
    gave: bool,
    hints: Hints,
}

/// What SQL says of where a message stands, as [`MessageState::code`] does; `?1` is now.
const STATE: &str = "CASE WHEN dead THEN 'dead' WHEN behind THEN 'blocked' WHEN due <= ?1 THEN 'ready' \
     WHEN token > 0 THEN 'claimed' ELSE 'delayed' END";

impl<'a> Tx<'a> {
    /// In a transaction that has begun.
    pub(super) fn new(
        store: &'a Store,
        database: &'a Opened,
        operation: &'static str,
    ) -> Result<Self> {
        let home = store.home();
        let now = home.tokens.clock(operation, &home.dir)?;
        let mut tx = Self {
            store,
            database,
            operation,
            now: i64::try_from(now).unwrap_or(i64::MAX),
            last: 0,
            gave: false,
            hints: Hints::default(),
        };
        tx.last = tx.value("SELECT last FROM queue", [])?;
        Ok(tx)
    }

    pub(super) fn execute(&self, sql: &str) -> Result<()> {
        let done = self.database.connection.execute_batch(sql);
        done.map_err(|error| self.failed(&error))
    }

    /// Commits; answers whom to wake.
    pub(super) fn commit(self) -> Result<Hints> {
        if self.gave {
            self.run("UPDATE queue SET last = ?1", params![self.last])?;
        }
        self.execute("COMMIT").map_err(|error| {
            // A full disk takes all back; what failed otherwise may stand after a restart.
            let full = error.message().contains("full");
            if full { error } else { error.maybe_applied() }
        })?;
        Ok(self.hints)
    }

    fn failed(&self, error: &rusqlite::Error) -> Error {
        failed(self.operation, &self.database.path, error)
    }

    fn run(&self, sql: &str, parameters: impl rusqlite::Params) -> Result<usize> {
        let statement = self.database.connection.prepare_cached(sql);
        let ran = statement.and_then(|mut statement| statement.execute(parameters));
        ran.map_err(|error| self.failed(&error))
    }

    fn rows<T>(
        &self,
        sql: &str,
        parameters: impl rusqlite::Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>> {
        let ask = || {
            let mut statement = self.database.connection.prepare_cached(sql)?;
            let rows = statement.query_map(parameters, read)?;
            rows.collect::<rusqlite::Result<Vec<T>>>()
        };
        ask().map_err(|error| self.failed(&error))
    }

    fn row<T>(
        &self,
        sql: &str,
        parameters: impl rusqlite::Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>> {
        let ask = || {
            let mut statement = self.database.connection.prepare_cached(sql)?;
            statement.query_row(parameters, read).optional()
        };
        ask().map_err(|error| self.failed(&error))
    }

    fn value<T: rusqlite::types::FromSql>(
        &self,
        sql: &str,
        parameters: impl rusqlite::Params,
    ) -> Result<T> {
        let found = self.row(sql, parameters, |row| row.get(0))?;
        found.ok_or_else(|| damaged(self.operation, &self.database.path))
    }

    /// A number or token that was never given before, also not in a transaction that a power cut
    /// took back.
    fn give(&mut self) -> i64 {
        self.last = (self.last + 1).max(self.now);
        self.gave = true;
        self.last
    }

    pub(super) fn push(&mut self, drafts: Vec<Draft>) -> Result<Vec<Pushed>> {
        let today = SystemTime::now().duration_since(UNIX_EPOCH);
        let today = today.map_or(0, |since| since.as_millis() as i64);
        let (mut pushed, mut awake) = (Vec::with_capacity(drafts.len()), 0);
        for draft in drafts {
            let number = self.give();
            if let Some(id) = &draft.id {
                let seen = "SELECT number FROM seen WHERE id = ?1 AND (until >= ?2 \
                            OR EXISTS (SELECT 1 FROM message m WHERE m.number = seen.number))";
                let seen: Option<i64> = self.row(seen, params![id, self.now], |row| row.get(0))?;
                if let Some(first) = seen {
                    pushed.push(Pushed::new(draft.id, first.unsigned_abs(), true));
                    continue;
                }
                let until = self.now + micros(DEDUPLICATED);
                let see = "INSERT OR REPLACE INTO seen VALUES (?1, ?2, ?3)";
                self.run(see, params![id, number, until])?;
            }
            let behind = match &draft.key {
                None => false,
                Some(key) => {
                    let other = "SELECT EXISTS (SELECT 1 FROM message WHERE key = ?1)";
                    self.value(other, params![key])?
                }
            };
            let after = self.now.saturating_add(micros(draft.delay));
            let due = if behind { NEVER } else { after };
            let add = "INSERT INTO message (number, due, behind, pushed, after, key, id, body) \
                       VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
            let Draft { key, id, body, .. } = draft;
            self.run(
                add,
                params![number, due, behind, today, after, key, id, body],
            )?;
            awake += usize::from(due <= self.now);
            pushed.push(Pushed::new(id, number.unsigned_abs(), false));
        }
        if pushed.iter().any(|pushed| !pushed.id.starts_with('@')) {
            let sweep = "DELETE FROM seen WHERE id IN (SELECT id FROM seen s WHERE until < ?1 \
                         AND NOT EXISTS (SELECT 1 FROM message m WHERE m.number = s.number) \
                         ORDER BY until LIMIT ?2)";
            self.run(sweep, params![self.now, 2 * pushed.len() as i64])?;
        }
        self.wake(awake)?;
        Ok(pushed)
    }

    /// Claims; answers also whose deaths matter to whoever waits.
    pub(super) fn take(&mut self, take: &Take) -> Result<(Taken, Vec<u64>)> {
        let mut taken = Taken::default();
        if take.again {
            let again = "UPDATE message SET due = ?1 + ttl \
                         WHERE token > 0 AND due > ?1 AND batch = ?2 \
                         RETURNING number, id, key, token, attempts, body";
            let batch = take.batch.to_string();
            taken.messages = self.rows(again, params![self.now, batch], delivery)?;
            if !taken.messages.is_empty() {
                return Ok((taken, Vec::new()));
            }
        }
        self.claim(take, &mut taken)?;
        let mut processes = Vec::new();
        let late = self.now - self.database.reaped.get() > REAPED;
        if late || taken.messages.len() < take.count {
            let freed;
            (freed, processes) = self.reap()?;
            if freed > 0 {
                self.claim(take, &mut taken)?;
            }
        }
        taken.messages.sort_by_key(|message| message.number);
        if taken.messages.is_empty() && taken.next.is_none() {
            let next = "SELECT min(due) FROM message WHERE due > ?1 AND due < ?2";
            let next: Option<i64> = self.value(next, params![self.now, NEVER])?;
            taken.next = next.map(|due| duration(due - self.now));
            if let Some(sleeper) = take.sleeper {
                let asleep = "INSERT OR REPLACE INTO sleeper VALUES (?1, ?2, ?3)";
                let process = self.store.process().cast_signed();
                self.run(asleep, params![sleeper.to_string(), process, self.now])?;
            }
        }
        Ok((taken, processes))
    }

    fn claim(&mut self, take: &Take, taken: &mut Taken) -> Result<()> {
        let room = take.count - taken.messages.len();
        let due =
            "SELECT number, attempts FROM message WHERE due <= ?1 ORDER BY due, number LIMIT ?2";
        let due: Vec<(i64, u32)> = self.rows(due, params![self.now, room as i64], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?;
        let (process, batch) = (self.store.process().cast_signed(), take.batch.to_string());
        for (number, attempts) in due {
            if attempts >= take.attempts {
                let bury = "UPDATE message SET dead = 1, due = ?2, token = 0, batch = NULL, \
                            process = NULL, owner = NULL, \
                            why = coalesce(why || '; ', '') || 'its last consumer was lost' \
                            WHERE number = ?1";
                self.run(bury, params![number, NEVER])?;
                // There may be more behind it.
                taken.next = Some(Duration::ZERO);
                continue;
            }
            let token = self.give();
            let claim = "UPDATE message SET due = ?2, token = ?3, ttl = ?4, attempts = attempts + 1, \
                         batch = ?5, process = ?6, boot = ?7, owner = ?8 WHERE number = ?1 \
                         RETURNING number, id, key, token, attempts, body";
            let ttl = micros(take.ttl);
            let until = self.now + ttl;
            let boot = self.database.boot;
            let of = params![number, until, token, ttl, batch, process, boot, take.owner];
            taken.messages.extend(self.row(claim, of, delivery)?);
        }
        Ok(())
    }

    /// Lets go of what the dead have; answers how much that was, and who else has something.
    fn reap(&mut self) -> Result<(usize, Vec<u64>)> {
        self.database.reaped.set(self.now);
        let having = "SELECT DISTINCT process FROM message WHERE token > 0 AND due > ?1";
        let having: Vec<i64> = self.rows(having, params![self.now], |row| row.get(0))?;
        let mut freed = 0;
        let mut others: Vec<u64> = having.into_iter().map(i64::cast_unsigned).collect();
        others.retain(|process| *process != self.store.process());
        for process in std::mem::take(&mut others) {
            let peer = liveness::open_to_watch(&self.store.home().procs, process);
            if matches!(peer, Peer::Dead) {
                let free =
                    "UPDATE message SET due = ?2 WHERE token > 0 AND process = ?1 AND due > ?2";
                freed += self.run(free, params![process.cast_signed(), self.now])?;
            } else {
                others.push(process);
            }
        }
        Ok((freed, others))
    }

    /// The ttl of each that was renewed.
    pub(super) fn renew(&mut self, receipts: &[Receipt]) -> Result<Vec<Option<Duration>>> {
        let renew = "UPDATE message SET due = ?3 + ttl \
                     WHERE number = ?1 AND token = ?2 AND due > ?3 RETURNING ttl";
        let renew = |receipt: &Receipt| {
            let (number, token) = names(receipt);
            let ttl = self.row(renew, params![number, token, self.now], |row| row.get(0))?;
            Ok(ttl.map(duration))
        };
        receipts.iter().map(renew).collect()
    }

    pub(super) fn extend(&mut self, receipt: Receipt, ttl: Duration) -> Result<bool> {
        let (number, token) = names(&receipt);
        let extend = "UPDATE message SET ttl = ?4, due = max(due, ?3 + ?4) \
                      WHERE number = ?1 AND token = ?2 AND due > ?3";
        let extended = self.run(extend, params![number, token, self.now, micros(ttl)])?;
        Ok(extended > 0)
    }

    pub(super) fn done(&mut self, receipts: &[Receipt]) -> Result<Vec<bool>> {
        let mut done = Vec::with_capacity(receipts.len());
        for receipt in receipts {
            let (number, token) = names(receipt);
            let remove = "DELETE FROM message WHERE number = ?1 AND token = ?2 RETURNING key";
            let gone: Option<Option<String>> =
                self.row(remove, params![number, token], |row| row.get(0))?;
            done.push(gone.is_some());
            if let Some(Some(key)) = gone {
                self.promote(&key)?;
            }
        }
        Ok(done)
    }

    /// Lets the next of a key come first.
    fn promote(&mut self, key: &str) -> Result<()> {
        let next = "UPDATE message SET behind = 0, due = max(after, ?2) WHERE behind AND number = \
                    (SELECT min(number) FROM message WHERE key = ?1) RETURNING due";
        let due: Option<i64> = self.row(next, params![key, self.now], |row| row.get(0))?;
        self.wake(usize::from(due.is_some_and(|due| due <= self.now)))
    }

    /// Ends claims whose messages stay.
    pub(super) fn put_back(&mut self, receipts: &[Receipt], how: &Settlement) -> Result<Vec<bool>> {
        // When it is due; as its sender said if it has not been tried.
        let (due, dead, untried, why) = match how {
            Settlement::Retry { after, why } => (Some(self.now + micros(*after)), false, 0, why),
            Settlement::Dead { why } => (Some(NEVER), true, 0, why),
            Settlement::Release | Settlement::Done => (None, false, 1, &String::new()),
        };
        let why = Some(why).filter(|why| !why.is_empty());
        let mut back = Vec::with_capacity(receipts.len());
        for receipt in receipts {
            let (number, token) = names(receipt);
            let put = "UPDATE message SET token = 0, batch = NULL, process = NULL, owner = NULL, \
                       due = coalesce(?3, after), dead = ?4, attempts = attempts - ?5, \
                       why = coalesce(?6, why) WHERE number = ?1 AND token = ?2";
            let put = self.run(put, params![number, token, due, dead, untried, why])?;
            back.push(put > 0);
        }
        if due.is_none_or(|due| due <= self.now) {
            self.wake(back.iter().filter(|back| **back).count())?;
        }
        Ok(back)
    }

    /// Gives back what a claim took that was given up.
    pub(super) fn leave(&mut self, batch: ClaimId) -> Result<usize> {
        let leave = "UPDATE message SET token = 0, batch = NULL, process = NULL, owner = NULL, \
                     due = after, attempts = attempts - 1 WHERE token > 0 AND batch = ?1";
        let left = self.run(leave, params![batch.to_string()])?;
        self.wake(left)?;
        Ok(left)
    }

    /// Wakes as many as there are messages for: those first that fell asleep last.
    fn wake(&mut self, count: usize) -> Result<()> {
        let mut woken = 0;
        while woken < count {
            let last = "DELETE FROM sleeper WHERE id = \
                        (SELECT id FROM sleeper ORDER BY since DESC LIMIT 1) \
                        RETURNING id, process, since";
            let last: Option<(String, i64, i64)> =
                self.row(last, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
            let Some((id, process, since)) = last else {
                return Ok(());
            };
            let (Ok(id), process) = (id.parse(), process.cast_unsigned()) else {
                continue;
            };
            let procs = &self.store.home().procs;
            let alive = process == self.store.process()
                || matches!(liveness::open_to_watch(procs, process), Peer::Alive(_));
            if alive && self.now - since < ASLEEP {
                self.hints.0.push((process, id));
                woken += 1;
            }
        }
        Ok(())
    }

    pub(super) fn count(&mut self) -> Result<QueueReport> {
        self.reap()?;
        let mut report = QueueReport::empty(self.value::<String>("SELECT name FROM queue", [])?);
        let states =
            format!("SELECT {STATE} AS state, count(*), min(due) FROM message GROUP BY state");
        let states: Vec<(String, i64, i64)> = self.rows(&states, params![self.now], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        })?;
        for (word, count, due) in states {
            let count = count.unsigned_abs();
            match state(&word) {
                MessageState::Ready => {
                    report.ready = count;
                    report.oldest = Some(duration(self.now - due.max(0)));
                }
                MessageState::Delayed => report.delayed = count,
                MessageState::Claimed => report.claimed = count,
                MessageState::Blocked => report.blocked = count,
                MessageState::Dead => report.dead = count,
            }
        }
        Ok(report)
    }

    pub(super) fn list(&mut self, dead: bool, limit: usize) -> Result<Vec<MessageReport>> {
        self.reap()?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let list = format!("{} WHERE dead OR NOT ?2 ORDER BY number LIMIT ?3", listed());
        let now = self.now;
        self.rows(&list, params![now, dead, limit], |row| report(row, now))
    }

    pub(super) fn read(&mut self, id: &str) -> Result<Option<FullReport>> {
        self.reap()?;
        let Some(number) = self.numbered(id)? else {
            return Ok(None);
        };
        let one = format!("{} WHERE number = ?2", listed());
        let now = self.now;
        let found = self.row(&one, params![now, number], |row| report(row, now))?;
        let Some(report) = found else {
            return Ok(None);
        };
        let body = self.value(
            "SELECT body FROM message WHERE number = ?1",
            params![number],
        )?;
        Ok(Some((report, body)))
    }

    /// The number that an id stands for.
    fn numbered(&self, id: &str) -> Result<Option<i64>> {
        if let Some(number) = Pick::number(id) {
            return Ok(i64::try_from(number).ok());
        }
        self.row(
            "SELECT number FROM seen WHERE id = ?1",
            params![id],
            |row| row.get(0),
        )
    }

    /// What chooses the messages that are meant, as `?2`.
    fn picked(&self, pick: &Pick) -> Result<(&'static str, i64)> {
        Ok(match pick {
            Pick::All => ("?2 = 0", 0),
            Pick::Dead => ("dead AND ?2 = 0", 0),
            Pick::Id(id) => ("number = ?2", self.numbered(id)?.unwrap_or(-1)),
        })
    }

    pub(super) fn retry(&mut self, pick: &Pick) -> Result<u64> {
        self.reap()?;
        let (which, number) = self.picked(pick)?;
        let retry = format!(
            "UPDATE message SET dead = 0, attempts = 0, token = 0, batch = NULL, process = NULL, \
             owner = NULL, due = ?1, after = min(after, ?1) \
             WHERE {which} AND NOT behind AND (token = 0 OR due <= ?1)"
        );
        let ready = self.run(&retry, params![self.now, number])?;
        self.wake(ready)?;
        Ok(ready as u64)
    }

    pub(super) fn discard(&mut self, pick: &Pick, force: bool) -> Result<u64> {
        self.reap()?;
        let (which, number) = self.picked(pick)?;
        let remove = format!(
            "DELETE FROM message WHERE {which} AND (?3 OR token = 0 OR due <= ?1) RETURNING id, key"
        );
        let gone: Vec<(Option<String>, Option<String>)> =
            self.rows(&remove, params![self.now, number, force], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })?;
        for (id, key) in &gone {
            if let Some(id) = id {
                self.run("DELETE FROM seen WHERE id = ?1", params![id])?;
            }
            if let Some(key) = key {
                self.promote(key)?;
            }
        }
        Ok(gone.len() as u64)
    }
}

/// The columns that [`report`] reads; `?1` is now.
fn listed() -> String {
    format!(
        "SELECT number, id, key, {STATE}, attempts, pushed, due, token, owner, why, length(body) \
         FROM message"
    )
}

fn report(row: &Row<'_>, now: i64) -> rusqlite::Result<MessageReport> {
    let state = state(&row.get::<_, String>(3)?);
    let due: i64 = row.get(6)?;
    let claimed = state == MessageState::Claimed;
    let token: i64 = row.get(7)?;
    let owner: Option<String> = row.get(8)?;
    Ok(MessageReport {
        key: row.get(2)?,
        attempts: row.get(4)?,
        pushed: row.get::<_, i64>(5)?.unsigned_abs(),
        changes_in: (due > now && due < NEVER).then(|| duration(due - now)),
        sequence: claimed.then_some(token.unsigned_abs()),
        owner: owner
            .filter(|_| claimed)
            .and_then(|owner| Owner::from_json(owner.as_bytes())),
        why: row.get(9)?,
        size: row.get::<_, i64>(10)?.unsigned_abs(),
        ..MessageReport::new(row.get(1)?, row.get::<_, i64>(0)?.unsigned_abs(), state)
    })
}

fn delivery(row: &Row<'_>) -> rusqlite::Result<Delivery> {
    Ok(Delivery {
        number: row.get::<_, i64>(0)?.unsigned_abs(),
        id: row.get(1)?,
        key: row.get(2)?,
        sequence: row.get::<_, i64>(3)?.unsigned_abs(),
        attempt: row.get(4)?,
        body: row.get(5)?,
    })
}

fn state(word: &str) -> MessageState {
    use MessageState::{Blocked, Claimed, Dead, Delayed, Ready};
    let mut known = [Ready, Delayed, Claimed, Blocked, Dead].into_iter();
    known.find(|state| state.code() == word).unwrap_or(Ready)
}

/// Number and token, as the database has them.
fn names(receipt: &Receipt) -> (i64, i64) {
    (receipt.number.cast_signed(), receipt.sequence.cast_signed())
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(NEVER / 4)
}

fn duration(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0).unsigned_abs())
}

/// What a failure of SQLite means. Nothing was changed.
pub(super) fn failed(operation: &'static str, path: &Path, error: &rusqlite::Error) -> Error {
    use rustix::io::Errno;
    let cause = match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            return busy(operation, Duration::ZERO, path);
        }
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            return damaged(operation, path);
        }
        // A table is missing: the file was emptied, or is somebody else's.
        Some(ErrorCode::Unknown) => return damaged(operation, path),
        Some(ErrorCode::DiskFull) => Errno::NOSPC,
        Some(
            ErrorCode::ReadOnly
            | ErrorCode::PermissionDenied
            | ErrorCode::AuthorizationForStatementDenied,
        ) => Errno::ACCESS,
        Some(ErrorCode::OutOfMemory) => Errno::NOMEM,
        _ => Errno::IO,
    };
    let failed = file_failed(operation, path, cause);
    // The text of SQLite says more than its number, and nothing of the messages.
    match error {
        rusqlite::Error::SqliteFailure(code, _) => failed.because(code.to_string()),
        _ => failed,
    }
}

/// The error for a database that is not what palisade wrote.
fn damaged(operation: &'static str, path: &Path) -> Error {
    let message = "the file of this queue is damaged; stop who uses it, save what `sqlite3 FILE \
                   .recover` shows, then remove it and what lies beside it";
    Error::new(ErrorKind::Unusable, operation, message).with("file", path.display())
}
