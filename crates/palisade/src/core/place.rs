//! `Occupied`: what makes acquires and holds safe to drop at any await.

use std::sync::Arc;
use std::time::Duration;

use super::claim::Mode;
use super::clock::BootTime;
use super::engine::Left;
use super::error::Result;
use super::events::Event;
use super::keeper::Keeper;
use super::lookout::AgentState;
use super::ticket::{LeaseStart, Ticket};
use super::validity::Validity;

/// A place that is left when this is dropped, whatever became of it: entering, waiting or held.
pub(super) struct Occupied {
    pub(super) keeper: Arc<Keeper>,
    pub(super) ticket: Ticket,
    ttl: Duration,
    pub(super) mode: Mode,
    /// Whose it is, where somebody said so.
    agent: Option<Arc<AgentState>>,
    /// Since when it is held.
    held_since: Option<BootTime>,
    /// Kept at least until then.
    pub(super) not_before: BootTime,
    /// Cleared when there is nothing left to leave.
    taken: bool,
}

impl Occupied {
    /// A place that is about to be asked for. From here on a drop at any await leaves it.
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

    /// Says that the place will be asked for once more, while a first copy may be under way.
    pub(super) fn in_doubt(&mut self) {
        self.ticket.in_doubt = true;
    }

    /// Takes the ticket that the engine answered with to what was `called`, and says since when its
    /// lease counts.
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
        // Another claim may have armed it, before or after.
        armed
    }

    /// Takes what the engine counted for the grant, which is to be kept for at least so long.
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

    /// Says that no place was taken by the last request. An earlier copy may still take one, and
    /// then the drop leaves it.
    pub(super) fn not_taken(mut self) {
        self.taken = self.ticket.in_doubt;
    }

    /// Gives it up. On an error, or dropped half-way, that goes on in the background.
    pub(super) async fn leave(mut self) -> Result<Left> {
        self.keeper.part_with(&self.ticket);
        let left = self.keeper.engine().leave(self.ticket.clone()).await;
        // On an error the drop leaves again, in the background.
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
