//! `Runner`: one side of a scenario that is measured in rounds.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::process::Command;
use tokio::task::JoinSet;

use super::figure::Round;
use super::handover::Waiters;
use super::side::{Side, Who};
use super::{Measured, Plan, ROUNDS};
use crate::exit::{Failure, refused};

pub(super) enum Runner {
    /// Lock and unlock on one client, so many names at once.
    Cycles(Side, Vec<String>),
    Handover(Waiters),
    /// The command itself, this many times per round.
    Cli(Cli, u32),
}

pub(super) struct Cli {
    who: Who,
    url: String,
    name: String,
    dir: TempDir,
}

impl Runner {
    pub(super) async fn ready(plan: &Plan<'_>, what: Measured, who: Who) -> Result<Self, Failure> {
        let name = format!("{}-{}", plan.name, what.name());
        Ok(match what {
            Measured::Cycles { at_once } => {
                let side = Side::open(plan.url, who, plan.cleanup).await?;
                Self::Cycles(
                    side,
                    (0..at_once).map(|at| format!("{name}-{at}")).collect(),
                )
            }
            Measured::Handover { waiters, pass } => {
                Self::Handover(Waiters::gather(plan, who, &name, waiters, pass).await?)
            }
            // `held` has no rounds and no raw side; see `held::measure`.
            Measured::Held | Measured::Cli => {
                let dir = tempfile::tempdir().map_err(refused("can't make a temporary folder"))?;
                let url = plan.url.to_owned();
                let each = plan.count.unwrap_or(100).div_ceil(ROUNDS);
                Self::Cli(
                    Cli {
                        who,
                        url,
                        name,
                        dir,
                    },
                    each,
                )
            }
        })
    }

    pub(super) async fn round(&mut self, slice: Duration) -> Result<Round, Failure> {
        let began = Instant::now();
        let mut times = Vec::new();
        match self {
            Self::Cycles(side, names) => match names.as_slice() {
                [name] => times = cycle(side, name, began + slice).await?,
                names => {
                    let mut tasks = JoinSet::new();
                    for name in names {
                        let (side, name) = (side.clone(), name.clone());
                        tasks.spawn(async move { cycle(&side, &name, began + slice).await });
                    }
                    while let Some(one) = tasks.join_next().await {
                        times.extend(one.map_err(|error| refused("a task ended")(error.into()))??);
                    }
                }
            },
            Self::Handover(waiters) => return waiters.round(slice).await,
            Self::Cli(cli, each) => {
                for _ in 0..*each {
                    times.push(cli.run().await?);
                }
            }
        }
        let took = began.elapsed();
        Ok(Round { times, took })
    }

    /// Lets the processes end by themselves.
    pub(super) async fn end(self) {
        if let Self::Handover(waiters) = self {
            waiters.end().await;
        }
    }
}

async fn cycle(side: &Side, name: &str, until: Instant) -> Result<Vec<u64>, Failure> {
    let mut times = Vec::new();
    let mut begin = Instant::now();
    while begin < until {
        side.cycle(name).await?;
        let end = Instant::now();
        times.push((end - begin).as_nanos() as u64);
        begin = end;
        // A task that never waits would not let the others run.
        tokio::task::coop::consume_budget().await;
    }
    Ok(times)
}

impl Cli {
    /// How long one run takes, in nanoseconds.
    async fn run(&self) -> Result<u64, Failure> {
        let (mut command, failed) = match self.who {
            Who::Palisade => {
                let mut command = Command::new("/proc/self/exe");
                command.args(["run", &self.name, "--", "true"]);
                command.env("PALISADE_URL", &self.url);
                (command, "can't start palisade")
            }
            Who::Raw => {
                let mut command = Command::new("flock");
                command.arg(self.dir.path().join("lock")).arg("true");
                (
                    command,
                    "can't start flock, which `cli` compares with (it is in util-linux)",
                )
            }
        };
        let begin = Instant::now();
        let ended = command
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .status()
            .await;
        let ended = ended.map_err(refused(failed))?;
        if !ended.success() {
            let who = self.who.word();
            return Err(Failure::Start(format!("a run of {who} ended with {ended}")));
        }
        Ok(begin.elapsed().as_nanos() as u64)
    }
}
