//! Hand-made histories: times in milliseconds, one line called `x`, claims named after tokens.

use std::time::Duration;

use palisade_testkit::lab::check::{Invariant, Params, Verdict};
use palisade_testkit::lab::history::{Answer, Event, Grip, History, Released, Shown, What};

pub(crate) const MS: u64 = 1_000_000;

/// A lease of 100 ms, deaths noticed in 10 ms, 20 ms of slack.
pub(crate) fn params() -> Params {
    Params {
        slack: Duration::from_millis(20),
        recheck: Duration::from_millis(50),
        ..Params::new(Duration::from_millis(100), Some(Duration::from_millis(10)))
    }
}

pub(crate) fn all(parts: Vec<Vec<Event>>) -> Vec<Event> {
    parts.into_iter().flatten().collect()
}

pub(crate) fn ev(ms: u64, client: &str, what: What) -> Event {
    Event {
        at: ms * MS,
        client: client.to_owned(),
        name: "x".to_owned(),
        what,
    }
}

pub(crate) fn claim(token: u64) -> String {
    format!("c{token}")
}

pub(crate) fn ask(op: u64) -> What {
    ask_for(op, Grip::Whole)
}

pub(crate) fn ask_for(op: u64, grip: Grip) -> What {
    What::AcquireCalled {
        op,
        grip,
        patience_ms: None,
    }
}

pub(crate) fn ask_within(op: u64, patience: u64) -> What {
    What::AcquireCalled {
        op,
        grip: Grip::Whole,
        patience_ms: Some(patience),
    }
}

pub(crate) fn held(op: u64, token: u64) -> What {
    answer(
        op,
        Answer::Held {
            token,
            claim: claim(token),
        },
    )
}

pub(crate) fn answer(op: u64, answer: Answer) -> What {
    What::AcquireReturned { op, answer }
}

pub(crate) fn valid(token: u64) -> What {
    What::Valid {
        token,
        claim: claim(token),
    }
}

pub(crate) fn lost(token: u64, valid_until: u64) -> What {
    lost_as("expired", token, valid_until)
}

pub(crate) fn lost_as(reason: &str, token: u64, valid_until: u64) -> What {
    What::Lost {
        token,
        claim: claim(token),
        reason: reason.to_owned(),
        valid_until: Some(valid_until * MS),
    }
}

pub(crate) fn release(token: u64) -> What {
    What::ReleaseCalled {
        token,
        claim: claim(token),
        valid_until: None,
    }
}

pub(crate) fn released(token: u64, answer: Released) -> What {
    What::ReleaseReturned {
        token,
        claim: claim(token),
        answer,
    }
}

pub(crate) fn start(owner: &str) -> What {
    What::Start {
        pid: 1,
        owner: owner.to_owned(),
    }
}

/// A survey that shows (claim's token, owner), requested just before.
pub(crate) fn survey(ms: u64, line: &[(u64, &str)]) -> Event {
    let line = line.iter().map(|(token, owner)| Shown {
        claim: claim(*token),
        owner: (*owner).to_owned(),
        token: None,
    });
    ev(
        ms,
        "harness",
        What::Survey {
            asked: ms * MS,
            line: line.collect(),
        },
    )
}

/// A regular acquire, grant and release.
pub(crate) fn turn(client: &str, token: u64, times: [u64; 3]) -> Vec<Event> {
    vec![
        ev(times[0], client, ask(1)),
        ev(times[1], client, held(1, token)),
        ev(times[2], client, release(token)),
        ev(times[2], client, released(token, Released::Done)),
    ]
}

/// The same with a weight out of a capacity of 4.
pub(crate) fn part(client: &str, token: u64, weight: u32, times: [u64; 3]) -> Vec<Event> {
    let mut turn = turn(client, token, times);
    turn[0].what = ask_for(
        1,
        Grip::Part {
            weight,
            capacity: 4,
        },
    );
    turn
}

/// A leader's work.
pub(crate) fn lead(client: &str, token: u64, begin: u64, end: u64) -> Vec<Event> {
    vec![
        ev(begin, client, What::LeadBegin { token }),
        ev(end, client, What::LeadEnd { token }),
    ]
}

/// Events, or several parts of a history in any order.
pub(crate) trait Events {
    fn events(self) -> Vec<Event>;
}

impl Events for Vec<Event> {
    fn events(self) -> Vec<Event> {
        self
    }
}

impl<const N: usize> Events for [Vec<Event>; N] {
    fn events(self) -> Vec<Event> {
        self.concat()
    }
}

/// What a checker must decide about a history.
pub(crate) trait Judge: Sized {
    fn judge(self, events: impl Events) -> (History, Verdict);

    /// The history passes.
    #[track_caller]
    fn accepts(self, events: impl Events) {
        assert_eq!(self.judge(events).1, Verdict::Ok);
    }

    /// The checker can't decide.
    #[track_caller]
    fn leaves_open(self, events: impl Events) {
        let (_, verdict) = self.judge(events);
        assert!(matches!(verdict, Verdict::Undecided(_)), "{verdict}");
    }

    /// The history is refused, and the first violation names the events at these times.
    #[track_caller]
    fn refuses<const N: usize>(self, events: impl Events, times: [u64; N]) {
        let (history, verdict) = self.judge(events);
        let breach = verdict.violations().first();
        let breach = breach.unwrap_or_else(|| panic!("not refused: {verdict}"));
        let named = breach.events.iter().map(|at| history.events[*at].at / MS);
        let mut named: Vec<u64> = named.collect();
        named.sort_unstable();
        assert_eq!(named, times, "{}", breach.text);
    }
}

impl Judge for Invariant {
    fn judge(self, events: impl Events) -> (History, Verdict) {
        let history = History::of(events.events());
        let verdict = self.check(&history, &params());
        (history, verdict)
    }
}
