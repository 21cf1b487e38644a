//! `Tx`: one change of one line, under the line's lock.
//!
//! It takes microseconds, so it runs directly, after a short spin. If the lock stays taken, it is
//! retried until the timeout: a process that is stopped inside a change makes others fail on that
//! one name, but never hang. There is no await between `begin` and `commit`.
//!
//! A caller that only reads takes no lock (`peek`) as long as there is nothing to change. Hundreds
//! of processes that wait in one line read it every second, and would delay the one that leaves it.
//!
//! A transaction settles the line by `core::line`. Before it grants a claim of another process, it
//! checks whether that process is alive; claims of dead processes are removed. If a lease has ended
//! according to the line, its renewals are looked up first. Hints are collected and sent only after
//! the write: a hint is never a grant.

use std::iter::zip;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::getpid;

use super::FileEngine;
use super::boot::LEASES;
use super::error::{busy, damaged, file_failed, forked, moved, unseen};
use super::keys;
use super::leases::{self, Found};
use super::line_file::{Extra, LineFile, Lock, Missing, State};
use super::liveness::{self, Hint, Peer};
use super::store::Store;
use palisade_core::engine::{Ask, ClaimId, Seat};
use palisade_core::{BootTime, Error, Name, Result};

/// How long to sleep when spinning did not help, at first and at most: if many processes tried
/// every millisecond, the holder of the lock would get no time to run.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(16);
/// When to check again a process that is renewing just now.
const SOON: Duration = Duration::from_millis(10);
/// When to check again a process whose renewals can't be read: often enough that nobody waits for
/// long once they can, seldom enough that failing to read them costs nothing.
const LATER: Duration = Duration::from_millis(100);

/// See the module documentation. Dropping it without a commit changes nothing.
pub(super) struct Tx<'a> {
    store: &'a Store,
    operation: &'static str,
    /// `None` for an empty line without a file.
    pub(super) file: Option<Arc<LineFile>>,
    pub(super) state: State,
    /// Read after the lock was acquired.
    pub(super) now: BootTime,
    /// The last token and the seats as they are in the file.
    before: (u64, Vec<Told>),
    /// Whether something changed that [`Told`] does not contain.
    pub(super) touched: bool,
    /// Whether an expiry in memory is provisional and must be read again next time.
    read_again: bool,
    /// The hints to send after the write.
    hints: Vec<(u64, Hint)>,
    /// The processes that were checked.
    peers: Vec<(u64, Peer)>,
    /// A process whose renewals can't be read, and why: its claims count as alive.
    unseen: Option<(u64, Errno)>,
}

/// The fields of a seat in the file that may change.
#[derive(Clone, Copy, PartialEq)]
struct Told {
    id: ClaimId,
    process: u64,
    sequence: u64,
    ask: Ask,
    evicted: bool,
}

impl Told {
    fn of(seat: &Seat<Extra>) -> Self {
        Self {
            id: seat.id,
            process: seat.extra.process,
            sequence: seat.sequence,
            ask: seat.ask,
            evicted: seat.evicted,
        }
    }
}

/// The processes to check besides those of new holders; claims of dead ones are removed.
#[derive(Clone, Copy)]
pub(super) enum Suspects {
    Nobody,
    /// Those that this claim waits for.
    Before(ClaimId),
    Everyone,
}

pub(super) fn refuse_fork(store: &Store, operation: &'static str) -> Result<()> {
    if getpid() == store.pid {
        Ok(())
    } else {
        Err(forked(operation))
    }
}

/// Begins a change of a line.
///
/// # Errors
/// [`ErrorKind::Unreachable`](palisade_core::ErrorKind::Unreachable) when the line's lock is not available
/// within `timeout`.
pub(super) async fn begin<'a>(
    engine: &'a FileEngine,
    operation: &'static str,
    name: &Name,
    missing: Missing,
    timeout: Duration,
) -> Result<Tx<'a>> {
    let store = &*engine.store;
    refuse_fork(store, operation)?;
    let line = (&*engine.namespace, name.as_str());
    let file_name = keys::file_name(line.0, line.1);
    let deadline = BootTime::now() + timeout;
    let mut pause = PAUSE;
    let home = store.home();
    loop {
        let file = store
            .files
            .get(operation, home, &file_name, line, missing)?;
        let Some(file) = file else {
            return Ok(Tx::new(store, operation, None, State::empty(line)));
        };
        match file.lock(operation)? {
            Lock::Had(state) if (&*state.namespace, &*state.name) == line => {
                return Ok(Tx::new(store, operation, Some(file), state));
            }
            Lock::Had(state) => {
                file.unlock(state);
                return Err(damaged(operation, &file.path));
            }
            Lock::Taken => {}
            // It was removed because the line was empty, or the whole store is gone.
            Lock::Gone => {
                store.files.forget(&file_name);
                match home.lines_are_in_place() {
                    Ok(true) => {}
                    Ok(false) => return Err(moved(operation, &home.dir.path)),
                    Err(errno) => return Err(file_failed(operation, &home.dir.path, errno)),
                }
            }
        }
        if deadline.has_passed() {
            return Err(busy(operation, timeout, &file.path));
        }
        tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// A settled line that is only read: under its lock with the changes that settling made, or without
/// the lock and unchanged. It offers no other changes, because the caller may not hold the lock.
pub(super) struct Looked<'a>(Tx<'a>);

impl<'a> Looked<'a> {
    /// A transaction that holds the lock and makes no more changes.
    pub(super) fn at(tx: Tx<'a>) -> Self {
        Self(tx)
    }

    pub(super) fn state(&self) -> &State {
        &self.0.state
    }

    /// When it was read.
    pub(super) fn now(&self) -> BootTime {
        self.0.now
    }

    /// As [`Tx::unseen`].
    pub(super) fn unseen(&self) -> Option<Error> {
        self.0.unseen()
    }

    /// As [`Tx::commit`].
    pub(super) fn done(self, me: Option<ClaimId>) -> Result<()> {
        self.0.commit(me)
    }
}

/// A settled line for a caller that only reads: without the lock if there is nothing to change.
///
/// # Errors
/// As [`begin`] and [`Tx::settle`].
pub(super) async fn look<'a>(
    engine: &'a FileEngine,
    operation: &'static str,
    name: &Name,
    suspects: Suspects,
) -> Result<Looked<'a>> {
    let store = &*engine.store;
    refuse_fork(store, operation)?;
    let line = (&*engine.namespace, name.as_str());
    let (home, file_name) = (store.home(), keys::file_name(line.0, line.1));
    let known = store
        .files
        .get(operation, home, &file_name, line, Missing::IsEmpty)?;
    let peeked = known.and_then(|file| peek(store, operation, file, suspects));
    let is_it = |looked: &Looked<'_>| (&*looked.state().namespace, &*looked.state().name) == line;
    if let Some(looked) = peeked.filter(is_it) {
        return Ok(looked);
    }
    let mut tx = begin(engine, operation, name, Missing::IsEmpty, engine.timeout).await?;
    tx.settle(suspects)?;
    Ok(Looked(tx))
}

/// A settled line, read without its lock; `None` if something must be changed, or a change is in
/// progress.
pub(super) fn peek<'a>(
    store: &'a Store,
    operation: &'static str,
    file: Arc<LineFile>,
    suspects: Suspects,
) -> Option<Looked<'a>> {
    let state = file.peek(operation)?;
    let mut tx = Tx::new(store, operation, Some(file), state);
    (tx.settle(suspects).is_ok() && !tx.has_changes()).then_some(Looked(tx))
}

impl<'a> Tx<'a> {
    /// The caller holds the file's lock, or only reads ([`Looked`]).
    pub(super) fn new(
        store: &'a Store,
        operation: &'static str,
        file: Option<Arc<LineFile>>,
        state: State,
    ) -> Self {
        Self {
            store,
            operation,
            file,
            before: (state.last, state.line.seats.iter().map(Told::of).collect()),
            state,
            now: BootTime::now(),
            touched: false,
            read_again: false,
            hints: Vec::new(),
            peers: Vec::new(),
            unseen: None,
        }
    }

    /// Why it can't be known whether a claim in the line has ended.
    pub(super) fn unseen(&self) -> Option<Error> {
        let (process, errno) = self.unseen?;
        let folder = self.store.home().dir.path.join(LEASES);
        let file = folder.join(liveness::file_name(process));
        Some(unseen(self.operation, &file, errno))
    }

    fn has_changes(&self) -> bool {
        let after = self.state.line.seats.iter().map(Told::of);
        self.touched || self.before.0 != self.state.last || !after.eq(self.before.1.iter().copied())
    }

    /// Writes what was changed, if anything, and sends hints. `me` is the claim that this change is
    /// made for: it needs no hint.
    pub(super) fn commit(mut self, me: Option<ClaimId>) -> Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let (before, after) = (&self.before.1, &mut self.state.line.seats);
        let kept = zip(before, &*after).take_while(|(old, new)| **old == Told::of(new));
        let kept = kept.count();
        let adds = kept == before.len() && !self.touched;
        if !adds || kept < after.len() {
            let alone = |id: ClaimId| Some(id) == me;
            let alone =
                before.iter().all(|old| alone(old.id)) && after.iter().all(|new| alone(new.id));
            // Removals and grants don't change the order.
            let mut old = before[kept..].iter();
            for seat in &mut after[kept..] {
                let was = old.find(|old| old.id == seat.id);
                if was != Some(&Told::of(seat)) {
                    seat.extra.text = None;
                }
            }
            let adds = adds && self.before.0 == self.state.last;
            file.store(&mut self.state, if adds { kept } else { 0 })
                .map_err(|errno| file_failed(self.operation, &file.path, errno))?;
            if !alone {
                self.gather(me);
            }
        }
        if self.read_again {
            self.state.forget();
        }
        if let Some(file) = self.file.take() {
            file.unlock(std::mem::take(&mut self.state));
        }
        // Sent after the line's lock is released, because those who are woken need it.
        for (process, hint) in std::mem::take(&mut self.hints) {
            self.send(process, hint);
        }
        Ok(())
    }

    /// Queues a hint to send after the write.
    pub(super) fn hint(&mut self, process: u64, hint: Hint) {
        self.hints.push((process, hint));
    }

    fn send(&mut self, process: u64, hint: Hint) {
        if process == self.store.process() {
            self.store.watcher.hand(hint);
        } else if let Peer::Alive(end) = self.peer(process) {
            liveness::send(end, hint);
        }
    }

    /// The state of another process, read once per transaction.
    fn peer(&mut self, process: u64) -> &Peer {
        let known = self.peers.iter().position(|(known, _)| *known == process);
        let at = known.unwrap_or_else(|| {
            let peer = liveness::open_to_wake(self.store.home().signs(), process);
            self.peers.push((process, peer));
            self.peers.len() - 1
        });
        &self.peers[at].1
    }

    /// Removes claims that have ended and grants those that have come to the front, until no
    /// process that matters is found dead: a claim of a dead process is never granted. If the token
    /// clock fails, or promises of an earlier boot are not over, nobody is granted.
    /// # Errors
    /// Why nobody can be granted.
    pub(super) fn settle(&mut self, suspects: Suspects) -> Result<()> {
        let (home, mine) = (self.store.home(), self.store.process());
        loop {
            let clock = if self.state.line.seats.iter().all(Seat::is_held) {
                Ok(self.state.last)
            } else {
                let over = home.promised.all_over(self.operation);
                over.and_then(|()| home.tokens.clock(self.operation, &home.dir))
            };
            let granted = self.settle_front(clock.as_ref().ok().copied(), suspects);
            if let Suspects::Before(id) = suspects {
                self.remove_ended_before(id);
            }
            let line = &self.state.line;
            let ahead = match suspects {
                Suspects::Nobody => Vec::new(),
                Suspects::Before(id) => line.blockers(id),
                Suspects::Everyone => line.seats.iter().collect(),
            };
            let granted = granted.iter().filter_map(|id| line.seat(*id));
            let processes = ahead.into_iter().chain(granted);
            let processes = processes.map(|seat| seat.extra.process);
            let mut suspected: Vec<u64> = processes.filter(|process| *process != mine).collect();
            suspected.retain(|process| matches!(self.peer(*process), Peer::Dead));
            if suspected.is_empty() {
                return clock.map(drop);
            }
            // A claim that ends only with its lease stays if it was held before this change: its
            // process may have passed the hold on.
            let (seats, before) = (&mut self.state.line.seats, &self.before.1);
            let held = |id| before.iter().any(|old| old.id == id && old.sequence != 0);
            let count = seats.len();
            seats.retain(|seat| {
                !suspected.contains(&seat.extra.process) || (seat.extra.by_lease && held(seat.id))
            });
            if seats.len() == count {
                return clock.map(drop);
            }
        }
    }

    /// Removes claims that have ended and, if there is a `clock`, grants those that have come to
    /// the front. Returns the new holders.
    ///
    /// In a line that is older than a ttl nearly all claims seem to have ended until their renewals
    /// are looked up. Only those that a grant depends on are: the holders, and the first waiters.
    /// Looking up every claim each time would be quadratic in the number of waiters.
    fn settle_front(&mut self, clock: Option<u64>, suspects: Suspects) -> Vec<ClaimId> {
        let mut granted = Vec::new();
        let mut waiting = match suspects {
            Suspects::Everyone => usize::MAX,
            Suspects::Nobody | Suspects::Before(_) => 1,
        };
        loop {
            let holders = self
                .state
                .line
                .seats
                .iter()
                .take_while(|seat| seat.is_held());
            let front = holders.count().saturating_add(waiting);
            self.look_up_renewals(|at, _| at < front);
            let State { line, last, .. } = &mut self.state;
            let behind = line.seats.split_off(front.min(line.seats.len()));
            match clock {
                Some(clock) => granted.extend(line.settle(self.now, || {
                    *last = (*last + 1).max(clock);
                    *last
                })),
                None => line.seats.retain(|seat| seat.expires > self.now),
            }
            // A claim that still waits at the front blocks everyone behind it.
            let decided = behind.is_empty() || !line.seats.iter().all(Seat::is_held);
            line.seats.extend(behind);
            if decided {
                return granted;
            }
            waiting *= 2;
        }
    }

    /// Removes a claim, and those that it waits for, if they have ended.
    fn remove_ended_before(&mut self, id: ClaimId) {
        let now = self.now;
        loop {
            let line = &self.state.line;
            let matter = line.blockers(id).into_iter().chain(line.seat(id));
            let ended = matter.filter(|seat| seat.expires <= now);
            let ended: Vec<ClaimId> = ended.map(|seat| seat.id).collect();
            if ended.is_empty() {
                return;
            }
            self.look_up_renewals(|_, seat| ended.contains(&seat.id));
            let seats = &mut self.state.line.seats;
            seats.retain(|seat| seat.expires > now || !ended.contains(&seat.id));
        }
    }

    /// Looks up whether claims that have ended according to the line were renewed.
    fn look_up_renewals(&mut self, which: impl Fn(usize, &Seat<Extra>) -> bool) {
        let (now, mine) = (self.now, self.store.process());
        for at in 0..self.state.line.seats.len() {
            let seat = &mut self.state.line.seats[at];
            if seat.expires > now || !which(at, seat) {
                continue;
            }
            let (id, outlives) = (seat.id, seat.extra.by_lease && seat.is_held());
            let Extra { process, slot, .. } = seat.extra;
            if process == mine {
                seat.expires = self.store.leases.expires(id).unwrap_or(seat.expires);
                continue;
            }
            let mut found = leases::look_up(self.store.home(), process, slot, id);
            if let Found::Unreadable(errno) = found {
                if !matches!(self.peer(process), Peer::Dead) {
                    self.unseen = Some((process, errno));
                } else if outlives {
                    // It is renewed no more, but how long it lasts can't be known.
                    found = Found::Missing;
                } else {
                    continue;
                }
            }
            let seat = &mut self.state.line.seats[at];
            match found {
                Found::Until(expires) => {
                    seat.expires = expires;
                    // An orphan that renews is none.
                    if seat.extra.orphan && expires > now {
                        (seat.extra.orphan, seat.extra.text) = (false, None);
                        self.touched = true;
                    }
                }
                Found::Nothing => {}
                // A process that is stopped during a renewal can't rely on it once another ttl has
                // passed.
                Found::Busy(said) if seat.expires.max(said) + seat.ttl > now => {
                    seat.expires = now + SOON;
                    self.read_again = true;
                }
                Found::Busy(_) => {}
                Found::Missing if seat.extra.orphan => {}
                Found::Missing => {
                    seat.extra.orphan = true;
                    seat.expires = now + seat.ttl;
                    (seat.extra.until, seat.extra.text) = (seat.expires, None);
                    self.touched = true;
                }
                Found::Unreadable(_) => {
                    seat.expires = now + LATER;
                    self.read_again = true;
                }
            }
        }
    }

    /// Collects hints for claims that are gone, are granted, or wait behind another claim than
    /// before, since each waiter sleeps on the claim just ahead or, at the front, on all holders.
    fn gather(&mut self, me: Option<ClaimId>) {
        let before = std::mem::take(&mut self.before.1);
        let mut old = before.iter().enumerate().peekable();
        let mut hints = Vec::new();
        let (mut gone, mut granted) = (false, false);
        // Where each seat was; removals and grants don't change the order.
        let mut was_at = Vec::with_capacity(self.state.line.seats.len());
        for seat in self.state.line.seats.iter().map(Some).chain([None]) {
            while let Some((_, left)) = old.next_if(|(_, old)| seat.is_none_or(|s| s.id != old.id))
            {
                gone = true;
                hints.push((left.process, left.id, left.sequence != 0));
            }
            let Some(seat) = seat else { break };
            let at = old.next().map(|(at, _)| at);
            was_at.push(at);
            if seat.is_held() && at.is_some_and(|at| before[at].sequence == 0) {
                granted = true;
                hints.push((seat.extra.process, seat.id, false));
            }
        }
        if gone || granted {
            let seats = &self.state.line.seats;
            for (at, seat) in seats.iter().enumerate() {
                let Some(was_at) = was_at[at].filter(|_| !seat.is_held()) else {
                    continue;
                };
                let was_ahead = before[..was_at].last();
                let slept_on_holders = was_ahead.is_none_or(|ahead| ahead.sequence != 0);
                let still = match &seats[..at] {
                    // Holders only left.
                    [.., ahead] if ahead.is_held() && slept_on_holders => !granted,
                    // One claim is ahead, as before.
                    [.., ahead] if !ahead.is_held() || at == 1 => {
                        was_ahead.is_some_and(|was| was.id == ahead.id)
                    }
                    _ => false,
                };
                if !still {
                    hints.push((seat.extra.process, seat.id, false));
                }
            }
        }
        for (process, id, alarm) in hints {
            let dead =
                |(known, peer): &(u64, Peer)| *known == process && matches!(peer, Peer::Dead);
            if Some(id) != me && !self.peers.iter().any(dead) {
                let hint = if alarm { Hint::Alarm } else { Hint::Look };
                self.hint(process, hint(id));
            }
        }
    }
}

impl Drop for Tx<'_> {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            self.state.forget();
            file.unlock(std::mem::take(&mut self.state));
        }
    }
}

/// What a sleeper waits for besides a hint.
pub(super) struct Sleep {
    /// The processes whose death may change the place.
    pub(super) processes: Vec<u64>,
    /// When the first relevant lease ends.
    pub(super) earliest: BootTime,
}

impl Sleep {
    pub(super) fn on<'a>(seats: impl Iterator<Item = &'a Seat<Extra>>) -> Self {
        let mut sleep = Self {
            processes: Vec::new(),
            earliest: BootTime::NEVER,
        };
        for seat in seats {
            sleep.earliest = sleep.earliest.min(seat.expires);
            // Such a seat outlives its process: a dead process would wake the sleeper again and
            // again.
            let outlives = seat.extra.by_lease && seat.is_held();
            if !outlives && !sleep.processes.contains(&seat.extra.process) {
                sleep.processes.push(seat.extra.process);
            }
        }
        sleep
    }
}
