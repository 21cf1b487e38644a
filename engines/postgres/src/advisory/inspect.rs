//! Holders of advisory locks: from `pg_locks`, the sessions' `application_name`, and the owner
//! records. The claims of this client are reported from memory.

use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::super::error::{failed, unreadable};
use super::super::inspect::{Subject, examine};
use super::super::pooler::Between;
use super::claim::LocalClaim;
use super::owner_record;
use super::registry::Registry;
use super::session::NAMELESS;
use palisade_core::engine::{Ask, BoxStream, ClaimId};
use palisade_core::report::{Checkup, ClaimReport, LineReport, Owner, Scope};
use palisade_core::{BootTime, Error, ErrorKind, Name, Result};
use palisade_kit::poll_watch::poll_watch;
use palisade_kit::timed;

/// The locks of this database. `$1` is the key of one line, or null; `$2` the namespace; `$3` the
/// prefix of names.
const HELD: &str = "SELECT l.pid, l.mode, a.application_name, s.claim, s.name, s.owner, s.value, s.ttl \
    FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid \
    LEFT JOIN @schema@.session s ON s.pid = l.pid \
      AND starts_with(a.application_name, 'palisade ' || s.claim) \
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted \
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
      AND CASE WHEN $1 IS NULL THEN s.namespace = $2::text AND starts_with(s.name, $3::text) \
            OR s.claim IS NULL AND a.application_name = 'palisade' \
          ELSE (l.classid::bigint << 32 | l.objid::bigint) = @key@ END";

/// How often to poll for the owner record of another client, and how long to wait for it: long
/// enough for a client that gets little CPU. Only a stopped process takes longer.
const RECORDED: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(1);

/// How often a watch polls.
const POLL: Duration = Duration::from_millis(100);

/// A lock that is held.
struct Held {
    pid: i32,
    shared: bool,
    /// The `application_name` of the session.
    called: String,
    /// Whether it has an owner record.
    recorded: bool,
    name: Option<String>,
    owner: Option<Owner>,
    value: Option<String>,
}

impl Held {
    fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        let owner: Option<&str> = row.try_get(5)?;
        Ok(Self {
            pid: row.try_get(0)?,
            shared: row.try_get::<_, &str>(1)? == "ShareLock",
            called: row.try_get::<_, Option<String>>(2)?.unwrap_or_default(),
            recorded: row.try_get::<_, Option<&str>>(3)?.is_some(),
            name: row.try_get(4)?,
            owner: owner.and_then(|owner| Owner::from_json(owner.as_bytes())),
            value: row.try_get(6)?,
        })
    }

    /// Whether it is a session of palisade without an owner record yet.
    fn is_fresh(&self) -> bool {
        let rest = self.called.strip_prefix(NAMELESS);
        let ours = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '));
        ours && !self.recorded
    }

    /// The claim and its token, as in the `application_name` of a palisade session.
    fn said(&self) -> Option<(ClaimId, u64)> {
        let (claim, sequence) = self.called.strip_prefix("palisade ")?.split_once(' ')?;
        Some((claim.parse().ok()?, sequence.parse().ok()?))
    }

    fn report(self, ours: Option<&LocalClaim>) -> ClaimReport {
        let said = self.said();
        let mut report = {
            let mut claim = ClaimReport::new(
                said.map_or_else(|| format!("backend-{}", self.pid), |(id, _)| id.to_string()),
                if self.shared { Ask::READ } else { Ask::Whole },
            );
            claim.owner = self.owner;
            claim.value = self.value;
            claim.sequence = said.map(|(_, sequence)| sequence);
            claim
        };
        if let Some(local) = ours {
            let state = local.state.lock();
            report.id = local.claim.id.to_string();
            report.owner = Some(local.claim.owner.clone());
            report.value = state.value.clone();
            report.sequence = Some(local.sequence());
            report.evicted = state.evicted;
        }
        report
    }
}

/// The claim of this client whose session is served by process `pid`.
fn ours(holders: &[Arc<LocalClaim>], pid: i32) -> Option<&LocalClaim> {
    let has = |local: &&Arc<LocalClaim>| local.session().is_some_and(|own| own.pid == pid);
    holders.iter().find(has).map(|local| &**local)
}

pub(super) async fn survey(registry: &Registry, scope: &Scope) -> Result<Vec<LineReport>> {
    let held = recorded(registry, scope).await?;
    let holders = registry.holders();
    let mut lines: Vec<LineReport> = Vec::new();
    for mut lock in held {
        let name = match scope {
            Scope::Line(name) => Some(name.to_string()),
            Scope::Prefix(_) => lock.name.take(),
        };
        // Without an owner record the name of the lock is unknown.
        let Some(name) = name else { continue };
        let at = lines.iter().position(|line| line.name == name);
        let at = at.unwrap_or_else(|| {
            lines.push(LineReport::empty(name));
            lines.len() - 1
        });
        let pid = lock.pid;
        let claim = lock.report(ours(&holders, pid));
        if let Ask::Part { capacity, .. } = claim.ask {
            lines[at].capacity = Some(capacity);
        }
        lines[at].holders.push(claim);
    }
    lines.sort_by(|a, b| a.name.cmp(&b.name));
    for line in &mut lines {
        line.holders.sort_by_key(|claim| claim.sequence);
    }
    Ok(lines)
}

/// The locks, after other clients have written the owner records of earlier grants.
async fn recorded(registry: &Registry, scope: &Scope) -> Result<Vec<Held>> {
    let mut held = look(registry, scope).await?;
    let end = BootTime::now() + PATIENCE;
    let holders = registry.holders();
    let fresh = |lock: &&Held| lock.is_fresh() && ours(&holders, lock.pid).is_none();
    // Later grants are left to the next survey.
    let first: Vec<i32> = held.iter().filter(fresh).map(|lock| lock.pid).collect();
    while held
        .iter()
        .any(|lock| fresh(&lock) && first.contains(&lock.pid))
        && !end.has_passed()
    {
        tokio::time::sleep(RECORDED).await;
        held = look(registry, scope).await?;
    }
    Ok(held)
}

async fn look(registry: &Registry, scope: &Scope) -> Result<Vec<Held>> {
    let (key, prefix) = match scope {
        Scope::Line(name) => (Some(registry.keys.of(name)?), ""),
        Scope::Prefix(prefix) => {
            // The query finds names by owner records, so ours are written first.
            for local in registry.holders() {
                let recorded = owner_record::record(registry, &local);
                let _ = timed("survey", registry.timeout, recorded).await;
            }
            (None, prefix.as_str())
        }
    };
    let (expression, kind) = registry.keys.sql();
    let sql = HELD
        .replace("@schema@", &registry.schema.quoted())
        .replace("@key@", expression);
    let shared = registry.shared().await?;
    let key: &(dyn ToSql + Sync) = match &key {
        Some(key) => key.sql(),
        None if kind == Type::INT8 => &None::<i64>,
        None => &None::<String>,
    };
    let parameters = [
        (key, kind),
        (&registry.namespace, Type::TEXT),
        (&prefix, Type::TEXT),
    ];
    let client = shared.connection.connection.here();
    let asked = client.query_typed(&sql, &parameters);
    let rows = registry
        .answer("survey", registry.timeout, &shared, asked)
        .await?;
    let held: Result<Vec<Held>, _> = rows.iter().map(Held::read).collect();
    held.or_else(|_| unreadable("survey"))
}

pub(super) fn watch(registry: &Arc<Registry>, scope: &Scope) -> BoxStream<Result<()>> {
    let (registry, scope) = (Arc::clone(registry), scope.clone());
    poll_watch(POLL, move || {
        let (registry, scope) = (Arc::clone(&registry), scope.clone());
        async move {
            let grants = grants(&registry).await?;
            Ok((grants, survey(&registry, &scope).await?))
        }
    })
}

/// Increases with every grant, so that a lock taken and released between two polls is noticed.
async fn grants(registry: &Registry) -> Result<i64> {
    let schema = registry.schema.quoted();
    let sql = format!("SELECT last_value + is_called::int FROM {schema}.token");
    let shared = registry.shared().await?;
    let asked = shared.connection.connection.here().query_one(&sql, &[]);
    let row = registry
        .answer("watch", registry.timeout, &shared, asked)
        .await?;
    row.try_get(0).map_err(|error| failed("watch", &error))
}

/// The process that holds the lock `name` for the claim that a survey shows as `id`.
pub(super) async fn process_of(
    registry: &Registry,
    name: &Name,
    id: &str,
    claim: Option<ClaimId>,
) -> Result<Option<i32>> {
    let held = recorded(registry, &Scope::Line(name.clone())).await?;
    let victim = held.iter().find(|lock| match lock.said() {
        Some((said, _)) => Some(said) == claim,
        None => id == format!("backend-{}", lock.pid),
    });
    Ok(victim.map(|lock| lock.pid))
}

/// Waits until a session that was told to end has released the lock.
pub(super) async fn until_gone(registry: &Registry, name: &Name, pid: i32) -> Result<()> {
    let end = BootTime::now() + registry.timeout;
    let scope = Scope::Line(name.clone());
    while look(registry, &scope)
        .await?
        .iter()
        .any(|lock| lock.pid == pid)
    {
        if end.has_passed() {
            let message = "the session does not end; does something hold its backend up?";
            return Err(Error::new(ErrorKind::Unreachable, "evict", message).maybe_applied());
        }
        tokio::time::sleep(RECORDED / 4).await;
    }
    Ok(())
}

pub(super) async fn check(registry: &Registry) -> Result<Checkup> {
    let shared = registry.shared().await?;
    let subject = Subject {
        server: &registry.server,
        schema: &registry.schema,
        between: Between::Nothing,
        table: false,
        pushes: true,
        oldest: (
            140_000,
            "a client that is stopped, and not gone, keeps its lock",
        ),
        timeout: registry.timeout,
    };
    examine(shared.connection.connection.here(), &subject).await
}
