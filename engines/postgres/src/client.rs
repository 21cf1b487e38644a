//! `Client`: sends the engine's verbs to the server. It connects on demand, interprets failures,
//! and retries only what the server has rolled back.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::OnceCell;
use tokio::time::Instant;
use tokio_postgres::Row;

use super::config::Config;
use super::connect::Server;
use super::error::{self, Remedy};
use super::guard;
use super::local_queue::LocalQueue;
use super::notify;
use super::pooler::{self, Between};
use super::schema::Schema;
use super::statements::{Blanks, Parameters, Session, Verb};
use palisade_core::engine::{Settings, config_error};
use palisade_core::{Error, ErrorKind, Result};
use palisade_kit::push::PushHub;
use palisade_kit::{Link, PerRuntime, timed};

/// How often a statement is retried that the server rolled back because of a conflict.
const TRIES: u32 = 10;

type Sessions = PerRuntime<Arc<Session>>;

/// What all connections of one engine share.
pub(super) struct Client {
    pub(super) server: Server,
    pub(super) schema: Schema,
    /// Initialised once the schema is known to exist.
    is_there: Arc<OnceCell<()>>,
    pub(super) namespace: String,
    /// The value of `Ticket::native`, for [`super::guard`].
    pub(super) native: Arc<str>,
    pub(super) timeout: Duration,
    pub(super) hub: Arc<PushHub>,
    pub(super) queue: LocalQueue,
    between: Arc<Mutex<Option<Between>>>,
    sessions: Sessions,
    /// Where to listen when a pooler is in between (`listen_url`).
    listeners: Option<Sessions>,
}

/// How a session is made.
#[derive(Clone)]
struct Connector {
    server: Server,
    blanks: Arc<Blanks>,
    hub: Arc<PushHub>,
    /// What is in between; `None` until it is known.
    between: Arc<Mutex<Option<Between>>>,
    /// The schema, and whether it is known to exist; `None` for a session that only listens.
    schema: Option<(Schema, Arc<OnceCell<()>>)>,
}

impl Connector {
    async fn connect(&self) -> Result<Arc<Session>> {
        let connection = self
            .server
            .connect(None, notify::listener(&self.hub))
            .await?;
        let session = Session::new(connection, Arc::clone(&self.blanks));
        let known = *self.between.lock();
        let found = match known {
            Some(found) => found,
            None => pooler::probe(session.client()).await?,
        };
        *self.between.lock() = Some(found);
        if let Some((schema, ready)) = &self.schema {
            // Both at once, for the sake of a round trip.
            let (set, there) = tokio::join!(
                session.set_up(found),
                ready.get_or_try_init(|| schema.ensure(session.client()))
            );
            there?;
            set.map_err(|error| error::failed("connect", &error))?;
        } else if found == Between::Pooler {
            return Err(config_error(
                "listen_url leads to a transaction pooler too; name the server itself",
            ));
        }
        Ok(Arc::new(session))
    }

    /// One session per runtime.
    fn sessions(self, settings: &Settings) -> Sessions {
        PerRuntime::new(settings.connect_timeout, move || {
            let connector = self.clone();
            Box::pin(async move { connector.connect().await })
        })
        .full_if(error::is_full)
    }
}

impl Client {
    pub(super) fn new(config: Config, settings: &Settings) -> Self {
        let (hub, between) = (
            Arc::new(PushHub::new()),
            Arc::new(Mutex::new(config.between)),
        );
        let is_there = Arc::default();
        let blanks = Blanks::new(config.schema.quoted(), settings.timeout);
        let connector = Connector {
            server: config.server.clone(),
            blanks: Arc::new(blanks),
            hub: Arc::clone(&hub),
            between: Arc::clone(&between),
            schema: Some((config.schema.clone(), Arc::clone(&is_there))),
        };
        let listeners = config.listen.map(|server| Connector {
            server,
            between: Arc::default(),
            schema: None,
            ..connector.clone()
        });
        Self {
            server: config.server,
            native: guard::native(&config.schema, &settings.namespace).into(),
            schema: config.schema,
            is_there,
            namespace: settings.namespace.clone(),
            timeout: settings.timeout,
            hub,
            queue: LocalQueue::default(),
            between,
            sessions: connector.sessions(settings),
            listeners: listeners.map(|listener| listener.sessions(settings)),
        }
    }

    /// What is between the client and the server, as far as it is known.
    pub(super) fn between(&self) -> Between {
        self.between.lock().unwrap_or(Between::Nothing)
    }

    /// Whether NOTIFY is available.
    pub(super) fn can_listen(&self) -> bool {
        self.listeners.is_some() || self.between() == Between::Nothing
    }

    /// The channel on which this client is notified.
    pub(super) fn channel(&self) -> String {
        format!("palisade_{}", self.hub.channel)
    }

    /// This runtime's connection; one that has ended is replaced.
    pub(super) async fn session(&self) -> Result<Link<Arc<Session>>> {
        living(&self.sessions, false).await
    }

    /// Creates the schema if nobody has, for a statement that somebody else's connection will send.
    pub(super) async fn ensure_schema(&self) -> Result<()> {
        if !self.is_there.initialized() {
            self.session().await?;
        }
        Ok(())
    }

    /// Runs a verb.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`], maybe applied when the reply was lost; what the server refuses.
    pub(super) async fn ask(
        &self,
        operation: &'static str,
        verb: Verb,
        parameters: Parameters<'_>,
    ) -> Result<Vec<Row>> {
        let asked = self.ask_once(operation, verb, parameters).await;
        let demoted = asked.as_ref().is_err_and(error::is_standby);
        if demoted && self.server.hosts.len() > 1 {
            // A standby executes no writes, and its connection is dropped by now; another host may
            // be the primary.
            return self.ask_once(operation, verb, parameters).await;
        }
        asked
    }

    async fn ask_once(
        &self,
        operation: &'static str,
        verb: Verb,
        parameters: Parameters<'_>,
    ) -> Result<Vec<Row>> {
        let link = self.session().await?;
        let asked = self.ask_on(&link, operation, verb, parameters);
        match timed(operation, self.timeout, asked).await {
            Ok(answer) => {
                self.sessions.answered(&link);
                answer
            }
            Err(late) => {
                self.sessions.late(&link).await;
                Err(late)
            }
        }
    }

    async fn ask_on(
        &self,
        link: &Link<Arc<Session>>,
        operation: &'static str,
        verb: Verb,
        parameters: Parameters<'_>,
    ) -> Result<Vec<Row>> {
        for _ in 0..TRIES {
            let between = self.between();
            let error = match link.connection.ask(verb, between, parameters).await {
                Ok(rows) => return Ok(rows),
                Err(error) => error::remedy(operation, &error),
            };
            match error {
                Remedy::Retry => tokio::task::yield_now().await,
                Remedy::Unprepared if between == Between::Nothing => {
                    *self.between.lock() = Some(Between::Pooler);
                }
                Remedy::Unprepared => break,
                Remedy::Fail(error) => return Err(error),
                Remedy::Reconnect(error) => {
                    self.sessions.broken(link).await;
                    return Err(error);
                }
            }
        }
        let message = "the server kept rolling the statement back; is it overloaded?";
        Err(Error::new(ErrorKind::Unreachable, operation, message))
    }

    /// Runs a verb that returns numbers.
    ///
    /// # Errors
    /// As [`Client::ask`].
    pub(super) async fn numbers(
        &self,
        operation: &'static str,
        verb: Verb,
        parameters: Parameters<'_>,
    ) -> Result<Vec<i64>> {
        numbers(operation, &self.ask(operation, verb, parameters).await?)
    }

    /// Runs a renewal. If there is no reply until `by`, it is cancelled and the connection dropped
    /// at once, so that the next renewal can still make it on a new one.
    ///
    /// # Errors
    /// As [`Client::ask`].
    pub(super) async fn renewals(
        &self,
        verb: Verb,
        parameters: Parameters<'_>,
        by: Instant,
    ) -> Result<Vec<i64>> {
        const RENEW: &str = "renew";
        let left = || by.saturating_duration_since(Instant::now());
        let link = timed(RENEW, left(), living(&self.sessions, true)).await??;
        match timed(RENEW, left(), self.ask_on(&link, RENEW, verb, parameters)).await {
            Ok(rows) => {
                self.sessions.answered(&link);
                numbers(RENEW, &rows?)
            }
            Err(late) => {
                self.sessions.broken(&link).await;
                self.cancel(link);
                Err(late)
            }
        }
    }

    /// Cancels what the server does for a connection that was given up. A renewal that goes on there
    /// keeps the rows locked that it has reached, and the next one needs them.
    fn cancel(&self, link: Link<Arc<Session>>) {
        let (server, patience) = (self.server.clone(), self.timeout);
        tokio::spawn(async move {
            // If it can't be sent, the rows are locked until the server notices by itself.
            let cancelled = server.cancel(&link.connection.connection);
            let _ = tokio::time::timeout(patience, cancelled).await;
        });
    }

    /// Makes sure that a connection of this runtime listens; `false` when NOTIFY is unavailable.
    ///
    /// # Errors
    /// As connecting.
    pub(super) async fn listen(&self) -> Result<bool> {
        let links = self.listeners.as_ref().unwrap_or(&self.sessions);
        let link = living(links, false).await?;
        if !self.can_listen() {
            return Ok(false);
        }
        let channel = self.channel();
        let listening = link.connection.listen(&channel);
        match timed("listen", self.timeout, listening).await {
            Ok(Ok(())) => Ok(true),
            Ok(Err(error)) => {
                if link.connection.client().is_closed() {
                    links.broken(&link).await;
                }
                Err(error::failed("listen", &error))
            }
            Err(late) => {
                links.late(&link).await;
                Err(late)
            }
        }
    }

    pub(super) fn close(&self) {
        self.sessions.close();
        if let Some(listeners) = &self.listeners {
            listeners.close();
        }
    }
}

/// The numbers that one of our functions returned, in the last column.
fn numbers(operation: &'static str, rows: &[Row]) -> Result<Vec<i64>> {
    let last = |row: &Row| row.try_get(row.len().checked_sub(1)?).ok();
    let numbers = rows.first().and_then(last);
    numbers.map_or_else(|| error::unreadable(operation), Ok)
}

/// This runtime's connection; one that has ended is replaced before it is used.
async fn living(links: &Sessions, urgent: bool) -> Result<Link<Arc<Session>>> {
    let get = async || {
        if urgent {
            links.get_urgently().await
        } else {
            links.get().await
        }
    };
    let link = get().await?;
    if !link.connection.client().is_closed() {
        return Ok(link);
    }
    links.broken(&link).await;
    get().await
}
