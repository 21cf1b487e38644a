//! What an engine reports about its lines: for `ls`, dashboards, `observe` and deadlock detection.

use std::time::Duration;

use super::claim::{Ask, Mode};
use super::name::Name;
use super::owner::Owner;

/// Which lines to report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Every line of the namespace whose name starts with this; the empty prefix includes all.
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

/// One line with its holders and waiters.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LineReport {
    /// The name, without the namespace.
    pub name: String,
    /// The capacity of readers or permits; `None` if only whole-line claims are in it.
    pub capacity: Option<u32>,
    /// The holders, in the order of their grants.
    pub holders: Vec<ClaimReport>,
    /// The waiters, in the order in which they will be served.
    pub waiters: Vec<ClaimReport>,
}

impl LineReport {
    /// A line without claims.
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
    /// The claim id in hex, or a foreign tool's own id.
    pub id: String,
    /// The owner record; `None` for a foreign claim.
    pub owner: Option<Owner>,
    /// How much of the line it takes.
    pub ask: Ask,
    /// The value that an election candidate announces.
    pub value: Option<String>,
    /// The token without the era; `None` while it waits.
    pub sequence: Option<u64>,
    /// The remaining time of its lease, if known.
    pub expires_in: Option<Duration>,
    /// Whether it is marked for eviction.
    pub evicted: bool,
}

impl ClaimReport {
    /// A waiting claim with no further data.
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

/// What an engine reports about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Checkup {
    /// The version of its server, if it has one.
    pub version: Option<String>,
    /// How far its clock is ahead of ours in microseconds, if it reports its time.
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
    /// Its stable name.
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
