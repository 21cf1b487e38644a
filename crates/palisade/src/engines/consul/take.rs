//! Taking a place: `enter` and `wait`.
//!
//! A place is taken by one transaction and by nothing else. A claim of a line that is busy has
//! nothing in the store: it sleeps on a blocking query and tries when the line looks free. While
//! a write is unanswered its claim is `Trying`, so that a dropped future is found out about.

use std::sync::Arc;
use std::time::Duration;

use super::ConsulEngine;
use super::api::{Committed, Read, SessionSettings};
use super::book::{Seat, Stage, Watched, nap};
use super::keys::Line;
use super::view::{Asker, Plan, View};
use super::wire::{Record, session_text};
use crate::core::claim::{Ask, Claim};
use crate::core::clock::BootTime;
use crate::core::engine::{Entered, Place};
use crate::core::error::{Error, Kind, Outcome, Result};
use crate::core::ticket::{Armed, Ticket};
use crate::engines::remote::timed;

/// How long one blocking query sleeps: long enough to be cheap, short enough that an agent that
/// no longer answers is noticed.
const NAP: Duration = Duration::from_secs(1);

/// The pause when a lock-delay is in force, which nothing tells the end of.
const DELAYED: Duration = Duration::from_millis(500);

/// How often one call tries again because others wrote between its read and its write.
const TRIES: u32 = 64;

/// What came of a try.
enum Tried {
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
        let seat = match self.book.seat(claim.id) {
            None => self.seat(&claim).await?,
            Some(seat) => match seat.stage {
                Stage::Waiting => seat,
                Stage::Held(_) | Stage::Trying => match self.found(&line, &seat).await? {
                    Some(counted) => return Ok(self.entered(&seat, Place::Held { counted })),
                    // Its lock was taken away, or the write may still come: a new session.
                    None => {
                        self.book.forget(claim.id);
                        self.seat(&claim).await?
                    }
                },
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
    async fn first(&self, line: &Line, seat: &Seat) -> Result<Tried> {
        let view = match seat.claim.ask {
            // Free, as it is most of the time.
            Ask::Whole => View::default(),
            _ => self.look(line).await?,
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

    /// Reads a line, surely.
    pub(super) async fn look(&self, line: &Line) -> Result<View> {
        let lock = self.api.read("look", &line.lock, false, Read::Consistent);
        let tree = line.tree();
        let tree = self.api.read("look", &tree, true, Read::Consistent);
        let (lock, tree) = tokio::try_join!(lock, tree)?;
        Ok(View {
            lock: lock.pairs.into_iter().next(),
            tree: tree.pairs,
            tree_index: tree.index,
        })
    }

    /// What was counted for the claim, if it holds, and says so in the book.
    async fn found(&self, line: &Line, seat: &Seat) -> Result<Option<u64>> {
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
    async fn attempt(&self, line: &Line, seat: &Seat, mut view: View) -> Result<Tried> {
        let session = seat.session_text();
        let asker = Asker {
            line,
            claim: seat.claim.id,
            session: &session,
            record: Record::of(&seat.claim),
        };
        let stage = |stage| self.book.change(seat.claim.id, |seat| seat.stage = stage);
        for _ in 0..TRIES {
            let ops = match view.plan(seat.claim.ask, &asker)? {
                Plan::Take(ops) => ops,
                Plan::Behind { tree } => {
                    let watched = Watched {
                        tree,
                        index: match tree {
                            true => view.tree_index,
                            false => view.lock.as_ref().map_or(0, |lock| lock.modify_index),
                        },
                    };
                    self.book
                        .change(seat.claim.id, |seat| seat.watched = Some(watched));
                    return Ok(Tried::Behind);
                }
            };
            if stage(Stage::Trying).is_none() {
                // Left meanwhile.
                return Ok(Tried::Gone);
            }
            match self.api.transact("enter", &ops).await {
                Ok(Committed::Done(pairs)) => {
                    let own = |pair: &&super::wire::Pair| pair.holder() == Some(&session);
                    let counted = pairs
                        .iter()
                        .rev()
                        .find(own)
                        .map_or(0, |pair| pair.modify_index);
                    stage(Stage::Held(counted));
                    return Ok(Tried::Held(counted));
                }
                Ok(Committed::Refused(errors)) => {
                    stage(Stage::Waiting);
                    let says = |what: &str| errors.iter().any(|error| error.what.contains(what));
                    if says("invalid session") {
                        return Ok(Tried::Gone);
                    }
                    if says("lock delay") {
                        return Ok(Tried::Delayed);
                    }
                }
                Err(error) => {
                    if error.outcome() == Outcome::NotApplied {
                        stage(Stage::Waiting);
                    }
                    return Err(error);
                }
            }
            // A lock that is held is all that needs to be known.
            let lock = self.api.read("look", &line.lock, false, Read::Consistent);
            let lock = lock.await?.pairs.into_iter().next();
            let held = lock.as_ref().is_some_and(|lock| lock.holder().is_some());
            if held && seat.claim.ask.mode() != crate::core::claim::Mode::Permits {
                view = View {
                    lock,
                    ..View::default()
                };
                continue;
            }
            view = self.look(line).await?;
        }
        let message = "others change this line faster than it can be read; try again";
        Err(Error::new(Kind::Unreachable, "enter", message))
    }

    pub(super) async fn do_wait(self: Arc<Self>, ticket: Ticket, until: BootTime) -> Result<Place> {
        let line = self.keys.line(&ticket.name)?;
        loop {
            let Some(seat) = self.book.seat(ticket.claim) else {
                return Ok(Place::Gone);
            };
            match seat.stage {
                Stage::Waiting => {}
                Stage::Held(_) | Stage::Trying => {
                    return Ok(match self.found(&line, &seat).await? {
                        Some(counted) => Place::Held { counted },
                        // Taken away; or not applied yet, and then its session is spoilt for
                        // this name: another claim is needed.
                        None => Place::Gone,
                    });
                }
            }
            let taken_away = Arc::clone(&seat.bell);
            let taken_away = taken_away.notified();
            if self.book.seat(ticket.claim).is_none() {
                return Ok(Place::Gone);
            }
            // Nobody renewed it for its whole ttl.
            if self.book.is_due(seat.session)
                && !self.api.has_session(&session_text(seat.session)).await?
            {
                self.book.ended(seat.session);
                self.book.forget(ticket.claim);
                return Ok(Place::Gone);
            }
            let last = until.has_passed();
            let step = async {
                // A last look is never left to others.
                let turn = match last {
                    true => None,
                    false => match self.turns.take(&line.lock, nap(until, NAP)).await {
                        Some(turn) => Some(turn),
                        None => return Ok(None),
                    },
                };
                let _turn = turn;
                let view = self.after(&line, &seat, nap(until, NAP)).await?;
                match view {
                    Some(view) => self.attempt(&line, &seat, view).await.map(Some),
                    None => Ok(None),
                }
            };
            let tried = tokio::select! {
                () = taken_away => continue,
                tried = step => tried?,
            };
            match tried {
                Some(Tried::Held(counted)) => return Ok(Place::Held { counted }),
                Some(Tried::Gone) => {
                    self.book.ended(seat.session);
                    return Ok(Place::Gone);
                }
                Some(Tried::Delayed) => tokio::time::sleep(nap(until, DELAYED)).await,
                Some(Tried::Behind) | None => {}
            }
            if last || until.has_passed() {
                return Ok(Place::Waiting);
            }
        }
    }

    /// Sleeps on what the claim is behind; the line as it is then, or `None` when nothing
    /// happened. Without knowing what to sleep on, or without time, it only looks.
    async fn after(&self, line: &Line, seat: &Seat, nap: Duration) -> Result<Option<View>> {
        let watched = seat
            .watched
            .filter(|watched| watched.index > 0 && !nap.is_zero());
        let Some(Watched { tree, index }) = watched else {
            let view = self.look(line).await?;
            return Ok(Some(view));
        };
        let key = if tree { line.tree() } else { line.lock.clone() };
        let seen = self
            .api
            .read("wait", &key, tree, Read::After(index, nap))
            .await?;
        if seen.index == index {
            return Ok(None);
        }
        // What to sleep on next is found out by whoever finds the line in use: a try that fails
        // halfway is then followed by another look, not by sleep.
        let watch = |watched| {
            self.book
                .change(seat.claim.id, |seat| seat.watched = watched)
        };
        watch(None);
        if tree {
            let view = self.look(line).await?;
            return Ok(Some(view));
        }
        let lock = seen.pairs.into_iter().next();
        match &lock {
            // Held by the next one already. An index that goes back is that of another history.
            Some(lock) if lock.holder().is_some() => {
                let index = if seen.index < index { 0 } else { seen.index };
                watch(Some(Watched { tree, index }));
                Ok(None)
            }
            Some(_) => self.look(line).await.map(Some),
            None => Ok(Some(View::default())),
        }
    }
}
