//! `Turns`: enters, or leaves, that one connection is asked for at the same time go together.
//!
//! An order that finds few calls under way goes at once, with those of all tasks that are ready to
//! run. Those that come meanwhile wait until there is an answer, and then go as one call of the
//! script, which costs the server and us little more than one of them. Together they are a task of
//! the connection's runtime, so that a caller that is dropped takes nobody else's order with it;
//! its own, if it has not gone yet, never goes. In a call everyone has their own answer, also an
//! error of their own.

use std::collections::VecDeque;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::Cmd;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::fault::refused;
use super::keys::LineKeys;
use super::scripts::Script;
use super::store::{Store, nonsense};
use super::wire::Wire;
use crate::core::claim::ClaimId;
use crate::core::error::{Error, Kind, Outcome, Result};
use crate::engines::remote::Link;

/// How many go in one call at most: beyond this there is little more to save.
const TOGETHER: usize = 32;

/// How many calls are under way at most: with two the server works on one while we deal with the
/// answers of the other. More of them would each have fewer to go together.
const CALLS: usize = 2;

/// What one claim asks the script for.
pub(super) struct Order {
    pub(super) keys: LineKeys,
    pub(super) claim: ClaimId,
    pub(super) words: Words,
}

/// What the scripts are told beside the id; described in `enter.lua` and `leave.lua`.
pub(super) enum Words {
    Enter { how: String, tail: String },
    Leave { counted: u64, in_doubt: bool },
}

impl Words {
    fn script(&self) -> Script {
        match self {
            Self::Enter { .. } => Script::Enter,
            Self::Leave { .. } => Script::Leave,
        }
    }

    fn write(&self, command: &mut Cmd) {
        match self {
            Self::Enter { how, tail } => command.arg(how).arg(tail),
            Self::Leave { counted, in_doubt } if *in_doubt => command.arg(format!("{counted}?")),
            Self::Leave { counted, .. } => command.arg(counted),
        };
    }
}

/// The orders of one connection for one script.
#[derive(Default)]
pub(super) struct Turns(Mutex<State>);

#[derive(Default)]
struct State {
    /// How many calls are, or somebody sees to.
    under_way: usize,
    /// Whether several went together last time: then it is worth a moment to see who is ready.
    crowded: bool,
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    order: Order,
    since: Instant,
    answer: oneshot::Sender<Result<String>>,
}

impl Turns {
    /// Takes an order; whether few calls are under way, so that whoever brought it must see to one.
    fn begin(&self, order: Order) -> (bool, oneshot::Receiver<Result<String>>) {
        let (answer, receiver) = oneshot::channel();
        let mut state = self.0.lock();
        state.waiting.push_back(Waiting {
            order,
            since: Instant::now(),
            answer,
        });
        let goes = state.under_way < CALLS;
        state.under_way += usize::from(goes);
        (goes, receiver)
    }

    fn is_crowded(&self) -> bool {
        self.0.lock().crowded
    }

    /// Who goes with the call that is under way now.
    fn next(&self) -> Vec<Waiting> {
        self.0.lock().next()
    }

    /// Ends a call, and says who goes with the one that takes its place, if anybody does.
    fn end(&self) -> Vec<Waiting> {
        let mut state = self.0.lock();
        let next = state.next();
        state.under_way -= usize::from(next.is_empty());
        next
    }
}

impl State {
    fn next(&mut self) -> Vec<Waiting> {
        let mut next = Vec::new();
        while next.len() < TOGETHER
            && let Some(waiting) = self.waiting.pop_front()
        {
            // Whoever is gone has left, and need not enter first.
            if !waiting.answer.is_closed() {
                next.push(waiting);
            }
        }
        if !next.is_empty() {
            self.crowded = next.len() > 1;
        }
        next
    }
}

/// A call that is under way. At its end, however it ends, those who wait go on.
struct Turn {
    store: Arc<Store>,
    link: Link<Wire>,
    script: Script,
}

impl Turn {
    async fn together(self, batch: Vec<Waiting>) {
        // The first has waited longest, and no longer than the call before it took.
        let waited = batch.first().map(|first| first.since.elapsed());
        let limit = self
            .store
            .timeout
            .saturating_sub(waited.unwrap_or_default());
        let (orders, mut answers): (Vec<_>, Vec<_>) = batch
            .into_iter()
            .map(|waiting| (waiting.order, waiting.answer))
            .unzip();
        let said = self.store.call(&self.link, self.script, &orders, limit);
        match said.await {
            Ok(said) => {
                for (answer, said) in answers.drain(..).zip(said) {
                    let _ = answer.send(Ok(said));
                }
            }
            // One that may not do this spoils the call for all: nothing was done for anybody.
            Err(error) if error.outcome() == Outcome::NotApplied && !error.is_transient() => {
                for (answer, order) in answers.drain(..).zip(&orders) {
                    let orders = slice::from_ref(order);
                    let said = self
                        .store
                        .call(&self.link, self.script, orders, limit)
                        .await;
                    let _ = answer.send(said.and_then(only));
                }
            }
            Err(error) => {
                for answer in answers.drain(..) {
                    let same = Error::new(error.kind(), error.operation(), error.message());
                    let same = match error.outcome() {
                        Outcome::NotApplied => same,
                        Outcome::MaybeApplied => same.maybe_applied(),
                    };
                    let _ = answer.send(Err(same));
                }
            }
        }
    }
}

impl Turn {
    /// Has several go together, without their callers.
    fn start(self, batch: Vec<Waiting>) {
        // Without a runtime there is nobody who could wait for an answer either.
        if !batch.is_empty()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(self.together(batch));
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let batch = self.link.connection.turns(self.script).end();
        if !batch.is_empty() {
            let next = Self {
                store: Arc::clone(&self.store),
                link: self.link.clone(),
                script: self.script,
            };
            next.start(batch);
        }
    }
}

/// The one answer to one order.
fn only(mut answers: Vec<String>) -> Result<String> {
    answers.pop().ok_or_else(|| nonsense("answer"))
}

impl Store {
    /// Has an order done, alone or together with others.
    pub(super) async fn order(self: &Arc<Self>, link: &Link<Wire>, order: Order) -> Result<String> {
        let script = order.words.script();
        let claim = order.claim;
        let (goes, receiver) = link.connection.turns(script).begin(order);
        let said = match goes {
            true => self.gather(link, script, claim).await,
            false => None,
        };
        let answer = match said {
            Some(said) => said.and_then(only)?,
            // Bounded by the call that it goes with.
            None => receiver.await.unwrap_or_else(|_| {
                let message = "the connection was closed";
                Err(Error::new(Kind::Unreachable, script.operation(), message).maybe_applied())
            })?,
        };
        match answer.strip_prefix("error ") {
            Some(why) => Err(refused(script.operation(), why)),
            None => Ok(answer),
        }
    }

    /// Sees to a call: of the order of `claim` alone, whose answer it returns, or of others, who are
    /// told by the task that they go with.
    async fn gather(
        self: &Arc<Self>,
        link: &Link<Wire>,
        script: Script,
        claim: ClaimId,
    ) -> Option<Result<Vec<String>>> {
        let turn = Turn {
            store: Arc::clone(self),
            link: link.clone(),
            script,
        };
        // Lets the others come along who have something to say already.
        if link.connection.turns(script).is_crowded() {
            tokio::task::yield_now().await;
        }
        let batch = link.connection.turns(script).next();
        // The order may have gone with another call meanwhile, and who is here be somebody else.
        let alone = match batch.as_slice() {
            [alone] if alone.order.claim == claim => alone,
            _ => {
                turn.start(batch);
                return None;
            }
        };
        // Boxed: with many at once hardly anybody goes alone, and their future stays small.
        let orders = slice::from_ref(&alone.order);
        Some(Box::pin(self.call(link, script, orders, self.timeout)).await)
    }

    /// One call of the script; an answer for each of the orders.
    async fn call(
        &self,
        link: &Link<Wire>,
        script: Script,
        orders: &[Order],
        limit: Duration,
    ) -> Result<Vec<String>> {
        let lines: Vec<&LineKeys> = orders.iter().map(|order| &order.keys).collect();
        let arguments = |command: &mut Cmd| {
            for order in orders {
                command.arg(order.claim.to_string());
                order.words.write(command);
            }
            if script == Script::Enter {
                self.mark_replicated(command);
            }
        };
        let operation = script.operation();
        let answers = self
            .run_within(limit, link, script, &lines, arguments)
            .await?;
        let claims = orders.iter().map(|order| order.claim);
        self.each_addressed(operation, link, claims, answers).await
    }
}
