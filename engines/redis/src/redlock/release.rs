//! `leave`, `amend` and `evict`. All servers are asked and a majority decides; the rest are
//! completed in the background.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::Redlock;
use super::node::{Doubt, Node, Retracted};
use super::waiter::Stage;
use crate::keys::LineKeys;
use palisade_core::engine::{Amended, Amendment, ClaimId, Left, Ticket};
use palisade_core::{BootTime, Error, ErrorKind, Eviction, Name, Result};

/// How long a claim that was left is remembered here; the servers remember it for the same time.
const REMEMBERED: Duration = Duration::from_secs(300);

/// How often, and after what pause, a server that did not answer is asked again to retract a vote.
const AGAIN: (u32, Duration) = (3, Duration::from_millis(300));

pub(super) async fn leave(engine: &Arc<Redlock>, ticket: &Ticket) -> Result<Left> {
    let keys = engine.keys.line(&ticket.name)?;
    let id = ticket.claim;
    let waiter = engine.waiting.forget(id);
    if ticket.sequence == 0 || ticket.in_doubt {
        let now = BootTime::now();
        engine.left.lock().add(id, now, REMEMBERED);
    }
    if let Some(waiter) = waiter {
        let idle = waiter.is_idle();
        waiter.set(Stage::Gone);
        if idle && !ticket.in_doubt {
            return Ok(Left::Done);
        }
    }
    let under_way = engine.under_way.lock().remove(&id);
    let (count, in_doubt) = (ticket.sequence, ticket.in_doubt);
    // Whether any server had this grant.
    let found = Arc::new(AtomicBool::new(false));
    let retract = move |node: Arc<Node>| {
        let (keys, under_way) = (keys.clone(), under_way.clone());
        let asked_on = under_way.map_or(0, |b| b.asked_on[node.at].load(Ordering::Relaxed));
        let doubt = match (in_doubt, asked_on) {
            (true, _) => Doubt::Claim,
            (false, 0) => Doubt::No,
            (false, asked_on) => Doubt::Unless(asked_on),
        };
        let found = Arc::clone(&found);
        async move {
            let answer = retract(&node, &keys, id, count, doubt).await;
            match answer {
                Ok(Retracted::Left) => found.store(true, Ordering::Relaxed),
                // Another server had this grant, so this one counted another token for it.
                Ok(Retracted::Other) if found.load(Ordering::Relaxed) => {
                    return retract(&node, &keys, id, 0, Doubt::No).await;
                }
                _ => {}
            }
            answer
        }
    };
    let quorum = engine.quorum;
    let answers = engine
        .gather(
            "leave",
            engine.limit(engine.default_ttl),
            retract,
            |given| {
                let left = |answer: &&Result<Retracted>| matches!(answer, Ok(Retracted::Left));
                given.iter().flatten().filter(left).count() >= quorum
            },
        )
        .await?;
    let is = |what: Retracted| move |answer: &&Retracted| **answer == what;
    let left = answers.iter().flatten().filter(is(Retracted::Left)).count();
    Ok(match left {
        0 => Left::Absent,
        _ => {
            for (at, answer) in answers.iter().enumerate() {
                if *answer == Some(Retracted::Other) {
                    give_up(engine, at, ticket);
                }
            }
            Left::Done
        }
    })
}

/// Asks one server to retract a vote, with retries.
async fn retract(
    node: &Node,
    keys: &LineKeys,
    id: ClaimId,
    count: u64,
    doubt: Doubt,
) -> Result<Retracted> {
    let mut tries = 0;
    loop {
        match node.retract(keys, id, count, doubt).await {
            Err(error) if error.is_transient() && tries < AGAIN.0 => {
                tries += 1;
                tokio::time::sleep(AGAIN.1 * tries).await;
            }
            answer => return answer,
        }
    }
}

/// Retracts the vote of a server that counted another token for a claim that is left.
fn give_up(engine: &Arc<Redlock>, at: usize, ticket: &Ticket) {
    let (engine, name, id) = (Arc::clone(engine), ticket.name.clone(), ticket.claim);
    tokio::spawn(async move {
        if let Ok(keys) = engine.keys.line(&name) {
            // If it fails, the vote expires.
            let _ = retract(&engine.nodes[at], &keys, id, 0, Doubt::No).await;
        }
    });
}

pub(super) async fn amend(
    engine: &Arc<Redlock>,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    if let Amendment::Ask(_) = amendment {
        let message = "redlock: has no readers; a claim stays what it is";
        return Err(Error::new(ErrorKind::Unsupported, "amend", message));
    }
    let (ticket, amendment) = (ticket.clone(), amendment.clone());
    let amend = move |node: Arc<Node>| {
        let (ticket, amendment) = (ticket.clone(), amendment.clone());
        async move { node.client.amend(&ticket, &amendment).await }
    };
    let (quorum, limit) = (engine.quorum, engine.limit(engine.default_ttl));
    let done = |answer: &Amended| *answer == Amended::Done;
    let answers = engine
        .gather("amend", limit, amend, |given| {
            let done = |answer: &&Result<Amended>| answer.as_ref().is_ok_and(done);
            given.iter().flatten().filter(done).count() >= quorum
        })
        .await?;
    let agreed = answers.iter().flatten().filter(|a| done(a)).count() >= quorum;
    Ok(if agreed { Amended::Done } else { Amended::Gone })
}

pub(super) async fn evict(
    engine: &Arc<Redlock>,
    name: &Name,
    id: &str,
    eviction: Eviction,
) -> Result<bool> {
    let keys = engine.keys.line(name)?;
    let waiter = id.parse::<ClaimId>().ok();
    let waiter = waiter.and_then(|claim| engine.waiting.get(claim));
    if let Some(waiter) = waiter.filter(|waiter| waiter.claim.name == *name) {
        // Its attempt in flight ends first, and none begins meanwhile: during one the servers may
        // not have it, and its result would replace the stage that is set here.
        let _turn = waiter.line.turn.lock().await;
        if waiter.is_idle() {
            // An idle waiter has nothing on the servers.
            waiter.set(match eviction {
                Eviction::Mark => Stage::Evicted,
                Eviction::Remove => Stage::Gone,
            });
            engine.nodes[0].client.hub.alarm(waiter.claim.id);
            return Ok(true);
        }
    }
    let (name, id) = (name.clone(), id.to_owned());
    let evict = move |node: Arc<Node>| {
        let (name, id, keys) = (name.clone(), id.clone(), keys.clone());
        async move {
            let evicted = node.client.evict(&name, &id, eviction).await?;
            if evicted && eviction == Eviction::Remove {
                node.tell(&keys).await?;
            }
            Ok(evicted)
        }
    };
    let limit = engine.limit(engine.default_ttl);
    let answers = engine.gather("evict", limit, evict, |_| false).await?;
    Ok(answers.into_iter().flatten().any(|evicted| evicted))
}
