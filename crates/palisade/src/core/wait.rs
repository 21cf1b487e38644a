//! How long to wait and how often to look: `Patience` and `Backoff`.
//!
//! Every wait is a push from the engine plus a bounded re-check, because a push can be lost;
//! where an engine has no line to wait in, or can't be reached, a jittered exponential backoff.
//! Either way there is one last try when the deadline comes.

use std::time::Duration;

use super::clock::BootTime;

/// How long an acquire may wait, both for others and for an engine that can't be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// Not at all.
    NoWait,
    /// This long.
    For(Duration),
    /// As long as it takes.
    Forever,
}

impl Patience {
    /// When patience ends, counted from now.
    pub(crate) fn deadline(self) -> BootTime {
        match self {
            Self::NoWait => BootTime::PAST,
            Self::For(wait) => BootTime::now() + wait,
            Self::Forever => BootTime::NEVER,
        }
    }
}

/// A push can be lost, and then this is how late the waiter is. Shorter would load the engine
/// with look-ups that nearly always find nothing.
const RECHECK: Duration = Duration::from_secs(1);

/// When a waiter looks again though nothing was pushed: within a second, spread out so that many
/// waiters don't look together, and at its deadline.
pub(crate) fn recheck_at(deadline: BootTime) -> BootTime {
    let jittered = RECHECK.mul_f64(rand::random_range(0.75..1.0));
    (BootTime::now() + jittered).min(deadline)
}

/// Delays that double from `min` to `max`, each with full jitter above `min`.
#[derive(Debug)]
pub(crate) struct Backoff {
    min: Duration,
    max: Duration,
    tries: u32,
}

impl Backoff {
    /// 10 ms is a few round trips to a near engine; half a second is the longest that a freed
    /// lock, or an engine that is back, should go unnoticed.
    pub(crate) const fn new() -> Self {
        Self {
            min: Duration::from_millis(10),
            max: Duration::from_millis(500),
            tries: 0,
        }
    }

    fn next_delay(&mut self) -> Duration {
        let ceiling = self
            .min
            .saturating_mul(1 << self.tries.min(16))
            .min(self.max);
        self.tries += 1;
        rand::random_range(self.min..=ceiling.max(self.min))
    }

    /// Sleeps, but not beyond `deadline`. Says whether another try is due: `false` only when the
    /// deadline had passed before, so that the last try comes at the deadline itself.
    pub(crate) async fn sleep(&mut self, deadline: BootTime) -> bool {
        let remaining = deadline.remaining();
        if remaining.is_zero() {
            return false;
        }
        tokio::time::sleep(self.next_delay().min(remaining)).await;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_the_cap_and_are_jittered() {
        let mut backoff = Backoff::new();
        let delays: Vec<_> = (0..40).map(|_| backoff.next_delay()).collect();
        assert!(
            delays
                .iter()
                .all(|delay| (backoff.min..=backoff.max).contains(delay))
        );
        assert!(delays[0] < Duration::from_millis(11));
        assert!(
            delays
                .iter()
                .any(|delay| *delay > Duration::from_millis(100))
        );
        assert!(delays[10..].windows(2).any(|pair| pair[0] != pair[1]));
    }

    #[tokio::test]
    async fn there_is_one_last_try_at_the_deadline() {
        let deadline = BootTime::now() + Duration::from_millis(5);
        let mut backoff = Backoff::new();
        assert!(backoff.sleep(deadline).await, "the try at the deadline");
        while !deadline.has_passed() {
            backoff.sleep(deadline).await;
        }
        assert!(!backoff.sleep(deadline).await, "no try after it");
    }
}
