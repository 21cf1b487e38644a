//! The options of the verbs that take a lock, and the job that they describe.

use std::ffi::OsString;
use std::time::Duration;

use palisade::command::{DEADLOCK_AFTER, parse_duration};
use palisade::engine::Ask;
use palisade::{Name, Patience};

use crate::args::Global;
use crate::config::parse_wait;
use crate::connect::Target;
use crate::exit::Failure;
use crate::job::{Agent, Job};

/// Options of `run`, `acquire` and `elect`.
#[derive(Debug, clap::Args)]
pub(crate) struct HoldArgs {
    /// How long the lock outlives a holder that is cut off, at least 1s [default: the URL's, the
    /// config file's, or 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    ttl: Option<Duration>,
    /// Refuse, with exit code 77, an engine or a setting of it with which two clients could hold
    /// the lock or a token could go back [default: the config file's, or no]
    #[arg(long)]
    for_correctness: bool,
    /// Print nothing about waiting or a lock that was not acquired; `acquire` prints no token
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// Options of `run` and `acquire`.
#[derive(Debug, clap::Args)]
pub(crate) struct LockArgs {
    /// Wait at most this long for the lock, or `forever` [default: the config file's, or forever]
    #[arg(long, value_name = "DURATION", value_parser = parse_wait)]
    wait: Option<Patience>,
    /// Don't wait for the lock
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    /// Share the lock with other --shared holders: a read lock
    #[arg(long)]
    shared: bool,
    /// Take K of N permits: a semaphore
    #[arg(long, value_name = "K/N", value_parser = parse_permits, conflicts_with = "shared")]
    permits: Option<Ask>,
    /// Keep the lock for at least this long; `run` and `release` return only then
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    at_least: Option<Duration>,
    /// The exit code when the lock was not acquired, instead of 75
    #[arg(short = 'E', long, value_name = "N")]
    conflict_exit_code: Option<u8>,
    #[command(flatten)]
    pub(crate) hold: HoldArgs,
}

impl HoldArgs {
    /// A job that takes the exclusive lock and waits for it without a limit.
    pub(crate) fn job(
        self,
        name: &str,
        command: Vec<OsString>,
        global: &Global,
    ) -> Result<Job, Failure> {
        Ok(Job {
            name: Name::new(name)?,
            target: Target::find(global)?.demand(self.for_correctness),
            ask: Ask::Whole,
            value: None,
            ttl: self.ttl,
            patience: Patience::Forever,
            at_least: Duration::ZERO,
            command,
            agent: None,
            conflict_code: None,
            quiet: self.quiet,
            printer: global.printer(),
        })
    }
}

impl LockArgs {
    pub(crate) fn job(
        self,
        name: &str,
        command: Vec<OsString>,
        global: &Global,
    ) -> Result<Job, Failure> {
        let mut job = self.hold.job(name, command, global)?;
        job.ask = match self.permits {
            Some(permits) => permits,
            None if self.shared => Ask::READ,
            None => Ask::Whole,
        };
        job.patience = if self.no_wait {
            Patience::NoWait
        } else {
            self.wait.or(job.target.wait()).unwrap_or(Patience::Forever)
        };
        job.at_least = self.at_least.unwrap_or_default();
        job.conflict_code = self.conflict_exit_code;
        Ok(job)
    }
}

/// Options of `run`, which is an agent.
#[derive(Debug, clap::Args)]
pub(crate) struct AgentArgs {
    /// Inside another palisade: look for a deadlock after waiting this long, or `off` for never
    /// [default: 2s]
    #[arg(long, value_name = "DURATION", value_parser = parse_deadlock_after)]
    deadlock_after: Option<DeadlockAfter>,
    /// Inside another palisade: give way in a likely deadlock, with exit code 75. It is a cycle
    /// through the outer palisade, which may or may not wait for this one
    #[arg(long)]
    nested: bool,
}

#[derive(Debug, Clone, Copy)]
struct DeadlockAfter(Option<Duration>);

impl AgentArgs {
    pub(crate) fn agent(self) -> Agent {
        let default = DeadlockAfter(Some(DEADLOCK_AFTER));
        Agent {
            deadlock_after: self.deadlock_after.unwrap_or(default).0,
            nested: self.nested,
        }
    }
}

fn parse_deadlock_after(text: &str) -> Result<DeadlockAfter, String> {
    match text {
        "off" => Ok(DeadlockAfter(None)),
        text => parse_duration(text).map(|after| DeadlockAfter(Some(after))),
    }
}

/// Reads `K/N`.
fn parse_permits(text: &str) -> Result<Ask, String> {
    let wrong = || "write it like 1/4: K permits out of N, 1 <= K <= N < 4294967295".to_owned();
    let (weight, capacity) = text.split_once('/').ok_or_else(wrong)?;
    let number = |digits: &str| {
        if digits.bytes().all(|b| b.is_ascii_digit()) {
            digits.parse::<u32>().map_err(|_| wrong())
        } else {
            Err(wrong())
        }
    };
    let (weight, capacity) = (number(weight)?, number(capacity)?);
    if weight == 0 || weight > capacity || capacity == u32::MAX {
        return Err(wrong());
    }
    Ok(Ask::Part { weight, capacity })
}
