//! I2 and I3: which processes believed to hold at the same time, by one sweep over time.

use std::collections::HashSet;

use super::index::{Held, Index, Window};
use super::{Params, Verdict, Violation, ms};
use crate::lab::history::Grip;

/// The spans in which the running owner of each hold of `name` believed in it.
fn spans(index: &Index<'_>, name: &str) -> Vec<(Window, usize)> {
    let mut spans = Vec::new();
    for (at, hold) in index.holds.iter().enumerate() {
        if hold.name != name {
            continue;
        }
        let belief = Window {
            from: index.at(hold.granted),
            until: hold.until,
        };
        let parts = index.running(hold.client, belief, 0);
        spans.extend(parts.into_iter().map(|part| (part, at)));
    }
    spans.sort_by_key(|(span, _)| (span.from, span.until));
    spans
}

fn involved(holds: &[&Held<'_>]) -> Vec<usize> {
    let mut events: Vec<usize> = holds
        .iter()
        .flat_map(|hold| [Some(hold.granted), hold.ended])
        .flatten()
        .collect();
    events.sort_unstable();
    events.dedup();
    events
}

/// I2: exclusive holds never overlap.
pub(super) fn believed(index: &Index<'_>, params: &Params) -> Verdict {
    let mut violations = Vec::new();
    for name in index.names() {
        let mut latest: Option<(Window, usize)> = None;
        let mut seen = HashSet::new();
        for (span, at) in spans(index, name) {
            let hold = &index.holds[at];
            if !hold.is_whole() {
                continue;
            }
            latest = latest.filter(|(_, other)| {
                let other = &index.holds[*other];
                !params.excuses(index, other, span.from)
            });
            if let Some((before, other_at)) = latest
                && other_at != at
                && span.from < before.until
                && seen.insert((other_at, at))
            {
                let other = &index.holds[other_at];
                let text = format!(
                    "{} and {} of {name} were both believed in for {}",
                    other.called(),
                    hold.called(),
                    ms(before.overlap(span))
                );
                violations.push(Violation::new(text, involved(&[other, hold])));
            }
            if latest.is_none_or(|(before, _)| span.until > before.until) {
                latest = Some((span, at));
            }
        }
    }
    Verdict::of(violations)
}

/// I3: the weights held at once fit into the capacity; a writer excludes readers and permits.
pub(super) fn capacity(index: &Index<'_>, params: &Params) -> Verdict {
    let mut violations = Vec::new();
    for name in index.names() {
        let mut capacities: Vec<u32> = index
            .holds_of(name)
            .filter_map(|hold| match hold.grip {
                Grip::Part { capacity, .. } => Some(capacity),
                Grip::Whole => None,
            })
            .collect();
        capacities.sort_unstable();
        capacities.dedup();
        let capacity = match capacities[..] {
            [] => continue,
            [capacity] => capacity,
            _ => {
                return Verdict::Undecided(format!(
                    "{name} was used with several capacities: {capacities:?}"
                ));
            }
        };
        // Spans are half open, so an end sorts before a begin of the same time.
        let mut edges: Vec<(u64, bool, usize)> = Vec::new();
        for (span, at) in spans(index, name) {
            edges.push((span.from, true, at));
            edges.push((span.until, false, at));
        }
        edges.sort_unstable();
        let mut holding: Vec<usize> = Vec::new();
        for (when, begins, at) in edges {
            if !begins {
                holding.retain(|other| *other != at);
                continue;
            }
            holding.retain(|other| !params.excuses(index, &index.holds[*other], when));
            holding.push(at);
            let holds: Vec<&Held<'_>> = holding.iter().map(|at| &index.holds[*at]).collect();
            let weights = holds.iter().map(|hold| hold.grip.weight_in(capacity));
            let (total, parts) = (weights.sum::<u64>(), holds.iter().any(|h| !h.is_whole()));
            if parts && total > u64::from(capacity) {
                let list: Vec<String> = holds
                    .iter()
                    .map(|hold| format!("{} ({})", hold.called(), hold.grip))
                    .collect();
                let text = format!(
                    "at {:.6} s {name} was held beyond its capacity by {}",
                    when as f64 / 1e9,
                    list.join(", ")
                );
                violations.push(Violation::new(text, involved(&holds)));
            }
        }
    }
    Verdict::of(violations)
}
