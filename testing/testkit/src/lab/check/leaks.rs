//! I11 and I12: no unknown claim stays in a line. Every claim in a survey must belong to a hold or
//! to an acquire in progress, or have done so until a moment ago.

use std::collections::HashMap;
use std::time::Duration;

use super::index::{Attempt, Held, Index, Window};
use super::{Params, Verdict, Violation, ms, nanos};
use crate::lab::history::{Answer, Shown, What};

/// How long a dropped acquire or hold may stay in the line of a reachable engine.
const LEAVE: Duration = Duration::from_secs(1);

/// A claim in a survey that should have gone.
struct Leak {
    violation: Violation,
    /// Whether it was left by a dropped future, and not by an acquire that was answered.
    dropped: bool,
}

/// I11: an answer never leaves a hidden place in the line, and a claim is granted only once.
pub(super) fn honest_unknown(index: &Index<'_>, params: &Params) -> Verdict {
    let mut violations = Vec::new();
    let mut claims: HashMap<&str, &Held<'_>> = HashMap::new();
    for hold in &index.holds {
        if let Some(other) = claims.insert(hold.claim, hold) {
            let text = format!(
                "claim {} was granted twice, with token {} and {}",
                hold.claim, other.token, hold.token
            );
            violations.push(Violation::new(text, [other.granted, hold.granted]));
        }
    }
    match leaks(index, params) {
        None => Verdict::Undecided("no survey was made".into()),
        Some(leaks) => {
            let hidden = leaks.into_iter().filter(|leak| !leak.dropped);
            violations.extend(hidden.map(|leak| leak.violation));
            Verdict::of(violations)
        }
    }
}

/// I12: dropped acquires and holds leave the line.
pub(super) fn cancel_safety(index: &Index<'_>, params: &Params) -> Verdict {
    let dropped = |attempt: &Attempt<'_>| attempt.answer == Some(&Answer::Cancelled);
    if !index.attempts.iter().any(dropped) {
        return Verdict::Undecided("no acquire was dropped".into());
    }
    match leaks(index, params) {
        None => Verdict::Undecided("no survey was made".into()),
        Some(leaks) => {
            let left = leaks.into_iter().filter(|leak| leak.dropped);
            Verdict::of(left.map(|leak| leak.violation).collect())
        }
    }
}

/// All leaks in surveys; `None` if there is no survey.
fn leaks(index: &Index<'_>, params: &Params) -> Option<Vec<Leak>> {
    let mut found: HashMap<&str, Leak> = HashMap::new();
    let mut surveyed = false;
    for (at, event) in index.history.events.iter().enumerate() {
        let What::Survey { asked, line } = &event.what else {
            continue;
        };
        surveyed = true;
        for shown in line {
            let Some(client) = index.owners.get(shown.owner.as_str()).copied() else {
                continue;
            };
            // Claims of killed processes are the subject of I6.
            if index.kills.contains_key(client) || found.contains_key(shown.claim.as_str()) {
                continue;
            }
            if let Some(leak) = leak(index, params, (at, *asked), client, shown) {
                found.insert(&shown.claim, leak);
            }
        }
    }
    surveyed.then(|| found.into_values().collect())
}

fn leak(
    index: &Index<'_>,
    params: &Params,
    (survey, asked): (usize, u64),
    client: &str,
    shown: &Shown,
) -> Option<Leak> {
    let (soon, ttl) = (nanos(LEAVE + params.slack), nanos(params.lasts));
    let overdue = |since: usize, bound: u64| {
        let window = Window {
            from: index.at(since),
            until: asked,
        };
        let out = index.out_of_action(client, window);
        asked > window.from.saturating_add(bound).saturating_add(out)
    };
    let blame = |since: usize, dropped: bool, of: &str| Leak {
        violation: Violation::new(
            format!(
                "claim {} of {client} is still in the line {} after {of}",
                shown.claim,
                ms(asked.saturating_sub(index.at(since)))
            ),
            [since, survey],
        ),
        dropped,
    };
    if let Some(hold) = index.claims.get(shown.claim.as_str()) {
        let hold = &index.holds[*hold];
        let bound = if hold.lost.is_some() {
            ttl + soon
        } else {
            soon
        };
        return match (hold.released, hold.release) {
            (Some(released), _) if overdue(released, bound) => {
                Some(blame(released, false, "its release was answered"))
            }
            (None, Some(release)) if overdue(release, bound) => {
                Some(blame(release, true, "its hold was dropped"))
            }
            _ => None,
        };
    }
    // It was not granted, so it must belong to an acquire that is in progress or was until now.
    let mut last = None;
    let before = |attempt: &&Attempt<'_>| attempt.client == client && attempt.called < survey;
    for attempt in index.attempts.iter().rev().filter(before) {
        let returned = attempt.returned?;
        let bound = match attempt.answer {
            Some(Answer::Error { .. }) => ttl + soon,
            _ => soon,
        };
        if !overdue(returned, bound) {
            return None;
        }
        last.get_or_insert((returned, attempt.answer));
    }
    let (returned, answer) = last?;
    let dropped = answer == Some(&Answer::Cancelled);
    Some(blame(returned, dropped, "the last acquire was answered"))
}
