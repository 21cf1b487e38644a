//! `palisade elect`: leads, and runs a command while it leads, if there is one.
//!
//! After a loss it campaigns again; when the command ends or a signal comes, `elect` ends. One
//! guardian serves every term. The steps are those of a [`Job`](crate::job::Job).

use std::ffi::OsString;

use serde_json::json;

use crate::args::{Global, parse_name};
use crate::exit::{Failure, Verdict};
use crate::guardian::Terms;
use crate::job::Connected;
use crate::lock_args::HoldArgs;
use crate::on_runtime;
use crate::traces::traced;

/// Lead an election: one leader at a time for a name
///
/// Waits to lead, then runs the command, and ends with its exit code. If the leadership is lost
/// the command is ended before anyone else can lead, and palisade campaigns again. Without a
/// command it leads until a signal ends it.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "palisade elect [OPTIONS] <NAME> [-- <CMD>...]",
    after_help = "Examples:\n  \
        palisade elect scheduler --value 10.0.0.7:8080 -- ./scheduler\n  \
        palisade elect scheduler --once -- ./scheduler\n  \
        palisade leader scheduler\n\n\
        Exit codes: the command's own, 76 when the leadership was lost and --once is given, 128+n\n\
        when signal n came while there was no command, and those of run."
)]
pub(crate) struct Elect {
    /// The name of the election
    #[arg(value_parser = parse_name)]
    name: String,
    /// A value for others to read, such as the leader's address; `palisade leader` shows it
    #[arg(long, value_name = "V")]
    value: Option<String>,
    /// Lead at most once: a lost leadership is exit code 76
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    hold: HoldArgs,
    /// The command and its arguments
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Elect {
    pub(crate) fn run(self, global: &Global) -> Verdict {
        let mut job = self.hold.job(&self.name, self.command, global)?;
        job.value = self.value;
        let notes = job.notes();
        let prepared = job.prepare(Terms::Many)?;
        traced(notes, |spans| {
            on_runtime(async {
                let mut connected = prepared.connect(spans).await?;
                let verdict = campaign(&mut connected, self.once).await;
                connected.close().await;
                verdict
            })
        })
    }
}

async fn campaign(connected: &mut Connected, once: bool) -> Verdict {
    loop {
        let acquired = connected.acquire().await?;
        let ended = acquired.run().await?;
        let lost = match ended.release().await {
            Err(Failure::Lost(lost)) if !once && connected.can_run_again() => lost,
            verdict => return verdict,
        };
        // With JSON the event has already said so.
        let job = &connected.job;
        if !job.printer.json && !job.quiet {
            let text = format!("{lost}; campaigning again");
            job.printer.event(json!(null), || Some(text));
        }
    }
}
