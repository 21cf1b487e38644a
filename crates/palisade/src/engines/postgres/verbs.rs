//! The verbs of the engine, each a statement; the functions in the database decide.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, stream};

use super::PostgresEngine;
use super::check;
use super::desk::Desk;
use super::fault;
use super::mail::{Bell, Heard};
use super::offer::CAPABILITY;
use super::session::Verb;
use super::survey::{self, from_ask};
use crate::core::capability::Capability;
use crate::core::claim::{Claim, ClaimId};
use crate::core::clock::BootTime;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Eviction, Left,
    Place, Renewal,
};
use crate::core::error::{Error, Kind, Result};
use crate::core::line::capacity_mismatch;
use crate::core::name::Name;
use crate::core::report::{Checkup, LineReport, Scope};
use crate::core::sync;
use crate::core::ticket::{Armed, Lease, LeaseId, Ticket};
use crate::engines::remote::timed;

/// A push can be lost; then this is how late a waiter is.
const RECHECK: Duration = Duration::from_secs(1);

/// The same where no push can be had: a waiter is late by half of it on average, and asks the
/// server ten times a second.
const POLL: Duration = Duration::from_millis(100);

/// How often a watch looks whether anything changed.
const GLANCE: Duration = Duration::from_millis(200);

/// Between two tries to listen for alarms while the server is away.
const RETRY: Duration = Duration::from_millis(250);

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

fn of_micros(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0).unsigned_abs())
}

fn count(counted: u64) -> i64 {
    i64::try_from(counted).unwrap_or(i64::MAX)
}

impl Desk {
    async fn enter(&self, claim: &Claim) -> Result<Entered> {
        let (weight, capacity) = from_ask(claim.ask);
        let sent = BootTime::now();
        let answer = self
            .numbers(
                "enter",
                Verb::Enter,
                &[
                    &self.namespace,
                    &claim.name.as_str(),
                    &claim.id.to_string(),
                    &weight,
                    &capacity,
                    &micros(claim.ttl),
                    &claim.queue,
                    &self.mailbox,
                    &claim.owner.to_json(),
                    &claim.value,
                ],
            )
            .await?;
        let (place, counted, left) = match *answer.as_slice() {
            [0] => return Ok(Entered::Busy),
            [1, counted, left] => {
                let counted = counted.unsigned_abs();
                (Place::Held { counted }, counted, left)
            }
            [2, _, left] => (Place::Waiting, 0, left),
            [3, live] => {
                let live = u32::try_from(live).unwrap_or(u32::MAX);
                let asked = u32::try_from(capacity).unwrap_or(u32::MAX);
                return Err(capacity_mismatch(live, asked));
            }
            _ => return fault::unreadable("enter"),
        };
        Ok(Entered::In {
            ticket: Ticket {
                counted,
                ..Ticket::own(claim.name.clone(), claim.id)
            },
            armed: Armed {
                sent,
                ttl: of_micros(left),
            },
            place,
        })
    }

    /// Where a claim stands, and how long until a lease ahead of it is due.
    async fn place(&self, ticket: &Ticket) -> Result<(Place, Duration)> {
        let answer = self
            .numbers(
                "wait",
                Verb::Place,
                &[
                    &self.namespace,
                    &ticket.name.as_str(),
                    &ticket.claim.to_string(),
                ],
            )
            .await?;
        match *answer.as_slice() {
            [0] => Ok((Place::Gone, Duration::ZERO)),
            [1, counted] => {
                let counted = counted.unsigned_abs();
                Ok((Place::Held { counted }, Duration::ZERO))
            }
            [2, due] => Ok((Place::Waiting, of_micros(due))),
            _ => fault::unreadable("wait"),
        }
    }

    async fn wait(&self, ticket: &Ticket, until: BootTime) -> Result<Place> {
        // The bell hangs before the look, so that nothing rings unheard in between.
        let bell = self.mail().await?.map(|mail| mail.bell(ticket.claim));
        let (place, due) = self.place(ticket).await?;
        if place != Place::Waiting || until.has_passed() {
            return Ok(place);
        }
        let recheck = if bell.is_some() { RECHECK } else { POLL };
        // A little after the lease's end: the server must find it ended.
        let due = due + Duration::from_millis(1);
        let look = until.min(BootTime::now() + due.min(recheck));
        tokio::select! {
            () = rung(bell.as_ref()) => {}
            () = sync::sleep_until(look) => {}
        }
        Ok(self.place(ticket).await?.0)
    }

    async fn prolong(&self, leases: &[Lease]) -> Result<Vec<Renewal>> {
        let (mut names, mut claims, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        for ticket in leases.iter().filter_map(|lease| lease.ticket.as_ref()) {
            names.push(ticket.name.as_str());
            claims.push(ticket.claim.to_string());
            counts.push(count(ticket.counted));
        }
        let sent = BootTime::now();
        let parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)] =
            &[&self.namespace, &names, &claims, &counts];
        let answers = self.numbers("renew", Verb::Renew, parameters).await?;
        let mut answers = answers.into_iter();
        let renewals = leases.iter().map(|lease| {
            // All tickets here have their own leases.
            let answer = lease.ticket.as_ref().and_then(|_| answers.next());
            match answer {
                Some(-1) => Renewal::Evicted,
                Some(ttl) if ttl > 0 => Renewal::Held(Armed {
                    sent,
                    ttl: of_micros(ttl),
                }),
                _ => Renewal::Lost,
            }
        });
        Ok(renewals.collect())
    }

    async fn amend(&self, ticket: &Ticket, amendment: Amendment) -> Result<Amended> {
        let (weight, capacity, value) = match amendment {
            Amendment::Ask(ask) => {
                let (weight, capacity) = from_ask(ask);
                (Some(weight), Some(capacity), None)
            }
            Amendment::Value(value) => (None, None, Some(value)),
        };
        let answer = self
            .numbers(
                "amend",
                Verb::Amend,
                &[
                    &self.namespace,
                    &ticket.name.as_str(),
                    &ticket.claim.to_string(),
                    &count(ticket.counted),
                    &weight,
                    &capacity,
                    &value,
                ],
            )
            .await?;
        match *answer.as_slice() {
            [0] => Ok(Amended::Gone),
            [1] => Ok(Amended::Done),
            [2] => Ok(Amended::Busy),
            _ => fault::unreadable("amend"),
        }
    }

    async fn leave(&self, ticket: &Ticket) -> Result<Left> {
        let answer = self
            .numbers(
                "leave",
                Verb::Leave,
                &[
                    &self.namespace,
                    &ticket.name.as_str(),
                    &ticket.claim.to_string(),
                    &count(ticket.counted),
                    &ticket.in_doubt,
                ],
            )
            .await?;
        match *answer.as_slice() {
            [0] => Ok(Left::Absent),
            [1] => Ok(Left::Done),
            _ => fault::unreadable("leave"),
        }
    }

    async fn survey(&self, scope: &Scope) -> Result<Vec<LineReport>> {
        let (verb, name) = match scope {
            Scope::Prefix(prefix) => (Verb::SurveyPrefix, prefix.as_str()),
            Scope::Line(name) => (Verb::SurveyLine, name.as_str()),
        };
        let rows = self.ask("survey", verb, &[&self.namespace, &name]).await?;
        survey::lines(&rows).or_else(|_| fault::unreadable("survey"))
    }

    /// What changes with every change in the scope.
    async fn fingerprint(&self, scope: &Scope) -> Result<(i64, String)> {
        let prefix = match scope {
            Scope::Prefix(prefix) => prefix.as_str(),
            Scope::Line(name) => name.as_str(),
        };
        let parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)] = &[&self.namespace, &prefix];
        let rows = self.ask("watch", Verb::Fingerprint, parameters).await?;
        let Some(row) = rows.first() else {
            return fault::unreadable("watch");
        };
        let print = (row.try_get(0), row.try_get(1));
        match print {
            (Ok(count), Ok(sum)) => Ok((count, sum)),
            _ => fault::unreadable("watch"),
        }
    }

    async fn evict(&self, name: &Name, id: &str, eviction: Eviction) -> Result<bool> {
        let Ok(claim) = id.parse::<ClaimId>() else {
            return Ok(false);
        };
        let (claim, remove) = (claim.to_string(), eviction == Eviction::Remove);
        let answer = self
            .numbers(
                "evict",
                Verb::Evict,
                &[&self.namespace, &name.as_str(), &claim, &remove],
            )
            .await?;
        Ok(answer == [1])
    }

    pub(super) async fn check(&self) -> Result<Checkup> {
        let session = self.session().await?;
        let subject = check::Subject {
            server: &self.server,
            schema: &self.schema,
            between: self.between(),
            pushes: self.can_listen(),
            oldest: (120_000, "the functions are not tested there"),
            timeout: self.timeout,
        };
        let examined = check::examine(&session.connection.client, &subject);
        timed("check", self.timeout, examined).await?
    }

    /// Waits for the next alarm. `listening` is what was heard on so far.
    async fn alarm(&self, listening: &mut Option<Listening>) -> Alarm {
        loop {
            let Some(heard) = listening else {
                match self.mail().await {
                    Ok(Some(mail)) => {
                        *listening = Some(mail.listen());
                        // Whatever was said before is told by renewing.
                        return Alarm::All;
                    }
                    // Renewals tell, a little later.
                    Ok(None) => std::future::pending().await,
                    Err(_) => tokio::time::sleep(RETRY).await,
                }
                continue;
            };
            match heard.recv().await {
                Ok(Heard::Evicted(claim)) => return Alarm::Lease(claim.into()),
                Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => return Alarm::All,
                Ok(Heard::End) | Err(_) => *listening = None,
            }
        }
    }
}

type Listening = tokio::sync::broadcast::Receiver<Heard>;

async fn rung(bell: Option<&Bell>) {
    match bell {
        Some(bell) => bell.rung().await,
        None => std::future::pending().await,
    }
}

impl Engine for PostgresEngine {
    fn capability(&self) -> Capability {
        CAPABILITY
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.enter(&claim).await })
    }

    fn wait(&self, ticket: Ticket, until: BootTime) -> BoxFuture<Result<Place>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.wait(&ticket, until).await })
    }

    fn renew(&self, leases: Vec<Lease>) -> BoxFuture<Vec<Renewal>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move {
            desk.prolong(&leases).await.unwrap_or_else(|error| {
                let message = error.message().to_owned();
                let unknown = |_| {
                    let error = Error::new(Kind::Unreachable, "renew", message.clone());
                    Renewal::Unknown(error.maybe_applied())
                };
                leases.iter().map(unknown).collect()
            })
        })
    }

    fn amend(&self, ticket: Ticket, amendment: Amendment) -> BoxFuture<Result<Amended>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.amend(&ticket, amendment).await })
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.leave(&ticket).await })
    }

    fn audit(&self, _: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        async { Ok(Vec::new()) }.boxed()
    }

    fn alarms(&self) -> BoxStream<Alarm> {
        let start = (Arc::clone(&self.desk), None);
        stream::unfold(start, |(desk, mut listening)| async move {
            let alarm = desk.alarm(&mut listening).await;
            Some((alarm, (desk, listening)))
        })
        .boxed()
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.survey(&scope).await })
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        let start = (Arc::clone(&self.desk), scope, None);
        stream::unfold(start, |(desk, scope, mut seen)| async move {
            loop {
                match desk.fingerprint(&scope).await {
                    Ok(now) if seen.as_ref() == Some(&now) => tokio::time::sleep(GLANCE).await,
                    Ok(now) => {
                        seen = Some(now);
                        return Some((Ok(()), (desk, scope, seen)));
                    }
                    Err(error) => {
                        tokio::time::sleep(GLANCE).await;
                        return Some((Err(error), (desk, scope, seen)));
                    }
                }
            }
        })
        .boxed()
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.evict(&name, &id, eviction).await })
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.check().await })
    }

    fn close(&self) -> BoxFuture<()> {
        let desk = Arc::clone(&self.desk);
        Box::pin(async move { desk.close() })
    }
}
