//! `Own`: one connection that belongs to one claim at a time.
//!
//! The lock is the session's, so the session is the lease: the server ends it when it is idle for
//! the claim's ttl (`idle_session_timeout`), and everything that is asked on it begins that time
//! anew. The kernel on the other side gives a silent peer up in at most 15 s, where the server is
//! too old for that. A connection with an unknown outcome is dropped, which releases.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row, Statement};

use super::super::fault::{self, STANDBY};
use super::super::mail::Mail;
use super::super::pooler::{announced, no_session_locks};
use super::super::schema::first_cell;
use super::super::server::Server;
use super::super::wire::Wire;
use super::key::Key;
use super::statement::{AWAY, Statements, TIMELINE, VERBS, Verb};
use crate::core::clock::BootTime;
use crate::core::error::{Error, Kind, Result};

/// How long the runtime that drives a connection may take to do so: far above what one takes that
/// is not blocked, far below what heartbeats can spare.
const AFAR: Duration = Duration::from_millis(20);

/// A connection of ours.
pub(super) struct Own {
    pub(super) client: Client,
    wire: Arc<Wire>,
    pub(super) mail: Arc<Mail>,
    pub(super) pid: i32,
    /// Which of the servers it leads to.
    pub(super) at: usize,
    statements: Arc<Statements>,
    prepared: [OnceCell<Statement>; VERBS],
    /// Where this server's history was when we came: another one is another server's.
    timeline: String,
    idle: &'static str,
    /// After how many milliseconds the server ends the session when it is idle; 0 is never.
    rests: AtomicU64,
    /// Whether the session may be called after a claim.
    named: AtomicBool,
    /// Whoever writes a claim down, or gives its lock back: one after the other, so that no
    /// session is called after a claim that has left it.
    pub(super) turn: tokio::sync::Mutex<()>,
}

/// How a heartbeat went.
pub(super) enum Beat {
    Alive,
    /// The server is a standby, or has another history than the one we locked in.
    Moved,
    /// Another session answered than the one we locked in.
    Away,
}

/// What became of an attempt to take a lock.
pub(super) enum Taken {
    Token(u64),
    Busy,
    /// Another session answered than the one that was asked; nothing was done there.
    Away,
}

impl Own {
    /// Connects, and makes sure that the session is ours alone before anything is set in it.
    ///
    /// Two things prove it. The process that serves us is the one that was announced, which a
    /// pooler makes up. And the session knows a random setting of the connection's first packet,
    /// which poolers refuse, drop, or give to no session that exists. `trusted` asks for no proof:
    /// it was said that a session stays a session.
    ///
    /// # Errors
    /// As connecting; [`Kind::Unsupported`] behind a pooler; what the server refuses.
    pub(super) async fn connect(
        server: &Server,
        statements: &Arc<Statements>,
        trusted: bool,
    ) -> Result<Self> {
        let mail = Arc::new(Mail::default());
        let proof = format!("{:032x}", rand::random::<u128>());
        let options = format!("-c palisade.session={proof}");
        let options = (!trusted).then_some(options.as_str());
        let (client, wire, at) = server.connect_wire(Arc::clone(&mail), options).await?;
        let look = "SELECT pg_backend_pid() || ' ' || current_setting('server_version_num') || ' ' \
             || coalesce(current_setting('palisade.session', true), '') || ' ' || ";
        let failed = |error: tokio_postgres::Error| fault::reading("connect", &error);
        let rows = client.simple_query(&format!("{look}{TIMELINE}")).await;
        let rows = rows.map_err(failed)?;
        let Some(cell) = first_cell(&rows) else {
            return fault::unreadable("connect");
        };
        let mut words = cell.splitn(4, ' ');
        let mut word = || words.next().unwrap_or_default();
        let (Ok(pid), Ok(version)) = (word().parse::<i32>(), word().parse::<u32>()) else {
            return fault::unreadable("connect");
        };
        let proven = word() == proof && announced(&client) == Some(pid);
        if !proven && !trusted {
            return Err(no_session_locks("connect"));
        }
        let timeline = word().to_owned();
        if timeline.is_empty() {
            return Err(Error::new(Kind::Unreachable, "connect", STANDBY));
        }
        // 6 s of silence and then a probe every 2 s: given up after 12 to 14 s. A token that was
        // told must outlive a crash of the server.
        let mut setup = format!(
            "SET statement_timeout = 0; SET lock_timeout = 0; \
             SET tcp_keepalives_idle = 6; SET tcp_keepalives_interval = 2; \
             SET tcp_keepalives_count = 3; SET tcp_user_timeout = 12000; \
             SELECT set_config('synchronous_commit', 'on', false) \
             WHERE current_setting('synchronous_commit') = 'off'; \
             LISTEN palisade_pid_{pid}"
        );
        if version >= 140_000 {
            // While a statement waits for the lock, the server looks whether we are still there.
            setup.push_str("; SET client_connection_check_interval = 2000");
        }
        client.batch_execute(&setup).await.map_err(failed)?;
        Ok(Self {
            client,
            wire,
            mail,
            pid,
            at,
            statements: Arc::clone(statements),
            prepared: Default::default(),
            timeline,
            idle: match version >= 140_000 {
                true => "idle_session_timeout",
                false => "palisade.idle",
            },
            rests: AtomicU64::new(0),
            named: AtomicBool::new(false),
            turn: tokio::sync::Mutex::default(),
        })
    }

    pub(super) async fn ask(
        &self,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        self.wire.settle_here();
        self.send(verb, parameters).await
    }

    /// Asks without taking the connection over, unless whoever drives it does not do so in time:
    /// every move costs its user time.
    async fn ask_from_afar(
        &self,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        let mut asked = std::pin::pin!(self.send(verb, parameters));
        if let Ok(answer) = tokio::time::timeout(AFAR, &mut asked).await {
            return answer;
        }
        self.wire.settle_here();
        asked.await
    }

    async fn send(
        &self,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        let cell = &self.prepared[verb as usize];
        let statement = match cell.get() {
            Some(statement) => statement,
            None => {
                let (sql, types) = self.statements.of(verb, self.idle, self.pid);
                let prepare = || self.client.prepare_typed(&sql, &types);
                cell.get_or_try_init(prepare).await?
            }
        };
        self.client.query(statement, parameters).await
    }

    /// Makes a connection answer here that is used past [`Own::ask`].
    pub(super) fn here(&self) -> &Client {
        self.wire.settle_here();
        &self.client
    }

    /// Takes the lock `key`, or waits for it; busy also when the server's history is another one
    /// afterwards.
    pub(super) async fn take(
        &self,
        verb: Verb,
        key: &Key,
        ttl: Duration,
    ) -> Result<Taken, tokio_postgres::Error> {
        let millis = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let rows = match self.rests.load(Ordering::Relaxed) == millis && !verb.waits() {
            true => self.ask(verb, &[key.sql()]).await?,
            false => {
                let idle = millis.to_string();
                self.ask(verb.setting(), &[key.sql(), &idle]).await?
            }
        };
        let Some(row) = rows.first() else {
            return Ok(Taken::Busy);
        };
        let token: Option<i64> = row.try_get(0)?;
        if token == Some(AWAY) {
            return Ok(Taken::Away);
        }
        self.rests.store(millis, Ordering::Relaxed);
        if verb.waits() && row.try_get::<_, &str>(2)? != self.timeline {
            return Ok(Taken::Busy);
        }
        Ok(token.map_or(Taken::Busy, |token| Taken::Token(token.unsigned_abs())))
    }

    /// Gives the lock `key` back, and the name of who had it; `false` when it was not ours, and
    /// `None` when another session answered.
    pub(super) async fn give(
        &self,
        verb: Verb,
        key: &Key,
    ) -> Result<Option<bool>, tokio_postgres::Error> {
        let _turn = self.turn.lock().await;
        let verb = match self.named.load(Ordering::Relaxed) {
            true => verb.setting(),
            false => verb,
        };
        let rows = self.ask(verb, &[key.sql()]).await?;
        self.named.store(false, Ordering::Relaxed);
        answer(&rows)
    }

    /// Writes down who has the lock, and calls the session after it. Only in one's [`Own::turn`].
    pub(super) async fn record(
        &self,
        record: &[&(dyn ToSql + Sync)],
    ) -> Result<(), tokio_postgres::Error> {
        self.named.store(true, Ordering::Relaxed);
        self.ask_from_afar(Verb::Record, record).await.map(drop)
    }

    /// When a session that is idle since `since` must not be used any more: it may be ended.
    pub(super) fn usable_until(&self, since: BootTime) -> BootTime {
        match self.rests.load(Ordering::Relaxed) {
            0 => BootTime::NEVER,
            millis => since + Duration::from_millis(millis) / 2,
        }
    }

    /// Lets the session be idle for as long as it is.
    pub(super) async fn rest(&self) -> Result<(), tokio_postgres::Error> {
        self.ask(Verb::Rest, &[]).await?;
        self.rests.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Which of other sessions wait for a lock.
    pub(super) async fn waiting(&self, pids: &[i32]) -> Result<Vec<i32>, tokio_postgres::Error> {
        let rows = self.ask(Verb::Waits, &[&pids]).await?;
        rows.iter().map(|row| row.try_get(0)).collect()
    }

    /// Asks for yes or no; `None` when another session answered.
    pub(super) async fn whether(
        &self,
        verb: Verb,
        key: &Key,
    ) -> Result<Option<bool>, tokio_postgres::Error> {
        answer(&self.ask(verb, &[key.sql()]).await?)
    }

    /// Begins the session's idle time anew.
    pub(super) async fn beat(&self) -> Result<Beat, tokio_postgres::Error> {
        let rows = self.ask_from_afar(Verb::Beat, &[]).await?;
        let timeline: Option<&str> = match rows.first() {
            Some(row) => row.try_get(0)?,
            None => None,
        };
        Ok(match timeline {
            Some(timeline) if timeline == self.timeline => Beat::Alive,
            Some(_) => Beat::Moved,
            None => Beat::Away,
        })
    }
}

fn answer(rows: &[Row]) -> Result<Option<bool>, tokio_postgres::Error> {
    match rows.first() {
        Some(row) => row.try_get(0),
        None => Ok(None),
    }
}
