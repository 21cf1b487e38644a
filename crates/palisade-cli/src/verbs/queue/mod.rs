//! `palisade queue`: work queues. One file each for pushing, working, listing, and the verbs for
//! operators.

mod operate;
mod push;
mod show;
mod slots;
mod work;

use palisade::queue::Queue as Handle;
use palisade::{Client, Error, ErrorKind, Name};

use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Verdict};
use crate::on_runtime;

/// Push messages, and run a command for each: work for many consumers
///
/// Each message is with one consumer at a time, and none is lost when a consumer dies: delivery is
/// at least once. Messages of one key are handled strictly one after another.
#[derive(Debug, clap::Args)]
#[command(
    arg_required_else_help = true,
    subcommand_required = true,
    after_help = "Examples:\n  \
        echo ann@example.org | palisade queue push mail\n  \
        palisade queue work mail --parallel 4 -- ./send-mail.sh\n  \
        palisade queue ls\n  \
        palisade queue retry mail --dead"
)]
pub(crate) struct Queue {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Push(push::Push),
    Work(work::Work),
    Ls(show::Ls),
    Show(show::Show),
    Retry(operate::Retry),
    Drop(operate::Drop),
}

impl Queue {
    pub(crate) fn run(self, global: &Global) -> Verdict {
        match self.what {
            What::Push(push) => on_runtime(push.run(global)),
            // It forks before there is a runtime.
            What::Work(work) => work.run(global),
            What::Ls(ls) => on_runtime(ls.run(global)),
            What::Show(show) => on_runtime(show.run(global)),
            What::Retry(retry) => on_runtime(retry.run(global)),
            What::Drop(drop) => on_runtime(drop.run(global)),
        }
    }
}

/// Refuses an engine whose queues exist in one process only.
fn refuse_private(target: &Target) -> Result<(), Failure> {
    if !target.is_private()? {
        return Ok(());
    }
    let why = "memory: keeps everything inside one process, so that no consumer would find a \
               message; use file: for the processes of this machine, or a server";
    Err(Error::new(ErrorKind::Unsupported, "connect", why).into())
}

/// The queue `name` and its client, for reading; `None` if the embedded store does not exist.
async fn existing(global: &Global, name: &str) -> Result<Option<(Client, Handle)>, Failure> {
    Name::new(name)?;
    let target = Target::find(global)?;
    refuse_private(&target)?;
    let client = target.connect_existing().await?;
    Ok(client.map(|client| {
        let queue = client.queue(name);
        (client, queue)
    }))
}
