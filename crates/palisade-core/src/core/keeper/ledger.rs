//! `Ledger`: the keeper's state, as a pure state machine.
//!
//! It does no I/O, reads no clock and notifies nobody. Every step is given the time, and returns
//! what to send and whom to notify once the lock around it is released.
//!
//! Each step touches only the leases that it concerns: renewals and deadlines are in ordered
//! queues. So the keeper's work grows with the number of events, not with the number of leases.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::RenewalPermit;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::engine::{Alarm, Audited, Renewal};
use crate::core::error::{Error, ErrorKind};
use crate::core::known_bad::{self, Bad};
use crate::core::ticket::{Lease, LeaseId, LeaseStart, Ticket};
use crate::core::validity::{LossReason, Validity};

/// The runtime's timers stand still during suspend, but leases don't. Checking once a second bounds
/// how late a loss is reported after a resume. (`is_valid` is right at once.)
pub(super) const TICK: Duration = Duration::from_secs(1);

/// The largest batch: large enough to be cheap, small enough to be answered in time.
pub(super) const BATCH: usize = 1024;

/// The maximum number of calls in flight per lane: enough to keep a distant engine busy, few enough
/// that the last one is not delayed by the others.
pub(super) const IN_FLIGHT: usize = 4;

/// The shortest delay before retrying a failed renewal.
const SHORTEST_RETRY: Duration = Duration::from_millis(10);

/// Claims that have just been lost, to be notified with no lock held.
#[must_use = "who waits for a loss must be told"]
#[derive(Debug, Default)]
pub(super) struct Lost(pub(super) Vec<Arc<Validity>>);

impl Lost {
    pub(super) fn lose(
        &mut self,
        validity: &Arc<Validity>,
        reason: LossReason,
        why: Option<&Error>,
    ) {
        if validity.lose(reason, why.cloned()) {
            self.0.push(Arc::clone(validity));
        }
    }

    /// Wakes those who wait for these losses.
    pub(super) fn tell(&self) {
        self.0.iter().for_each(|validity| validity.tell());
    }
}

/// Leases to renew with one call.
#[derive(Debug)]
pub(super) struct Batch {
    /// How long the call may take; it identifies the lane.
    pub(super) limit: Duration,
    pub(super) leases: Vec<Lease>,
}

/// A ticket to leave, and for how long to retry: after its ttl it is gone anyway.
#[derive(Debug)]
pub(super) struct Departure {
    pub(super) ticket: Ticket,
    /// Until then it is kept, and renewed.
    pub(super) not_before: BootTime,
    pub(super) give_up: BootTime,
}

/// A registered lease.
#[derive(Debug)]
struct Kept {
    armed: LeaseStart,
    due: BootTime,
    /// At most one renewal per lease is in flight, because some engines' answers carry no request
    /// id.
    renewing: bool,
    /// Whether it is left to expire: its only claim is held and asked for no renewal.
    ending: bool,
    /// The last failed renewal, unless a later one succeeded.
    last_failure: Option<Error>,
    claims: Claims,
}

/// The claims on a lease.
#[derive(Debug)]
enum Claims {
    /// The only ticket of its own lease.
    Own(Ticket, Arc<Validity>),
    Shared(HashMap<ClaimId, Arc<Validity>>),
}

impl Kept {
    /// When to renew it next, if at all.
    fn next_renewal(&self) -> Option<BootTime> {
        let queued = !self.renewing && !self.ending && self.due < BootTime::NEVER;
        queued.then_some(self.due)
    }

    fn queued(&self, timeout: Duration) -> Queued {
        Queued {
            limit: limit(self.armed.ttl, timeout),
            due: self.next_renewal(),
            deadline: self.armed.deadline(),
        }
    }

    fn validities(&self) -> impl Iterator<Item = &Arc<Validity>> {
        let (own, shared) = match &self.claims {
            Claims::Own(_, validity) => (Some(validity), None),
            Claims::Shared(claims) => (None, Some(claims.values())),
        };
        own.into_iter().chain(shared.into_iter().flatten())
    }

    /// Ends every claim on it.
    fn lose(&self, reason: LossReason, why: Option<&Error>, lost: &mut Lost) {
        self.validities()
            .for_each(|validity| lost.lose(validity, reason, why));
    }

    /// Ends every claim on it because its deadline has passed.
    fn expire(&self, lost: &mut Lost) {
        let hangs = self.last_failure.is_none() && self.renewing;
        let unanswered = hangs.then(no_answer);
        let why = self.last_failure.as_ref().or(unanswered.as_ref());
        self.lose(LossReason::Expired, why, lost);
    }
}

/// The error of a renewal that timed out.
fn no_answer() -> Error {
    let message = "the engine did not answer in time; is it overloaded, frozen or cut off?";
    Error::new(ErrorKind::Unreachable, "renew", message).maybe_applied()
}

/// A third of the ttl: two renewals may fail before the lease is in danger.
fn renewal_due(armed: LeaseStart) -> BootTime {
    armed.sent + armed.ttl / 3
}

/// How long a renewal may take: a sixth of the ttl, so that two may fail in a row. It is rounded
/// down by at most an eighth, so that there are few lanes whatever the ttls are.
fn limit(ttl: Duration, timeout: Duration) -> Duration {
    let nanos = u64::try_from((ttl / 6).as_nanos()).unwrap_or(u64::MAX);
    let coarse = 60_u32.saturating_sub(nanos.leading_zeros());
    Duration::from_nanos(nanos >> coarse << coarse).min(timeout)
}

/// Leases that are renewed with the same limit, so that slow calls don't delay short leases.
#[derive(Debug, Default)]
struct Lane {
    due: BTreeSet<(BootTime, LeaseId)>,
    in_flight: usize,
}

impl Lane {
    fn has_room(&self) -> bool {
        self.in_flight < IN_FLIGHT
    }
}

/// The position of a lease in the queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Queued {
    limit: Duration,
    due: Option<BootTime>,
    deadline: BootTime,
}

/// The keeper's state. See the module documentation.
#[derive(Debug)]
pub(super) struct Ledger {
    /// How long one request may take.
    timeout: Duration,
    leases: HashMap<LeaseId, Kept>,
    /// The leases to renew, by the limit of their calls.
    lanes: BTreeMap<Duration, Lane>,
    /// When each lease ends.
    deadlines: BTreeSet<(BootTime, LeaseId)>,
    /// Claims whose enter is in flight: an audit must not treat them as unknown. The value is
    /// `true` if an alarm came before the enter was answered.
    entering: HashMap<ClaimId, bool>,
    /// Tickets to leave in the background, by the earliest time for that.
    leaving: BTreeMap<(BootTime, ClaimId), Departure>,
    /// Claims whose leave is in flight (`parting`), and claims that were left while an audit was in
    /// flight (`parted`). An audit may still list them, but they are not unknown.
    parting: HashSet<ClaimId>,
    parted: HashSet<ClaimId>,
    /// The number of audits in flight.
    auditing: usize,
    /// The number of background leaves in flight.
    departing: usize,
    /// When the thread checks next without being woken.
    looks_at: BootTime,
    /// When the thread stops checking because there is nothing to keep.
    idle_from: Option<BootTime>,
}

impl Ledger {
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            leases: HashMap::new(),
            lanes: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            entering: HashMap::new(),
            leaving: BTreeMap::new(),
            parting: HashSet::new(),
            parted: HashSet::new(),
            auditing: 0,
            departing: 0,
            looks_at: BootTime::NEVER,
            idle_from: None,
        }
    }

    /// Records that a claim's enter is in flight.
    pub(super) fn entering(&mut self, claim: ClaimId) {
        self.entering.insert(claim, false);
    }

    /// Records that the engine assigned another id to a claim whose enter is in flight. An alarm
    /// for either id counts.
    pub(super) fn known_as(&mut self, asked: ClaimId, known: ClaimId) {
        if let Some(alarmed) = self.entering.remove(&asked) {
            *self.entering.entry(known).or_default() |= alarmed;
        }
    }

    /// Registers a claim that has a place. Also returns whether the thread must be woken, because
    /// its next check would be too late.
    pub(super) fn watch_over(
        &mut self,
        ticket: &Ticket,
        armed: LeaseStart,
        now: BootTime,
    ) -> (Arc<Validity>, bool) {
        let alarmed = self.entering.remove(&ticket.claim) == Some(true);
        let mut validity = Arc::new(Validity::new(ticket.name.clone(), armed, now));
        let due = if alarmed {
            BootTime::PAST
        } else {
            renewal_due(armed)
        };
        if !self.leases.contains_key(&ticket.lease) {
            let claims = if ticket.has_own_lease() {
                Claims::Own(ticket.clone(), Arc::clone(&validity))
            } else {
                Claims::Shared(HashMap::from([(ticket.claim, Arc::clone(&validity))]))
            };
            let kept = Kept {
                armed,
                due,
                renewing: false,
                ending: false,
                last_failure: None,
                claims,
            };
            let queued = kept.queued(self.timeout);
            self.leases.insert(ticket.lease, kept);
            self.requeue(ticket.lease, None, Some(queued));
        } else {
            self.update(ticket.lease, |kept| {
                if alarmed {
                    kept.due = BootTime::PAST;
                }
                match &mut kept.claims {
                    // The same claim has entered again. It is known by one validity, to the end.
                    Claims::Own(kept_ticket, known) => {
                        *kept_ticket = ticket.clone();
                        if armed.sent > kept.armed.sent && known.extend(armed) {
                            kept.armed = armed;
                        }
                        validity = Arc::clone(known);
                    }
                    Claims::Shared(claims) => {
                        if armed.sent > kept.armed.sent {
                            kept.armed = armed;
                        }
                        let new = || Validity::new(ticket.name.clone(), kept.armed, now);
                        let known = claims.entry(ticket.claim);
                        validity = Arc::clone(known.or_insert_with(|| Arc::new(new())));
                    }
                }
            });
        }
        let too_late = due.min(validity.deadline()) < self.looks_at;
        (validity, too_late)
    }

    /// Records the sequence of a grant, so that renewals carry the incarnation. `renewed` is
    /// `false` for a hold that is not to be renewed.
    pub(super) fn granted(&mut self, ticket: &Ticket, renewed: bool) {
        self.update(ticket.lease, |kept| {
            // A shared lease is still renewed for the other claims.
            if let Claims::Own(kept_ticket, _) = &mut kept.claims {
                *kept_ticket = ticket.clone();
                kept.ending = !renewed;
            }
        });
    }

    /// Records a lease that its owner extended. Returns whether it was still valid.
    pub(super) fn extended(&mut self, ticket: &Ticket, armed: LeaseStart) -> bool {
        let mut in_force = false;
        self.update(ticket.lease, |kept| {
            in_force = kept.validities().all(|validity| validity.extend(armed));
            if in_force {
                (kept.armed, kept.due) = (armed, renewal_due(armed));
            }
        });
        in_force
    }

    /// Stops renewing for a claim. A shared lease stays alive.
    pub(super) fn forget(&mut self, ticket: &Ticket) {
        if known_bad::is(Bad::RenewalSurvivesRelease) {
            return;
        }
        self.entering.remove(&ticket.claim);
        self.has_parted(ticket.claim);
        match self.leases.get_mut(&ticket.lease) {
            Some(Kept {
                claims: Claims::Shared(claims),
                ..
            }) => {
                claims.remove(&ticket.claim);
            }
            Some(_) => drop(self.remove(ticket.lease)),
            None => {}
        }
    }

    /// Stops renewing for a claim whose leave begins now; it stays known until it is forgotten.
    pub(super) fn part_with(&mut self, ticket: &Ticket) {
        self.forget(ticket);
        self.parting.insert(ticket.claim);
    }

    /// Queues a ticket to be left in the background; until it may be left, it is renewed.
    pub(super) fn leave_later(&mut self, departure: Departure, now: BootTime) {
        if departure.not_before <= now {
            self.forget(&departure.ticket);
        }
        let key = (departure.not_before, departure.ticket.claim);
        self.leaving.insert(key, departure);
    }

    /// Whether no leave is pending.
    pub(super) fn is_drained(&self) -> bool {
        self.leaving.is_empty() && self.departing == 0
    }

    /// Ends every lease whose deadline has passed.
    pub(super) fn expire(&mut self, now: BootTime, lost: &mut Lost) {
        while let Some(&(deadline, id)) = self.deadlines.first()
            && deadline <= now
        {
            // Whatever it stands for, it is used up: it must not be found again.
            self.deadlines.pop_first();
            let kept = self.leases.get(&id);
            if kept.is_some_and(|kept| kept.armed.deadline() <= now)
                && let Some(kept) = self.remove(id)
            {
                kept.expire(lost);
            }
        }
    }

    /// When the first lease ends, unless it is renewed.
    pub(super) fn next_deadline(&self) -> BootTime {
        let first = self.deadlines.first();
        first.map_or(BootTime::NEVER, |(at, _)| *at)
    }

    /// Ends everything: nothing will be renewed or left any more.
    pub(super) fn end(&mut self, why: &Error, lost: &mut Lost) {
        for kept in self.leases.values() {
            kept.lose(LossReason::Expired, Some(why), lost);
        }
        *self = Self {
            entering: std::mem::take(&mut self.entering),
            parting: std::mem::take(&mut self.parting),
            ..Self::new(self.timeout)
        };
    }

    /// The leases to renew now, the most urgent first, as many as may be in flight. Leases that are
    /// due soon are included, so that leases which were acquired one by one end up in one batch.
    pub(super) fn take_due(&mut self, now: BootTime) -> Vec<Batch> {
        let mut batches = Vec::new();
        for (limit, lane) in &mut self.lanes {
            if lane.due.first().is_none_or(|(due, _)| *due > now) {
                continue;
            }
            while lane.has_room() {
                let mut leases = Vec::new();
                while leases.len() < BATCH
                    && let Some(&(due, id)) = lane.due.first()
                    && let Some(kept) = self.leases.get_mut(&id)
                    && due <= now + kept.armed.ttl / 20
                {
                    lane.due.pop_first();
                    kept.renewing = true;
                    // An alarm during the call sets this again, because the answer may be older
                    // than the alarm.
                    kept.due = BootTime::NEVER;
                    let ticket = match &kept.claims {
                        Claims::Own(ticket, _) => Some(ticket.clone()),
                        Claims::Shared(_) => {
                            self.auditing += 1;
                            None
                        }
                    };
                    leases.push(Lease::new(id, ticket, RenewalPermit(())));
                }
                if leases.is_empty() {
                    break;
                }
                lane.in_flight += 1;
                let limit = *limit;
                batches.push(Batch { limit, leases });
            }
        }
        batches
    }

    /// The tickets to leave now. Those that must be kept longer stay queued and are renewed.
    pub(super) fn take_leaving(&mut self, now: BootTime) -> Vec<Departure> {
        let mut departures = Vec::new();
        while let Some(first) = self.leaving.first_entry()
            && first.key().0 <= now
        {
            let departure = first.remove();
            self.part_with(&departure.ticket);
            departures.push(departure);
        }
        self.departing += departures.len();
        departures
    }

    /// Records that a background leave has ended.
    pub(super) fn has_left(&mut self, claim: ClaimId) {
        self.departing -= 1;
        self.has_parted(claim);
    }

    /// Records that a leave has ended. The result of an audit in flight may still contain the
    /// claim.
    fn has_parted(&mut self, claim: ClaimId) {
        if self.parting.remove(&claim) && self.auditing > 0 {
            self.parted.insert(claim);
        }
    }

    /// Records that an audit has ended.
    pub(super) fn has_audited(&mut self) {
        self.auditing -= 1;
        if self.auditing == 0 {
            self.parted.clear();
        }
    }

    /// When to check again: at the next event, and once a second while there is anything to keep.
    /// After the last claim the thread stays awake for a second, so that locks which are taken and
    /// released in quick succession don't wake it one by one.
    pub(super) fn next_look(&mut self, now: BootTime) -> BootTime {
        self.looks_at = if !self.leases.is_empty() || !self.leaving.is_empty() {
            self.idle_from = None;
            self.next_event().min(now + TICK)
        } else {
            let idle_from = *self.idle_from.get_or_insert(now + TICK);
            if idle_from <= now {
                self.idle_from = None;
            }
            self.idle_from.unwrap_or(BootTime::NEVER)
        };
        self.looks_at
    }

    /// The earliest time at which a lease may be renewed or expires, or a ticket may be left. A
    /// lane without room waits for an answer, which wakes the thread anyway.
    fn next_event(&self) -> BootTime {
        let open = self.lanes.values().filter(|lane| lane.has_room());
        let renewals = open.filter_map(|lane| lane.due.first());
        let ends = renewals.chain(self.deadlines.first()).map(|(at, _)| *at);
        let leaving = self.leaving.keys().next().map(|(at, _)| *at);
        ends.chain(leaving).min().unwrap_or(BootTime::NEVER)
    }

    /// Renews a lease at once, or all of them. Others can see and evict a claim before its enter is
    /// answered, so an alarm for an entering claim is remembered.
    pub(super) fn hurry(&mut self, alarm: Alarm) {
        match alarm {
            Alarm::All => {
                let all: Vec<LeaseId> = self.leases.keys().copied().collect();
                for id in all {
                    self.update(id, |kept| kept.due = BootTime::PAST);
                }
                let entering = self.entering.values_mut();
                entering.for_each(|alarmed| *alarmed = true);
            }
            Alarm::Lease(id) => {
                if !self.update(id, |kept| kept.due = BootTime::PAST)
                    && let Some(alarmed) = self.entering.get_mut(&ClaimId(id.0))
                {
                    *alarmed = true;
                }
            }
        }
    }

    /// Processes the answers to a batch that was sent at `sent`, in the order of its leases. If
    /// there are fewer answers than leases, the rest is unknown.
    pub(super) fn renewed(
        &mut self,
        limit: Duration,
        leases: &[LeaseId],
        sent: BootTime,
        answers: Vec<Renewal>,
        now: BootTime,
        lost: &mut Lost,
    ) {
        if let Some(lane) = self.lanes.get_mut(&limit) {
            lane.in_flight -= 1;
        }
        let mut answers = answers.into_iter();
        for id in leases {
            let answer = answers.next();
            let answer = answer.unwrap_or_else(|| Renewal::Unknown(no_answer()));
            self.take_renewal(*id, sent, answer, now, lost);
        }
        self.close_lane(limit);
    }

    fn take_renewal(
        &mut self,
        id: LeaseId,
        sent: BootTime,
        answer: Renewal,
        now: BootTime,
        lost: &mut Lost,
    ) {
        let mut over = None;
        // If it was released meanwhile, the late answer changes nothing.
        self.update(id, |kept| {
            kept.renewing = false;
            match answer {
                Renewal::Held(_) if kept.armed.deadline() <= now => {
                    over = Some((LossReason::Expired, kept.last_failure.take()));
                }
                Renewal::Held(armed) => {
                    let armed = armed.not_after(sent);
                    if armed.sent > kept.armed.sent {
                        kept.armed = armed;
                    }
                    kept.due = kept.due.min(renewal_due(kept.armed));
                    kept.last_failure = None;
                    // The deadline may pass between the check above and this call. An own lease
                    // then ends with its claim; a shared lease lives on for the others.
                    for validity in kept
                        .validities()
                        .filter(|validity| !validity.extend(kept.armed))
                    {
                        lost.lose(validity, LossReason::Expired, None);
                        if let Claims::Own(..) = kept.claims {
                            over = Some((LossReason::Expired, None));
                        }
                    }
                }
                Renewal::Lost => over = Some((LossReason::Taken, None)),
                Renewal::Revoked(why) => over = Some((LossReason::Taken, Some(why))),
                Renewal::Evicted => over = Some((LossReason::Evicted, None)),
                Renewal::Unknown(error) => {
                    // Retry soon, but not in a busy loop; the deadline ends it. A call that took
                    // long to fail is retried almost at once.
                    kept.due = (sent + kept.armed.ttl / 12).max(now + SHORTEST_RETRY);
                    kept.last_failure = Some(error);
                    if known_bad::gives_up_renewing(kept.armed) {
                        kept.due = BootTime::NEVER;
                    }
                }
            }
        });
        if let Some((reason, why)) = over
            && let Some(kept) = self.remove(id)
        {
            kept.lose(reason, why.as_ref(), lost);
        }
    }

    /// Compares the tickets of a shared lease with the known claims, and leaves unknown ones.
    ///
    /// A claim is registered before its enter is sent, so every listed claim was known before the
    /// list was made. A claim that is not known now was dropped and must be left.
    pub(super) fn compare(
        &mut self,
        sent: BootTime,
        lease: LeaseId,
        found: Vec<Audited>,
        now: BootTime,
        lost: &mut Lost,
    ) {
        let Some(kept) = self.leases.get_mut(&lease) else {
            return;
        };
        let Claims::Shared(claims) = &mut kept.claims else {
            return;
        };
        let listed: HashMap<ClaimId, bool> = found
            .iter()
            .map(|audited| (audited.ticket.claim, audited.evicted))
            .collect();
        claims.retain(|claim, validity| match listed.get(claim) {
            Some(evicted) => {
                // Its place stays until its owner releases it.
                if *evicted {
                    lost.lose(validity, LossReason::Evicted, None);
                }
                true
            }
            // It entered after the audit was sent.
            None if validity.since() >= sent => true,
            None => {
                lost.lose(validity, LossReason::Taken, None);
                false
            }
        });
        let known = |claim: &ClaimId| {
            claims.contains_key(claim)
                || self.entering.contains_key(claim)
                || self.parting.contains(claim)
                || self.parted.contains(claim)
        };
        let mut strangers: HashMap<ClaimId, Ticket> = found
            .into_iter()
            .map(|audited| (audited.ticket.claim, audited.ticket))
            .filter(|(claim, _)| !known(claim))
            .collect();
        if strangers.is_empty() {
            return;
        }
        for (_, claim) in self.leaving.keys() {
            strangers.remove(claim);
        }
        let give_up = now + kept.armed.ttl;
        for (claim, ticket) in strangers {
            let departure = Departure {
                ticket,
                not_before: BootTime::PAST,
                give_up,
            };
            self.leaving.insert((BootTime::PAST, claim), departure);
        }
    }

    /// Changes a lease and its position in the queues. Returns whether the lease exists.
    fn update(&mut self, id: LeaseId, change: impl FnOnce(&mut Kept)) -> bool {
        let Some(kept) = self.leases.get_mut(&id) else {
            return false;
        };
        let before = kept.queued(self.timeout);
        change(kept);
        let after = kept.queued(self.timeout);
        self.requeue(id, Some(before), Some(after));
        true
    }

    fn remove(&mut self, id: LeaseId) -> Option<Kept> {
        let kept = self.leases.remove(&id)?;
        self.requeue(id, Some(kept.queued(self.timeout)), None);
        Some(kept)
    }

    fn requeue(&mut self, id: LeaseId, before: Option<Queued>, after: Option<Queued>) {
        let deadline = |queued: Option<Queued>| queued.map(|queued| queued.deadline);
        if deadline(before) != deadline(after) {
            if let Some(before) = before {
                self.deadlines.remove(&(before.deadline, id));
            }
            if let Some(after) = after {
                self.deadlines.insert((after.deadline, id));
            }
        }
        let place = |queued: Option<Queued>| queued.and_then(|at| Some((at.limit, at.due?)));
        if place(before) != place(after) {
            if let Some((limit, due)) = place(before) {
                if let Some(lane) = self.lanes.get_mut(&limit) {
                    lane.due.remove(&(due, id));
                }
                self.close_lane(limit);
            }
            if let Some((limit, due)) = place(after) {
                self.lanes.entry(limit).or_default().due.insert((due, id));
            }
        }
    }

    /// Removes an empty lane.
    fn close_lane(&mut self, limit: Duration) {
        if let Some(lane) = self.lanes.get(&limit)
            && lane.due.is_empty()
            && lane.in_flight == 0
        {
            self.lanes.remove(&limit);
        }
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
