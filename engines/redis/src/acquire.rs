//! `enter` and `wait`: a claim takes its place in the line, and waits there for its grant.

use std::time::Duration;

use redis::Cmd;

use super::client::{Client, Script, unexpected_reply};
use super::connection::Connection;
use super::keys::LineKeys;
use palisade_core::engine::{
    Claim, Entered, LeaseStart, Place, Ticket, capacity_mismatch, look_by, sync,
};
use palisade_core::{BootTime, Error, Result};
use palisade_kit::Link;

/// The key outlives the lease by this many milliseconds: the server counts whole milliseconds, and
/// the key must not expire before the lease does.
pub(crate) const ROUNDING: u64 = 2;

/// A claim's place, parsed from a script's reply.
struct Standing {
    place: Place,
    /// The time left on its lease.
    left: Duration,
    /// How long the claim may wait before it polls again.
    due: Duration,
    /// The token of its grant; while it waits, the last token of the line.
    token: u64,
}

impl Standing {
    /// Parses `PLACE TOKEN LEFT LOOK-AGAIN-IN`, times in microseconds, or `held TOKEN` for a claim
    /// that was granted just now, with all of `ttl` left.
    fn read(operation: &'static str, answer: &str, ttl: Duration) -> Result<Self> {
        let mut words = answer.split(' ');
        let word = words.next().unwrap_or_default();
        let mut number = || words.next().map(str::parse::<u64>);
        let (token, left, due) = match (number(), number(), number()) {
            (Some(Ok(token)), None, None) => (token, ttl, 0),
            (Some(Ok(token)), Some(Ok(left)), Some(Ok(due))) => {
                (token, Duration::from_micros(left), due)
            }
            _ => return Err(unexpected_reply(operation)),
        };
        let place = match word {
            "held" => Place::Held { sequence: token },
            "waiting" => Place::Waiting,
            _ => return Err(unexpected_reply(operation)),
        };
        Ok(Self {
            place,
            left: left.min(ttl),
            due: Duration::from_micros(due),
            token,
        })
    }
}

impl Client {
    pub(crate) async fn enter(&self, claim: &Claim) -> Result<Entered> {
        let keys = self.keys.line(&claim.name)?;
        let mut link = self.link(Some(&keys)).await?;
        // The claim is registered before it enters the line, so that the push with its grant finds
        // it.
        let mut waiter = None;
        if claim.queue {
            self.receive_grants(&link).await?;
            waiter = Some(self.hub.enter(claim.id));
        }
        let id = claim.id.to_string();
        let (weight, capacity) = claim.ask.numbers();
        let ttl = claim.ttl.as_millis() as u64;
        let owner = claim.owner.to_json();
        let mut tail = format!(" {ttl} 0 {} {owner}", self.hub.channel);
        if let Some(value) = &claim.value {
            tail.push('\n');
            tail.push_str(value);
        }
        let (queue, lasts) = (u8::from(claim.queue), ttl + ROUNDING);
        let arguments = |command: &mut Cmd| {
            let ask = format!("{weight} {capacity} {queue} {lasts}");
            command.arg(&id).arg(ask).arg(&tail);
        };
        let sent = BootTime::now();
        let answer = self.run_for(&mut link, Script::Enter, &keys, &id, arguments);
        let answer = answer.await?;
        if answer == "busy" {
            return Ok(Entered::Busy);
        }
        if let Some(live) = answer.strip_prefix("mismatch ") {
            let live = live.parse().unwrap_or_default();
            return Err(capacity_mismatch(live, capacity));
        }
        let standing = Standing::read("enter", &answer, claim.ttl)?;
        let sequence = match standing.place {
            Place::Held { sequence } => sequence,
            Place::Waiting | Place::Gone => 0,
        };
        if let (Some(waiter), 0) = (waiter, sequence) {
            waiter.waits(standing.token, sent + standing.due);
        }
        let ticket = Ticket {
            sequence,
            ..Ticket::own(claim.name.clone(), claim.id)
        };
        if sequence != 0
            && self.replicas > 0
            && let Err(error) = self.replicated("enter", &link).await
        {
            // A failover could forget this grant, so the claim must not hold.
            self.leave(&ticket).await.map_err(Error::maybe_applied)?;
            return Err(error);
        }
        Ok(Entered::In {
            ticket,
            armed: LeaseStart {
                sent,
                ttl: standing.left,
            },
            place: standing.place,
        })
    }

    pub(crate) async fn wait(&self, ticket: &Ticket, until: BootTime) -> Result<Place> {
        let keys = self.keys.line(&ticket.name)?;
        let waiter = self.hub.waiter(ticket.claim);
        loop {
            let link = self.link(Some(&keys)).await?;
            self.receive_grants(&link).await?;
            let look_at = waiter.due().min(look_by(until));
            if !look_at.has_passed() {
                tokio::select! {
                    biased;
                    () = waiter.woken.notified() => {}
                    () = sync::sleep_until(look_at) => {}
                }
            }
            // With replicas, a grant counts only once they have it, and `look` waits for that.
            if let Some(sequence) = waiter.granted().filter(|_| self.replicas == 0) {
                self.hub.forget(ticket.claim);
                return Ok(Place::Held { sequence });
            }
            let Some(standing) = self.look(&keys, ticket).await? else {
                self.hub.forget(ticket.claim);
                return Ok(Place::Gone);
            };
            match standing.place {
                Place::Waiting => waiter.waits(standing.token, BootTime::now() + standing.due),
                place => {
                    self.hub.forget(ticket.claim);
                    return Ok(place);
                }
            }
            if until.has_passed() {
                return Ok(Place::Waiting);
            }
        }
    }

    /// Subscribes this runtime's connection to grants, once.
    pub(super) async fn receive_grants(&self, link: &Link<Connection>) -> Result<()> {
        if link.connection.receives_grants() {
            Ok(())
        } else {
            self.subscribed(link, link.connection.subscribe_to_grants(&self.hub))
                .await
        }
    }

    /// The claim's place; `None` when it is not in the line.
    async fn look(&self, keys: &LineKeys, ticket: &Ticket) -> Result<Option<Standing>> {
        let mut link = self.link(Some(keys)).await?;
        let id = ticket.claim.to_string();
        let arguments = |command: &mut Cmd| {
            command.arg(&id);
        };
        let answer = self.run_for(&mut link, Script::Look, keys, &id, arguments);
        let answer = answer.await?;
        if answer == "gone" {
            return Ok(None);
        }
        let standing = Standing::read("wait", &answer, Duration::MAX)?;
        if standing.place != Place::Waiting {
            self.replicated("wait", &link).await?;
        }
        Ok(Some(standing))
    }
}
