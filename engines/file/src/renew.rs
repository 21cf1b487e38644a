//! `renew`: renews many leases with one write to the file of this process, without locking any
//! line.
//!
//! Each renewal checks that the store is still in its directory, the line in its file, and the seat
//! in the line ([`presence`](super::presence)): so whoever lost its place by a mistake of others is
//! told.

use std::sync::Arc;
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::getpid;

use super::FileEngine;
use super::boot::LINES;
use super::error::{busy, file_failed, file_gone, forked, moved, taken_out};
use super::leases::{SLOT, Slot, Table, lock_soon, offset};
use super::presence::{self, Presence, Sitting};
use super::store::Store;
use palisade_core::BootTime;
use palisade_core::engine::{Lease, LeaseStart, Renewal};

/// Slots at most this far apart are written together with those between them.
const GAP: u32 = 64;

pub(super) async fn renew(
    engine: &FileEngine,
    leases: Vec<Lease>,
    within: Duration,
) -> Vec<Renewal> {
    let count = leases.len();
    let all = |renewal: Renewal| vec![renewal; count];
    if getpid() != engine.store.pid {
        return all(Renewal::Unknown(forked("renew")));
    }
    let store = Arc::clone(&engine.store);
    let renewing = engine
        .store
        .renewer
        .run(move || renew_now(&store, &leases, within));
    let renewed = tokio::time::timeout(within, renewing).await;
    renewed.ok().flatten().unwrap_or_else(|| {
        let path = engine.store.leases.path();
        all(Renewal::Unknown(
            busy("renew", within, &path).maybe_applied(),
        ))
    })
}

/// Renews on a thread that may block.
fn renew_now(store: &Store, leases: &[Lease], within: Duration) -> Vec<Renewal> {
    let home = store.home();
    let all = |renewal: Renewal| vec![renewal; leases.len()];
    let in_place = store
        .leases
        .is_in_place()
        .and_then(|leases| Ok(leases && home.lines_are_in_place()?));
    // An error is no reason to give up valid leases: the file is open.
    if in_place == Ok(false) {
        return all(Renewal::Revoked(moved("renew", &home.dir.path)));
    }
    store.liveness.restore();
    // Before the lock is taken, because this takes longest.
    let mut renewals = refuse(store, leases);
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
        std::thread::sleep(Duration::from_millis(1));
    };
    if let Err(errno) = done {
        let error = file_failed("renew", &store.leases.path(), errno).maybe_applied();
        return all(Renewal::Unknown(error));
    }
    let renewed = std::iter::zip(leases, &renewals).filter_map(|(lease, renewal)| {
        let (Some(ticket), Some(Renewal::Held(armed))) = (&lease.ticket, renewal) else {
            return None;
        };
        Some((ticket.claim, armed.sent + armed.ttl))
    });
    home.promised.renewed(renewed);
    let answer = |renewal: Option<Renewal>| renewal.unwrap_or(Renewal::Lost);
    renewals.into_iter().map(answer).collect()
}

/// Why leases can't be renewed, as far as that is known without the lock. A seat that was taken out
/// is [`Renewal::Revoked`], unless its slot will say that it was evicted or has ended.
fn refuse(store: &Store, leases: &[Lease]) -> Vec<Option<Renewal>> {
    let mut renewals = vec![None; leases.len()];
    let mut sitting = Vec::with_capacity(leases.len());
    {
        let table = store.leases.table.lock();
        for (number, lease) in leases.iter().enumerate() {
            // Every ticket of this engine has its own lease, so there is no lease without one.
            let ticket = lease.ticket.as_ref();
            let mine = ticket.and_then(|ticket| Some((ticket, table.claims.get(&ticket.claim)?)));
            let Some((ticket, mine)) = mine.filter(|(_, mine)| !mine.expires.has_passed()) else {
                renewals[number] = Some(Renewal::Lost);
                continue;
            };
            sitting.push(Sitting {
                number,
                claim: ticket.claim,
                file: Arc::clone(&mine.file),
                inode: mine.inode,
                // If it was granted while this process did not look, so that another incarnation is
                // not mistaken for it.
                learns: ticket.sequence != 0 && mine.sequence == 0,
                seen: mine.seen,
                found: Presence::Unknown,
            });
        }
    }
    presence::look(store, &mut sitting);
    let path = |file: &str| store.home().dir.path.join(LINES).join(file);
    let table = &mut *store.leases.table.lock();
    for one in sitting {
        let Some(mine) = table.claims.get_mut(&one.claim) else {
            continue;
        };
        mine.seen = one.seen;
        if let (true, Presence::There(Some(sequence))) = (mine.sequence == 0, one.found) {
            mine.sequence = sequence;
        }
        let asked = leases[one.number].ticket.as_ref();
        let asked = asked.map_or(0, |ticket| ticket.sequence);
        let known = asked != 0 && mine.sequence != 0;
        renewals[one.number] = match one.found {
            Presence::FileGone => Some(Renewal::Revoked(file_gone("renew", &path(&one.file)))),
            Presence::TakenOut => Some(Renewal::Revoked(taken_out("renew", &path(&one.file)))),
            Presence::There(_) | Presence::Unknown => {
                (known && asked != mine.sequence).then_some(Renewal::Lost)
            }
        };
        if one.found == Presence::FileGone {
            table.forget(one.claim);
        }
    }
    renewals
}

/// Renews the leases that are not refused; `None` if the file's lock is not available.
fn try_renew(
    store: &Store,
    leases: &[Lease],
    renewals: &mut [Option<Renewal>],
) -> Option<Result<(), Errno>> {
    // Taken before the file's lock, which all threads of this process share.
    let mut table = store.leases.table.lock();
    let exclusive = lock_soon(store.leases.file(), true);
    // A reader may be stopped. Whoever marks a lease takes an exclusive lock.
    if !exclusive && !lock_soon(store.leases.file(), false) {
        return None;
    }
    let done = renew_locked(store, leases, &mut table, renewals, exclusive);
    // Unlocking our own open file can't fail.
    let _ = rustix::fs::flock(store.leases.file(), FlockOperation::Unlock);
    Some(done)
}

fn renew_locked(
    store: &Store,
    leases: &[Lease],
    table: &mut Table,
    renewals: &mut [Option<Renewal>],
    exclusive: bool,
) -> Result<(), Errno> {
    let sent = BootTime::now();
    let mut due: Vec<(u32, usize)> = Vec::with_capacity(leases.len());
    for (at, lease) in leases.iter().enumerate() {
        if let (None | Some(Renewal::Revoked(_)), Some(ticket)) = (&renewals[at], &lease.ticket)
            && let Some(mine) = table.claims.get(&ticket.claim)
        {
            due.push((mine.slot, at));
        }
    }
    let longest = due.iter().filter_map(|(_, at)| {
        let ticket = leases[*at].ticket.as_ref()?;
        table.claims.get(&ticket.claim).map(|mine| mine.ttl)
    });
    if let Some(longest) = longest.max() {
        store.leases.reach(table, sent + longest)?;
    }
    due.sort_unstable();
    for run in due.chunk_by(|one, next| next.0 - one.0 <= GAP) {
        renew_run(store, leases, sent, table, run, renewals, exclusive)?;
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
    exclusive: bool,
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
        } else if let Some(revoked) = renewals[*at].take() {
            revoked
        } else if ours && found.evicted {
            Renewal::Evicted
        } else {
            Slot::new(ticket.claim, sent + mine.ttl, false).write(bytes);
            let ttl = mine.ttl;
            Renewal::Held(LeaseStart { sent, ttl })
        };
        if matches!(renewal, Renewal::Lost | Renewal::Revoked(_)) {
            table.forget(ticket.claim);
        }
        renewals[*at] = Some(renewal);
    }
    let bytes = bytes.as_flattened();
    if rustix::io::pwrite(file, bytes, offset(first.0))? != bytes.len() {
        return Err(Errno::NOSPC);
    }
    let written = BootTime::now();
    // Only a renewal that others can read counts.
    for (slot, at) in run {
        if let (Some(Renewal::Held(armed)), Some(ticket)) = (&renewals[*at], &leases[*at].ticket)
            && let Some(mine) = table.claims.get_mut(&ticket.claim)
        {
            // Others may have read meanwhile that it has ended, so it has.
            if !exclusive && mine.expires <= written {
                let ended = &mut [0; SLOT];
                Slot::new(ticket.claim, BootTime::PAST, false).write(ended);
                // If this fails, others wait for a ttl longer than they need to.
                let _ = rustix::io::pwrite(file, ended, offset(*slot));
                table.forget(ticket.claim);
                renewals[*at] = Some(Renewal::Lost);
                continue;
            }
            mine.expires = armed.sent + armed.ttl;
        }
    }
    Ok(())
}
