//! I8: a fair engine grants in the order of its line.
//!
//! The order of the line is internal to the engine; without trusting the grants, only a survey
//! shows it. So: (1) claims that a survey shows in an order are granted in that order, (2) a claim
//! that a survey has shown is granted before any that was requested afterwards. Claims that were
//! never granted (killed, out of patience) are skipped, as the engine does.

use std::collections::HashMap;

use super::index::{Held, Index};
use super::{Params, Verdict, Violation};
use crate::lab::history::What;

/// I8: first come, first served.
pub(super) fn fifo(index: &Index<'_>, _: &Params) -> Verdict {
    let mut violations = Vec::new();
    let granted: HashMap<&str, &Held<'_>> =
        index.holds.iter().map(|hold| (hold.claim, hold)).collect();
    let mut compared = 0;
    for name in index.names() {
        let mut asked: Vec<&Held<'_>> = index.holds_of(name).collect();
        asked.sort_by_key(|hold| index.at(hold.called));
        let mut asked = asked.into_iter().peekable();
        // The greatest token of all claims that a survey has shown so far.
        let mut shown: Option<(&Held<'_>, usize)> = None;
        for (at, event) in index.history.events.iter().enumerate() {
            let What::Survey { line, .. } = &event.what else {
                continue;
            };
            if event.name != name {
                continue;
            }
            while let Some(hold) = asked.next_if(|hold| index.at(hold.called) <= event.at) {
                later(&mut violations, shown, hold);
            }
            let known: Vec<&Held<'_>> = line
                .iter()
                .filter_map(|shown| granted.get(shown.claim.as_str()).copied())
                .collect();
            for pair in known.windows(2) {
                compared += 1;
                if pair[0].token >= pair[1].token {
                    let text = format!(
                        "{} was ahead of {} in {name} and granted after it",
                        pair[0].called(),
                        pair[1].called()
                    );
                    let events = [at, pair[1].granted, pair[0].granted];
                    violations.push(Violation::new(text, events));
                }
            }
            let top = known.into_iter().max_by_key(|hold| hold.token);
            if let Some(top) = top.filter(|top| shown.is_none_or(|(s, _)| s.token < top.token)) {
                shown = Some((top, at));
            }
        }
        asked.for_each(|hold| later(&mut violations, shown, hold));
    }
    match compared {
        0 => Verdict::Undecided("no survey showed two claims that were granted".into()),
        _ => Verdict::of(violations),
    }
}

fn later(violations: &mut Vec<Violation>, shown: Option<(&Held<'_>, usize)>, hold: &Held<'_>) {
    if let Some((first, survey)) = shown.filter(|(first, _)| first.token > hold.token) {
        let text = format!(
            "{} was in line before {} was asked for, and granted after it",
            first.called(),
            hold.called()
        );
        let events = [survey, hold.called, hold.granted, first.granted];
        violations.push(Violation::new(text, events));
    }
}
