//! `Occupied`: the guard that makes acquires and holds safe to drop at any await.

use std::sync::Arc;
use std::time::Duration;

use super::claim::Mode;
use super::clock::BootTime;
use super::engine::{Entered, Left, Place};
use super::error::{Outcome, Result};
use super::events::Event;
use super::keeper::Keeper;
use super::lookout::AgentState;
use super::ticket::{LeaseStart, Ticket};
use super::validity::Validity;

/// A place that is left when this guard is dropped, whether it is entering, waiting or held.
pub(super) struct Occupied {
    pub(super) keeper: Arc<Keeper>,
    pub(super) ticket: Ticket,
    ttl: Duration,
    pub(super) mode: Mode,
    /// The agent that it belongs to, if the caller named one.
    agent: Option<Arc<AgentState>>,
    /// When it was granted.
    held_since: Option<BootTime>,
    /// The earliest time to leave it.
    pub(super) not_before: BootTime,
    /// Cleared when no place needs to be left.
    taken: bool,
}

impl Occupied {
    /// Guards a place that is about to be entered. From here on, dropping the guard leaves the
    /// place.
    pub(super) fn entering(
        keeper: &Arc<Keeper>,
        ticket: Ticket,
        ttl: Duration,
        mode: Mode,
        agent: Option<Arc<AgentState>>,
    ) -> Self {
        keeper.entering(ticket.claim);
        Self {
            keeper: Arc::clone(keeper),
            ticket,
            ttl,
            mode,
            agent,
            held_since: None,
            not_before: BootTime::PAST,
            taken: true,
        }
    }

    /// Records that the enter will be repeated while an earlier copy may still be in flight.
    pub(super) fn in_doubt(&mut self) {
        self.ticket.in_doubt = true;
    }

    /// Stores the ticket that the engine returned for the request sent at `called`, and returns when
    /// its lease began.
    pub(super) fn entered(
        &mut self,
        ticket: Ticket,
        armed: LeaseStart,
        called: BootTime,
    ) -> LeaseStart {
        if ticket.claim != self.ticket.claim {
            self.keeper.known_as(self.ticket.claim, ticket.claim);
        }
        let in_doubt = self.ticket.in_doubt;
        self.ticket = Ticket { in_doubt, ..ticket };
        if self.ticket.has_own_lease() {
            return armed.not_after(called);
        }
        // Another claim may have created or renewed a shared lease at another time.
        armed
    }

    /// Where the claim stands after it entered again, with a newer record; `None` if that failed,
    /// which leaves it where it was.
    pub(super) fn entered_again(&mut self, entered: Result<Entered>) -> Option<Place> {
        match entered {
            Ok(Entered::In { place, .. }) => Some(place),
            Ok(Entered::Busy) => Some(Place::Gone),
            Err(error) => {
                self.ticket.in_doubt |= error.outcome() == Outcome::MaybeApplied;
                None
            }
        }
    }

    /// Stores the sequence of the grant, and the least time that it is to be held.
    pub(super) fn granted(
        &mut self,
        sequence: u64,
        validity: &Arc<Validity>,
        at_least: Duration,
        renewed: bool,
    ) {
        let now = BootTime::now();
        self.ticket.sequence = sequence;
        self.held_since = Some(now);
        self.not_before = now + at_least;
        self.keeper.granted(&self.ticket, renewed);
        if let Some(agent) = &self.agent {
            agent.granted(self.ticket.claim, validity);
        }
    }

    /// Records that the last request took no place. An earlier copy may still take one; the drop
    /// then leaves it.
    pub(super) fn not_taken(mut self) {
        self.taken = self.ticket.in_doubt;
    }

    /// Leaves the place. After an error, or if it is dropped, the leave continues in the
    /// background.
    pub(super) async fn leave(mut self) -> Result<Left> {
        self.keeper.part_with(&self.ticket);
        let left = self.keeper.engine().leave(self.ticket.clone()).await;
        // After an error, the drop leaves it again in the background.
        self.taken = left.is_err();
        left
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        if let Some(since) = self.held_since {
            let held = BootTime::now().saturating_since(since);
            let (name, mode) = (&self.ticket.name, self.mode);
            let released = |engine| Event::Released {
                engine,
                name,
                mode,
                held,
            };
            self.keeper.observers().tell(released);
        }
        if let Some(agent) = &self.agent {
            agent.left(self.ticket.claim);
        }
        if self.taken {
            self.keeper
                .leave_later(self.ticket.clone(), self.not_before, self.ttl);
        } else {
            self.keeper.forget(&self.ticket);
        }
    }
}
