//! `Course`: what one figure measures; `Runner`: one side that is ready to run it, round by round.

use std::sync::Arc;
use std::time::Duration;

use super::cli::Runs;
use super::crew::Crew;
use super::cycles::Cycles;
use super::figure::{Round, Who};
use super::lane::Lane;
use super::traces::Traces;
use crate::exit::Failure;

/// What all courses share.
pub(super) struct Plan {
    pub(super) url: String,
    pub(super) engine: String,
    /// The beginning of all names.
    pub(super) name: String,
    /// Waiters are processes.
    pub(super) processes: bool,
    /// How long a round takes.
    pub(super) slice: Duration,
    pub(super) count: Option<u32>,
    pub(super) traces: Arc<Traces>,
}

/// What one figure measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Course {
    /// Lock and unlock, this many names at once on one client.
    Cycles { at_once: u16 },
    /// Hand-over among waiters; a true pass holds for a while and stays away.
    Relay { waiters: u16, pass: bool },
    /// What many locks cost that are held.
    Held,
    /// The command itself.
    Cli,
}

impl Course {
    pub(super) fn name(self) -> String {
        match self {
            Self::Cycles { at_once: 1 } => "uncontended".to_owned(),
            Self::Cycles { .. } => "parallel".to_owned(),
            Self::Relay {
                waiters,
                pass: false,
            } => format!("handoff-{waiters}"),
            Self::Relay {
                waiters,
                pass: true,
            } => format!("pass-{waiters}"),
            Self::Held => "held".to_owned(),
            Self::Cli => "cli".to_owned(),
        }
    }

    /// Connects one side.
    pub(super) async fn ready(self, plan: &Plan, who: Who) -> Result<Runner, Failure> {
        let name = format!("{}-{}", plan.name, self.name());
        Ok(match self {
            Self::Cycles { at_once } => {
                let lane = Lane::open(&plan.url, who, &plan.traces).await?;
                Runner::Cycles(Cycles::new(&lane, &name, at_once)?)
            }
            Self::Relay { waiters, pass } => {
                let crew = Crew::gather(plan, who, &name, waiters, pass).await?;
                Runner::Relay(crew)
            }
            // `held` has no rounds and no raw side; see `held::measure`.
            Self::Held | Self::Cli => Runner::Cli(Runs::new(plan, who, &name)?),
        })
    }
}

/// One side of a course.
pub(super) enum Runner {
    Cycles(Cycles),
    Relay(Crew),
    Cli(Runs),
}

impl Runner {
    pub(super) async fn round(&mut self, slice: Duration) -> Result<Round, Failure> {
        match self {
            Self::Cycles(cycles) => cycles.round(slice).await,
            Self::Relay(crew) => crew.round(slice).await,
            Self::Cli(runs) => runs.round().await,
        }
    }

    /// Lets the processes end by themselves.
    pub(super) async fn end(self) {
        if let Self::Relay(crew) = self {
            crew.end().await;
        }
    }
}
