//! `palisade run`: runs a command while holding a lock. The steps are those of a
//! [`Job`](crate::job::Job); if one of them fails, the lock is released before palisade returns.

use std::ffi::OsString;

use crate::args::{Global, parse_name};
use crate::exit::Verdict;
use crate::guardian::Terms;
use crate::job::Connected;
use crate::lock_args::{AgentArgs, LockArgs};
use crate::on_runtime;
use crate::traces::traced;

/// Run a command while holding a lock
///
/// Waits for the lock, runs the command, releases the lock, and ends with the command's exit
/// code. If the lock is lost, the command is ended before anyone else can get the lock.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "palisade run [OPTIONS] <NAME> -- <CMD>...",
    after_help = "Examples:\n  \
        palisade run nightly-report -- ./report.sh\n  \
        palisade run deploy --wait 10s -- make deploy\n  \
        palisade run downloads --permits 1/4 -- curl -O https://example.org/big\n\n\
        Exit codes: the command's own (128+n for signal n, 126 not executable, 127 not found),\n\
        2 usage, 69 engine unreachable, 70 engine unusable, 75 not acquired, 76 lost while held,\n\
        77 refused, 78 bad URL or configuration."
)]
pub(crate) struct Run {
    /// The name of the lock
    #[arg(value_parser = parse_name)]
    name: String,
    #[command(flatten)]
    lock: LockArgs,
    #[command(flatten)]
    agent: AgentArgs,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Run {
    pub(crate) fn run(self, global: &Global) -> Verdict {
        let mut job = self.lock.job(&self.name, self.command, global)?;
        job.agent = Some(self.agent.agent());
        let notes = job.notes();
        let prepared = job.prepare(Terms::One)?;
        traced(notes, |spans| {
            on_runtime(async {
                let mut connected = prepared.connect(spans).await?;
                let verdict = under_lock(&mut connected).await;
                connected.close().await;
                verdict
            })
        })
    }
}

async fn under_lock(connected: &mut Connected) -> Verdict {
    let acquired = connected.acquire().await?;
    let ended = acquired.run().await?;
    ended.release().await
}
