//! Lines and claims as people and programs see them. The field names are the command's contract;
//! `token` is text because it may exceed what a double holds.

use std::fmt::{self, Write as _};
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use palisade::core::claim::READERS;
use palisade::{ClaimReport, Client, LineReport, Mode, Owner};
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
    /// When it asked, for its age.
    #[serde(skip)]
    pub(crate) asked: Option<Timestamp>,
    /// Whether an operator has asked it to let go.
    #[serde(skip)]
    pub(crate) evicted: bool,
}

impl LineView {
    /// A line that nobody is in.
    pub(crate) fn empty(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind: "lock",
            capacity: 1,
            holders: Vec::new(),
            waiters: Vec::new(),
        }
    }

    /// What the engine reports, with tokens as users know them.
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

    /// The same without what changes by itself.
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
        let token = claim.counted.map(|counted| client.token(counted));
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
        let asked = owner.and_then(|owner| {
            let millis = i64::try_from(owner.since).ok()?;
            Timestamp::from_millisecond(millis).ok()
        });
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
            since: asked.map(|asked| asked.to_string()),
            expires_in_ms: None,
            position: None,
            asked,
            evicted: false,
        }
    }

    /// How long ago it asked, in whole seconds.
    pub(crate) fn age(&self) -> Option<Duration> {
        let asked = SystemTime::from(self.asked?);
        let age = SystemTime::now().duration_since(asked).unwrap_or_default();
        Some(Duration::from_secs(age.as_secs()))
    }
}

/// `owner on host (pid 7) since 2026-01-01T00:00:00Z (5s)`, as far as it is known.
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
            let age = humantime::format_duration(age);
            write!(f, " since {asked:.0} ({age})")?;
        }
        Ok(())
    }
}

/// Text of others as it may be shown: what could steer the terminal is written out.
pub(crate) fn shown(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            // Writing to a String can't fail.
            true => drop(write!(safe, "{}", c.escape_default())),
            false => safe.push(c),
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
    }
}
