//! Lines and claims as they are printed, as text and as JSON. The field names are the command's
//! contract; `token` is a string because it may exceed the precision of a double.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use humantime::{format_rfc3339_millis, format_rfc3339_seconds};
use palisade::Client;
use palisade::engine::{Mode, READERS};
use palisade::report::{ClaimReport, LineReport, Owner};
use serde::Serialize;

use crate::exit::Failure;

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct LineView {
    pub(crate) name: String,
    pub(crate) kind: &'static str,
    pub(crate) capacity: u32,
    pub(crate) holders: Vec<ClaimView>,
    pub(crate) waiters: Vec<ClaimView>,
}

/// One claim. A foreign tool's claim has no owner, host, pid and since.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ClaimView {
    pub(crate) id: String,
    pub(crate) owner: Option<String>,
    pub(crate) host: Option<String>,
    pub(crate) pid: Option<u32>,
    pub(crate) label: Option<String>,
    pub(crate) weight: u32,
    pub(crate) mode: &'static str,
    pub(crate) token: Option<String>,
    pub(crate) since: Option<String>,
    pub(crate) expires_in_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) position: Option<usize>,
    /// When the claim was made, for its age.
    #[serde(skip)]
    pub(crate) asked: Option<SystemTime>,
    /// Whether an operator has asked it to let go.
    #[serde(skip)]
    pub(crate) evicted: bool,
}

impl LineView {
    /// An empty line.
    pub(crate) fn empty(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind: "lock",
            capacity: 1,
            holders: Vec::new(),
            waiters: Vec::new(),
        }
    }

    /// The engine's report, with the era added to tokens.
    pub(crate) fn new(report: LineReport, client: &Client) -> Result<Self, Failure> {
        let capacity = report.capacity.unwrap_or(1);
        let view = |claim, position| ClaimView::new(claim, capacity, position, client);
        let holders = report.holders.into_iter().map(|claim| view(claim, None));
        let waiters = report.waiters.into_iter().zip(1..);
        let waiters = waiters.map(|(claim, position)| view(claim, Some(position)));
        Ok(Self {
            name: report.name,
            kind: match report.capacity {
                None | Some(READERS) => "lock",
                Some(_) => "permits",
            },
            capacity,
            holders: holders.collect::<Result<_, Failure>>()?,
            waiters: waiters.collect::<Result<_, Failure>>()?,
        })
    }

    /// Holders, then waiters.
    pub(crate) fn claims(&self) -> impl Iterator<Item = &ClaimView> {
        self.holders.iter().chain(&self.waiters)
    }

    /// The same without the values that change with time alone.
    pub(crate) fn lasting(&self) -> Self {
        let mut lasting = self.clone();
        for claim in lasting.holders.iter_mut().chain(&mut lasting.waiters) {
            claim.expires_in_ms = None;
        }
        lasting
    }
}

impl ClaimView {
    fn new(
        claim: ClaimReport,
        capacity: u32,
        position: Option<usize>,
        client: &Client,
    ) -> Result<Self, Failure> {
        let token = claim.sequence.map(|sequence| client.token(sequence));
        Ok(Self {
            weight: claim.ask.weight_in(capacity),
            mode: match claim.ask.mode() {
                Mode::Exclusive => "exclusive",
                Mode::Shared => "shared",
                Mode::Permits => "permits",
            },
            token: token.transpose()?.map(|token| token.to_string()),
            expires_in_ms: claim.expires_in.map(|left| left.as_millis() as u64),
            position,
            evicted: claim.evicted,
            id: claim.id,
            ..Self::of_owner(claim.owner.as_ref())
        })
    }

    /// A claim of which only the owner is known.
    pub(crate) fn of_owner(owner: Option<&Owner>) -> Self {
        // RFC 3339 has no form for years after 9999.
        let asked = owner.filter(|owner| owner.since < 253_402_300_800_000);
        let asked = asked.map(|owner| UNIX_EPOCH + Duration::from_millis(owner.since));
        let part = |part: fn(&Owner) -> &str| owner.map(|owner| part(owner).to_owned());
        Self {
            id: String::new(),
            owner: part(|owner| &owner.owner),
            host: part(|owner| &owner.host),
            pid: owner.map(|owner| owner.pid),
            label: owner.and_then(|owner| owner.label.clone()),
            weight: 1,
            mode: "exclusive",
            token: None,
            since: asked.map(|asked| format_rfc3339_millis(asked).to_string()),
            expires_in_ms: None,
            position: None,
            asked,
            evicted: false,
        }
    }

    /// How long ago the claim was made, in whole seconds.
    pub(crate) fn age(&self) -> Option<Duration> {
        let age = self.asked?.elapsed().unwrap_or_default();
        Some(Duration::from_secs(age.as_secs()))
    }
}

/// `owner on host pid 7 since 2026-01-01T00:00:00Z (5s)`, as far as known.
impl fmt::Display for ClaimView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(owner) = &self.owner else {
            f.write_str("another tool")?;
            return match self.id.as_str() {
                "" => Ok(()),
                id => write!(f, " ({})", shown(id)),
            };
        };
        f.write_str(&shown(owner))?;
        if let Some(label) = &self.label {
            write!(f, " ({})", shown(label))?;
        }
        if let Some(host) = &self.host {
            write!(f, " on {}", shown(host))?;
        }
        if let Some(pid) = self.pid {
            write!(f, " pid {pid}")?;
        }
        if let (Some(asked), Some(age)) = (self.asked, self.age()) {
            let (asked, age) = (format_rfc3339_seconds(asked), brief(age));
            write!(f, " since {asked} ({age})")?;
        }
        Ok(())
    }
}

/// Whether a character could control the terminal, reorder text or be invisible: control
/// characters, format characters (Cf) and line separators.
pub(crate) fn misleads(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}'
            | '\u{890}'..='\u{891}' | '\u{8e2}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0001}'
            | '\u{e0020}'..='\u{e007f}')
}

/// The longest word that a message repeats in full: longer than any name.
const LONGEST_WORD: usize = 300;

/// The same text with its longest words cut short: a path of many kilobytes helps nobody.
pub(crate) fn shorten(text: &str) -> String {
    if text.len() <= LONGEST_WORD {
        return text.to_owned();
    }
    let short = |word: &str| match word.chars().count() {
        length if length > LONGEST_WORD => {
            let start: String = word.chars().take(100).collect();
            format!("{start}…({length} characters)")
        }
        _ => word.to_owned(),
    };
    text.split_inclusive([' ', '\n'])
        .map(|word| {
            let end = word.trim_end_matches([' ', '\n']).len();
            short(&word[..end]) + &word[end..]
        })
        .collect()
}

/// A time in its two largest units: `12s`, `5m 12s`, `2h 5m`, `3d 4h`.
pub(crate) fn brief(time: Duration) -> String {
    let seconds = time.as_secs();
    let units = [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)];
    let largest = units
        .iter()
        .position(|(_, each)| seconds >= *each)
        .unwrap_or(3);
    let mut left = seconds;
    let mut parts = Vec::new();
    for (unit, each) in units.into_iter().skip(largest).take(2) {
        parts.push((left / each, unit));
        left %= each;
    }
    parts.retain(|(number, _)| *number > 0 || seconds == 0);
    let parts: Vec<_> = parts
        .iter()
        .map(|(number, unit)| format!("{number}{unit}"))
        .collect();
    parts.join(" ")
}

/// Foreign text made safe to print: characters that could control the terminal or mislead are
/// escaped.
pub(crate) fn shown(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if misleads(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_others_can_not_steer_the_terminal() {
        assert_eq!(shown("a\x1b[2Jé\u{85}"), "a\\u{1b}[2Jé\\u{85}");
        assert_eq!(shown("a\u{202e}b\u{200b}日本"), "a\\u{202e}b\\u{200b}日本");
    }

    #[test]
    fn long_words_are_cut_short() {
        let long = "x".repeat(65_536);
        let short = shorten(&format!("directory {long}: no\nmore"));
        assert!(
            short.len() < 200 && short.starts_with("directory xxx"),
            "{short}"
        );
        assert!(short.ends_with(" no\nmore"), "{short}");
        let name = "é".repeat(127);
        assert_eq!(
            shorten(&format!("lost {name} and {name}")),
            format!("lost {name} and {name}")
        );
    }

    #[test]
    fn times_are_brief() {
        for (seconds, text) in [
            (0, "0s"),
            (12, "12s"),
            (60, "1m"),
            (312, "5m 12s"),
            (7_500, "2h 5m"),
            (273_600, "3d 4h"),
            (86_401, "1d"),
            (864_000_000, "10000d"),
        ] {
            assert_eq!(brief(Duration::from_secs(seconds)), text);
        }
    }
}
