//! The command itself: `palisade run NAME -- true`, beside `flock FILE true`.

use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use tempfile::TempDir;
use tokio::process::Command;

use super::course::Plan;
use super::figure::{Round, Who};
use super::{ROUNDS, refused};
use crate::exit::Failure;

/// Runs of one side.
pub(super) struct Runs {
    url: String,
    who: Who,
    name: String,
    each: u32,
    dir: TempDir,
}

impl Runs {
    pub(super) fn new(plan: &Plan, who: Who, name: &str) -> Result<Self, Failure> {
        Ok(Self {
            url: plan.url.clone(),
            who,
            name: name.to_owned(),
            each: plan.count.unwrap_or(100).div_ceil(ROUNDS),
            dir: tempfile::tempdir().map_err(refused("can't make a temporary folder"))?,
        })
    }

    pub(super) async fn round(&self) -> Result<Round, Failure> {
        let began = Instant::now();
        let mut times = Vec::new();
        for _ in 0..self.each {
            let begin = Instant::now();
            let mut command = self.command(self.dir.path());
            let ended = command
                .stdin(Stdio::null())
                .kill_on_drop(true)
                .status()
                .await;
            let what = match self.who {
                Who::Palisade => "can't start palisade",
                Who::Raw => "can't start flock, which `cli` compares with (it is in util-linux)",
            };
            let ended = ended.map_err(refused(what))?;
            if !ended.success() {
                let who = self.who.word();
                return Err(Failure::Start(format!("a run of {who} ended with {ended}")));
            }
            times.push(begin.elapsed().as_nanos() as u64);
        }
        let took = began.elapsed();
        Ok(Round { times, took })
    }

    fn command(&self, dir: &Path) -> Command {
        match self.who {
            Who::Palisade => {
                let mut command = Command::new("/proc/self/exe");
                command.args(["run", &self.name, "--", "true"]);
                command.env("PALISADE_URL", &self.url);
                command
            }
            Who::Raw => {
                let mut command = Command::new("flock");
                command.arg(dir.join("lock")).arg("true");
                command
            }
        }
    }
}
