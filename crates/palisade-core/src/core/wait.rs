//! How long to wait and how often to re-check: `Patience`, `Backoff` and `Tries`.
//!
//! A waiter is notified by the engine and also re-checks at bounded intervals, because a
//! notification can be lost. Where an engine has no line to wait in, or can't be reached, the
//! waiter retries with jittered exponential backoff. Either way there is one last try at the
//! deadline.

use std::future::Future;
use std::time::Duration;

use super::clock::BootTime;
use super::error::{Error, ErrorKind, Result};
use super::events::{Observers, Stall};
use super::name::Name;
use super::sync;

/// How long an acquire may wait: for other claims, and for an engine that can't be reached or does
/// not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// No waiting.
    NoWait,
    /// Up to this long.
    For(Duration),
    /// Without limit.
    Forever,
}

impl Patience {
    /// The time at which patience ends, counted from now.
    pub(crate) fn deadline(self) -> BootTime {
        match self {
            Self::NoWait => BootTime::PAST,
            Self::For(wait) => BootTime::now() + wait,
            Self::Forever => BootTime::NEVER,
        }
    }

    /// Awaits `call`, with a limit for [`Patience::For`]: `deadline` and a moment more for the last
    /// try. With the other values the engine's own timeouts apply.
    pub(crate) async fn bound<T>(
        self,
        deadline: BootTime,
        operation: &'static str,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let Self::For(_) = self else {
            return call.await;
        };
        tokio::select! {
            biased;
            answer = call => answer,
            () = sync::sleep_until(deadline + LAST_TRY) => {
                let message = "the engine did not answer before the wait was over; is it \
                               overloaded, frozen or cut off?";
                Err(Error::new(ErrorKind::Unreachable, operation, message).maybe_applied())
            }
        }
    }

    /// The remaining patience, if it ends at `deadline`.
    pub(crate) fn rest(self, deadline: BootTime) -> Self {
        match self {
            Self::For(_) => Self::For(deadline.remaining()),
            Self::NoWait | Self::Forever => self,
        }
    }
}

/// How long the try at the deadline may take: some round trips to a distant engine, and little
/// enough that a caller considers it punctual.
const LAST_TRY: Duration = Duration::from_millis(250);

/// How late a waiter is if a notification is lost. A shorter interval would load the engine with
/// reads that rarely find anything.
const RECHECK: Duration = Duration::from_secs(1);

/// When a waiter re-checks without a notification: within a second, jittered so that many waiters
/// don't read at once, and at its deadline.
pub(crate) fn recheck_at(deadline: BootTime) -> BootTime {
    let jittered = RECHECK.mul_f64(rand::random_range(0.75..1.0));
    (BootTime::now() + jittered).min(deadline)
}

/// `until`, or sooner so that a lost notification is noticed. For engines, whose callers may ask
/// them to wait longer.
pub fn look_by(until: BootTime) -> BootTime {
    until.min(BootTime::now() + RECHECK)
}

/// How an acquire retries, while its patience lasts, when the engine can't be reached or has no
/// line to wait in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retry {
    /// No retry: the first failure is returned.
    None,
    /// After this delay each time.
    Fixed(Duration),
    /// After a random delay between `min` and a bound that doubles from `min` to `max`.
    Exponential {
        /// The shortest delay.
        min: Duration,
        /// The longest delay.
        max: Duration,
    },
}

impl Default for Retry {
    /// 10 ms is a few round trips to a near engine. Half a second is the longest that a freed lock,
    /// or an engine that has recovered, should go unnoticed.
    fn default() -> Self {
        Self::Exponential {
            min: Duration::from_millis(10),
            max: Duration::from_millis(500),
        }
    }
}

/// The retry delays of one acquire.
#[derive(Debug)]
pub(crate) struct Backoff {
    retry: Retry,
    tries: u32,
}

impl Backoff {
    pub(crate) const fn new(retry: Retry) -> Self {
        Self { retry, tries: 0 }
    }

    fn next_delay(&mut self) -> Option<Duration> {
        self.tries += 1;
        match self.retry {
            Retry::None => None,
            Retry::Fixed(delay) => Some(delay),
            Retry::Exponential { min, max } => {
                let bound = min
                    .saturating_mul(1 << (self.tries - 1).min(16))
                    .min(max)
                    .max(min);
                Some(rand::random_range(min..=bound))
            }
        }
    }

    /// Sleeps, but not beyond `deadline`. Returns whether another try is due: `false` only without
    /// retries, or if the deadline had already passed. So the last try comes at the deadline
    /// itself.
    pub(crate) async fn sleep(&mut self, deadline: BootTime) -> bool {
        let remaining = deadline.remaining();
        let Some(delay) = self.next_delay().filter(|_| !remaining.is_zero()) else {
            return false;
        };
        sync::sleep_until((BootTime::now() + delay).min(deadline)).await;
        true
    }
}

/// The tries of one acquire, or of one consumer of a queue, and what they wait for.
pub(super) struct Tries<'a> {
    pub(super) patience: Patience,
    pub(super) deadline: BootTime,
    pub(super) backoff: Backoff,
    stall: &'a mut Stall,
    /// Who is told, and of what.
    on: (&'a Observers, &'a Name),
}

impl<'a> Tries<'a> {
    pub(super) fn new(
        patience: Patience,
        retry: Retry,
        stall: &'a mut Stall,
        on: (&'a Observers, &'a Name),
    ) -> Self {
        Self {
            patience,
            deadline: patience.deadline(),
            backoff: Backoff::new(retry),
            stall,
            on,
        }
    }

    /// As [`Patience::bound`].
    pub(super) fn bound<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T>>,
    ) -> impl Future<Output = Result<T>> {
        self.patience.bound(self.deadline, operation, call)
    }

    /// Sleeps until the next try. Returns `false` if there is none.
    pub(super) async fn again(&mut self) -> bool {
        self.backoff.sleep(self.deadline).await
    }

    /// As [`Tries::again`], after a failure, which is reported if another try follows.
    pub(super) async fn again_after(&mut self, error: &Error) -> bool {
        if self.backoff.retry != Retry::None && !self.deadline.has_passed() {
            self.stall.begins(self.on.0, self.on.1, error);
        }
        self.again().await
    }

    /// Records that the engine has answered: only others are waited for.
    pub(super) fn answered(&mut self) {
        self.stall.ends(self.on.0, self.on.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn delays_grow_to_the_cap_and_are_jittered() {
        let mut backoff = Backoff::new(Retry::default());
        let delays: Vec<_> = (0..40).filter_map(|_| backoff.next_delay()).collect();
        assert_eq!(delays.len(), 40);
        assert!(
            delays
                .iter()
                .all(|delay| (ms(10)..=ms(500)).contains(delay))
        );
        assert!(delays[0] < ms(11));
        assert!(delays.iter().any(|delay| *delay > ms(100)));
        assert!(delays[10..].windows(2).any(|pair| pair[0] != pair[1]));
    }

    #[tokio::test]
    async fn there_is_one_last_try_at_the_deadline() {
        let deadline = BootTime::now() + ms(5);
        let mut backoff = Backoff::new(Retry::Fixed(Duration::from_secs(3600)));
        assert!(backoff.sleep(deadline).await, "the try at the deadline");
        assert!(deadline.has_passed());
        assert!(!backoff.sleep(deadline).await, "no try after it");
        assert!(!Backoff::new(Retry::None).sleep(BootTime::NEVER).await);
    }
}
