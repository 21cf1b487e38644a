//! What a claim asks, each a statement: enter, wait, renew, amend, leave. The functions in the
//! database decide; a push tells of a grant, or when to look.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::types::ToSql;

use super::desk::Desk;
use super::fault;
use super::mail::Bell;
use super::queue::{Next, Was};
use super::renew::{Round, Rows};
use super::session::Verb;
use super::survey::from_ask;
use crate::core::claim::{Claim, READERS};
use crate::core::clock::BootTime;
use crate::core::engine::{Amended, Amendment, Entered, Left, Place, Renewal};
use crate::core::error::{Error, Kind, Outcome, Result};
use crate::core::line::capacity_mismatch;
use crate::core::name::Name;
use crate::core::sync;
use crate::core::ticket::{Lease, LeaseStart, Ticket};

/// A push can be lost; then this is how late a waiter is.
const RECHECK: Duration = Duration::from_secs(1);

/// The same where no push can be had: a waiter is late by half of it on average, and asks the
/// server ten times a second.
const POLL: Duration = Duration::from_millis(100);

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

fn of_micros(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0).unsigned_abs())
}

fn count(sequence: u64) -> i64 {
    i64::try_from(sequence).unwrap_or(i64::MAX)
}

/// Where a claim stands.
enum Standing {
    /// It holds, or is gone.
    At(Place),
    /// It waits: until a lease ahead of it is due, in a line with this last token.
    Waiting { due: Duration, last: u64 },
}

impl Desk {
    pub(super) async fn enter(&self, claim: &Arc<Claim>) -> Result<Entered> {
        if !claim.queue {
            return self.enter_line(claim).await;
        }
        if !self.queue.admit(claim) {
            return Ok(Entered::In {
                ticket: Ticket::own(claim.name.clone(), claim.id),
                armed: LeaseStart {
                    sent: BootTime::now(),
                    ttl: claim.ttl,
                },
                place: Place::Waiting,
            });
        }
        let entered = self.enter_line(claim).await;
        match &entered {
            Ok(Entered::In {
                place: Place::Waiting,
                ..
            }) => self.queue.is_in_line(&claim.name, claim.id),
            // It is asked again, or left.
            Err(error) if error.outcome() == Outcome::MaybeApplied => {}
            Ok(_) | Err(_) => self.queue.is_over(&claim.name, claim.id),
        }
        entered
    }

    async fn enter_line(&self, claim: &Claim) -> Result<Entered> {
        let (weight, capacity) = from_ask(claim.ask);
        let sent = BootTime::now();
        let answer = self
            .numbers(
                "enter",
                Verb::Enter,
                &[
                    &self.namespace,
                    &claim.name.as_str(),
                    &claim.id.to_string(),
                    &weight,
                    &capacity,
                    &micros(claim.ttl),
                    &claim.queue,
                    &self.mailbox,
                    &claim.owner.to_json(),
                    &claim.value,
                ],
            )
            .await?;
        let (place, sequence, left) = match *answer.as_slice() {
            [0] => return Ok(Entered::Busy),
            [1, sequence, left] => {
                let sequence = sequence.unsigned_abs();
                (Place::Held { sequence }, sequence, left)
            }
            [2, _, left] => (Place::Waiting, 0, left),
            [3, live] => {
                let live = u32::try_from(live).unwrap_or(u32::MAX);
                let asked = u32::try_from(capacity).unwrap_or(u32::MAX);
                return Err(capacity_mismatch(live, asked));
            }
            _ => return fault::unreadable("enter"),
        };
        Ok(Entered::In {
            ticket: Ticket {
                sequence,
                ..Ticket::own(claim.name.clone(), claim.id)
            },
            armed: LeaseStart {
                sent,
                ttl: of_micros(left),
            },
            place,
        })
    }

    async fn place(&self, ticket: &Ticket) -> Result<Standing> {
        let answer = self
            .numbers(
                "wait",
                Verb::Place,
                &[
                    &self.namespace,
                    &ticket.name.as_str(),
                    &ticket.claim.to_string(),
                ],
            )
            .await?;
        match *answer.as_slice() {
            [0] => Ok(Standing::At(Place::Gone)),
            [1, sequence] => {
                let sequence = sequence.unsigned_abs();
                Ok(Standing::At(Place::Held { sequence }))
            }
            [2, due, last] => Ok(Standing::Waiting {
                due: of_micros(due),
                last: last.unsigned_abs(),
            }),
            _ => fault::unreadable("wait"),
        }
    }

    pub(super) async fn wait(&self, ticket: &Ticket, until: BootTime) -> Result<Place> {
        let mut next = self.queue.next(&ticket.name, ticket.claim);
        if let Next::Stay(turn) = next {
            let look = until.min(BootTime::now() + RECHECK);
            tokio::select! {
                () = turn.notified() => {}
                () = sync::sleep_until(look) => {}
            }
            next = self.queue.next(&ticket.name, ticket.claim);
        }
        let place = match next {
            Next::Stay(_) => return Ok(Place::Waiting),
            Next::Enter(claim) => match self.enter(&claim).await? {
                Entered::Busy => Place::Gone,
                Entered::In { place, .. } => place,
            },
            Next::InLine => self.wait_in_line(ticket, until).await?,
        };
        if place != Place::Waiting {
            self.queue.is_over(&ticket.name, ticket.claim);
        }
        Ok(place)
    }

    async fn wait_in_line(&self, ticket: &Ticket, until: BootTime) -> Result<Place> {
        // The bell hangs before the look, so that nothing rings unheard in between.
        let bell = self.mail().await?.map(|mail| mail.bell(ticket.claim));
        let (due, last) = match self.place(ticket).await? {
            Standing::At(place) => return Ok(place),
            Standing::Waiting { .. } if until.has_passed() => return Ok(Place::Waiting),
            Standing::Waiting { due, last } => (due, last),
        };
        let recheck = if bell.is_some() { RECHECK } else { POLL };
        // A little after the lease's end: the server must find it ended.
        let due = due + Duration::from_millis(1);
        let look = until.min(BootTime::now() + due.min(recheck));
        tokio::select! {
            () = rung(bell.as_ref()) => {}
            () = sync::sleep_until(look) => {}
        }
        if let Some(sequence) = bell.and_then(|bell| bell.granted_after(last)) {
            return Ok(Place::Held { sequence });
        }
        Ok(match self.place(ticket).await? {
            Standing::At(place) => place,
            Standing::Waiting { .. } => Place::Waiting,
        })
    }

    pub(super) async fn renew(&self, leases: &[Lease], within: Duration) -> Vec<Renewal> {
        let tickets = leases.iter().map(|lease| lease.ticket.as_ref()).collect();
        let mut round = Round::new(tickets, within);
        round.answer(|ticket| {
            let armed = self.queue.armed(&ticket.name, ticket.claim)?;
            Some(Renewal::Held(armed))
        });
        round.run(self).await
    }

    pub(super) async fn amend(&self, ticket: &Ticket, amendment: Amendment) -> Result<Amended> {
        let (weight, capacity, value) = match amendment {
            Amendment::Ask(ask) => {
                let (weight, capacity) = from_ask(ask);
                (Some(weight), Some(capacity), None)
            }
            Amendment::Value(value) => (None, None, Some(value)),
        };
        let answer = self
            .numbers(
                "amend",
                Verb::Amend,
                &[
                    &self.namespace,
                    &ticket.name.as_str(),
                    &ticket.claim.to_string(),
                    &count(ticket.sequence),
                    &weight,
                    &capacity,
                    &value,
                ],
            )
            .await?;
        match *answer.as_slice() {
            [0] => Ok(Amended::Gone),
            [1] => Ok(Amended::Done),
            [2] => Ok(Amended::Busy),
            _ => fault::unreadable("amend"),
        }
    }

    pub(super) async fn leave(&self, mut ticket: Ticket) -> Result<Left> {
        match self.queue.leave(&ticket.name, ticket.claim) {
            Was::Here => return Ok(Left::Done),
            // Its enter may still be under way.
            Was::Entering => ticket.in_doubt = true,
            Was::Elsewhere => {}
        }
        let left = self.leave_line(&ticket).await?;
        self.queue.is_over(&ticket.name, ticket.claim);
        Ok(left)
    }

    pub(super) async fn resize(&self, name: &Name, capacity: u32) -> Result<bool> {
        let answer = self
            .numbers(
                "resize",
                Verb::Resize,
                &[
                    &self.namespace,
                    &name.as_str(),
                    &i64::from(capacity),
                    &i64::from(READERS),
                ],
            )
            .await?;
        match *answer.as_slice() {
            [0] => Ok(false),
            [1] => Ok(true),
            [2] => Err(capacity_mismatch(READERS, capacity)),
            [3, weight] => {
                let message =
                    format!("a claim in this line takes {weight} permits, more than {capacity}");
                Err(Error::new(Kind::InvalidArgument, "resize", message))
            }
            _ => fault::unreadable("resize"),
        }
    }

    async fn leave_line(&self, ticket: &Ticket) -> Result<Left> {
        let answer = self
            .numbers(
                "leave",
                Verb::Leave,
                &[
                    &self.namespace,
                    &ticket.name.as_str(),
                    &ticket.claim.to_string(),
                    &count(ticket.sequence),
                    &ticket.in_doubt,
                ],
            )
            .await?;
        match *answer.as_slice() {
            [0] => Ok(Left::Absent),
            [1] => Ok(Left::Done),
            _ => fault::unreadable("leave"),
        }
    }
}

impl Rows for Desk {
    async fn renew_rows(
        &self,
        tickets: &[&Ticket],
        patience: i32,
        by: Instant,
    ) -> Result<Vec<i64>> {
        let names: Vec<&str> = tickets.iter().map(|t| t.name.as_str()).collect();
        let claims: Vec<String> = tickets.iter().map(|t| t.claim.to_string()).collect();
        let counts: Vec<i64> = tickets.iter().map(|t| count(t.sequence)).collect();
        let parameters: &[&(dyn ToSql + Sync)] =
            &[&self.namespace, &names, &claims, &counts, &patience];
        self.renewals(Verb::Renew, parameters, by).await
    }
}

async fn rung(bell: Option<&Bell>) {
    match bell {
        Some(bell) => bell.rung().await,
        None => std::future::pending().await,
    }
}
