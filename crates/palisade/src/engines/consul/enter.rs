//! `enter`: a seat for a claim, on a session that may have to be made first, and its first try.

use std::sync::Arc;
use std::time::Duration;

use super::ConsulEngine;
use super::api::SessionSettings;
use super::book::{Seat, Stage};
use super::keys::Line;
use super::plan::Plan;
use super::take::{Limit, Standing, Tried, asker};
use super::view::View;
use crate::core::claim::{Ask, Claim, Mode};
use crate::core::clock::BootTime;
use crate::core::engine::{Entered, Place};
use crate::core::error::{Error, Kind, Outcome, Result};
use crate::core::ticket::{LeaseStart, Ticket};
use crate::engines::remote::timed;

/// A claim that does not wait tries again for this part of the time that one request may take:
/// 50 ms by default.
const NO_WAIT: u32 = 40;

impl ConsulEngine {
    pub(super) async fn do_enter(self: Arc<Self>, claim: Arc<Claim>) -> Result<Entered> {
        let line = self.keys.line(&claim.name)?;
        let seat = match self.book.settled(claim.id, self.api.timeout).await {
            None => self.seat(&claim).await?,
            Some(seat) => match seat.stage {
                Stage::Waiting => seat,
                Stage::Held(_) | Stage::Trying | Stage::Unknown => {
                    match self.standing(&line, &seat).await? {
                        Standing::Held(sequence) => {
                            return Ok(self.entered(&seat, Place::Held { sequence }));
                        }
                        Standing::Waiting => seat,
                        // Its lock was taken away, or the write may still come: a new session.
                        Standing::Absent => {
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
        let ask = seat.claim.ask;
        // The list of permits is everyone's, and whoever waits has time to try again; whoever does
        // not is answered soon, and by others who came first each time.
        let limit = match (seat.claim.queue, ask.mode()) {
            (true, Mode::Permits) => Limit::tries(1),
            (true, _) => Limit::tries(3),
            (false, _) => Limit::until(BootTime::now() + self.api.timeout / NO_WAIT),
        };
        let view = match ask {
            // Free, as it is most of the time.
            Ask::Whole => View::default(),
            ask => self.glance(line, ask).await?,
        };
        if ask.mode() != Mode::Permits {
            return self.attempt(line, seat, view, limit).await;
        }
        // Claims of one process that write the list of holders at once only refuse each other.
        // One that is at it now takes those along that wait.
        let patience = match (view.plan(line, ask, &[asker(seat)])?, seat.claim.queue) {
            (Plan::Take(..), false) => self.api.timeout / NO_WAIT / 2,
            _ => Duration::ZERO,
        };
        match self.turns.take(&line.lock, patience).await {
            Some(_turn) => self.attempt(line, seat, view, limit).await,
            None if seat.claim.queue => Ok(Tried::Behind),
            None => self.attempt(line, seat, view, limit).await,
        }
    }

    fn answer(&self, seat: &Seat, tried: Result<Tried>) -> Result<Entered> {
        match tried {
            Ok(Tried::Held(sequence)) => Ok(self.entered(seat, Place::Held { sequence })),
            Ok(Tried::Behind | Tried::Delayed) if seat.claim.queue => {
                self.book.change(seat.claim.id, |seat| seat.waited = true);
                Ok(self.entered(seat, Place::Waiting))
            }
            Ok(Tried::Behind | Tried::Delayed) => {
                self.book.forget(seat.claim.id);
                Ok(Entered::Busy)
            }
            Ok(Tried::Left) => Ok(Entered::Busy),
            Ok(Tried::Gone) => {
                self.book.ended(seat.session);
                self.book.forget(seat.claim.id);
                let message = "the session ended before it was used; try again";
                Err(Error::new(Kind::Unreachable, "enter", message))
            }
            Err(error) => {
                let known = self.book.seat(seat.claim.id);
                if known.is_some_and(|seat| seat.closed.is_some()) {
                    // It must be left, so that readers can come again.
                    return Err(error.maybe_applied());
                }
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
        let armed = LeaseStart {
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
        let sequence = match place {
            Place::Held { sequence } => sequence,
            _ => 0,
        };
        // A session that has ended meanwhile is over at once.
        let armed = self.book.armed(seat.session).unwrap_or(LeaseStart {
            sent: BootTime::PAST,
            ttl: seat.claim.ttl,
        });
        Entered::In {
            ticket: Ticket {
                sequence,
                ..seat.ticket()
            },
            armed,
            place,
        }
    }
}
