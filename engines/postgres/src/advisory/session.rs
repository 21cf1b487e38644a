//! `Session`: one connection that belongs to one claim at a time, and its statements.
//!
//! The lock belongs to the session, so the session is the lease: the server ends it when it is idle
//! for the claim's ttl (`idle_session_timeout`), and every statement restarts that timer. Servers
//! before PostgreSQL 14 lack the setting; there the kernel drops a silent client within 15 s. A
//! connection with an unknown outcome is dropped, which releases the lock.
//!
//! Invariant: a token is taken after the lock, in the same statement. Every statement names the
//! process that it is for and does nothing in another one, so that no lock, setting or record is
//! left in a session that something in between assigned to us by mistake. Frequent statements do
//! nothing extra, because one more setting or parameter costs more than the lock itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error as SqlError, Row};

use super::super::connect::Server;
use super::super::connection::{Connection, Listener};
use super::super::error::{self, STANDBY};
use super::super::pooler::{announced, no_session_locks};
use super::super::schema::first_cell;
use super::super::statements::{Parameters, Prepared, plan_by_index};
use super::keys::Key;
use palisade_core::engine::no_connection;
use palisade_core::{BootTime, Result};

/// How long the runtime that drives a connection may take to respond: far more than one needs that
/// is not blocked, far less than heartbeats can spare.
const AFAR: Duration = Duration::from_millis(20);

/// A session of palisade.
pub(super) struct Session {
    pub(super) connection: Connection,
    pub(super) pid: i32,
    blanks: Arc<Blanks>,
    prepared: Prepared<STATEMENTS>,
    /// The server's timeline when the session began; another one means another server, or a
    /// failover.
    timeline: String,
    /// The setting that ends idle sessions; before PostgreSQL 14 a custom one without effect.
    idle: &'static str,
    /// The idle timeout of the session in milliseconds; 0 is none.
    idle_limit: AtomicU64,
    /// Whether the `application_name` may contain a claim.
    named: AtomicBool,
    /// Serializes the recording of a claim and the release of its lock, so that no session keeps
    /// the name of a claim that has left it.
    pub(super) naming: tokio::sync::Mutex<()>,
}

/// The result of a heartbeat.
pub(super) enum Beat {
    Alive,
    /// The server is a standby, or is on another timeline than the lock.
    Moved,
    /// Another session answered than the one with the lock.
    Away,
}

/// The result of an attempt to take a lock.
pub(super) enum Taken {
    Token(u64),
    Busy,
    /// Another session answered than the one that was asked; it did nothing.
    Away,
}

impl Session {
    /// Connects, and verifies that the session is ours alone before anything is set in it.
    ///
    /// Two checks prove it. The serving process is the one that was announced, whereas a pooler
    /// makes one up. And the session has a random setting from the startup packet, which poolers
    /// refuse, drop, or pass on to no existing session. With `trusted` there are no checks, because
    /// the user declared that sessions are not shared.
    ///
    /// # Errors
    /// As connecting; [`ErrorKind::Unsupported`](palisade_core::ErrorKind::Unsupported) behind a pooler; what the server refuses.
    pub(super) async fn connect(
        server: &Server,
        blanks: &Arc<Blanks>,
        trusted: bool,
        listener: Listener,
    ) -> Result<Self> {
        let proof = format!("{:032x}", rand::random::<u128>());
        let options = format!("-c palisade.session={proof}");
        let options = (!trusted).then_some(options.as_str());
        let connection = server.connect(options, listener).await?;
        let client = &connection.client;
        let look = "SELECT pg_backend_pid() || ' ' || current_setting('server_version_num') || ' ' \
             || coalesce(current_setting('palisade.session', true), '') || ' ' || ";
        let failed = |error: SqlError| error::failed("connect", &error);
        let rows = client.simple_query(&format!("{look}{TIMELINE}")).await;
        let rows = rows.map_err(failed)?;
        let mut words = first_cell(&rows).unwrap_or_default().splitn(4, ' ');
        let mut word = || words.next().unwrap_or_default();
        let (Ok(pid), Ok(version)) = (word().parse::<i32>(), word().parse::<u32>()) else {
            return error::unreadable("connect");
        };
        let proven = word() == proof && announced(client) == Some(pid);
        if !proven && !trusted {
            return Err(no_session_locks("connect"));
        }
        let timeline = word().to_owned();
        if timeline.is_empty() {
            return Err(no_connection(STANDBY));
        }
        // 6 s of silence, then a probe every 2 s: a silent client is dropped after 12 to 14 s.
        // `synchronous_commit`, because a token that was returned must survive a crash of the
        // server.
        let mut setup = format!(
            "{} SET statement_timeout = 0; SET lock_timeout = 0; \
             SET tcp_keepalives_idle = 6; SET tcp_keepalives_interval = 2; \
             SET tcp_keepalives_count = 3; SET tcp_user_timeout = 12000; \
             SELECT set_config('synchronous_commit', 'on', false) \
             WHERE current_setting('synchronous_commit') = 'off'; \
             LISTEN palisade_pid_{pid}",
            plan_by_index()
        );
        let mut idle = "palisade.idle";
        if version >= 140_000 {
            idle = "idle_session_timeout";
            // While a statement waits for the lock, the server checks whether the client is still
            // connected.
            setup.push_str("; SET client_connection_check_interval = 2000");
        }
        client.batch_execute(&setup).await.map_err(failed)?;
        Ok(Self {
            connection,
            pid,
            blanks: Arc::clone(blanks),
            prepared: Prepared::default(),
            timeline,
            idle,
            idle_limit: AtomicU64::new(0),
            named: AtomicBool::new(false),
            naming: tokio::sync::Mutex::default(),
        })
    }

    /// Whether its connection has ended.
    pub(super) fn is_over(&self) -> bool {
        self.connection.client.is_closed()
    }

    async fn ask(
        &self,
        statement: impl Into<Statement>,
        parameters: Parameters<'_>,
    ) -> Result<Vec<Row>, SqlError> {
        self.send(self.connection.here(), statement.into(), parameters)
            .await
    }

    /// Sends a statement without taking the connection over, because every move costs its user
    /// time. It takes over only if the runtime that drives the connection does not respond in time.
    async fn ask_from_afar(
        &self,
        verb: Verb,
        parameters: Parameters<'_>,
    ) -> Result<Vec<Row>, SqlError> {
        let client = &self.connection.client;
        let mut asked = std::pin::pin!(self.send(client, verb.into(), parameters));
        if let Ok(answer) = tokio::time::timeout(AFAR, &mut asked).await {
            return answer;
        }
        self.connection.here();
        asked.await
    }

    async fn send(
        &self,
        client: &Client,
        statement: Statement,
        parameters: Parameters<'_>,
    ) -> Result<Vec<Row>, SqlError> {
        let at = statement.index();
        let statement = match self.prepared.get(at) {
            Some(statement) => statement,
            None => {
                let (sql, types) = self.blanks.fill(statement, self.idle, self.pid);
                self.prepared.prepare(client, at, &sql, &types).await?
            }
        };
        client.query(statement, parameters).await
    }

    /// Takes the lock `key`, or waits for it. The result is `Busy` also if the timeline has changed
    /// meanwhile.
    pub(super) async fn take(
        &self,
        mut statement: Statement,
        key: &Key,
        ttl: Duration,
    ) -> Result<Taken, SqlError> {
        let millis = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let waits = statement.verb == Verb::Block;
        statement.setting = self.idle_limit.load(Ordering::Relaxed) != millis;
        let rows = if statement.setting || waits {
            let limit = millis.to_string();
            self.ask(statement, &[key.sql(), &limit]).await?
        } else {
            self.ask(statement, &[key.sql()]).await?
        };
        let Some(row) = rows.first() else {
            return Ok(Taken::Busy);
        };
        let token: Option<i64> = row.try_get(0)?;
        if token == Some(AWAY) {
            return Ok(Taken::Away);
        }
        self.idle_limit.store(millis, Ordering::Relaxed);
        if waits && row.try_get::<_, &str>(2)? != self.timeline {
            return Ok(Taken::Busy);
        }
        Ok(token.map_or(Taken::Busy, |token| Taken::Token(token.unsigned_abs())))
    }

    /// Releases the lock `key` and resets the session's name; `false` when the session did not have
    /// the lock, `None` when another session answered.
    pub(super) async fn give(
        &self,
        mut statement: Statement,
        key: &Key,
    ) -> Result<Option<bool>, SqlError> {
        let _naming = self.naming.lock().await;
        statement.setting = self.named.load(Ordering::Relaxed);
        let answer = self.whether(statement, key).await?;
        self.named.store(false, Ordering::Relaxed);
        Ok(answer)
    }

    /// Runs a statement that returns a boolean; `None` when another session answered.
    pub(super) async fn whether(
        &self,
        statement: impl Into<Statement>,
        key: &Key,
    ) -> Result<Option<bool>, SqlError> {
        let rows = self.ask(statement, &[key.sql()]).await?;
        rows.first().map_or(Ok(None), |row| row.try_get(0))
    }

    /// Writes the owner record and sets the session's name. The caller holds [`Session::naming`].
    pub(super) async fn record(&self, record: Parameters<'_>) -> Result<(), SqlError> {
        self.named.store(true, Ordering::Relaxed);
        self.ask_from_afar(Verb::Record, record).await.map(drop)
    }

    /// When a session that has been idle since `since` must no longer be used, because the server
    /// may end it.
    pub(super) fn usable_until(&self, since: BootTime) -> BootTime {
        match self.idle_limit.load(Ordering::Relaxed) {
            0 => BootTime::NEVER,
            millis => since + Duration::from_millis(millis) / 2,
        }
    }

    /// Turns off the idle timeout.
    pub(super) async fn rest(&self) -> Result<(), SqlError> {
        self.ask(Verb::Rest, &[]).await?;
        self.idle_limit.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Which of these sessions wait for a lock.
    pub(super) async fn waiting(&self, pids: &[i32]) -> Result<Vec<i32>, SqlError> {
        let rows = self.ask(Verb::Waits, &[&pids]).await?;
        rows.iter().map(|row| row.try_get(0)).collect()
    }

    /// Restarts the session's idle timer.
    pub(super) async fn beat(&self) -> Result<Beat, SqlError> {
        let rows = self.ask_from_afar(Verb::Beat, &[]).await?;
        let timeline: Option<&str> = rows.first().map_or(Ok(None), |row| row.try_get(0))?;
        Ok(match timeline {
            Some(timeline) if timeline == self.timeline => Beat::Alive,
            Some(_) => Beat::Moved,
            None => Beat::Away,
        })
    }
}

/// The requests on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Try,
    /// Waits for the lock. It also sets the idle timeout, and returns the timeline, because there
    /// may have been a failover during the wait.
    Block,
    Unlock,
    Downgrade,
    Upgrade,
    Beat,
    Record,
    Rest,
    Waits,
}

/// A statement: its verb, whether the lock is shared or exclusive, and whether it also changes a
/// setting of the session (the idle timeout when taking a lock, the name when releasing it).
#[derive(Debug, Clone, Copy)]
pub(super) struct Statement {
    pub(super) verb: Verb,
    pub(super) shared: bool,
    pub(super) setting: bool,
}

/// The number of statements: each verb with every combination of the two flags.
const STATEMENTS: usize = (Verb::Waits as usize + 1) * 4;

/// The server's timeline; empty on a standby.
const TIMELINE: &str = "CASE WHEN pg_is_in_recovery() THEN '' \
     ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END";

/// Whether this is the process that the statement is for.
const HERE: &str = "(pg_backend_pid() = @pid@)";

/// The token that any other process returns; real ones are positive.
const AWAY: i64 = -1;

/// The name of a session without a recorded claim.
pub(super) const NAMELESS: &str = "palisade";

impl From<Verb> for Statement {
    fn from(verb: Verb) -> Self {
        Self {
            verb,
            shared: false,
            setting: false,
        }
    }
}

impl Statement {
    fn index(self) -> usize {
        self.verb as usize * 4 + usize::from(self.shared) * 2 + usize::from(self.setting)
    }

    /// `idle` is the setting that ends idle sessions, or one without effect where there is none.
    ///
    /// `CASE` evaluates its conditions in order and stops at the first match, so that nothing after
    /// it is executed. In another process the result is null; for a token, which may be null, it is
    /// [`AWAY`].
    fn sql(self, idle: &str) -> String {
        let mode = if self.shared { "_shared" } else { "" };
        let here = |then: &str| format!("CASE WHEN {HERE} THEN {then} END");
        let set = |name: &str, value: &str| here(&format!("set_config('{name}', {value}, false)"));
        let idling = format!(", {}", set(idle, "$2"));
        let taking = |lock: &str| {
            format!(
                "SELECT CASE WHEN NOT {HERE} THEN {AWAY} \
                 WHEN {lock} THEN nextval('@schema@.token') END"
            )
        };
        match self.verb {
            Verb::Try => {
                let taken = taking(&format!("pg_try_advisory_lock{mode}(@key@)"));
                if self.setting { taken + &idling } else { taken }
            }
            Verb::Block => {
                let taken = taking(&format!("pg_advisory_lock{mode}(@key@)::text = ''"));
                format!("{taken}{idling}, {TIMELINE}")
            }
            Verb::Unlock => {
                let unlocked = here(&format!("pg_advisory_unlock{mode}(@key@)"));
                let nameless = set("application_name", &format!("'{NAMELESS}'"));
                let nameless = format!(", {nameless}");
                let rest = if self.setting {
                    nameless
                } else {
                    String::new()
                };
                format!("SELECT {unlocked}{rest}")
            }
            // The server grants a lock to its holder again without queueing behind waiters.
            Verb::Downgrade => format!(
                "SELECT CASE WHEN NOT {HERE} THEN NULL \
                 WHEN pg_advisory_lock_shared(@key@)::text = '' \
                 THEN pg_advisory_unlock(@key@) END"
            ),
            Verb::Upgrade => format!(
                "SELECT CASE WHEN NOT {HERE} THEN NULL WHEN pg_try_advisory_lock(@key@) \
                 THEN pg_advisory_unlock_shared(@key@) ELSE false END"
            ),
            Verb::Beat => format!("SELECT {}", here(TIMELINE)),
            // No decision depends on it, so nobody waits until it is on disk.
            Verb::Record => format!(
                "INSERT INTO @schema@.session (pid, claim, namespace, name, ttl, owner, value) \
                 SELECT pg_backend_pid(), $1, $2, $3, $4, $5, $6 WHERE {HERE} \
                 ON CONFLICT (pid) DO UPDATE SET \
                 claim = $1, namespace = $2, name = $3, ttl = $4, owner = $5, value = $6 \
                 RETURNING set_config('application_name', $7, false), \
                 set_config('synchronous_commit', 'off', true)"
            ),
            Verb::Rest => format!("SELECT {}", set(idle, "'0'")),
            Verb::Waits => "SELECT pid FROM pg_locks \
                WHERE pid = ANY ($1) AND locktype = 'advisory' AND NOT granted"
                .into(),
        }
    }

    fn types(self, key: Type) -> Vec<Type> {
        const T: Type = Type::TEXT;
        match self.verb {
            Verb::Block => vec![key, T],
            Verb::Try if self.setting => vec![key, T],
            Verb::Try | Verb::Unlock | Verb::Downgrade | Verb::Upgrade => vec![key],
            Verb::Beat | Verb::Rest => vec![],
            Verb::Record => vec![T, T, T, Type::INT8, T, T, T],
            Verb::Waits => vec![Type::INT4_ARRAY],
        }
    }
}

/// The values for the blanks in the statements of one engine.
pub(super) struct Blanks {
    pub(super) schema: String,
    /// The expression that turns a key into a bigint, and the key's type.
    pub(super) key: (&'static str, Type),
}

impl Blanks {
    /// The text of a statement for the process `pid`, and the types of its parameters.
    fn fill(&self, statement: Statement, idle: &str, pid: i32) -> (String, Vec<Type>) {
        let (key, kind) = &self.key;
        let sql = statement.sql(idle).replace("@pid@", &pid.to_string());
        let sql = sql.replace("@schema@", &self.schema).replace("@key@", key);
        (sql, statement.types(kind.clone()))
    }
}
