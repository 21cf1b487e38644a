//! Rows of a survey, made into reports.

use std::time::Duration;

use tokio_postgres::Row;

use crate::core::claim::Ask;
use crate::core::owner::Owner;
use crate::core::report::{ClaimReport, LineReport};

/// The lines of a survey. Rows come by name, and each line's in the order of its seats.
pub(super) fn lines(rows: &[Row]) -> Result<Vec<LineReport>, tokio_postgres::Error> {
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
            match claim.counted {
                Some(_) => line.holders.push(claim),
                None => line.waiters.push(claim),
            }
        }
    }
    Ok(lines)
}

fn claim(row: &Row) -> Result<ClaimReport, tokio_postgres::Error> {
    let counted: i64 = row.try_get(4)?;
    let micros: i64 = row.try_get(5)?;
    let owner: Option<&str> = row.try_get(7)?;
    Ok(ClaimReport {
        id: row.try_get(1)?,
        owner: owner.and_then(|owner| Owner::from_json(owner.as_bytes())),
        ask: to_ask(row.try_get(2)?, row.try_get(3)?),
        value: row.try_get(8)?,
        counted: u64::try_from(counted).ok().filter(|counted| *counted > 0),
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
