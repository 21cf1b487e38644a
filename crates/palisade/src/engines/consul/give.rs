//! Giving a place up, and changing one: `leave`, `amend`, and an operator's `resize` and `evict`.
//!
//! Every write is guarded by the index that was counted or read, so that a late one changes
//! nothing. What a leave finds out about an unanswered write is told to the book.

use std::sync::Arc;

use super::ConsulEngine;
use super::api::Committed;
use super::book::{Seat, Stage};
use super::keys::Line;
use super::plan::{Asker, list};
use super::take::spot;
use super::view::{Spot, View};
use super::wire::{Op, Pair, session_id, session_text};
use crate::core::claim::{Ask, ClaimId, Mode, READERS};
use crate::core::engine::{Alarm, Amended, Amendment, Eviction, Left};
use crate::core::error::{Error, Kind, Outcome, Result};
use crate::core::line::capacity_mismatch;
use crate::core::name::Name;
use crate::core::ticket::{LeaseId, Ticket};

/// How often one call tries again because others wrote between its read and its write.
const TRIES: u32 = 64;

impl ConsulEngine {
    /// The connection may be dead while the agent is well: a leave that was not answered is sent
    /// once more, over another one.
    pub(super) async fn do_leave(self: Arc<Self>, ticket: Ticket) -> Result<Left> {
        let error = match self.leave_once(&ticket).await {
            Err(error) if error.is_transient() => error,
            left => return left,
        };
        match self.leave_once(&ticket).await {
            // Gone since: the first copy did it.
            Ok(Left::Absent) if error.outcome() == Outcome::MaybeApplied => Ok(Left::Done),
            left => left,
        }
    }

    async fn leave_once(&self, ticket: &Ticket) -> Result<Left> {
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
        let sequence = match (stage, ticket.sequence) {
            (Stage::Waiting, _) => {
                if let Some(seat) = &seat {
                    self.open_gate(&line, seat).await?;
                }
                self.book.forget(ticket.claim);
                return Ok(Left::Done);
            }
            (Stage::Held(held), asked) if asked != 0 && asked != held => return Ok(Left::Absent),
            (Stage::Held(held), _) => held,
            (Stage::Trying | Stage::Unknown, asked) => asked,
        };
        let session = session_text(session);
        let claimed = (ticket.claim, ask);
        let there = match (ask, stage) {
            (Some(ask), Stage::Held(_)) => {
                let gone = self.let_go(&line, (ticket.claim, ask), &session, sequence);
                match gone.await? {
                    true => true,
                    false => self.take_out(&line, claimed, &session, sequence).await?,
                }
            }
            _ => self.take_out(&line, claimed, &session, sequence).await?,
        };
        if ask.is_some() {
            if there {
                // The write has arrived, whether or not its answer has.
                self.book.settle(ticket.claim, Stage::Held(sequence));
            }
            self.book.forget(ticket.claim);
        }
        Ok(match there {
            true => Left::Done,
            false => Left::Absent,
        })
    }

    /// Opens the gate again that a waiting claim keeps closed, if it does.
    async fn open_gate(&self, line: &Line, seat: &Seat) -> Result<()> {
        let Some(index) = seat.closed else {
            return Ok(());
        };
        let (spot, session) = ((Spot::Gate, index), seat.session_text());
        let ops = View::default().without(line, spot, seat.claim.id, &session);
        let opened = self.api.transact("leave", &ops).await?;
        // If it was refused, the gate was taken away.
        self.book.change(seat.claim.id, |seat| seat.closed = None);
        if let Committed::Done(_) = opened {
            self.tidy(line).await;
        }
        Ok(())
    }

    /// Gives a place up in one request that nobody's but a change of its own key can refuse.
    async fn let_go(
        &self,
        line: &Line,
        (claim, ask): (ClaimId, Ask),
        session: &str,
        sequence: u64,
    ) -> Result<bool> {
        // The index is that of our own lock, so that deleting the key can't take another's.
        let spot = spot(ask);
        let mut ops = View::default().without(line, (spot, sequence), claim, session);
        let (seat, id) = (self.book.seat(claim), claim.to_string());
        // Every operation costs the servers time. One that was marked and does not know it yet
        // leaves its mark to whoever wrote it.
        if seat.as_ref().is_none_or(|seat| seat.evicted) {
            ops.push(Op::delete(&self.keys.mark(&id)));
        }
        if seat.is_none_or(|seat| seat.amended) {
            ops.push(Op::delete(&line.value(&id)));
        }
        if ask != Ask::Whole {
            ops.push(Op::get_tree(&line.tree()));
        }
        let Committed::Done(mut tree) = self.api.transact("leave", &ops).await? else {
            return Ok(false);
        };
        if ask != Ask::Whole {
            // The answer shows its own key too, as it was before.
            let (below, own) = (line.tree(), spot.key(line, claim, session));
            tree.retain(|pair| pair.key.starts_with(&below) && pair.key != own);
            if tree.iter().all(|pair| pair.holder().is_none()) {
                self.tidy(line).await;
            }
        }
        Ok(true)
    }

    /// Removes the gate or the list of holders when nobody is left, unless somebody comes. The
    /// place is given up already, and what the last one leaves behind is in nobody's way: a
    /// failure is none.
    async fn tidy(&self, line: &Line) {
        if let Ok(view) = self.look(line).await
            && let Some(ops) = view.tidy(line)
        {
            let _ = self.api.transact("leave", &ops).await;
        }
    }

    /// Looks for the claim and takes it out, again when others wrote in between; `false` when it
    /// is not there.
    async fn take_out(
        &self,
        line: &Line,
        (claim, ask): (ClaimId, Option<Ask>),
        session: &str,
        sequence: u64,
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
            let Some(found) = view.find(line, claim, session) else {
                self.sweep(line, claim, &view).await?;
                return Ok(false);
            };
            if sequence != 0 && sequence != found.sequence {
                return Ok(false);
            }
            let mut ops = view.without(line, (found.spot, found.index), claim, session);
            ops.push(Op::delete(&line.value(&found.record.claim)));
            ops.push(Op::delete(&self.keys.mark(&found.record.claim)));
            if let Committed::Done(_) = self.api.transact("leave", &ops).await? {
                if found.spot != Spot::Whole {
                    self.tidy(line).await;
                }
                return Ok(true);
            }
        }
        Err(too_busy("leave"))
    }

    /// Removes what a claim left behind that does not hold: its session has ended.
    async fn sweep(&self, line: &Line, claim: ClaimId, view: &View) -> Result<()> {
        let id = claim.to_string();
        let own = |pair: &&Pair| pair.record().is_some_and(|record| record.claim == id);
        // A gate that it closed is the readers' again.
        let lock = view.lock.iter().filter(|_| !view.is_gate());
        let lock = lock.filter(|lock| lock.holder().is_none());
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
            let Some(held) = held.filter(|held| held.sequence == ticket.sequence) else {
                return Ok(Amended::Gone);
            };
            let mut record = held.record;
            record.sequence = Some(held.sequence);
            let asker = Asker {
                claim: ticket.claim,
                session: session.clone(),
                record,
                queue: false,
                waited: true,
            };
            let ops = match (&amendment, held.spot) {
                (Amendment::Value(value), spot) => {
                    self.book.change(ticket.claim, |seat| seat.amended = true);
                    let key = spot.key(&line, ticket.claim, &session);
                    let claim = ticket.claim.to_string();
                    // The token is the index of the lock, which is not written.
                    vec![
                        Op::check_session(&key, &session),
                        Op::set(&line.value(&claim), 0, value),
                    ]
                }
                (Amendment::Ask(Ask::READ), Spot::Reader)
                | (Amendment::Ask(Ask::Whole), Spot::Whole) => return Ok(Amended::Done),
                (Amendment::Ask(Ask::READ), Spot::Whole) => view.downgrade(&line, &asker),
                (Amendment::Ask(Ask::Whole), Spot::Reader) => match view.upgrade(&line, &asker) {
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

    pub(super) async fn do_resize(self: Arc<Self>, name: Name, capacity: u32) -> Result<bool> {
        let line = self.keys.line(&name)?;
        for _ in 0..TRIES {
            let view = self.look(&line).await?;
            if view.is_read(&line) {
                return Err(capacity_mismatch(READERS, capacity));
            }
            let Some(mut holders) = view.holders(&line) else {
                return Ok(false);
            };
            (holders.limit, holders.resized) = (capacity, true);
            let ops = list(&view, &line, &holders);
            if let Committed::Done(_) = self.api.transact("resize", &ops).await? {
                return Ok(true);
            }
        }
        Err(too_busy("resize"))
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
                Eviction::Remove => {
                    self.open_gate(&line, &seat).await?;
                    self.book.forget(claim);
                }
            }
            self.alarm(Alarm::Lease(LeaseId(seat.session)));
            return Ok(true);
        }
        for _ in 0..TRIES {
            let view = self.look(&line).await?;
            let Some((claim, session, spot, index)) = victim(&view, &line, &id) else {
                return Ok(false);
            };
            let ops = match eviction {
                Eviction::Mark => {
                    let key = spot.key(&line, claim, &session);
                    vec![
                        Op::check_session(&key, &session),
                        Op::set(&self.keys.mark(&id), 0, &line.lock),
                    ]
                }
                Eviction::Remove => {
                    let mut ops = view.without(&line, (spot, index), claim, &session);
                    ops.push(Op::delete(&line.value(&id)));
                    ops.push(Op::delete(&self.keys.mark(&id)));
                    ops.push(Op::set(&self.keys.removed_last(), 0, &id));
                    ops
                }
            };
            if let Committed::Done(_) = self.api.transact("evict", &ops).await? {
                if eviction == Eviction::Remove && spot != Spot::Whole {
                    self.tidy(&line).await;
                }
                return Ok(true);
            }
        }
        Err(too_busy("evict"))
    }
}

/// Whom an id names: a claim of ours, or a session of another tool.
fn victim(view: &View, line: &Line, id: &str) -> Option<(ClaimId, String, Spot, u64)> {
    let whole = match view.is_gate() {
        true => Spot::Gate,
        false => Spot::Whole,
    };
    let lock = view.lock.iter().map(|pair| (whole, pair));
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
        let claim = claim.unwrap_or(ClaimId(0));
        named.then(|| (claim, session.to_owned(), spot, pair.modify_index))
    })
}

fn too_busy(operation: &'static str) -> Error {
    let message = "others change this line faster than it can be read; try again";
    Error::new(Kind::Unreachable, operation, message)
}
