//! `renew`: one write per line for all of its holds, with a bounded number of lines at a time.
//!
//! A hold that was not renewed in time is lost here, although its record may still exist because
//! nobody else has looked. A refusal (401, 403) is no loss: the rights come back, or the lease
//! expires.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::Kubernetes;
use super::acquire::read;
use super::client::Written;
use super::inspect;
use super::lease::{Entry, Lease};
use super::lines::{Line, Stage};
use palisade_core::engine::{Lease as HeldLease, LeaseStart, Renewal, Ticket};
use palisade_core::{BootTime, Error, ErrorKind, Name, Outcome, Result};
use palisade_kit::cas::Retry;
use palisade_kit::timed;

/// How many lines are renewed at a time, because the API server throttles a client that sends more.
const AT_ONCE: usize = 16;

/// About how often each client looks for abandoned Leases.
const SWEEP: Duration = Duration::from_secs(6 * 60 * 60);

pub(super) async fn renew(
    engine: &Arc<Kubernetes>,
    leases: &[HeldLease],
    within: Duration,
) -> Vec<Renewal> {
    let until = BootTime::now() + within;
    let mut answers: Vec<Renewal> = Vec::new();
    let mut lines: BTreeMap<Name, Vec<(usize, Ticket)>> = BTreeMap::new();
    for (at, lease) in leases.iter().enumerate() {
        let answer = match &lease.ticket {
            None => Renewal::Lost,
            Some(ticket) => match waiting(engine, ticket) {
                Some(answer) => answer,
                None => {
                    let line = lines.entry(ticket.name.clone()).or_default();
                    line.push((at, ticket.clone()));
                    Renewal::Lost
                }
            },
        };
        answers.push(answer);
    }
    let renewed = stream::iter(lines).map(|(name, tickets)| async move {
        let renewed = async {
            let line = engine.line(&name)?;
            Ok(renew_line(engine, &line, &tickets, until).await)
        };
        let renewed = timed("renew", until.remaining(), renewed).await;
        let answers = renewed.flatten().unwrap_or_else(|error| {
            let unknown = |_| Renewal::Unknown(error.clone());
            tickets.iter().map(unknown).collect()
        });
        let places = tickets.into_iter().map(|(at, _)| at);
        places.zip(answers).collect::<Vec<_>>()
    });
    let mut renewed = renewed.buffer_unordered(AT_ONCE);
    while let Some(some) = renewed.next().await {
        for (at, answer) in some {
            answers[at] = answer;
        }
    }
    drop(renewed);
    sweep_sometimes(engine, &answers);
    answers
}

/// The answer for a claim that has nothing in the store, or whose lease is over by its own clock.
fn waiting(engine: &Kubernetes, ticket: &Ticket) -> Option<Renewal> {
    let member = engine.members.get(ticket.claim)?;
    let mut state = member.state.lock();
    if (state.armed.sent + state.armed.ttl).has_passed() {
        return Some(Renewal::Lost);
    }
    if state.stage != Stage::Waiting || state.doubt.is_some() {
        return None;
    }
    if state.evicted {
        return Some(Renewal::Evicted);
    }
    if state.left {
        return Some(Renewal::Lost);
    }
    state.armed.sent = BootTime::now();
    Some(Renewal::Held(state.armed))
}

/// Renews the holds of one line with one write.
async fn renew_line(
    engine: &Kubernetes,
    line: &Line,
    tickets: &[(usize, Ticket)],
    until: BootTime,
) -> Vec<Renewal> {
    let all = |answer: Renewal| tickets.iter().map(|_| answer.clone()).collect();
    let _turn = line.turn(until.remaining() / 4).await;
    let started = BootTime::now();
    let mut retry = Retry::until(until);
    let known = line.known(BootTime::PAST);
    let mut believed = known.is_none();
    let mut snapshot = match known {
        Some(known) => known,
        None => match read(engine, line, "renew", started).await {
            Ok(read) => read,
            Err(error) => return all(Renewal::Unknown(error)),
        },
    };
    loop {
        let stamp = engine.client.clock.stamp();
        let verdicts: Vec<Verdict> = tickets
            .iter()
            .map(|(_, ticket)| judge(engine, snapshot.as_deref(), ticket))
            .collect();
        let lives = |verdict: &Verdict| matches!(verdict, Verdict::Lives(_));
        if !believed && !verdicts.iter().all(lives) {
            match read(engine, line, "renew", started).await {
                Ok(read) => snapshot = read,
                Err(error) => return all(Renewal::Unknown(error)),
            }
            believed = true;
            continue;
        }
        let answer = |renewed: Result<BootTime>| {
            let each = tickets.iter().zip(&verdicts);
            let each = each.map(|((_, ticket), verdict)| match (verdict, &renewed) {
                (Verdict::Lost, _) => Renewal::Lost,
                (Verdict::Evicted, _) => Renewal::Evicted,
                (Verdict::Lives(_), Err(error)) => Renewal::Unknown(error.clone()),
                (Verdict::Lives(ttl), Ok(sent)) => arm(engine, ticket, *sent, *ttl),
            });
            each.collect()
        };
        let Some(lease) = snapshot.as_ref().filter(|_| verdicts.iter().any(lives)) else {
            return answer(Ok(started));
        };
        let living = || {
            tickets
                .iter()
                .zip(&verdicts)
                .filter(|(_, verdict)| lives(verdict))
        };
        let is_living = |entry: &Entry| living().any(|((_, ticket), _)| entry.is(ticket.claim));
        let renewed = lease.renewed(&stamp, is_living);
        let sent = BootTime::now();
        let within = until.remaining().min(engine.client.timeout);
        let doubt = line.doubt();
        let written = engine.client.replace("renew", &renewed, within).await;
        if written.is_ok() {
            doubt.settle();
        }
        let error = match written {
            Ok(Written::Done(lease)) => {
                line.wrote(*lease, &stamp, sent);
                return answer(Ok(sent));
            }
            Ok(Written::Refused) => {
                if !retry.again().await {
                    let message = "others change this line faster than it can be renewed";
                    let error = Error::new(ErrorKind::Unreachable, "renew", message);
                    return answer(Err(error));
                }
                match read(engine, line, "renew", BootTime::now()).await {
                    Ok(read) => snapshot = read,
                    Err(error) => return answer(Err(error)),
                }
                believed = true;
                continue;
            }
            Err(error) => error,
        };
        if error.outcome() == Outcome::NotApplied {
            return answer(Err(error));
        }
        // It was applied if a read shows what was sent.
        let (asked, left) = (BootTime::now(), until.remaining());
        let Ok(now) = engine.client.read("renew", &line.key, left).await else {
            return answer(Err(error));
        };
        let applied = now.as_ref().is_some_and(|now| {
            living().all(|((_, ticket), _)| {
                let entry = now.entry(ticket.claim, ticket.sequence);
                entry.is_some_and(|entry| entry.renewed == stamp)
            })
        });
        match now {
            Some(now) if applied => {
                line.wrote(now, &stamp, sent);
                return answer(Ok(sent));
            }
            // It may still be applied; the next renewal finds out.
            now => {
                line.saw(now, asked);
                return answer(Err(error));
            }
        }
    }
}

enum Verdict {
    Lives(Duration),
    Evicted,
    Lost,
}

fn judge(engine: &Kubernetes, lease: Option<&Lease>, ticket: &Ticket) -> Verdict {
    let entry = lease.and_then(|lease| lease.entry(ticket.claim, ticket.sequence));
    let Some(entry) = entry else {
        return Verdict::Lost;
    };
    let known = engine.members.get(ticket.claim);
    // For a hold of another process: by its record.
    let over = || {
        let view = lease.map(Lease::view).unwrap_or_default();
        let own = view
            .holders
            .iter()
            .find(|holder| holder.entry.as_ref() == Some(&entry));
        own.is_some_and(|holder| holder.is_overdue(engine.client.clock.now()))
    };
    match known {
        Some(member) if member.has_ended() => Verdict::Lost,
        None if over() => Verdict::Lost,
        _ if entry.evicted => Verdict::Evicted,
        _ => Verdict::Lives(entry.ttl()),
    }
}

/// Records a renewal that was acknowledged.
fn arm(engine: &Kubernetes, ticket: &Ticket, sent: BootTime, ttl: Duration) -> Renewal {
    let known = engine.members.get(ticket.claim);
    let ttl = known.as_ref().map_or(ttl, |member| member.claim.ttl);
    let armed = LeaseStart { sent, ttl };
    if let Some(member) = known {
        member.change(|state| state.armed = armed);
    }
    Renewal::Held(armed)
}

/// Now and then a holder's renewal also looks for abandoned Leases.
fn sweep_sometimes(engine: &Arc<Kubernetes>, answers: &[Renewal]) {
    let ttl = answers.iter().find_map(|answer| match answer {
        Renewal::Held(armed) => Some(armed.ttl),
        _ => None,
    });
    let Some(ttl) = ttl.filter(|_| !engine.keys.is_bare()) else {
        return;
    };
    let chance = (ttl / 3).as_secs_f64() / SWEEP.as_secs_f64();
    if rand::random_bool(chance.min(1.0)) {
        let engine = Arc::clone(engine);
        // It does no harm if the right to delete is missing.
        tokio::spawn(async move { inspect::sweep(&engine).await });
    }
}
