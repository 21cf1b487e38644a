//! `Turns`: enters, or leaves, that one connection is asked for at the same time go together.
//!
//! An order that finds nothing under way goes alone and at once. Those that come meanwhile wait
//! until there is an answer, and then go as one call of the script, which costs the server and us
//! little more than one of them. Together they are a task of the connection's runtime, so that a
//! caller that is dropped takes nobody else's order with it; its own, if it has not gone yet,
//! never goes. In a call everyone has their own answer, also an error of their own.

use std::collections::VecDeque;
use std::slice;
use std::sync::Arc;

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
use crate::engines::remote::{Link, timed};

/// How many go in one call at most: beyond this there is nothing more to save, and with several
/// calls the server works on one while we deal with the answers of another.
const TOGETHER: usize = 32;

/// How many calls are under way at most before the next order waits for company.
const UNDER_WAY: usize = 1;

/// What one claim asks the script for.
pub(super) struct Order {
    pub(super) keys: LineKeys,
    pub(super) claim: ClaimId,
    pub(super) words: Words,
}

/// What the scripts are told beside the id; described in `enter.lua` and `leave.lua`.
pub(super) enum Words {
    Enter {
        ask: String,
        lasts: u64,
        tail: String,
        queue: bool,
    },
    Leave {
        counted: u64,
        in_doubt: bool,
    },
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
            Self::Enter {
                ask,
                lasts,
                tail,
                queue,
            } => command.arg(ask).arg(lasts).arg(tail).arg(u8::from(*queue)),
            Self::Leave { counted, in_doubt } => command.arg(counted).arg(u8::from(*in_doubt)),
        };
    }
}

/// The orders of one connection for one script.
#[derive(Default)]
pub(super) struct Turns(Mutex<State>);

#[derive(Default)]
struct State {
    under_way: usize,
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    order: Order,
    answer: oneshot::Sender<Result<String>>,
}

impl Turns {
    /// Gives the order back when it may go at once.
    fn begin(&self, order: Order) -> Result<Order, oneshot::Receiver<Result<String>>> {
        let mut state = self.0.lock();
        if state.under_way < UNDER_WAY {
            state.under_way += 1;
            return Ok(order);
        }
        let (answer, receiver) = oneshot::channel();
        state.waiting.push_back(Waiting { order, answer });
        Err(receiver)
    }

    /// Ends a call, and says who goes next.
    fn next(&self) -> Vec<Waiting> {
        let mut state = self.0.lock();
        let mut next = Vec::new();
        while next.len() < TOGETHER
            && let Some(waiting) = state.waiting.pop_front()
        {
            // Whoever is gone has left, and need not enter first.
            if !waiting.answer.is_closed() {
                next.push(waiting);
            }
        }
        if next.is_empty() {
            state.under_way -= 1;
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
        let (orders, mut answers): (Vec<_>, Vec<_>) = batch
            .into_iter()
            .map(|waiting| (waiting.order, waiting.answer))
            .unzip();
        match self.store.call(&self.link, self.script, &orders).await {
            Ok(said) => {
                for (answer, said) in answers.drain(..).zip(said) {
                    let _ = answer.send(Ok(said));
                }
            }
            // One that may not do this spoils the call for all: nothing was done for anybody.
            Err(error) if error.outcome() == Outcome::NotApplied && !error.is_transient() => {
                for (answer, order) in answers.drain(..).zip(&orders) {
                    let orders = slice::from_ref(order);
                    let said = self.store.call(&self.link, self.script, orders).await;
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

impl Drop for Turn {
    fn drop(&mut self) {
        let batch = self.link.connection.turns(self.script).next();
        if batch.is_empty() {
            return;
        }
        // Without a runtime there is nobody who could wait for an answer either.
        if let Ok(runtime) = Handle::try_current() {
            let next = Self {
                store: Arc::clone(&self.store),
                link: self.link.clone(),
                script: self.script,
            };
            runtime.spawn(next.together(batch));
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
        let answer = match link.connection.turns(script).begin(order) {
            Ok(order) => {
                let turn = Turn {
                    store: Arc::clone(self),
                    link: link.clone(),
                    script,
                };
                let said = self.call(link, script, slice::from_ref(&order)).await;
                drop(turn);
                said.and_then(only)?
            }
            Err(receiver) => {
                let answer = timed(script.operation(), self.timeout, receiver).await?;
                answer.unwrap_or_else(|_| {
                    let message = "the connection was closed";
                    Err(Error::new(Kind::Unreachable, script.operation(), message).maybe_applied())
                })?
            }
        };
        match answer.strip_prefix("error ") {
            Some(why) => Err(refused(script.operation(), why)),
            None => Ok(answer),
        }
    }

    /// One call of the script; an answer for each of the orders.
    async fn call(
        &self,
        link: &Link<Wire>,
        script: Script,
        orders: &[Order],
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
        let answers = self.run(operation, link, script, &lines, arguments).await?;
        let claims = orders.iter().map(|order| order.claim);
        self.each_addressed(operation, link, claims, answers).await
    }
}
