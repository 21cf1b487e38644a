//! Taking a place: the try that `enter` and `wait` make.
//!
//! A place is taken by one transaction and by nothing else. While a write is unanswered its
//! claims are `Trying`, so that a dropped future is found out about. Readers and permits take
//! others of this process along that wait for the same.

use std::sync::Arc;
use std::time::Duration;

use super::ConsulEngine;
use super::api::{Committed, Read};
use super::book::{Begun, Seat, Stage, Watched};
use super::finish::Finish;
use super::keys::Line;
use super::plan::{Asker, LOCK_GUARD, PERMITS_GUARD, Plan};
use super::view::{Spot, View};
use super::wire::{Op, READERS, Record, TxnError, session_text};
use crate::core::claim::{Ask, ClaimId, Mode};
use crate::core::clock::BootTime;
use crate::core::error::{Outcome, Result};
use crate::core::ticket::Ticket;

/// How many others one write takes along; Consul takes 64 operations.
const TAKEN_ALONG: usize = 15;

/// The longest pause between two tries, and the first one.
const LONGEST_PAUSE: Duration = Duration::from_millis(16);
const PAUSE: Duration = Duration::from_millis(1);

/// What came of a write.
enum Written {
    Held(u64),
    /// The gate is closed for the readers that come.
    Closed,
    Refused(Vec<TxnError>),
}

/// What came of a try.
pub(super) enum Tried {
    Held(u64),
    /// Others hold, and the book says what to sleep on.
    Behind,
    /// A lock-delay is in force.
    Delayed,
    /// Its session is over.
    Gone,
    /// It was left meanwhile.
    Left,
}

/// Where a claim stands that may hold.
pub(super) enum Standing {
    Held(u64),
    Waiting,
    Absent,
}

/// How long a call tries again because others wrote between its read and its write. Once it
/// always tries.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    tries: u32,
    until: BootTime,
}

impl Limit {
    pub(super) fn tries(tries: u32) -> Self {
        let until = BootTime::NEVER;
        Self { tries, until }
    }

    pub(super) fn until(until: BootTime) -> Self {
        let tries = u32::MAX;
        Self { tries, until }
    }

    fn allows(&self, tried: u32) -> bool {
        tried < self.tries && !self.until.has_passed()
    }
}

/// A claim as one that asks.
pub(super) fn asker(seat: &Seat) -> Asker {
    Asker {
        claim: seat.claim.id,
        session: seat.session_text(),
        record: Record::of(&seat.claim),
        queue: seat.claim.queue,
        waited: seat.waited,
    }
}

impl ConsulEngine {
    /// The key of a place: the lock, or that of a reader or a permit.
    pub(super) fn key_of(&self, ticket: &Ticket) -> Option<String> {
        let line = self.keys.line(&ticket.name).ok()?;
        let ask = self.book.seat(ticket.claim).map(|seat| seat.claim.ask);
        let session = session_text(ticket.lease.0);
        let spot = ask.map_or(Spot::Whole, spot);
        Some(spot.key(&line, ticket.claim, &session))
    }

    /// Reads a line, surely. The lock first: as long as its index stays, no reader has come
    /// since, so that what is below it is no older.
    pub(super) async fn look(&self, line: &Line) -> Result<View> {
        let lock = self.glance(line, Ask::READ).await?.lock;
        let tree = line.tree();
        let tree = self.api.read("look", &tree, true, Read::Consistent).await?;
        Ok(View {
            lock,
            tree: tree.pairs,
            tree_index: tree.index,
        })
    }

    /// Reads the part of a line that decides most of the time, and takes the rest for empty: for
    /// permits what is below the lock, for others the lock.
    pub(super) async fn glance(&self, line: &Line, ask: Ask) -> Result<View> {
        if ask.mode() == Mode::Permits {
            let tree = line.tree();
            let tree = self.api.read("look", &tree, true, Read::Consistent).await?;
            return Ok(View {
                lock: None,
                tree: tree.pairs,
                tree_index: tree.index,
            });
        }
        let lock = self.api.read("look", &line.lock, false, Read::Consistent);
        Ok(View {
            lock: lock.await?.pairs.into_iter().next(),
            ..View::default()
        })
    }

    /// Where a claim stands whose write was not answered, or whose hold is in question, and says
    /// so in the book.
    pub(super) async fn standing(&self, line: &Line, seat: &Seat) -> Result<Standing> {
        let view = self.look(line).await?;
        let claim = seat.claim.id;
        let Some(found) = view.find(line, claim, &seat.session_text()) else {
            return Ok(Standing::Absent);
        };
        Ok(match found.held() {
            Some(sequence) => {
                self.book
                    .change(claim, |seat| seat.stage = Stage::Held(sequence));
                Standing::Held(sequence)
            }
            None => {
                self.closed(claim, found.index);
                Standing::Waiting
            }
        })
    }

    /// Says that a claim keeps the gate closed, and looks before it sleeps.
    fn closed(&self, claim: ClaimId, index: u64) {
        self.book.change(claim, |seat| {
            (seat.closed, seat.watched) = (Some(index), None);
        });
        self.book.settle(claim, Stage::Waiting);
    }

    /// Tries to take the place, again when others wrote in between.
    pub(super) async fn attempt(
        self: &Arc<Self>,
        line: &Line,
        seat: &Seat,
        mut view: View,
        limit: Limit,
    ) -> Result<Tried> {
        let claim = &seat.claim;
        let (session, ask) = (seat.session_text(), claim.ask);
        let mut along = match ask {
            Ask::Whole => 0,
            Ask::Part { .. } => TAKEN_ALONG,
        };
        let mut pause = PAUSE;
        let (mut tried, mut guessed) = (0, true);
        while tried == 0 || limit.allows(tried) {
            let seats = match self.book.begin(claim.id, along) {
                Begun::For(seats) => seats,
                Begun::Gone => return Ok(Tried::Left),
                Begun::Settled => {
                    let settled = self.book.settled(claim.id, self.api.timeout).await;
                    match settled.map(|seat| seat.stage) {
                        Some(Stage::Held(sequence)) => {
                            self.book.unwrap_gift(claim.id);
                            return Ok(Tried::Held(sequence));
                        }
                        Some(Stage::Waiting) => {
                            tried += 1;
                            continue;
                        }
                        Some(Stage::Trying | Stage::Unknown) => return Ok(Tried::Behind),
                        None => return Ok(Tried::Left),
                    }
                }
            };
            tried += 1;
            let written = match self.plan(line, seats, &view) {
                Err(error) => return Err(error),
                Ok(None) => return Ok(Tried::Behind),
                Ok(Some(write)) => self.write(line, write).await?,
            };
            let errors = match written {
                Written::Held(sequence) => return Ok(Tried::Held(sequence)),
                Written::Closed => {
                    view = self.look(line).await?;
                    continue;
                }
                Written::Refused(errors) => errors,
            };
            let says = |what: &str| errors.iter().any(|error| error.what.contains(what));
            if says("invalid session") {
                if says(&session) {
                    return Ok(Tried::Gone);
                }
                // That of one that was taken along; it finds out by itself.
                along = 0;
                continue;
            }
            if says("lock delay") {
                return Ok(Tried::Delayed);
            }
            if tried > 1 {
                tokio::time::sleep(pause.mul_f64(rand::random())).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            // Most are refused by the part that was read, which decides the next try alone.
            let guards = |at: usize| errors.iter().any(|error| error.op_index == at);
            let unread = match ask.mode() {
                Mode::Permits => guards(LOCK_GUARD),
                Mode::Shared | Mode::Exclusive => guards(PERMITS_GUARD),
            };
            if (unread || ask == Ask::Whole) && std::mem::take(&mut guessed) {
                // A part was taken for empty without a look: nobody has come first yet.
                tried -= 1;
            }
            if tried > 0 && !limit.allows(tried) {
                break;
            }
            view = match ask.mode() {
                Mode::Permits | Mode::Shared if !unread => self.glance(line, ask).await?,
                Mode::Exclusive if !unread => {
                    let view = self.glance(line, ask).await?;
                    match &view.lock {
                        Some(lock) if lock.holder().is_none() || lock.flags == READERS => {
                            self.look(line).await?
                        }
                        _ => view,
                    }
                }
                _ => self.look(line).await?,
            };
        }
        // Others came first each time.
        self.book.change(claim.id, |seat| seat.watched = None);
        Ok(Tried::Behind)
    }

    /// Plans a write for seats for which one has begun; those that it is not for wait on. `None`
    /// when they are behind others.
    fn plan(&self, line: &Line, mut seats: Vec<Seat>, view: &View) -> Result<Option<Write>> {
        let askers: Vec<Asker> = seats.iter().map(asker).collect();
        let ask = seats.first().map_or(Ask::Whole, |seat| seat.claim.ask);
        let wait = |seats: &[Seat]| {
            for seat in seats {
                self.book.settle(seat.claim.id, Stage::Waiting);
            }
        };
        let (ops, spot, taken) = match view.plan(line, ask, &askers) {
            Ok(Plan::Take(ops, taken)) => (ops, spot(ask), taken),
            Ok(Plan::Close(ops)) => (ops, Spot::Gate, 1),
            Ok(Plan::Behind { tree }) => {
                let index = match tree {
                    true => view.tree_index,
                    false => view.lock.as_ref().map_or(0, |lock| lock.modify_index),
                };
                let watched = Some(Watched { tree, index });
                if let Some(first) = askers.first() {
                    self.book.change(first.claim, |seat| seat.watched = watched);
                }
                wait(&seats);
                return Ok(None);
            }
            Err(error) => {
                wait(&seats);
                return Err(error);
            }
        };
        wait(&seats.split_off(taken));
        Ok(Some(Write { ops, spot, seats }))
    }

    /// Sends the write that takes places. It goes on when the caller is dropped, so that
    /// whoever leaves afterwards knows what became of it.
    async fn write(self: &Arc<Self>, line: &Line, write: Write) -> Result<Written> {
        let (engine, line) = (Arc::clone(self), line.clone());
        let Write { ops, spot, seats } = write;
        Finish::new(async move {
            let committed = engine.api.transact("enter", &ops).await;
            let otherwise = match &committed {
                Err(error) if error.outcome() != Outcome::NotApplied => Stage::Unknown,
                _ => Stage::Waiting,
            };
            let sequence = |seat: &Seat| match &committed {
                Ok(Committed::Done(pairs)) => {
                    let key = spot.key(&line, seat.claim.id, &seat.session_text());
                    let own = pairs.iter().rev().find(|pair| pair.key == key);
                    own.map_or(0, |pair| pair.modify_index)
                }
                _ => 0,
            };
            let (mut first, mut done) = (true, 0);
            for seat in &seats {
                let (claim, sequence) = (seat.claim.id, sequence(seat));
                match (sequence, spot) {
                    (0, _) if first => engine.book.settle(claim, otherwise),
                    (0, _) => engine.book.give(claim, otherwise),
                    (index, Spot::Gate) => engine.closed(claim, index),
                    (sequence, _) if first => engine.book.settle(claim, Stage::Held(sequence)),
                    (sequence, _) => engine.book.give(claim, Stage::Held(sequence)),
                }
                if first {
                    (first, done) = (false, sequence);
                }
            }
            Ok(match committed? {
                Committed::Done(_) if spot == Spot::Gate => Written::Closed,
                Committed::Done(_) => Written::Held(done),
                Committed::Refused(errors) => Written::Refused(errors),
            })
        })
        .await
    }
}

/// A write that takes places, and for whom.
struct Write {
    ops: Vec<Op>,
    spot: Spot,
    seats: Vec<Seat>,
}

/// Where a claim is that has what it asks for.
pub(super) fn spot(ask: Ask) -> Spot {
    match ask.mode() {
        Mode::Exclusive => Spot::Whole,
        Mode::Shared => Spot::Reader,
        Mode::Permits => Spot::Permit,
    }
}
