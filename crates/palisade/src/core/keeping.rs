//! The keeper's loop: what is due, what came back, what is over.
//!
//! Requests run beside the loop and never hold it up: a deadline that passes while a renewal
//! hangs is told at that moment, not when the request gives up.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;

use super::claim::ClaimId;
use super::clock::BootTime;
use super::engine::{Alarm, Audited, BoxStream, Renewal};
use super::error::{Error, Kind, Result};
use super::events::{Event, Observers, Renewed};
use super::keeper::{Departure, Kept, Shared, State, lose, renewal_due};
use super::known_bad::{self, Bad};
use super::pulse::{LossReason, Pulse};
use super::sync::{sleep_until, timeout};
use super::ticket::{Lease, LeaseId, Ticket};
use super::wait::{Backoff, Retry};

/// Timers of the runtime stand still while the machine sleeps; leases don't. Looking once a
/// second bounds how late a sleeper is told after it wakes. (`is_valid` is right at once.)
const TICK: Duration = Duration::from_secs(1);

/// The most leases in one call: large enough to be cheap, small enough to answer in time.
const BATCH: usize = 1024;

/// What a request beside the loop came back with.
enum Answer {
    Renewed {
        sent: BootTime,
        leases: Vec<LeaseId>,
        answers: Vec<Renewal>,
    },
    Audited {
        sent: BootTime,
        lease: LeaseId,
        answer: Result<Vec<Audited>>,
    },
    Left {
        claim: ClaimId,
    },
}

type Requests = FuturesUnordered<BoxFuture<'static, Answer>>;

pub(super) async fn keep(shared: Arc<Shared>, mut alarms: BoxStream<Alarm>) {
    let mut alarms_open = true;
    let mut requests = Requests::new();
    while let Some(looks_at) = shared.look(&mut requests) {
        tokio::select! {
            () = shared.wake.notified() => {}
            Some(answer) = requests.next(), if !requests.is_empty() => shared.take(answer),
            alarm = alarms.next(), if alarms_open => match alarm {
                Some(alarm) => shared.state.lock().hurry(alarm),
                None => alarms_open = false,
            },
            () = sleep_until(looks_at), if looks_at < BootTime::NEVER => {}
        }
    }
    shared.engine.close().await;
}

impl Shared {
    /// Tells what is over, sends what is due, and says when to look again; `None` at the end.
    fn look(&self, requests: &mut Requests) -> Option<BootTime> {
        let now = BootTime::now();
        let mut state = self.state.lock();
        state.expire(now, &self.observers);
        let due = state.take_due(now);
        let leaving = state.take_leaving(now);
        state.departing += leaving.len();
        if state.departing == 0 && state.leaving.is_empty() {
            self.drained.notify_waiters();
            if state.closing {
                return None;
            }
        }
        let shared = || due.iter().filter(|(lease, _)| lease.ticket.is_none());
        state.auditing += shared().count();
        state.looks_at = state.next_look(now);
        let looks_at = state.looks_at;
        drop(state);

        for (lease, _) in shared() {
            requests.push(self.audit(lease.id));
        }
        // Leases of one call share its limit, so that a short one does not cut a long one off.
        let mut by_limit: BTreeMap<Duration, Vec<Lease>> = BTreeMap::new();
        for (lease, ttl) in due {
            by_limit.entry(self.limit(ttl)).or_default().push(lease);
        }
        for (limit, leases) in by_limit {
            let mut leases = leases.into_iter().peekable();
            while leases.peek().is_some() {
                requests.push(self.renew(leases.by_ref().take(BATCH).collect(), limit));
            }
        }
        requests.extend(leaving.into_iter().map(|departure| self.leave(departure)));
        Some(looks_at)
    }

    /// How long a renewal may take: a sixth of the ttl, so that two may fail in a row.
    fn limit(&self, ttl: Duration) -> Duration {
        self.timeout.min(ttl / 6)
    }

    fn renew(&self, leases: Vec<Lease>, limit: Duration) -> BoxFuture<'static, Answer> {
        let ids: Vec<LeaseId> = leases.iter().map(|lease| lease.id).collect();
        let sent = BootTime::now();
        let renewal = self.engine.renew(leases, limit);
        Box::pin(async move {
            // The engine gives up first, and says why; this is for one that doesn't.
            let answers = timeout(limit + limit / 4, renewal).await;
            let answers = answers.unwrap_or_default();
            Answer::Renewed {
                sent,
                leases: ids,
                answers,
            }
        })
    }

    fn audit(&self, lease: LeaseId) -> BoxFuture<'static, Answer> {
        let limit = self.timeout;
        let sent = BootTime::now();
        let audit = self.engine.audit(lease);
        Box::pin(async move {
            let answer = timeout(limit, audit).await.unwrap_or_else(|_| {
                Err(Error::new(Kind::Unreachable, "audit", "no answer in time"))
            });
            Answer::Audited {
                sent,
                lease,
                answer,
            }
        })
    }

    /// Leaves, again and again until it is known to be done or the ttl has done it.
    fn leave(&self, departure: Departure) -> BoxFuture<'static, Answer> {
        let engine = Arc::clone(&self.engine);
        let limit = self.timeout;
        Box::pin(async move {
            let mut backoff = Backoff::new(Retry::default());
            loop {
                match timeout(limit, engine.leave(departure.ticket.clone())).await {
                    Ok(Ok(_)) => break,
                    Ok(Err(error)) if !error.is_transient() => break,
                    Ok(Err(_)) | Err(_) => {}
                }
                if !backoff.sleep(departure.give_up).await {
                    break;
                }
            }
            Answer::Left {
                claim: departure.ticket.claim,
            }
        })
    }

    fn take(&self, answer: Answer) {
        let mut state = self.state.lock();
        match answer {
            Answer::Left { claim } => {
                state.departing -= 1;
                state.has_parted(claim);
            }
            Answer::Audited {
                sent,
                lease,
                answer: Ok(found),
            } => {
                let strangers = state.compare(sent, lease, found, &self.observers);
                state.leaving.extend(strangers);
                state.audited();
            }
            Answer::Audited { answer: Err(_), .. } => state.audited(),
            Answer::Renewed {
                sent,
                leases,
                answers,
            } => {
                let mut answers = answers.into_iter();
                for id in leases {
                    // An engine that answers for fewer leases than asked leaves the rest unknown.
                    let answer = answers.next();
                    let outcome = outcome(answer.as_ref());
                    let took = BootTime::now().saturating_since(sent);
                    self.observers.tell(|engine| Event::Renewed {
                        engine,
                        outcome,
                        took,
                    });
                    state.take_renewal(id, sent, answer, &self.observers);
                }
            }
        }
    }
}

fn outcome(answer: Option<&Renewal>) -> Renewed {
    match answer {
        Some(Renewal::Held(_)) => Renewed::Held,
        Some(Renewal::Lost | Renewal::Revoked(_)) => Renewed::Lost,
        Some(Renewal::Evicted) => Renewed::Evicted,
        Some(Renewal::Unknown(_)) | None => Renewed::Unknown,
    }
}

impl State {
    /// Ends every lease whose deadline has passed.
    fn expire(&mut self, now: BootTime, observers: &Observers) {
        self.leases.retain(|_, kept| {
            let alive = kept.armed.deadline() > now;
            if !alive {
                kept.lose(LossReason::Expired, observers);
            }
            alive
        });
    }

    /// The leases to renew now. What is due soon goes along, so that leases taken one by one
    /// are renewed together after a while.
    fn take_due(&mut self, now: BootTime) -> Vec<(Lease, Duration)> {
        if !self.leases.values().any(|kept| kept.next_renewal() <= now) {
            return Vec::new();
        }
        let mut due = Vec::new();
        for (id, kept) in &mut self.leases {
            if kept.next_renewal() <= now + kept.armed.ttl / 20 {
                kept.renewing = true;
                // An alarm while it is in flight sets this again: the answer may be older.
                kept.due = BootTime::NEVER;
                let lease = Lease {
                    id: *id,
                    ticket: kept.ticket.clone(),
                };
                due.push((lease, kept.armed.ttl));
            }
        }
        due
    }

    /// The tickets to leave now; what must be kept a little longer stays, and is renewed.
    fn take_leaving(&mut self, now: BootTime) -> Vec<Departure> {
        let leaving = std::mem::take(&mut self.leaving);
        let (now, later) = leaving
            .into_iter()
            .partition(|departure| departure.not_before <= now);
        self.leaving = later;
        for departure in &now {
            self.forget(&departure.ticket);
            self.parting.insert(departure.ticket.claim);
        }
        now
    }

    /// Stops renewing for a claim. A shared lease goes on living.
    pub(super) fn forget(&mut self, ticket: &Ticket) {
        if known_bad::is(Bad::RenewalSurvivesRelease) {
            return;
        }
        self.entering.remove(&ticket.claim);
        self.has_parted(ticket.claim);
        let Some(kept) = self.leases.get_mut(&ticket.lease) else {
            return;
        };
        kept.claims.remove(&ticket.claim);
        if ticket.has_own_lease() {
            self.leases.remove(&ticket.lease);
        }
    }

    /// Says that a leave has come to its end. A list that was asked for before may still have it.
    fn has_parted(&mut self, claim: ClaimId) {
        if self.parting.remove(&claim) && self.auditing > 0 {
            self.parted.insert(claim);
        }
    }

    /// Says that an audit has come to its end.
    fn audited(&mut self) {
        self.auditing -= 1;
        if self.auditing == 0 {
            self.parted.clear();
        }
    }

    /// When to look again: at the next event, and once a second while there is anything to keep.
    /// For a second after the last one it stays awake, so that locks which are taken and released
    /// in quick succession don't wake the thread one by one.
    fn next_look(&mut self, now: BootTime) -> BootTime {
        if !self.leases.is_empty() || !self.leaving.is_empty() {
            self.dozes_at = None;
            return self.next_event().min(now + TICK);
        }
        match *self.dozes_at.get_or_insert(now + TICK) {
            dozes_at if dozes_at > now => dozes_at,
            _ => {
                self.dozes_at = None;
                BootTime::NEVER
            }
        }
    }

    /// The earliest moment at which a lease is due or over, or a ticket may be left.
    fn next_event(&self) -> BootTime {
        let event = |kept: &Kept| kept.next_renewal().min(kept.armed.deadline());
        let leases = self.leases.values().map(event);
        let departures = self.leaving.iter().map(|departure| departure.not_before);
        leases.chain(departures).min().unwrap_or(BootTime::NEVER)
    }

    /// A claim is in its line, for others to see and evict, before the answer to its enter is
    /// here: an alarm that comes in between is kept for it.
    fn hurry(&mut self, alarm: Alarm) {
        match alarm {
            Alarm::All => {
                let leases = self.leases.values_mut();
                leases.for_each(|kept| kept.due = BootTime::PAST);
                self.entering
                    .values_mut()
                    .for_each(|alarmed| *alarmed = true);
            }
            Alarm::Lease(id) => {
                if let Some(kept) = self.leases.get_mut(&id) {
                    kept.due = BootTime::PAST;
                } else if let Some(alarmed) = self.entering.get_mut(&ClaimId(id.0)) {
                    *alarmed = true;
                }
            }
        }
    }

    fn take_renewal(
        &mut self,
        id: LeaseId,
        sent: BootTime,
        answer: Option<Renewal>,
        observers: &Observers,
    ) {
        // Released meanwhile: a late answer changes nothing.
        let Some(kept) = self.leases.get_mut(&id) else {
            return;
        };
        kept.renewing = false;
        let reason = match answer {
            Some(Renewal::Held(armed)) => {
                let armed = armed.not_after(sent);
                if kept.armed.deadline().has_passed() {
                    LossReason::Expired
                } else {
                    if armed.sent > kept.armed.sent {
                        kept.armed = armed;
                    }
                    kept.due = kept.due.min(renewal_due(kept.armed));
                    // The deadline may pass between the look above and this.
                    let over = |pulse: &&Arc<Pulse>| !pulse.extend(kept.armed);
                    let over: Vec<_> = kept.claims.values().filter(over).collect();
                    for pulse in &over {
                        lose(pulse, LossReason::Expired, observers);
                    }
                    // An own lease has one claim; a shared one lives on for the others.
                    if !over.is_empty() && kept.ticket.is_some() {
                        self.leases.remove(&id);
                    }
                    return;
                }
            }
            Some(Renewal::Lost | Renewal::Revoked(_)) => LossReason::Taken,
            Some(Renewal::Evicted) => LossReason::Evicted,
            Some(Renewal::Unknown(_)) | None => {
                // Soon again, but not in a hot loop; the deadline ends it.
                kept.due = BootTime::now() + (kept.armed.ttl / 12).max(Duration::from_millis(10));
                if known_bad::gives_up_renewing(kept.armed) {
                    kept.due = BootTime::NEVER;
                }
                return;
            }
        };
        kept.lose(reason, observers);
        self.leases.remove(&id);
    }

    /// Compares what hangs on a shared lease with what is known, and returns the strangers.
    ///
    /// A claim is registered before its enter is sent, so whatever the list shows was known
    /// before the list was made: if it is not known now, it was dropped and must be left.
    fn compare(
        &mut self,
        sent: BootTime,
        lease: LeaseId,
        found: Vec<Audited>,
        observers: &Observers,
    ) -> Vec<Departure> {
        let Some(kept) = self.leases.get_mut(&lease) else {
            return Vec::new();
        };
        kept.claims.retain(|claim, pulse| {
            match found.iter().find(|audited| audited.ticket.claim == *claim) {
                Some(audited) => {
                    // Its place stays until its owner lets go.
                    if audited.evicted {
                        lose(pulse, LossReason::Evicted, observers);
                    }
                    true
                }
                // Entered after the list was asked for.
                None if pulse.since() >= sent => true,
                None => {
                    lose(pulse, LossReason::Taken, observers);
                    false
                }
            }
        });
        let give_up = BootTime::now() + kept.armed.ttl;
        let known = |claim: &ClaimId| {
            kept.claims.contains_key(claim)
                || self.entering.contains_key(claim)
                || self.parting.contains(claim)
                || self.parted.contains(claim)
                || self.leaving.iter().any(|left| left.ticket.claim == *claim)
        };
        found
            .into_iter()
            .map(|audited| audited.ticket)
            .filter(|ticket| !known(&ticket.claim))
            .map(|ticket| Departure {
                ticket,
                not_before: BootTime::PAST,
                give_up,
            })
            .collect()
    }
}
