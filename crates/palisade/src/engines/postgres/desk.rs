//! `Desk`: asks the server for the engine's verbs. Connects when it must, tells what a failure
//! means, and asks again only what the server has said it rolled back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::fault::{self, Remedy};
use super::mail::Mail;
use super::pooler::{self, Between};
use super::queue::LocalQueue;
use super::schema::Schema;
use super::server::Server;
use super::session::{Session, Statements, Verb};
use crate::core::error::{Error, Kind, Result};
use crate::core::url::Settings;
use crate::engines::remote::{Link, Links, timed};

/// How often a statement that was rolled back because of others is asked again by itself.
const TRIES: u32 = 10;

type Sessions = Links<Arc<Session>>;

/// What all connections of one engine share.
pub(super) struct Desk {
    pub(super) server: Server,
    pub(super) schema: Schema,
    pub(super) namespace: String,
    pub(super) timeout: Duration,
    /// The channel on which this client listens.
    pub(super) mailbox: String,
    pub(super) queue: LocalQueue,
    between: Arc<Found>,
    sessions: Sessions,
    /// Where to listen, when it can't be done through a pooler.
    ears: Option<Sessions>,
}

/// What was found out about the way to the server; nothing at first.
pub(super) struct Found(AtomicU8);

impl Found {
    pub(super) fn new(known: Option<Between>) -> Self {
        let found = Self(AtomicU8::new(0));
        if let Some(between) = known {
            found.set(between);
        }
        found
    }

    pub(super) fn get(&self) -> Option<Between> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(Between::Nothing),
            _ => Some(Between::Pooler),
        }
    }

    pub(super) fn set(&self, between: Between) {
        let found = match between {
            Between::Nothing => 1,
            Between::Pooler => 2,
        };
        self.0.store(found, Ordering::Relaxed);
    }
}

/// How the desk is set up.
pub(super) struct Plan {
    pub(super) server: Server,
    pub(super) listen: Option<Server>,
    pub(super) between: Option<Between>,
    pub(super) schema: Schema,
}

impl Desk {
    pub(super) fn new(plan: Plan, settings: &Settings) -> Self {
        let Plan {
            server,
            listen,
            between,
            schema,
        } = plan;
        let between = Arc::new(Found::new(between));
        let ours = schema.clone();
        let (timeout, connect_timeout) = (settings.timeout, settings.connect_timeout);
        let statements = Arc::new(Statements::of(&schema.quoted(), timeout));
        let sessions = {
            let (server, between) = (server.clone(), Arc::clone(&between));
            let statements = Arc::clone(&statements);
            let ready = Arc::new(AtomicU8::new(0));
            Links::new(connect_timeout, move || {
                let (server, schema) = (server.clone(), schema.clone());
                let (between, statements) = (Arc::clone(&between), Arc::clone(&statements));
                let ready = Arc::clone(&ready);
                Box::pin(async move {
                    let session = connect(&server, &statements).await?;
                    let found = match between.get() {
                        Some(found) => found,
                        None => pooler::probe(&session.client).await?,
                    };
                    between.set(found);
                    if ready.load(Ordering::Relaxed) == 0 {
                        schema.ensure(&session.client).await?;
                        ready.store(1, Ordering::Relaxed);
                    }
                    Ok(session)
                })
            })
        };
        let ears = listen.map(|server| {
            let way = Arc::new(Found::new(None));
            Links::new(connect_timeout, move || {
                let (server, statements) = (server.clone(), Arc::clone(&statements));
                let way = Arc::clone(&way);
                Box::pin(async move {
                    let session = connect(&server, &statements).await?;
                    let found = match way.get() {
                        Some(found) => found,
                        None => pooler::probe(&session.client).await?,
                    };
                    way.set(found);
                    match found {
                        Between::Nothing => Ok(session),
                        Between::Pooler => Err(Error::new(
                            Kind::Config,
                            "connect",
                            "listen_url leads to a transaction pooler too; name the server itself",
                        )),
                    }
                })
            })
        });
        Self {
            server,
            schema: ours,
            namespace: settings.namespace.clone(),
            timeout,
            mailbox: format!("palisade_{:016x}", rand::random::<u64>()),
            queue: LocalQueue::default(),
            between,
            sessions,
            ears,
        }
    }

    /// What stands between us and the server, as far as it is known.
    pub(super) fn between(&self) -> Between {
        self.between.get().unwrap_or(Between::Nothing)
    }

    /// Whether pushes can be had.
    pub(super) fn can_listen(&self) -> bool {
        self.ears.is_some() || self.between() == Between::Nothing
    }

    /// A connection that lives, made anew if it must be.
    pub(super) async fn session(&self) -> Result<Link<Arc<Session>>> {
        living(&self.sessions).await
    }

    /// Asks for a verb.
    ///
    /// # Errors
    /// [`Kind::Unreachable`], maybe applied when the answer was lost; what the server refuses.
    pub(super) async fn ask(
        &self,
        operation: &'static str,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>> {
        let asked = self.ask_once(operation, verb, parameters).await;
        match asked {
            // Nothing was done, and another host may take writes: the connection is given up.
            Err(error) if fault::is_standby(&error) && self.server.hosts.len() > 1 => {
                self.ask_once(operation, verb, parameters).await
            }
            asked => asked,
        }
    }

    async fn ask_once(
        &self,
        operation: &'static str,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
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
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>> {
        let mut tries = 0;
        loop {
            let between = self.between();
            let answer = link.connection.ask(verb, between, parameters).await;
            let Err(error) = answer else {
                return answer.map_err(|_| unreachable(operation));
            };
            tries += 1;
            match fault::asking(operation, &error) {
                Remedy::Again if tries < TRIES => tokio::task::yield_now().await,
                Remedy::Unprepared if between == Between::Nothing => {
                    self.between.set(Between::Pooler);
                }
                Remedy::Again | Remedy::Unprepared => return Err(unreachable(operation)),
                Remedy::Tell(error) => return Err(error),
                Remedy::Reconnect(error) => {
                    self.sessions.broken(link).await;
                    return Err(error);
                }
            }
        }
    }

    /// Asks for a verb that answers with numbers.
    ///
    /// # Errors
    /// As [`Desk::ask`].
    pub(super) async fn numbers(
        &self,
        operation: &'static str,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<i64>> {
        numbers(operation, &self.ask(operation, verb, parameters).await?)
    }

    /// Asks for a renewal. One that is not answered by `by` is of no use, and neither is its
    /// connection: the next one has another, and can still be in time.
    ///
    /// # Errors
    /// As [`Desk::ask`].
    pub(super) async fn renewals(
        &self,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
        by: Instant,
    ) -> Result<Vec<i64>> {
        const RENEW: &str = "renew";
        let left = || by.saturating_duration_since(Instant::now());
        let link = timed(RENEW, left(), self.session()).await??;
        match timed(RENEW, left(), self.ask_on(&link, RENEW, verb, parameters)).await {
            Ok(rows) => {
                self.sessions.answered(&link);
                numbers(RENEW, &rows?)
            }
            Err(late) => {
                self.sessions.broken(&link).await;
                Err(late)
            }
        }
    }

    /// The mail of a connection of this runtime that listens; `None` when pushes can't be had.
    ///
    /// # Errors
    /// As connecting.
    pub(super) async fn mail(&self) -> Result<Option<Arc<Mail>>> {
        let links = self.ears.as_ref().unwrap_or(&self.sessions);
        let link = living(links).await?;
        if !self.can_listen() {
            return Ok(None);
        }
        let listening = link.connection.listen(&self.mailbox);
        match timed("listen", self.timeout, listening).await {
            Ok(Ok(())) => Ok(Some(Arc::clone(&link.connection.mail))),
            Ok(Err(error)) => {
                if link.connection.client.is_closed() {
                    links.broken(&link).await;
                }
                Err(fault::reading("listen", &error))
            }
            Err(late) => {
                links.late(&link).await;
                Err(late)
            }
        }
    }

    pub(super) fn close(&self) {
        self.sessions.close();
        if let Some(ears) = &self.ears {
            ears.close();
        }
    }
}

/// The numbers that a function of ours answered, in the last column.
fn numbers(operation: &'static str, rows: &[Row]) -> Result<Vec<i64>> {
    let last = |row: &Row| row.try_get(row.len().checked_sub(1)?).ok();
    let numbers = rows.first().and_then(last);
    numbers.map_or_else(|| fault::unreadable(operation), Ok)
}

async fn connect(server: &Server, statements: &Arc<Statements>) -> Result<Arc<Session>> {
    let mail = Arc::new(Mail::default());
    let client = server.connect(Arc::clone(&mail)).await?;
    Ok(Arc::new(Session::new(client, mail, Arc::clone(statements))))
}

/// The connection of this runtime; one that has ended meanwhile is replaced before it is used.
async fn living(links: &Sessions) -> Result<Link<Arc<Session>>> {
    let link = links.get().await?;
    if !link.connection.client.is_closed() {
        return Ok(link);
    }
    links.broken(&link).await;
    links.get().await
}

fn unreachable(operation: &'static str) -> Error {
    Error::new(
        Kind::Unreachable,
        operation,
        "the server rolled the statement back again and again; is it overloaded?",
    )
}
