//! Linearizability of one object: is there an order of its operations that keeps real time and
//! that the object allows?
//!
//! Just-in-time linearization (Lowe): events in the order of time, and the set of all
//! configurations (what was linearized of the open operations, and the state) that explain them
//! so far. An operation is linearized at the latest when its answer comes; one without an answer
//! stays open for ever. When no configuration is left, the answer that emptied the set is at fault.
//! A set of configurations is its own memo: none is looked at twice.

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

    /// The state at the begin.
    fn init(&self) -> Self::State;
    /// The states that `op`, answered as it was, may lead to; none when it can't be answered so.
    fn step(&self, state: &Self::State, op: &Self::Op) -> Vec<Self::State>;
    /// Whether `op`, which was not answered, can change neither this state nor any that follows.
    fn spent(&self, state: &Self::State, op: &Self::Op) -> bool;
}

/// An operation in time. Without an answer it may take effect at any time after its call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timed<Op> {
    /// When it was called.
    pub called: u64,
    /// When it was answered.
    pub returned: Option<u64>,
    /// What it was, and the answer.
    pub op: Op,
}

/// What the check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// There is such an order.
    Linearizable,
    /// There is none: no order explains the answer of this operation.
    Not(usize),
    /// The limit came first.
    OutOfTime,
}

/// Looks for an order of `ops` that `model` allows, for at most `limit`.
pub fn linearize<M: Model>(model: &M, ops: &[Timed<M::Op>], limit: Duration) -> Outcome {
    let deadline = Instant::now() + limit;
    // Calls before answers of the same time: such operations count as concurrent.
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
                // Whether a spent operation took effect no longer matters: forgetting it keeps
                // the configurations few.
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
                    // Without an answer nobody has to explain why nothing happened.
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
