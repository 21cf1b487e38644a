//! `redlock:` and `rediss+redlock:` — a majority of several Redis servers that know nothing of each
//! other.
//!
//! Each server has the exclusive claim of `redis:` (the same keys and scripts, so that other Redlock
//! clients and ours exclude each other), with a token that the client proposes. A claim holds when a
//! majority of all servers has voted for it and its lease has not run out meanwhile; the token is one
//! that a majority has seen, so that the next majority counts past it. A permit is one exclusive
//! place of its own, the same on a majority. Who waits has nothing on the servers.
//!
//! `acquire` asks the `node`s, `quorum` says what their votes come to, `waiting` keeps those who
//! wait.

mod acquire;
#[cfg(feature = "baseline")]
mod baseline;
pub(crate) mod config;
mod inspect;
mod node;
mod notify;
mod quorum;
mod release;
mod renew;
mod waiting;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;

pub(crate) use self::config::FACTORY;
use self::node::{Ballot, Node};
use self::waiting::Waiting;
use crate::core::capability::Capability;
use crate::core::claim::ClaimId;
use crate::core::clock::BootTime;
use crate::core::engine::{BoxFuture, Engine};
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::ticket::Ticket;
use crate::engines::kit::tombstones::Tombstones;
use crate::engines::kit::{absent, rooms};
use crate::engines::redis::keys::Keys;

/// The least that a server is given to answer in.
const SHORTEST: Duration = Duration::from_millis(50);

/// A namespace of all the servers.
struct Redlock {
    nodes: Vec<Arc<Node>>,
    quorum: usize,
    keys: Keys,
    waiting: Arc<Waiting>,
    left: Mutex<Tombstones>,
    /// Claims that were granted while some servers had not answered.
    under_way: Mutex<HashMap<ClaimId, Arc<Ballot>>>,
    /// The greatest token that was seen or proposed.
    seen: AtomicU64,
    /// What the servers call this client.
    channel: String,
    capability: Capability,
    node_timeout: Option<Duration>,
    default_ttl: Duration,
    shown: String,
}

impl Redlock {
    /// How long one server is waited for.
    fn limit(&self, ttl: Duration) -> Duration {
        let share = (ttl / 100).max(SHORTEST);
        self.node_timeout.unwrap_or(share)
    }

    /// A token above all that were seen, and above the clock.
    fn propose(&self) -> u64 {
        let clock = node::clock();
        let next = |seen: u64| clock.max(seen + 1);
        let seen = self
            .seen
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |seen| {
                Some(next(seen))
            });
        next(seen.unwrap_or_else(|seen| seen))
    }

    fn has_seen(&self, token: u64) {
        self.seen.fetch_max(token, Ordering::Relaxed);
    }

    /// Whether a claim was left before it arrived.
    fn was_left(&self, claim: ClaimId) -> bool {
        self.left.lock().has(claim, BootTime::now())
    }

    /// All servers have answered.
    fn settled(&self, ballot: &Arc<Ballot>) {
        let mut under_way = self.under_way.lock();
        let same = under_way.get(&ballot.id);
        if same.is_some_and(|known| Arc::ptr_eq(known, ballot)) {
            under_way.remove(&ballot.id);
        }
    }

    /// Asks all servers, until `enough` says so, all have answered or `limit` has passed; what each
    /// answered. Those that have not are not waited for, but go on.
    ///
    /// # Errors
    /// When fewer than a majority answered, maybe applied.
    async fn gather<T, F>(
        &self,
        operation: &'static str,
        limit: Duration,
        ask: impl Fn(Arc<Node>) -> F,
        enough: impl Fn(&[Option<Result<T>>]) -> bool,
    ) -> Result<Vec<Option<T>>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let asking = self.nodes.iter().map(|node| {
            let (at, answer) = (node.at, ask(Arc::clone(node)));
            Box::pin(async move { (at, answer.await) }) as BoxFuture<(usize, Result<T>)>
        });
        let mut asking: FuturesUnordered<_> = asking.collect();
        let mut answers: Vec<Option<Result<T>>> = self.nodes.iter().map(|_| None).collect();
        let answering = async {
            while let Some((at, answer)) = asking.next().await {
                answers[at] = Some(answer);
                if enough(&answers) {
                    return;
                }
            }
        };
        // Whatever there is by then counts.
        let _ = tokio::time::timeout(limit, answering).await;
        if !asking.is_empty() {
            tokio::spawn(async move { while asking.next().await.is_some() {} });
        }
        let up = answers.iter().filter(|a| matches!(a, Some(Ok(_)))).count();
        if up >= self.quorum {
            return Ok(answers
                .into_iter()
                .map(|a| a.and_then(Result::ok))
                .collect());
        }
        let errors = answers
            .iter()
            .zip(&self.nodes)
            .filter_map(|(answer, node)| match answer {
                Some(Ok(_)) => None,
                Some(Err(error)) => Some(node.blame(error)),
                None => {
                    let message = format!("no answer within {limit:?}");
                    let late = Error::new(ErrorKind::Unreachable, operation, message);
                    Some(node.blame(&late))
                }
            });
        let errors: Vec<Error> = errors.collect();
        Err(self.no_majority(operation, up, &errors).maybe_applied())
    }

    /// Too few servers have answered: what is wrong with the others.
    fn no_majority(&self, operation: &'static str, up: usize, errors: &[Error]) -> Error {
        let (nodes, quorum) = (self.nodes.len(), self.quorum);
        let said: Vec<&str> = errors.iter().map(Error::message).collect();
        let message = format!(
            "{up} of {nodes} servers answered, and {quorum} must: {}",
            said.join("; ")
        );
        // What is for people first.
        let worst = errors.iter().find(|error| !error.is_transient());
        let kind = worst.map_or(ErrorKind::Unreachable, Error::kind);
        Error::new(kind, operation, message)
    }
}

/// The engine: a try goes on when its caller is dropped, and keeps it alive.
struct RedlockEngine(Arc<Redlock>);

impl Engine for RedlockEngine {
    fn capability(&self) -> Capability {
        self.0.capability
    }

    fn describe(&self) -> String {
        self.0.shown.clone()
    }

    rooms! { self.0:
        acquire { enter wait }
        renew { renew }
        release { leave amend evict }
        notify { alarms watch }
        inspect { survey check }
        absent { audit resize queues }
    }

    fn key(&self, ticket: &Ticket) -> Option<String> {
        let keys = self.0.keys.line(&ticket.name).ok()?;
        Some(keys.key)
    }

    async fn close(&self) {
        for node in &self.0.nodes {
            node.client.servers.close();
        }
    }
}
