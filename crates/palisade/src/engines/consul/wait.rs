//! Waiting for a place: a claim of a line that is busy has nothing in the store. It sleeps on a
//! blocking query, one claim per process and line at a time, and tries when the line looks free.
//! What the query shows is a hint; only the write of the try decides.

use std::sync::Arc;
use std::time::Duration;

use super::ConsulEngine;
use super::api::Read;
use super::book::{Seat, Stage, Watched, nap};
use super::keys::Line;
use super::take::{Limit, Standing, Tried};
use super::view::View;
use super::wire::session_text;
use crate::core::claim::{Ask, Mode};
use crate::core::clock::BootTime;
use crate::core::engine::Place;
use crate::core::error::Result;
use crate::core::ticket::Ticket;

/// How long one blocking query sleeps: long enough to be cheap, short enough that an agent that
/// no longer answers is noticed.
const NAP: Duration = Duration::from_secs(1);

/// The pause when a lock-delay is in force, which nothing tells the end of.
const DELAYED: Duration = Duration::from_millis(500);

impl ConsulEngine {
    pub(super) async fn do_wait(self: Arc<Self>, ticket: Ticket, until: BootTime) -> Result<Place> {
        let line = self.keys.line(&ticket.name)?;
        loop {
            let seat = self.book.settled(ticket.claim, self.api.timeout).await;
            let Some(seat) = seat else {
                return Ok(Place::Gone);
            };
            match seat.stage {
                Stage::Waiting => {}
                Stage::Held(_) | Stage::Trying | Stage::Unknown => {
                    if let Some(sequence) = self.book.unwrap_gift(ticket.claim) {
                        return Ok(Place::Held { sequence });
                    }
                    match self.standing(&line, &seat).await? {
                        Standing::Held(sequence) => return Ok(Place::Held { sequence }),
                        Standing::Waiting => continue,
                        // Taken away; or not applied yet, and then its session is spoilt for
                        // this name: another claim is needed.
                        Standing::Absent => return Ok(Place::Gone),
                    }
                }
            }
            let taken_away = Arc::clone(&seat.bell);
            let taken_away = taken_away.notified();
            let given = Arc::clone(&seat.gift);
            let given = given.notified();
            match self.book.seat(ticket.claim) {
                None => return Ok(Place::Gone),
                Some(seat) if seat.stage != Stage::Waiting => continue,
                Some(_) => {}
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
                    Some(view) => {
                        let tried = self.attempt(&line, &seat, view, Limit::until(until));
                        tried.await.map(Some)
                    }
                    None => Ok(None),
                }
            };
            let tried = tokio::select! {
                () = taken_away => continue,
                () = given => continue,
                tried = step => tried?,
            };
            match tried {
                Some(Tried::Held(sequence)) => return Ok(Place::Held { sequence }),
                Some(Tried::Gone) => {
                    self.book.ended(seat.session);
                    return Ok(Place::Gone);
                }
                Some(Tried::Left) => return Ok(Place::Gone),
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
            let view = match seat.claim.ask.mode() {
                Mode::Permits => self.glance(line, seat.claim.ask).await?,
                Mode::Exclusive | Mode::Shared => self.look(line).await?,
            };
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
        if tree && seat.claim.ask.mode() == Mode::Permits {
            return Ok(Some(View {
                lock: None,
                tree: seen.pairs,
                tree_index: seen.index,
            }));
        }
        if tree {
            return self.look(line).await.map(Some);
        }
        let lock = seen.pairs.into_iter().next();
        match &lock {
            // Held by the next one already. An index that goes back is that of another history.
            Some(lock) if lock.holder().is_some() && seat.closed.is_none() => {
                let index = if seen.index < index { 0 } else { seen.index };
                watch(Some(Watched { tree, index }));
                Ok(None)
            }
            Some(_) if seat.claim.ask == Ask::Whole => self.look(line).await.map(Some),
            _ => Ok(Some(View {
                lock,
                ..View::default()
            })),
        }
    }
}
