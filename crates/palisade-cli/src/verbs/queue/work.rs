//! `palisade queue work`: runs a command for each message, several at a time.
//!
//! Each slot has a guardian of its own, forked while there is no thread, which ends its command
//! before the message can be anyone else's, also when palisade is stopped or killed. A slot claims a
//! message, gives it to the command on stdin, and lets the exit code decide what becomes of it.
//!
//! The first signal drains: no more is claimed, and what runs may end. The second is passed on.

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use futures_util::future::join_all;
use palisade::command::parse_duration;
use palisade::queue::{Failed, Message, Queue, Retries};
use palisade::{Client, Error, ErrorKind, Name, Patience};
use rustix::fs::MemfdFlags;
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::{broadcast, watch};

use super::refuse_private;
use crate::args::Global;
use crate::child::{Child, Start};
use crate::connect::{Target, Tries};
use crate::exit::{Failure, Outcome, Verdict, refused, told};
use crate::guardian::{Guardian, Terms, grace};
use crate::job::FAREWELL;
use crate::on_runtime;
use crate::print::Printer;
use crate::signals::{Endings, Event, endings};
use crate::supervise::{End, Heard, supervise};
use crate::sys::Withheld;
use crate::view::shown;

/// Below this there is no time to end a command between a missed renewal and the end of the lease.
const SHORTEST_TTL: Duration = Duration::from_secs(1);

/// How long a slot waits before it says that the engine does not answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Between two lines about the progress, for a person who looks on.
const PROGRESS: Duration = Duration::from_secs(10);

/// Run a command for each message of a queue
///
/// The command gets the message on stdin, and PALISADE_MESSAGE (its id), PALISADE_TOKEN,
/// PALISADE_ATTEMPT, PALISADE_QUEUE and, if it has one, PALISADE_MESSAGE_KEY in its environment. If
/// it ends with 0 the message is done; otherwise it failed, and is tried again after a while or, after
/// its last try, kept as a dead letter. If palisade loses the message the command is ended before
/// another consumer can have it.
///
/// The first SIGTERM, SIGINT, SIGHUP or SIGQUIT lets what runs end and takes no more; the second is
/// passed on to the commands, whose messages are given back.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "palisade queue work [OPTIONS] <NAME> -- <CMD>...",
    after_help = "Examples:\n  \
        palisade queue work mail -- ./send-mail.sh\n  \
        palisade queue work thumbnails --parallel 8 --ttl 5m -- ./thumbnail\n  \
        palisade queue work mail --drain -- ./send-mail.sh\n\n\
        Exit codes: 0 after a signal, or with --drain when nothing is left; 1 with --drain when\n\
        messages are left that could not be handled; 126 and 127 when the command can't be started;\n\
        128+n after a second signal n; 2, 69, 70, 77, 78 as everywhere."
)]
pub(super) struct Work {
    /// The name of the queue
    name: String,
    /// How many commands run at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    parallel: u16,
    /// How long a message is kept from others without renewal, at least 1s: after so long that of a
    /// machine that is cut off goes to another [default: the URL's, the config file's, or 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    ttl: Option<Duration>,
    /// How often a message is tried before it is a dead letter
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    attempts: u32,
    /// How long it waits after its first failure, at the most; twice as long after each further one
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "1s")]
    backoff: Duration,
    /// How long it waits at the most
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "5m")]
    backoff_max: Duration,
    /// End when no message is ready, instead of waiting for the next: before a deploy
    #[arg(long)]
    drain: bool,
    /// Say nothing about failures and progress
    #[arg(short, long)]
    quiet: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Work {
    pub(super) fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let target = Target::find(global)?;
        refuse_private(&target)?;
        if self.ttl.or(target.ttl()?).is_some_and(|ttl| ttl < SHORTEST_TTL) {
            let why = "the ttl is too short: at least 1s is needed to end a command whose message \
                       is lost";
            return Err(Failure::Usage(why.into()));
        }
        let retries = Retries {
            attempts: self.attempts,
            min: self.backoff.min(self.backoff_max),
            max: self.backoff_max,
        };
        let withheld = Withheld::these(endings());
        let engine = palisade::command::prepare(target.url())?;
        let fork = |_| Guardian::fork(&self.command, withheld.before(), Terms::Many);
        let guardians = (0..self.parallel).map(fork);
        let guardians = guardians.collect::<Result<Vec<_>, Failure>>()?;
        let printer = global.printer();
        on_runtime(async {
            let endings = Endings::listen()?;
            drop(withheld);
            let client = self.connect(&engine, printer).await?;
            let mut queue = client.queue(name.as_str()).retries(retries);
            if let Some(ttl) = self.ttl {
                queue = queue.ttl(ttl);
            }
            let shop = Shop::new(&self, &client, queue, printer);
            let verdict = shop.work(guardians, endings).await;
            drop(shop);
            let _ = tokio::time::timeout(FAREWELL, client.close()).await;
            verdict
        })
    }

    /// Connects, and waits for an engine that can't be reached.
    async fn connect(
        &self,
        engine: &palisade::command::Prepared,
        printer: Printer,
    ) -> Result<Client, Failure> {
        let mut tries = Tries::new(Patience::Forever);
        loop {
            match engine.connect().await {
                Ok(client) => return Ok(client),
                Err(error) => {
                    let pause = tries.pause(error, |error| complain(self, printer, error))?;
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }
}

fn complain(work: &Work, printer: Printer, error: &Error) {
    if work.quiet {
        return;
    }
    let message = told(error);
    let event = json!({"event": "unreachable", "queue": work.name, "message": message});
    printer.event(event, || Some(format!("waiting for the engine: {message}")));
}

/// What all slots share.
struct Shop<'a> {
    work: &'a Work,
    client: &'a Client,
    queue: Queue,
    printer: Printer,
    /// Whether no more is claimed.
    closing: watch::Sender<bool>,
    /// Signals for the commands that run.
    signals: broadcast::Sender<Signal>,
    /// The second signal, after which messages are given back.
    interrupted: Cell<Option<Signal>>,
    /// What ends the work of all.
    failure: RefCell<Option<Failure>>,
    running: Cell<u64>,
    done: Cell<u64>,
    failed: Cell<u64>,
}

/// The signals that concern the command of one slot.
struct SlotSignals(broadcast::Receiver<Signal>);

impl Heard for SlotSignals {
    async fn next(&mut self) -> Event {
        loop {
            match self.0.recv().await {
                Ok(signal) => return Event::Ending(signal),
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
            }
        }
    }
}

impl<'a> Shop<'a> {
    fn new(work: &'a Work, client: &'a Client, queue: Queue, printer: Printer) -> Self {
        Self {
            work,
            client,
            queue,
            printer,
            closing: watch::Sender::new(false),
            signals: broadcast::Sender::new(16),
            interrupted: Cell::new(None),
            failure: RefCell::new(None),
            running: Cell::new(0),
            done: Cell::new(0),
            failed: Cell::new(0),
        }
    }

    async fn work(&self, guardians: Vec<Guardian>, mut endings: Endings) -> Verdict {
        let slots = join_all(guardians.into_iter().map(|guardian| self.slot(guardian)));
        tokio::select! {
            _ = slots => {}
            () = self.listen(&mut endings) => {}
            () = self.show_progress() => {}
        }
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        if let Some(signal) = self.interrupted.get() {
            return Err(Failure::Interrupted(signal.as_raw()));
        }
        if self.work.drain && !*self.closing.borrow() {
            let left = self.queue.report().await?.map_or(0, |report| report.total());
            return Ok(if left == 0 { Outcome::Done } else { Outcome::No });
        }
        Ok(Outcome::Done)
    }

    /// Hears signals; never ends.
    async fn listen(&self, endings: &mut Endings) {
        loop {
            let signal = endings.next().await;
            let own_use = matches!(signal, Signal::USR1 | Signal::USR2);
            if !own_use && !self.closing.send_replace(true) {
                let running = self.running.get();
                let event = json!({"event": "draining", "queue": self.work.name, "running": running});
                self.say(event, || match running {
                    0 => None,
                    running => Some(format!(
                        "no more messages are claimed; {running} commands still run, and a second \
                         signal ends them"
                    )),
                });
                continue;
            }
            if !own_use {
                self.interrupted.set(Some(signal));
            }
            // Nobody runs: nobody hears it.
            let _ = self.signals.send(signal);
        }
    }

    /// Tells a person who looks on; never ends.
    async fn show_progress(&self) {
        let looked_at = std::io::stderr().is_terminal() && !self.printer.json && !self.work.quiet;
        if !looked_at {
            return std::future::pending().await;
        }
        let mut before = (0, 0);
        loop {
            tokio::time::sleep(PROGRESS).await;
            let (done, failed) = (self.done.get(), self.failed.get());
            if (done, failed) == before {
                continue;
            }
            before = (done, failed);
            let ready = match self.queue.report().await {
                Ok(Some(report)) => format!(", {} ready", report.ready),
                _ => String::new(),
            };
            let (name, running) = (shown(&self.work.name), self.running.get());
            self.say(json!({}), || {
                Some(format!("{name}: {done} done, {failed} failed, {running} running{ready}"))
            });
        }
    }

    fn say(&self, event: serde_json::Value, text: impl FnOnce() -> Option<String>) {
        if !self.work.quiet {
            self.printer.event(event, text);
        }
    }

    /// Takes one message after another.
    async fn slot(&self, mut guardian: Guardian) {
        let mut complained = false;
        let mut closing = self.closing.subscribe();
        while guardian.lives() && self.failure.borrow().is_none() {
            let patience = match self.work.drain {
                true => Patience::NoWait,
                false => Patience::For(PATIENCE),
            };
            let claimed = tokio::select! {
                biased;
                _ = closing.wait_for(|closing| *closing) => break,
                claimed = self.queue.next_within(patience) => claimed,
            };
            let message = match claimed {
                Ok(Some(message)) => message,
                Ok(None) if self.work.drain => break,
                Ok(None) => continue,
                Err(error) if error.kind() == ErrorKind::Unreachable => {
                    if !std::mem::replace(&mut complained, true) {
                        complain(self.work, self.printer, &error);
                    }
                    tokio::time::sleep(Duration::from_millis(250)).await;
                    continue;
                }
                Err(error) => {
                    self.fail(error.into());
                    break;
                }
            };
            complained = false;
            self.running.set(self.running.get() + 1);
            let went = self.handle(message, &mut guardian).await;
            self.running.set(self.running.get() - 1);
            if let Err(failure) = went {
                self.fail(failure);
            }
        }
    }

    /// Ends the work of all slots; the first reason is told.
    fn fail(&self, failure: Failure) {
        self.failure.borrow_mut().get_or_insert(failure);
        self.closing.send_replace(true);
    }

    /// Runs the command for one message, and settles it.
    async fn handle(&self, message: Message, guardian: &mut Guardian) -> Result<(), Failure> {
        let id = message.id().to_owned();
        self.json(|| {
            json!({
                "event": "claimed",
                "queue": self.work.name,
                "id": id,
                "key": message.key(),
                "attempt": message.attempt(),
                "token": message.token().to_string(),
            })
        });
        let program = self.work.command.first().map_or_else(OsString::new, Clone::clone);
        // In memory, and gone with the command.
        let body = in_memory(message.body()).map_err(refused("no memory for a message"))?;
        let stdin = format!("/proc/{}/fd/{}", std::process::id(), body.as_raw_fd());
        let mut signals = SlotSignals(self.signals.subscribe());
        let grace = grace(message.ttl());
        let environment = self.environment(&message);
        let deadline = message.deadline();
        let started =
            Child::start(guardian, &program, environment, Some(stdin), deadline, grace).await;
        drop(body);
        let end = match started {
            Ok(Start::Runs(child)) => supervise(child, &message, grace, &mut signals).await,
            Ok(Start::TooLate) => Ok(End::Lost(palisade::LossReason::Expired)),
            Err(failure) => Err(failure),
        };
        match end {
            Ok(End::Ended(0)) => self.settle_done(message).await,
            Ok(End::Ended(code)) => self.settle_failed(message, code).await,
            Ok(End::Interrupted(_)) => {}
            Ok(End::Lost(reason)) => {
                let event = json!({
                    "event": "lost", "queue": self.work.name, "id": id, "reason": reason.code(),
                });
                self.say(event, || {
                    Some(format!("lost message {}: the command was ended", shown(&id)))
                });
            }
            Err(failure) => {
                // Nobody has tried it.
                let _ = tokio::time::timeout(FAREWELL, message.release()).await;
                return Err(failure);
            }
        }
        Ok(())
    }

    async fn settle_done(&self, message: Message) {
        let id = message.id().to_owned();
        match message.done().await {
            Ok(()) => {
                self.done.set(self.done.get() + 1);
                self.json(|| json!({"event": "done", "queue": self.work.name, "id": id}));
            }
            Err(error) => self.not_settled(&id, &error),
        }
    }

    async fn settle_failed(&self, message: Message, code: u8) {
        let id = message.id().to_owned();
        if self.interrupted.get().is_some() {
            // It was our signal that ended the command.
            if let Err(error) = message.release().await {
                self.not_settled(&id, &error);
            }
            return;
        }
        let why = match code {
            129.. => format!("ended by signal {}", code - 128),
            code => format!("exit code {code}"),
        };
        self.failed.set(self.failed.get() + 1);
        match message.fail(why.as_str()).await {
            Ok(failed) => {
                let again = match failed {
                    Failed::Again { after } => Some(after.as_millis() as u64),
                    Failed::Dead => None,
                };
                let event = json!({
                    "event": "failed", "queue": self.work.name, "id": id, "code": code,
                    "again_in_ms": again, "dead": again.is_none(),
                });
                let then = match failed {
                    Failed::Again { after } => format!("tried again in {after:.1?}"),
                    Failed::Dead => "now a dead letter".to_owned(),
                };
                self.say(event, || {
                    Some(format!("message {} failed ({why}), {then}", shown(&id)))
                });
            }
            Err(error) => self.not_settled(&id, &error),
        }
    }

    fn not_settled(&self, id: &str, error: &Error) {
        let message = told(error);
        let event = json!({
            "event": "not_settled", "queue": self.work.name, "id": id, "message": message,
        });
        self.say(event, || {
            Some(format!("message {} may come again: {message}", shown(id)))
        });
    }

    /// Reports an event to a program that reads the JSON.
    fn json(&self, event: impl FnOnce() -> serde_json::Value) {
        if self.printer.json {
            self.say(event(), || None);
        }
    }

    fn environment(&self, message: &Message) -> Vec<(String, String)> {
        let mut environment: Vec<(String, String)> = [
            ("PALISADE_QUEUE", self.work.name.clone()),
            ("PALISADE_MESSAGE", message.id().to_owned()),
            ("PALISADE_ATTEMPT", message.attempt().to_string()),
            ("PALISADE_TOKEN", message.token().to_string()),
            ("PALISADE_OWNER", self.client.owner().to_owned()),
            ("PALISADE_ENGINE", self.client.describe()),
            // Of another message, if this one has none.
            ("PALISADE_MESSAGE_KEY", message.key().unwrap_or_default().to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        environment.retain(|(name, value)| name != "PALISADE_MESSAGE_KEY" || !value.is_empty());
        environment
    }
}

/// A file in memory.
fn in_memory(body: &[u8]) -> std::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("palisade message", MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(file);
    file.write_all(body)?;
    Ok(file.into())
}
