//! Giving a place up, and changing one: `leave`, `amend`, and an operator's `evict`.
//!
//! Every write is guarded by the index that was counted or read, so that a late one changes
//! nothing. What a leave finds out about an unanswered write is told to the book.

use std::sync::Arc;

use super::ConsulEngine;
use super::api::Committed;
use super::book::Stage;
use super::keys::Line;
use super::view::{Asker, Spot, View};
use super::wire::{Op, Pair, session_id, session_text};
use crate::core::claim::{Ask, ClaimId, Mode};
use crate::core::engine::{Alarm, Amended, Amendment, Eviction, Left};
use crate::core::error::{Error, Kind, Result};
use crate::core::name::Name;
use crate::core::ticket::{LeaseId, Ticket};

/// How often one call tries again because others wrote between its read and its write.
const TRIES: u32 = 64;

impl ConsulEngine {
    pub(super) async fn do_leave(self: Arc<Self>, ticket: Ticket) -> Result<Left> {
        let line = self.keys.line(&ticket.name)?;
        let seat = self.book.settled(ticket.claim, self.api.timeout).await;
        let (session, stage, ask) = match &seat {
            // The audit names the session on which it found a write that nobody waited for.
            Some(seat) if ticket.has_own_lease() || ticket.lease.0 == seat.session => {
                (seat.session, seat.stage, Some(seat.claim.ask))
            }
            _ if ticket.has_own_lease() => return Ok(Left::Absent),
            _ => (ticket.lease.0, Stage::Unknown, None),
        };
        let counted = match (stage, ticket.counted) {
            (Stage::Waiting, _) => {
                self.book.forget(ticket.claim);
                return Ok(Left::Done);
            }
            (Stage::Held(held), asked) if asked != 0 && asked != held => return Ok(Left::Absent),
            (Stage::Held(held), _) => held,
            (Stage::Trying | Stage::Unknown, asked) => asked,
        };
        let session = session_text(session);
        let claimed = (ticket.claim, ask);
        let quick = match (ask, stage) {
            (Some(ask), Stage::Held(_)) => {
                self.let_go(&line, (ticket.claim, ask), &session, counted)
                    .await?
            }
            _ => false,
        };
        let there = quick || self.take_out(&line, claimed, &session, counted).await?;
        if ask.is_some() {
            if there {
                // The write has arrived, whether or not its answer has.
                self.book.settle(ticket.claim, Stage::Held(counted));
            }
            self.book.forget(ticket.claim);
        }
        if quick && ask != Some(Ask::Whole) {
            // The place is given up; what the last one leaves behind is in nobody's way.
            let _ = self.tidy(&line).await;
        }
        Ok(match there {
            true => Left::Done,
            false => Left::Absent,
        })
    }

    /// Gives a place up in one request that nobody's but a change of its own key can refuse.
    /// Readers and permits count only while their own key is held, so that nothing else has to
    /// be written.
    async fn let_go(
        &self,
        line: &Line,
        (claim, ask): (ClaimId, Ask),
        session: &str,
        counted: u64,
    ) -> Result<bool> {
        let key = match ask.mode() {
            Mode::Exclusive => line.lock.clone(),
            Mode::Shared => line.reader(claim),
            Mode::Permits => line.permit(session),
        };
        let amended = self.book.seat(claim).is_none_or(|seat| seat.amended);
        let claim = claim.to_string();
        // The index is that of our own lock, so that deleting the key can't take another's.
        let mut ops = vec![
            Op::check_index(&key, counted),
            Op::delete(&key),
            Op::delete(&self.keys.mark(&claim)),
        ];
        if amended {
            ops.push(Op::delete(&line.value(&claim)));
        }
        let done = self.api.transact("leave", &ops).await?;
        Ok(matches!(done, Committed::Done(_)))
    }

    /// Removes the gate or the list of holders when nobody is left, unless somebody comes.
    async fn tidy(&self, line: &Line) -> Result<()> {
        let view = self.look(line).await?;
        match view.tidy(line) {
            Some(ops) => self.api.transact("leave", &ops).await.map(drop),
            None => Ok(()),
        }
    }

    /// Looks for the claim and takes it out, again when others wrote in between; `false` when it
    /// is not there.
    async fn take_out(
        &self,
        line: &Line,
        (claim, ask): (ClaimId, Option<Ask>),
        session: &str,
        counted: u64,
    ) -> Result<bool> {
        // Of a permit, what is below the lock says all, unless it is not there.
        let permit = ask.filter(|ask| ask.mode() == Mode::Permits);
        for _ in 0..TRIES {
            let mut view = match permit {
                Some(ask) => self.glance(line, ask).await?,
                None => self.look(line).await?,
            };
            if permit.is_some() && view.find(line, claim, session).is_none() {
                view = self.look(line).await?;
            }
            let Some(held) = view.find(line, claim, session) else {
                self.sweep(line, claim, &view).await?;
                return Ok(false);
            };
            if counted != 0 && counted != held.counted {
                return Ok(false);
            }
            let mut ops = view.without(line, held.spot, claim, session);
            ops.push(Op::delete(&line.value(&held.record.claim)));
            ops.push(Op::delete(&self.keys.mark(&held.record.claim)));
            if let Committed::Done(_) = self.api.transact("leave", &ops).await? {
                return Ok(true);
            }
        }
        Err(too_busy("leave"))
    }

    /// Removes what a claim left behind that does not hold: its session has ended.
    async fn sweep(&self, line: &Line, claim: ClaimId, view: &View) -> Result<()> {
        let id = claim.to_string();
        let own = |pair: &&Pair| pair.record().is_some_and(|record| record.claim == id);
        let lock = view.lock.iter().filter(|lock| lock.holder().is_none());
        let left = lock.chain(view.readers(line)).find(own);
        let Some(left) = left else {
            return Ok(());
        };
        let ops = [
            Op::check_index(&left.key, left.modify_index),
            Op::delete(&left.key),
            Op::delete(&line.value(&id)),
            Op::delete(&self.keys.mark(&id)),
        ];
        // Whoever was quicker has it now.
        self.api.transact("leave", &ops).await.map(drop)
    }

    pub(super) async fn do_amend(
        self: Arc<Self>,
        ticket: Ticket,
        amendment: Amendment,
    ) -> Result<Amended> {
        let line = self.keys.line(&ticket.name)?;
        let session = session_text(ticket.lease.0);
        for _ in 0..TRIES {
            let view = self.look(&line).await?;
            let held = view.find(&line, ticket.claim, &session);
            let Some(held) = held.filter(|held| held.counted == ticket.counted) else {
                return Ok(Amended::Gone);
            };
            let mut record = held.record;
            record.counted = Some(held.counted);
            let asker = Asker {
                line: &line,
                claim: ticket.claim,
                session: &session,
                record,
            };
            let ops = match (&amendment, held.spot) {
                (Amendment::Value(value), spot) => {
                    self.book.change(ticket.claim, |seat| seat.amended = true);
                    let key = match spot {
                        Spot::Whole => line.lock.clone(),
                        Spot::Reader => line.reader(ticket.claim),
                        Spot::Permit => line.permit(&session),
                    };
                    let claim = ticket.claim.to_string();
                    // The token is the index of the lock, which is not written.
                    vec![
                        Op::check_session(&key, &session),
                        Op::set(&line.value(&claim), 0, value),
                    ]
                }
                (Amendment::Ask(Ask::READ), Spot::Reader)
                | (Amendment::Ask(Ask::Whole), Spot::Whole) => return Ok(Amended::Done),
                (Amendment::Ask(Ask::READ), Spot::Whole) => view.downgrade(&asker),
                (Amendment::Ask(Ask::Whole), Spot::Reader) => match view.upgrade(&asker) {
                    Some(ops) => ops,
                    None => return Ok(Amended::Busy),
                },
                (Amendment::Ask(_), _) => return Ok(Amended::Busy),
            };
            if let Committed::Done(_) = self.api.transact("amend", &ops).await? {
                return Ok(Amended::Done);
            }
        }
        Err(too_busy("amend"))
    }

    pub(super) async fn do_evict(
        self: Arc<Self>,
        name: Name,
        id: String,
        eviction: Eviction,
    ) -> Result<bool> {
        let line = self.keys.line(&name)?;
        if let Ok(claim) = id.parse::<ClaimId>()
            && let Some(seat) = self.book.seat(claim).filter(|seat| seat.claim.name == name)
            && seat.stage == Stage::Waiting
        {
            match eviction {
                Eviction::Mark => drop(self.book.change(claim, |seat| seat.evicted = true)),
                Eviction::Remove => self.book.forget(claim),
            }
            self.alarm(Alarm::Lease(LeaseId(seat.session)));
            return Ok(true);
        }
        for _ in 0..TRIES {
            let view = self.look(&line).await?;
            let Some((claim, session, spot)) = victim(&view, &line, &id) else {
                return Ok(false);
            };
            let ops = match eviction {
                Eviction::Mark => {
                    let key = match spot {
                        Spot::Whole => line.lock.clone(),
                        Spot::Reader => line.reader(claim),
                        Spot::Permit => line.permit(&session),
                    };
                    vec![
                        Op::check_session(&key, &session),
                        Op::set(&self.keys.mark(&id), 0, &session),
                    ]
                }
                Eviction::Remove => {
                    let mut ops = view.without(&line, spot, claim, &session);
                    ops.push(Op::delete(&line.value(&id)));
                    // Written before it is deleted, so that whoever listens hears of it.
                    ops.push(Op::set(&self.keys.mark(&id), 0, ""));
                    ops.push(Op::delete(&self.keys.mark(&id)));
                    ops
                }
            };
            if let Committed::Done(_) = self.api.transact("evict", &ops).await? {
                return Ok(true);
            }
        }
        Err(too_busy("evict"))
    }
}

/// Whom an id names: a claim of ours, or a session of another tool.
fn victim(view: &View, line: &Line, id: &str) -> Option<(ClaimId, String, Spot)> {
    let lock = view.lock.iter().map(|pair| (Spot::Whole, pair));
    let readers = view.readers(line).map(|pair| (Spot::Reader, pair));
    let permits = view.permits(line).map(|(_, pair)| (Spot::Permit, pair));
    lock.chain(readers).chain(permits).find_map(|(spot, pair)| {
        let session = pair.holder()?;
        let record = pair.record();
        let named = match &record {
            Some(record) => record.claim == id,
            None => session == id && session_id(id).is_some(),
        };
        let claim = record.and_then(|record| record.claim.parse().ok());
        named.then(|| (claim.unwrap_or(ClaimId(0)), session.to_owned(), spot))
    })
}

fn too_busy(operation: &'static str) -> Error {
    let message = "others change this line faster than it can be read; try again";
    Error::new(Kind::Unreachable, operation, message)
}
