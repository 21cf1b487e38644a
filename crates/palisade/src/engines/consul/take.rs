//! Taking a place: `enter`, and the try that `wait` makes too.
//!
//! A place is taken by one transaction and by nothing else. While a write is unanswered its claim
//! is `Trying`, so that a dropped future is found out about.

use std::sync::Arc;

use super::ConsulEngine;
use super::api::{Committed, Read, SessionSettings};
use super::book::{Seat, Stage, Watched};
use super::finish::Finish;
use super::keys::Line;
use super::view::{Asker, Plan, View};
use super::wire::{Op, Pair, Record, TxnError};
use crate::core::claim::{Ask, Claim, Mode};
use crate::core::clock::BootTime;
use crate::core::engine::{Entered, Place};
use crate::core::error::{Error, Kind, Outcome, Result};
use crate::core::ticket::{Armed, Ticket};
use crate::engines::remote::timed;

/// How often one call tries again because others wrote between its read and its write.
const TRIES: u32 = 64;
const QUEUED_TRIES: u32 = 4;

/// Where the operations of a plan guard the lock, and that there are no permits.
const LOCK_GUARD: usize = 0;
const PERMITS_GUARD: usize = 1;

/// What came of a write.
enum Written {
    Held(u64),
    Refused(Vec<TxnError>),
    /// Its claim was left before it was sent.
    Gone,
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
}

impl ConsulEngine {
    pub(super) async fn do_enter(self: Arc<Self>, claim: Arc<Claim>) -> Result<Entered> {
        let line = self.keys.line(&claim.name)?;
        let seat = match self.book.settled(claim.id, self.api.timeout).await {
            None => self.seat(&claim).await?,
            Some(seat) => match seat.stage {
                Stage::Waiting => seat,
                Stage::Held(_) | Stage::Trying | Stage::Unknown => {
                    match self.found(&line, &seat).await? {
                        Some(counted) => return Ok(self.entered(&seat, Place::Held { counted })),
                        // Its lock was taken away, or the write may still come: a new session.
                        None => {
                            self.book.forget(claim.id);
                            self.seat(&claim).await?
                        }
                    }
                }
            },
        };
        match self.first(&line, &seat).await {
            Ok(Tried::Gone) => {
                // Ended since it was used last, by its ttl or by hand.
                self.book.ended(seat.session);
                self.book.forget(claim.id);
                let seat = self.seat(&claim).await?;
                let tried = self.first(&line, &seat).await;
                self.answer(&seat, tried)
            }
            tried => self.answer(&seat, tried),
        }
    }

    /// The first try of a claim.
    async fn first(self: &Arc<Self>, line: &Line, seat: &Seat) -> Result<Tried> {
        let view = match seat.claim.ask {
            // Free, as it is most of the time.
            Ask::Whole => View::default(),
            ask => self.glance(line, ask).await?,
        };
        self.attempt(line, seat, view).await
    }

    fn answer(&self, seat: &Seat, tried: Result<Tried>) -> Result<Entered> {
        match tried {
            Ok(Tried::Held(counted)) => Ok(self.entered(seat, Place::Held { counted })),
            Ok(Tried::Behind | Tried::Delayed) if seat.claim.queue => {
                Ok(self.entered(seat, Place::Waiting))
            }
            Ok(Tried::Behind | Tried::Delayed) => {
                self.book.forget(seat.claim.id);
                Ok(Entered::Busy)
            }
            Ok(Tried::Gone) => {
                self.book.ended(seat.session);
                self.book.forget(seat.claim.id);
                let message = "the session ended before it was used; try again";
                Err(Error::new(Kind::Unreachable, "enter", message))
            }
            Err(error) => {
                if error.outcome() == Outcome::NotApplied {
                    self.book.forget(seat.claim.id);
                }
                Err(error)
            }
        }
    }

    /// A seat for a claim that has none, on a session that may have to be made first.
    async fn seat(&self, claim: &Arc<Claim>) -> Result<Seat> {
        if let Some(seat) = self.book.sit(claim) {
            return Ok(seat);
        }
        // One makes a session at a time, so that many claims at once share what they can.
        let _making = timed("session", self.api.timeout, self.making.lock())
            .await
            .map_err(|error| Error::new(error.kind(), "session", error.message()))?;
        if let Some(seat) = self.book.sit(claim) {
            return Ok(seat);
        }
        let sent = BootTime::now();
        let settings = SessionSettings {
            ttl: claim.ttl,
            lock_delay: self.lock_delay,
            checks: self.checks.clone(),
        };
        let session = self.api.create_session(&settings).await?;
        let armed = Armed {
            sent,
            ttl: claim.ttl,
        };
        Ok(self.book.sit_on(session, armed, claim))
    }

    fn entered(&self, seat: &Seat, place: Place) -> Entered {
        let seat = self
            .book
            .seat(seat.claim.id)
            .unwrap_or_else(|| seat.clone());
        let counted = match place {
            Place::Held { counted } => counted,
            _ => 0,
        };
        // A session that has ended meanwhile is over at once.
        let armed = self.book.armed(seat.session).unwrap_or(Armed {
            sent: BootTime::PAST,
            ttl: seat.claim.ttl,
        });
        Entered::In {
            ticket: Ticket {
                counted,
                ..seat.ticket()
            },
            armed,
            place,
        }
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

    /// What was counted for the claim, if it holds, and says so in the book.
    pub(super) async fn found(&self, line: &Line, seat: &Seat) -> Result<Option<u64>> {
        let view = self.look(line).await?;
        let held = view.find(line, seat.claim.id, &seat.session_text());
        let counted = held.map(|held| held.counted);
        if let Some(counted) = counted {
            self.book
                .change(seat.claim.id, |seat| seat.stage = Stage::Held(counted));
        }
        Ok(counted)
    }

    /// Tries to take the place, again when others wrote in between.
    pub(super) async fn attempt(
        self: &Arc<Self>,
        line: &Line,
        seat: &Seat,
        mut view: View,
    ) -> Result<Tried> {
        let (claim, session) = (&seat.claim, seat.session_text());
        let asker = Asker {
            line,
            claim: claim.id,
            session: &session,
            record: Record::of(claim),
        };
        // A claim that queues looks at its patience now and then.
        let tries = if claim.queue { QUEUED_TRIES } else { TRIES };
        for _ in 0..tries {
            let ops = match view.plan(claim.ask, &asker)? {
                Plan::Take(ops) => ops,
                Plan::Behind { tree } => {
                    let index = match tree {
                        true => view.tree_index,
                        false => view.lock.as_ref().map_or(0, |lock| lock.modify_index),
                    };
                    let watched = Some(Watched { tree, index });
                    self.book.change(claim.id, |seat| seat.watched = watched);
                    return Ok(Tried::Behind);
                }
            };
            let errors = match self.write(claim, &session, ops).await? {
                Written::Held(counted) => return Ok(Tried::Held(counted)),
                Written::Gone => return Ok(Tried::Gone),
                Written::Refused(errors) => errors,
            };
            let says = |what: &str| errors.iter().any(|error| error.what.contains(what));
            if says("invalid session") {
                return Ok(Tried::Gone);
            }
            if says("lock delay") {
                return Ok(Tried::Delayed);
            }
            // Most are refused by the part that was read, which decides the next try alone.
            let guards = |at: usize| errors.iter().any(|error| error.op_index == at);
            view = match claim.ask.mode() {
                Mode::Permits if !guards(LOCK_GUARD) => self.glance(line, claim.ask).await?,
                Mode::Shared if !guards(PERMITS_GUARD) => self.glance(line, claim.ask).await?,
                Mode::Exclusive if !guards(PERMITS_GUARD) => {
                    let view = self.glance(line, claim.ask).await?;
                    match &view.lock {
                        Some(lock) if lock.holder().is_none() => self.look(line).await?,
                        _ => view,
                    }
                }
                _ => self.look(line).await?,
            };
        }
        if claim.queue {
            self.book.change(claim.id, |seat| seat.watched = None);
            return Ok(Tried::Behind);
        }
        let message = "others change this line faster than it can be read; try again";
        Err(Error::new(Kind::Unreachable, "enter", message))
    }

    /// Sends the write that takes a place. It goes on when the caller is dropped, so that
    /// whoever leaves afterwards knows what became of it.
    async fn write(
        self: &Arc<Self>,
        claim: &Arc<Claim>,
        session: &str,
        ops: Vec<Op>,
    ) -> Result<Written> {
        if !self.book.trying(claim.id) {
            // Left meanwhile.
            return Ok(Written::Gone);
        }
        let (engine, id, session) = (Arc::clone(self), claim.id, session.to_owned());
        Finish::new(async move {
            let written = match engine.api.transact("enter", &ops).await {
                Ok(Committed::Done(pairs)) => {
                    let own = |pair: &&Pair| pair.holder() == Some(&session);
                    let own = pairs.iter().rev().find(own);
                    Ok(Written::Held(own.map_or(0, |pair| pair.modify_index)))
                }
                Ok(Committed::Refused(errors)) => Ok(Written::Refused(errors)),
                Err(error) => Err(error),
            };
            let stage = match &written {
                Ok(Written::Held(counted)) => Stage::Held(*counted),
                Ok(_) => Stage::Waiting,
                Err(error) if error.outcome() == Outcome::NotApplied => Stage::Waiting,
                Err(_) => Stage::Unknown,
            };
            engine.book.settle(id, stage);
            written
        })
        .await
    }
}
