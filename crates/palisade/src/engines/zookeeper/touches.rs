//! `Touches`: the touches of a session that have reached the leader's timer.
//!
//! A write through a follower does not touch the leader's session timer by itself: the follower
//! reports the sessions that it has heard from with the leader's next ping, every half tick. So a
//! write counts in full only if something was answered long enough before it to have been reported.

use std::collections::VecDeque;
use std::time::Duration;

use crate::core::clock::BootTime;

#[derive(Debug)]
pub(super) struct Touches {
    /// The last touch that the leader certainly knows of.
    settled: BootTime,
    /// Touches, sent and answered, that may not have been reported to the leader yet.
    recent: VecDeque<(BootTime, BootTime)>,
}

impl Touches {
    pub(super) fn new(settled: BootTime) -> Self {
        Self {
            settled,
            recent: VecDeque::new(),
        }
    }

    pub(super) fn answered(&mut self, sent: BootTime, now: BootTime, step: Duration) {
        let last = self.recent.back().map_or(BootTime::PAST, |(last, _)| *last);
        if sent.saturating_since(last) >= step {
            self.recent.push_back((sent, now));
        }
    }

    /// The last touch that was answered at least `report` before `sent`.
    pub(super) fn settled(&mut self, sent: BootTime, report: Duration) -> BootTime {
        while let Some((touched, answered)) = self.recent.front().copied()
            && answered + report <= sent
        {
            self.settled = self.settled.max(touched);
            self.recent.pop_front();
        }
        self.settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touch_counts_when_it_must_have_been_reported() {
        let at = |ms: u64| BootTime::from_nanos(ms * 1_000_000);
        let ms = Duration::from_millis;
        let mut touches = Touches::new(at(0));
        touches.answered(at(100), at(110), ms(10));
        touches.answered(at(105), at(115), ms(10));
        touches.answered(at(200), at(290), ms(10));
        assert_eq!(touches.settled(at(300), ms(200)), at(0));
        assert_eq!(touches.settled(at(310), ms(200)), at(100));
        assert_eq!(touches.settled(at(489), ms(200)), at(100));
        assert_eq!(touches.settled(at(490), ms(200)), at(200));
    }
}
