//! `Retries`: how often a message is tried, and the delays between attempts.

use std::time::Duration;

use crate::core::error::{Error, ErrorKind, Result};

/// How often a message is tried, and how long it waits after a failure: a random time between half
/// of a bound and the bound, which doubles from `min` to `max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retries {
    /// The largest number of claims; then it is a dead letter.
    pub attempts: u32,
    /// The first bound.
    pub min: Duration,
    /// The last bound.
    pub max: Duration,
}

impl Default for Retries {
    /// Five attempts over about 15 seconds: a person should see what fails longer.
    fn default() -> Self {
        Self {
            attempts: 5,
            min: Duration::from_secs(1),
            max: Duration::from_secs(300),
        }
    }
}

impl Retries {
    pub(super) fn check(&self) -> Result<()> {
        let wrong = match self {
            Self { attempts: 0, .. } => "attempts must be at least 1",
            Self { min, max, .. } if min > max => "the shortest delay exceeds the longest",
            Self { max, .. } if *max > LONGEST => "the longest delay must be at most a year",
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::InvalidArgument, "retries", wrong))
    }

    /// How long to wait after attempt number `attempt`; `None` after the last.
    pub(super) fn after(&self, attempt: u32) -> Option<Duration> {
        if attempt >= self.attempts {
            return None;
        }
        let doubled = self
            .min
            .saturating_mul(1 << attempt.saturating_sub(1).min(30));
        let bound = doubled.min(self.max);
        Some(rand::random_range(bound / 2..=bound))
    }
}

const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_the_bound_and_end() {
        let retries = Retries {
            attempts: 4,
            min: Duration::from_secs(1),
            max: Duration::from_secs(3),
        };
        for (attempt, bound) in [(1, 1), (2, 2), (3, 3)] {
            let bound = Duration::from_secs(bound);
            let after = retries.after(attempt).unwrap();
            assert!((bound / 2..=bound).contains(&after), "{attempt}: {after:?}");
        }
        assert_eq!(retries.after(4), None);
        assert!(
            Retries {
                attempts: 0,
                ..retries
            }
            .check()
            .is_err()
        );
        let never = Retries {
            min: Duration::ZERO,
            max: Duration::ZERO,
            ..retries
        };
        assert_eq!(never.after(1), Some(Duration::ZERO));
    }
}
