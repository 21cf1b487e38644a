//! `LineFile`: one line in one small file of text, changed only under its own `flock`.
//!
//! A header of fixed length says where the body is, how long it is and what its checksum is; the
//! body has the claims, one on each line. A change writes the new body beside the old one, then
//! the header over the old header: a process that is killed in between, or a write that fails,
//! leaves the line as it was. Nothing is synced: files of another boot are thrown away.
//!
//! Room for the next body is taken when a line grows, so that a full disk stops nobody from
//! leaving. Bytes that are not what was written are `damaged`, never a free line.

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
use crate::core::claim::{Ask, ClaimId};
use crate::core::clock::BootTime;
use crate::core::error::Result;
use crate::core::line::{Line, Seat};
use crate::core::owner::Owner;

/// How long the header is.
pub(super) const HEADER: usize = 128;
const MAGIC: &str = "palisade line 1 seq ";
/// What the name of a file begins with that is not a whole line yet.
pub(super) const UNFINISHED: &str = ".new-";
/// What every local file system gives to the first byte of a file.
const BLOCK: u64 = 4096;
/// Some changes of others: longer would only burn what the holder needs to run.
const SPIN: Duration = Duration::from_micros(40);
/// How many files are kept open, at the most.
const OPEN_FILES: usize = 256;

/// What the engine keeps beside a seat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Extra {
    /// Whose it is.
    pub(super) process: u64,
    /// Where its renewals are, in the file of that process.
    pub(super) slot: u32,
    /// Until when it lasts, as the file says: a renewal is not told to the line.
    pub(super) until: BootTime,
    /// Whether its renewals could not be found, so that it ends by the ttl from then on.
    pub(super) orphan: bool,
    /// Whether it is kept, once it holds, until its lease ends though its process dies.
    pub(super) by_lease: bool,
    /// Owner and value, each as JSON, with a tab between.
    pub(super) who: Arc<str>,
    /// Its line in the file, until something changes that it says.
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

/// What a file says.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Counts the changes; 0 when nothing was read yet.
    seq: u64,
    /// Where the body is, and how long.
    at: u64,
    size: u64,
    sum: u64,
    /// How long the file is, as far as that is known.
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

    /// Makes the next look read the file.
    pub(super) fn forget(&mut self) {
        self.seq = 0;
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

/// Sequence, place, length and checksum of the body.
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

/// The checksum of a body goes on from line to line.
fn sum(before: u64, body: &str) -> u64 {
    body.split_inclusive('\n').fold(before, |sum, line| {
        (sum.rotate_left(7) ^ checksum(line.as_bytes())).wrapping_mul(0x0100_0000_01b3)
    })
}

/// FNV-1a by words: tells a torn or edited file from a whole one.
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

/// See the module's text.
pub(super) struct LineFile {
    /// Its name in the folder.
    pub(super) name: Arc<str>,
    pub(super) path: PathBuf,
    file: File,
    pub(super) identity: Identity,
    /// What it says; `None` while somebody in this process has the lock.
    state: Mutex<Option<State>>,
}

/// What became of asking for a line's lock.
pub(super) enum Lock {
    /// It is had, and this is what the file says.
    Had(State),
    /// Another has it.
    Taken,
    /// The file is not the one with its name any more.
    Gone,
}

impl LineFile {
    /// Opens a line's file; `None` when there is none.
    pub(super) fn open(home: &Home, name: &str) -> rustix::io::Result<Option<Self>> {
        match home.dir.open_file(&home.lines, name, OFlags::RDWR) {
            Err(Errno::NOENT) => Ok(None),
            opened => Self::with(home, name, opened?.into()).map(Some),
        }
    }

    /// Makes the file of an empty line, whole: an empty file is never seen under its name. One
    /// that another has made meanwhile is as good. It is to be opened by its name: whoever watches
    /// the folder is told the name that a file was opened by.
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

    /// Removes what processes that were killed have left half made. Nobody else may be in the
    /// store.
    pub(super) fn remove_unfinished(home: &Home) {
        for name in dir::names(&home.lines).unwrap_or_default() {
            if name.starts_with(UNFINISHED) {
                let _ = rustix::fs::unlinkat(&home.lines, name, AtFlags::empty());
            }
        }
    }

    /// Takes the lock if it can be had at once, or nearly so, and reads what has changed.
    pub(super) fn lock(&self, operation: &'static str) -> Result<Lock> {
        let mut spinning_since: Option<Instant> = None;
        let mut state = loop {
            // First the lock of this process, then that of all.
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
        // The last one may leave wherever it is: nobody is granted after it.
        let last_leaves = operation == "leave" && state.line.seats.len() == 1;
        match loaded {
            Ok(()) if last_leaves || self.is_in_place() => Ok(Lock::Had(state)),
            loaded => {
                self.unlock(state);
                loaded.map(|()| Lock::Gone)
            }
        }
    }

    /// Reads what has changed without the lock, to be given back by [`LineFile::unlock`]. `None` when
    /// it can't be told: somebody in this process is at it, a change is under way, or the file is
    /// not the one with its name any more. A body that is overwritten while it is read has another
    /// checksum.
    pub(super) fn peek(&self, operation: &'static str) -> Option<State> {
        let mut state = self.state.lock().take()?;
        let whole = self.load(operation, &mut state).is_ok() && self.is_in_place();
        if !whole {
            state.forget();
            *self.state.lock() = Some(state);
            return None;
        }
        Some(state)
    }

    fn is_in_place(&self) -> bool {
        let named = rustix::fs::lstat(&self.path);
        named.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity)
    }

    /// Lets go of the lock.
    pub(super) fn unlock(&self, state: State) {
        // Unlocking an open file of ours can't fail.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        *self.state.lock() = Some(state);
    }

    /// Reads what has changed since the last look. The caller holds the lock.
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

    /// Writes the line as it is in `state`, of which the file has the first `kept` seats already
    /// if only others were added. The caller holds the lock.
    ///
    /// # Errors
    /// When it can't be written: the file says what it said before.
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
        // Whoever takes the last place adds a line; every other change writes the body anew,
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
        // As long as the longest body three times, there is room for one beside another.
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

    /// Removes the file if nobody is in the line. The caller has the lock.
    pub(super) fn remove_if_empty(&self, home: &Home, state: &State) {
        if state.seq != 0 && state.line.seats.is_empty() {
            // Left behind, it is an empty line.
            let _ = rustix::fs::unlinkat(&home.lines, &*self.name, AtFlags::empty());
        }
    }

    /// Removes the file of a line that nobody is in.
    pub(super) fn remove_if_idle(&self, home: &Home) {
        // Whoever has it locked is in the line.
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
    /// Each with when it was used last.
    files: HashMap<Arc<str>, (Arc<LineFile>, u64)>,
    /// Counts the uses.
    clock: u64,
}

/// Opens the file of a line, and makes it first where it is missing and to be made.
fn open(
    home: &Home,
    name: &str,
    line: (&str, &str),
    missing: Missing,
) -> rustix::io::Result<Option<LineFile>> {
    // Another may make or remove it at the same moment; nobody is that quick many times.
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
    /// The file `name` of a line; `None` when there is none and it is not to be made.
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
            // There is no folder to make it in.
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
            // Another caller may have been quicker: everyone here takes the same one.
            let kept = files.entry(name.into()).or_insert((file, *clock));
            (Arc::clone(&kept.0), files.len() > most)
        };
        if full {
            self.close(home, most / 2);
        }
        Ok(Some(file))
    }

    /// Forgets a file that is not the one with its name any more.
    pub(super) fn forget(&self, name: &str) {
        self.0.lock().files.remove(name);
    }

    /// Closes the files that were not used for longest, down to `keep`, and removes those of
    /// lines that nobody is in.
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
