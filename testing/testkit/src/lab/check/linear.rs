//! Linearizability of one object: is there an order of its operations that respects real time and
//! that the object allows?
//!
//! Just-in-time linearization (Lowe). Events are processed in the order of time, with the set of
//! all configurations (which open operations were linearized, and the state) that explain them so
//! far. An operation is linearized when its answer comes at the latest; one without an answer stays
//! open for ever. If no configuration is left, the answer that emptied the set is at fault. The set
//! also serves as the memo, so no configuration is examined twice.

use std::collections::HashSet;
use std::fmt::Debug;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// A sequential object.
pub trait Model {
    /// Its state.
    type State: Clone + Eq + Hash + Debug;
    /// An operation with its answer.
    type Op;

    /// The initial state.
    fn init(&self) -> Self::State;
    /// The states that `op`, with its answer, may lead to; empty if that answer is impossible.
    fn step(&self, state: &Self::State, op: &Self::Op) -> Vec<Self::State>;
    /// Whether `op`, which was not answered, can change neither this state nor any later one.
    fn spent(&self, state: &Self::State, op: &Self::Op) -> bool;
}

/// An operation with times. If it has no answer, it may take effect at any time after its call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timed<Op> {
    /// When it was called.
    pub called: u64,
    /// When it was answered.
    pub returned: Option<u64>,
    /// The operation and its answer.
    pub op: Op,
}

/// The result of the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// There is such an order.
    Linearizable,
    /// There is none: no order explains the answer of this operation.
    Not(usize),
    /// The time limit was reached.
    OutOfTime,
}

/// Searches for an order of `ops` that `model` allows, for at most `limit`.
pub fn linearize<M: Model>(model: &M, ops: &[Timed<M::Op>], limit: Duration) -> Outcome {
    let deadline = Instant::now() + limit;
    // A call sorts before an answer of the same time, so that such operations count as concurrent.
    let mut edges: Vec<(u64, bool, usize)> = Vec::new();
    for (at, op) in ops.iter().enumerate() {
        edges.push((op.called, false, at));
        edges.extend(op.returned.map(|when| (when, true, at)));
    }
    edges.sort_unstable();
    let mut open: Vec<usize> = Vec::new();
    let mut now: HashSet<(Vec<usize>, M::State)> = HashSet::from([(Vec::new(), model.init())]);
    for (_, answered, at) in edges {
        if !answered {
            open.push(at);
            continue;
        }
        let mut next = HashSet::new();
        let mut seen: HashSet<(Vec<usize>, M::State)> = HashSet::new();
        let mut todo: Vec<(Vec<usize>, M::State)> = now.drain().collect();
        while let Some((done, state)) = todo.pop() {
            if Instant::now() > deadline {
                return Outcome::OutOfTime;
            }
            if done.contains(&at) {
                // It no longer matters whether a spent operation took effect, so it is dropped to
                // keep the number of configurations small.
                let open = |op: &usize| {
                    let spent = ops[*op].returned.is_none() && model.spent(&state, &ops[*op].op);
                    *op != at && !spent
                };
                let done = done.into_iter().filter(open).collect();
                next.insert((done, state));
                continue;
            }
            if !seen.insert((done.clone(), state.clone())) {
                continue;
            }
            for &op in open.iter().filter(|op| !done.contains(op)) {
                for after in model.step(&state, &ops[op].op) {
                    // An unanswered operation that has no effect need not be linearized.
                    if ops[op].returned.is_none() && after == state {
                        continue;
                    }
                    let mut with = done.clone();
                    with.push(op);
                    with.sort_unstable();
                    todo.push((with, after));
                }
            }
        }
        if next.is_empty() {
            return Outcome::Not(at);
        }
        open.retain(|other| *other != at);
        now = next;
    }
    Outcome::Linearizable
}
