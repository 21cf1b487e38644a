//! `layout=shedlock`: ShedLock's table, by ShedLock's rules, so that its jobs and palisade exclude
//! each other.
//!
//! There is one row per name, which is never removed. It is held while `lock_until` is later than
//! the server's time (UTC, as ShedLock's `usingDbTime` writes it). There is no queue: a waiter
//! retries a busy lock. Our claim, token, ttl and owner are in `locked_by`.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::sync::OnceCell;
use tokio_postgres::Row;

use super::client::Client;
use super::config::CAPABILITY;
use super::renew::{Round, incarnations};
use super::schema::first_cell;
use super::statements::{Parameters, Verb};
use super::{error, from_micros, inspect, micros, signed};
use palisade_core::engine::{
    Alarm, Amended, Amendment, Ask, BoxStream, Claim, Engine, Entered, Lease, LeaseStart, Left,
    Permits, Place, Renewal, Ticket,
};
use palisade_core::report::{Checkup, ClaimReport, LineReport, Owner, Scope};
use palisade_core::{BootTime, Capability, Error, ErrorKind, Eviction, Name, Result};
use palisade_kit::poll_watch::poll_watch;
use palisade_kit::{absent, rooms};

/// The longest name that fits into ShedLock's table.
const LONGEST: usize = 64;

/// How often a watch polls.
const POLL: Duration = Duration::from_millis(200);

const TABLE: &str = "CREATE TABLE IF NOT EXISTS shedlock (name varchar(64) NOT NULL PRIMARY KEY, \
    lock_until timestamp NOT NULL, locked_at timestamp NOT NULL, locked_by varchar(255) NOT NULL)";

/// ShedLock's table in one database.
pub(super) struct ShedlockEngine {
    table: Arc<Table>,
    shown: String,
}

struct Table {
    client: Arc<Client>,
    ready: OnceCell<()>,
}

impl ShedlockEngine {
    pub(super) fn new(client: Arc<Client>, shown: String) -> Self {
        let ready = OnceCell::new();
        let table = Arc::new(Table { client, ready });
        Self { table, shown }
    }
}

impl Table {
    /// The name as it is in the table.
    fn key(&self, name: &str) -> Result<String> {
        let key = match self.client.namespace.as_str() {
            "" => name.to_owned(),
            namespace => format!("{namespace}:{name}"),
        };
        if key.chars().count() > LONGEST {
            return Err(Error::new(
                ErrorKind::InvalidName,
                "name",
                "ShedLock's table takes names of 64 characters, with the namespace; shorten it",
            ));
        }
        Ok(key)
    }

    /// The client, after the table was created if it was missing.
    async fn client(&self) -> Result<&Client> {
        let make = || async {
            let session = self.client.session().await?;
            let client = session.connection.client();
            let failed = |error: tokio_postgres::Error| error::failed("connect", &error);
            let found = client.simple_query("SELECT to_regclass('shedlock')").await;
            if first_cell(&found.map_err(failed)?).is_none() {
                client.batch_execute(TABLE).await.map_err(failed)?;
            }
            Ok(())
        };
        self.ready.get_or_try_init(make).await?;
        Ok(&self.client)
    }

    async fn survey(&self, scope: &Scope) -> Result<Vec<LineReport>> {
        let (name, exact) = match scope {
            Scope::Line(name) => (name.as_str(), true),
            Scope::Prefix(prefix) => (prefix.as_str(), false),
        };
        let (key, skip) = (self.key(name)?, self.key("")?.len());
        let client = self.client().await?;
        let rows = client
            .ask("survey", Verb::ShedSurvey, &[&key, &exact])
            .await?;
        let line = |row: &Row| -> Option<LineReport> {
            let name: &str = row.try_get(0).ok()?;
            let mut line = LineReport::empty(name.get(skip..)?);
            let left = from_micros(row.try_get(2).ok()?);
            line.holders.push(holder(row.try_get(1).ok()?, left));
            Some(line)
        };
        let lines: Option<Vec<LineReport>> = rows.iter().map(line).collect();
        lines.map_or_else(|| error::unreadable("survey"), Ok)
    }
}

/// The holder in `locked_by`: a claim of ours, or the name of a ShedLock job.
fn holder(locked_by: &str, left: Duration) -> ClaimReport {
    let mut words = locked_by.splitn(5, ' ');
    let mut word = || words.next().unwrap_or_default();
    let (kind, claim, sequence, _ttl, owner) = (word(), word(), word(), word(), word());
    let ours = matches!(kind, "palisade" | "evicting");
    let mut report = ClaimReport::new(if ours { claim } else { locked_by }.to_owned(), Ask::Whole);
    report.owner = Owner::from_json(owner.as_bytes()).filter(|_| ours);
    report.sequence = sequence.parse().ok().filter(|_| ours);
    report.expires_in = Some(left);
    report.evicted = kind == "evicting";
    report
}

impl Engine for ShedlockEngine {
    fn capability(&self) -> Capability {
        let mut can = CAPABILITY;
        can.shared = false;
        can.permits = Permits::None;
        can.resize = false;
        can.fair = false;
        can.waiters_visible = false;
        can.queue = false;
        can
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    rooms! { self:
        absent { audit resize queues }
    }

    async fn enter(&self, claim: Arc<Claim>) -> Result<Entered> {
        let key = self.table.key(claim.name.as_str())?;
        let client = self.table.client().await?;
        let (ttl, least) = (micros(claim.ttl), micros(claim.at_least));
        let (id, owner) = (claim.id.to_string(), claim.owner.to_json());
        let sent = BootTime::now();
        let parameters: Parameters<'_> = &[&key, &id, &ttl, &owner, &least];
        let answer = client.numbers("enter", Verb::ShedEnter, parameters).await?;
        match *answer.as_slice() {
            [0] => Ok(Entered::Busy),
            [1, sequence, left] => {
                let sequence = sequence.unsigned_abs();
                let ttl = from_micros(left);
                Ok(Entered::In {
                    ticket: Ticket {
                        sequence,
                        ..Ticket::own(claim.name.clone(), claim.id)
                    },
                    armed: LeaseStart { sent, ttl },
                    place: Place::Held { sequence },
                })
            }
            _ => error::unreadable("enter"),
        }
    }

    /// There is no queue: a claim holds, or it is gone.
    async fn wait(&self, ticket: Ticket, _: BootTime) -> Result<Place> {
        let lines = self.table.survey(&Scope::Line(ticket.name.clone())).await?;
        let mut holders = lines.into_iter().flat_map(|line| line.holders);
        let mine = holders.find(|holder| holder.id == ticket.claim.to_string());
        let sequence = mine.and_then(|holder| holder.sequence);
        Ok(sequence.map_or(Place::Gone, |sequence| Place::Held { sequence }))
    }

    async fn renew(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
        let ask = |tickets: Vec<&Ticket>, patience: i32, by| {
            let (claims, counts) = incarnations(&tickets);
            let keys = tickets
                .iter()
                .map(|ticket| self.table.key(ticket.name.as_str()));
            let names: Result<Vec<String>> = keys.collect();
            async move {
                let parameters: Parameters<'_> = &[&names?, &claims, &counts, &patience];
                // The table exists, because this lease was entered in it.
                self.table
                    .client
                    .renewals(Verb::ShedRenew, parameters, by)
                    .await
            }
        };
        Round::new(&leases, within).run(ask).await
    }

    async fn amend(&self, _: Ticket, _: Amendment) -> Result<Amended> {
        let message = "ShedLock's table has no place for values, and no other weight";
        Err(Error::new(ErrorKind::Unsupported, "amend", message))
    }

    async fn leave(&self, ticket: Ticket) -> Result<Left> {
        let key = self.table.key(ticket.name.as_str())?;
        let client = self.table.client().await?;
        let (id, sequence) = (ticket.claim.to_string(), signed(ticket.sequence));
        let parameters: Parameters<'_> = &[&key, &id, &sequence, &ticket.in_doubt];
        let answer = client.numbers("leave", Verb::ShedLeave, parameters).await?;
        Ok(Left::of(answer == [1]))
    }

    /// Nothing is pushed; renewals find out.
    fn alarms(&self) -> BoxStream<Alarm> {
        stream::pending().boxed()
    }

    async fn survey(&self, scope: Scope) -> Result<Vec<LineReport>> {
        self.table.survey(&scope).await
    }

    fn watch(&self, scope: Scope) -> BoxStream<Result<()>> {
        let table = Arc::clone(&self.table);
        poll_watch(POLL, move || {
            let (table, scope) = (Arc::clone(&table), scope.clone());
            async move {
                let lines = table.survey(&scope).await?.into_iter();
                let holders = lines.flat_map(|line| line.holders);
                Ok(holders.map(|holder| holder.id).collect::<Vec<_>>())
            }
        })
    }

    async fn evict(&self, name: Name, id: String, eviction: Eviction) -> Result<bool> {
        let key = self.table.key(name.as_str())?;
        let verb = match eviction {
            Eviction::Mark => Verb::ShedMark,
            Eviction::Remove => Verb::ShedRemove,
        };
        let client = self.table.client().await?;
        Ok(!client.ask("evict", verb, &[&key, &id]).await?.is_empty())
    }

    async fn check(&self) -> Result<Checkup> {
        inspect::check(&self.table.client).await
    }

    /// Identifies the row: table and name.
    fn key(&self, ticket: &Ticket) -> Option<String> {
        let name = self.table.key(ticket.name.as_str()).ok()?;
        Some(format!("shedlock/{name}"))
    }

    async fn close(&self) {
        self.table.client.close();
    }
}
