//! `renew`: renews many leases with one write to the file of this process, without locking any
//! line.
//!
//! Each renewal checks that the store is still in its directory, and the line in its file. Both are
//! compared by inode, so that a replacement is noticed.

use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, FlockOperation};
use rustix::io::Errno;
use rustix::process::getpid;

use super::boot::LINES;
use super::error::{busy, file_failed, file_gone, forked, moved};
use super::leases::{SLOT, Slot, Table, lock_soon, offset};
use super::line_file::{HEADER, Missing};
use super::store::Store;
use super::{FileEngine, tx};
use palisade_core::BootTime;
use palisade_core::engine::{Lease, LeaseStart, Renewal, Ticket};

/// Slots at most this far apart are written together with those between them.
const GAP: u32 = 64;

pub(super) async fn renew(engine: &FileEngine, leases: &[Lease], within: Duration) -> Vec<Renewal> {
    let store = &*engine.store;
    let all = |renewal: Renewal| vec![renewal; leases.len()];
    if getpid() != store.pid {
        return all(Renewal::Unknown(forked("renew")));
    }
    let home = store.home();
    if !store.leases.is_in_place() || !home.lines_are_in_place() {
        return all(Renewal::Revoked(moved("renew", &home.dir.path)));
    }
    store.liveness.restore();
    for ticket in leases.iter().filter_map(|lease| lease.ticket.as_ref()) {
        if ticket.sequence != 0 && store.leases.sequence(ticket.claim) == Some(0) {
            learn_count(engine, ticket, within).await;
        }
    }
    // Before the lock is taken, because this takes longest.
    let mut renewals: Vec<Option<Renewal>> =
        leases.iter().map(|lease| refuse(store, lease)).collect();
    let deadline = BootTime::now() + within;
    let done = loop {
        if let Some(done) = try_renew(store, leases, &mut renewals) {
            break done;
        }
        if deadline.has_passed() {
            return all(Renewal::Unknown(busy(
                "renew",
                within,
                &store.leases.path(),
            )));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    if let Err(errno) = done {
        let error = file_failed("renew", &store.leases.path(), errno).maybe_applied();
        return all(Renewal::Unknown(error));
    }
    renewals
        .into_iter()
        .map(|renewal| renewal.unwrap_or(Renewal::Lost))
        .collect()
}

/// Reads the sequence of a claim from its line, if it was granted while this process did not look.
/// So another incarnation is not mistaken for it.
async fn learn_count(engine: &FileEngine, ticket: &Ticket, within: Duration) {
    let begun = tx::begin(engine, "renew", &ticket.name, Missing::IsEmpty, within).await;
    // If the line can't be read, only the lease can be checked.
    if let Ok(tx) = begun {
        let seat = tx.state.line.seat(ticket.claim);
        let sequence = seat.map_or(0, |seat| seat.sequence);
        engine.store.leases.granted(ticket.claim, sequence);
        let _ = tx.commit(None);
    }
}

/// Why a lease can't be renewed, as far as that is known without the lock.
fn refuse(store: &Store, lease: &Lease) -> Option<Renewal> {
    let Some(ticket) = &lease.ticket else {
        // Every ticket of this engine has its own lease, so there is no such lease.
        return Some(Renewal::Lost);
    };
    let (file, inode) = {
        let table = store.leases.table.lock();
        let mine = table.claims.get(&ticket.claim).filter(|mine| {
            let known = ticket.sequence != 0 && mine.sequence != 0;
            !known || ticket.sequence == mine.sequence
        });
        match mine {
            Some(mine) if !mine.expires.has_passed() => (Arc::clone(&mine.file), mine.inode),
            _ => return Some(Renewal::Lost),
        }
    };
    let home = store.home();
    let stat = rustix::fs::statat(&home.lines, &*file, AtFlags::SYMLINK_NOFOLLOW);
    match stat {
        Ok(stat) if stat.st_ino == inode && stat.st_size >= HEADER as i64 => None,
        Ok(_) | Err(Errno::NOENT) => {
            store.leases.forget(ticket.claim);
            let path = home.dir.path.join(LINES).join(&*file);
            Some(Renewal::Revoked(file_gone("renew", &path)))
        }
        // Unknown, which is no reason to give up a valid lease.
        Err(_) => None,
    }
}

/// Renews the leases that are not refused; `None` if the file's lock is not available.
fn try_renew(
    store: &Store,
    leases: &[Lease],
    renewals: &mut [Option<Renewal>],
) -> Option<Result<(), Errno>> {
    // Taken before the file's lock, which all threads of this process share.
    let mut table = store.leases.table.lock();
    if !lock_soon(store.leases.file(), true) {
        return None;
    }
    let done = renew_locked(store, leases, &mut table, renewals);
    // Unlocking our own open file can't fail.
    let _ = rustix::fs::flock(store.leases.file(), FlockOperation::Unlock);
    Some(done)
}

fn renew_locked(
    store: &Store,
    leases: &[Lease],
    table: &mut Table,
    renewals: &mut [Option<Renewal>],
) -> Result<(), Errno> {
    let sent = BootTime::now();
    let mut due: Vec<(u32, usize)> = Vec::with_capacity(leases.len());
    for (at, lease) in leases.iter().enumerate() {
        if let (None, Some(ticket)) = (&renewals[at], &lease.ticket)
            && let Some(mine) = table.claims.get(&ticket.claim)
        {
            due.push((mine.slot, at));
        }
    }
    due.sort_unstable();
    for run in due.chunk_by(|one, next| next.0 - one.0 <= GAP) {
        renew_run(store, leases, sent, table, run, renewals)?;
    }
    Ok(())
}

/// Renews the leases of adjacent slots with one read and one write.
fn renew_run(
    store: &Store,
    leases: &[Lease],
    sent: BootTime,
    table: &mut Table,
    run: &[(u32, usize)],
    renewals: &mut [Option<Renewal>],
) -> Result<(), Errno> {
    let (Some(first), Some(last)) = (run.first(), run.last()) else {
        return Ok(());
    };
    let mut bytes = vec![[0; SLOT]; (last.0 - first.0 + 1) as usize];
    let file = store.leases.file();
    // Beyond the end of the file nothing was written yet, so these bytes stay zero.
    rustix::io::pread(file, bytes.as_flattened_mut(), offset(first.0))?;
    for (slot, at) in run {
        let Some(ticket) = &leases[*at].ticket else {
            continue;
        };
        let Some(mine) = table.claims.get(&ticket.claim) else {
            continue;
        };
        let bytes = &mut bytes[(slot - first.0) as usize];
        let found = Slot::read(bytes);
        let ours = found.is_of(ticket.claim);
        let renewal = if mine.expires <= sent || (ours && found.expires <= sent) {
            Renewal::Lost
        } else if ours && found.evicted {
            Renewal::Evicted
        } else {
            Slot::new(ticket.claim, sent + mine.ttl, false).write(bytes);
            let ttl = mine.ttl;
            Renewal::Held(LeaseStart { sent, ttl })
        };
        if matches!(renewal, Renewal::Lost) {
            table.forget(ticket.claim);
        }
        renewals[*at] = Some(renewal);
    }
    let bytes = bytes.as_flattened();
    if rustix::io::pwrite(file, bytes, offset(first.0))? != bytes.len() {
        return Err(Errno::NOSPC);
    }
    // Only a renewal that others can read counts.
    for (_, at) in run {
        if let (Some(Renewal::Held(armed)), Some(ticket)) = (&renewals[*at], &leases[*at].ticket)
            && let Some(mine) = table.claims.get_mut(&ticket.claim)
        {
            mine.expires = armed.sent + armed.ttl;
        }
    }
    Ok(())
}
