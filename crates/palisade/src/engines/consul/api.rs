//! `Api`: requests to a Consul agent, each bounded in time, each error saying whether the change
//! may have been applied.
//!
//! One HTTP client per runtime; of several agents, the first that knows a leader. A request is
//! never sent twice: whoever asked decides what an unknown outcome means.

use std::sync::Arc;
use std::time::Duration;

use reqwest::{Method, StatusCode};
use serde::Deserialize;

use super::agents::{Access, Wire, connect};
use super::verdict::{UNKNOWN_TOKEN, Verdict, broken, denied};
use super::wire::{self, Op, Pair, TxnAnswer, TxnError};
use crate::core::error::{Error, Kind, Result};
use crate::engines::remote::{Link, Links, timed};

/// See the module's text.
pub(super) struct Api {
    access: Arc<Access>,
    links: Links<Wire>,
    /// `&dc=…&ns=…`, for every request.
    scope: String,
    has_token: bool,
    pub(super) timeout: Duration,
}

/// An answer as it came.
struct Answer {
    status: StatusCode,
    index: u64,
    body: Vec<u8>,
}

/// Keys as they were at an index.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    pub(super) pairs: Vec<Pair>,
    pub(super) index: u64,
}

/// How sure a read must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    /// As of now, confirmed by a majority.
    Consistent,
    /// Sleeps until the index is another, so long at the most. A hint.
    After(u64, Duration),
}

/// A transaction's end.
#[derive(Debug)]
pub(super) enum Committed {
    /// All of it was applied; what was written.
    Done(Vec<Pair>),
    /// Nothing was.
    Refused(Vec<TxnError>),
}

impl Api {
    pub(super) fn new(access: Access) -> Result<Self> {
        let mut scope = String::new();
        let named = [("dc", &access.datacenter), ("ns", &access.consul_namespace)];
        for (name, value) in named {
            if let Some(value) = value {
                scope += &format!("&{name}={}", wire::path(value));
            }
        }
        let token = access.token.read()?;
        // Fails now rather than at the first request.
        access.client(token.as_deref())?;
        let (timeout, has_token) = (access.timeout, token.is_some());
        let access = Arc::new(access);
        let connects = Arc::clone(&access);
        let links = Links::new(access.connect_timeout, move || {
            let access = Arc::clone(&connects);
            Box::pin(async move { connect(&access).await })
        });
        Ok(Self {
            access,
            links,
            scope,
            has_token,
            timeout,
        })
    }

    /// Connects, if this runtime has no connection yet.
    pub(super) async fn connect(&self) -> Result<()> {
        self.links.get().await.map(drop)
    }

    /// Whether it asks another datacenter or namespace than the agent's own.
    pub(super) fn is_elsewhere(&self) -> bool {
        !self.scope.is_empty()
    }

    pub(super) fn close(&self) {
        self.links.close();
    }

    /// Sends one request. `path` has its query, if only `?`.
    async fn send(
        &self,
        operation: &'static str,
        method: Method,
        path: &str,
        body: Vec<u8>,
        sleeps: Duration,
    ) -> Result<Answer> {
        let link = self.links.get().await?;
        let Wire { client, base, .. } = &link.connection;
        let url = format!("{base}{path}{}", self.scope);
        let request = client.request(method, url).body(body).send();
        let answer = async {
            let response = request.await?;
            let status = response.status();
            let index = response
                .headers()
                .get("x-consul-index")
                .and_then(|index| index.to_str().ok()?.parse().ok());
            let body = response.bytes().await?.to_vec();
            Ok::<_, reqwest::Error>(Answer {
                status,
                index: index.unwrap_or(0),
                body,
            })
        };
        match timed(operation, self.timeout + sleeps, answer).await {
            Ok(Ok(answer)) => self.judge(operation, &link, answer).await,
            Ok(Err(error)) => {
                self.links.broken(&link).await;
                Err(broken(operation, &link.connection.base, &error))
            }
            Err(late) => {
                // A renewal can't wait for a second one to be late, and a leave is sent again.
                if matches!(operation, "renew" | "leave") {
                    self.links.broken(&link).await;
                } else {
                    self.links.late(&link).await;
                }
                Err(late)
            }
        }
    }

    /// Says what an answer means, and whether its connection is still good.
    async fn judge(
        &self,
        operation: &'static str,
        link: &Link<Wire>,
        answer: Answer,
    ) -> Result<Answer> {
        let text = String::from_utf8_lossy(&answer.body);
        let verdict = Verdict {
            operation,
            has_token: self.has_token,
        };
        match verdict.of(answer.status, &text) {
            None => {
                self.links.answered(link);
                Ok(answer)
            }
            Some((error, _)) if error.message() == UNKNOWN_TOKEN && self.has_another(link) => {
                self.links.broken(link).await;
                let message = "the ACL token was replaced; the new one is used from now on";
                Err(Error::new(Kind::Unreachable, operation, message))
            }
            Some((error, keep)) => {
                if !keep {
                    // Another agent may do better.
                    self.links.broken(link).await;
                }
                Err(error)
            }
        }
    }

    /// Whether the file of the token has another one now than `link` sends.
    fn has_another(&self, link: &Link<Wire>) -> bool {
        let now = self.access.token.read();
        now.is_ok_and(|now| now.as_deref() != link.connection.token.as_deref())
    }

    /// Reads one key, or with `recurse` all that begin with it.
    pub(super) async fn read(
        &self,
        operation: &'static str,
        key: &str,
        recurse: bool,
        read: Read,
    ) -> Result<Seen> {
        let mut path = format!("/v1/kv/{}?", wire::path(key));
        let mut sleeps = Duration::ZERO;
        match read {
            Read::Consistent => path += "consistent",
            Read::After(index, wait) => {
                path += &format!("index={index}&wait={}ms", wait.as_millis().max(1));
                // Consul adds up to a sixteenth, so that sleepers don't wake all at once.
                sleeps = wait + wait / 16;
            }
        }
        if recurse {
            path += "&recurse";
        }
        let answer = self
            .send(operation, Method::GET, &path, Vec::new(), sleeps)
            .await
            .map_err(not_applied)?;
        let pairs = match answer.status {
            StatusCode::NOT_FOUND => Vec::new(),
            _ => parse(operation, &answer.body)?,
        };
        Ok(Seen {
            pairs,
            index: answer.index,
        })
    }

    /// Applies all operations or none.
    pub(super) async fn transact(&self, operation: &'static str, ops: &[Op]) -> Result<Committed> {
        let body = serde_json::to_vec(ops).unwrap_or_default();
        let answer = self
            .send(operation, Method::PUT, "/v1/txn?", body, Duration::ZERO)
            .await?;
        let parsed: TxnAnswer = match answer.status {
            StatusCode::NOT_FOUND => return Err(not_consul(operation)),
            _ => parse(operation, &answer.body).map_err(Error::maybe_applied)?,
        };
        let errors = parsed.errors.unwrap_or_default();
        if errors
            .iter()
            .any(|error| error.what.contains("ermission denied"))
        {
            return Err(denied(operation, self.has_token));
        }
        match errors.is_empty() {
            true => {
                let results = parsed.results.unwrap_or_default();
                Ok(Committed::Done(
                    results.into_iter().filter_map(|result| result.kv).collect(),
                ))
            }
            false => Ok(Committed::Refused(errors)),
        }
    }

    /// Which of these keys the session has locked, by one consistent read for many.
    pub(super) async fn locked_by(&self, session: &str, keys: &[String]) -> Result<Vec<bool>> {
        let mut locked = vec![true; keys.len()];
        for (part, chunk) in keys.chunks(MOST_OPS).enumerate() {
            let ops: Vec<Op> = chunk
                .iter()
                .map(|key| Op::check_session(key, session))
                .collect();
            let body = serde_json::to_vec(&ops).unwrap_or_default();
            let answer = self
                .send(
                    "audit",
                    Method::PUT,
                    "/v1/txn?consistent",
                    body,
                    Duration::ZERO,
                )
                .await
                .map_err(not_applied)?;
            let parsed: TxnAnswer = parse("audit", &answer.body)?;
            for error in parsed.errors.unwrap_or_default() {
                if error.what.contains("ermission denied") {
                    return Err(denied("audit", self.has_token));
                }
                if let Some(one) = locked.get_mut(part * MOST_OPS + error.op_index) {
                    *one = false;
                }
            }
        }
        Ok(locked)
    }

    /// Creates a session. An outcome that is not known leaves at most a session that nobody
    /// renews, so that the error always says that nothing was applied.
    pub(super) async fn create_session(&self, settings: &SessionSettings) -> Result<u128> {
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Created {
            #[serde(rename = "ID")]
            id: String,
        }
        let body = serde_json::json!({
            "Name": "palisade",
            "TTL": format!("{}ms", settings.ttl.as_millis()),
            "LockDelay": format!("{}ms", settings.lock_delay.as_millis()),
            "Behavior": "release",
            // Absent, Consul would add the check of the node's gossip. The second name is that
            // of newer versions.
            "Checks": settings.checks,
            "NodeChecks": settings.checks,
        });
        let body = body.to_string().into_bytes();
        let answer = self
            .send(
                "session",
                Method::PUT,
                "/v1/session/create?",
                body,
                Duration::ZERO,
            )
            .await
            .map_err(not_applied)?;
        let created: Created = match answer.status {
            StatusCode::OK => parse("session", &answer.body)?,
            _ => return Err(not_consul("session")),
        };
        wire::session_id(&created.id).ok_or_else(|| not_consul("session"))
    }

    /// Renews a session: `false` when there is none. The agent may be well and the connection
    /// dead: one that does not answer in time is given up, so that the next renewal has another.
    pub(super) async fn renew_session(&self, session: &str, within: Duration) -> Result<bool> {
        let path = format!("/v1/session/renew/{session}?");
        let mut over = None;
        let renewed = async {
            over = Some(self.links.get().await?);
            self.send("renew", Method::PUT, &path, Vec::new(), Duration::ZERO)
                .await
        };
        match timed("renew", within, renewed).await {
            Ok(answer) => Ok(answer?.status == StatusCode::OK),
            Err(late) => {
                if let Some(link) = over {
                    self.links.broken(&link).await;
                }
                Err(late)
            }
        }
    }

    /// Whether a session lives.
    pub(super) async fn has_session(&self, session: &str) -> Result<bool> {
        let path = format!("/v1/session/info/{session}?consistent");
        let answer = self
            .send("session", Method::GET, &path, Vec::new(), Duration::ZERO)
            .await
            .map_err(not_applied)?;
        let found: Option<Vec<serde_json::Value>> = parse("session", &answer.body)?;
        Ok(found.is_some_and(|found| !found.is_empty()))
    }

    pub(super) async fn destroy_session(&self, session: &str) -> Result<()> {
        let path = format!("/v1/session/destroy/{session}?");
        self.send("session", Method::PUT, &path, Vec::new(), Duration::ZERO)
            .await
            .map(drop)
    }

    /// One request as it is, for raw operations and checks.
    pub(super) async fn raw(
        &self,
        operation: &'static str,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(u16, Vec<u8>)> {
        let answer = self
            .send(operation, method, path, body, Duration::ZERO)
            .await?;
        Ok((answer.status.as_u16(), answer.body))
    }
}

/// How many operations Consul takes in one transaction.
const MOST_OPS: usize = 64;

/// What a session is made with.
#[derive(Debug, Clone)]
pub(super) struct SessionSettings {
    pub(super) ttl: Duration,
    pub(super) lock_delay: Duration,
    pub(super) checks: Vec<String>,
}

fn not_consul(operation: &'static str) -> Error {
    let message = "the answer is none of Consul's; is it Consul at this address?";
    Error::new(Kind::Unusable, operation, message)
}

/// A question changes nothing, whatever became of its answer.
fn not_applied(error: Error) -> Error {
    Error::new(error.kind(), error.operation(), error.message())
}

fn parse<T: for<'a> Deserialize<'a>>(operation: &'static str, body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|_| not_consul(operation))
}
