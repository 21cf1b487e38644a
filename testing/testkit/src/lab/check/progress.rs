//! I6 and I7: nobody waits longer than the bounds. Uses outer intervals: from a call to its answer.

use super::index::{Attempt, Held, Index, Window};
use super::{Params, Verdict, Violation, ms, nanos};
use crate::lab::history::{Answer, What};

/// The maximum number of consecutive requests before an answer: the claim, a last read whether it
/// was granted, and its withdrawal. An engine that uses compare-and-swap may have to repeat each
/// read and write because of a conflict.
const REQUESTS: u64 = 12;

/// A holder that went away.
struct Departure<'a, 'h> {
    hold: &'a Held<'h>,
    /// The time of the kill, or of the beginning of the stop.
    at: u64,
    event: usize,
    killed: bool,
}

fn departures<'a, 'h>(index: &'a Index<'h>, ttl: u64) -> Vec<Departure<'a, 'h>> {
    let mut all = Vec::new();
    for (event, gone) in index.history.events.iter().enumerate() {
        let at = gone.at;
        let killed = match gone.what {
            What::Kill => true,
            What::PauseBegin => false,
            _ => continue,
        };
        let mut pauses = index.pauses.get(gone.client.as_str()).into_iter().flatten();
        let pause = pauses.find(|pause| pause.from == at).copied();
        let held = index.holds.iter().filter(|hold| {
            let given_up = hold.release.is_some_and(|release| index.at(release) <= at);
            let lost = hold.lost.is_some() && hold.until <= at;
            let granted = index.at(hold.granted) <= at;
            // A stop shorter than the lease is no departure.
            let left = killed
                || pause.is_some_and(|pause| {
                    let lost = hold.lost.is_some() && hold.until < pause.until;
                    lost || pause.until - pause.from > ttl
                });
            let mine = hold.client == gone.client && hold.is_whole();
            mine && granted && !given_up && !lost && left
        });
        all.extend(held.map(|hold| Departure {
            hold,
            at,
            event,
            killed,
        }));
    }
    all
}

/// The next grant after the line moved, and when it was due.
struct Next {
    /// The next grant.
    granted: Option<u64>,
    /// When it was due.
    due: u64,
    /// The call of a waiter.
    waiter: usize,
}

/// The next grant after `at`. It is due after `bound`, extended by the time in which waiters or the
/// engine got no CPU. `None` if nobody waited, or if a waiter that may have been next was stopped
/// or killed.
fn next(index: &Index<'_>, name: &str, at: u64, bound: u64) -> Option<Next> {
    let granted = index.next_grant(name, at);
    let window = Window {
        from: at,
        until: at.saturating_add(bound),
    };
    // What happens to a waiter after the next grant does not matter here.
    let until_then = Window {
        until: granted.map_or(window.until, |granted| granted.min(window.until)),
        ..window
    };
    let mut waiting = index.waiting(name, at);
    // Callers that arrive before the grant are entitled to it, too.
    waiting.extend(index.called_in(name, until_then));
    if waiting
        .iter()
        .any(|one| index.was_hurt(one.client, until_then))
    {
        return None;
    }
    let starved = waiting
        .iter()
        .map(|one| index.out_of_action(one.client, window));
    let slow = REQUESTS * index.slowest_look(window);
    let due = window
        .until
        .saturating_add(starved.max().unwrap_or(0))
        .saturating_add(slow);
    let due_for = |one: &Attempt<'_>| due.max(index.at(one.called).saturating_add(bound));
    let patient = waiting.iter().find(|one| {
        let back = one.returned.map(|back| index.at(back));
        let held = matches!(one.answer, Some(Answer::Held { .. }));
        held || back.is_none_or(|back| back > due_for(one))
    })?;
    Some(Next {
        granted,
        due: due_for(patient),
        waiter: patient.called,
    })
}

/// The times from each kill of an exclusive holder to the grant of the next waiter, in nanoseconds.
pub fn handovers(index: &Index<'_>) -> Vec<u64> {
    let killed = departures(index, u64::MAX).into_iter().filter(|d| d.killed);
    killed
        .filter_map(|gone| {
            let next = next(index, gone.hold.name, gone.at, 0)?;
            Some(next.granted? - gone.at)
        })
        .collect()
}

/// I6: after a holder died or was stopped past its lease, the next waiter is served in time, and no
/// survey shows claims of the dead.
pub(super) fn bounded_leak(index: &Index<'_>, params: &Params) -> Verdict {
    let mut violations = Vec::new();
    let mut judged = 0;
    let slack = nanos(params.slack);
    let (ttl, lasts) = (nanos(params.ttl), nanos(params.lasts));
    let death = nanos(params.death) + slack;
    for gone in departures(index, ttl) {
        let bound = if gone.killed { death } else { lasts + slack };
        let Some(next) = next(index, gone.hold.name, gone.at, bound) else {
            continue;
        };
        judged += 1;
        if next.granted.is_none_or(|granted| granted > next.due) {
            let took = next
                .granted
                .map_or("never".to_owned(), |granted| ms(granted - gone.at));
            let text = format!(
                "after the end of {} the next was granted in {took}; the bound is {}",
                gone.hold.called(),
                ms(next.due - gone.at)
            );
            let events = [gone.hold.granted, next.waiter, gone.event];
            violations.push(Violation::new(text, events));
        }
    }
    for (at, event) in index.history.events.iter().enumerate() {
        let What::Survey { asked, line } = &event.what else {
            continue;
        };
        for (client, kill) in &index.kills {
            if *asked < index.at(*kill).saturating_add(death) {
                continue;
            }
            judged += 1;
            let mut left = line
                .iter()
                .filter(|shown| index.owners.get(shown.owner.as_str()).copied() == Some(*client));
            if let Some(left) = left.next() {
                let text = format!(
                    "claim {} of {client} is still there {} after it was killed",
                    left.claim,
                    ms(asked - index.at(*kill))
                );
                violations.push(Violation::new(text, [*kill, at]));
            }
        }
    }
    match judged {
        0 => Verdict::Undecided("no holder went away while others waited".into()),
        _ => Verdict::of(violations),
    }
}

/// I7: every acquire is answered by its deadline, none hangs, and a release wakes the next waiter.
pub(super) fn progress(index: &Index<'_>, params: &Params) -> Verdict {
    if index.attempts.is_empty() {
        return Verdict::Undecided("nothing was acquired".into());
    }
    let mut violations = Vec::new();
    let slack = nanos(params.slack);
    for attempt in &index.attempts {
        let called = index.at(attempt.called);
        let Some(returned) = attempt.returned else {
            if !index.kills.contains_key(attempt.client) {
                let text = format!("{} never got an answer to an acquire", attempt.client);
                violations.push(Violation::new(text, [attempt.called]));
            }
            continue;
        };
        let window = Window {
            from: called,
            until: index.at(returned),
        };
        let took = window.until - window.from;
        let out = index.out_of_action(attempt.client, window);
        // A process that is stopped inside the engine may block it. Then a request in flight ends
        // by its own timeout, and not by the caller's patience.
        let mut pauses = index.pauses.values().flatten();
        let request = if pauses.any(|pause| pause.overlap(window) > 0) {
            nanos(params.request)
        } else {
            0
        };
        let slow = REQUESTS * index.slowest_look(window);
        let finding_out = match attempt.patience {
            Some(0) => nanos(params.no_wait),
            _ => 0,
        };
        let bound = attempt
            .patience
            .map(|patience| patience + slack + out + request + slow + finding_out);
        if let Some(bound) = bound.filter(|bound| took > *bound) {
            let text = format!(
                "{} was answered after {}, its patience ended after {}",
                attempt.client,
                ms(took),
                ms(bound - slack)
            );
            violations.push(Violation::new(text, [attempt.called, returned]));
        }
    }
    let bound = nanos(params.recheck) + slack;
    for hold in index.holds.iter().filter(|hold| hold.is_whole()) {
        let (Some(release), Some(released)) = (hold.release, hold.released) else {
            continue;
        };
        // A late release of a lost hold wakes nobody.
        if hold.lost.is_some() {
            continue;
        }
        let (from, done) = (index.at(release), index.at(released));
        let Some(next) = next(index, hold.name, from, done - from + bound) else {
            continue;
        };
        if next.granted.is_none_or(|granted| granted > next.due) {
            let took = next
                .granted
                .map_or("never".to_owned(), |granted| ms(granted - from));
            let text = format!(
                "after the release of {} the next was granted in {took}",
                hold.called()
            );
            violations.push(Violation::new(text, [next.waiter, release, released]));
        }
    }
    Verdict::of(violations)
}
