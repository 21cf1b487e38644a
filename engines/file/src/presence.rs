//! `presence`: whether the claims of this process still have their seats.
//!
//! Others remove a seat whose process they take for dead. Should they ever be wrong, its owner must
//! be told: so every round of renewals looks at each line once, however many seats this process has
//! in it. A line that has not changed costs the one `stat` that also compares its inode. Otherwise
//! its header is read, and its body only if the number of changes differs. A line that can't be read
//! now, or that is being changed, decides nothing: the next round looks again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, Stat};
use rustix::io::Errno;

use super::boot::Home;
use super::line_file::{HEADER, LineFile};
use super::store::Store;
use palisade_core::engine::{ClaimId, unix_time};

/// A file's time of change advances in steps of a few milliseconds: one that is younger than this
/// may not show the next change.
const SETTLED: Duration = Duration::from_millis(100);

/// The state of a line in which a seat was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    /// When the file was last changed, in nanoseconds; 0 if that may not show the next change.
    changed: i128,
    /// The number of changes of the line; 0 if it was not read yet.
    changes: u64,
}

impl Seen {
    /// In a line after this many changes.
    pub(super) fn after(changes: u64) -> Self {
        let changed = 0;
        Self { changed, changes }
    }
}

/// A claim of this process that is about to be renewed.
pub(super) struct Sitting {
    /// Its number among those to renew.
    pub(super) number: usize,
    pub(super) claim: ClaimId,
    /// The file of its line.
    pub(super) file: Arc<str>,
    pub(super) inode: u64,
    /// Whether the sequence of its seat is to be learnt, too.
    pub(super) learns: bool,
    pub(super) seen: Seen,
    pub(super) found: Presence,
}

/// What is known of a seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    /// It is there; the sequence, if the line was read.
    There(Option<u64>),
    /// The line can't be read now.
    Unknown,
    /// The file of the line is gone, or was replaced or emptied.
    FileGone,
    /// The line does not have it.
    TakenOut,
}

/// Looks at the lines of these claims. They are sorted by their lines.
pub(super) fn look(store: &Store, sitting: &mut [Sitting]) {
    sitting.sort_unstable_by(|one, other| one.file.cmp(&other.file));
    for group in sitting.chunk_by_mut(|one, other| one.file == other.file) {
        look_at_one(store, group);
    }
}

fn look_at_one(store: &Store, group: &mut [Sitting]) {
    let (home, name) = (store.home(), Arc::clone(&group[0].file));
    let stat = match rustix::fs::statat(&home.lines, &*name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if stat.st_size >= HEADER as i64 => stat,
        Ok(_) | Err(Errno::NOENT) => {
            return group
                .iter_mut()
                .for_each(|one| one.found = Presence::FileGone);
        }
        // Unknown, which is no reason to give up a valid lease.
        Err(_) => {
            return group
                .iter_mut()
                .for_each(|one| one.found = Presence::Unknown);
        }
    };
    let changed = settled(&stat);
    let mut unsure = false;
    for one in &mut *group {
        let same = one.seen.changed == changed && changed != 0 && !one.learns;
        one.found = match one.inode == stat.st_ino {
            true if same => Presence::There(None),
            true => Presence::Unknown,
            false => Presence::FileGone,
        };
        unsure |= one.found == Presence::Unknown;
    }
    if unsure {
        read(store, home, &name, group, changed);
    }
}

/// When a file was last changed, if that will differ after the next change.
fn settled(stat: &Stat) -> i128 {
    let changed = i128::from(stat.st_ctime) * 1_000_000_000 + i128::from(stat.st_ctime_nsec);
    let age = unix_time().as_nanos() as i128 - changed;
    let is_settled = age > SETTLED.as_nanos() as i128;
    if is_settled { changed } else { 0 }
}

/// Finds the seats whose presence is unknown in the line.
fn read(store: &Store, home: &Home, name: &str, group: &mut [Sitting], changed: i128) {
    let known = store.files.known(name);
    // Reading one that is open already reads only what has changed.
    let file = match known.map_or_else(
        || LineFile::open(home, name).map(|file| file.map(Arc::new)),
        |file| Ok(Some(file)),
    ) {
        Ok(Some(file)) => file,
        _ => return,
    };
    let unsure =
        |one: &&mut Sitting| one.found == Presence::Unknown && one.inode == file.identity.1;
    let Some(changes) = file.sequence() else {
        return;
    };
    let same = |one: &Sitting| one.seen.changes == changes && !one.learns;
    if group
        .iter()
        .all(|one| one.found != Presence::Unknown || same(one))
    {
        for one in group.iter_mut().filter(unsure) {
            one.seen.changed = changed;
            one.found = Presence::There(None);
        }
        return;
    }
    let Some(state) = file.peek("renew") else {
        return;
    };
    let seen = Seen {
        changed,
        changes: state.changes(),
    };
    let seats = &state.line.seats;
    // One search for each would be quadratic.
    let many = group.len() > 8;
    let by_id: HashMap<ClaimId, u64> = if many {
        seats.iter().map(|seat| (seat.id, seat.sequence)).collect()
    } else {
        HashMap::new()
    };
    for one in group.iter_mut().filter(unsure) {
        let sequence = if many {
            by_id.get(&one.claim).copied()
        } else {
            state.line.seat(one.claim).map(|seat| seat.sequence)
        };
        one.seen = seen;
        one.found = sequence.map_or(Presence::TakenOut, |sequence| {
            Presence::There(Some(sequence))
        });
    }
    file.unlock(state);
}
