//! `palisade elect`: leads, and runs a command, or nothing, while it does.
//!
//! campaign → run the command, or wait for a signal → resign. Only a loss campaigns again; the end
//! of the command, or a signal, ends all of it. One guardian serves every term. The steps are
//! those of [`Job`].

use std::ffi::OsString;
use std::time::Duration;

use palisade::{Ask, Client, Hold, Kind, LossReason, Name, Patience, parse_duration};
use rustix::process::Signal;
use serde_json::json;

use crate::args::Global;
use crate::child::unguarded;
use crate::connect::Place;
use crate::exit::{Failure, Outcome, Verdict};
use crate::guardian::{Guardian, Terms};
use crate::job::{FAREWELL, Job, Ready};
use crate::print;
use crate::signals::Signals;
use crate::supervise::End;
use crate::view::shown;

/// Lead: one at a time among all who elect the same name
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
    name: String,
    /// What the leader stands for, as its address; `palisade leader` shows it
    #[arg(long, value_name = "V")]
    value: Option<String>,
    /// Lead at most once: a lost leadership is exit code 76
    #[arg(long)]
    once: bool,
    /// How long the leadership outlives a palisade that is cut off, at least 1s [default: the
    /// URL's, the config file's, or 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    ttl: Option<Duration>,
    /// Refuse an engine, or settings of it, under which two could hold the lock or a token could go
    /// back: exit code 77 [default: the config file's, or no]
    #[arg(long)]
    for_correctness: bool,
    /// Say nothing about waiting
    #[arg(short, long)]
    quiet: bool,
    /// The command and its arguments
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// How a term ended.
enum Term {
    /// The command ended with this code.
    Ended(u8),
    /// A signal ended it, and there was no command to pass it on to.
    Interrupted(Signal),
    /// It was lost.
    Lost(LossReason),
}

impl Elect {
    pub(crate) fn run(self, global: &Global) -> Verdict {
        let job = Job {
            name: Name::new(&self.name)?,
            ask: Ask::Whole,
            value: self.value,
            ttl: self.ttl,
            command: self.command,
            conflict_code: None,
            quiet: self.quiet,
            printer: global.printer(),
        };
        let place = Place::find(global)?.demand(self.for_correctness);
        job.start(
            &place,
            Patience::Forever,
            Terms::Many,
            async |client, ready| {
                let Ready {
                    mut guardian,
                    endings,
                    ..
                } = ready;
                let mut signals = Signals::listen(endings)?;
                loop {
                    let acquired = tokio::select! {
                        biased;
                        // Dropping the acquire leaves the line.
                        signal = signals.ending() => {
                            return Ok(Outcome::Interrupted(signal.as_raw()));
                        }
                        acquired = job.acquire(client, Patience::Forever) => acquired?,
                    };
                    let Some(hold) = acquired else { continue };
                    let lost = match term(&job, client, &hold, &mut guardian, &mut signals).await {
                        Ok(Term::Ended(code)) => return job.release(hold, code).await,
                        Ok(Term::Interrupted(signal)) => return resign(&job, hold, signal).await,
                        Ok(Term::Lost(reason)) => {
                            let why = job.why(client, &hold, reason).await;
                            job.lost(hold, reason, why)
                        }
                        Err(failure) => {
                            let _ = tokio::time::timeout(FAREWELL, hold.release()).await;
                            return Err(failure);
                        }
                    };
                    // One that did not answer was replaced, and can't start a command again.
                    if self.once || guardian.as_ref().is_some_and(|guardian| !guardian.lives()) {
                        return Err(Failure::Lost(lost));
                    }
                    // With JSON the event has told it.
                    if !job.printer.json && !job.quiet {
                        job.printer
                            .event(json!(null), || Some(format!("{lost}; campaigning again")));
                    }
                }
            },
        )
    }
}

/// Leads once.
async fn term(
    job: &Job,
    client: &Client,
    hold: &Hold,
    guardian: &mut Option<Guardian>,
    signals: &mut Signals,
) -> Result<Term, Failure> {
    if let Some(guardian) = guardian {
        return match job.command(client, hold, guardian, signals).await? {
            End::Ended(code) => Ok(Term::Ended(code)),
            End::Lost(reason) => Ok(Term::Lost(reason)),
            End::Unguarded => Err(unguarded()),
        };
    }
    if !job.printer.json {
        let (name, token) = (shown(job.name.as_str()), hold.token());
        print::text(&format!("leading {name} (token {token})\n"))?;
    }
    tokio::select! {
        biased;
        loss = hold.lost() => Ok(Term::Lost(loss.reason)),
        signal = signals.ending() => Ok(Term::Interrupted(signal)),
    }
}

/// Gives the leadership up because of a signal.
async fn resign(job: &Job, hold: Hold, signal: Signal) -> Verdict {
    let outcome = Outcome::Interrupted(signal.as_raw());
    match hold.release().await {
        Ok(()) => {}
        Err(error) if error.kind() == Kind::Lost => return Err(error.into()),
        Err(error) => job.say_not_released(&error),
    }
    let code = crate::exit::of_signal(signal.as_raw());
    job.event(|| json!({"event": "released", "name": job.name.as_str(), "code": code}));
    Ok(outcome)
}
