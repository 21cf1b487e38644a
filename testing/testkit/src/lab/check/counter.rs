//! I5 for counters: the storage keeps every write it accepted, and no other.
//!
//! acked ≤ final ≤ acked + unknown. Beyond these numbers, each entry of the storage's own record
//! must be a write that was acknowledged or whose outcome is unknown, and must occur once.

use std::collections::{BTreeMap, HashMap};

use super::index::Index;
use super::{Params, Verdict, Violation};
use crate::lab::history::{What, Written};

struct Write {
    called: usize,
    answer: Option<(usize, Written)>,
    stored: Option<usize>,
}

/// I5: no update is lost, invented or stored twice.
pub(super) fn no_lost_update(index: &Index<'_>, _: &Params) -> Verdict {
    let mut writes: BTreeMap<(&str, u64), Write> = BTreeMap::new();
    let mut violations = Vec::new();
    let mut stored: HashMap<&str, u64> = HashMap::new();
    let mut complete = None;
    for (at, event) in index.history.events.iter().enumerate() {
        let client = event.client.as_str();
        match &event.what {
            What::WriteCalled { op, .. } => {
                let write = Write {
                    called: at,
                    answer: None,
                    stored: None,
                };
                writes.insert((client, *op), write);
            }
            What::WriteReturned { op, answer } => match writes.get_mut(&(client, *op)) {
                Some(write) => write.answer = Some((at, answer.clone())),
                None => return Verdict::Undecided(format!("an answer without a call: {event}")),
            },
            What::Stored { op, .. } => {
                *stored.entry(&event.name).or_default() += 1;
                let Some(write) = writes.get_mut(&(client, *op)) else {
                    let text = format!("write {op} of {client} is stored and was never made");
                    violations.push(Violation::new(text, [at]));
                    continue;
                };
                if let Some(first) = write.stored.replace(at) {
                    let text = format!("write {op} of {client} is stored twice");
                    violations.push(Violation::new(text, [write.called, first, at]));
                }
            }
            What::StoredAll { count } => complete = Some(*count),
            _ => {}
        }
    }
    if complete != Some(stored.values().sum()) {
        return Verdict::Undecided("the storage's record at the end is missing".into());
    }
    for ((client, op), write) in &writes {
        match (&write.answer, write.stored) {
            (Some((at, Written::Accepted)), None) => {
                let text = format!("write {op} of {client} was acknowledged and is lost");
                violations.push(Violation::new(text, [write.called, *at]));
            }
            (Some((at, answer @ (Written::Stale { .. } | Written::NotApplied))), Some(by)) => {
                let text = format!("write {op} of {client} is stored, the answer was {answer:?}");
                violations.push(Violation::new(text, [write.called, *at, by]));
            }
            _ => {}
        }
    }
    Verdict::of(violations)
}
