//! `LineFile`: one line in one small file of text, changed only under its own `flock`.
//!
//! A header of fixed length says where the body is, how long it is and what its checksum is; the
//! body has the claims, one on each line. A change writes the new body beside the old one, then
//! the header over the old header: a process that is killed in between, or a write that fails,
//! leaves the line as it was. Nothing is synced: files of another boot are thrown away.
//!
//! Room for the next body is taken when a line grows, so that a full disk stops nobody from
//! leaving. Bytes that are not what was written are `damaged`, never a free line.

use std::fmt::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;

use super::boot::{Home, LINES};
use super::dir::{self, Identity, identity};
use super::error::{damaged, file_failed};
use super::keys::checksum;
use crate::core::claim::{Ask, Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::error::Result;
use crate::core::line::{Line, Seat};
use crate::core::owner::Owner;

/// How long the header is.
pub(super) const HEADER: u64 = 128;
const MAGIC: &str = "palisade line 1 seq ";
/// What the name of a file begins with that is not a whole line yet.
const UNFINISHED: &str = ".new-";
/// What every local file system gives to the first byte of a file.
const BLOCK: u64 = 4096;

/// What the engine keeps beside a seat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Extra {
    /// Whose it is.
    pub(super) process: u64,
    /// Where its renewals are, in the file of that process.
    pub(super) slot: u32,
    /// Whether its renewals could not be found, so that it ends by the ttl from then on.
    pub(super) orphan: bool,
    /// Whether it is kept, once it holds, until its lease ends though its process dies.
    pub(super) by_lease: bool,
    /// Owner and value, each as JSON, with a tab between.
    pub(super) who: Arc<str>,
    /// What the file says, and of which seat: made anew only when that has changed.
    text: Option<(Said, Arc<str>)>,
}

/// The parts of a seat that change. A renewal is not among them: it is not told to the line.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Said {
    ask: Ask,
    sequence: u64,
    evicted: bool,
    orphan: bool,
    who: Arc<str>,
}

impl Said {
    fn of(seat: &Seat<Extra>) -> Self {
        Self {
            ask: seat.ask,
            sequence: seat.sequence,
            evicted: seat.evicted,
            orphan: seat.extra.orphan,
            who: Arc::clone(&seat.extra.who),
        }
    }

    fn is_of(&self, seat: &Seat<Extra>) -> bool {
        let now = (seat.ask, seat.sequence, seat.evicted, seat.extra.orphan);
        (self.ask, self.sequence, self.evicted, self.orphan) == now
            && Arc::ptr_eq(&self.who, &seat.extra.who)
    }
}

impl Extra {
    pub(super) fn new(claim: &Claim, by_lease: bool, process: u64, slot: u32) -> Self {
        let value = serde_json::to_string(&claim.value).unwrap_or_default();
        Self {
            process,
            slot,
            orphan: false,
            by_lease,
            who: format!("{}\t{value}", claim.owner.to_json()).into(),
            text: None,
        }
    }

    pub(super) fn set_value(&mut self, value: &str) {
        let owner = self.who.split('\t').next().unwrap_or_default();
        let value = serde_json::to_string(value).unwrap_or_default();
        self.who = format!("{owner}\t{value}").into();
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
    /// The body as it is, line by line, and the token in it.
    written: Vec<Arc<str>>,
    written_last: u64,
}

impl State {
    /// An empty line that has no file.
    pub(super) fn empty(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ..Self::default()
        }
    }

    /// Makes the next look read the file.
    pub(super) fn forget(&mut self) {
        self.seq = 0;
    }

    /// The body as it is to be, line by line.
    fn body(&mut self) -> Vec<Arc<str>> {
        let known = self
            .written
            .first()
            .filter(|_| self.last == self.written_last);
        let title = known.map_or_else(
            || {
                // Two strings always serialise.
                let names = serde_json::to_string(&(&self.namespace, &self.name));
                Arc::from(format!("{} {}\n", self.last, names.unwrap_or_default()))
            },
            Arc::clone,
        );
        self.written_last = self.last;
        let mut body = Vec::with_capacity(self.line.seats.len() + 1);
        body.push(title);
        for seat in &mut self.line.seats {
            let known = seat
                .extra
                .text
                .as_ref()
                .filter(|(said, _)| said.is_of(seat));
            let text = match known {
                Some((_, text)) => Arc::clone(text),
                None => write_seat(seat),
            };
            if known.is_none() {
                seat.extra.text = Some((Said::of(seat), Arc::clone(&text)));
            }
            body.push(text);
        }
        body
    }

    fn read_body(&mut self, body: &str) -> Option<()> {
        let mut lines = body.split_inclusive('\n');
        let title = lines.next()?;
        let (last, names) = title.trim_end().split_once(' ')?;
        (self.namespace, self.name) = serde_json::from_str(names).ok()?;
        self.last = last.parse().ok()?;
        self.line.seats.clear();
        self.written.clear();
        self.written_last = self.last;
        self.written.push(title.into());
        for line in lines {
            let mut seat = read_seat(line.strip_suffix('\n')?)?;
            let text: Arc<str> = line.into();
            seat.extra.text = Some((Said::of(&seat), Arc::clone(&text)));
            self.line.seats.push(seat);
            self.written.push(text);
        }
        Some(())
    }
}

/// The checksum of a body goes on from line to line.
fn sum<'a>(before: u64, lines: impl Iterator<Item = &'a str>) -> u64 {
    lines.fold(before, |sum, line| {
        (sum.rotate_left(7) ^ checksum(line.as_bytes())).wrapping_mul(0x0100_0000_01b3)
    })
}

fn write_seat(seat: &Seat<Extra>) -> Arc<str> {
    let (weight, capacity) = match seat.ask {
        Ask::Whole => (0, 0),
        Ask::Part { weight, capacity } => (weight, capacity),
    };
    let flags = u8::from(seat.evicted)
        | u8::from(seat.extra.orphan) << 1
        | u8::from(seat.extra.by_lease) << 2;
    let text = format!(
        "{:032x} {:016x} {} {weight}/{capacity} {} {} {} {flags} {}\n",
        seat.id.0,
        seat.extra.process,
        seat.extra.slot,
        seat.sequence,
        seat.expires.as_nanos(),
        seat.ttl.as_nanos(),
        seat.extra.who
    );
    text.into()
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
    Some(Seat {
        id,
        ask,
        sequence,
        expires: BootTime::from_nanos(expires),
        ttl: Duration::from_nanos(ttl),
        evicted: flags & 1 != 0,
        extra: Extra {
            process,
            slot,
            orphan: flags & 2 != 0,
            by_lease: flags & 4 != 0,
            who: words.next()?.into(),
            text: None,
        },
    })
}

/// The header as it is written.
fn header(seq: u64, at: u64, size: u64, sum: u64) -> String {
    let mut text = format!("{MAGIC}{seq:016x} at {at:08x} size {size:08x} sum {sum:016x} ");
    let check = checksum(text.as_bytes());
    let _ = write!(text, "check {check:016x}");
    format!("{text:<width$}\n", width = HEADER as usize - 1)
}

/// Sequence, place, length and checksum of the body.
fn read_header(bytes: &[u8]) -> Option<(u64, u64, u64, u64)> {
    let text = std::str::from_utf8(bytes.get(..HEADER as usize)?).ok()?;
    let (said, check) = text.trim_end().split_once("check ")?;
    if u64::from_str_radix(check, 16).ok()? != checksum(said.as_bytes()) {
        return None;
    }
    let mut words = said.strip_prefix(MAGIC)?.split(' ').step_by(2);
    let mut number = || u64::from_str_radix(words.next()?, 16).ok();
    Some((number()?, number()?, number()?, number()?))
}

/// Whether a file of this name is not a whole line yet.
pub(super) fn is_unfinished(name: &str) -> bool {
    name.starts_with(UNFINISHED)
}

/// See the module's text.
pub(super) struct LineFile {
    /// Its name in the folder.
    pub(super) name: Arc<str>,
    pub(super) path: PathBuf,
    fd: OwnedFd,
    pub(super) identity: Identity,
    pub(super) state: Mutex<State>,
}

impl LineFile {
    /// Opens a line's file; `None` when there is none.
    pub(super) fn open(home: &Home, name: &Arc<str>) -> std::result::Result<Option<Self>, Errno> {
        match home.dir.open_file(&home.lines, name, OFlags::RDWR) {
            Err(Errno::NOENT) => Ok(None),
            opened => Self::with(home, name, opened?).map(Some),
        }
    }

    /// Makes the file of an empty line, whole: an empty file is never seen under its name. One
    /// that another has made meanwhile is as good. It is to be opened by its name: whoever watches
    /// the folder is told the name that a file was opened by.
    pub(super) fn create(
        home: &Home,
        name: &str,
        mut line: State,
    ) -> std::result::Result<(), Errno> {
        let new = format!("{UNFINISHED}{:016x}", rand::random::<u64>());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let fd = home.dir.open_file(&home.lines, &new, flags)?;
        let body = line.body().concat();
        let sum = sum(0, body.split_inclusive('\n'));
        let text = header(1, HEADER, body.len() as u64, sum) + &body;
        let made = write_all(&fd, text.as_bytes(), 0).and_then(|()| {
            rustix::fs::linkat(&home.lines, &new, &home.lines, name, AtFlags::empty())
        });
        let _ = rustix::fs::unlinkat(&home.lines, &new, AtFlags::empty());
        match made {
            Err(Errno::EXIST) => Ok(()),
            made => made,
        }
    }

    fn with(home: &Home, name: &Arc<str>, fd: OwnedFd) -> std::result::Result<Self, Errno> {
        let stat = rustix::fs::fstat(&fd)?;
        Ok(Self {
            name: Arc::clone(name),
            path: home.dir.path.join(LINES).join(&**name),
            fd,
            identity: identity(&stat),
            state: Mutex::new(State {
                reserved: u64::try_from(stat.st_size).unwrap_or(0),
                ..State::default()
            }),
        })
    }

    /// Removes what processes that were killed have left half made. Nobody else may be in the
    /// store.
    pub(super) fn remove_unfinished(lines: &OwnedFd) {
        for name in dir::names(lines).unwrap_or_default() {
            if is_unfinished(&name) {
                let _ = rustix::fs::unlinkat(lines, name, AtFlags::empty());
            }
        }
    }

    /// Takes the line's lock if it can be had at once.
    pub(super) fn try_lock(&self) -> std::result::Result<bool, Errno> {
        match rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    pub(super) fn unlock(&self) {
        // Unlocking an open file of ours can't fail.
        let _ = rustix::fs::flock(&self.fd, FlockOperation::Unlock);
    }

    /// Whether the path, directory included, still leads to this file.
    pub(super) fn is_in_place(&self) -> bool {
        rustix::fs::lstat(&self.path).is_ok_and(|stat| identity(&stat) == self.identity)
    }

    /// Reads what has changed since the last look. The caller holds the lock.
    pub(super) fn load(&self, operation: &'static str, state: &mut State) -> Result<()> {
        let fail = |errno| file_failed(operation, &self.path, errno);
        let damaged = || damaged(operation, &self.path);
        if state.seq != 0 {
            let mut head = [0; HEADER as usize];
            rustix::io::pread(&self.fd, &mut head, 0).map_err(fail)?;
            if read_header(&head).ok_or_else(damaged)?.0 == state.seq {
                return Ok(());
            }
        }
        let mut first = [0; BLOCK as usize];
        let length = rustix::io::pread(&self.fd, &mut first, 0).map_err(fail)?;
        let (seq, at, size, expected) = read_header(&first[..length]).ok_or_else(damaged)?;
        state.forget();
        let end = usize::try_from(at + size).unwrap_or(usize::MAX);
        let rest;
        let body = if let Some(body) = first[..length].get(at as usize..end) {
            body
        } else {
            rest = self
                .read_exact(at, size)
                .map_err(fail)?
                .ok_or_else(damaged)?;
            &rest
        };
        let text = std::str::from_utf8(body).map_err(|_| damaged())?;
        if sum(0, text.split_inclusive('\n')) != expected {
            return Err(damaged());
        }
        state.read_body(text).ok_or_else(damaged)?;
        (state.seq, state.at, state.size, state.sum) = (seq, at, size, expected);
        Ok(())
    }

    /// Reads a body that is not in the first block; `None` when the file ends before it.
    fn read_exact(&self, at: u64, size: u64) -> std::result::Result<Option<Vec<u8>>, Errno> {
        let length = rustix::fs::fstat(&self.fd)?.st_size as u64;
        if at + size > length {
            return Ok(None);
        }
        let mut bytes = vec![0; size as usize];
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pread(&self.fd, &mut bytes[done..], at + done as u64)? {
                0 => return Ok(None),
                more => done += more,
            }
        }
        Ok(Some(bytes))
    }

    /// Writes the line as it is in `state`. The caller holds the lock.
    ///
    /// # Errors
    /// When it can't be written: the file says what it said before.
    pub(super) fn store(&self, operation: &'static str, state: &mut State) -> Result<()> {
        let body = state.body();
        // Whoever takes the last place adds a line; every other change writes the body anew,
        // beside the old one.
        let same = state.written.len();
        let grows = body.len() > same
            && same > 0
            && std::iter::zip(&state.written, &body).all(|(old, new)| Arc::ptr_eq(old, new));
        let lines = if grows { &body[same..] } else { &body[..] };
        let before = if grows { state.sum } else { 0 };
        let sum = sum(before, lines.iter().map(|line| &**line));
        let text = lines.concat();
        let (at, size, write_at) = if grows {
            let end = state.at + state.size;
            (state.at, state.size + text.len() as u64, end)
        } else {
            let size = text.len() as u64;
            let at = match HEADER + size <= state.at {
                true => HEADER,
                false => state.at + state.size,
            };
            (at, size, at)
        };
        let head = header(state.seq + 1, at, size, sum);
        let write = |reserved: &mut u64| {
            // As long as the longest body three times, there is room for one beside another.
            let room = HEADER + 3 * size;
            if room > BLOCK && room > *reserved {
                let length = (2 * room).next_multiple_of(BLOCK);
                match rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), 0, length) {
                    Ok(()) => *reserved = length,
                    Err(Errno::OPNOTSUPP) => {}
                    Err(errno) => return Err(errno),
                }
            }
            write_all(&self.fd, text.as_bytes(), write_at)?;
            write_all(&self.fd, head.as_bytes(), 0)
        };
        write(&mut state.reserved).map_err(|errno| file_failed(operation, &self.path, errno))?;
        (state.seq, state.at, state.size, state.sum) = (state.seq + 1, at, size, sum);
        state.written = body;
        Ok(())
    }

    /// Removes the file if nobody is in the line. The caller has seen that it is in place, and
    /// holds the lock.
    pub(super) fn remove_if_empty(&self, home: &Home, state: &State) {
        if state.seq != 0 && state.line.seats.is_empty() {
            // Left behind, it is an empty line.
            let _ = rustix::fs::unlinkat(&home.lines, &*self.name, AtFlags::empty());
        }
    }
}

fn write_all(fd: &OwnedFd, bytes: &[u8], at: u64) -> std::result::Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(fd, &bytes[done..], at + done as u64) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(more) => done += more,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
