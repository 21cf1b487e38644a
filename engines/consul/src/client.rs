//! `Client`: requests to a Consul agent. Each has a timeout, and each error says whether the change
//! may have been applied.
//!
//! There is one HTTP client per runtime. Of several agents the first one that knows a leader is
//! used; when it fails, all are asked again. A request is never sent twice: the caller decides what
//! an unknown outcome means.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use reqwest::header::HeaderName;
use reqwest::{Method, StatusCode};
use serde::Deserialize;
use tokio::sync::Semaphore;

use super::error::{UNKNOWN_TOKEN, WHO, broken, denied, not_consul, refused};
use super::kv::{MOST_OPS, Op, Pair, TxnAnswer, TxnError, session_id};
use palisade_core::engine::{config_error, no_connection, unreachable};
use palisade_core::{BootTime, Error, ErrorKind, Result};
use palisade_kit::replies::{LISTING, REPLY};
use palisade_kit::{
    Asked, Broke, Host, Link, PerRuntime, SECRET, SecretFile, Tls, ask_http, first_to_answer,
    http_client_with, read_text, redirected, timed,
};

/// The header with the ACL token.
const TOKEN: HeaderName = HeaderName::from_static("x-consul-token");

/// The part of the URL that concerns requests.
#[derive(Clone)]
pub(super) struct Access {
    pub(super) hosts: Vec<Host>,
    pub(super) tls: Option<Tls>,
    pub(super) asked: Asked,
    pub(super) token: Token,
    pub(super) datacenter: Option<String>,
    pub(super) consul_namespace: Option<String>,
    pub(super) timeout: Duration,
    pub(super) connect_timeout: Duration,
}

/// The source of the ACL token.
#[derive(Clone)]
pub(super) enum Token {
    None,
    /// A secret.
    Given(String),
    File(SecretFile),
    /// The file that `CONSUL_HTTP_TOKEN_FILE` names.
    EnvironmentFile(PathBuf),
}

impl Token {
    /// The current token, because files are rotated.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when its file can't be read.
    pub(super) fn read(&self) -> Result<Option<String>> {
        match self {
            Self::None => Ok(None),
            Self::Given(token) => Ok(Some(token.clone())),
            Self::File(file) => file.read().map(Some),
            Self::EnvironmentFile(path) => {
                let what = "the file that CONSUL_HTTP_TOKEN_FILE names";
                let read = read_text(what, path, SECRET)?;
                Ok(Some(read.trim().to_owned()))
            }
        }
    }
}

/// How long an idle connection is kept. An agent accepts few from one address (200 by default), for
/// all processes together: one that holds a lock needs none between its renewals, but the two that
/// the keeper has.
const IDLE: Duration = Duration::from_millis(250);

/// HTTP clients, and the agent that they talk to.
#[derive(Clone)]
struct Connection {
    http: reqwest::Client,
    /// For the keeper's own requests. It keeps one connection for good, so that a holder can still
    /// renew when others have taken all that the agent accepts.
    steady: reqwest::Client,
    /// Held by the one of the keeper's requests that uses it.
    turn: Arc<Semaphore>,
    base: Arc<str>,
    /// The token that it sends; a secret.
    token: Option<Arc<str>>,
}

impl Access {
    /// An HTTP client for this runtime, with the token and certificates as their files are now.
    fn http(&self, token: Option<&str>, steady: bool) -> Result<reqwest::Client> {
        let token = token.map(|token| (TOKEN, token.to_owned()));
        let builder = http_client_with(self.tls.as_ref(), &self.asked, "ACL token", token)?
            .connect_timeout(self.connect_timeout);
        let builder = if steady {
            builder.pool_max_idle_per_host(1).pool_idle_timeout(None)
        } else {
            builder.pool_idle_timeout(IDLE)
        };
        let http = builder.build();
        http.map_err(|error| config_error("an HTTP client can't be set up").because(error))
    }

    /// Asks all agents for the leader, and uses the first one that knows it.
    async fn connect(&self) -> Result<Connection> {
        first_to_answer(&self.hosts, self.connect_timeout, self.connect_to_any()).await
    }

    async fn connect_to_any(&self) -> Result<Connection> {
        let token: Option<Arc<str>> = self.token.read()?.map(Into::into);
        let http = self.http(token.as_deref(), false)?;
        let steady = self.http(token.as_deref(), true)?;
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let connection = |host: &Host| Connection {
            http: http.clone(),
            steady: steady.clone(),
            turn: Arc::new(Semaphore::new(1)),
            base: format!("{scheme}://{host}").into(),
            token: token.clone(),
        };
        let hosts = self.hosts.iter();
        let mut asked: FuturesUnordered<_> = hosts
            .map(|host| self.ask_leader(connection(host)))
            .collect();
        let mut last = no_connection("no Consul agent was named");
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn ask_leader(&self, connection: Connection) -> Result<Connection> {
        let base = &connection.base;
        let failed = |broke: Broke| self.asked.judge(WHO, broken("connect", base, &broke));
        let request = connection.http.get(format!("{base}/v1/status/leader"));
        let answer = ask_http(request, REPLY).await.map_err(failed)?;
        self.asked.served();
        let (status, leader) = (answer.status, String::from_utf8_lossy(&answer.body));
        if status != StatusCode::OK {
            let (error, _) = refused("connect", status, &leader, true);
            if matches!(error.kind(), ErrorKind::Config | ErrorKind::Unreachable) {
                return Err(error.not_applied());
            }
            let hint = match redirected(status, &answer.headers) {
                hint if hint.is_empty() => "; is it Consul's HTTP port?".to_owned(),
                hint => hint,
            };
            let status = status.as_u16();
            let message = format!("{base} answers with status {status}{hint}");
            return Err(Error::new(ErrorKind::Unusable, "connect", message));
        }
        if matches!(leader.trim(), "" | "\"\"") {
            let message = format!("the Consul cluster of {base} has no leader");
            return Err(no_connection(message));
        }
        Ok(connection)
    }
}

pub(super) struct Client {
    access: Arc<Access>,
    connections: PerRuntime<Connection>,
    /// `&dc=…&ns=…`, for every request.
    scope: String,
    has_token: bool,
    pub(super) timeout: Duration,
}

/// A reply, not interpreted yet.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) body: Vec<u8>,
    index: u64,
}

/// Keys and values as of an index.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    pub(super) pairs: Vec<Pair>,
    pub(super) index: u64,
}

/// The consistency of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    /// Linearizable: confirmed by a majority.
    Consistent,
    /// A blocking query: waits until the index changes, up to a time limit. The result is a hint.
    After(u64, Duration),
}

/// The result of a transaction.
#[derive(Debug)]
pub(super) enum Committed {
    /// Everything was applied; the pairs that were read or written.
    Done(Vec<Pair>),
    /// Nothing was applied.
    Refused(Vec<TxnError>),
}

impl Client {
    pub(super) fn new(access: Access) -> Result<Self> {
        let named = [("dc", &access.datacenter), ("ns", &access.consul_namespace)];
        let named = named.into_iter().filter_map(|(name, value)| {
            let value = value.as_deref()?;
            Some(format!("&{name}={}", path(value)))
        });
        let (scope, token) = (named.collect(), access.token.read()?);
        // Fails now and not at the first request.
        access.http(token.as_deref(), false)?;
        let access = Arc::new(access);
        let connects = Arc::clone(&access);
        let connections = PerRuntime::new(access.connect_timeout, move || {
            let access = Arc::clone(&connects);
            Box::pin(async move { access.connect().await })
        });
        Ok(Self {
            connections,
            scope,
            has_token: token.is_some(),
            timeout: access.timeout,
            access,
        })
    }

    /// Connects, if this runtime has no connection yet.
    pub(super) async fn connect(&self) -> Result<()> {
        self.connections.get().await.map(drop)
    }

    /// Whether requests go to another datacenter or namespace than the agent's own.
    pub(super) fn is_elsewhere(&self) -> bool {
        !self.scope.is_empty()
    }

    pub(super) fn close(&self) {
        self.connections.close();
    }

    /// Sends one request. `path` includes its query, at least `?`.
    pub(super) async fn send(
        &self,
        operation: &'static str,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Reply> {
        self.send_within(operation, method, path, body, (self.timeout, REPLY))
            .await
    }

    /// Sends one request, with bounds for the time until its reply and for its size.
    async fn send_within(
        &self,
        operation: &'static str,
        method: Method,
        path: &str,
        body: Vec<u8>,
        (timeout, most): (Duration, usize),
    ) -> Result<Reply> {
        let link = self.connections.get().await?;
        let Connection {
            http,
            steady,
            turn,
            base,
            ..
        } = &link.connection;
        let url = format!("{base}{path}{}", self.scope);
        let mut _turn = None;
        let http = match operation {
            // It waits for nobody: an audit may hang.
            "renew" => {
                _turn = turn.try_acquire().ok();
                steady
            }
            "audit" => {
                // The keeper asks for both at once, and a renewal goes first.
                tokio::task::yield_now().await;
                _turn = timed(operation, timeout, turn.acquire()).await?.ok();
                steady
            }
            _ => http,
        };
        let request = http.request(method, url).body(body);
        match timed(operation, timeout, ask_http(request, most)).await {
            Ok(Ok(answer)) => {
                let index = answer.headers.get("x-consul-index");
                let index = index.and_then(|index| index.to_str().ok()?.parse().ok());
                let reply = Reply {
                    status: answer.status,
                    index: index.unwrap_or(0),
                    body: answer.body,
                };
                match reply.status {
                    StatusCode::OK | StatusCode::NOT_FOUND | StatusCode::CONFLICT => {
                        self.connections.answered(&link);
                        Ok(reply)
                    }
                    _ => Err(self.refusal(operation, &link, &reply).await),
                }
            }
            Ok(Err(broke)) => {
                self.connections.broken(&link).await;
                Err(broken(operation, base, &broke))
            }
            Err(late) => {
                self.connections.unanswered(operation, &link).await;
                Err(late)
            }
        }
    }

    /// The error for a refusal; drops the connection if another may be better.
    async fn refusal(
        &self,
        operation: &'static str,
        link: &Link<Connection>,
        reply: &Reply,
    ) -> Error {
        let text = String::from_utf8_lossy(&reply.body);
        let (error, keep) = refused(operation, reply.status, &text, self.has_token);
        if error.message() == UNKNOWN_TOKEN
            && let Ok(token) = self.access.token.read()
            && token.as_deref() != link.connection.token.as_deref()
        {
            self.connections.broken(link).await;
            let message = "the ACL token was replaced; the new one is used from now on";
            return unreachable(operation, message);
        }
        if !keep {
            // Another agent may answer.
            self.connections.broken(link).await;
        }
        error
    }

    /// Reads one key, or with `recurse` all keys that begin with it.
    pub(super) async fn read(
        &self,
        operation: &'static str,
        key: &str,
        recurse: bool,
        read: Read,
    ) -> Result<Seen> {
        let mut query = format!("/v1/kv/{}?", path(key));
        let mut timeout = self.timeout;
        match read {
            Read::Consistent => query += "consistent",
            Read::After(index, wait) => {
                query += &format!("index={index}&wait={}ms", wait.as_millis().max(1));
                // Consul adds up to a sixteenth, so that not all blocking queries end at the same
                // time.
                timeout += wait + wait / 16;
            }
        }
        if recurse {
            query += "&recurse";
        }
        let most = if recurse { LISTING } else { REPLY };
        let reply = self.send_within(operation, Method::GET, &query, Vec::new(), (timeout, most));
        let reply = reply.await.map_err(Error::not_applied)?;
        let pairs = match reply.status {
            StatusCode::NOT_FOUND => Vec::new(),
            _ => parse(operation, &reply.body)?,
        };
        let index = reply.index;
        Ok(Seen { pairs, index })
    }

    /// Applies all operations or none.
    pub(super) async fn transact(&self, operation: &'static str, ops: &[Op]) -> Result<Committed> {
        self.txn(operation, "/v1/txn?", ops).await
    }

    /// Runs operations that only read or check, linearizably.
    pub(super) async fn look(&self, operation: &'static str, ops: &[Op]) -> Result<Committed> {
        let looked = self.txn(operation, "/v1/txn?consistent", ops).await;
        looked.map_err(Error::not_applied)
    }

    async fn txn(&self, operation: &'static str, path: &str, ops: &[Op]) -> Result<Committed> {
        let body = serde_json::to_vec(ops).unwrap_or_default();
        let reply = self.send(operation, Method::PUT, path, body).await?;
        if reply.status == StatusCode::NOT_FOUND {
            return Err(not_consul(operation));
        }
        let answer: TxnAnswer = parse(operation, &reply.body).map_err(Error::maybe_applied)?;
        let errors = answer.errors.unwrap_or_default();
        let denies = |error: &TxnError| error.what.contains("ermission denied");
        if errors.iter().any(denies) {
            return Err(denied(operation, self.has_token));
        }
        if !errors.is_empty() {
            return Ok(Committed::Refused(errors));
        }
        let results = answer.results.unwrap_or_default().into_iter();
        Ok(Committed::Done(
            results.filter_map(|result| result.kv).collect(),
        ))
    }

    /// Which of these keys the session has locked, with one consistent read for many keys.
    pub(super) async fn locked_by(&self, session: &str, keys: &[String]) -> Result<Vec<bool>> {
        let mut locked = vec![true; keys.len()];
        for (keys, locked) in keys.chunks(MOST_OPS).zip(locked.chunks_mut(MOST_OPS)) {
            let ops = keys.iter().map(|key| Op::check_session(key, session));
            let ops: Vec<Op> = ops.collect();
            if let Committed::Refused(errors) = self.look("audit", &ops).await? {
                for error in errors {
                    if let Some(one) = locked.get_mut(error.op_index) {
                        *one = false;
                    }
                }
            }
        }
        Ok(locked)
    }

    /// Creates a session. An unknown outcome leaves at most a session that nobody renews, so the
    /// error always says that nothing was applied.
    pub(super) async fn create_session(&self, settings: &SessionSettings) -> Result<u128> {
        #[derive(Deserialize)]
        struct Created {
            #[serde(rename = "ID")]
            id: String,
        }
        let body = serde_json::json!({
            "Name": "palisade",
            "TTL": format!("{}ms", settings.ttl.as_millis()),
            "LockDelay": format!("{}ms", settings.lock_delay.as_millis()),
            "Behavior": "release",
            // Without this, Consul would add the node's gossip check. Newer versions use the second
            // name.
            "Checks": settings.checks,
            "NodeChecks": settings.checks,
        });
        let body = body.to_string().into_bytes();
        let created = self.send("session", Method::PUT, "/v1/session/create?", body);
        let created = created.await.map_err(Error::not_applied)?;
        let created: Created = parse("session", &created.body)?;
        session_id(&created.id).ok_or_else(|| not_consul("session"))
    }

    /// Renews a session; `false` when it does not exist. The connection may be dead though the
    /// agent is healthy, so one without a timely reply is dropped, and the next renewal uses
    /// another.
    pub(super) async fn renew_session(&self, session: &str, within: Duration) -> Result<bool> {
        let until = BootTime::now() + within;
        timed("renew", within, self.connect()).await??;
        let left = until.remaining().min(self.timeout);
        let path = format!("/v1/session/renew/{session}?");
        let renewed = self.send_within("renew", Method::PUT, &path, Vec::new(), (left, REPLY));
        Ok(renewed.await?.status == StatusCode::OK)
    }

    /// Whether a session exists.
    pub(super) async fn has_session(&self, session: &str) -> Result<bool> {
        let path = format!("/v1/session/info/{session}?consistent");
        let found = self.send("session", Method::GET, &path, Vec::new()).await;
        let found = found.map_err(Error::not_applied)?;
        let found: Option<Vec<serde_json::Value>> = parse("session", &found.body)?;
        Ok(found.is_some_and(|found| !found.is_empty()))
    }

    pub(super) async fn destroy_session(&self, session: &str) -> Result<()> {
        let path = format!("/v1/session/destroy/{session}?");
        let ended = self.send("session", Method::PUT, &path, Vec::new());
        ended.await.map(drop)
    }
}

/// The settings of a new session.
#[derive(Debug, Clone)]
pub(super) struct SessionSettings {
    pub(super) ttl: Duration,
    pub(super) lock_delay: Duration,
    pub(super) checks: Vec<String>,
}

fn parse<T: for<'a> Deserialize<'a>>(operation: &'static str, body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|_| not_consul(operation))
}

/// Encodes a key as the path of a URL.
pub(super) fn path(key: &str) -> PercentEncode<'_> {
    const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
        .remove(b'-')
        .remove(b'_')
        .remove(b'.')
        .remove(b'/');
    utf8_percent_encode(key, ESCAPED)
}
