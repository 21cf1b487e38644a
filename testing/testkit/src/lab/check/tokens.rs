//! I1, I4 and I13: tokens rise, by one scan in real-time order with a running maximum.

use std::collections::HashMap;

use super::index::{Held, Index, Window};
use super::{Params, Verdict, Violation, nanos};
use crate::lab::history::{What, Written};

/// I4: if one grant was requested after another was answered, it has the greater token, and no two
/// exclusive grants share a token. Permits and readers are not compared with each other, because
/// they are not fenced.
pub(super) fn order(index: &Index<'_>, _: &Params) -> Verdict {
    let mut violations = Vec::new();
    for name in index.names() {
        let holds: Vec<&Held<'_>> = index.holds_of(name).collect();
        let mut by_token: HashMap<u64, &Held<'_>> = HashMap::new();
        for hold in &holds {
            if let Some(other) = by_token.insert(hold.token, hold)
                && other.claim != hold.claim
                && other.conflicts(hold)
            {
                let text = format!(
                    "{} and {} of {name} are the same",
                    other.called(),
                    hold.called()
                );
                violations.push(Violation::new(text, [other.granted, hold.granted]));
            }
        }
        let mut asked = holds.clone();
        asked.sort_by_key(|hold| index.at(hold.called));
        let mut answered = holds.iter().peekable();
        let (mut all, mut whole): (Option<&Held<'_>>, Option<&Held<'_>>) = (None, None);
        for hold in asked {
            while let Some(before) =
                answered.next_if(|before| index.at(before.granted) < index.at(hold.called))
            {
                let greater = |top: Option<&Held<'_>>| top.is_none_or(|t| t.token < before.token);
                if greater(all) {
                    all = Some(before);
                }
                if before.is_whole() && greater(whole) {
                    whole = Some(before);
                }
            }
            let before = if hold.is_whole() { all } else { whole };
            if let Some(before) = before.filter(|before| before.token > hold.token) {
                let text = format!(
                    "{} of {name} is later and lower than {}",
                    hold.called(),
                    before.called()
                );
                let events = [before.granted, hold.called, hold.granted];
                violations.push(Violation::new(text, events));
            }
        }
    }
    Verdict::of(violations)
}

/// I1: accepted tokens never decrease. Checked by the answers in real-time order, and by the
/// storage's own record at the end.
pub(super) fn fenced(index: &Index<'_>, _: &Params) -> Verdict {
    let events = &index.history.events;
    let mut violations = Vec::new();
    let mut calls: HashMap<(&str, u64), (usize, u64)> = HashMap::new();
    // For each resource, the highest acknowledged token, by the time of the answer.
    let mut answered: HashMap<&str, Vec<(u64, u64, usize)>> = HashMap::new();
    let mut stored: HashMap<&str, (u64, usize)> = HashMap::new();
    let mut seen = false;
    for (at, event) in events.iter().enumerate() {
        match &event.what {
            What::WriteCalled { op, token, .. } => {
                calls.insert((&event.client, *op), (at, *token));
            }
            What::WriteReturned {
                op,
                answer: Written::Accepted,
            } => {
                let Some((called, token)) = calls.get(&(event.client.as_str(), *op)).copied()
                else {
                    return Verdict::Undecided(format!("an answer without a call: {event}"));
                };
                seen = true;
                let before = answered.entry(&event.name).or_default();
                let known = before.partition_point(|(when, ..)| *when < events[called].at);
                if let Some((_, highest, by)) = known.checked_sub(1).map(|last| before[last])
                    && highest > token
                {
                    let text = format!(
                        "{} wrote with token {token} after {highest} had been accepted",
                        event.client
                    );
                    violations.push(Violation::new(text, [by, called, at]));
                }
                let top = before.last().filter(|(_, highest, _)| *highest > token);
                let (highest, by) = top.map_or((token, at), |(_, highest, by)| (*highest, *by));
                before.push((event.at, highest, by));
            }
            What::Stored { token, .. } => {
                if let Some((before, by)) = stored.insert(&event.name, (*token, at))
                    && before > *token
                {
                    let text = format!("the storage took token {token} after {before}");
                    violations.push(Violation::new(text, [by, at]));
                }
            }
            _ => {}
        }
    }
    if seen {
        Verdict::of(violations)
    } else {
        Verdict::Undecided("nothing was written".into())
    }
}

/// I13: a term has one leader, terms rise, and the work of the old leader has ended before that of
/// the new one begins. A leader that was stopped may take a moment after that to drop its work.
pub(super) fn election(index: &Index<'_>, params: &Params) -> Verdict {
    let mut violations = Vec::new();
    let mut terms: HashMap<(&str, u64), (&str, usize)> = HashMap::new();
    let mut open: HashMap<(&str, u64), usize> = HashMap::new();
    let mut works: Vec<(Window, usize, Option<usize>)> = Vec::new();
    let end = index.history.end();
    for (at, event) in index.history.events.iter().enumerate() {
        match &event.what {
            What::LeadBegin { token } => {
                let term = terms.insert((&event.name, *token), (&event.client, at));
                if let Some((other, by)) = term {
                    let text = format!("{other} and {} both led in term {token}", event.client);
                    violations.push(Violation::new(text, [by, at]));
                }
                let killed = index.kills.get(event.client.as_str());
                let (until, by) = killed.map_or((end, None), |kill| (index.at(*kill), Some(*kill)));
                open.insert((&event.client, *token), works.len());
                let from = event.at;
                works.push((Window { from, until }, at, by));
            }
            What::LeadEnd { token } => {
                let Some(work) = open.remove(&(event.client.as_str(), *token)) else {
                    return Verdict::Undecided(format!("an end without a begin: {event}"));
                };
                works[work].0.until = event.at;
                works[work].2 = Some(at);
            }
            _ => {}
        }
    }
    if works.is_empty() {
        return Verdict::Undecided("nobody led".into());
    }
    let wake = nanos(params.slack);
    let term = |begin: usize| index.history.events[begin].token().unwrap_or(0);
    let running = |window: Window, begin: usize| {
        let client = &index.history.events[begin].client;
        index.running(client, window, wake)
    };
    let mut highest: Option<usize> = None;
    for &(window, begin, _) in &works {
        // A leader that was stopped before it could begin notices as soon as it checks.
        let until = window.from + 1;
        let excused = running(Window { until, ..window }, begin).is_empty();
        let before = highest.filter(|before| term(*before) > term(begin) && !excused);
        if let Some(before) = before {
            let text = format!("term {} came after term {}", term(begin), term(before));
            violations.push(Violation::new(text, [before, begin]));
        }
        if highest.is_none_or(|before| term(before) < term(begin)) {
            highest = Some(begin);
        }
    }
    let mut spans: Vec<(Window, usize)> = Vec::new();
    for (work, (window, begin, _)) in works.iter().enumerate() {
        let parts = running(*window, *begin).into_iter();
        spans.extend(parts.map(|part| (part, work)));
    }
    spans.sort_by_key(|(span, _)| (span.from, span.until));
    let mut latest: Option<(Window, usize)> = None;
    for (span, work) in spans {
        latest = latest.filter(|(before, other)| {
            let begin = works[*other].1;
            let hold = index.hold(&index.history.events[begin].client, term(begin));
            let excused = |hold| params.excuses(index, hold, span.from);
            !(span.from < before.until && hold.is_some_and(excused))
        });
        if let Some((before, other)) = latest.filter(|(_, other)| *other != work)
            && span.from < before.until
        {
            let ((_, one, one_end), (_, two, two_end)) = (works[other], works[work]);
            let text = format!("terms {} and {} were at work at once", term(one), term(two));
            let events = [Some(one), one_end, Some(two), two_end];
            let events: Vec<usize> = events.into_iter().flatten().collect();
            violations.push(Violation::new(text, events));
        }
        if latest.is_none_or(|(before, _)| span.until > before.until) {
            latest = Some((span, work));
        }
    }
    Verdict::of(violations)
}
