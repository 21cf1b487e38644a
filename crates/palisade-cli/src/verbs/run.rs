//! `palisade run`: runs a command while holding a lock.
//!
//! acquire, or leave the line → run the command → keep the lock as long as `--at-least` says →
//! release → the command's code. Whatever goes wrong on the way, the lock is released before
//! palisade returns. The steps are those of [`Job`].

use std::ffi::OsString;
use std::time::Duration;

use palisade::{Ask, Client, Hold, LossReason, Name, Patience, parse_duration};
use rustix::process::Signal;
use tokio::time::Instant;

use super::permits::parse_permits;
use crate::args::Global;
use crate::child::unguarded;
use crate::config::parse_wait;
use crate::connect::Place;
use crate::exit::{Failure, Outcome, Verdict};
use crate::guardian::{Guardian, Terms};
use crate::job::{FAREWELL, Job, Ready};
use crate::signals::{Endings, Event, Signals};
use crate::supervise::End;
use crate::terminal;
use crate::view::shown;

/// Run a command while holding a lock
///
/// Waits for the lock, runs the command, releases the lock, and ends with the command's exit
/// code. If the lock is lost the command is ended before anyone else can get it.
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
    name: String,
    /// How long the lock outlives a palisade that is cut off, at least 1s [default: the URL's, the
    /// config file's, or 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    ttl: Option<Duration>,
    /// Refuse an engine, or settings of it, under which two could hold the lock or a token could go
    /// back: exit code 77 [default: the config file's, or no]
    #[arg(long)]
    for_correctness: bool,
    /// Wait at most this long for the lock, or `forever` [default: the config file's, or forever]
    #[arg(long, value_name = "DURATION", value_parser = parse_wait)]
    wait: Option<Patience>,
    /// Don't wait for the lock
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    /// Share the lock with others that share it: a read lock
    #[arg(long)]
    shared: bool,
    /// Take K of N permits: a semaphore
    #[arg(long, value_name = "K/N", value_parser = parse_permits, conflicts_with = "shared")]
    permits: Option<Ask>,
    /// Keep the lock, and don't return, before this much time has passed
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    at_least: Option<Duration>,
    /// The exit code when the lock was not acquired, instead of 75
    #[arg(short = 'E', long, value_name = "N")]
    conflict_exit_code: Option<u8>,
    /// Say nothing about waiting, nor about a lock that was not acquired
    #[arg(short, long)]
    quiet: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Run {
    pub(crate) fn run(self, global: &Global) -> Verdict {
        let job = Job {
            name: Name::new(&self.name)?,
            ask: self.ask(),
            value: None,
            ttl: self.ttl,
            command: self.command,
            conflict_code: self.conflict_exit_code,
            quiet: self.quiet,
            printer: global.printer(),
        };
        let place = Place::find(global)?.demand(self.for_correctness);
        let patience = match self.no_wait {
            true => Patience::NoWait,
            false => self.wait.or(place.wait()).unwrap_or(Patience::Forever),
        };
        let at_least = self.at_least.unwrap_or_default();
        job.start(&place, patience, Terms::One, async |client, ready| {
            let Ready {
                guardian,
                patience: left,
                mut endings,
            } = ready;
            let acquired = tokio::select! {
                biased;
                // Dropping the acquire leaves the line.
                signal = endings.next() => return Ok(Outcome::Interrupted(signal.as_raw())),
                acquired = job.acquire(client, left) => acquired?,
            };
            match acquired {
                Some(hold) => under_lock(&job, client, hold, guardian, endings, at_least).await,
                None => Err(too_late(&job, patience)),
            }
        })
    }

    fn ask(&self) -> Ask {
        match self.permits {
            Some(permits) => permits,
            None if self.shared => Ask::READ,
            None => Ask::Whole,
        }
    }
}

/// The failure when patience ended before the lock was free.
pub(crate) fn too_late(job: &Job, patience: Patience) -> Failure {
    let name = shown(job.name.as_str());
    let message = match patience {
        Patience::For(wait) => {
            let wait = humantime::format_duration(wait);
            format!("{name} was not free within {wait}")
        }
        _ => format!("{name} is held by someone else"),
    };
    Failure::NotAcquired {
        message,
        code: job.conflict_code,
        quiet: job.quiet,
    }
}

/// Runs the command under the lock, and releases it.
async fn under_lock(
    job: &Job,
    client: &Client,
    hold: Hold,
    guardian: Option<Guardian>,
    endings: Endings,
    at_least: Duration,
) -> Verdict {
    let until = Instant::now() + at_least;
    let run = async {
        let mut signals = Signals::listen(endings)?;
        let mut guardian = guardian.ok_or_else(unguarded)?;
        let end = job
            .command(client, &hold, &mut guardian, &mut signals)
            .await?;
        drop(guardian);
        Ok(match end {
            End::Ended(code) => keep_until(until, code, &hold, &mut signals).await,
            other => other,
        })
    };
    match run.await {
        Ok(End::Ended(code)) => job.release(hold, code).await,
        Ok(End::Lost(reason)) => {
            let why = job.why(client, &hold, reason).await;
            Err(Failure::Lost(job.lost(hold, reason, why)))
        }
        ended => {
            let _ = tokio::time::timeout(FAREWELL, hold.release()).await;
            Err(ended.err().unwrap_or_else(unguarded))
        }
    }
}

/// Keeps the lock until then. A signal cuts it short.
async fn keep_until(until: Instant, code: u8, hold: &Hold, signals: &mut Signals) -> End {
    while Instant::now() < until {
        tokio::select! {
            biased;
            loss = hold.lost() => return End::Lost(loss.reason),
            () = tokio::time::sleep_until(until) => {}
            event = signals.next() => match event {
                // Was meant for a command that is there no more.
                Event::Ending(Signal::USR1 | Signal::USR2) => {}
                Event::Ending(_) => break,
                Event::Stop => terminal::stop(terminal::Stop::Us),
                Event::Resumed | Event::Resized => {}
            }
        }
    }
    match hold.is_valid() {
        true => End::Ended(code),
        false => End::Lost(LossReason::Expired),
    }
}
