//! `enter` and `wait`: a claim asks all servers at once, and holds when a majority votes for it.
//!
//! An attempt ends as soon as its result is certain, and it is completed even if its caller stops
//! waiting: votes that fall short of a majority are retracted, including those that may still be in
//! flight. The servers keep no queue. A waiter is notified that the line is free, and tries again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};

use super::Redlock;
use super::node::{Ballot, Doubt, Retracted, Vote};
use super::quorum::{self, Token};
use super::waiting::{Stage, Waiter};
use crate::core::claim::{Ask, Claim};
use crate::core::clock::BootTime;
use crate::core::engine::{BoxFuture, Entered, Place};
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::line::capacity_mismatch;
use crate::core::sync;
use crate::core::ticket::{LeaseStart, Ticket};
use crate::engines::kit::finish::finish;
use crate::engines::redis::keys::LineKeys;

/// A notification can be lost, and other tools send none, so a waiter tries at least this often.
const TRIES_EVERY: Duration = Duration::from_millis(500);

/// How long a waiter waits for the other servers after the first notification that the line is
/// free. A release reaches all of them within a round trip.
const SPREAD: Duration = Duration::from_millis(3);

/// The backoff after split votes is random up to this bound, which doubles each time, so that the
/// same contenders do not collide again.
const APART: Duration = Duration::from_millis(4);
const FURTHEST_APART: Duration = Duration::from_millis(128);

/// How many permits one attempt tries when others take them first.
const PERMITS_TRIED: usize = 16;

/// The pause before a failed retraction is retried.
const AGAIN: Duration = Duration::from_millis(200);

/// The votes that are still in flight.
type Asked = FuturesUnordered<BoxFuture<(usize, Vote)>>;

/// The result of an attempt.
enum Tried {
    Held {
        sequence: u64,
        armed: LeaseStart,
    },
    /// Other claims hold it.
    Behind {
        /// When a majority may be free.
        due: Duration,
        /// Whether contenders split the votes.
        split: bool,
    },
    /// The claim was left during the attempt.
    Left,
}

pub(super) async fn enter(engine: &Arc<Redlock>, claim: &Arc<Claim>) -> Result<Entered> {
    let keys = engine.keys.line(&claim.name)?;
    if engine.was_left(claim.id) {
        return Ok(Entered::Busy);
    }
    let began = BootTime::now();
    let approach = engine.waiting.approach(&keys);
    // The claims of one client take turns: asking all at once would only split the votes and delay
    // the servers' replies.
    let behind_ours = approach.others && claim.queue;
    let tried = if behind_ours {
        Tried::Behind {
            due: Duration::ZERO,
            split: false,
        }
    } else {
        let (engine, claim) = (Arc::clone(engine), Arc::clone(claim));
        finish(attempt(engine, claim, keys.clone())).await?
    };
    match tried {
        Tried::Held { sequence, armed } => {
            engine.waiting.forget(claim.id);
            let ticket = Ticket {
                sequence,
                ..Ticket::own(claim.name.clone(), claim.id)
            };
            Ok(Entered::In {
                ticket,
                armed,
                place: Place::Held { sequence },
            })
        }
        Tried::Behind { .. } if claim.queue && !engine.was_left(claim.id) => {
            let armed = LeaseStart {
                sent: began,
                ttl: claim.ttl,
            };
            if engine.waiting.get(claim.id).is_none() {
                engine.waiting.add(claim, &keys, armed);
            }
            Ok(Entered::In {
                ticket: Ticket::own(claim.name.clone(), claim.id),
                armed,
                place: Place::Waiting,
            })
        }
        Tried::Behind { .. } | Tried::Left => {
            engine.waiting.forget(claim.id);
            Ok(Entered::Busy)
        }
    }
}

pub(super) async fn wait(engine: &Arc<Redlock>, ticket: &Ticket, until: BootTime) -> Result<Place> {
    let Some(waiter) = engine.waiting.get(ticket.claim) else {
        return look(engine, ticket).await;
    };
    let mut rings = waiter.line.rings();
    let limit = engine.limit(waiter.claim.ttl);
    loop {
        match waiter.stage() {
            Stage::Held(sequence) => {
                engine.waiting.forget(ticket.claim);
                return Ok(Place::Held { sequence });
            }
            Stage::Gone => {
                engine.waiting.forget(ticket.claim);
                return Ok(Place::Gone);
            }
            Stage::Waiting | Stage::Evicted => {}
        }
        engine.waiting.listen(engine, &waiter.line, limit).await;
        if until.has_passed() || waiter.is_due(engine.quorum) {
            try_again(engine, &waiter).await?;
            if until.has_passed() && waiter.stage() == Stage::Waiting {
                return Ok(Place::Waiting);
            }
        } else {
            sleep(engine, &waiter, &mut rings, until).await;
        }
    }
}

/// Sleeps until a majority of the servers has notified that the line is free, or until the next
/// attempt is due.
async fn sleep(
    engine: &Redlock,
    waiter: &Waiter,
    rings: &mut tokio::sync::watch::Receiver<Vec<u64>>,
    until: BootTime,
) {
    let mut others_by = BootTime::NEVER;
    loop {
        rings.mark_unchanged();
        if waiter.is_due(engine.quorum) || until.has_passed() {
            return;
        }
        if others_by == BootTime::NEVER && waiter.told() > 0 {
            others_by = BootTime::now() + SPREAD;
        }
        if others_by.has_passed() {
            return waiter.tried(BootTime::PAST);
        }
        tokio::select! {
            biased;
            () = waiter.bell.notified() => return,
            changed = rings.changed() => if changed.is_err() { return },
            () = sync::sleep_until(waiter.due().min(until).min(others_by)) => {}
        }
    }
}

/// Tries again for a waiting claim, when it is its turn among the claims of this client.
async fn try_again(engine: &Arc<Redlock>, waiter: &Arc<Waiter>) -> Result<()> {
    let asked = BootTime::now();
    let mut turn = Arc::clone(&waiter.line.turn).lock_owned().await;
    if turn.began > asked && turn.is_full {
        // Another claim of this client has tried meanwhile. It either holds the line now, and its
        // release will be notified, or it failed, and this claim would have failed too.
        waiter.spared(&turn);
        return Ok(());
    }
    // The attempt is completed even if the caller drops this future; the next `wait` finds its
    // result.
    let (engine, waiter) = (Arc::clone(engine), Arc::clone(waiter));
    finish(async move {
        turn.begin(&waiter.line);
        waiter.tries();
        let (claim, keys) = (Arc::clone(&waiter.claim), waiter.keys.clone());
        let tried = attempt(Arc::clone(&engine), claim, keys).await;
        let now = BootTime::now();
        // After a grant of one permit another may be free.
        turn.is_full = waiter.claim.ask == Ask::Whole || matches!(tried, Ok(Tried::Behind { .. }));
        match tried {
            Ok(Tried::Held { sequence, .. }) => {
                turn.due = now + jittered(TRIES_EVERY);
                // Its lease still counts from the start of this attempt.
                waiter.set(Stage::Held(sequence));
            }
            Ok(Tried::Behind { due, split }) => {
                let wait = match split {
                    true => {
                        let bound = APART * 2u32.pow(waiter.split().min(8));
                        rand::random_range(Duration::ZERO..=bound.min(FURTHEST_APART))
                    }
                    // The holder's lease has no end, or the servers did not tell it.
                    false if due.is_zero() => jittered(TRIES_EVERY),
                    false => due.min(jittered(TRIES_EVERY)),
                };
                turn.due = now + wait;
                waiter.tried(turn.due);
            }
            Ok(Tried::Left) => {
                turn.due = now;
                waiter.set(Stage::Gone);
            }
            Err(error) => {
                turn.due = now;
                waiter.tried(now);
                return Err(error);
            }
        }
        Ok(())
    })
    .await
}

fn jittered(time: Duration) -> Duration {
    time.mul_f64(rand::random_range(0.75..1.0))
}

/// Asks all servers until a majority has voted for the claim, or can no longer do so. A claim for a
/// permit tries one permit after another.
async fn attempt(engine: Arc<Redlock>, claim: Arc<Claim>, keys: LineKeys) -> Result<Tried> {
    let Ask::Part { capacity, .. } = claim.ask else {
        let (tried, _) = ballot(&engine, &claim, &keys, None).await?;
        return Ok(tried);
    };
    let spread = rand::random();
    let mut tried = vec![spread % capacity + 1];
    loop {
        let permit = tried.last().copied();
        let (came_to, votes) = ballot(&engine, &claim, &keys, permit).await?;
        let Tried::Behind { .. } = came_to else {
            return Ok(came_to);
        };
        match quorum::permit(&votes, engine.quorum, capacity, &tried, spread) {
            Some(next) if tried.len() < PERMITS_TRIED => tried.push(next),
            _ => return Ok(came_to),
        }
    }
}

/// One vote by all servers; returns the result and each server's answer.
async fn ballot(
    engine: &Arc<Redlock>,
    claim: &Arc<Claim>,
    keys: &LineKeys,
    permit: Option<u32>,
) -> Result<(Tried, Vec<Option<Vote>>)> {
    let (nodes, quorum) = (engine.nodes.len(), engine.quorum);
    let limit = engine.limit(claim.ttl);
    let proposal = engine.propose();
    let keys = keys.clone();
    let ballot = Ballot::new(claim, keys, &engine.channel, permit, proposal, nodes);
    let ballot = Arc::new(ballot);
    // Taken before anything is sent, because the lease counts from here.
    let sent = BootTime::now();
    let mut asked: Asked = (0..nodes).map(|at| ask(engine, &ballot, at)).collect();
    let mut votes: Vec<Option<Vote>> = (0..nodes).map(|_| None).collect();
    let mut held = 0;
    let late = sync::sleep_until(sent + limit);
    tokio::pin!(late);
    while held < quorum && held + asked.len() >= quorum {
        tokio::select! {
            biased;
            Some((at, vote)) = asked.next() => {
                if let Vote::Held { token, .. } = vote {
                    held += 1;
                    engine.has_seen(token);
                }
                votes[at] = Some(vote);
            }
            () = &mut late => break,
        }
    }
    if held >= quorum
        && let Some((sequence, armed)) = granted(engine, &ballot, &votes, sent, limit).await
        && !engine.was_left(claim.id)
    {
        await_the_rest(engine, ballot, asked, &votes, sequence);
        return Ok((Tried::Held { sequence, armed }, votes));
    }
    let returned = give_back(engine, &ballot, &votes, limit).await;
    if !asked.is_empty() {
        // The remaining requests run on, so that a connection without a reply is dropped in time.
        tokio::spawn(async move { while asked.next().await.is_some() {} });
    }
    let count = |is: fn(&Vote) -> bool| votes.iter().flatten().filter(|vote| is(vote)).count();
    if engine.was_left(claim.id) || count(|vote| matches!(vote, Vote::Left)) > 0 {
        return Ok((Tried::Left, votes));
    }
    let mismatched = votes.iter().flatten().find_map(|vote| match vote {
        Vote::Mismatch(live) => Some(*live),
        _ => None,
    });
    if let (Some(live), Ask::Part { capacity, .. }) = (mismatched, claim.ask)
        && count(|vote| matches!(vote, Vote::Mismatch(_))) > nodes - quorum
    {
        return Err(capacity_mismatch(live, capacity));
    }
    let answered = count(|vote| !matches!(vote, Vote::Failed(_)));
    if answered < quorum {
        let errors = votes
            .iter()
            .enumerate()
            .filter_map(|(at, vote)| match vote {
                Some(Vote::Failed(error)) => Some(engine.nodes[at].blame(error)),
                Some(_) => None,
                None => {
                    let message = format!("no answer within {limit:?}");
                    let late = Error::new(ErrorKind::Unreachable, "enter", message);
                    Some(engine.nodes[at].blame(&late))
                }
            });
        let error = engine.no_majority("enter", answered, &errors.collect::<Vec<_>>());
        return Err(if returned {
            error
        } else {
            error.maybe_applied()
        });
    }
    let due = quorum::free_in(&votes, quorum).unwrap_or_default();
    let split =
        held > 0 || due.is_zero() && count(|vote| matches!(vote, Vote::Busy { .. })) < quorum;
    Ok((Tried::Behind { due, split }, votes))
}

fn ask(engine: &Arc<Redlock>, ballot: &Arc<Ballot>, at: usize) -> BoxFuture<(usize, Vote)> {
    let (engine, ballot) = (Arc::clone(engine), Arc::clone(ballot));
    Box::pin(async move { (at, engine.nodes[at].vote(&ballot).await) })
}

/// The token and the lease of a claim that has a majority of the votes; `None` when it came too
/// late. A token on which no majority agrees is first written back to a majority, and each of these
/// servers must still have the claim.
async fn granted(
    engine: &Arc<Redlock>,
    ballot: &Arc<Ballot>,
    votes: &[Option<Vote>],
    sent: BootTime,
    limit: Duration,
) -> Option<(u64, LeaseStart)> {
    let held = votes.iter().flatten().filter_map(|vote| match vote {
        Vote::Held { token, left, .. } => Some((*token, *left)),
        _ => None,
    });
    let (counts, left): (Vec<u64>, Vec<Duration>) = held.unzip();
    let ttl = quorum::lasting(left, engine.quorum)?;
    let sequence = match quorum::token(&counts, engine.quorum)? {
        Token::Agreed(sequence) => sequence,
        Token::Raise(sequence) => {
            let (keys, id) = (&ballot.keys, ballot.id);
            let raises = engine
                .nodes
                .iter()
                .map(|node| node.raise(keys, id, sequence));
            let mut raises: FuturesUnordered<_> = raises.collect();
            let raise = async {
                let mut seen = 0;
                while let Some(raised) = raises.next().await {
                    seen += usize::from(matches!(raised, Ok(Some(_))));
                    if seen == engine.quorum {
                        return true;
                    }
                }
                false
            };
            let raised = tokio::time::timeout(limit, raise).await;
            raised.unwrap_or(false).then_some(sequence)?
        }
    };
    let armed = LeaseStart { sent, ttl };
    (!armed.deadline().has_passed()).then_some((sequence, armed))
}

/// Handles the votes that arrive after the grant: a server that counted another token is given the
/// token of the grant.
fn await_the_rest(
    engine: &Arc<Redlock>,
    ballot: Arc<Ballot>,
    mut asked: Asked,
    votes: &[Option<Vote>],
    sequence: u64,
) {
    let other = move |at: usize, vote: &Vote| match vote {
        Vote::Held { token, .. } => (*token != sequence).then_some(at),
        _ => None,
    };
    let known = votes.iter().enumerate();
    let known = known.filter_map(|(at, vote)| other(at, vote.as_ref()?));
    let mut others: Vec<usize> = known.collect();
    let unknown =
        |vote: &Option<Vote>| matches!(vote, Some(vote @ Vote::Failed(_)) if vote.may_hold());
    let doubtful = votes.iter().any(unknown);
    if asked.is_empty() && others.is_empty() && !doubtful {
        return;
    }
    engine
        .under_way
        .lock()
        .insert(ballot.id, Arc::clone(&ballot));
    let engine = Arc::clone(engine);
    tokio::spawn(async move {
        let mut doubtful = doubtful;
        while let Some((at, vote)) = asked.next().await {
            others.extend(other(at, &vote));
            doubtful |= matches!(&vote, Vote::Failed(_)) && vote.may_hold();
        }
        for at in others {
            let node = &engine.nodes[at];
            // A failure is harmless: `leave` can find this server's vote by the claim's id.
            let _ = node.raise(&ballot.keys, ballot.id, sequence).await;
        }
        // Votes with an unknown outcome stay listed for `leave` to retract.
        if !doubtful {
            engine.settled(&ballot);
        }
    });
}

/// Retracts the votes of an attempt, wherever one was given or may have been given. Returns whether
/// all of them are known to be gone; what takes longer than `limit` continues in the background.
async fn give_back(
    engine: &Arc<Redlock>,
    ballot: &Arc<Ballot>,
    votes: &[Option<Vote>],
    limit: Duration,
) -> bool {
    ballot.given_up.store(true, Ordering::SeqCst);
    let mut returning: FuturesUnordered<BoxFuture<()>> = FuturesUnordered::new();
    for (at, vote) in votes.iter().enumerate() {
        let (count, doubt) = match vote {
            Some(Vote::Held { token, .. }) => (*token, Doubt::No),
            Some(vote) if !vote.may_hold() => continue,
            // Never sent.
            None if ballot.asked_on[at].load(Ordering::SeqCst) == 0 => continue,
            _ => (0, Doubt::Try(ballot.proposal)),
        };
        let (engine, ballot) = (Arc::clone(engine), Arc::clone(ballot));
        returning.push(Box::pin(async move {
            let over = BootTime::now() + ballot.ttl;
            let node = &engine.nodes[at];
            let mut count = count;
            while !over.has_passed() {
                match node.retract(&ballot.keys, ballot.id, count, doubt).await {
                    // The token was raised meanwhile.
                    Ok(Retracted::Other) => count = 0,
                    Ok(_) => return,
                    Err(_) => tokio::time::sleep(AGAIN).await,
                }
            }
        }));
    }
    let all = async { while returning.next().await.is_some() {} };
    let all = tokio::time::timeout(limit, all).await.is_ok();
    if !all {
        tokio::spawn(async move { while returning.next().await.is_some() {} });
    }
    all
}

/// The place of a claim that is not waiting here, as a majority reports it.
async fn look(engine: &Arc<Redlock>, ticket: &Ticket) -> Result<Place> {
    let reports = super::inspect::survey_line(engine, "wait", &ticket.name).await?;
    let id = ticket.claim.to_string();
    let mut holders = reports.into_iter().flat_map(|line| line.holders);
    let found = holders.find(|holder| holder.id == id);
    Ok(match found.and_then(|holder| holder.sequence) {
        Some(sequence) if ticket.sequence == 0 || ticket.sequence == sequence => {
            Place::Held { sequence }
        }
        _ => Place::Gone,
    })
}
