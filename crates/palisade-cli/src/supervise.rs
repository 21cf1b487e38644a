//! Supervises a child while a lock is held: sends each new deadline to its guardian, passes signals
//! on, and learns how the child ended.
//!
//! The guardian ends the child by that deadline; palisade does so only if the guardian fails to.
//! Invariant: the child has ended, or was killed with all that it started, when [`supervise`]
//! returns.

use std::pin::pin;
use std::time::Duration;

use palisade::queue::Message;
use palisade::{BootTime, Hold, Loss, LossReason};
use rustix::process::Signal;

use crate::child::{Change, Child, unguarded};
use crate::exit::Failure;
use crate::guardian::KILL_LEAD;
use crate::signals::{Event, Signals};

/// Leases are measured with a clock that keeps running during suspend, timers with one that does
/// not. Polling this often bounds how late an expiry is seen after a resume, at four wake-ups a
/// second.
const RECHECK: Duration = Duration::from_millis(250);

/// A renewal that comes less than this before the guardian acts may not reach it in time.
const LAST_LOOK: Duration = Duration::from_millis(10);

/// What a child runs under: a lock, or a message.
pub(crate) trait Held {
    /// Until when it is held without a further renewal.
    fn deadline(&self) -> BootTime;
    /// Whether it is held now.
    fn is_valid(&self) -> bool;
    /// Resolves when it is lost.
    fn lost(&self) -> impl Future<Output = Loss>;
}

macro_rules! held {
    ($kind:ty) => {
        impl Held for $kind {
            fn deadline(&self) -> BootTime {
                self.deadline()
            }

            fn is_valid(&self) -> bool {
                self.is_valid()
            }

            fn lost(&self) -> impl Future<Output = Loss> {
                self.lost()
            }
        }
    };
}

held!(Hold);
held!(Message);

/// Where the signals that concern a child come from.
pub(crate) trait Heard {
    /// The next one.
    fn next(&mut self) -> impl Future<Output = Event>;
}

impl Heard for Signals {
    fn next(&mut self) -> impl Future<Output = Event> {
        self.next()
    }
}

/// How a hold ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The child ended with this code, and the lock was held all the time.
    Ended(u8),
    /// A signal ended it, and there was no child to pass it on to.
    Interrupted(Signal),
    /// The lock was lost, and all that the child started was killed.
    Lost(LossReason),
}

/// Supervises `child` until it has ended.
///
/// # Errors
/// When the guardian was killed; all that the child started was then killed, too.
pub(crate) async fn supervise(
    mut child: Child<'_>,
    hold: &impl Held,
    grace: Duration,
    signals: &mut impl Heard,
) -> Result<End, Failure> {
    let over = match until_over(&mut child, hold, grace, signals).await {
        Over::Ended(code) if hold.is_valid() => {
            child.dismiss();
            return Ok(End::Ended(code));
        }
        over => over,
    };
    if matches!(over, Over::Unguarded) {
        child.kill();
    }
    child.bury();
    match over {
        Over::Unguarded if hold.is_valid() => Err(unguarded()),
        // The guardian acts before the hold is lost, so a renewal may still have succeeded.
        Over::Killed if hold.is_valid() => Ok(End::Lost(LossReason::Expired)),
        _ => Ok(End::Lost(hold.lost().await.reason)),
    }
}

/// Why the supervision has ended.
enum Over {
    Ended(u8),
    Killed,
    Unguarded,
}

async fn until_over(
    child: &mut Child<'_>,
    hold: &impl Held,
    grace: Duration,
    signals: &mut impl Heard,
) -> Over {
    let mut told = hold.deadline();
    let mut lost = pin!(hold.lost());
    // Once the lock is lost: the time by which the guardian must have killed everything, plus half
    // of its lead.
    let mut patience = BootTime::NEVER;
    loop {
        let next_look = match patience {
            BootTime::NEVER => (told.remaining().saturating_sub(grace) / 2).max(LAST_LOOK),
            patience => patience.remaining(),
        };
        tokio::select! {
            biased;
            loss = &mut lost, if patience == BootTime::NEVER => {
                // If it was taken away, another may hold the lock already.
                let by = match loss.reason {
                    LossReason::Expired | LossReason::Evicted => loss.lease_ends,
                    _ => BootTime::PAST,
                };
                child.end_by(by);
                let left = by.remaining().saturating_sub(KILL_LEAD);
                patience = BootTime::now() + left + KILL_LEAD / 2;
            }
            change = child.change() => match change {
                Change::Ended(code) => return Over::Ended(code),
                Change::Killed => return Over::Killed,
                Change::Unguarded => return Over::Unguarded,
                Change::Stopped { wants_terminal } => {
                    if child.follow_stop(wants_terminal) && hold.is_valid() {
                        child.resume();
                    }
                }
            },
            event = signals.next() => match event {
                Event::Ending(signal) => child.signal(signal),
                Event::Resized => child.signal(Signal::WINCH),
                Event::Stop => {
                    child.stop_with_us();
                    if hold.is_valid() {
                        child.resume();
                    }
                }
                Event::Resumed if hold.is_valid() => child.resume(),
                Event::Resumed => {}
            },
            () = tokio::time::sleep(next_look.min(RECHECK)) => {
                if patience.has_passed() {
                    return Over::Unguarded;
                }
                let deadline = hold.deadline();
                // A loss moves the deadline to the past, which the next iteration sees.
                if deadline > told {
                    told = deadline;
                    child.renewed(deadline);
                }
            }
        }
    }
}
