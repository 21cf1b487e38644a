//! `Escalation`: when a command is asked to end, and when it is killed.
//!
//! Pure state: the guardian feeds it events and asks what is due. Invariants: the kill is due
//! before the lease ends; and after a command was asked to end, a later renewal does not cancel
//! that.

use std::time::Duration;

use palisade::BootTime;

/// KILL comes this long before the end of the lease: enough for a busy machine to carry it out, and
/// half of the shortest time between TERM and the end.
pub(crate) const KILL_LEAD: Duration = Duration::from_millis(100);

/// How long before the end of the lease a command is asked to end.
pub(crate) fn grace(ttl: Duration) -> Duration {
    (ttl / 6).max(Duration::from_millis(200))
}

/// What is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing yet.
    Wait,
    /// Ask the command to end.
    Ask,
    /// Kill everything.
    Kill,
}

/// See the module's documentation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Escalation {
    deadline: BootTime,
    grace: Duration,
    /// The lock is known to be lost.
    lost: bool,
    /// The command was asked to end.
    asked: bool,
}

impl Escalation {
    pub(super) fn new(deadline: BootTime, grace: Duration) -> Self {
        Self {
            deadline,
            grace,
            lost: false,
            asked: false,
        }
    }

    /// The lease was renewed.
    pub(super) fn renewed(&mut self, deadline: BootTime) {
        if !self.is_ending() {
            self.deadline = self.deadline.max(deadline);
        }
    }

    /// The lock is lost, and another may have it at `by`.
    pub(super) fn end_by(&mut self, by: BootTime) {
        // The deadline known here may be an old one.
        let known = if self.is_ending() { self.deadline } else { by };
        self.deadline = known.min(by);
        self.lost = true;
    }

    /// Whether the command must end, whatever comes later.
    pub(super) fn is_ending(&self) -> bool {
        self.lost || self.asked
    }

    /// What is due at `now`. The command counts as asked from then on.
    pub(super) fn step(&mut self, now: BootTime) -> Step {
        if now >= self.kill_at() {
            self.asked = true;
            return Step::Kill;
        }
        if now >= self.next() && !self.asked {
            self.asked = true;
            return Step::Ask;
        }
        Step::Wait
    }

    /// When something is due next.
    pub(super) fn next(&self) -> BootTime {
        match (self.asked, self.lost) {
            (true, _) => self.kill_at(),
            (false, true) => BootTime::PAST,
            (false, false) => before(self.deadline, self.grace),
        }
    }

    fn kill_at(&self) -> BootTime {
        before(self.deadline, KILL_LEAD)
    }
}

fn before(time: BootTime, span: Duration) -> BootTime {
    let span = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
    BootTime::from_nanos(time.as_nanos().saturating_sub(span))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> BootTime {
        BootTime::from_nanos(millis * 1_000_000)
    }

    /// A lease that ends at 1000 ms, to be asked at 800.
    fn escalation() -> Escalation {
        Escalation::new(at(1000), Duration::from_millis(200))
    }

    #[test]
    fn the_grace_is_a_sixth_of_the_ttl_but_not_less_than_200_ms() {
        assert_eq!(grace(Duration::from_secs(30)), Duration::from_secs(5));
        assert_eq!(grace(Duration::from_secs(1)), Duration::from_millis(200));
    }

    #[test]
    fn a_command_is_asked_once_and_killed_before_the_deadline() {
        let mut escalation = escalation();
        assert_eq!(
            (escalation.step(at(799)), escalation.next()),
            (Step::Wait, at(800))
        );
        assert!(!escalation.is_ending());
        assert_eq!(
            (escalation.step(at(800)), escalation.next()),
            (Step::Ask, at(900))
        );
        assert!(escalation.is_ending());
        assert_eq!(escalation.step(at(899)), Step::Wait);
        assert_eq!(escalation.step(at(900)), Step::Kill);
    }

    #[test]
    fn whoever_comes_late_or_has_lost_it_to_another_kills_at_once() {
        assert_eq!(escalation().step(at(5000)), Step::Kill);
        let mut escalation = escalation();
        escalation.end_by(BootTime::PAST);
        assert_eq!(escalation.step(at(100)), Step::Kill);
    }

    #[test]
    fn a_renewal_moves_the_deadline_until_the_command_was_asked() {
        let mut escalation = escalation();
        escalation.renewed(at(2000));
        escalation.renewed(at(1500));
        assert_eq!(escalation.next(), at(1800));
        assert_eq!(escalation.step(at(1800)), Step::Ask);
        escalation.renewed(at(9000));
        assert_eq!(escalation.step(at(1900)), Step::Kill);
    }

    #[test]
    fn a_loss_asks_at_once_and_leaves_the_time_that_there_is() {
        let mut escalation = escalation();
        escalation.end_by(at(3000));
        assert!(escalation.is_ending());
        assert_eq!(escalation.step(at(100)), Step::Ask);
        escalation.renewed(at(9000));
        escalation.end_by(at(9000));
        assert_eq!(escalation.next(), at(2900));
        escalation.end_by(BootTime::PAST);
        assert_eq!(escalation.step(at(100)), Step::Kill);
    }
}
