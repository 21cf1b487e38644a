//! Who holds advisory locks: from the server's own list of locks, with what sessions say of
//! themselves (`application_name`) and what the scribe wrote down. Our own are shown from memory.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::super::check;
use super::super::pooler::Between;
use super::hall::failed;
use super::statement::NAMELESS;
use super::verbs::Locks;
use crate::core::claim::{Ask, ClaimId};
use crate::core::clock::BootTime;
use crate::core::engine::Eviction;
use crate::core::error::{Error, Kind, Result};
use crate::core::name::Name;
use crate::core::owner::Owner;
use crate::core::report::{Checkup, ClaimReport, LineReport, Scope};
use crate::engines::remote::timed;

/// The locks of this database: `$1` is the key of one line, or null; `$2` the namespace and `$3`
/// the beginning of names.
const HELD: &str = "SELECT l.pid, l.mode, a.application_name, s.claim, s.name, s.owner, s.value, s.ttl \
    FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid \
    LEFT JOIN @schema@.session s ON s.pid = l.pid \
      AND starts_with(a.application_name, 'palisade ' || s.claim) \
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted \
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
      AND CASE WHEN $1 IS NULL THEN s.namespace = $2::text AND starts_with(s.name, $3::text) \
            OR s.claim IS NULL AND a.application_name = 'palisade' \
          ELSE (l.classid::bigint << 32 | l.objid::bigint) = @key@ END";

/// How often to look whether the scribe of another client is done, and how long one may take that
/// has little of the processor; longer only if its process is stopped.
const SCRIBE: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(1);

impl Locks {
    pub(super) async fn survey(&self, scope: &Scope) -> Result<Vec<LineReport>> {
        let rows = self.rows(scope).await?;
        let mut lines: Vec<LineReport> = Vec::new();
        for row in &rows {
            let shown = self.shown(row, scope);
            let Ok((name, claim)) = shown else {
                return super::super::fault::unreadable("survey");
            };
            // Nobody has written down what it is about.
            if name.is_empty() {
                continue;
            }
            let at = lines.iter().position(|line| line.name == name);
            let at = at.unwrap_or_else(|| {
                lines.push(LineReport {
                    name,
                    capacity: None,
                    holders: Vec::new(),
                    waiters: Vec::new(),
                });
                lines.len() - 1
            });
            let line = &mut lines[at];
            if let Ask::Part { capacity, .. } = claim.ask {
                line.capacity = Some(capacity);
            }
            line.holders.push(claim);
        }
        lines.sort_by(|a, b| a.name.cmp(&b.name));
        for line in &mut lines {
            line.holders.sort_by_key(|claim| claim.sequence);
        }
        Ok(lines)
    }

    /// The rows, once the scribes of others have written down what was granted before.
    async fn rows(&self, scope: &Scope) -> Result<Vec<Row>> {
        let mut rows = self.look(scope).await?;
        let end = BootTime::now() + PATIENCE;
        let fresh = |row: &Row| {
            let shown: Option<&str> = row.try_get(2).ok();
            let written: Option<&str> = row.try_get(3).ok().flatten();
            let pid: i32 = row.try_get(0).ok()?;
            let ours = self.chair_at(pid).is_some();
            (!ours && written.is_none() && shown.is_some_and(is_ours)).then_some(pid)
        };
        // What is granted meanwhile is news for the next survey.
        let first: Vec<i32> = rows.iter().filter_map(fresh).collect();
        let still = |row: &Row| fresh(row).is_some_and(|pid| first.contains(&pid));
        while rows.iter().any(still) && !end.has_passed() {
            tokio::time::sleep(SCRIBE).await;
            rows = self.look(scope).await?;
        }
        Ok(rows)
    }

    async fn look(&self, scope: &Scope) -> Result<Vec<Row>> {
        let hall = &self.hall;
        let (key, prefix) = match scope {
            Scope::Line(name) => (Some(hall.keys.of(name)?), ""),
            Scope::Prefix(prefix) => {
                // Ours are written down before they are looked for by name.
                for chair in hall.holders() {
                    let _ = timed("survey", hall.timeout, self.scribe.record(&chair, hall)).await;
                }
                (None, prefix.as_str())
            }
        };
        let (expression, kind) = hall.keys.sql();
        let sql = HELD
            .replace("@schema@", &hall.schema.quoted())
            .replace("@key@", expression);
        let desk = hall.desk().await?;
        let key: &(dyn ToSql + Sync) = match &key {
            Some(key) => key.sql(),
            None if kind == Type::INT8 => &None::<i64>,
            None => &None::<String>,
        };
        let parameters = [
            (key, kind),
            (&hall.namespace, Type::TEXT),
            (&prefix, Type::TEXT),
        ];
        let asked = desk.connection.here().query_typed(&sql, &parameters);
        hall.answer("survey", hall.timeout, &desk, asked).await
    }

    /// Grows with every grant, so that what came and went between two looks can be told.
    pub(super) async fn grants(&self) -> Result<i64> {
        let hall = &self.hall;
        let sequence = format!("{}.token", hall.schema.quoted());
        let sql = format!("SELECT last_value + is_called::int FROM {sequence}");
        let desk = hall.desk().await?;
        let asked = desk.connection.here().query_one(&sql, &[]);
        let row = hall.answer("watch", hall.timeout, &desk, asked).await?;
        row.try_get(0).map_err(|error| failed("watch", &error))
    }

    fn chair_at(&self, pid: i32) -> Option<std::sync::Arc<super::chair::Chair>> {
        let chairs = self.hall.holders();
        chairs.into_iter().find(|chair| chair.pid() == Some(pid))
    }

    fn shown(
        &self,
        row: &Row,
        scope: &Scope,
    ) -> std::result::Result<(String, ClaimReport), tokio_postgres::Error> {
        let pid: i32 = row.try_get(0)?;
        let mode: &str = row.try_get(1)?;
        let ask = match mode {
            "ShareLock" => Ask::READ,
            _ => Ask::Whole,
        };
        let asked = match scope {
            Scope::Line(name) => name.to_string(),
            Scope::Prefix(_) => row.try_get::<_, Option<String>>(4)?.unwrap_or_default(),
        };
        if let Some(chair) = self.chair_at(pid) {
            let claim = &chair.claim;
            return Ok((
                asked,
                ClaimReport {
                    id: claim.id.to_string(),
                    owner: Some(claim.owner.clone()),
                    ask,
                    value: chair.value.lock().clone(),
                    sequence: Some(chair.sequence()),
                    expires_in: None,
                    evicted: chair.is_marked(),
                },
            ));
        }
        let words: Option<&str> = row.try_get(2)?;
        let said = said(words.unwrap_or_default());
        let owner: Option<&str> = row.try_get(5)?;
        Ok((
            asked,
            ClaimReport {
                id: said.map_or_else(|| format!("backend-{pid}"), |(claim, _)| claim.to_string()),
                owner: owner.and_then(|owner| Owner::from_json(owner.as_bytes())),
                ask,
                value: row.try_get(6)?,
                sequence: said.map(|(_, sequence)| sequence),
                expires_in: None,
                evicted: false,
            },
        ))
    }

    /// Takes a lock away: ours by ourselves, another's by telling its session or ending it.
    pub(super) async fn evict(&self, name: &Name, id: &str, eviction: Eviction) -> Result<bool> {
        let hall = &self.hall;
        let claim = id.parse::<ClaimId>().ok();
        if let Some(chair) = claim.and_then(|claim| hall.chair(claim)) {
            if chair.claim.name != *name {
                return Ok(false);
            }
            match eviction {
                Eviction::Mark => chair.mark(),
                Eviction::Remove => {
                    hall.unseat(chair.claim.id, 0);
                    self.take_away(&chair).await;
                }
            }
            hall.alarm(chair.claim.id);
            return Ok(true);
        }
        let rows = self.rows(&Scope::Line(name.clone())).await?;
        let victim = rows.iter().find_map(|row| {
            let pid: i32 = row.try_get(0).ok()?;
            let words: Option<&str> = row.try_get(2).ok()?;
            let same = match said(words?) {
                Some((said, _)) => Some(said) == claim,
                None => id == format!("backend-{pid}"),
            };
            same.then_some(pid)
        });
        let Some(pid) = victim else { return Ok(false) };
        let sql = match eviction {
            Eviction::Mark => format!("NOTIFY palisade_pid_{pid}, 'e{id}'"),
            Eviction::Remove => format!("SELECT pg_terminate_backend({pid})"),
        };
        let desk = hall.desk().await?;
        let asked = desk.connection.here().batch_execute(&sql);
        hall.answer("evict", hall.timeout, &desk, asked).await?;
        if eviction == Eviction::Remove {
            self.until_gone(name, pid).await?;
        }
        Ok(true)
    }

    pub(super) async fn check(&self) -> Result<Checkup> {
        let hall = &self.hall;
        let desk = hall.desk().await?;
        let subject = check::Subject {
            server: &hall.server,
            schema: &hall.schema,
            between: Between::Nothing,
            table: false,
            pushes: true,
            oldest: (
                140_000,
                "a client that is stopped, and not gone, keeps its lock",
            ),
            timeout: hall.timeout,
        };
        let examined = check::examine(desk.connection.here(), &subject);
        timed("check", hall.timeout, examined).await?
    }

    /// Waits until a session that was told to end has let go.
    async fn until_gone(&self, name: &Name, pid: i32) -> Result<()> {
        let end = BootTime::now() + self.hall.timeout;
        loop {
            let rows = self.look(&Scope::Line(name.clone())).await?;
            if !rows
                .iter()
                .any(|row| row.try_get(0).is_ok_and(|at: i32| at == pid))
            {
                return Ok(());
            }
            if end.has_passed() {
                let message = "the session does not end; does something hold its backend up?";
                return Err(Error::new(Kind::Unreachable, "evict", message).maybe_applied());
            }
            tokio::time::sleep(SCRIBE / 4).await;
        }
    }

    async fn take_away(&self, chair: &super::chair::Chair) {
        use crate::core::engine::Place;
        match (chair.stands(), chair.own()) {
            (Place::Waiting, _) | (_, None) => self.stop_waiting(chair).await,
            (_, Some(own)) => {
                let unlocked = own.give(chair.unlock(), &chair.key);
                let _ = timed("evict", self.hall.timeout, unlocked).await;
                chair.moved(Place::Gone);
            }
        }
    }
}

/// Whether a session's name says that it is one of palisade's.
fn is_ours(name: &str) -> bool {
    let rest = name.strip_prefix(NAMELESS);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
}

/// The claim and its count, as a session of palisade says them in its name.
fn said(name: &str) -> Option<(ClaimId, u64)> {
    let (claim, sequence) = name.strip_prefix("palisade ")?.split_once(' ')?;
    Some((claim.parse().ok()?, sequence.parse().ok()?))
}
