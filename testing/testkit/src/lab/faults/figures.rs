//! `Figures`: the numbers of a run.

use std::fmt;

use crate::lab::check::{Index, handovers};
use crate::lab::history::{Answer, What, Written};

/// The numbers of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures {
    /// Acquires called.
    pub acquires: usize,
    /// Acquires granted.
    pub grants: usize,
    /// Acquires whose patience ended.
    pub busy: usize,
    /// Acquires dropped.
    pub dropped: usize,
    /// Acquires that failed.
    pub errors: usize,
    /// Losses reported.
    pub losses: usize,
    /// Holds that the engine took away before their leases had ended.
    pub taken: usize,
    /// Writes accepted.
    pub accepted: usize,
    /// Writes refused as stale.
    pub stale: usize,
    /// Writes with an unknown outcome.
    pub unknown: usize,
    /// Stops and kills.
    pub hurt: usize,
    /// Stops and kills of holders.
    pub holders_hurt: usize,
    /// Files of killed processes that end in a torn line.
    pub torn: usize,
    /// The times from the kill of a holder to the next grant, in nanoseconds, sorted.
    pub handovers: Vec<u64>,
}

impl Figures {
    /// Counts the events of a history.
    pub fn of(index: &Index<'_>) -> Self {
        let mut figures = Self {
            acquires: index.attempts.len(),
            grants: index.holds.len(),
            torn: index.history.torn,
            losses: index
                .holds
                .iter()
                .filter(|hold| hold.lost.is_some())
                .count(),
            taken: index
                .holds
                .iter()
                .filter(|hold| index.was_taken(hold))
                .count(),
            handovers: handovers(index),
            ..Self::default()
        };
        figures.handovers.sort_unstable();
        let mut written = 0;
        for event in &index.history.events {
            let counter = match &event.what {
                What::AcquireReturned { answer, .. } => match answer {
                    Answer::Busy => &mut figures.busy,
                    Answer::Cancelled => &mut figures.dropped,
                    Answer::Error { .. } => &mut figures.errors,
                    Answer::Held { .. } => continue,
                },
                What::WriteCalled { .. } => &mut written,
                What::WriteReturned { answer, .. } => match answer {
                    Written::Accepted => &mut figures.accepted,
                    Written::Stale { .. } => &mut figures.stale,
                    Written::Unknown => continue,
                    Written::NotApplied => &mut figures.errors,
                },
                What::Kill | What::PauseBegin => {
                    let held = index.holds.iter().any(|hold| {
                        hold.client == event.client
                            && index.at(hold.granted) <= event.at
                            && event.at <= hold.until
                    });
                    figures.holders_hurt += usize::from(held);
                    &mut figures.hurt
                }
                _ => continue,
            };
            *counter += 1;
        }
        figures.unknown = written - (figures.accepted + figures.stale).min(written);
        figures
    }

    /// The quantile `part` (0 to 1) of the hand-over times, in milliseconds.
    pub fn handover_ms(&self, part: f64) -> Option<f64> {
        let last = self.handovers.len().checked_sub(1)?;
        let at = (last as f64 * part).ceil() as usize;
        Some(self.handovers[at.min(last)] as f64 / 1e6)
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |what: &str, value: String| writeln!(f, "  {what:<34}{value:>12}");
        row("acquires", self.acquires.to_string())?;
        row("granted", self.grants.to_string())?;
        row("patience ended", self.busy.to_string())?;
        row("dropped", self.dropped.to_string())?;
        row("errors", self.errors.to_string())?;
        row("losses told", self.losses.to_string())?;
        row("taken away by the engine", self.taken.to_string())?;
        row("writes accepted", self.accepted.to_string())?;
        row("stale writes refused", self.stale.to_string())?;
        row("writes with unknown outcome", self.unknown.to_string())?;
        row("processes hurt", self.hurt.to_string())?;
        row("of these while they held", self.holders_hurt.to_string())?;
        for (what, part) in [("p50", 0.5), ("p99", 0.99)] {
            if let Some(took) = self.handover_ms(part) {
                let what = format!("hand-over after a kill, {what}");
                row(&what, format!("{took:.1} ms"))?;
            }
        }
        match self.torn {
            0 => Ok(()),
            torn => row("torn last lines", torn.to_string()),
        }
    }
}
