//! How operators inspect a queue and change its messages.

use rusqlite::{Row, params};

use super::database::NEVER;
use super::room::{FEW, MANY};
use super::tx::{Tx, duration};
use palisade_core::Result;
use palisade_core::queue::{FullReport, MessageReport, MessageState, Pick, QueueReport};
use palisade_core::report::Owner;

/// The state of a message in SQL, as in [`MessageState::code`]; `?1` is now.
const STATE: &str = "CASE WHEN dead THEN 'dead' WHEN behind THEN 'blocked' WHEN due <= ?1 THEN 'ready' \
     WHEN token > 0 THEN 'claimed' ELSE 'delayed' END";

impl Tx<'_> {
    pub(super) fn count(&mut self) -> Result<QueueReport> {
        self.reap()?;
        let mut report = QueueReport::empty(self.value::<String>("SELECT name FROM queue", [])?);
        let states =
            format!("SELECT {STATE} AS state, count(*), min(after) FROM message GROUP BY state");
        let states: Vec<(String, i64, i64)> = self.rows(&states, params![self.now], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        })?;
        for (word, count, since) in states {
            let oldest = duration(self.now - since);
            report.add(MessageState::of(&word), count.unsigned_abs(), oldest);
        }
        Ok(report)
    }

    pub(super) fn list(&mut self, dead: bool, limit: usize) -> Result<Vec<MessageReport>> {
        self.reap()?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let list = format!("{} WHERE dead OR NOT ?2 ORDER BY number LIMIT ?3", listed());
        let now = self.now;
        self.rows(&list, params![now, dead, limit], |row| report(row, now))
    }

    pub(super) fn read(&mut self, id: &str) -> Result<Option<FullReport>> {
        self.reap()?;
        let Some(number) = self.numbered(id)? else {
            return Ok(None);
        };
        let one = format!("{} WHERE number = ?2", listed());
        let now = self.now;
        let found = self.row(&one, params![now, number], |row| report(row, now))?;
        let Some(report) = found else {
            return Ok(None);
        };
        let body = self.value(
            "SELECT body FROM message WHERE number = ?1",
            params![number],
        )?;
        Ok(Some((report, body)))
    }

    /// The message number of an id.
    fn numbered(&self, id: &str) -> Result<Option<i64>> {
        if let Some(number) = Pick::number(id) {
            return Ok(i64::try_from(number).ok());
        }
        self.row(
            "SELECT number FROM seen WHERE id = ?1",
            params![id],
            |row| row.get(0),
        )
    }

    /// The condition that selects the messages; its parameter is `?2`.
    fn picked(&self, pick: &Pick) -> Result<(&'static str, i64)> {
        Ok(match pick {
            Pick::All => ("?2 = 0", 0),
            Pick::Dead => ("dead AND ?2 = 0", 0),
            Pick::Id(id) => ("number = ?2", self.numbered(id)?.unwrap_or(-1)),
        })
    }

    pub(super) fn retry(&mut self, pick: &Pick) -> Result<u64> {
        self.reap()?;
        let (which, number) = self.picked(pick)?;
        let retry = format!(
            "UPDATE message SET dead = 0, attempts = 0, token = 0, batch = NULL, process = NULL, \
             owner = NULL, due = ?1, after = min(after, ?1) \
             WHERE {which} AND NOT behind AND (token = 0 OR due <= ?1)"
        );
        let ready = self.run(&retry, params![self.now, number])?;
        self.wake(ready)?;
        Ok(ready as u64)
    }

    /// Drops some of the messages with numbers below `below`, the newest first. Returns how many,
    /// and below which number there may be more.
    pub(super) fn discard(
        &mut self,
        pick: &Pick,
        force: bool,
        below: Option<i64>,
    ) -> Result<(u64, Option<i64>)> {
        self.reap()?;
        let (which, number) = self.picked(pick)?;
        let remove = format!(
            "DELETE FROM message WHERE number IN (SELECT number FROM message WHERE {which} \
             AND (?3 OR token = 0 OR due <= ?1) AND number < ?4 ORDER BY number DESC LIMIT ?5) \
             RETURNING id, key, number"
        );
        let limit = if self.database.scarce.get() {
            FEW
        } else {
            MANY
        };
        let below = below.unwrap_or(i64::MAX);
        let of = params![self.now, number, force, below, limit];
        let gone: Vec<(Option<String>, Option<String>, i64)> = self.rows(&remove, of, |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        })?;
        for (id, key, _) in &gone {
            if let Some(id) = id {
                self.run("DELETE FROM seen WHERE id = ?1", params![id])?;
            }
            if let Some(key) = key {
                self.promote(key)?;
            }
        }
        let lowest = gone.iter().map(|(_, _, number)| *number).min();
        let rest = lowest.filter(|_| gone.len() == limit as usize);
        Ok((gone.len() as u64, rest))
    }
}

/// The columns that [`report`] reads; `?1` is now.
fn listed() -> String {
    format!(
        "SELECT number, id, key, {STATE}, attempts, pushed, due, token, owner, why, length(body) \
         FROM message"
    )
}

fn report(row: &Row<'_>, now: i64) -> rusqlite::Result<MessageReport> {
    let state = MessageState::of(&row.get::<_, String>(3)?);
    let due: i64 = row.get(6)?;
    let claimed = state == MessageState::Claimed;
    let token: i64 = row.get(7)?;
    let owner: Option<String> = row.get(8)?;
    Ok({
        let mut message =
            MessageReport::new(row.get(1)?, row.get::<_, i64>(0)?.unsigned_abs(), state);
        message.key = row.get(2)?;
        message.attempts = row.get(4)?;
        message.pushed = row.get::<_, i64>(5)?.unsigned_abs();
        message.changes_in = (due > now && due < NEVER).then(|| duration(due - now));
        message.sequence = claimed.then_some(token.unsigned_abs());
        message.owner = owner
            .filter(|_| claimed)
            .and_then(|owner| Owner::from_json(owner.as_bytes()));
        message.why = row.get(9)?;
        message.size = row.get::<_, i64>(10)?.unsigned_abs();
        message
    })
}
