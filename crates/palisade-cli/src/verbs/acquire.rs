//! `palisade acquire`: takes a lock that a script keeps from one command to the next.
//!
//! A background process, the [`Holder`], holds it until `palisade release`, or until the shell
//! ends. This process forks it, waits until it has the lock, and prints the token.

use std::io;

use crate::args::Global;
use crate::exit::{Failure, Outcome, Verdict, refused};
use crate::holder::{Directory, Held, Holder, Key, OnLoss, Shell, Task};
use crate::lock_args::LockArgs;
use crate::view::shown;

/// Take a lock for the rest of a script, or until `palisade release`
///
/// A background process holds the lock as long as the calling shell (the process that `$$` names)
/// lives. Prints the fencing token. If the commands can be combined into one, `palisade run` is
/// safer: it ends them before a lost lock can be granted to another.
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
    #[command(flatten)]
    lock: LockArgs,
    /// Hold it as long as this process lives [default: the calling shell]
    #[arg(long, value_name = "PID")]
    pid: Option<i32>,
    /// What happens to the shell, and to all that it has started, when the lock is lost
    #[arg(long, value_name = "WHAT", value_enum, default_value = "term")]
    on_loss: OnLoss,
}

impl Acquire {
    pub(crate) fn run(self, global: &Global) -> Verdict {
        let quiet = self.lock.hold.quiet;
        let job = self.lock.job(&self.name, Vec::new(), global)?;
        let shell = Shell::find(self.pid)?;
        let key = Key {
            shell,
            name: &job.name,
            url: job.target.url(),
        };
        let listening = Directory::open()?.listen(&key);
        let Some(listening) = listening.map_err(refused("can't listen for the release"))? else {
            let (name, pid) = (shown(&self.name), shell.pid.as_raw_pid());
            return Err(Failure::Usage(format!(
                "this shell (pid {pid}) has acquired {name} already; `palisade release` it first"
            )));
        };
        let task = Task {
            job,
            shell,
            on_loss: self.on_loss,
        };
        let holder = match Holder::fork(task, listening)? {
            Ok(holder) => holder,
            Err(code) => return Ok(Outcome::Child(code)),
        };
        if global.json || !quiet {
            let token = |held: &Held| format!("{}\n", held.token);
            let said = global.printer().answer(&holder.held, token);
            // Also for a broken pipe: the lock is not kept for a caller that never learns of it.
            said.map_err(|error| Failure::Output(io::Error::other(error)))?;
        }
        holder.detach();
        Ok(Outcome::Done)
    }
}
