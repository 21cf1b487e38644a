//! The timeline of a history: one HTML file for people, which loads nothing from elsewhere.
//!
//! It has a lane per worker (shared by the replacements of killed workers), with spans and marks,
//! and violations in red. The page draws the JSON that this file embeds.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

use serde::Serialize;

use super::{Event, History, What, Written};
use crate::lab::check::{Index, Invariant, Verdict};

const PAGE: &str = include_str!("timeline.html");

/// How many violations of one invariant are listed.
const LISTED: usize = 20;

#[derive(Serialize)]
struct Data {
    /// The total length in microseconds, like all times here.
    length: u64,
    lanes: Vec<Lane>,
    faults: Vec<(u64, u64)>,
    breaches: Vec<Breach>,
}

#[derive(Serialize)]
struct Lane {
    name: String,
    /// Kind, begin, end, rank of the token (0: none), text.
    spans: Vec<(&'static str, u64, u64, usize, String)>,
    /// Kind, time, text.
    marks: Vec<(&'static str, u64, String)>,
}

#[derive(Serialize)]
struct Breach {
    text: String,
    /// Lane and time of each event; lane −1 for the harness.
    r#where: Vec<(i64, u64)>,
}

/// The page for a history and its verdicts.
pub fn page(title: &str, history: &History, verdicts: &[(Invariant, Verdict)]) -> String {
    let mut summary = String::new();
    let mut breaches = Vec::new();
    let lanes = Lanes::of(history);
    summary.push_str("<dl>");
    for (invariant, verdict) in verdicts {
        let (class, words) = match verdict {
            Verdict::Ok => ("ok", "ok".to_owned()),
            Verdict::Undecided(why) => ("bad", format!("undecided: {why}")),
            Verdict::Violated(all) => ("bad", format!("violated, {} times", all.len())),
        };
        // Writing to a string can't fail.
        let _ = write!(
            summary,
            "<div><dt>{invariant}<dd class=\"{class}\">{}</div>",
            escape(&words)
        );
    }
    summary.push_str("</dl>");
    let listed = verdicts.iter().flat_map(|(invariant, verdict)| {
        let violations = verdict.violations().iter().take(LISTED);
        violations.map(move |violation| (invariant, violation))
    });
    for (invariant, violation) in listed {
        let events = violation.events.iter().map(|at| &history.events[*at]);
        breaches.push(Breach {
            text: format!("{invariant}: {}", violation.text),
            r#where: events.map(|event| lanes.place(event)).collect(),
        });
    }
    if !breaches.is_empty() {
        summary.push_str("<ul class=\"breaches\">");
        for (at, breach) in breaches.iter().enumerate() {
            let text = escape(&breach.text);
            let _ = write!(summary, "<li data-breach=\"{at}\">{text}");
        }
        summary.push_str("</ul>");
    }
    let data = match Index::new(history) {
        Ok(index) => lanes.draw(&index, breaches),
        Err(why) => {
            let _ = write!(summary, "<p>{}</p>", escape(&why));
            lanes.empty(breaches)
        }
    };
    // Plain data with text keys always serialises. `<` is escaped, so that it can't end its
    // element.
    let data = serde_json::to_string(&data).unwrap_or_default();
    let data = data.replace('<', "\\u003c");
    let page = PAGE.replace("{{TITLE}}", &escape(title));
    let page = page.replace("{{SUMMARY}}", &summary);
    page.replace("{{DATA}}", &data)
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

/// Where everything is drawn.
struct Lanes<'h> {
    history: &'h History,
    names: Vec<&'h str>,
    begin: u64,
}

/// The lane of a client: `w2.7` replaced `w2`.
fn lane(client: &str) -> &str {
    client.split('.').next().unwrap_or(client)
}

impl<'h> Lanes<'h> {
    fn of(history: &'h History) -> Self {
        let events = history.events.iter();
        let names: BTreeSet<&str> = events
            .map(|event| lane(&event.client))
            .filter(|name| *name != "harness")
            .collect();
        let mut names: Vec<&str> = names.into_iter().collect();
        // Sorts w2 before w10.
        names.sort_by_key(|name| (name.len(), *name));
        Self {
            history,
            names,
            begin: history.begin(),
        }
    }

    fn micros(&self, at: u64) -> u64 {
        at.saturating_sub(self.begin) / 1000
    }

    fn place(&self, event: &Event) -> (i64, u64) {
        let at = self
            .names
            .iter()
            .position(|name| *name == lane(&event.client));
        let at = at.and_then(|at| i64::try_from(at).ok()).unwrap_or(-1);
        (at, self.micros(event.at))
    }

    fn empty(&self, breaches: Vec<Breach>) -> Data {
        let lanes = self.names.iter().map(|name| Lane {
            name: (*name).to_owned(),
            spans: Vec::new(),
            marks: Vec::new(),
        });
        Data {
            length: self.micros(self.history.end()),
            lanes: lanes.collect(),
            faults: Vec::new(),
            breaches,
        }
    }

    fn draw(&self, index: &Index<'h>, breaches: Vec<Breach>) -> Data {
        let mut data = self.empty(breaches);
        let mut tokens: Vec<u64> = index.holds.iter().map(|hold| hold.token).collect();
        tokens.sort_unstable();
        tokens.dedup();
        let rank = |token: u64| tokens.partition_point(|other| *other < token) + 1;
        let end_of = |client: &str| {
            let killed = index.kills.get(client).map(|kill| index.at(*kill));
            killed.unwrap_or(self.history.end())
        };
        let mut span = |client: &str, kind, from, until, token: usize, words: String| {
            let name = lane(client);
            if let Some(lane) = data.lanes.iter_mut().find(|lane| lane.name == name) {
                let times = (self.micros(from), self.micros(until));
                lane.spans.push((kind, times.0, times.1, token, words));
            }
        };
        for attempt in &index.attempts {
            let back = attempt.returned.map(|back| index.at(back));
            let until = back.unwrap_or_else(|| end_of(attempt.client));
            let words = format!("{}, {}", attempt.client, attempt.grip);
            span(
                attempt.client,
                "waiting",
                index.at(attempt.called),
                until,
                0,
                words,
            );
        }
        for hold in &index.holds {
            let kind = if hold.is_whole() { "held" } else { "shared" };
            let words = format!("{}, {}, token {}", hold.client, hold.grip, hold.token);
            let (granted, number) = (index.at(hold.granted), rank(hold.token));
            span(
                hold.client,
                kind,
                granted,
                hold.until,
                number,
                words.clone(),
            );
            if hold.lost.is_some() {
                let until = hold.release.map(|release| index.at(release));
                let until = until.unwrap_or_else(|| end_of(hold.client));
                span(hold.client, "invalid", hold.until, until, number, words);
            }
        }
        for (kind, all) in [("stall", &index.stalls), ("paused", &index.pauses)] {
            for (client, windows) in all {
                for window in windows {
                    let words = (*client).to_owned();
                    span(client, kind, window.from, window.until, 0, words);
                }
            }
        }
        let mut leading: HashMap<(&str, u64), u64> = HashMap::new();
        let mut writing: HashMap<(&str, u64), (u64, u64)> = HashMap::new();
        let mut marks: Vec<(&str, &'static str, u64, String)> = Vec::new();
        let mut faults: HashMap<&str, u64> = HashMap::new();
        for event in &self.history.events {
            let client = event.client.as_str();
            match &event.what {
                What::LeadBegin { token } => {
                    leading.insert((client, *token), event.at);
                }
                What::LeadEnd { token } => {
                    if let Some(from) = leading.remove(&(client, *token)) {
                        let words = format!("{client}, term {token}");
                        span(client, "lead", from, event.at, rank(*token), words);
                    }
                }
                What::WriteCalled { op, token, .. } => {
                    writing.insert((client, *op), (event.at, *token));
                }
                What::WriteReturned { op, answer } => {
                    let token = writing.remove(&(client, *op)).map_or(0, |(_, token)| token);
                    let (kind, words) = match answer {
                        Written::Accepted => ("accepted", format!("token {token}")),
                        Written::Stale { highest } => {
                            ("stale", format!("token {token} after {highest}"))
                        }
                        Written::NotApplied | Written::Unknown => ("unknown", String::new()),
                    };
                    marks.push((client, kind, event.at, words));
                }
                What::Kill => marks.push((client, "kill", event.at, client.to_owned())),
                What::FaultBegin { fault } => {
                    faults.insert(fault, event.at);
                }
                What::FaultEnd { fault } => {
                    if let Some(from) = faults.remove(fault.as_str()) {
                        let window = (self.micros(from), self.micros(event.at));
                        data.faults.push(window);
                    }
                }
                _ => {}
            }
        }
        for ((client, _), (at, token)) in writing {
            marks.push((client, "unknown", at, format!("token {token}")));
        }
        for (client, kind, at, words) in marks {
            let name = lane(client);
            if let Some(lane) = data.lanes.iter_mut().find(|lane| lane.name == name) {
                lane.marks.push((kind, self.micros(at), words));
            }
        }
        data
    }
}
