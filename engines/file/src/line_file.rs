//! `LineFile`: one line in one small text file, changed only under its own `flock`.
//!
//! A header of fixed length has the offset, length and checksum of the body; the body has one claim
//! per line of text. A change writes the new body beside the old one, then overwrites the header.
//! So a process that is killed in between, or a failed write, leaves the line as it was. Nothing is
//! synced: files of another boot are discarded.
//!
//! Space for the next body is reserved when a line grows, so that a full disk prevents nobody from
//! leaving. Unexpected bytes are `damaged`, never a free line.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::boot::{Home, LINES};
use super::dir::{self, Identity, identity};
use super::error::{damaged, file_failed, moved};
use palisade_core::engine::{Ask, ClaimId, Line, Seat};
use palisade_core::report::Owner;
use palisade_core::{BootTime, Result};

/// The length of the header.
pub(super) const HEADER: usize = 128;
const MAGIC: &str = "palisade line 1 seq ";
/// The prefix of the name of a file that is not a complete line yet.
pub(super) const UNFINISHED: &str = ".new-";
/// What every local file system allocates for the first byte of a file.
const BLOCK: u64 = 4096;
/// The time of a few changes by others: spinning longer would only take CPU time from the holder.
const SPIN: Duration = Duration::from_micros(40);
/// The maximum number of files kept open.
const OPEN_FILES: usize = 256;

/// The engine's own data of a seat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Extra {
    /// The process that it belongs to.
    pub(super) process: u64,
    /// The slot of its renewals in the file of that process.
    pub(super) slot: u32,
    /// The expiry in the file: renewals are not recorded in the line.
    pub(super) until: BootTime,
    /// Whether its renewals were not found, so that it ends one ttl after that.
    pub(super) orphan: bool,
    /// Whether a hold is kept until its lease ends even if its process dies.
    pub(super) by_lease: bool,
    /// Owner and value, each as JSON, separated by a tab.
    pub(super) who: Arc<str>,
    /// Its text in the file, unless it has changed since.
    pub(super) text: Option<Arc<str>>,
}

impl Extra {
    pub(super) fn set_value(&mut self, value: &str) {
        let owner = self.who.split('\t').next().unwrap_or_default();
        let value = serde_json::to_string(value).unwrap_or_default();
        self.who = format!("{owner}\t{value}").into();
        self.text = None;
    }

    /// Owner and value.
    pub(super) fn who(&self) -> (Option<Owner>, Option<String>) {
        let (owner, value) = self.who.split_once('\t').unwrap_or_default();
        let value: Option<Option<String>> = serde_json::from_str(value).ok();
        (Owner::from_json(owner.as_bytes()), value.flatten())
    }
}

/// The content of a file.
#[derive(Debug, Default)]
pub(super) struct State {
    /// The number of changes; 0 if nothing was read yet.
    seq: u64,
    /// The offset and the length of the body.
    at: u64,
    size: u64,
    sum: u64,
    /// The length of the file, as far as it is known.
    reserved: u64,
    pub(super) namespace: String,
    pub(super) name: String,
    /// The last token.
    pub(super) last: u64,
    pub(super) line: Line<Extra>,
}

impl State {
    /// An empty line that has no file.
    pub(super) fn empty((namespace, name): (&str, &str)) -> Self {
        Self {
            at: HEADER as u64,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ..Self::default()
        }
    }

    /// Forces the next load to read the file.
    pub(super) fn forget(&mut self) {
        self.seq = 0;
    }

    /// The number of changes; 0 if nothing was read yet.
    pub(super) fn changes(&self) -> u64 {
        self.seq
    }

    fn read_body(&mut self, body: &str) -> Option<()> {
        let mut lines = body.split_inclusive('\n');
        let (last, names) = lines.next()?.trim_end().split_once(' ')?;
        (self.namespace, self.name) = serde_json::from_str(names).ok()?;
        self.last = last.parse().ok()?;
        self.line.seats.clear();
        for line in lines {
            let mut seat = read_seat(line.strip_suffix('\n')?)?;
            seat.extra.text = Some(line.into());
            self.line.seats.push(seat);
        }
        Some(())
    }
}

fn read_seat(line: &str) -> Option<Seat<Extra>> {
    let mut words = line.splitn(9, ' ');
    let id = ClaimId(u128::from_str_radix(words.next()?, 16).ok()?);
    let process = u64::from_str_radix(words.next()?, 16).ok()?;
    let slot = words.next()?.parse().ok()?;
    let (weight, capacity) = words.next()?.split_once('/')?;
    let ask = match (weight.parse().ok()?, capacity.parse().ok()?) {
        (0, 0) => Ask::Whole,
        (weight, capacity) if weight > 0 && weight <= capacity => Ask::Part { weight, capacity },
        _ => return None,
    };
    let mut number = || words.next()?.parse::<u64>().ok();
    let (sequence, expires, ttl, flags) = (number()?, number()?, number()?, number()?);
    let until = BootTime::from_nanos(expires);
    Some(Seat {
        id,
        ask,
        sequence,
        expires: until,
        ttl: Duration::from_nanos(ttl),
        evicted: flags & 1 != 0,
        extra: Extra {
            process,
            slot,
            until,
            orphan: flags & 2 != 0,
            by_lease: flags & 4 != 0,
            who: words.next()?.into(),
            text: None,
        },
    })
}

/// Sequence, offset, length and checksum of the body.
fn read_header(bytes: &[u8]) -> Option<(u64, u64, u64, u64)> {
    let text = std::str::from_utf8(bytes.get(..HEADER)?).ok()?;
    let (said, check) = text.trim_end().split_once("check ")?;
    if u64::from_str_radix(check, 16).ok()? != checksum(said.as_bytes()) {
        return None;
    }
    let mut words = said.strip_prefix(MAGIC)?.split(' ').step_by(2);
    let mut number = || u64::from_str_radix(words.next()?, 16).ok();
    Some((number()?, number()?, number()?, number()?))
}

/// The checksum of a body continues from line to line, so that lines can be appended.
fn sum(before: u64, body: &str) -> u64 {
    body.split_inclusive('\n').fold(before, |sum, line| {
        (sum.rotate_left(7) ^ checksum(line.as_bytes())).wrapping_mul(0x0100_0000_01b3)
    })
}

/// FNV-1a by words: detects a torn or edited file.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325 ^ bytes.len() as u64;
    let mut mix = |word: u64| {
        hash = (hash ^ word).wrapping_mul(0x0100_0000_01b3);
        hash ^= hash >> 29;
    };
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().for_each(|word| mix(u64::from_le_bytes(*word)));
    rest.iter().for_each(|byte| mix(u64::from(*byte)));
    hash
}

/// See the module documentation.
pub(super) struct LineFile {
    /// Its name in the directory.
    pub(super) name: Arc<str>,
    pub(super) path: PathBuf,
    file: File,
    pub(super) identity: Identity,
    /// Its content; `None` while a task of this process has the lock.
    state: Mutex<Option<State>>,
}

/// The result of trying to lock a line.
pub(super) enum Lock {
    /// It is locked, with this content.
    Had(State),
    /// Another has the lock.
    Taken,
    /// The name now belongs to another file, or to none.
    Gone,
}

impl LineFile {
    /// Opens a line's file; `None` if there is none.
    pub(super) fn open(home: &Home, name: &str) -> rustix::io::Result<Option<Self>> {
        match home.dir.open_file(&home.lines, name, OFlags::RDWR) {
            Err(Errno::NOENT) => Ok(None),
            opened => Self::with(home, name, opened?.into()).map(Some),
        }
    }

    /// Creates the file of an empty line, complete: an incomplete file is never visible under its
    /// name. A file that another process has created meanwhile will do. Open it by its name
    /// afterwards, because inotify reports the name that a file was opened by.
    fn create(home: &Home, name: &str, line: (&str, &str)) -> rustix::io::Result<()> {
        let new = format!("{UNFINISHED}{:016x}", rand::random::<u64>());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let file = home.dir.open_file(&home.lines, &new, flags)?;
        let file = Self::with(home, &new, file.into())?;
        let written = file.store(&mut State::empty(line), 0);
        let made = written.and_then(|()| {
            rustix::fs::linkat(&home.lines, &new, &home.lines, name, AtFlags::empty())
        });
        let _ = rustix::fs::unlinkat(&home.lines, &new, AtFlags::empty());
        match made {
            Err(Errno::EXIST) => Ok(()),
            made => made,
        }
    }

    fn with(home: &Home, name: &str, file: File) -> rustix::io::Result<Self> {
        let stat = rustix::fs::fstat(&file)?;
        Ok(Self {
            name: name.into(),
            path: home.dir.path.join(LINES).join(name),
            file,
            identity: identity(&stat),
            state: Mutex::new(Some(State {
                reserved: u64::try_from(stat.st_size).unwrap_or(0),
                ..State::default()
            })),
        })
    }

    /// Removes incomplete files of processes that were killed. No other process may be in the
    /// store.
    pub(super) fn remove_unfinished(home: &Home) {
        for name in dir::names(&home.lines).unwrap_or_default() {
            if name.starts_with(UNFINISHED) {
                let _ = rustix::fs::unlinkat(&home.lines, name, AtFlags::empty());
            }
        }
    }

    /// Takes the lock if it is available at once, or after a short spin, and reads what has
    /// changed.
    pub(super) fn lock(&self, operation: &'static str) -> Result<Lock> {
        let mut spinning_since: Option<Instant> = None;
        let mut state = loop {
            // First the lock within this process, then the flock.
            let free = self.state.lock().take();
            if let Some(state) = free {
                let tried = rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive);
                if tried.is_ok() {
                    break state;
                }
                *self.state.lock() = Some(state);
                match tried {
                    Ok(()) | Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                    Err(errno) => return Err(file_failed(operation, &self.path, errno)),
                }
            }
            let since = *spinning_since.get_or_insert_with(Instant::now);
            if since.elapsed() > SPIN {
                return Ok(Lock::Taken);
            }
            std::hint::spin_loop();
        };
        let loaded = self.load(operation, &mut state);
        // The last claim may leave even a replaced file, since nobody is granted after it.
        let last_leaves = operation == "leave" && state.line.seats.len() == 1;
        let in_place = loaded.and_then(|()| {
            let found = if last_leaves {
                Ok(true)
            } else {
                self.is_in_place()
            };
            found.map_err(|errno| file_failed(operation, &self.path, errno))
        });
        match in_place {
            Ok(true) => Ok(Lock::Had(state)),
            in_place => {
                self.unlock(state);
                in_place.map(|_| Lock::Gone)
            }
        }
    }

    /// Reads what has changed without the lock; [`LineFile::unlock`] returns the state. `None` if
    /// that is not possible: another task of this process uses it, a change is in progress, or the
    /// file was replaced. A body that is overwritten while it is read fails the checksum.
    pub(super) fn peek(&self, operation: &'static str) -> Option<State> {
        let mut state = self.state.lock().take()?;
        let whole = self.load(operation, &mut state).is_ok() && self.is_in_place() == Ok(true);
        if !whole {
            state.forget();
            *self.state.lock() = Some(state);
            return None;
        }
        Some(state)
    }

    fn is_in_place(&self) -> rustix::io::Result<bool> {
        dir::leads_to(&self.path, self.identity)
    }

    /// The number of changes of the line, read without its lock; `None` if it can't be read now.
    pub(super) fn sequence(&self) -> Option<u64> {
        let mut head = [0; HEADER];
        let length = self.file.read_at(&mut head, 0).ok()?;
        read_header(&head[..length]).map(|(seq, ..)| seq)
    }

    /// Releases the lock.
    pub(super) fn unlock(&self, state: State) {
        // Unlocking our own open file can't fail.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        *self.state.lock() = Some(state);
    }

    /// Reads what has changed since the last load. The caller holds the lock.
    fn load(&self, operation: &'static str, state: &mut State) -> Result<()> {
        let fail = |error| file_failed(operation, &self.path, error);
        let damaged = || damaged(operation, &self.path);
        let mut head = [0; HEADER];
        let length = self.file.read_at(&mut head, 0).map_err(fail)?;
        let (seq, at, size, expected) = read_header(&head[..length]).ok_or_else(damaged)?;
        if seq == state.seq && seq != 0 {
            return Ok(());
        }
        state.forget();
        let length = self.file.metadata().map_err(fail)?.len();
        if at.saturating_add(size) > length {
            return Err(damaged());
        }
        let mut body = vec![0; size as usize];
        self.file.read_exact_at(&mut body, at).map_err(fail)?;
        let body = String::from_utf8(body).map_err(|_| damaged())?;
        if sum(0, &body) != expected {
            return Err(damaged());
        }
        state.read_body(&body).ok_or_else(damaged)?;
        (state.seq, state.at, state.size, state.sum) = (seq, at, size, expected);
        Ok(())
    }

    /// Writes the line in `state`. If seats were only appended, `kept` is the number of seats that
    /// the file already has. The caller holds the lock.
    ///
    /// # Errors
    /// When it can't be written: the file then has its previous content.
    pub(super) fn store(&self, state: &mut State, kept: usize) -> rustix::io::Result<()> {
        let mut text = String::new();
        if kept == 0 {
            // Two strings always serialise.
            let names = serde_json::to_string(&(&state.namespace, &state.name));
            let _ = writeln!(text, "{} {}", state.last, names.unwrap_or_default());
        }
        for seat in &mut state.line.seats[kept..] {
            let extra = &mut seat.extra;
            if let Some(line) = &extra.text {
                text.push_str(line);
                continue;
            }
            let (weight, capacity) = seat.ask.numbers();
            let flags = u8::from(seat.evicted)
                | u8::from(extra.orphan) << 1
                | u8::from(extra.by_lease) << 2;
            let line = format!(
                "{:032x} {:016x} {} {weight}/{capacity} {} {} {} {flags} {}\n",
                seat.id.0,
                extra.process,
                extra.slot,
                seat.sequence,
                extra.until.as_nanos(),
                seat.ttl.as_nanos(),
                extra.who
            );
            text.push_str(&line);
            extra.text = Some(line.into());
        }
        // Taking the last place appends a line of text. Every other change writes the whole body
        // beside the old one.
        let (length, end) = (text.len() as u64, state.at + state.size);
        let (at, size, write_at, before) = match kept {
            0 if HEADER as u64 + length <= state.at => (HEADER as u64, length, HEADER as u64, 0),
            0 => (end, length, end, 0),
            _ => (state.at, state.size + length, end, state.sum),
        };
        let sum = sum(before, &text);
        let seq = state.seq + 1;
        let mut head = format!("{MAGIC}{seq:016x} at {at:08x} size {size:08x} sum {sum:016x} ");
        let check = checksum(head.as_bytes());
        let _ = write!(head, "check {check:016x}");
        let head = format!("{head:<width$}\n", width = HEADER - 1);
        // Three times the length of the body leaves room for a new one beside the old one.
        let room = HEADER as u64 + 3 * size;
        if room > BLOCK && room > state.reserved {
            let length = (2 * room).next_multiple_of(BLOCK);
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, length) {
                Ok(()) => state.reserved = length,
                Err(Errno::OPNOTSUPP) => {}
                Err(errno) => return Err(errno),
            }
        }
        let body = self.file.write_all_at(text.as_bytes(), write_at);
        body.and_then(|()| self.file.write_all_at(head.as_bytes(), 0))
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOSPC))?;
        (state.seq, state.at, state.size, state.sum) = (seq, at, size, sum);
        Ok(())
    }

    /// Removes the file if the line is empty. The caller holds the lock.
    pub(super) fn remove_if_empty(&self, home: &Home, state: &State) {
        if state.seq != 0 && state.line.seats.is_empty() {
            // If the file stays, it is just an empty line.
            let _ = rustix::fs::unlinkat(&home.lines, &*self.name, AtFlags::empty());
        }
    }

    /// Removes the file if the line is empty.
    pub(super) fn remove_if_idle(&self, home: &Home) {
        // If another holds the lock, it is in the line.
        if let Ok(Lock::Had(state)) = self.lock("close") {
            self.remove_if_empty(home, &state);
            self.unlock(state);
        }
    }
}

/// What to do about a line that has no file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    Make,
    IsEmpty,
}

/// The files that this process has open.
#[derive(Default)]
pub(super) struct OpenFiles(Mutex<Open>);

#[derive(Default)]
struct Open {
    /// Each with the time of its last use.
    files: HashMap<Arc<str>, (Arc<LineFile>, u64)>,
    /// Counts the uses.
    clock: u64,
}

/// Opens the file of a line, and creates it first if it is missing and `missing` says so.
fn open(
    home: &Home,
    name: &str,
    line: (&str, &str),
    missing: Missing,
) -> rustix::io::Result<Option<LineFile>> {
    // Another process may create or remove it at the same time, but not 100 times in a row.
    for _ in 0..100 {
        let opened = LineFile::open(home, name)?;
        if opened.is_some() || missing == Missing::IsEmpty {
            return Ok(opened);
        }
        LineFile::create(home, name, line)?;
    }
    Err(Errno::BUSY)
}

impl OpenFiles {
    /// The file `name` of a line; `None` if it does not exist and is not to be created.
    pub(super) fn get(
        &self,
        operation: &'static str,
        home: &Home,
        name: &str,
        line: (&str, &str),
        missing: Missing,
    ) -> Result<Option<Arc<LineFile>>> {
        {
            let Open { files, clock } = &mut *self.0.lock();
            *clock += 1;
            if let Some((file, used)) = files.get_mut(name) {
                *used = *clock;
                return Ok(Some(Arc::clone(file)));
            }
        }
        let opened = match open(home, name, line, missing) {
            Err(Errno::MFILE | Errno::NFILE) => {
                self.close(home, 0);
                open(home, name, line, missing)
            }
            opened => opened,
        };
        let file = match opened {
            Ok(Some(file)) => Arc::new(file),
            Ok(None) => return Ok(None),
            // The directory does not exist.
            Err(Errno::NOENT) => return Err(moved(operation, &home.dir.path)),
            Err(errno) => {
                let path = home.dir.path.join(LINES).join(name);
                return Err(file_failed(operation, &path, errno));
            }
        };
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = OPEN_FILES.min(usize::try_from(limit / 4).unwrap_or(OPEN_FILES));
        let (file, full) = {
            let Open { files, clock } = &mut *self.0.lock();
            // Another caller may have been faster: all of them must use the same one.
            let kept = files.entry(name.into()).or_insert((file, *clock));
            (Arc::clone(&kept.0), files.len() > most)
        };
        if full {
            self.close(home, most / 2);
        }
        Ok(Some(file))
    }

    /// The file if it is open already.
    pub(super) fn known(&self, name: &str) -> Option<Arc<LineFile>> {
        let open = self.0.lock();
        open.files.get(name).map(|(file, _)| Arc::clone(file))
    }

    /// Forgets a file that was replaced or removed.
    pub(super) fn forget(&self, name: &str) {
        self.0.lock().files.remove(name);
    }

    /// Closes the least recently used files, down to `keep`, and removes those of empty lines.
    pub(super) fn close(&self, home: &Home, keep: usize) {
        let mut open = self.0.lock();
        let files = &mut open.files;
        let idle = files
            .iter()
            .filter(|(_, (file, _))| Arc::strong_count(file) == 1);
        let mut idle: Vec<(u64, Arc<str>)> = idle
            .map(|(name, (_, used))| (*used, Arc::clone(name)))
            .collect();
        idle.sort_unstable();
        idle.truncate(files.len().saturating_sub(keep));
        let closed: Vec<_> = idle
            .iter()
            .filter_map(|(_, name)| files.remove(name))
            .collect();
        drop(open);
        closed
            .iter()
            .for_each(|(file, _)| file.remove_if_idle(home));
    }
}
