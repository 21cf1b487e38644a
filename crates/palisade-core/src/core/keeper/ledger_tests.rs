//! The ledger against a naive model that inspects every lease at every step.

use std::time::Instant;

use proptest::prelude::*;

use super::*;
use crate::core::name::Name;

const TIMEOUT: Duration = Duration::from_secs(2);
const TTLS: [Duration; 3] = [
    Duration::from_millis(600),
    Duration::from_secs(5),
    Duration::from_secs(30),
];

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// So far in the future that the real clock, which validities read, never gets there.
fn start() -> BootTime {
    BootTime::now() + Duration::from_secs(1_000_000)
}

fn own(id: u128) -> Ticket {
    Ticket::own(Name::new("x").unwrap(), ClaimId(id))
}

fn on(lease: u128, claim: u128) -> Ticket {
    Ticket {
        lease: LeaseId(lease),
        ..own(claim)
    }
}

fn listed(ticket: Ticket) -> Audited {
    Audited {
        ticket,
        evicted: false,
    }
}

fn unknown() -> Renewal {
    Renewal::Unknown(Error::new(
        ErrorKind::Unreachable,
        "renew",
        "cut off by the test",
    ))
}

impl Ledger {
    /// Every lease is in the queues once, at its place, and nothing else is.
    fn check(&self) {
        let deadlines = |(id, kept): (&LeaseId, &Kept)| (kept.armed.deadline(), *id);
        let expected: BTreeSet<_> = self.leases.iter().map(deadlines).collect();
        assert_eq!(self.deadlines, expected);
        let mut queued = 0;
        for (id, kept) in &self.leases {
            let due = kept.next_renewal();
            queued += usize::from(due.is_some());
            if let Some(due) = due {
                let lane = &self.lanes[&limit(kept.armed.ttl, self.timeout)];
                assert!(lane.due.contains(&(due, *id)));
            }
        }
        let found: usize = self.lanes.values().map(|lane| lane.due.len()).sum();
        assert_eq!(found, queued);
        let idle = |lane: &Lane| lane.due.is_empty() && lane.in_flight == 0;
        assert!(!self.lanes.values().any(idle), "a lane that nothing is in");
    }
}

/// A lease in the model.
#[derive(Debug, Clone)]
struct Naive {
    armed: LeaseStart,
    due: BootTime,
    renewing: bool,
    validity: Arc<Validity>,
}

#[derive(Debug, Clone)]
enum Step {
    Enter(usize),
    EnterAgain(prop::sample::Index),
    Release(prop::sample::Index),
    Alarm(prop::sample::Index),
    AlarmAll,
    Wait(u64),
    /// How each lease of a batch is answered, repeating the list.
    Answer(prop::sample::Index, Vec<u8>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = any::<prop::sample::Index>;
    let step = prop_oneof![
        6 => (0..TTLS.len()).prop_map(Step::Enter),
        2 => index().prop_map(Step::EnterAgain),
        2 => index().prop_map(Step::Release),
        1 => index().prop_map(Step::Alarm),
        1 => Just(Step::AlarmAll),
        4 => (0..3_000_u64).prop_map(Step::Wait),
        6 => (index(), prop::collection::vec(0..6_u8, 1..4))
            .prop_map(|(at, how)| Step::Answer(at, how)),
    ];
    prop::collection::vec(step, 0..80)
}

proptest! {
    #[test]
    fn it_does_what_a_naive_model_does(steps in steps()) {
        let mut now = start();
        let mut ledger = Ledger::new(TIMEOUT);
        let mut model: BTreeMap<LeaseId, Naive> = BTreeMap::new();
        let mut in_flight: Vec<(BootTime, Batch)> = Vec::new();
        let mut next = 1;
        for step in steps {
            let mut lost = Lost::default();
            let ids: Vec<LeaseId> = model.keys().copied().collect();
            match step {
                Step::Enter(ttl) => {
                    let armed = LeaseStart { sent: now, ttl: TTLS[ttl] };
                    let ticket = own(next);
                    ledger.entering(ticket.claim);
                    let (validity, _) = ledger.watch_over(&ticket, armed, now);
                    let due = renewal_due(armed);
                    model.insert(ticket.lease, Naive { armed, due, renewing: false, validity });
                    next += 1;
                }
                Step::EnterAgain(which) if !ids.is_empty() => {
                    let id = *which.get(&ids);
                    let Some(kept) = model.get_mut(&id) else { continue };
                    let armed = LeaseStart { sent: now, ..kept.armed };
                    let (validity, _) = ledger.watch_over(&own(id.0), armed, now);
                    prop_assert!(Arc::ptr_eq(&validity, &kept.validity));
                    kept.armed = armed;
                }
                Step::Release(which) if !ids.is_empty() => {
                    let id = *which.get(&ids);
                    ledger.part_with(&own(id.0));
                    model.remove(&id);
                }
                Step::Alarm(which) if !ids.is_empty() => {
                    let id = *which.get(&ids);
                    ledger.hurry(Alarm::Lease(id));
                    if let Some(kept) = model.get_mut(&id) {
                        kept.due = BootTime::PAST;
                    }
                }
                Step::AlarmAll => {
                    ledger.hurry(Alarm::All);
                    model.values_mut().for_each(|kept| kept.due = BootTime::PAST);
                }
                Step::Wait(millis) => now = now + ms(millis),
                Step::Answer(which, how) if !in_flight.is_empty() => {
                    let (sent, batch) = in_flight.remove(which.index(in_flight.len()));
                    let leases: Vec<LeaseId> = batch.leases.iter().map(|lease| lease.id).collect();
                    let mut answers = Vec::new();
                    for (id, how) in leases.iter().zip(how.iter().cycle()) {
                        answers.push(match how {
                            0..=2 => {
                                let ttl = model.get(id).map_or(TTLS[0], |kept| kept.armed.ttl);
                                Renewal::Held(LeaseStart { sent, ttl })
                            }
                            3 => Renewal::Lost,
                            4 => Renewal::Evicted,
                            _ => unknown(),
                        });
                    }
                    for (id, answer) in leases.iter().zip(&answers) {
                        let Some(kept) = model.get_mut(id) else { continue };
                        kept.renewing = false;
                        match answer {
                            Renewal::Held(armed) if kept.armed.deadline() > now => {
                                if armed.sent > kept.armed.sent {
                                    kept.armed = *armed;
                                }
                                kept.due = kept.due.min(renewal_due(kept.armed));
                            }
                            Renewal::Unknown(_) => {
                                kept.due = (sent + kept.armed.ttl / 12).max(now + SHORTEST_RETRY);
                            }
                            _ => drop(model.remove(id)),
                        }
                    }
                    ledger.renewed(batch.limit, &leases, sent, answers, now, &mut lost);
                    for validity in &lost.0 {
                        prop_assert!(model.values().all(|kept| !Arc::ptr_eq(&kept.validity, validity)));
                    }
                }
                _ => {}
            }

            // Then the thread checks, as it does after every event.
            let mut lost = Lost::default();
            ledger.expire(now, &mut lost);
            let over = |kept: &Naive| kept.armed.deadline() <= now;
            let expired = model.values().filter(|kept| over(kept)).count();
            prop_assert_eq!(lost.0.len(), expired);
            model.retain(|_, kept| !over(kept));
            for kept in model.values() {
                prop_assert!(kept.validity.loss().is_none());
                prop_assert_eq!(kept.validity.deadline(), kept.armed.deadline());
            }

            for batch in ledger.take_due(now) {
                prop_assert!(!batch.leases.is_empty() && batch.leases.len() <= BATCH);
                for lease in &batch.leases {
                    let kept = model.get_mut(&lease.id).unwrap();
                    prop_assert!(!kept.renewing, "two renewals of one lease");
                    prop_assert!(kept.due <= now + kept.armed.ttl / 20, "too early");
                    prop_assert_eq!(batch.limit, limit(kept.armed.ttl, TIMEOUT));
                    kept.renewing = true;
                    kept.due = BootTime::NEVER;
                }
                in_flight.push((now, batch));
            }
            let flying = |limit: Duration| {
                in_flight.iter().filter(|(_, batch)| batch.limit == limit).count()
            };
            let looks_at = ledger.next_look(now);
            for kept in model.values() {
                let limit = limit(kept.armed.ttl, TIMEOUT);
                prop_assert!(flying(limit) <= IN_FLIGHT);
                if !kept.renewing && flying(limit) < IN_FLIGHT {
                    prop_assert!(kept.due > now, "due and not taken");
                    prop_assert!(looks_at <= kept.due);
                }
                prop_assert!(looks_at <= kept.armed.deadline());
            }
            prop_assert!(model.is_empty() || (looks_at > now && looks_at <= now + TICK));
            prop_assert_eq!(ledger.leases.len(), model.len());
            ledger.check();
        }
    }
}

/// A deadline that nothing stands behind is dropped, and one that was moved ends nothing.
#[test]
fn a_stray_deadline_ends_nothing() {
    let now = start();
    let armed = LeaseStart {
        sent: now,
        ttl: TTLS[2],
    };
    let (mut ledger, mut lost) = (Ledger::new(TIMEOUT), Lost::default());
    let _kept = ledger.watch_over(&own(1), armed, now);
    ledger.deadlines.insert((now, LeaseId(1)));
    ledger.deadlines.insert((now, LeaseId(2)));
    ledger.expire(now, &mut lost);
    assert!(lost.0.is_empty());
    assert_eq!(ledger.next_deadline(), armed.deadline());
    ledger.check();
}

#[test]
fn two_renewals_may_hang_and_the_third_is_in_time() {
    for ttl in TTLS {
        let began = start();
        let (mut ledger, mut lost) = (Ledger::new(TIMEOUT), Lost::default());
        let armed = LeaseStart { sent: began, ttl };
        ledger.watch_over(&own(1), armed, began);
        for _ in 0..2 {
            let now = ledger.next_event();
            let batch = ledger.take_due(now).pop().unwrap();
            let given_up = now + batch.limit;
            let unanswered = vec![];
            ledger.renewed(
                batch.limit,
                &[LeaseId(1)],
                now,
                unanswered,
                given_up,
                &mut lost,
            );
        }
        let now = ledger.next_event();
        let batch = ledger.take_due(now).pop().unwrap();
        assert!(now + batch.limit <= armed.deadline(), "{ttl:?}");
    }
}

#[test]
fn the_last_failure_is_kept_for_the_loss_until_a_renewal_goes_well() {
    let now = start();
    let armed = LeaseStart {
        sent: now,
        ttl: TTLS[2],
    };
    let (mut ledger, mut lost) = (Ledger::new(TIMEOUT), Lost::default());
    let (failed, _) = ledger.watch_over(&own(1), armed, now);
    let (recovered, _) = ledger.watch_over(&own(2), armed, now);
    let (hanging, _) = ledger.watch_over(&own(3), armed, now);
    let later = now + ms(10_000);
    let batch = ledger.take_due(later).pop().unwrap();
    let ids: Vec<LeaseId> = batch.leases.iter().map(|lease| lease.id).collect();
    assert_eq!(ids, [LeaseId(1), LeaseId(2), LeaseId(3)]);
    let again = Renewal::Held(LeaseStart {
        sent: later,
        ..armed
    });
    let answers = vec![unknown(), unknown(), again.clone()];
    ledger.renewed(batch.limit, &ids, later, answers, later, &mut lost);
    ledger.hurry(Alarm::Lease(LeaseId(2)));
    let batch = ledger.take_due(later).pop().unwrap();
    ledger.renewed(
        batch.limit,
        &[LeaseId(2)],
        later,
        vec![again],
        later,
        &mut lost,
    );
    ledger.hurry(Alarm::Lease(LeaseId(3)));
    assert_eq!(ledger.take_due(later).len(), 1);
    assert!(lost.0.is_empty());
    ledger.expire(now + 2 * TTLS[2], &mut lost);
    assert_eq!(lost.0.len(), 3);
    let why = |validity: &Validity| validity.loss().unwrap().why().map(Error::to_string);
    assert_eq!(why(&failed).unwrap(), "renew: cut off by the test");
    assert_eq!(why(&recovered), None);
    assert!(why(&hanging).unwrap().contains("did not answer in time"));
}

#[test]
fn a_revoked_lease_may_be_held_by_another_and_says_why() {
    let now = start();
    let armed = LeaseStart {
        sent: now,
        ttl: TTLS[2],
    };
    let (mut ledger, mut lost) = (Ledger::new(TIMEOUT), Lost::default());
    let (validity, _) = ledger.watch_over(&own(1), armed, now);
    let due = now + ms(10_000);
    let batch = ledger.take_due(due).pop().unwrap();
    let moved = Error::new(ErrorKind::Unusable, "renew", "the store was moved away");
    let answers = vec![Renewal::Revoked(moved)];
    ledger.renewed(batch.limit, &[LeaseId(1)], due, answers, due, &mut lost);
    let loss = validity.loss().unwrap();
    assert_eq!(loss.reason, LossReason::Taken);
    assert!(
        loss.to_string()
            .ends_with("renew: the store was moved away")
    );
    assert_eq!(lost.0.len(), 1);
    ledger.check();
}

#[test]
fn an_audit_leaves_strangers_and_loses_what_is_gone() {
    let (now, ttl) = (start(), TTLS[2]);
    let armed = LeaseStart { sent: now, ttl };
    let (mut ledger, mut lost) = (Ledger::new(TIMEOUT), Lost::default());
    let mut validities = Vec::new();
    for claim in 1..=3 {
        validities.push(ledger.watch_over(&on(100, claim), armed, now).0);
    }
    ledger.entering(ClaimId(4));
    ledger.leave_later(
        Departure {
            ticket: on(100, 5),
            not_before: now + ttl,
            give_up: now + ttl,
        },
        now,
    );
    let asked = now + ms(10_000);
    assert_eq!(ledger.take_due(asked).len(), 1);
    ledger.part_with(&on(100, 3));
    ledger.forget(&on(100, 3));
    let (late, _) = ledger.watch_over(&on(100, 6), armed, asked);
    let mut found: Vec<Audited> = [2, 3, 4, 5, 7].map(|id| listed(on(100, id))).into();
    found[0].evicted = true;
    ledger.compare(asked, LeaseId(100), found, asked, &mut lost);
    ledger.has_audited();
    let reason = |validity: &Validity| validity.loss().map(|loss| loss.reason);
    assert_eq!(reason(&validities[0]), Some(LossReason::Taken));
    assert_eq!(reason(&validities[1]), Some(LossReason::Evicted));
    assert_eq!(reason(&validities[2]), None, "it was given up");
    assert_eq!(
        reason(&late),
        None,
        "it entered after the list was asked for"
    );
    let strangers = ledger.take_leaving(asked);
    let claims: Vec<u128> = strangers.iter().map(|left| left.ticket.claim.0).collect();
    assert_eq!(claims, [7]);
    ledger.check();
}

/// The cost of an idle check, an alarm for one lease and a claim that comes and goes, with `count`
/// leases: the quickest of some rounds, because the machine may be busy.
fn cost_beside(count: u128) -> Duration {
    let now = start();
    let armed = LeaseStart {
        sent: now,
        ttl: TTLS[2],
    };
    let mut ledger = Ledger::new(TIMEOUT);
    for id in 0..count {
        ledger.watch_over(&own(id), armed, now);
    }
    let round = || {
        let (began, mut lost) = (Instant::now(), Lost::default());
        for id in 0..100 {
            let ticket = own(count + id);
            ledger.watch_over(&ticket, armed, now);
            ledger.hurry(Alarm::Lease(ticket.lease));
            ledger.expire(now, &mut lost);
            for batch in ledger.take_due(now) {
                let ids: Vec<LeaseId> = batch.leases.iter().map(|lease| lease.id).collect();
                let held = ids.iter().map(|_| Renewal::Held(armed)).collect();
                ledger.renewed(batch.limit, &ids, now, held, now, &mut lost);
            }
            ledger.next_look(now);
            ledger.forget(&ticket);
        }
        began.elapsed()
    };
    std::iter::repeat_with(round).take(10).min().unwrap()
}

#[test]
fn a_look_costs_no_more_beside_many_leases() {
    let (few, many) = (cost_beside(100), cost_beside(50_000));
    assert!(
        many < few * 50,
        "{few:?} beside 100, {many:?} beside 50,000"
    );
}
