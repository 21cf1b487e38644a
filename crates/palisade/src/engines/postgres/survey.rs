//! What operators ask: survey, watch, evict, check; and the rows of a survey, made into reports.

use std::time::Duration;

use tokio_postgres::Row;

use super::check;
use super::desk::Desk;
use super::fault;
use super::session::{Verb, like};
use crate::core::claim::{Ask, ClaimId};
use crate::core::engine::Eviction;
use crate::core::error::Result;
use crate::core::name::Name;
use crate::core::owner::Owner;
use crate::core::report::{Checkup, ClaimReport, LineReport, Scope};
use crate::engines::remote::timed;

/// What is read of a row.
type Read<T> = std::result::Result<T, tokio_postgres::Error>;

impl Desk {
    pub(super) async fn survey(&self, scope: &Scope) -> Result<Vec<LineReport>> {
        let (verb, name) = match scope {
            Scope::Prefix(prefix) => (Verb::SurveyPrefix, like(prefix)),
            Scope::Line(name) => (Verb::SurveyLine, name.as_str().to_owned()),
        };
        let rows = self.ask("survey", verb, &[&self.namespace, &name]).await?;
        lines(&rows).or_else(|_| fault::unreadable("survey"))
    }

    /// What changes with every change in the scope.
    pub(super) async fn fingerprint(&self, scope: &Scope) -> Result<(i64, String)> {
        let (verb, name) = match scope {
            Scope::Prefix(prefix) => (Verb::PrintPrefix, like(prefix)),
            Scope::Line(name) => (Verb::PrintLine, name.as_str().to_owned()),
        };
        let rows = self.ask("watch", verb, &[&self.namespace, &name]).await?;
        let Some(row) = rows.first() else {
            return fault::unreadable("watch");
        };
        let print = (row.try_get(0), row.try_get(1));
        match print {
            (Ok(count), Ok(sum)) => Ok((count, sum)),
            _ => fault::unreadable("watch"),
        }
    }

    pub(super) async fn evict(&self, name: &Name, id: &str, eviction: Eviction) -> Result<bool> {
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
            table: true,
            pushes: self.can_listen(),
            oldest: (120_000, "the functions are not tested there"),
            timeout: self.timeout,
        };
        let examined = check::examine(&session.connection.client, &subject);
        timed("check", self.timeout, examined).await?
    }
}

/// The lines of a survey. Rows come by name, and each line's in the order of its seats.
fn lines(rows: &[Row]) -> Read<Vec<LineReport>> {
    let mut lines: Vec<LineReport> = Vec::new();
    for row in rows {
        let name: &str = row.try_get(0)?;
        if lines.last().is_none_or(|line| line.name != name) {
            lines.push(LineReport {
                name: name.to_owned(),
                capacity: None,
                holders: Vec::new(),
                waiters: Vec::new(),
            });
        }
        let claim = claim(row)?;
        if let Some(line) = lines.last_mut() {
            if let Ask::Part { capacity, .. } = claim.ask {
                line.capacity.get_or_insert(capacity);
            }
            match claim.sequence {
                Some(_) => line.holders.push(claim),
                None => line.waiters.push(claim),
            }
        }
    }
    Ok(lines)
}

fn claim(row: &Row) -> Read<ClaimReport> {
    let sequence: i64 = row.try_get(4)?;
    let micros: i64 = row.try_get(5)?;
    let owner: Option<&str> = row.try_get(7)?;
    Ok(ClaimReport {
        id: row.try_get(1)?,
        owner: owner.and_then(|owner| Owner::from_json(owner.as_bytes())),
        ask: to_ask(row.try_get(2)?, row.try_get(3)?),
        value: row.try_get(8)?,
        sequence: u64::try_from(sequence)
            .ok()
            .filter(|sequence| *sequence > 0),
        expires_in: Some(Duration::from_micros(micros.max(0).unsigned_abs())),
        evicted: row.try_get(6)?,
    })
}

/// A weight and a capacity as the table keeps them: two zeroes are the whole line.
pub(super) fn from_ask(ask: Ask) -> (i64, i64) {
    match ask {
        Ask::Whole => (0, 0),
        Ask::Part { weight, capacity } => (weight.into(), capacity.into()),
    }
}

fn to_ask(weight: i64, capacity: i64) -> Ask {
    match (u32::try_from(weight), u32::try_from(capacity)) {
        (Ok(weight), Ok(capacity)) if capacity > 0 => Ask::Part { weight, capacity },
        _ => Ask::Whole,
    }
}
