//! `redlock:` and `rediss+redlock:` — a majority of several independent Redis servers.
//!
//! Each server keeps an exclusive claim as in `redis:` (with the same keys and scripts, so that
//! other Redlock clients and ours exclude each other), with a token that the client proposes. A
//! claim holds when a majority of all servers has voted for it before its lease has ended. A
//! majority has seen the token, so the next majority counts above it. A permit is an exclusive
//! place of its own, the same one on a majority. Waiters have nothing on the servers.
//!
//! `acquire` keeps the waiting claims, and a `ballot` asks the `node`s and evaluates their votes.

mod acquire;
mod ballot;
#[cfg(feature = "baseline")]
mod baseline;
pub mod config;
mod inspect;
mod node;
mod notify;
mod release;
mod renew;
mod waiter;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;

use self::acquire::Waiting;
use self::ballot::Ballot;
pub use self::config::FACTORY;
use self::node::Node;
use crate::keys::Keys;
use palisade_core::engine::{BoxFuture, ClaimId, Engine, Ticket, rounded};
use palisade_core::{BootTime, Capability, Error, ErrorKind, Result};
use palisade_kit::tombstones::Tombstones;
use palisade_kit::{absent, rooms};

/// The least time that a server has for its reply.
const SHORTEST: Duration = Duration::from_millis(50);

/// A namespace of all the servers.
struct Redlock {
    nodes: Vec<Arc<Node>>,
    quorum: usize,
    keys: Keys,
    waiting: Arc<Waiting>,
    left: Mutex<Tombstones>,
    /// Claims that were granted before all servers had answered.
    under_way: Mutex<HashMap<ClaimId, Arc<Ballot>>>,
    /// The greatest token that was seen or proposed.
    seen: AtomicU64,
    /// The random name of this client on the servers.
    channel: String,
    capability: Capability,
    node_timeout: Option<Duration>,
    default_ttl: Duration,
    shown: String,
}

impl Redlock {
    /// How long to wait for one server.
    fn limit(&self, ttl: Duration) -> Duration {
        self.node_timeout.unwrap_or((ttl / 100).max(SHORTEST))
    }

    /// Whether a claim was left before it arrived.
    fn was_left(&self, claim: ClaimId) -> bool {
        self.left.lock().has(claim, BootTime::now())
    }

    /// All servers have answered, so the ballot is no longer in flight.
    fn settled(&self, ballot: &Arc<Ballot>) {
        let mut under_way = self.under_way.lock();
        let same = under_way.get(&ballot.id);
        if same.is_some_and(|known| Arc::ptr_eq(known, ballot)) {
            under_way.remove(&ballot.id);
        }
    }

    /// Asks all servers until `enough` returns true, all have answered or `limit` has passed;
    /// returns each answer. The remaining requests run on in the background.
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
        // The answers up to the limit count.
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
                None => Some(node.blame(&no_answer(operation, limit))),
            });
        let errors: Vec<Error> = errors.collect();
        let error = self.no_majority(operation, 0, &mut [], &errors);
        Err(error.maybe_applied())
    }

    /// The error for too few answers: `abstaining` has when each server votes that answered but does
    /// not vote yet, `errors` what is wrong with others, and `unknown` were not waited for.
    fn no_majority(
        &self,
        operation: &'static str,
        unknown: usize,
        abstaining: &mut [BootTime],
        errors: &[Error],
    ) -> Error {
        let (nodes, quorum, down) = (self.nodes.len(), self.quorum, errors.len());
        let mut said: Vec<String> = Vec::new();
        if let Some(not_yet) = self.not_yet(abstaining, down) {
            said.push(not_yet + " (see restart_guard=)");
        }
        let why: Vec<&str> = errors.iter().map(Error::message).collect();
        let why = why.join("; ");
        match nodes - down {
            _ if why.is_empty() && said.is_empty() => said.push(format!(
                "fewer than {quorum} of {nodes} servers answered in time"
            )),
            // Enough servers are there.
            _ if why.is_empty() => {}
            left if left >= quorum => said.push(why),
            _ if unknown > 0 => said.push(format!(
                "{down} of {nodes} servers can't be used, and {quorum} are needed: {why}"
            )),
            left => said.push(format!(
                "{left} of {nodes} servers answered, and {quorum} must: {why}"
            )),
        }
        // An error that needs a fix by the user determines the kind.
        let worst = errors.iter().find(|error| !error.is_transient());
        let kind = worst.map_or(ErrorKind::Unreachable, Error::kind);
        Error::new(kind, operation, said.join("; "))
    }

    /// What to say of servers that do not vote yet; `down` others can't.
    fn not_yet(&self, abstaining: &mut [BootTime], down: usize) -> Option<String> {
        if abstaining.is_empty() {
            return None;
        }
        abstaining.sort_unstable();
        let nodes = self.nodes.len();
        let can = nodes.saturating_sub(abstaining.len() + down);
        let guard = self.nodes.iter().find_map(|node| node.guard)?;
        let count = abstaining.len();
        let mut said = format!(
            "{count} of {nodes} servers restarted less than {guard:?} ago and do not vote yet"
        );
        // The server whose vote completes a majority.
        let needed = self.quorum.saturating_sub(can);
        if let Some(by) = needed.checked_sub(1).and_then(|at| abstaining.get(at)) {
            let seconds = by.remaining().as_secs_f64().ceil();
            said.push_str(&format!("; a majority can vote in {seconds}s"));
        }
        Some(said)
    }
}

/// The error for a server that has not answered.
fn no_answer(operation: &'static str, limit: Duration) -> Error {
    let message = format!("no answer within {}", rounded(limit));
    Error::new(ErrorKind::Unreachable, operation, message)
}

/// The engine. An attempt is completed even if its caller is dropped, and keeps the engine alive.
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
