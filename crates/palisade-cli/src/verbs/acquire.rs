//! `palisade acquire`: takes a lock for a script, which keeps it from one command to the next.
//!
//! A process in the background, the [`Holder`], holds it until `palisade release`, or until the
//! shell ends. This process forks it, waits until it has the lock, and says so.

use std::io;
use std::time::Duration;

use palisade::{Ask, Name, Patience, parse_duration};

use super::permits::parse_permits;
use crate::args::Global;
use crate::config::parse_wait;
use crate::connect::Place;
use crate::exit::{Failure, Outcome, Verdict};
use crate::holder::{Directory, Held, Holder, Key, OnLoss, Shell, Task};
use crate::job::Job;
use crate::view::shown;

/// Take a lock for the rest of a script, or until `palisade release`
///
/// A process in the background holds the lock as long as the calling shell lives, the one that
/// `$$` names. Prints the fencing token. Where the commands can be put into one, `palisade run` is
/// safer: it ends them before a lost lock can be anyone else's.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
        palisade acquire -q nightly --wait 10s || exit\n  \
        token=$(palisade acquire nightly) || exit\n  \
        palisade acquire -q downloads --permits 1/4 || exit\n\n\
        Exit codes: 2 usage, and a lock that this shell has acquired already, 69 engine\n\
        unreachable, 70 engine unusable, 74 the token can't be printed, 75 not acquired,\n\
        77 refused, 78 bad URL or configuration.")]
pub(crate) struct Acquire {
    /// The name of the lock
    name: String,
    /// How long the lock outlives a holder that is cut off, at least 1s [default: the URL's, the
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
    /// Keep the lock before this much time has passed; `release` waits for it
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    at_least: Option<Duration>,
    /// The exit code when the lock was not acquired, instead of 75
    #[arg(short = 'E', long, value_name = "N")]
    conflict_exit_code: Option<u8>,
    /// Say nothing: neither the token, nor about waiting, nor about a lock that was not acquired
    #[arg(short, long)]
    quiet: bool,
    /// Hold it as long as this process lives [default: the calling shell]
    #[arg(long, value_name = "PID")]
    pid: Option<i32>,
    /// What the shell, and all that it has started, gets when the lock is lost
    #[arg(long, value_name = "WHAT", value_enum, default_value = "term")]
    on_loss: OnLoss,
}

impl Acquire {
    pub(crate) fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let place = Place::find(global)?.demand(self.for_correctness);
        let shell = Shell::find(self.pid)?;
        let key = Key {
            shell,
            name: &name,
            url: place.url(),
        };
        let failed = |error| Failure::Start(format!("can't listen to its release: {error}"));
        let Some(listening) = Directory::open()?.listen(&key).map_err(failed)? else {
            let (name, pid) = (shown(&self.name), shell.pid.as_raw_pid());
            return Err(Failure::Usage(format!(
                "this shell (pid {pid}) has acquired {name} already; `palisade release` it first"
            )));
        };
        let task = Task {
            patience: match self.no_wait {
                true => Patience::NoWait,
                false => self.wait.or(place.wait()).unwrap_or(Patience::Forever),
            },
            at_least: self.at_least.unwrap_or_default(),
            shell,
            on_loss: self.on_loss,
            place,
            job: Job {
                name,
                ask: match self.permits {
                    Some(permits) => permits,
                    None if self.shared => Ask::READ,
                    None => Ask::Whole,
                },
                value: None,
                ttl: self.ttl,
                command: Vec::new(),
                conflict_code: self.conflict_exit_code,
                quiet: self.quiet,
                printer: global.printer(),
            },
        };
        let holder = match Holder::fork(task, listening)? {
            Ok(holder) => holder,
            Err(code) => return Ok(Outcome::Child(code)),
        };
        if global.json || !self.quiet {
            let token = |held: &Held| format!("{}\n", held.token);
            let said = global.printer().answer(&holder.held, token);
            // Also a broken pipe: the lock is not kept for a caller that does not hear of it.
            said.map_err(|error| Failure::Output(io::Error::other(error)))?;
        }
        holder.detach();
        Ok(Outcome::Done)
    }
}
