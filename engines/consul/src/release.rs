//! `leave`, `amend`, and an operator's `resize` and `evict`.
//!
//! Every write is guarded by the sequence or by the ModifyIndex that was read, so a late one
//! changes nothing. What a leave learns about an unanswered write is recorded in the sessions.

use super::Consul;
use super::client::Committed;
use super::keys::Line;
use super::kv::{Op, Pair, session_id, session_text};
use super::sessions::{Member, Stage};
use super::snapshot::{Snapshot, Spot, remove};
use palisade_core::engine::{
    Alarm, Amended, Amendment, Ask, ClaimId, LeaseId, Left, Mode, READERS, Ticket,
    capacity_mismatch,
};
use palisade_core::{Eviction, Name, Result};
use palisade_kit::cas::Retry;
use palisade_kit::leave::leave_twice;

pub(super) async fn leave(engine: &Consul, ticket: &Ticket) -> Result<Left> {
    leave_twice(|| leave_once(engine, ticket)).await
}

async fn leave_once(engine: &Consul, ticket: &Ticket) -> Result<Left> {
    let line = engine.keys.line(&ticket.name)?;
    let (sessions, claim) = (&engine.sessions, ticket.claim);
    let member = sessions.settled(claim, engine.client.timeout).await;
    let ours = |member: &Member| ticket.has_own_lease() || ticket.lease.0 == member.session;
    let left = match member.filter(ours) {
        None if ticket.has_own_lease() => false,
        // The audit names the session on which it found a write without a known claim.
        None => {
            let session = session_text(ticket.lease.0);
            let place = (claim, ticket.sequence);
            take_out(engine, &line, Mode::Exclusive, place, &session).await?
        }
        Some(member) => {
            let (mode, session) = (member.claim.ask.mode(), &member.session_text);
            let left = match member.stage {
                Stage::Waiting => {
                    open_gate(engine, &line, &member).await?;
                    true
                }
                Stage::Held(held) if ticket.sequence != 0 && ticket.sequence != held => {
                    return Ok(Left::Absent);
                }
                Stage::Held(held) => {
                    let_go(engine, &line, &member, held).await?
                        || take_out(engine, &line, mode, (claim, held), session).await?
                }
                Stage::Trying | Stage::Unknown => {
                    let place = (claim, ticket.sequence);
                    let there = take_out(engine, &line, mode, place, session).await?;
                    if there {
                        // The write has arrived, although its reply has not, so nothing is in
                        // doubt.
                        sessions.settle(claim, Stage::Held(ticket.sequence), false);
                    }
                    there
                }
            };
            sessions.forget(claim);
            left
        }
    };
    Ok(Left::of(left))
}

/// Reopens the gate if a waiting claim keeps it closed.
async fn open_gate(engine: &Consul, line: &Line, member: &Member) -> Result<()> {
    let Some(index) = member.closed else {
        return Ok(());
    };
    let claim = member.claim.id;
    let ops = remove(Spot::Gate, index, line, claim, &member.session_text);
    let opened = engine.client.transact("leave", &ops).await?;
    // If it is refused, the claim no longer has the gate.
    engine.sessions.change(claim, |member| member.closed = None);
    if let Committed::Done(_) = opened {
        tidy(engine, line).await;
    }
    Ok(())
}

/// Releases a place with one request, which only a change of its own key can refuse.
async fn let_go(engine: &Consul, line: &Line, member: &Member, sequence: u64) -> Result<bool> {
    let (claim, session) = (member.claim.id, &member.session_text);
    let (spot, id) = (Spot::of(member.claim.ask), claim.to_string());
    // The index is that of our own lock, so the delete can't remove another claim's key.
    let mut ops = remove(spot, sequence, line, claim, session);
    // Every operation costs the servers time. A claim that does not know of its eviction mark
    // leaves the mark to the client that wrote it.
    if member.evicted {
        ops.push(Op::delete(&engine.keys.mark(&id)));
    }
    if member.amended {
        ops.push(Op::delete(&line.value(&id)));
    }
    if spot != Spot::Whole {
        ops.push(Op::get_tree(&line.tree()));
    }
    let Committed::Done(tree) = engine.client.transact("leave", &ops).await? else {
        return Ok(false);
    };
    if spot != Spot::Whole {
        // The reply also has its own key, as it was before.
        let (below, own) = (line.tree(), spot.key(line, claim, session));
        let other = |pair: &&Pair| pair.key.starts_with(&below) && pair.key != own;
        if !tree.iter().filter(other).any(Pair::is_held) {
            tidy(engine, line).await;
        }
    }
    Ok(true)
}

/// Removes the gate or the list of holders when nobody is left, unless somebody comes. Errors are
/// ignored: the place is released already, and what stays behind blocks nobody.
async fn tidy(engine: &Consul, line: &Line) {
    if let Ok(snapshot) = Snapshot::read(&engine.client, line, Mode::Shared).await
        && let Some(ops) = snapshot.remains()
    {
        let _ = engine.client.transact("leave", &ops).await;
    }
}

/// Finds a claim, with this sequence unless it is 0, and removes it; `false` when it is not there.
async fn take_out(
    engine: &Consul,
    line: &Line,
    mode: Mode,
    (claim, sequence): (ClaimId, u64),
    session: &str,
) -> Result<bool> {
    let (id, mut retry) = (claim.to_string(), Retry::many());
    loop {
        let snapshot = Snapshot::read(&engine.client, line, mode).await?;
        let Some(found) = snapshot.find(claim, session) else {
            sweep(engine, &snapshot, &id).await?;
            return Ok(false);
        };
        if sequence != 0 && sequence != found.sequence {
            return Ok(false);
        }
        let mut ops = remove(found.spot, found.index, line, claim, session);
        ops.push(Op::delete(&line.value(&id)));
        ops.push(Op::delete(&engine.keys.mark(&id)));
        if let Committed::Done(_) = engine.client.transact("leave", &ops).await? {
            if found.spot != Spot::Whole {
                tidy(engine, line).await;
            }
            return Ok(true);
        }
        retry.or_busy("leave").await?;
    }
}

/// Removes what a claim left behind when its session ended.
async fn sweep(engine: &Consul, snapshot: &Snapshot, id: &str) -> Result<()> {
    let line = &snapshot.line;
    // A gate that it closed belongs to the readers again.
    let lock = snapshot.lock.iter().filter(|_| !snapshot.is_gate());
    let lock = lock.filter(|lock| !lock.is_held());
    let own = |pair: &&Pair| pair.record().is_some_and(|record| record.claim == id);
    let Some(left) = lock.chain(&snapshot.readers).find(own) else {
        return Ok(());
    };
    let ops = [
        Op::check_index(&left.key, left.modify_index),
        Op::delete(&left.key),
        Op::delete(&line.value(id)),
        Op::delete(&engine.keys.mark(id)),
    ];
    // If this is refused, another claim has the key by now.
    engine.client.transact("leave", &ops).await.map(drop)
}

pub(super) async fn amend(
    engine: &Consul,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    let line = engine.keys.line(&ticket.name)?;
    let (claim, session) = (ticket.claim, session_text(ticket.lease.0));
    let mut retry = Retry::many();
    loop {
        let snapshot = Snapshot::read(&engine.client, &line, Mode::Exclusive).await?;
        let held = snapshot.find(claim, &session);
        let Some(held) = held.filter(|held| held.sequence == ticket.sequence) else {
            return Ok(Amended::Gone);
        };
        let mut record = held.record;
        record.sequence = Some(held.sequence);
        let ops = match (amendment, held.spot) {
            (Amendment::Value(value), spot) => {
                engine
                    .sessions
                    .change(claim, |member| member.amended = true);
                // The token is the ModifyIndex of the lock, so the lock itself is not written.
                Some(vec![
                    Op::check_session(&spot.key(&line, claim, &session), &session),
                    Op::set(&line.value(&claim.to_string()), 0, value),
                ])
            }
            (Amendment::Ask(Ask::READ), Spot::Reader)
            | (Amendment::Ask(Ask::Whole), Spot::Whole) => return Ok(Amended::Done),
            (Amendment::Ask(Ask::READ), Spot::Whole) => {
                Some(snapshot.downgrade(claim, &session, &record))
            }
            (Amendment::Ask(Ask::Whole), Spot::Reader) => {
                snapshot.upgrade(claim, &session, &record)
            }
            (Amendment::Ask(_), _) => None,
        };
        let Some(ops) = ops else {
            return Ok(Amended::Busy);
        };
        if let Committed::Done(_) = engine.client.transact("amend", &ops).await? {
            return Ok(Amended::Done);
        }
        retry.or_busy("amend").await?;
    }
}

pub(super) async fn resize(engine: &Consul, name: &Name, capacity: u32) -> Result<bool> {
    let line = engine.keys.line(name)?;
    let mut retry = Retry::many();
    loop {
        let snapshot = Snapshot::read(&engine.client, &line, Mode::Permits).await?;
        if snapshot.is_read() {
            return Err(capacity_mismatch(READERS, capacity));
        }
        let Some(ops) = snapshot.resize(capacity) else {
            return Ok(false);
        };
        if let Committed::Done(_) = engine.client.transact("resize", &ops).await? {
            return Ok(true);
        }
        retry.or_busy("resize").await?;
    }
}

pub(super) async fn evict(
    engine: &Consul,
    name: &Name,
    id: &str,
    eviction: Eviction,
) -> Result<bool> {
    let line = engine.keys.line(name)?;
    if let Ok(claim) = id.parse()
        && let Some(member) = engine.sessions.member(claim)
        && (&member.claim.name, member.stage) == (name, Stage::Waiting)
    {
        match eviction {
            Eviction::Mark => engine
                .sessions
                .change(claim, |member| member.evicted = true),
            Eviction::Remove => {
                open_gate(engine, &line, &member).await?;
                engine.sessions.forget(claim);
            }
        }
        engine.alarm(Alarm::Lease(LeaseId(member.session)));
        return Ok(true);
    }
    let mut retry = Retry::many();
    loop {
        let snapshot = Snapshot::read(&engine.client, &line, Mode::Exclusive).await?;
        // A claim of palisade, or a session of another tool.
        let named = snapshot
            .claims()
            .find(|(.., session, record)| match record {
                Some(record) => record.claim == id,
                None => *session == id && session_id(id).is_some(),
            });
        let Some((spot, pair, session, record)) = named else {
            return Ok(false);
        };
        let claim = record.and_then(|record| record.claim.parse().ok());
        let claim = claim.unwrap_or(ClaimId(0));
        let ops = match eviction {
            Eviction::Mark => vec![
                Op::check_session(&pair.key, session),
                Op::set(&engine.keys.mark(id), 0, &line.lock),
            ],
            Eviction::Remove => {
                let mut ops = remove(spot, pair.modify_index, &line, claim, session);
                ops.push(Op::delete(&line.value(id)));
                ops.push(Op::delete(&engine.keys.mark(id)));
                ops.push(Op::set(&engine.keys.removed_last(), 0, id));
                ops
            }
        };
        if let Committed::Done(_) = engine.client.transact("evict", &ops).await? {
            if eviction == Eviction::Remove && spot != Spot::Whole {
                tidy(engine, &line).await;
            }
            return Ok(true);
        }
        retry.or_busy("evict").await?;
    }
}
