//! I5 for registers: the fenced register, one partition per resource, is linearizable.

use std::collections::{BTreeMap, HashMap};

use super::index::Index;
use super::linear::{Model, Outcome, Timed, linearize};
use super::{Params, Verdict, Violation};
use crate::lab::history::{Kept, What, Written};

/// A register behind a fence.
#[derive(Debug, Clone, Copy, Default)]
pub struct Register;

/// An operation on the register, with its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// A write.
    Write {
        /// The value to store.
        kept: Kept,
        /// The answer.
        answer: Written,
    },
    /// A read, with its result.
    Read(Option<Kept>),
}

impl Model for Register {
    type State = Option<Kept>;
    type Op = Op;

    fn init(&self) -> Self::State {
        None
    }

    fn step(&self, state: &Self::State, op: &Op) -> Vec<Self::State> {
        let highest = state.as_ref().map_or(0, |kept| kept.token);
        match op {
            Op::Read(seen) if seen == state => vec![state.clone()],
            Op::Read(_) => Vec::new(),
            Op::Write { kept, answer } => match answer {
                Written::Accepted if kept.token >= highest => vec![Some(kept.clone())],
                Written::Accepted => Vec::new(),
                Written::Stale { highest: said } if *said == highest && kept.token < highest => {
                    vec![state.clone()]
                }
                Written::Stale { .. } => Vec::new(),
                Written::NotApplied => vec![state.clone()],
                Written::Unknown if kept.token < highest => vec![state.clone()],
                Written::Unknown => {
                    // The token is made durable before the data; a crash may come in between.
                    let value = state.as_ref().map(|kept| kept.value.clone());
                    let token_alone = Kept {
                        token: kept.token,
                        value: value.unwrap_or_default(),
                    };
                    vec![Some(kept.clone()), Some(token_alone)]
                }
            },
        }
    }

    fn spent(&self, state: &Self::State, op: &Op) -> bool {
        let highest = state.as_ref().map_or(0, |kept| kept.token);
        // The highest token never decreases.
        matches!(op, Op::Write { kept, .. } if kept.token < highest)
    }
}

/// An operation, with its call and answer as events.
type Seen = (Timed<Op>, usize, Option<usize>);

/// I5: all reads and answers of the storage are consistent with one order in real time.
pub(super) fn linearizable(index: &Index<'_>, params: &Params) -> Verdict {
    let mut objects: BTreeMap<&str, Vec<Seen>> = BTreeMap::new();
    let mut open: HashMap<(&str, u64), (&str, usize)> = HashMap::new();
    let mut reads: HashMap<(&str, u64), usize> = HashMap::new();
    for (at, event) in index.history.events.iter().enumerate() {
        let key = |op: u64| (event.client.as_str(), op);
        match &event.what {
            What::WriteCalled { op, token, value } => {
                let kept = Kept {
                    token: *token,
                    value: value.clone(),
                };
                let ops = objects.entry(&event.name).or_default();
                open.insert(key(*op), (&event.name, ops.len()));
                let op = Op::Write {
                    kept,
                    answer: Written::Unknown,
                };
                let (called, returned) = (event.at, None);
                let timed = Timed {
                    called,
                    returned,
                    op,
                };
                ops.push((timed, at, None));
            }
            What::ReadCalled { op } => {
                reads.insert(key(*op), at);
            }
            What::WriteReturned { op, answer } => {
                let Some((name, place)) = open.remove(&key(*op)) else {
                    return Verdict::Undecided(format!("an answer without a call: {event}"));
                };
                let write = objects.get_mut(name).and_then(|ops| ops.get_mut(place));
                if let Some((timed, _, returned)) = write
                    && let Op::Write { answer: known, .. } = &mut timed.op
                {
                    *known = answer.clone();
                    *returned = Some(at);
                    // A failure with an unknown outcome counts as no answer.
                    timed.returned = (*answer != Written::Unknown).then_some(event.at);
                }
            }
            What::ReadReturned { op, answer } => {
                let Some(called) = reads.remove(&key(*op)) else {
                    return Verdict::Undecided(format!("an answer without a call: {event}"));
                };
                let timed = Timed {
                    called: index.at(called),
                    returned: Some(event.at),
                    op: Op::Read(answer.clone()),
                };
                let ops = objects.entry(&event.name).or_default();
                ops.push((timed, called, Some(at)));
            }
            _ => {}
        }
    }
    if objects.is_empty() {
        return Verdict::Undecided("nothing was written or read".into());
    }
    let mut violations = Vec::new();
    for (name, ops) in objects {
        let timed: Vec<Timed<Op>> = ops.iter().map(|(timed, ..)| timed.clone()).collect();
        match linearize(&Register, &timed, params.limit) {
            Outcome::Linearizable => {}
            Outcome::OutOfTime => {
                return Verdict::Undecided(format!(
                    "{name}: no order of {} operations found within {:?}",
                    ops.len(),
                    params.limit
                ));
            }
            Outcome::Not(at) => {
                let (timed, called, returned) = &ops[at];
                let text = format!("{name}: no order explains {:?}", timed.op);
                let events: Vec<usize> = [Some(*called), *returned].into_iter().flatten().collect();
                violations.push(Violation::new(text, events));
            }
        }
    }
    Verdict::of(violations)
}
