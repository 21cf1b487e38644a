//! `enter` and `wait`, and the waiting claims of this client.
//!
//! The servers keep no queue. A waiter is notified that the line is free, and tries again. A line
//! with waiters is subscribed to at every server, and unsubscribed some time after its last waiter
//! has gone.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, watch};

use super::Redlock;
use super::ballot::{Tried, attempt};
use super::waiter::{LineWatch, Stage, User, Waiter};
use palisade_core::engine::{Ask, Claim, ClaimId, Entered, LeaseStart, Place, Ticket, sync};
use palisade_core::{BootTime, Result};
use palisade_kit::finish::finish;

/// A notification can be lost, and other tools send none, so a waiter tries at least this often.
const TRIES_EVERY: Duration = Duration::from_millis(500);

/// How long a waiter waits for the other servers after the first notification that the line is
/// free. A release reaches all of them within a round trip.
const SPREAD: Duration = Duration::from_millis(3);

/// The backoff after split votes is random up to this bound, which doubles each time, so that the
/// same contenders do not collide again.
const APART: Duration = Duration::from_millis(4);
const FURTHEST_APART: Duration = Duration::from_millis(128);

/// How long a line stays subscribed after its last waiter, because its waiters often return soon.
const LINGERING: Duration = Duration::from_secs(10);

pub(super) async fn enter(engine: &Arc<Redlock>, claim: &Arc<Claim>) -> Result<Entered> {
    let keys = engine.keys.line(&claim.name)?;
    if engine.was_left(claim.id) {
        return Ok(Entered::Busy);
    }
    let began = BootTime::now();
    let Approach { line, others, user } = engine.waiting.approach(&keys.key);
    // The claims of one client take turns: asking all at once would only split the votes and delay
    // the servers' replies.
    let tried = if others && claim.queue {
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
                let waiter = Waiter::new(claim, &keys, line, armed);
                engine.waiting.add(Arc::new(waiter), user);
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
    let mut freed = waiter.line.freed.subscribe();
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
            Stage::Evicted => {
                // Its next renewal reports that; until then it gets no grant.
                tokio::select! {
                    () = waiter.changed.notified() => continue,
                    () = sync::sleep_until(until) => return Ok(Place::Waiting),
                }
            }
            Stage::Waiting => {}
        }
        engine.waiting.listen(engine, &waiter.line, limit).await;
        if until.has_passed() || waiter.is_due(engine.quorum) {
            try_again(engine, &waiter).await?;
            if until.has_passed() && waiter.stage() == Stage::Waiting {
                return Ok(Place::Waiting);
            }
        } else {
            sleep(engine, &waiter, &mut freed, until).await;
        }
    }
}

/// Sleeps until a majority of the servers has notified that the line is free, or until the next
/// attempt is due.
async fn sleep(
    engine: &Redlock,
    waiter: &Waiter,
    freed: &mut watch::Receiver<Vec<u64>>,
    until: BootTime,
) {
    let mut others_by = BootTime::NEVER;
    loop {
        freed.mark_unchanged();
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
            () = waiter.changed.notified() => return,
            changed = freed.changed() => if changed.is_err() { return },
            () = sync::sleep_until(waiter.due().min(until).min(others_by)) => {}
        }
    }
}

/// Tries again for a waiting claim, when it is its turn among the claims of this client.
async fn try_again(engine: &Arc<Redlock>, waiter: &Arc<Waiter>) -> Result<()> {
    let asked = BootTime::now();
    let mut turn = Arc::clone(&waiter.line.turn).lock_owned().await;
    if waiter.stage() != Stage::Waiting {
        // It was evicted while it waited for its turn.
        return Ok(());
    }
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
                let wait = if split {
                    let bound = APART * 2u32.pow(waiter.split().min(8));
                    rand::random_range(Duration::ZERO..=bound.min(FURTHEST_APART))
                } else if due.is_zero() {
                    // The holder's lease has no end, or the servers did not tell it.
                    jittered(TRIES_EVERY)
                } else {
                    due.min(jittered(TRIES_EVERY))
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

/// The waiting claims of this client, and the lines that its claims ask or wait for.
pub(super) struct Waiting {
    nodes: usize,
    claims: Mutex<HashMap<ClaimId, (Arc<Waiter>, User)>>,
    lines: Mutex<HashMap<String, Arc<LineWatch>>>,
    /// Serializes SUBSCRIBE and UNSUBSCRIBE, so that the last one sent for a channel is the right
    /// one.
    subscribing: AsyncMutex<()>,
}

/// A claim on its way to a line of this client.
pub(super) struct Approach {
    pub(super) line: Arc<LineWatch>,
    /// Whether other claims of this client ask or wait for the line.
    pub(super) others: bool,
    /// Kept while the claim asks or waits.
    pub(super) user: User,
}

impl Waiting {
    pub(super) fn new(nodes: usize) -> Self {
        Self {
            nodes,
            claims: Mutex::default(),
            lines: Mutex::default(),
            subscribing: AsyncMutex::default(),
        }
    }

    /// The line that a claim is about to ask for.
    pub(super) fn approach(&self, key: &str) -> Approach {
        let mut lines = self.lines.lock();
        // Only when the map would otherwise grow: a scan for every claim would cost more.
        if lines.len() == lines.capacity() && !lines.contains_key(key) {
            lines.retain(|_, line| Arc::strong_count(line) > 1 || line.was_subscribed());
            let twice = lines.len() * 2;
            lines.shrink_to(twice);
        }
        let made = || Arc::new(LineWatch::new(key, self.nodes));
        let line = lines.entry(key.to_owned()).or_insert_with(made);
        // References to the line say less: an attempt whose claim was left may still be ending.
        let others = Arc::strong_count(&line.users) > 1;
        Approach {
            line: Arc::clone(line),
            others,
            user: Arc::clone(&line.users),
        }
    }

    /// A node has notified that the line of this key is free there.
    pub(super) fn freed(&self, key: &str, at: usize) {
        if let Some(line) = self.lines.lock().get(key) {
            line.freed.send_modify(|freed| freed[at] += 1);
        }
    }

    pub(super) fn get(&self, claim: ClaimId) -> Option<Arc<Waiter>> {
        let claims = self.claims.lock();
        claims.get(&claim).map(|(waiter, _)| Arc::clone(waiter))
    }

    /// Adds a waiting claim.
    pub(super) fn add(&self, waiter: Arc<Waiter>, user: User) {
        let mut claims = self.claims.lock();
        claims.insert(waiter.claim.id, (waiter, user));
    }

    /// Removes a claim that no longer waits.
    pub(super) fn forget(&self, claim: ClaimId) -> Option<Arc<Waiter>> {
        let forgotten = self.claims.lock().remove(&claim);
        forgotten.map(|(waiter, _)| waiter)
    }

    /// Subscribes to the line at every server that can be reached within `limit`. Where that fails,
    /// periodic attempts find out.
    pub(super) async fn listen(&self, engine: &Redlock, line: &LineWatch, limit: Duration) {
        if (0..self.nodes).all(|at| line.is_subscribed(at)) {
            return;
        }
        let subscribe = async {
            let _turn = self.subscribing.lock().await;
            self.unsubscribe_idle().await;
            let nodes = engine
                .nodes
                .iter()
                .filter(|node| !line.is_subscribed(node.at));
            join_all(nodes.map(|node| async {
                let Ok(link) = node.link().await else {
                    return;
                };
                let connection = &link.connection;
                if connection.subscribe(line.channel.clone()).await.is_ok() {
                    let subscription = (connection.multiplexed.clone(), connection.over());
                    line.subscriptions.lock()[node.at] = Some(subscription);
                }
            }))
            .await;
        };
        // An unresponsive server must not delay the subscriptions to the others.
        let _ = tokio::time::timeout(limit, subscribe).await;
    }

    /// Unsubscribes from lines that have had no waiters for [`LINGERING`].
    async fn unsubscribe_idle(&self) {
        let now = BootTime::now();
        let idle = |line: &Arc<LineWatch>| {
            let since = BootTime::from_nanos(line.idle_since.load(Ordering::Relaxed));
            Arc::strong_count(line) == 1 && now.saturating_since(since) > LINGERING
        };
        let idle: Vec<_> = {
            let mut lines = self.lines.lock();
            lines.extract_if(|_, line| idle(line)).collect()
        };
        for (_, line) in idle {
            let subscriptions = std::mem::take(&mut *line.subscriptions.lock());
            for (mut connection, over) in subscriptions.into_iter().flatten() {
                if !*over.borrow() {
                    // A message that still arrives finds no waiter.
                    let _ = connection.unsubscribe(&line.channel).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_nobody_uses_are_dropped() {
        let waiting = Waiting::new(3);
        let used = waiting.approach("ns:used");
        for n in 0..1000 {
            assert!(!waiting.approach(&format!("ns:{n}")).others);
        }
        assert!(waiting.lines.lock().len() < 100);
        assert!(waiting.approach("ns:used").others);
        drop(used);
    }
}
