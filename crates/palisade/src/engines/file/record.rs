//! The records of the store, as bytes: tickets, tombstones, watches and the one counter record.
//!
//! Fixed little-endian headers, so that a line is read without parsing anything else; owner and
//! value follow and are read only when they are shown. Bytes that can't be a record are
//! `Unusable`, never taken as free. Keys begin with a letter for the kind; names have no control
//! characters, so that a zero byte ends them.

use std::time::Duration;

use crate::core::claim::{Ask, Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::error::{Error, Kind, Result};
use crate::core::line::Seat;
use crate::core::owner::Owner;
use crate::core::report::Scope;

/// The key of the one counter record.
pub(super) const COUNTERS: &[u8] = b"M";
/// What ticket keys begin with.
const TICKET: u8 = b'T';
/// What tombstone keys begin with.
pub(super) const TOMBSTONE: u8 = b'X';
/// What watch keys begin with.
pub(super) const WATCH: u8 = b'W';

const HEADER: usize = 64;
const EVICTED: u32 = 1;
const HAS_VALUE: u32 = 2;

/// What the engine keeps beside a seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extra {
    /// The order of entry; the end of the ticket's key.
    pub(super) seq: u64,
    /// Whose it is.
    pub(super) process: u64,
    /// What the record says; `None` when there is none yet.
    pub(super) saved: Option<Saved>,
}

/// The parts of a seat that change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Saved {
    pub(super) ask: Ask,
    pub(super) counted: u64,
    pub(super) expires: BootTime,
    pub(super) evicted: bool,
}

impl Saved {
    pub(super) fn of(seat: &Seat<Extra>) -> Self {
        Self {
            ask: seat.ask,
            counted: seat.counted,
            expires: seat.expires,
            evicted: seat.evicted,
        }
    }
}

fn bad(what: &str) -> Error {
    Error::new(
        Kind::Unusable,
        "read",
        format!("the store holds a {what} that is not palisade's; remove its folder `lines`"),
    )
}

/// What every ticket key of one line begins with.
pub(super) fn line_prefix(namespace: &str, name: &str) -> Vec<u8> {
    let mut key = names_prefix(namespace, name);
    key.push(0);
    key
}

/// What every ticket key of the lines that begin with `prefix` begins with.
pub(super) fn names_prefix(namespace: &str, prefix: &str) -> Vec<u8> {
    let mut key = Vec::with_capacity(namespace.len() + prefix.len() + 12);
    key.push(TICKET);
    key.extend_from_slice(namespace.as_bytes());
    key.push(0);
    key.extend_from_slice(prefix.as_bytes());
    key
}

/// The name in a ticket key of `namespace`.
pub(super) fn name_in_key<'a>(namespace: &str, key: &'a [u8]) -> Result<&'a str> {
    let name = key.get(namespace.len() + 2..key.len().saturating_sub(9));
    name.and_then(|name| std::str::from_utf8(name).ok())
        .ok_or_else(|| bad("key"))
}

/// The order of entry at the end of a ticket key.
pub(super) fn seq_in_key(key: &[u8]) -> Result<u64> {
    key.last_chunk::<8>()
        .map(|seq| u64::from_be_bytes(*seq))
        .ok_or_else(|| bad("key"))
}

/// The key of a tombstone or of a watch.
pub(super) fn id_key(kind: u8, id: u128) -> [u8; 17] {
    let mut key = [kind; 17];
    key[1..].copy_from_slice(&id.to_be_bytes());
    key
}

/// The id in such a key.
pub(super) fn id_in_key(key: &[u8]) -> Result<u128> {
    key.last_chunk::<16>()
        .map(|id| u128::from_be_bytes(*id))
        .ok_or_else(|| bad("key"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// Reads a ticket without its owner and value.
pub(super) fn read_seat(seq: u64, bytes: &[u8]) -> Result<Seat<Extra>> {
    if bytes.len() < HEADER || bytes.len() - HEADER < u32_at(bytes, 60) as usize {
        return Err(bad("ticket"));
    }
    let mut id = [0; 16];
    id.copy_from_slice(&bytes[..16]);
    let ask = match (u32_at(bytes, 24), u32_at(bytes, 28)) {
        (0, 0) => Ask::Whole,
        (weight, capacity) if weight > 0 && weight <= capacity => Ask::Part { weight, capacity },
        _ => return Err(bad("ticket")),
    };
    let mut seat = Seat {
        id: ClaimId(u128::from_le_bytes(id)),
        ask,
        counted: u64_at(bytes, 32),
        expires: BootTime::from_nanos(u64_at(bytes, 40)),
        ttl: Duration::from_nanos(u64_at(bytes, 48)),
        evicted: u32_at(bytes, 56) & EVICTED != 0,
        extra: Extra {
            seq,
            process: u64_at(bytes, 16),
            saved: None,
        },
    };
    seat.extra.saved = Some(Saved::of(&seat));
    Ok(seat)
}

/// Owner and value of a ticket that [`read_seat`] took.
pub(super) fn read_rest(bytes: &[u8]) -> (Option<Owner>, Option<String>) {
    let owner_len = u32_at(bytes, 60) as usize;
    let (owner, value) = bytes[HEADER..].split_at(owner_len);
    let value =
        (u32_at(bytes, 56) & HAS_VALUE != 0).then(|| String::from_utf8_lossy(value).into_owned());
    (Owner::from_json(owner), value)
}

/// The record of a new ticket.
pub(super) fn new_ticket(seat: &Seat<Extra>, claim: &Claim) -> Vec<u8> {
    let owner = claim.owner.to_json();
    let value = claim.value.as_deref().unwrap_or_default();
    let mut bytes = Vec::with_capacity(HEADER + owner.len() + value.len());
    bytes.resize(HEADER, 0);
    let flags = if claim.value.is_some() { HAS_VALUE } else { 0 };
    bytes[56..60].copy_from_slice(&flags.to_le_bytes());
    bytes[60..64].copy_from_slice(&(owner.len() as u32).to_le_bytes());
    bytes.extend_from_slice(owner.as_bytes());
    bytes.extend_from_slice(value.as_bytes());
    write_seat(&mut bytes, seat);
    bytes
}

/// Writes what a seat says over the header of its record; owner and value stay.
pub(super) fn write_seat(bytes: &mut [u8], seat: &Seat<Extra>) {
    let (weight, capacity) = match seat.ask {
        Ask::Whole => (0, 0),
        Ask::Part { weight, capacity } => (weight, capacity),
    };
    let ttl = u64::try_from(seat.ttl.as_nanos()).unwrap_or(u64::MAX);
    let flags = u32_at(bytes, 56) & !EVICTED | u32::from(seat.evicted);
    bytes[..16].copy_from_slice(&seat.id.0.to_le_bytes());
    bytes[16..24].copy_from_slice(&seat.extra.process.to_le_bytes());
    bytes[24..28].copy_from_slice(&weight.to_le_bytes());
    bytes[28..32].copy_from_slice(&capacity.to_le_bytes());
    bytes[32..40].copy_from_slice(&seat.counted.to_le_bytes());
    bytes[40..48].copy_from_slice(&seat.expires.as_nanos().to_le_bytes());
    bytes[48..56].copy_from_slice(&ttl.to_le_bytes());
    bytes[56..60].copy_from_slice(&flags.to_le_bytes());
}

/// Replaces the value of a record.
pub(super) fn write_value(bytes: &mut Vec<u8>, value: &str) {
    let flags = u32_at(bytes, 56) | HAS_VALUE;
    bytes[56..60].copy_from_slice(&flags.to_le_bytes());
    bytes.truncate(HEADER + u32_at(bytes, 60) as usize);
    bytes.extend_from_slice(value.as_bytes());
}

/// The counter record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counters {
    /// The last count given to a grant.
    pub(super) last: u64,
    /// What is synced: no count is above it.
    pub(super) ceiling: u64,
    /// How many watches there are.
    pub(super) watches: u64,
    /// How many tombstones there are.
    pub(super) tombstones: u64,
    /// From how many tombstones on the ended ones are swept.
    pub(super) sweep_at: u64,
}

impl Counters {
    pub(super) fn read(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != 40 {
            return Err(bad("counter record"));
        }
        Ok(Self {
            last: u64_at(bytes, 0),
            ceiling: u64_at(bytes, 8),
            watches: u64_at(bytes, 16),
            tombstones: u64_at(bytes, 24),
            sweep_at: u64_at(bytes, 32),
        })
    }

    pub(super) fn write(&self) -> [u8; 40] {
        let mut bytes = [0; 40];
        let words = [
            self.last,
            self.ceiling,
            self.watches,
            self.tombstones,
            self.sweep_at,
        ];
        for (at, word) in words.into_iter().enumerate() {
            bytes[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// The end of a tombstone.
pub(super) fn read_tombstone(bytes: &[u8]) -> Result<BootTime> {
    match bytes.len() {
        8 => Ok(BootTime::from_nanos(u64_at(bytes, 0))),
        _ => Err(bad("tombstone")),
    }
}

/// A process that wants to hear of changes in a scope.
pub(super) fn write_watch(process: u64, namespace: &str, scope: &Scope) -> Vec<u8> {
    let (kind, text) = match scope {
        Scope::Prefix(prefix) => (b'p', prefix.as_str()),
        Scope::Line(name) => (b'l', name.as_str()),
    };
    let mut bytes = process.to_le_bytes().to_vec();
    bytes.push(kind);
    bytes.extend_from_slice(namespace.as_bytes());
    bytes.push(0);
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

/// The process of a watch, and whether it wants to hear of the line with this ticket prefix.
pub(super) fn read_watch(bytes: &[u8], line_prefix: &[u8]) -> Result<(u64, bool)> {
    if bytes.len() < 10 {
        return Err(bad("watch"));
    }
    let line = &line_prefix[1..line_prefix.len() - 1];
    let wants = match bytes[8] {
        b'p' => line.starts_with(&bytes[9..]),
        b'l' => line == &bytes[9..],
        _ => return Err(bad("watch")),
    };
    Ok((u64_at(bytes, 0), wants))
}
