//! Looks after a child while a lock is held: passes signals on, and ends the child before anyone
//! else can be granted.
//!
//! Invariant: past the deadline of the hold no member of the child's group runs, as long as this
//! process itself does. A renewal moves the deadline; a child that was told to end because no
//! renewal came is not taken back into favour by one that comes later.

use std::pin::pin;
use std::time::Duration;

use palisade::{BootTime, Hold, LossReason};
use rustix::process::Signal;

use crate::child::{Change, Child};
use crate::signals::{Event, Signals};

/// The lease is measured with a clock that runs on while the machine sleeps, timers with one that
/// does not: looking this often bounds what a nap can hide, at four wake-ups a second.
const RECHECK: Duration = Duration::from_millis(250);

/// KILL comes this long before the end: enough for a busy machine to carry it out, and half of the
/// shortest time between TERM and the end.
const KILL_LEAD: Duration = Duration::from_millis(100);

/// How a child's run under a lock ended. The child is not reaped yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The child ended, and the lock was held all the time.
    Ended,
    /// The lock was lost, and all of the child's group was killed.
    Lost(LossReason),
}

/// How long before the end of the lease the child is asked to end.
pub(crate) fn grace(ttl: Duration) -> Duration {
    (ttl / 6).max(Duration::from_millis(200))
}

/// Looks after `child` until it has ended.
pub(crate) async fn supervise(
    child: &mut Child,
    hold: &Hold,
    ttl: Duration,
    signals: &mut Signals,
) -> End {
    let grace = grace(ttl);
    let mut lost = pin!(hold.lost());
    loop {
        let slack = hold.remaining().saturating_sub(grace);
        tokio::select! {
            biased;
            loss = &mut lost => return end(child, loss.reason, loss.lease_ends, signals).await,
            () = tokio::time::sleep(slack.min(RECHECK)) => {
                // A renewal may have moved the deadline meanwhile, and a loss that is known moves
                // it to the past: the next round hears of that one.
                let deadline = hold.deadline();
                if deadline != BootTime::PAST && deadline.remaining() <= grace {
                    return end(child, LossReason::Expired, deadline, signals).await;
                }
            }
            event = signals.next() => {
                let resume = match react(child, event) {
                    Reaction::Ended if hold.is_valid() => return End::Ended,
                    // The loss is known, or about to be: the next round hears of it.
                    Reaction::Ended | Reaction::Nothing => false,
                    Reaction::Resume => true,
                };
                if resume && hold.is_valid() {
                    child.resume();
                }
            }
        }
    }
}

enum Reaction {
    Nothing,
    Ended,
    Resume,
}

fn react(child: &mut Child, event: Event) -> Reaction {
    match event {
        Event::Ending(signal) => child.signal(signal),
        Event::Stop => {
            child.stop_with_us();
            return Reaction::Resume;
        }
        Event::Resumed => return Reaction::Resume,
        Event::Child => match child.change() {
            Change::Ended => return Reaction::Ended,
            Change::Stopped { wants_terminal } if child.follow_stop(wants_terminal) => {
                return Reaction::Resume;
            }
            Change::Stopped { .. } | Change::Runs => {}
        },
    }
    Reaction::Nothing
}

/// Ends the child's group: asks it to if there is time, and kills what is left of it before
/// `lease_ends`.
async fn end(
    child: &mut Child,
    reason: LossReason,
    lease_ends: BootTime,
    signals: &mut Signals,
) -> End {
    let time_left = || lease_ends.remaining().saturating_sub(KILL_LEAD);
    // Otherwise somebody else may hold the lock already.
    let has_time = matches!(reason, LossReason::Expired | LossReason::Evicted);
    if has_time && !time_left().is_zero() {
        child.signal(Signal::TERM);
        // A stopped process acts on nothing but KILL before it is resumed.
        child.signal(Signal::CONT);
        while child.change() != Change::Ended && !time_left().is_zero() {
            tokio::select! {
                biased;
                () = tokio::time::sleep(time_left().min(RECHECK)) => {}
                event = signals.next() => if let Event::Ending(signal) = event {
                    child.signal(signal);
                }
            }
        }
    }
    child.kill();
    while child.change() != Change::Ended {
        signals.next().await;
    }
    End::Lost(reason)
}

#[cfg(test)]
mod tests;
