//! `Index`: a history with calls and answers paired, holds as intervals, and stops as windows.

use std::collections::{BTreeMap, HashMap};

use palisade::LossReason;

use super::outages::{Resumption, outages, resumptions};
use crate::lab::history::{Answer, Event, Grip, History, Released, What};

/// A span of time: `from` is inclusive, `until` exclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Its begin.
    pub from: u64,
    /// Its end.
    pub until: u64,
}

impl Window {
    /// Whether `when` is in it.
    pub fn contains(self, when: u64) -> bool {
        (self.from..self.until).contains(&when)
    }

    /// The length of the overlap with `other`.
    pub fn overlap(self, other: Self) -> u64 {
        let (from, until) = (self.from.max(other.from), self.until.min(other.until));
        until.saturating_sub(from)
    }

    /// How much of it `windows` cover together.
    pub fn covered(self, windows: impl IntoIterator<Item = Self>) -> u64 {
        let mut windows: Vec<Self> = windows.into_iter().collect();
        windows.retain(|window| window.overlap(self) > 0);
        windows.sort_unstable_by_key(|window| window.from);
        let (mut total, mut reached) = (0, self.from);
        for window in windows {
            let from = window.from.max(reached);
            let until = window.until.min(self.until);
            total += until.saturating_sub(from);
            reached = reached.max(until);
        }
        total
    }
}

/// One acquire: call and answer.
#[derive(Debug, Clone)]
pub struct Attempt<'h> {
    /// The client.
    pub client: &'h str,
    /// The name of the line.
    pub name: &'h str,
    /// How much of the line it takes.
    pub grip: Grip,
    /// How long it would wait, in nanoseconds; `None` for ever.
    pub patience: Option<u64>,
    /// The index of the call event.
    pub called: usize,
    /// The index of the answer event, if there is one.
    pub returned: Option<usize>,
    /// The answer.
    pub answer: Option<&'h Answer>,
}

/// One hold, as its owner saw it.
#[derive(Debug, Clone)]
pub struct Held<'h> {
    /// The client.
    pub client: &'h str,
    /// The name of the line.
    pub name: &'h str,
    /// How much of the line it takes.
    pub grip: Grip,
    /// The fencing token.
    pub token: u64,
    /// The claim.
    pub claim: &'h str,
    /// The call of the acquire.
    pub called: usize,
    /// Its answer: from here on the owner believes to hold.
    pub granted: usize,
    /// When the owner stopped believing: at the release, the loss, the kill, or the end of the run.
    pub until: u64,
    /// The event that shows this, if there is one.
    pub ended: Option<usize>,
    /// The call of the release.
    pub release: Option<usize>,
    /// The answer of the release.
    pub released: Option<usize>,
    /// The first event that reported a loss.
    pub lost: Option<usize>,
    /// Whether the time when a lost hold became invalid is known, and not only when that was
    /// noticed.
    pub known: bool,
    /// The events where `is_valid()` returned `true`.
    pub valid: Vec<usize>,
}

/// A history, indexed.
#[derive(Debug)]
pub struct Index<'h> {
    /// The history.
    pub history: &'h History,
    /// All acquires, in the order of their calls.
    pub attempts: Vec<Attempt<'h>>,
    /// All holds, in the order of their grants.
    pub holds: Vec<Held<'h>>,
    /// When each client was stopped by the harness.
    pub pauses: HashMap<&'h str, Vec<Window>>,
    /// When each client got no CPU time.
    pub stalls: HashMap<&'h str, Vec<Window>>,
    /// When the engine could not serve.
    pub outages: Vec<Window>,
    /// When a server continued after a stop.
    pub resumptions: Vec<Resumption>,
    /// From each survey request of the harness to its answer.
    pub looks: Vec<Window>,
    /// The event that killed each killed client.
    pub kills: HashMap<&'h str, usize>,
    /// The client of each owner handle.
    pub owners: HashMap<&'h str, &'h str>,
    /// The hold of each granted claim, as an index of `holds`.
    pub claims: HashMap<&'h str, usize>,
    /// The longest answered acquire in nanoseconds, which bounds the search for waiting callers.
    longest: u64,
}

impl<'h> Index<'h> {
    /// Indexes a history.
    ///
    /// # Errors
    /// A message if it is inconsistent: an answer without a call, a release without a hold.
    pub fn new(history: &'h History) -> Result<Self, String> {
        let mut index = Self {
            history,
            attempts: Vec::new(),
            holds: Vec::new(),
            pauses: HashMap::new(),
            stalls: HashMap::new(),
            outages: outages(history),
            resumptions: resumptions(history),
            looks: Vec::new(),
            kills: HashMap::new(),
            owners: HashMap::new(),
            claims: HashMap::new(),
            longest: 0,
        };
        let mut calls: HashMap<(&str, u64), usize> = HashMap::new();
        let mut holds: HashMap<(&str, &str), usize> = HashMap::new();
        let mut stopped: BTreeMap<&str, u64> = BTreeMap::new();
        for (at, event) in history.events.iter().enumerate() {
            let client = event.client.as_str();
            let senseless = |what: &str| format!("{what}: {event}");
            match &event.what {
                What::Start { owner, .. } => {
                    index.owners.insert(owner, client);
                }
                What::Kill => {
                    index.kills.insert(client, at);
                }
                What::PauseBegin => {
                    stopped.insert(client, event.at);
                }
                What::PauseEnd => {
                    let from = stopped.remove(client);
                    let from = from.ok_or_else(|| senseless("resumed but not stopped"))?;
                    let until = event.at;
                    let windows = index.pauses.entry(client).or_default();
                    windows.push(Window { from, until });
                }
                What::Stall { since } => {
                    let windows = index.stalls.entry(client).or_default();
                    windows.push(Window {
                        from: *since,
                        until: event.at,
                    });
                }
                What::Survey { asked, .. } => index.looks.push(Window {
                    from: *asked,
                    until: event.at,
                }),
                What::AcquireCalled {
                    op,
                    grip,
                    patience_ms,
                } => {
                    if calls.insert((client, *op), index.attempts.len()).is_some() {
                        return Err(senseless("two calls with one number"));
                    }
                    index.attempts.push(Attempt {
                        client,
                        name: &event.name,
                        grip: *grip,
                        patience: patience_ms.map(|ms| ms.saturating_mul(1_000_000)),
                        called: at,
                        returned: None,
                        answer: None,
                    });
                }
                What::AcquireReturned { op, answer } => {
                    let attempt = calls.get(&(client, *op)).copied();
                    let attempt = attempt.and_then(|at| index.attempts.get_mut(at));
                    let attempt = attempt.ok_or_else(|| senseless("an answer without a call"))?;
                    if attempt.returned.replace(at).is_some() {
                        return Err(senseless("a second answer"));
                    }
                    attempt.answer = Some(answer);
                    let took = event.at - history.events[attempt.called].at;
                    index.longest = index.longest.max(took);
                    if let Answer::Held { token, claim } = answer {
                        holds.insert((client, claim), index.holds.len());
                        index.claims.insert(claim, index.holds.len());
                        index.holds.push(Held {
                            client,
                            name: &event.name,
                            grip: attempt.grip,
                            token: *token,
                            claim,
                            called: attempt.called,
                            granted: at,
                            until: history.end(),
                            ended: None,
                            release: None,
                            released: None,
                            lost: None,
                            known: false,
                            valid: Vec::new(),
                        });
                    }
                }
                What::Valid { claim, .. }
                | What::Lost { claim, .. }
                | What::Invalid { claim, .. }
                | What::ReleaseCalled { claim, .. }
                | What::ReleaseReturned { claim, .. } => {
                    let hold = holds.get(&(client, claim.as_str())).copied();
                    let hold = hold.and_then(|at| index.holds.get_mut(at));
                    hold.ok_or_else(|| senseless("nothing was held"))?
                        .take(at, event);
                }
                What::End => index.end_holds(client, at, event.at),
                _ => {}
            }
        }
        for (client, from) in stopped {
            let until = history.end();
            let windows = index.pauses.entry(client).or_default();
            windows.push(Window { from, until });
        }
        let kills: Vec<_> = index.kills.iter().map(|(c, at)| (*c, *at)).collect();
        for (client, at) in kills {
            index.end_holds(client, at, history.events[at].at);
        }
        index.end_unknown();
        Ok(index)
    }

    /// If a hold was only found invalid after a stop, and had no event in between, it is taken to
    /// have ended at that stop. A stop is recorded from just before its signal, so the grant may
    /// lie inside of it.
    fn end_unknown(&mut self) {
        for hold in &mut self.holds {
            let Some(lost) = hold.lost.filter(|_| !hold.known) else {
                continue;
            };
            let pauses = self.pauses.get(hold.client).into_iter().flatten();
            let Some(last) = pauses.rev().find(|pause| pause.from < hold.until) else {
                continue;
            };
            let at = |event: usize| self.history.events[event].at;
            let spoke = hold.valid.iter().any(|valid| at(*valid) >= last.until);
            if !spoke && last.until >= at(hold.granted) {
                hold.end(lost, last.until);
            }
        }
    }

    fn end_holds(&mut self, client: &str, at: usize, when: u64) {
        for hold in self.holds.iter_mut().filter(|hold| hold.client == client) {
            hold.end(at, when);
        }
    }

    /// When an event happened.
    pub fn at(&self, event: usize) -> u64 {
        self.history.events[event].at
    }

    /// The names that were acquired.
    pub fn names(&self) -> Vec<&'h str> {
        let mut names: Vec<_> = self.attempts.iter().map(|attempt| attempt.name).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The holds of a line, in the order of their grants.
    pub fn holds_of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Held<'h>> {
        self.holds.iter().filter(move |hold| hold.name == name)
    }

    /// The attempts that waited for `name` at `when`: called before, not answered by then, not
    /// killed.
    pub fn waiting<'a>(&'a self, name: &str, when: u64) -> Vec<&'a Attempt<'h>> {
        let called = |attempt: &Attempt<'_>| self.at(attempt.called);
        let (from, until) = (when.saturating_sub(self.longest), when);
        let first = self.attempts.partition_point(|one| called(one) < from);
        let last = self.attempts.partition_point(|one| called(one) < until);
        // Few attempts have no answer: they were killed, or hang.
        let early = self.attempts[..first].iter();
        let all = early
            .filter(|one| one.returned.is_none())
            .chain(&self.attempts[first..last]);
        all.filter(|one| one.name == name)
            .filter(|one| one.returned.is_none_or(|back| self.at(back) > when))
            .filter(|one| {
                let killed = self.kills.get(one.client).map(|kill| self.at(*kill));
                killed.is_none_or(|kill| kill > when)
            })
            .collect()
    }

    /// The attempts that asked for `name` inside `window`.
    pub fn called_in<'a>(
        &'a self,
        name: &'a str,
        window: Window,
    ) -> impl Iterator<Item = &'a Attempt<'h>> {
        let before = |when: u64| {
            let early = |one: &Attempt<'_>| self.at(one.called) < when;
            self.attempts.partition_point(early)
        };
        let (first, last) = (before(window.from), before(window.until));
        let all = self.attempts[first..last.max(first)].iter();
        all.filter(move |one| one.name == name)
    }

    /// The first grant of `name` after `when`.
    pub fn next_grant(&self, name: &str, when: u64) -> Option<u64> {
        let later = self
            .holds
            .partition_point(|hold| self.at(hold.granted) <= when);
        let next = self.holds[later..].iter().find(|hold| hold.name == name)?;
        Some(self.at(next.granted))
    }

    /// The parts of `window` in which `client` was not stopped; each stop is extended by `more`.
    pub fn running(&self, client: &str, window: Window, more: u64) -> Vec<Window> {
        let mut parts = Vec::new();
        let mut from = window.from;
        for pause in self.pauses.get(client).into_iter().flatten() {
            let until = pause.until.saturating_add(more);
            if until <= from || pause.from >= window.until {
                continue;
            }
            if pause.from > from {
                parts.push(Window {
                    from,
                    until: pause.from,
                });
            }
            from = until;
        }
        if from < window.until {
            parts.push(Window {
                from,
                until: window.until,
            });
        }
        parts
    }

    /// How long `client` was stopped, starved or without an engine inside `window`. A stop also
    /// appears as a stall.
    pub fn out_of_action(&self, client: &str, window: Window) -> u64 {
        window.covered(self.outs(client))
    }

    /// When `client` was stopped, starved or without an engine; these windows may overlap.
    pub fn outs(&self, client: &str) -> impl Iterator<Item = Window> {
        let all = [self.pauses.get(client), self.stalls.get(client)];
        let all = all.into_iter().flatten().flatten();
        all.chain(&self.outages).copied()
    }

    /// The longest time that a survey took around `window`: an estimate of what any request took
    /// then on a busy machine.
    pub fn slowest_look(&self, window: Window) -> u64 {
        // Surveys don't overlap.
        let first = self.looks.partition_point(|look| look.until <= window.from);
        let looks = self.looks[first..].iter();
        let around = looks.take_while(|look| look.from < window.until);
        around.map(|look| look.until - look.from).max().unwrap_or(0)
    }

    /// The hold of `client` with this token.
    pub fn hold(&self, client: &str, token: u64) -> Option<&Held<'h>> {
        let mut holds = self.holds.iter();
        holds.find(|hold| hold.client == client && hold.token == token)
    }

    /// Whether the engine itself took `hold` away before its lease had ended: its owner was told
    /// so, or learnt it by a release that it called in time. An operator's eviction is not meant.
    pub fn was_taken(&self, hold: &Held<'_>) -> bool {
        let what = |event: usize| &self.history.events[event].what;
        let told = hold.lost.map(what);
        let released = hold.released.filter(|_| hold.lost.is_none()).map(what);
        matches!(told, Some(What::Lost { reason, .. }) if reason == LossReason::Taken.code())
            || matches!(released, Some(What::ReleaseReturned { answer, .. }) if *answer == Released::Lost)
    }

    /// Whether a server that had been stopped for at least `least` had just continued at `when`.
    pub fn had_resumed(&self, when: u64, least: u64) -> bool {
        let mut resumptions = self.resumptions.iter();
        resumptions.any(|one| one.stopped >= least && one.window.contains(when))
    }

    /// Whether `client` was stopped or killed, or the engine was disturbed, inside `window`.
    pub fn was_hurt(&self, client: &str, window: Window) -> bool {
        let killed = self.kills.get(client).map(|at| self.at(*at));
        let pauses = self.pauses.get(client).into_iter().flatten();
        let mut pauses = pauses.chain(&self.outages);
        killed.is_some_and(|at| at < window.until) || pauses.any(|out| out.overlap(window) > 0)
    }
}

impl Held<'_> {
    fn take(&mut self, at: usize, event: &Event) {
        match &event.what {
            What::Valid { .. } => self.valid.push(at),
            What::Lost { valid_until, .. } | What::Invalid { valid_until, .. } => {
                self.lost.get_or_insert(at);
                self.known |= valid_until.is_some();
                self.end(at, valid_until.unwrap_or(event.at).min(event.at));
            }
            What::ReleaseCalled { valid_until, .. } => {
                self.release.get_or_insert(at);
                self.end(at, valid_until.unwrap_or(event.at).min(event.at));
            }
            What::ReleaseReturned { .. } => {
                self.released.get_or_insert(at);
            }
            _ => {}
        }
    }

    fn end(&mut self, event: usize, when: u64) {
        if self.ended.is_none() || when < self.until {
            self.ended = Some(event);
            self.until = when;
        }
    }

    /// Whether it takes the whole line.
    pub fn is_whole(&self) -> bool {
        self.grip == Grip::Whole
    }

    /// Whether the two must not be held at once.
    pub fn conflicts(&self, other: &Self) -> bool {
        self.name == other.name && (self.is_whole() || other.is_whole())
    }

    /// A description for messages.
    pub fn called(&self) -> String {
        format!("{}'s hold with token {}", self.client, self.token)
    }
}
