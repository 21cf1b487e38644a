//! What an engine shows of its lines: for `ls`, dashboards, `observe` and deadlock detection.

use std::time::Duration;

use super::claim::{Ask, Mode};
use super::name::Name;
use super::owner::Owner;

/// Which lines to show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Every line of the namespace whose name begins so; the empty prefix is all of them.
    Prefix(String),
    /// One line.
    Line(Name),
}

impl Scope {
    /// Whether it includes the line `name`.
    pub fn includes(&self, name: &str) -> bool {
        match self {
            Self::Prefix(prefix) => name.starts_with(prefix.as_str()),
            Self::Line(line) => line.as_str() == name,
        }
    }
}

/// One line: who holds and who waits.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LineReport {
    /// The name, without the namespace.
    pub name: String,
    /// The capacity of readers or permits; `None` when only whole-line claims are in it.
    pub capacity: Option<u32>,
    /// Who holds, in the order of their grants.
    pub holders: Vec<ClaimReport>,
    /// Who waits, in the order in which they will be served.
    pub waiters: Vec<ClaimReport>,
}

impl LineReport {
    /// A line that nobody is in.
    pub fn empty(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            capacity: None,
            holders: Vec::new(),
            waiters: Vec::new(),
        }
    }
}

/// One claim in a line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimReport {
    /// The claim id in hex, or what a foreign tool calls its own.
    pub id: String,
    /// Who it is; `None` for a foreign claim.
    pub owner: Option<Owner>,
    /// How much of the line it takes.
    pub ask: Ask,
    /// What a candidate stands for.
    pub value: Option<String>,
    /// The token before the era is added; `None` while waiting.
    pub sequence: Option<u64>,
    /// How long its lease still runs, where that can be known.
    pub expires_in: Option<Duration>,
    /// Whether an operator has asked it to let go.
    pub evicted: bool,
}

impl ClaimReport {
    /// A claim that waits, of which nothing else is known.
    pub fn new(id: impl Into<String>, ask: Ask) -> Self {
        Self {
            id: id.into(),
            owner: None,
            ask,
            value: None,
            sequence: None,
            expires_in: None,
            evicted: false,
        }
    }

    /// How it takes part.
    pub fn mode(&self) -> Mode {
        self.ask.mode()
    }
}

/// What an engine says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Checkup {
    /// The version of its server, where it has one.
    pub version: Option<String>,
    /// How far its clock is ahead of ours in microseconds, where it tells its time.
    pub clock_ahead_us: Option<i64>,
    /// Unsafe settings, and what to do about them.
    pub findings: Vec<Finding>,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Good to know.
    Info,
    /// Weakens availability or speed.
    Warning,
    /// Can break exclusion or tokens.
    Danger,
}

/// A finding about the settings of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// A stable word for it.
    pub code: &'static str,
    /// What was found.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl Finding {
    /// A finding, and what to do about it.
    pub fn new(
        severity: Severity,
        code: &'static str,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            severity,
            code,
            message: message.into(),
            remedy: remedy.into(),
        }
    }
}
