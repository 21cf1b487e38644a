//! `layout=shedlock` — ShedLock's table, by ShedLock's rules, so that its jobs and palisade
//! exclude each other.
//!
//! One row per name, never removed: held while `lock_until` is ahead of the server's time (UTC,
//! as ShedLock's `usingDbTime` writes it). There is no line: a busy lock is asked for again. Our
//! claim, token, ttl and owner are in `locked_by`.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, stream};
use tokio::sync::OnceCell;
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::desk::Desk;
use super::fault;
use super::offer::CAPABILITY;
use super::renew::{Round, Rows};
use super::schema::first_cell;
use super::session::Verb;
use crate::core::capability::{Capability, Permits};
use crate::core::claim::{Ask, Claim};
use crate::core::clock::BootTime;
use crate::core::engine::{
    Alarm, Amended, Amendment, Audited, BoxFuture, BoxStream, Engine, Entered, Eviction, Left,
    Place, Renewal, cannot_resize,
};
use crate::core::error::{Error, Kind, Result};
use crate::core::name::Name;
use crate::core::owner::Owner;
use crate::core::report::{Checkup, ClaimReport, LineReport, Scope};
use crate::core::ticket::{Lease, LeaseId, LeaseStart, Ticket};

/// The longest name that ShedLock's table takes.
const LONGEST: usize = 64;

/// How often a watch looks whether anything changed.
const GLANCE: Duration = Duration::from_millis(200);

const TABLE: &str = "CREATE TABLE IF NOT EXISTS shedlock (name varchar(64) NOT NULL PRIMARY KEY, \
    lock_until timestamp NOT NULL, locked_at timestamp NOT NULL, locked_by varchar(255) NOT NULL)";

/// ShedLock's table in one database.
pub(super) struct ShedlockEngine {
    shed: Arc<Shed>,
    shown: String,
}

struct Shed {
    desk: Arc<Desk>,
    ready: OnceCell<()>,
}

impl ShedlockEngine {
    pub(super) fn new(desk: Arc<Desk>, shown: String) -> Self {
        let ready = OnceCell::new();
        Self {
            shed: Arc::new(Shed { desk, ready }),
            shown,
        }
    }
}

impl Shed {
    /// The name in the table.
    fn key(&self, name: &str) -> Result<String> {
        let key = match self.desk.namespace.as_str() {
            "" => name.to_owned(),
            namespace => format!("{namespace}:{name}"),
        };
        match key.chars().count() <= LONGEST {
            true => Ok(key),
            false => Err(Error::new(
                Kind::InvalidName,
                "name",
                "ShedLock's table takes names of 64 characters, with the namespace; shorten it",
            )),
        }
    }

    /// Sees to it that the table is there.
    async fn desk(&self) -> Result<&Desk> {
        let make = || async {
            let session = self.desk.session().await?;
            let client = &session.connection.client;
            let failed = |error: tokio_postgres::Error| fault::reading("connect", &error);
            let found = client.simple_query("SELECT to_regclass('shedlock')").await;
            if first_cell(&found.map_err(failed)?).is_none() {
                client.batch_execute(TABLE).await.map_err(failed)?;
            }
            Ok(())
        };
        self.ready.get_or_try_init(make).await?;
        Ok(&self.desk)
    }

    async fn enter(&self, claim: &Claim) -> Result<Entered> {
        let key = self.key(claim.name.as_str())?;
        let desk = self.desk().await?;
        let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        let (ttl, least) = (micros(claim.ttl), micros(claim.at_least));
        let (id, owner) = (claim.id.to_string(), claim.owner.to_json());
        let sent = BootTime::now();
        let answer = desk
            .numbers("enter", Verb::ShedEnter, &[&key, &id, &ttl, &owner, &least])
            .await?;
        match *answer.as_slice() {
            [0] => Ok(Entered::Busy),
            [1, sequence, left] => {
                let sequence = sequence.unsigned_abs();
                let ticket = Ticket {
                    sequence,
                    ..Ticket::own(claim.name.clone(), claim.id)
                };
                let ttl = Duration::from_micros(left.max(0).unsigned_abs());
                Ok(Entered::In {
                    ticket,
                    armed: LeaseStart { sent, ttl },
                    place: Place::Held { sequence },
                })
            }
            _ => fault::unreadable("enter"),
        }
    }

    async fn leave(&self, ticket: &Ticket) -> Result<Left> {
        let key = self.key(ticket.name.as_str())?;
        let desk = self.desk().await?;
        let sequence = i64::try_from(ticket.sequence).unwrap_or(i64::MAX);
        let id = ticket.claim.to_string();
        let answer = desk
            .numbers(
                "leave",
                Verb::ShedLeave,
                &[&key, &id, &sequence, &ticket.in_doubt],
            )
            .await?;
        match *answer.as_slice() {
            [1] => Ok(Left::Done),
            _ => Ok(Left::Absent),
        }
    }

    async fn survey(&self, scope: &Scope) -> Result<Vec<LineReport>> {
        let (name, exact) = match scope {
            Scope::Line(name) => (name.as_str(), true),
            Scope::Prefix(prefix) => (prefix.as_str(), false),
        };
        let key = self.key(name)?;
        let desk = self.desk().await?;
        let rows = desk
            .ask("survey", Verb::ShedSurvey, &[&key, &exact])
            .await?;
        let skip = self.key("")?.len();
        let line = |row: &Row| -> Option<LineReport> {
            let name: &str = row.try_get(0).ok()?;
            let micros: i64 = row.try_get(2).ok()?;
            let mut holder = holder(row.try_get(1).ok()?);
            holder.expires_in = Some(Duration::from_micros(micros.max(0).unsigned_abs()));
            Some(LineReport {
                name: name.get(skip..)?.to_owned(),
                capacity: None,
                holders: vec![holder],
                waiters: Vec::new(),
            })
        };
        let lines: Option<Vec<LineReport>> = rows.iter().map(line).collect();
        lines.map_or_else(|| fault::unreadable("survey"), Ok)
    }

    async fn evict(&self, name: &Name, id: &str, eviction: Eviction) -> Result<bool> {
        let key = self.key(name.as_str())?;
        let verb = match eviction {
            Eviction::Mark => Verb::ShedMark,
            Eviction::Remove => Verb::ShedRemove,
        };
        let rows = self.desk().await?.ask("evict", verb, &[&key, &id]).await?;
        Ok(!rows.is_empty())
    }
}

impl Rows for Shed {
    async fn renew_rows(
        &self,
        tickets: &[&Ticket],
        patience: i32,
        by: Instant,
    ) -> Result<Vec<i64>> {
        let names: Result<Vec<String>> =
            tickets.iter().map(|t| self.key(t.name.as_str())).collect();
        let names = names?;
        let claims: Vec<String> = tickets.iter().map(|t| t.claim.to_string()).collect();
        let count = |sequence: u64| i64::try_from(sequence).unwrap_or(i64::MAX);
        let counts: Vec<i64> = tickets.iter().map(|t| count(t.sequence)).collect();
        let parameters: &[&(dyn ToSql + Sync)] = &[&names, &claims, &counts, &patience];
        // The table is there: what is renewed was entered.
        self.desk.renewals(Verb::ShedRenew, parameters, by).await
    }
}

/// Who `locked_by` is: one of ours, or what a ShedLock job calls itself.
fn holder(locked_by: &str) -> ClaimReport {
    let mut words = locked_by.splitn(5, ' ');
    let mut word = || words.next().unwrap_or_default();
    let (kind, claim, sequence, _ttl, owner) = (word(), word(), word(), word(), word());
    let ours = matches!(kind, "palisade" | "evicting");
    ClaimReport {
        id: if ours { claim } else { locked_by }.to_owned(),
        owner: Owner::from_json(owner.as_bytes()).filter(|_| ours),
        ask: Ask::Whole,
        value: None,
        sequence: sequence.parse().ok().filter(|_| ours),
        expires_in: None,
        evicted: kind == "evicting",
    }
}

impl Engine for ShedlockEngine {
    fn capability(&self) -> Capability {
        Capability {
            shared: false,
            permits: Permits::None,
            resize: false,
            fair: false,
            waiters_visible: false,
            ..CAPABILITY
        }
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    fn enter(&self, claim: Arc<Claim>) -> BoxFuture<Result<Entered>> {
        let shed = Arc::clone(&self.shed);
        Box::pin(async move { shed.enter(&claim).await })
    }

    /// Nobody waits in a line here: a claim holds, or it is gone.
    fn wait(&self, ticket: Ticket, _: BootTime) -> BoxFuture<Result<Place>> {
        let shed = Arc::clone(&self.shed);
        Box::pin(async move {
            let lines = shed.survey(&Scope::Line(ticket.name.clone())).await?;
            let mut holders = lines.into_iter().flat_map(|line| line.holders);
            let mine = holders.find(|holder| holder.id == ticket.claim.to_string());
            let sequence = mine.and_then(|holder| holder.sequence);
            Ok(sequence.map_or(Place::Gone, |sequence| Place::Held { sequence }))
        })
    }

    fn renew(&self, leases: Vec<Lease>, within: Duration) -> BoxFuture<Vec<Renewal>> {
        let shed = Arc::clone(&self.shed);
        Box::pin(async move {
            let tickets = leases.iter().map(|lease| lease.ticket.as_ref()).collect();
            Round::new(tickets, within).run(&*shed).await
        })
    }

    fn amend(&self, _: Ticket, _: Amendment) -> BoxFuture<Result<Amended>> {
        let message = "ShedLock's table has no place for values, and no other weight";
        async move { Err(Error::new(Kind::Unsupported, "amend", message)) }.boxed()
    }

    fn leave(&self, ticket: Ticket) -> BoxFuture<Result<Left>> {
        let shed = Arc::clone(&self.shed);
        Box::pin(async move { shed.leave(&ticket).await })
    }

    fn audit(&self, _: LeaseId) -> BoxFuture<Result<Vec<Audited>>> {
        async { Ok(Vec::new()) }.boxed()
    }

    /// Renewals tell; nothing is pushed.
    fn alarms(&self) -> BoxStream<Alarm> {
        stream::pending().boxed()
    }

    fn survey(&self, scope: Scope) -> BoxFuture<Result<Vec<LineReport>>> {
        let shed = Arc::clone(&self.shed);
        Box::pin(async move { shed.survey(&scope).await })
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        let start = (Arc::clone(&self.shed), scope, None);
        stream::unfold(start, |(shed, scope, mut seen)| async move {
            loop {
                let answer = shed.survey(&scope).await;
                let ids = answer.map(|lines| {
                    let holders = lines.into_iter().flat_map(|line| line.holders);
                    holders.map(|holder| holder.id).collect::<Vec<_>>()
                });
                match ids {
                    Ok(now) if seen.as_ref() == Some(&now) => tokio::time::sleep(GLANCE).await,
                    Ok(now) => {
                        seen = Some(now);
                        return Some((Ok(()), (shed, scope, seen)));
                    }
                    Err(error) => {
                        tokio::time::sleep(GLANCE).await;
                        return Some((Err(error), (shed, scope, seen)));
                    }
                }
            }
        })
        .boxed()
    }

    fn evict(&self, name: Name, id: String, eviction: Eviction) -> BoxFuture<Result<bool>> {
        let shed = Arc::clone(&self.shed);
        Box::pin(async move { shed.evict(&name, &id, eviction).await })
    }

    fn resize(&self, _name: Name, _capacity: u32) -> BoxFuture<Result<bool>> {
        cannot_resize()
    }

    fn check(&self) -> BoxFuture<Result<Checkup>> {
        let shed = Arc::clone(&self.shed);
        Box::pin(async move { shed.desk.check().await })
    }

    /// The row: table and name.
    fn key(&self, ticket: &Ticket) -> Option<String> {
        let name = self.shed.key(ticket.name.as_str()).ok()?;
        Some(format!("shedlock/{name}"))
    }

    fn close(&self) -> BoxFuture<()> {
        let shed = Arc::clone(&self.shed);
        Box::pin(async move { shed.desk.close() })
    }
}
