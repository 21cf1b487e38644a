//! The keeper's loop: what is due, what was answered, what has expired.
//!
//! Requests run beside the loop and never delay it: a deadline that passes while a renewal hangs is
//! reported at that moment, not when the request times out.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;

use super::Shared;
use super::ledger::{Batch, Departure, Lost};
use super::timer::timer;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::engine::{Alarm, Audited, BoxStream, Renewal};
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::events::{Event, Renewed};
use crate::core::leasing::Leasing;
use crate::core::sync::{sleep_until, timeout};
use crate::core::ticket::LeaseId;
use crate::core::wait::{Backoff, Retry};

/// The result of a request.
enum Answer {
    Renewed {
        limit: Duration,
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

pub(super) async fn keep<S: Leasing + ?Sized>(
    shared: Arc<Shared<S>>,
    mut alarms: BoxStream<Alarm>,
) {
    let mut alarms_open = true;
    let mut requests = Requests::new();
    while let Some(looks_at) = shared.look(&mut requests) {
        tokio::select! {
            () = shared.wake.notified() => {}
            Some(answer) = requests.next(), if !requests.is_empty() => shared.take(answer),
            alarm = alarms.next(), if alarms_open => match alarm {
                Some(alarm) => shared.state.lock().ledger.hurry(alarm),
                None => alarms_open = false,
            },
            () = sleep_until(looks_at), if looks_at < BootTime::NEVER => {}
        }
    }
    // Another keeper may still use the connection.
    let share = shared.users.lock().take();
    if share.and_then(Arc::into_inner).is_some() {
        shared.store.close().await;
    }
}

impl<S: Leasing + ?Sized> Shared<S> {
    /// Reports losses, sends what is due, and returns when to check again; `None` at the end.
    fn look(&self, requests: &mut Requests) -> Option<BootTime> {
        let now = BootTime::now();
        let mut lost = Lost::default();
        let mut state = self.state.lock();
        let ledger = &mut state.ledger;
        ledger.expire(now, &mut lost);
        let due = ledger.take_due(now);
        let leaving = ledger.take_leaving(now);
        let looks_at = ledger.next_look(now);
        let deadline = ledger.next_deadline();
        let drained = ledger.is_drained();
        let ends = drained && state.closing;
        drop(state);

        timer().mind(deadline);
        self.tell(lost);
        if drained {
            self.drained.notify_waiters();
        }
        if ends {
            return None;
        }
        for batch in due {
            let shared = batch.leases.iter().filter(|lease| lease.ticket.is_none());
            requests.extend(shared.map(|lease| self.audit(lease.id)));
            requests.push(self.renew(batch));
        }
        requests.extend(leaving.into_iter().map(|departure| self.leave(departure)));
        Some(looks_at)
    }

    fn renew(&self, Batch { limit, leases }: Batch) -> BoxFuture<'static, Answer> {
        let ids: Vec<LeaseId> = leases.iter().map(|lease| lease.id).collect();
        let sent = BootTime::now();
        let store = Arc::clone(&self.store);
        Box::pin(async move {
            // The engine's own timeout comes first and carries a reason. This one is for engines
            // that have none.
            let answers = timeout(limit + limit / 4, store.renew(leases, limit)).await;
            let answers = answers.unwrap_or_default();
            Answer::Renewed {
                limit,
                sent,
                leases: ids,
                answers,
            }
        })
    }

    fn audit(&self, lease: LeaseId) -> BoxFuture<'static, Answer> {
        let limit = self.timeout;
        let sent = BootTime::now();
        let store = Arc::clone(&self.store);
        Box::pin(async move {
            let answer = timeout(limit, store.audit(lease)).await;
            let answer = answer.unwrap_or_else(|_| {
                Err(Error::new(
                    ErrorKind::Unreachable,
                    "audit",
                    "no answer in time",
                ))
            });
            Answer::Audited {
                sent,
                lease,
                answer,
            }
        })
    }

    /// Leaves, with retries until it is known to be done or the ttl has ended the place.
    fn leave(&self, departure: Departure) -> BoxFuture<'static, Answer> {
        let store = Arc::clone(&self.store);
        let limit = self.timeout;
        Box::pin(async move {
            let mut backoff = Backoff::new(Retry::default());
            loop {
                match timeout(limit, store.leave(departure.ticket.clone())).await {
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
        let mut lost = Lost::default();
        let mut state = self.state.lock();
        let ledger = &mut state.ledger;
        match answer {
            Answer::Left { claim } => ledger.has_left(claim),
            Answer::Audited {
                sent,
                lease,
                answer,
            } => {
                if let Ok(found) = answer {
                    ledger.compare(sent, lease, found, BootTime::now(), &mut lost);
                }
                ledger.has_audited();
            }
            Answer::Renewed {
                limit,
                sent,
                leases,
                answers,
            } => {
                let mut outcomes: Vec<Renewed> = answers.iter().map(outcome).collect();
                outcomes.resize(leases.len(), Renewed::Unknown);
                let now = BootTime::now();
                ledger.renewed(limit, &leases, sent, answers, now, &mut lost);
                drop(state);
                let took = now.saturating_since(sent);
                for outcome in outcomes {
                    self.observers.tell(|engine| Event::Renewed {
                        engine,
                        outcome,
                        took,
                    });
                }
                return self.tell(lost);
            }
        }
        drop(state);
        self.tell(lost);
    }
}

fn outcome(answer: &Renewal) -> Renewed {
    match answer {
        Renewal::Held(_) => Renewed::Held,
        Renewal::Lost | Renewal::Revoked(_) => Renewed::Lost,
        Renewal::Evicted => Renewed::Evicted,
        Renewal::Unknown(_) => Renewed::Unknown,
    }
}
