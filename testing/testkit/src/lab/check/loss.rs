//! I9, I10 and F4: losses are reported in time, for a reason, and a late release harms nobody.

use palisade::LossReason;

use super::index::{Held, Index, Window};
use super::{Params, Verdict, Violation, ms, nanos};
use crate::lab::history::{Released, What};

/// The first grant after `hold` that conflicts with it.
fn successor<'a, 'h>(index: &'a Index<'h>, hold: &Held<'h>) -> Option<&'a Held<'h>> {
    // Holds are in the order of their grants.
    let later = index
        .holds
        .partition_point(|next| next.granted <= hold.granted);
    let mut next = index.holds[later..].iter();
    next.find(|next| next.token > hold.token && next.conflicts(hold))
}

/// I9: a hold becomes invalid before the next is granted, whether or not its process runs. Its
/// owner is told as soon as it runs. A hold that was invalid never becomes valid again.
pub(super) fn early(index: &Index<'_>, params: &Params) -> Verdict {
    let mut violations = Vec::new();
    let slack = nanos(params.slack);
    for hold in &index.holds {
        if let Some(lost) = hold.lost {
            let again = hold
                .valid
                .iter()
                .find(|valid| index.at(**valid) > hold.until);
            if let Some(again) = again {
                let text = format!("{} was valid again after it had been lost", hold.called());
                violations.push(Violation::new(text, [hold.granted, lost, *again]));
            }
            let window = Window {
                from: hold.until,
                until: index.at(lost),
            };
            let late = window.until.saturating_sub(window.from);
            let late = late.saturating_sub(index.out_of_action(hold.client, window));
            if late > slack {
                let text = format!("{} was told of its loss {} late", hold.called(), ms(late));
                violations.push(Violation::new(text, [hold.granted, lost]));
            }
        }
        let Some(next) = successor(index, hold) else {
            continue;
        };
        let granted = index.at(next.granted);
        if params.excuses(index, hold, granted) {
            continue;
        }
        let believed = hold.valid.iter().find(|valid| index.at(**valid) > granted);
        if let Some(believed) = believed {
            let text = format!(
                "{} was still valid {} after {} was granted",
                hold.called(),
                ms(index.at(*believed) - granted),
                next.called()
            );
            let events = [hold.granted, next.granted, *believed];
            violations.push(Violation::new(text, events));
        }
        match (hold.lost, hold.release) {
            (Some(lost), _) if hold.known && hold.until > granted => {
                let text = format!(
                    "{} turned invalid {} after {} was granted",
                    hold.called(),
                    ms(hold.until - granted),
                    next.called()
                );
                let events = [hold.granted, next.granted, lost];
                violations.push(Violation::new(text, events));
            }
            (Some(_), _) if hold.known => {}
            (_, release) => {
                let alive = Window {
                    from: granted,
                    until: hold.until,
                };
                let running: u64 = index
                    .running(hold.client, alive, 0)
                    .iter()
                    .map(|part| part.until - part.from)
                    .sum();
                if running > slack {
                    let text = format!(
                        "{} went on for {} beside {} and was never told",
                        hold.called(),
                        ms(running),
                        next.called()
                    );
                    let events = [Some(hold.granted), Some(next.granted), release];
                    let events: Vec<usize> = events.into_iter().flatten().collect();
                    violations.push(Violation::new(text, events));
                }
            }
        }
    }
    Verdict::of(violations)
}

/// Whether a loss was reported for another reason than the end of the lease.
fn ended_early(index: &Index<'_>, hold: &Held<'_>) -> bool {
    let lost = hold.lost.map(|lost| &index.history.events[lost].what);
    matches!(lost, Some(What::Lost { reason, .. }) if reason != LossReason::Expired.code())
}

/// I10: the release of a hold that was replaced reports that, and does not affect its successor.
pub(super) fn foreign_release(index: &Index<'_>, _: &Params) -> Verdict {
    let mut violations = Vec::new();
    for hold in &index.holds {
        let (Some(release), Some(next)) = (hold.release, successor(index, hold)) else {
            continue;
        };
        if index.at(next.granted) >= index.at(release) {
            continue;
        }
        let answer = hold.released.map(|at| &index.history.events[at].what);
        let done = matches!(answer, Some(What::ReleaseReturned { answer, .. }) if *answer == Released::Done);
        if let Some(released) = hold.released.filter(|_| done) {
            let text = format!(
                "{} had been replaced by {} and its release said that it was held",
                hold.called(),
                next.called()
            );
            let events = [next.granted, release, released];
            violations.push(Violation::new(text, events));
        }
        // A holder at the time of the late release must not be lost because of it.
        let late = index.at(release);
        let victims = index.holds.iter().filter(|victim| {
            let granted = index.at(victim.granted);
            victim.name == hold.name
                && granted < late
                && late < victim.until
                && victim.claim != hold.claim
        });
        for victim in victims {
            let intruder = index.holds.iter().find(|intruder| {
                let granted = index.at(intruder.granted);
                let running = Window {
                    from: granted,
                    until: granted + 1,
                };
                late < granted
                    && granted < victim.until
                    && intruder.conflicts(victim)
                    && intruder.claim != victim.claim
                    && !index.running(victim.client, running, 0).is_empty()
            });
            let lost = victim.lost.filter(|_| ended_early(index, victim));
            if let Some(event) = intruder.map(|intruder| intruder.granted).or(lost) {
                let text = format!(
                    "{} ended after the late release of {}",
                    victim.called(),
                    hold.called()
                );
                violations.push(Violation::new(text, [victim.granted, release, event]));
            }
        }
    }
    Verdict::of(violations)
}

/// When `hold` was in the line for certain: a survey shows it, or it was granted.
fn entered(index: &Index<'_>, hold: &Held<'_>) -> u64 {
    let mut events = index.history.events.iter();
    let shows = |what: &What| matches!(what, What::Survey { line, .. } if line.iter().any(|shown| shown.claim == hold.claim));
    let granted = index.at(hold.granted);
    let shown = events.find(|event| shows(&event.what));
    shown.map_or(granted, |event| event.at.min(granted))
}

/// F4: a hold is lost only if for half of its lease its process was stopped or starved, the engine
/// was unavailable, or the request for it was in flight: a lease counts from before that was sent.
pub(super) fn spurious(index: &Index<'_>, params: &Params) -> Verdict {
    let mut violations = Vec::new();
    let ttl = nanos(params.ttl);
    for hold in &index.holds {
        let Some(lost) = hold.lost else { continue };
        let lease = Window {
            from: hold.until.saturating_sub(ttl),
            until: hold.until,
        };
        // One renewal, and another in case the first was answered late.
        let slow = 2 * index.slowest_look(lease);
        let request = Window {
            from: index.at(hold.called),
            until: entered(index, hold),
        };
        let out = lease.covered(index.outs(hold.client).chain([request])) + slow;
        if out < ttl / 2 {
            let text = format!(
                "{} was lost although it had all but {} of the lease to be renewed",
                hold.called(),
                ms(out)
            );
            violations.push(Violation::new(text, [hold.granted, lost]));
        }
    }
    Verdict::of(violations)
}
