//! `Store`: the lines of a namespace in one JSON file, changed under a lock and replaced by a
//! rename, so that it can be read without the lock.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use palisade::engine::{Ask, ClaimId, Line, Seat};
use palisade::report::Owner;
use palisade::{BootTime, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// How long the file's lock is waited for. A process that was stopped keeps it.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the file holds.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct State {
    /// The sequence number of the last grant. The clock is its floor, so that tokens rise even if
    /// the file is lost.
    pub(crate) sequence: u64,
    /// Rises with every change.
    pub(crate) version: u64,
    /// Rises with every eviction.
    pub(crate) evictions: u64,
    lines: BTreeMap<String, Vec<Record>>,
    /// Claims that were left before they arrived, and until when that is remembered.
    tombstones: BTreeMap<String, u64>,
}

/// A claim as the file keeps it. Times are nanoseconds of the boot clock, which all processes of
/// this machine share.
#[derive(Serialize, Deserialize)]
struct Record {
    id: String,
    /// Weight and capacity; nothing for the whole line.
    part: Option<(u32, u32)>,
    sequence: u64,
    expires: u64,
    ttl: Duration,
    evicted: bool,
    extra: Extra,
}

/// What a claim keeps beside its place.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Extra {
    pub(crate) owner: Owner,
    pub(crate) value: Option<String>,
}

impl Record {
    fn seat(self) -> Option<Seat<Extra>> {
        Some(Seat {
            id: self.id.parse().ok()?,
            ask: self
                .part
                .map_or(Ask::Whole, |(weight, capacity)| Ask::Part {
                    weight,
                    capacity,
                }),
            sequence: self.sequence,
            expires: BootTime::from_nanos(self.expires),
            ttl: self.ttl,
            evicted: self.evicted,
            extra: self.extra,
        })
    }

    fn of(seat: Seat<Extra>) -> Self {
        Self {
            id: seat.id.to_string(),
            part: match seat.ask {
                Ask::Whole => None,
                Ask::Part { weight, capacity } => Some((weight, capacity)),
            },
            sequence: seat.sequence,
            expires: seat.expires.as_nanos(),
            ttl: seat.ttl,
            evicted: seat.evicted,
            extra: seat.extra,
        }
    }
}

impl State {
    pub(crate) fn names(&self) -> Vec<String> {
        self.lines.keys().cloned().collect()
    }

    /// Takes a line out, without claims whose lease has ended and with everyone granted who has
    /// come to the front. [`State::put`] puts it back.
    pub(crate) fn take(&mut self, name: &str, now: BootTime) -> Line<Extra> {
        let records = self.lines.remove(name).unwrap_or_default();
        let seats = records.into_iter().filter_map(Record::seat).collect();
        let mut line = Line { seats };
        self.settle(&mut line, now);
        line
    }

    pub(crate) fn settle(&mut self, line: &mut Line<Extra>, now: BootTime) {
        let (last, clock) = (&mut self.sequence, UNIX_EPOCH.elapsed());
        let floor = clock.map_or(0, |since| since.as_micros() as u64);
        line.settle(now, || {
            *last = floor.max(*last + 1);
            *last
        });
    }

    /// Settles a line and puts it back; an empty one is forgotten.
    pub(crate) fn put(&mut self, name: &str, mut line: Line<Extra>, now: BootTime) {
        self.settle(&mut line, now);
        let records: Vec<Record> = line.seats.into_iter().map(Record::of).collect();
        if !records.is_empty() {
            self.lines.insert(name.to_owned(), records);
        }
    }

    /// Remembers that a claim was left, for longer than a request can be under way.
    pub(crate) fn bury(&mut self, claim: ClaimId, now: BootTime) {
        self.tombstones.retain(|_, until| *until > now.as_nanos());
        let until = now + Duration::from_secs(300);
        self.tombstones.insert(claim.to_string(), until.as_nanos());
    }

    pub(crate) fn is_buried(&self, claim: ClaimId, now: BootTime) -> bool {
        let until = self.tombstones.get(&claim.to_string());
        until.is_some_and(|until| *until > now.as_nanos())
    }
}

/// The file.
#[derive(Clone)]
pub(crate) struct Store {
    pub(crate) path: PathBuf,
}

impl Store {
    /// Lets `change` change what the file says, and replaces it if that did something.
    pub(crate) async fn change<T>(
        &self,
        operation: &'static str,
        change: impl FnOnce(&mut State) -> T,
    ) -> Result<T> {
        let failed = |error| self.unreachable(operation, error);
        let _lock = self.lock().await.map_err(failed)?;
        let mut state = self.read(operation)?;
        let before = serde_json::to_vec(&state).map_err(|error| failed(error.into()))?;
        let done = change(&mut state);
        let after = serde_json::to_vec(&state).map_err(|error| failed(error.into()))?;
        if after != before {
            state.version += 1;
            let after = serde_json::to_vec(&state).map_err(|error| failed(error.into()))?;
            let new = self.path.with_extension("new");
            std::fs::write(&new, after).map_err(failed)?;
            // Whoever reads meanwhile sees the old file or the new one.
            std::fs::rename(&new, &self.path).map_err(failed)?;
        }
        Ok(done)
    }

    /// What the file says; nothing before the first change.
    pub(crate) fn read(&self, operation: &'static str) -> Result<State> {
        let state = match std::fs::read(&self.path) {
            Ok(json) => serde_json::from_slice(&json).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(State::default()),
            Err(error) => Err(error),
        };
        state.map_err(|error| self.unreachable(operation, error))
    }

    fn unreachable(&self, operation: &'static str, error: io::Error) -> Error {
        let message = format!("{}: {error}", self.path.display());
        Error::new(ErrorKind::Unreachable, operation, message)
    }

    /// The lock of a file beside it, given back when it is dropped or its process dies.
    async fn lock(&self) -> io::Result<File> {
        let file = File::create(self.path.with_extension("lock"))?;
        let deadline = BootTime::now() + PATIENCE;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(error)) => return Err(error),
                Err(TryLockError::WouldBlock) if deadline.has_passed() => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(TryLockError::WouldBlock) => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    }
}
