//! `Session`: one connection that belongs to one claim at a time.
//!
//! The lock belongs to the session, so the session is the lease: the server ends it when it is idle
//! for the claim's ttl (`idle_session_timeout`), and every statement restarts that timer. Servers
//! before PostgreSQL 14 lack the setting; there the kernel drops a silent client within 15 s. A
//! connection with an unknown outcome is dropped, which releases the lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio_postgres::{Client, Error as SqlError, Row};

use super::super::connect::Server;
use super::super::connection::{Connection, Listener};
use super::super::error::{self, STANDBY};
use super::super::pooler::{announced, no_session_locks};
use super::super::schema::first_cell;
use super::super::statements::{Parameters, Prepared};
use super::keys::Key;
use super::statements::{AWAY, Blanks, STATEMENTS, Statement, TIMELINE, Verb};
use crate::core::clock::BootTime;
use crate::core::error::{Result, no_connection};

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
    /// As connecting; [`ErrorKind::Unsupported`] behind a pooler; what the server refuses.
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
            "SET statement_timeout = 0; SET lock_timeout = 0; \
             SET tcp_keepalives_idle = 6; SET tcp_keepalives_interval = 2; \
             SET tcp_keepalives_count = 3; SET tcp_user_timeout = 12000; \
             SELECT set_config('synchronous_commit', 'on', false) \
             WHERE current_setting('synchronous_commit') = 'off'; \
             LISTEN palisade_pid_{pid}"
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
        let text = || self.blanks.fill(statement, self.idle, self.pid);
        let index = statement.index();
        self.prepared.query(client, index, text, parameters).await
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
