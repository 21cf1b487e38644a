//! `palisade queue work`: runs a command for each message, several at a time.
//!
//! Each slot has its own guardian, forked while there is no other thread. The guardian ends the
//! slot's command before another consumer can claim the message, even if palisade is stopped or
//! killed. The work of the slots is in `slots`.

use std::ffi::OsString;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use palisade::command::parse_duration;
use palisade::events::{Event, Observer};
use palisade::queue::Retries;
use palisade::{Error, Name, Patience};
use rustix::process::Signal;
use serde_json::json;

use super::refuse_private;
use super::slots::Slots;
use crate::args::{Global, parse_name};
use crate::connect::{Target, Tries};
use crate::exit::{Outcome, Verdict, told};
use crate::guardian::Guardian;
use crate::job::{FAREWELL, check_ttl};
use crate::print::Printer;
use crate::signals::{Endings, endings};
use crate::sys::Withheld;
use crate::traces::traced;
use crate::waiting::Said;
use crate::{enough_files, on_runtime};

/// Files that palisade has open for each command: the link to its guardian, the message, and the
/// command itself; one to spare.
const FILES: usize = 4;

/// Run a command for each message of a queue
///
/// The command gets the message on stdin, and PALISADE_QUEUE, PALISADE_MESSAGE (its id),
/// PALISADE_TOKEN, PALISADE_ATTEMPT and, if it has a key, PALISADE_MESSAGE_KEY in its environment.
/// If it ends with 0 the message is done; otherwise it failed, and is retried after a delay or,
/// after its last attempt, kept as a dead letter. If palisade loses the message, the command is
/// ended before another consumer can claim it.
///
/// After the first SIGTERM, SIGINT, SIGHUP or SIGQUIT no more messages are claimed, and running
/// commands may finish. The second is passed on to the commands, and the messages of those that it
/// ends are given back.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "palisade queue work [OPTIONS] <NAME> -- <CMD>...",
    after_help = "Examples:\n  \
        palisade queue work mail -- ./send-mail.sh\n  \
        palisade queue work thumbnails --parallel 8 --ttl 5m -- ./thumbnail\n  \
        palisade queue work mail --drain -- ./send-mail.sh\n\n\
        Exit codes: 0 after a signal, or with --drain when the queue is empty; 1 with --drain when\n\
        messages are left that are not ready; 126 and 127 when the command can't be started; 128+n\n\
        after a second signal n; 2, 69, 70, 77, 78 as everywhere."
)]
pub(super) struct Work {
    /// The name of the queue
    #[arg(value_parser = parse_name)]
    pub(super) name: String,
    /// The number of commands that may run at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    parallel: u16,
    /// The lease of a message, at least 1s: how long others wait for the message of a consumer
    /// that is cut off [default: the URL's, the config file's, or 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    ttl: Option<Duration>,
    /// The number of attempts before a message becomes a dead letter
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    attempts: u32,
    /// The maximum delay after the first failure; it doubles after each further one
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "1s")]
    backoff: Duration,
    /// The upper bound of the delay
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "5m")]
    backoff_max: Duration,
    /// End when no message is ready, instead of waiting for the next: before a deploy
    #[arg(long)]
    pub(super) drain: bool,
    /// Print nothing about failures and progress
    #[arg(short, long)]
    pub(super) quiet: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(super) command: Vec<OsString>,
}

impl Work {
    pub(super) fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let target = Target::find(global)?;
        refuse_private(&target)?;
        check_ttl(self.ttl, &target)?;
        enough_files(crate::FILES + FILES * usize::from(self.parallel))?;
        let printer = global.printer();
        let outage = Arc::new(Outage {
            queue: name.clone(),
            printer,
            said: Mutex::new((!self.quiet).then(Said::default)),
        });
        let tell = |error: &Error| outage.is_on(error);
        let mut tries = Tries::new(Patience::Forever);
        let withheld = Withheld::these(endings());
        let engine = target.prepare(&mut tries, &withheld, tell)?;
        let count = usize::from(self.parallel);
        let (guardians, orphans) = Guardian::fork_many(count, &self.command, withheld.before())?;
        let notes = (!self.quiet).then_some(printer);
        let work = async |spans| {
            let mut endings = Endings::listen()?;
            drop(withheld);
            let client = tokio::select! {
                biased;
                // Nothing runs yet, and nothing is claimed.
                () = asked_to_end(&mut endings) => return Ok(Outcome::Done),
                client = target.connect(&engine, &mut tries, tell) => client?,
            };
            outage.is_over();
            let client = client.observed_by(Observed(Arc::clone(&outage)));
            let mut queue = client.queue(name.as_str()).retries(Retries {
                attempts: self.attempts,
                min: self.backoff.min(self.backoff_max),
                max: self.backoff_max,
            });
            if let Some(ttl) = self.ttl {
                queue = queue.ttl(ttl);
            }
            let slots = Slots::new(&self, &client, queue, &outage, spans);
            let verdict = slots.work(guardians, &orphans, &mut endings).await;
            drop(slots);
            let _ = tokio::time::timeout(FAREWELL, client.close()).await;
            verdict
        };
        traced(notes, |spans| on_runtime(work(spans)))
    }
}

/// Reports that the engine can't be reached or can't serve, and that palisade retries: each reason
/// once, until it is over.
pub(super) struct Outage {
    queue: Name,
    pub(super) printer: Printer,
    /// `None` if nothing is to be said.
    said: Mutex<Option<Said>>,
}

impl Outage {
    pub(super) fn is_on(&self, error: &Error) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if !said.as_mut().is_some_and(|said| said.is_new(error)) {
            return;
        }
        let message = told(error);
        let event =
            json!({"event": "unreachable", "queue": self.queue.as_str(), "message": message});
        self.printer
            .event(event, || Some(format!("waiting for the engine: {message}")));
    }

    pub(super) fn is_over(&self) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(said) = said.as_mut() {
            *said = Said::default();
        }
    }
}

/// Hears of it while messages are waited for.
struct Observed(Arc<Outage>);

impl Observer for Observed {
    fn see(&self, event: &Event<'_>) {
        match event {
            Event::Stalled { name, why, .. } if **name == self.0.queue => match why {
                Some(why) => self.0.is_on(why),
                None => self.0.is_over(),
            },
            _ => {}
        }
    }
}

/// Waits for a signal that is not for the commands.
async fn asked_to_end(endings: &mut Endings) {
    while for_commands(endings.next().await) {}
}

/// Whether a signal is meant for the commands only.
pub(super) fn for_commands(signal: Signal) -> bool {
    matches!(signal, Signal::USR1 | Signal::USR2)
}
