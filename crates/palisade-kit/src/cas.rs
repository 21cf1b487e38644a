//! `Retry`: how often a compare-and-swap is retried because others wrote between the read and the
//! write.
//!
//! The first retry is immediate, since most conflicts are over by then. Before each later one is a
//! random pause that grows, so that many writers don't conflict for ever.

use std::time::Duration;

use palisade_core::{BootTime, Error, ErrorKind, Result};

/// The first pause, and the longest: more than a round trip, less than a caller notices.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(16);

/// Enough for any number of writers that still leaves the server time to answer.
const MANY: u32 = 64;

/// See the module documentation.
#[derive(Debug)]
pub struct Retry {
    left: u32,
    until: BootTime,
    pause: Duration,
}

impl Retry {
    /// Allows `left` retries.
    pub fn times(left: u32) -> Self {
        Self {
            left,
            until: BootTime::NEVER,
            pause: Duration::ZERO,
        }
    }

    /// For a change that must succeed unless the line is changed incessantly.
    pub fn many() -> Self {
        Self::times(MANY)
    }

    /// Allows retries until then.
    pub fn until(until: BootTime) -> Self {
        Self {
            until,
            ..Self::times(u32::MAX)
        }
    }

    /// Pauses before a retry; `false` if no retry is left.
    pub async fn again(&mut self) -> bool {
        if self.left == 0 || self.until.has_passed() {
            return false;
        }
        self.left -= 1;
        if self.pause.is_zero() {
            self.pause = PAUSE;
        } else {
            tokio::time::sleep(self.pause.mul_f64(rand::random())).await;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
        true
    }

    /// Pauses before a retry.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] when no retry is left.
    pub async fn or_busy(&mut self, operation: &'static str) -> Result<()> {
        if self.again().await {
            return Ok(());
        }
        let message = "others change this line faster than it can be read; try again";
        Err(Error::new(ErrorKind::Unreachable, operation, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_ends_by_count_or_by_time() {
        let mut retry = Retry::times(2);
        assert!(retry.again().await && retry.again().await);
        assert_eq!(
            retry.or_busy("leave").await.unwrap_err().kind(),
            ErrorKind::Unreachable
        );
        assert!(!Retry::until(BootTime::now()).again().await);
        let mut retry = Retry::until(BootTime::now() + Duration::from_secs(60));
        assert!(retry.again().await && retry.again().await);
    }
}
