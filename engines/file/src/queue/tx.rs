//! `Tx`: the operations of producers and consumers, in one transaction on a queue's database.
//!
//! The rules are those of `core::queue`. There is one writer at a time, so each operation is plain
//! reading and writing.

use std::time::Duration;

use rusqlite::{OptionalExtension, Row, params};

use super::database::{NEVER, Opened, damaged, failed};
use crate::liveness::{self, Hint, Peer};
use crate::store::Store;
use palisade_core::engine::{ClaimId, unix_time};
use palisade_core::queue::{
    DEDUPLICATED, Delivery, Draft, Pushed, Receipt, Settlement, Take, Taken,
};
use palisade_core::{Error, Result};

/// A sleeper that was registered longer ago has registered again since, or is gone.
const ASLEEP: i64 = 3_000_000;

/// How often dead consumers are looked for while there are enough messages.
const REAPED: i64 = 1_000_000;

/// The sleepers to wake after the commit.
#[derive(Default)]
pub(super) struct Hints(Vec<(u64, ClaimId)>);

impl Hints {
    pub(super) fn send(self, store: &Store) {
        for (process, sleeper) in self.0 {
            let hint = Hint::Look(sleeper);
            if process == store.process() {
                store.watcher.hand(hint);
            } else if let Peer::Alive(end) = liveness::open_to_wake(store.home().signs(), process) {
                liveness::send(&end, hint);
            }
        }
    }
}

/// One transaction on the database of a queue.
pub(super) struct Tx<'a> {
    store: &'a Store,
    pub(super) database: &'a Opened,
    operation: &'static str,
    pub(super) now: i64,
    /// The last number or token that was assigned.
    last: i64,
    assigned: bool,
    hints: Hints,
}

impl<'a> Tx<'a> {
    /// Creates it within a transaction that has begun.
    pub(super) fn new(
        store: &'a Store,
        database: &'a Opened,
        operation: &'static str,
    ) -> Result<Self> {
        let home = store.home();
        let now = home.tokens.clock(operation, &home.dir)?;
        let mut tx = Self {
            store,
            database,
            operation,
            now: i64::try_from(now).unwrap_or(i64::MAX),
            last: 0,
            assigned: false,
            hints: Hints::default(),
        };
        tx.last = tx.value("SELECT last FROM queue", [])?;
        Ok(tx)
    }

    pub(super) fn execute(&self, sql: &str) -> Result<()> {
        let done = self.database.connection.execute_batch(sql);
        done.map_err(|error| self.failed(&error))
    }

    /// Commits; returns the sleepers to wake.
    pub(super) fn commit(self) -> Result<Hints> {
        if self.assigned {
            self.run("UPDATE queue SET last = ?1", params![self.last])?;
        }
        self.execute("COMMIT").map_err(|error| {
            // A full disk rolls everything back; after any other failure the change may survive a
            // restart.
            let full = error.message().contains("full");
            if full { error } else { error.maybe_applied() }
        })?;
        Ok(self.hints)
    }

    fn failed(&self, error: &rusqlite::Error) -> Error {
        failed(self.operation, &self.database.path, error)
    }

    pub(super) fn run(&self, sql: &str, parameters: impl rusqlite::Params) -> Result<usize> {
        let statement = self.database.connection.prepare_cached(sql);
        let ran = statement.and_then(|mut statement| statement.execute(parameters));
        ran.map_err(|error| self.failed(&error))
    }

    pub(super) fn rows<T>(
        &self,
        sql: &str,
        parameters: impl rusqlite::Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>> {
        let ask = || {
            let mut statement = self.database.connection.prepare_cached(sql)?;
            let rows = statement.query_map(parameters, read)?;
            rows.collect::<rusqlite::Result<Vec<T>>>()
        };
        ask().map_err(|error| self.failed(&error))
    }

    pub(super) fn row<T>(
        &self,
        sql: &str,
        parameters: impl rusqlite::Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>> {
        let ask = || {
            let mut statement = self.database.connection.prepare_cached(sql)?;
            statement.query_row(parameters, read).optional()
        };
        ask().map_err(|error| self.failed(&error))
    }

    pub(super) fn value<T: rusqlite::types::FromSql>(
        &self,
        sql: &str,
        parameters: impl rusqlite::Params,
    ) -> Result<T> {
        let found = self.row(sql, parameters, |row| row.get(0))?;
        found.ok_or_else(|| damaged(self.operation, &self.database.path))
    }

    /// A number or token that was never assigned before, even in a transaction that a power failure
    /// rolled back.
    fn assign(&mut self) -> i64 {
        self.last = (self.last + 1).max(self.now);
        self.assigned = true;
        self.last
    }

    pub(super) fn push(&mut self, drafts: &[Draft]) -> Result<Vec<Pushed>> {
        let today = unix_time().as_millis() as i64;
        let (mut pushed, mut awake) = (Vec::with_capacity(drafts.len()), 0);
        for draft in drafts {
            let number = self.assign();
            if let Some(id) = &draft.id {
                let seen = "SELECT number FROM seen WHERE id = ?1 AND (until >= ?2 \
                            OR EXISTS (SELECT 1 FROM message m WHERE m.number = seen.number))";
                let seen: Option<i64> = self.row(seen, params![id, self.now], |row| row.get(0))?;
                if let Some(first) = seen {
                    pushed.push(Pushed::new(draft.id.clone(), first.unsigned_abs(), true));
                    continue;
                }
                let until = self.now + micros(DEDUPLICATED);
                let see = "INSERT OR REPLACE INTO seen VALUES (?1, ?2, ?3)";
                self.run(see, params![id, number, until])?;
            }
            let behind = match &draft.key {
                None => false,
                Some(key) => {
                    let other = "SELECT EXISTS (SELECT 1 FROM message WHERE key = ?1)";
                    self.value(other, params![key])?
                }
            };
            let after = self.now.saturating_add(micros(draft.delay));
            let due = if behind { NEVER } else { after };
            let add = "INSERT INTO message (number, due, behind, pushed, after, key, id, body) \
                       VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
            let Draft { key, id, body, .. } = draft;
            self.run(
                add,
                params![number, due, behind, today, after, key, id, body],
            )?;
            awake += usize::from(due <= self.now);
            pushed.push(Pushed::new(id.clone(), number.unsigned_abs(), false));
        }
        if pushed.iter().any(|pushed| !pushed.id.starts_with('@')) {
            let sweep = "DELETE FROM seen WHERE id IN (SELECT id FROM seen s WHERE until < ?1 \
                         AND NOT EXISTS (SELECT 1 FROM message m WHERE m.number = s.number) \
                         ORDER BY until LIMIT ?2)";
            self.run(sweep, params![self.now, 2 * pushed.len() as i64])?;
        }
        self.wake(awake)?;
        Ok(pushed)
    }

    /// Claims messages; also returns the processes whose death matters to a waiting consumer.
    pub(super) fn take(&mut self, take: &Take) -> Result<(Taken, Vec<u64>)> {
        let mut taken = Taken::default();
        if take.again {
            let again = "UPDATE message SET due = ?1 + ttl \
                         WHERE token > 0 AND due > ?1 AND batch = ?2 \
                         RETURNING number, id, key, token, attempts, body";
            let batch = take.batch.to_string();
            taken.messages = self.rows(again, params![self.now, batch], delivery)?;
            if !taken.messages.is_empty() {
                return Ok((taken, Vec::new()));
            }
        }
        self.claim(take, &mut taken)?;
        let mut processes = Vec::new();
        let late = self.now - self.database.reaped.get() > REAPED;
        if late || taken.messages.len() < take.count {
            let freed;
            (freed, processes) = self.reap()?;
            if freed > 0 {
                self.claim(take, &mut taken)?;
            }
        }
        taken.messages.sort_by_key(|message| message.number);
        if taken.messages.is_empty() && taken.next.is_none() {
            let next = "SELECT min(due) FROM message WHERE due > ?1 AND due < ?2";
            let next: Option<i64> = self.value(next, params![self.now, NEVER])?;
            taken.next = next.map(|due| duration(due - self.now));
            if let Some(sleeper) = take.sleeper {
                let asleep = "INSERT OR REPLACE INTO sleeper VALUES (?1, ?2, ?3)";
                let process = self.store.process().cast_signed();
                self.run(asleep, params![sleeper.to_string(), process, self.now])?;
            }
        }
        Ok((taken, processes))
    }

    fn claim(&mut self, take: &Take, taken: &mut Taken) -> Result<()> {
        let room = take.count - taken.messages.len();
        let due =
            "SELECT number, attempts FROM message WHERE due <= ?1 ORDER BY due, number LIMIT ?2";
        let due: Vec<(i64, u32)> = self.rows(due, params![self.now, room as i64], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?;
        let (process, batch) = (self.store.process().cast_signed(), take.batch.to_string());
        for (number, attempts) in due {
            if attempts >= take.attempts {
                let bury = "UPDATE message SET dead = 1, due = ?2, token = 0, batch = NULL, \
                            process = NULL, owner = NULL, \
                            why = coalesce(why || '; ', '') || 'its last consumer was lost' \
                            WHERE number = ?1";
                self.run(bury, params![number, NEVER])?;
                // There may be more messages behind it.
                taken.next = Some(Duration::ZERO);
                continue;
            }
            let token = self.assign();
            let claim = "UPDATE message SET due = ?2, token = ?3, ttl = ?4, attempts = attempts + 1, \
                         batch = ?5, process = ?6, boot = ?7, owner = ?8 WHERE number = ?1 \
                         RETURNING number, id, key, token, attempts, body";
            let ttl = micros(take.ttl);
            let until = self.now + ttl;
            let boot = self.database.boot;
            let of = params![number, until, token, ttl, batch, process, boot, take.owner];
            taken.messages.extend(self.row(claim, of, delivery)?);
        }
        Ok(())
    }

    /// Frees the messages of dead processes; returns how many, and the other processes with claims.
    pub(super) fn reap(&mut self) -> Result<(usize, Vec<u64>)> {
        self.database.reaped.set(self.now);
        let having = "SELECT DISTINCT process FROM message WHERE token > 0 AND due > ?1";
        let having: Vec<i64> = self.rows(having, params![self.now], |row| row.get(0))?;
        let mut freed = 0;
        let mut others: Vec<u64> = having.into_iter().map(i64::cast_unsigned).collect();
        others.retain(|process| *process != self.store.process());
        for process in std::mem::take(&mut others) {
            let peer = liveness::open_to_watch(self.store.home().signs(), process);
            if matches!(peer, Peer::Dead) {
                let free =
                    "UPDATE message SET due = ?2 WHERE token > 0 AND process = ?1 AND due > ?2";
                freed += self.run(free, params![process.cast_signed(), self.now])?;
            } else {
                others.push(process);
            }
        }
        Ok((freed, others))
    }

    /// The ttl of each claim that was renewed.
    pub(super) fn renew(&mut self, receipts: &[Receipt]) -> Result<Vec<Option<Duration>>> {
        let renew = "UPDATE message SET due = ?3 + ttl \
                     WHERE number = ?1 AND token = ?2 AND due > ?3 RETURNING ttl";
        let renew = |receipt: &Receipt| {
            let (number, token) = names(receipt);
            let ttl = self.row(renew, params![number, token, self.now], |row| row.get(0))?;
            Ok(ttl.map(duration))
        };
        receipts.iter().map(renew).collect()
    }

    pub(super) fn extend(&mut self, receipt: Receipt, ttl: Duration) -> Result<bool> {
        let (number, token) = names(&receipt);
        let extend = "UPDATE message SET ttl = ?4, due = max(due, ?3 + ?4) \
                      WHERE number = ?1 AND token = ?2 AND due > ?3";
        let extended = self.run(extend, params![number, token, self.now, micros(ttl)])?;
        Ok(extended > 0)
    }

    pub(super) fn done(&mut self, receipts: &[Receipt]) -> Result<Vec<bool>> {
        let mut done = Vec::with_capacity(receipts.len());
        for receipt in receipts {
            let (number, token) = names(receipt);
            let remove = "DELETE FROM message WHERE number = ?1 AND token = ?2 RETURNING key";
            let gone: Option<Option<String>> =
                self.row(remove, params![number, token], |row| row.get(0))?;
            done.push(gone.is_some());
            if let Some(Some(key)) = gone {
                self.promote(&key)?;
            }
        }
        Ok(done)
    }

    /// Makes the next message of a key the first.
    pub(super) fn promote(&mut self, key: &str) -> Result<()> {
        let next = "UPDATE message SET behind = 0, due = max(after, ?2) WHERE behind AND number = \
                    (SELECT min(number) FROM message WHERE key = ?1) RETURNING due";
        let due: Option<i64> = self.row(next, params![key, self.now], |row| row.get(0))?;
        self.wake(usize::from(due.is_some_and(|due| due <= self.now)))
    }

    /// Ends claims whose messages stay in the queue.
    pub(super) fn put_back(&mut self, receipts: &[Receipt], how: &Settlement) -> Result<Vec<bool>> {
        // When it is due; if it was not tried, the time that its sender set.
        let (due, dead, untried, why) = match how {
            Settlement::Retry { after, why } => (Some(self.now + micros(*after)), false, 0, why),
            Settlement::Dead { why } => (Some(NEVER), true, 0, why),
            Settlement::Release | Settlement::Done => (None, false, 1, &String::new()),
        };
        let why = Some(why).filter(|why| !why.is_empty());
        let mut back = Vec::with_capacity(receipts.len());
        for receipt in receipts {
            let (number, token) = names(receipt);
            let put = "UPDATE message SET token = 0, batch = NULL, process = NULL, owner = NULL, \
                       due = coalesce(?3, after), dead = ?4, attempts = attempts - ?5, \
                       why = coalesce(?6, why) WHERE number = ?1 AND token = ?2";
            let put = self.run(put, params![number, token, due, dead, untried, why])?;
            back.push(put > 0);
        }
        if due.is_none_or(|due| due <= self.now) {
            self.wake(back.iter().filter(|back| **back).count())?;
        }
        Ok(back)
    }

    /// Returns the messages of a claim that was given up.
    pub(super) fn leave(&mut self, batch: ClaimId) -> Result<usize> {
        let leave = "UPDATE message SET token = 0, batch = NULL, process = NULL, owner = NULL, \
                     due = after, attempts = attempts - 1 WHERE token > 0 AND batch = ?1";
        let left = self.run(leave, params![batch.to_string()])?;
        self.wake(left)?;
        Ok(left)
    }

    /// Wakes as many sleepers as there are messages, those that fell asleep last first.
    pub(super) fn wake(&mut self, count: usize) -> Result<()> {
        let mut woken = 0;
        while woken < count {
            let last = "DELETE FROM sleeper WHERE id = \
                        (SELECT id FROM sleeper ORDER BY since DESC LIMIT 1) \
                        RETURNING id, process, since";
            let last: Option<(String, i64, i64)> =
                self.row(last, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
            let Some((id, process, since)) = last else {
                return Ok(());
            };
            let (Ok(id), process) = (id.parse(), process.cast_unsigned()) else {
                continue;
            };
            let signs = self.store.home().signs();
            let alive = process == self.store.process()
                || matches!(liveness::open_to_watch(signs, process), Peer::Alive(_));
            if alive && self.now - since < ASLEEP {
                self.hints.0.push((process, id));
                woken += 1;
            }
        }
        Ok(())
    }
}

fn delivery(row: &Row<'_>) -> rusqlite::Result<Delivery> {
    Ok(Delivery {
        number: row.get::<_, i64>(0)?.unsigned_abs(),
        id: row.get(1)?,
        key: row.get(2)?,
        sequence: row.get::<_, i64>(3)?.unsigned_abs(),
        attempt: row.get(4)?,
        body: row.get(5)?,
    })
}

/// Number and token, as the database stores them.
fn names(receipt: &Receipt) -> (i64, i64) {
    (receipt.number.cast_signed(), receipt.sequence.cast_signed())
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(NEVER / 4)
}

pub(super) fn duration(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0).unsigned_abs())
}
