//! The suite can fail: engines with one bug each, and the case that must catch it. An engine of
//! this list that passes reveals a gap in the suite.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use palisade::engine::{
    Alarm, BoxFuture, BoxStream, Claim, ClaimId, Engine, Entered, Layer, Lease, LeaseStart, Left,
    Place, Renewal, SharedEngine, Ticket, Url,
};
use palisade::report::{LineReport, Scope};
use palisade::{BootTime, Client, Eviction, Result};
use palisade_testkit::conformance::Verdict;
use palisade_testkit::engine::{EngineUnderTest, Site};
use palisade_testkit::harness;

/// The bug of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// Two enters with the same id are two claims.
    NewIdOnEnter,
    /// A busy claim stays in the line.
    BusyQueues,
    /// A leave removes any holder of the name.
    LeavesByName,
    /// A leave that finds no claim is not remembered.
    ForgetsLeaves,
    /// Reports a lost lease as held.
    RenewsTheDead,
    /// Renews a claim that is marked for eviction.
    IgnoresMarks,
    /// Counts the lease from the time of the answer, slightly too late.
    ArmedAfterTheReply,
    /// Never wakes before `until`.
    PollsOnly,
    /// Reports a grant when it is woken, without reading.
    PushIsGrant,
    /// Raises no alarm on an eviction.
    NoAlarms,
    /// Shows waiters in reverse order.
    WaitersBackwards,
    /// Shows lines of other names.
    IgnoresTheScope,
    /// Tokens are random.
    RandomTokens,
    /// Returns renewals in another order.
    RenewalsOutOfOrder,
    /// Keeps sleeping when the ticket is gone.
    SleepsWhenGone,
}

const SET: &[(Flaw, &str)] = &[
    (Flaw::NewIdOnEnter, "enter/same_id_is_the_same_ticket"),
    (Flaw::NewIdOnEnter, "keeper/a_lost_answer_is_one_grant"),
    (Flaw::BusyQueues, "enter/busy_claim_leaves_no_trace"),
    (
        Flaw::LeavesByName,
        "leave/late_leave_leaves_the_next_holder_alone",
    ),
    (
        Flaw::LeavesByName,
        "hold/a_lost_hold_does_not_release_the_next",
    ),
    (Flaw::ForgetsLeaves, "enter/left_before_it_arrived_is_busy"),
    (
        Flaw::ForgetsLeaves,
        "keeper/a_request_that_arrives_late_leaves_nothing",
    ),
    (
        Flaw::RenewsTheDead,
        "renew/ended_lease_is_lost_and_stays_lost",
    ),
    (Flaw::IgnoresMarks, "renew/marked_ticket_is_not_extended"),
    (
        Flaw::ArmedAfterTheReply,
        "renew/renewed_lease_outlives_its_ttl",
    ),
    (
        Flaw::ArmedAfterTheReply,
        "enter/armed_counts_from_before_the_request",
    ),
    (Flaw::PollsOnly, "wait/grant_is_pushed"),
    (Flaw::PushIsGrant, "wait/until_is_kept"),
    (Flaw::NoAlarms, "evict/marked_hold_is_told_at_once"),
    (Flaw::WaitersBackwards, "survey/holders_first_then_waiters"),
    (Flaw::IgnoresTheScope, "scope/prefix_shows_what_begins_so"),
    (Flaw::RandomTokens, "enter/counts_rise_with_every_grant"),
    (Flaw::RandomTokens, "mutex/tokens_rise_from_grant_to_grant"),
    (
        Flaw::RenewalsOutOfOrder,
        "renew/many_leases_are_answered_in_order",
    ),
    (Flaw::SleepsWhenGone, "wait/left_ticket_is_gone"),
];

struct Flawed {
    inner: SharedEngine,
    flaw: Flaw,
}

impl Flawed {
    fn has(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }
}

impl Layer for Flawed {
    fn inner(&self) -> &SharedEngine {
        &self.inner
    }

    async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        let mut claim = Claim::clone(&claim);
        let asked = claim.id;
        if self.has(Flaw::NewIdOnEnter) {
            claim.id = ClaimId::random();
        }
        claim.queue |= self.has(Flaw::BusyQueues);
        Ok(match self.inner.enter(Arc::new(claim)).await? {
            Entered::In {
                place: Place::Waiting,
                ..
            } if self.has(Flaw::BusyQueues) => Entered::Busy,
            Entered::In {
                mut ticket,
                mut armed,
                mut place,
            } => {
                if self.has(Flaw::NewIdOnEnter) {
                    ticket.claim = asked;
                    ticket.lease = asked.into();
                }
                if self.has(Flaw::ArmedAfterTheReply) {
                    armed = late(armed);
                }
                if let (Flaw::RandomTokens, Place::Held { sequence }) = (self.flaw, &mut place) {
                    *sequence = u64::from(rand::random::<u32>()) + 1;
                }
                Entered::In {
                    ticket,
                    armed,
                    place,
                }
            }
            busy => busy,
        })
    }

    async fn wait(&self, ticket: Ticket, until: BootTime) -> Result<Place> {
        let inner = &self.inner;
        match self.flaw {
            Flaw::PollsOnly => {
                tokio::time::sleep(until.remaining().min(Duration::from_secs(1))).await;
                inner.wait(ticket, BootTime::PAST).await
            }
            Flaw::PushIsGrant => {
                inner.wait(ticket, until).await?;
                Ok(Place::Held { sequence: 1 })
            }
            Flaw::SleepsWhenGone => match inner.wait(ticket, until).await? {
                Place::Gone => {
                    tokio::time::sleep(until.remaining()).await;
                    Ok(Place::Gone)
                }
                place => Ok(place),
            },
            _ => inner.wait(ticket, until).await,
        }
    }

    async fn renew(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        let now = LeaseStart {
            sent: BootTime::now(),
            ttl: Duration::from_secs(1),
        };
        let wrong = |renewal| match (self.flaw, renewal) {
            (Flaw::RenewsTheDead, Renewal::Lost) => Renewal::Held(now),
            (Flaw::IgnoresMarks, Renewal::Evicted) => Renewal::Held(now),
            (Flaw::ArmedAfterTheReply, Renewal::Held(armed)) => Renewal::Held(late(armed)),
            (_, renewal) => renewal,
        };
        let answers = self.inner.renew(leases, within).await;
        let mut answers: Vec<Renewal> = answers.into_iter().map(wrong).collect();
        if self.has(Flaw::RenewalsOutOfOrder) {
            answers.sort_by_key(|answer| matches!(answer, Renewal::Lost));
        }
        answers
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        let inner = &self.inner;
        match self.flaw {
            Flaw::LeavesByName => {
                let lines = inner.survey(Scope::Line(ticket.name.clone())).await?;
                let holder = lines.into_iter().flat_map(|line| line.holders).next();
                let Some(holder) = holder else {
                    return Ok(Left::Absent);
                };
                inner
                    .evict(ticket.name, holder.id, Eviction::Remove)
                    .await?;
                Ok(Left::Done)
            }
            Flaw::ForgetsLeaves => {
                let lines = inner.survey(Scope::Line(ticket.name.clone())).await?;
                let id = ticket.claim.to_string();
                if lines.iter().any(|line| is_in(line, &id)) {
                    inner.leave(ticket).await
                } else {
                    Ok(Left::Absent)
                }
            }
            _ => inner.leave(ticket).await,
        }
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        if self.has(Flaw::NoAlarms) {
            return futures_util::stream::pending().boxed();
        }
        self.inner.alarms()
    }

    async fn survey(&self, mut scope: Scope) -> Result<Vec<LineReport>> {
        if self.has(Flaw::IgnoresTheScope) {
            scope = Scope::Prefix(String::new());
        }
        let mut lines = self.inner.survey(scope).await?;
        if self.has(Flaw::WaitersBackwards) {
            lines.iter_mut().for_each(|line| line.waiters.reverse());
        }
        Ok(lines)
    }
}

fn is_in(line: &LineReport, id: &str) -> bool {
    line.holders
        .iter()
        .chain(&line.waiters)
        .any(|claim| claim.id == id)
}

fn late(armed: LeaseStart) -> LeaseStart {
    LeaseStart {
        sent: armed.sent + Duration::from_millis(100),
        ..armed
    }
}

/// A client of a flawed engine; the flaw is the URL's label.
fn connect(url: String) -> BoxFuture<Result<Client>> {
    Box::pin(async move {
        let settings = Url::parse(&url)?.take_settings()?;
        let flaw = settings.label.clone().unwrap_or_default();
        let flaws = SET.iter().map(|(flaw, _)| *flaw).chain([Flaw::None]);
        let flaw = flaws.into_iter().find(|known| format!("{known:?}") == flaw);
        let inner = Arc::clone(palisade::connect(&url).await?.engine());
        let engine = Flawed {
            inner,
            flaw: flaw.unwrap_or(Flaw::None),
        };
        Client::new(Arc::new(engine), &settings)
    })
}

fn verdict(flaw: Flaw, case: &str) -> Verdict {
    let engine = EngineUnderTest::new("flawed", || Err("not started".into())).connecting(connect);
    harness::try_case(engine, Site::new(format!("memory:?label={flaw:?}")), case)
}

#[test]
fn every_flaw_is_caught() {
    let threads = SET.iter().map(|(flaw, name)| {
        std::thread::spawn(move || match verdict(*flaw, name) {
            Verdict::Failed(_) => None,
            verdict => Some(format!("{flaw:?} passes {name}: {verdict:?}")),
        })
    });
    let threads: Vec<_> = threads.collect();
    let uncaught: Vec<String> = threads
        .into_iter()
        .filter_map(|t| t.join().unwrap())
        .collect();
    assert!(uncaught.is_empty(), "{}", uncaught.join("\n"));
}

/// The flaw is caught, and not the wrapper.
#[test]
fn the_wrapper_without_a_flaw_passes() {
    for (_, name) in SET {
        assert_eq!(verdict(Flaw::None, name), Verdict::Ok, "{name}");
    }
}
