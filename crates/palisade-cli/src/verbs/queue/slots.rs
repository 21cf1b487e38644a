//! The slots of `palisade queue work`: each claims a message, passes it to its command on stdin,
//! and settles it by the exit code.
//!
//! After the first signal no more messages are claimed, and running commands may finish. The second
//! is passed on. Invariant: a message is settled only by the exit code of a command that held it
//! until its end.

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use futures_util::future::join_all;
use palisade::queue::{Failed, Message, Queue};
use palisade::{Client, Error, ErrorKind, LossReason, Patience};
use rustix::fs::MemfdFlags;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::{broadcast, watch};

use super::work::{Outage, Work, for_commands};
use crate::child::{Child, Start};
use crate::exit::{Failure, Outcome, Verdict, refused, told};
use crate::guardian::{Guardian, Orphans, grace};
use crate::job::FAREWELL;
use crate::print::Printer;
use crate::signals::{Endings, Event};
use crate::spans::{Open, Spans};
use crate::supervise::{End, Heard, supervise};
use crate::view::shown;

/// How long a slot waits before it reports that the engine does not answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pause before a retry when the engine did not answer.
const PAUSE: Duration = Duration::from_millis(250);

/// While draining: the interval for checking whether another slot has made a message ready.
const LOOK: Duration = Duration::from_secs(1);

/// The interval of the progress lines on a terminal.
const PROGRESS: Duration = Duration::from_secs(5);

/// What all slots share.
pub(super) struct Slots<'a> {
    work: &'a Work,
    client: &'a Client,
    queue: Queue,
    printer: Printer,
    outage: &'a Outage,
    spans: Spans,
    /// Whether no more is claimed.
    closing: watch::Sender<bool>,
    /// How many commands run.
    running: Cell<u64>,
    /// How many slots have a message, or try to claim a last one.
    busy: Cell<u64>,
    /// Signals for the commands that run.
    signals: broadcast::Sender<Signal>,
    /// The second signal, after which messages are given back.
    interrupted: Cell<Option<Signal>>,
    /// The failure that ends the work of all slots.
    failure: RefCell<Option<Failure>>,
    /// Messages whose guardian was killed: processes that their commands started may still run.
    unguarded: RefCell<Vec<Message>>,
    done: Cell<u64>,
    failed: Cell<u64>,
}

/// Counts while it lives.
struct Busy<'a>(&'a Cell<u64>);

impl<'a> Busy<'a> {
    fn new(count: &'a Cell<u64>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
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

impl<'a> Slots<'a> {
    pub(super) fn new(
        work: &'a Work,
        client: &'a Client,
        queue: Queue,
        outage: &'a Outage,
        spans: Spans,
    ) -> Self {
        Self {
            work,
            client,
            queue,
            printer: outage.printer,
            outage,
            spans,
            closing: watch::Sender::new(false),
            running: Cell::new(0),
            busy: Cell::new(0),
            signals: broadcast::Sender::new(16),
            interrupted: Cell::new(None),
            failure: RefCell::new(None),
            unguarded: RefCell::new(Vec::new()),
            done: Cell::new(0),
            failed: Cell::new(0),
        }
    }

    /// Works until a signal, a failure or the end of draining.
    pub(super) async fn work(
        &self,
        guardians: Vec<Guardian>,
        orphans: &Orphans,
        endings: &mut Endings,
    ) -> Verdict {
        let slots = join_all(guardians.into_iter().map(|guardian| self.slot(guardian)));
        tokio::select! {
            _ = slots => {}
            () = self.listen(endings) => {}
            () = self.show_progress() => {}
        }
        if !self.unguarded.borrow().is_empty() {
            orphans.end();
            self.unguarded.borrow_mut().clear();
        }
        if self.is_looked_at() {
            self.tell_progress("");
        }
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        if let Some(signal) = self.interrupted.get() {
            return Err(Failure::Interrupted(signal.as_raw()));
        }
        if self.work.drain && !*self.closing.borrow() {
            return self.drained().await;
        }
        Ok(Outcome::Done)
    }

    /// Reports the messages that are left when none is ready.
    async fn drained(&self) -> Verdict {
        let Some(left) = self.queue.report().await?.filter(|left| left.total() > 0) else {
            return Ok(Outcome::Done);
        };
        let event = json!({
            "event": "left", "queue": self.work.name, "ready": left.ready, "delayed": left.delayed,
            "claimed": left.claimed, "blocked": left.blocked, "dead": left.dead,
        });
        self.say(event, || {
            let counts = [
                (left.ready, "ready"),
                (left.delayed, "delayed"),
                (left.claimed, "claimed"),
                (left.blocked, "blocked"),
                (left.dead, "dead"),
            ];
            let counts = counts.into_iter().filter(|(count, _)| *count > 0);
            let counts: Vec<_> = counts
                .map(|(count, state)| format!("{count} {state}"))
                .collect();
            let name = shown(&self.work.name);
            Some(format!(
                "messages are left in {name}: {}",
                counts.join(", ")
            ))
        });
        Ok(Outcome::No)
    }

    /// Handles signals; never returns.
    async fn listen(&self, endings: &mut Endings) {
        loop {
            let signal = endings.next().await;
            if !for_commands(signal) && !self.closing.send_replace(true) {
                let running = self.running.get();
                let event =
                    json!({"event": "draining", "queue": self.work.name, "running": running});
                self.say(event, || {
                    let commands = match running {
                        0 => return None,
                        1 => "1 command still runs".to_owned(),
                        running => format!("{running} commands still run"),
                    };
                    Some(format!(
                        "no more messages are claimed; {commands}, and a second signal is passed on"
                    ))
                });
                continue;
            }
            if !for_commands(signal) {
                self.interrupted.set(Some(signal));
            }
            // Without receivers no command runs.
            let _ = self.signals.send(signal);
        }
    }

    fn is_looked_at(&self) -> bool {
        std::io::stderr().is_terminal() && !self.printer.json
    }

    /// Prints progress on a terminal; never returns.
    async fn show_progress(&self) {
        if !self.is_looked_at() {
            return std::future::pending().await;
        }
        let mut before = (0, 0);
        loop {
            tokio::time::sleep(PROGRESS).await;
            let now = (self.done.get(), self.failed.get());
            if now != std::mem::replace(&mut before, now) {
                let ready = match self.queue.report().await {
                    Ok(Some(report)) => format!(", {} ready", report.ready),
                    _ => String::new(),
                };
                self.tell_progress(&ready);
            }
        }
    }

    fn tell_progress(&self, ready: &str) {
        let (done, failed, running) = (self.done.get(), self.failed.get(), self.running.get());
        let name = shown(&self.work.name);
        let text = format!("{name}: {done} done, {failed} failed, {running} running{ready}");
        self.say(Value::Null, || Some(text));
    }

    fn say(&self, event: Value, text: impl FnOnce() -> Option<String>) {
        if !self.work.quiet {
            self.printer.event(event, text);
        }
    }

    /// Takes one message after another.
    async fn slot(&self, mut guardian: Guardian) {
        let mut closing = self.closing.subscribe();
        while guardian.lives() {
            // A busy slot may push more messages or unblock a key, so a draining slot looks again
            // while another is busy. A claim in flight is never dropped for that: its message would
            // belong to nobody for a moment, and the queue would seem empty.
            let last_look = self.work.drain && self.busy.get() == 0;
            let patience = match (last_look, self.work.drain) {
                (true, _) => Patience::NoWait,
                (false, true) => Patience::For(LOOK),
                (false, false) => Patience::For(PATIENCE),
            };
            let busy = last_look.then(|| Busy::new(&self.busy));
            let claimed = tokio::select! {
                biased;
                _ = closing.wait_for(|closing| *closing) => return,
                claimed = self.queue.next_within(patience) => claimed,
            };
            match claimed {
                Ok(Some(message)) => {
                    let _busy = busy.unwrap_or_else(|| Busy::new(&self.busy));
                    let _running = Busy::new(&self.running);
                    let went = self.handle(message, &mut guardian).await;
                    if let Err(failure) = went {
                        return self.fail(failure);
                    }
                }
                Ok(None) if last_look => return,
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::Unreachable => {
                    self.outage.is_on(&error);
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Err(error) => return self.fail(error.into()),
            }
            self.outage.is_over();
        }
    }

    /// Ends the work of all slots; the first reason is reported.
    fn fail(&self, failure: Failure) {
        self.failure.borrow_mut().get_or_insert(failure);
        self.closing.send_replace(true);
    }

    /// Runs the command for one message, and settles it.
    ///
    /// # Errors
    /// A failure that keeps all commands from running.
    async fn handle(&self, message: Message, guardian: &mut Guardian) -> Result<(), Failure> {
        self.json(|| {
            json!({
                "event": "claimed",
                "queue": self.work.name,
                "id": message.id(),
                "key": message.key(),
                "attempt": message.attempt(),
                "token": message.token().to_string(),
            })
        });
        let mut span = self.spans.message(&self.work.name, &message, self.client);
        let ran = self.run(&message, guardian, &span).await;
        if let Ok(End::Ended(code)) = ran {
            span.exited(code);
        }
        match ran {
            Ok(End::Ended(0)) => self.settle_done(message, span).await,
            Ok(End::Ended(code)) => self.settle_failed(message, code, span).await,
            // Only without a command.
            Ok(End::Interrupted(_)) => {}
            Ok(End::Lost(reason)) => {
                span.lost(Some(reason));
                let id = message.id();
                let event = json!({
                    "event": "lost", "queue": self.work.name, "id": id, "reason": reason.code(),
                });
                self.say(event, || {
                    let id = shown(id);
                    Some(format!(
                        "lost message {id}: {reason}; the command was ended"
                    ))
                });
            }
            Err(failure @ Failure::Defect(_)) => {
                span.fail("released", failure.word());
                self.unguarded.borrow_mut().push(message);
                return Err(failure);
            }
            Err(failure) => {
                // Nobody has tried it.
                let _ = tokio::time::timeout(FAREWELL, message.release()).await;
                span.fail("released", failure.word());
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Runs the command under a message until one of the two ends.
    async fn run(
        &self,
        message: &Message,
        guardian: &mut Guardian,
        span: &Open,
    ) -> Result<End, Failure> {
        // In memory, and gone with the command.
        let body = in_memory(message.body()).map_err(refused("no memory for a message"))?;
        let stdin = format!("/proc/{}/fd/{}", std::process::id(), body.as_raw_fd());
        let mut signals = SlotSignals(self.signals.subscribe());
        let program = self
            .work
            .command
            .first()
            .map_or_else(OsString::new, Clone::clone);
        let (deadline, grace) = (message.deadline(), grace(message.ttl()));
        let mut environment = self.environment(message);
        environment.extend(self.spans.environment(span));
        let starting = Child::start(
            guardian,
            &program,
            environment,
            Some(stdin),
            deadline,
            grace,
        );
        match starting.await? {
            Start::Runs(child) => supervise(child, message, grace, &mut signals).await,
            Start::TooLate => Ok(End::Lost(LossReason::Expired)),
        }
    }

    async fn settle_done(&self, message: Message, span: Open) {
        let id = message.id().to_owned();
        match message.done().await {
            Ok(()) => {
                span.end("done");
                self.done.set(self.done.get() + 1);
                self.json(|| json!({"event": "done", "queue": self.work.name, "id": id}));
            }
            Err(error) => self.not_settled(&id, &error, span),
        }
    }

    async fn settle_failed(&self, message: Message, code: u8, span: Open) {
        let id = message.id().to_owned();
        if self.interrupted.get().is_some() {
            // Our signal ended the command, or may have.
            match message.release().await {
                Ok(()) => {
                    span.end("released");
                    self.json(|| json!({"event": "released", "queue": self.work.name, "id": id}))
                }
                Err(error) => self.not_settled(&id, &error, span),
            }
            return;
        }
        let why = match code {
            129.. => format!("ended by signal {}", code - 128),
            code => format!("exit code {code}"),
        };
        match message.fail(why.as_str()).await {
            Ok(failed) => {
                span.end(match failed {
                    Failed::Again { .. } => "failed",
                    Failed::Dead => "dead",
                });
                self.failed.set(self.failed.get() + 1);
                let (again, then) = match failed {
                    Failed::Again { after } => (
                        Some(after.as_millis() as u64),
                        format!("retried in {after:.1?}"),
                    ),
                    Failed::Dead => (None, "now a dead letter".to_owned()),
                };
                let event = json!({
                    "event": "failed", "queue": self.work.name, "id": id, "code": code,
                    "again_in_ms": again, "dead": again.is_none(),
                });
                self.say(event, || {
                    Some(format!("message {} failed ({why}), {then}", shown(&id)))
                });
            }
            Err(error) => self.not_settled(&id, &error, span),
        }
    }

    fn not_settled(&self, id: &str, error: &Error, span: Open) {
        span.fail("not_settled", error.kind().code());
        let message = told(error);
        let event = json!({
            "event": "not_settled", "queue": self.work.name, "id": id, "message": message,
        });
        self.say(event, || {
            Some(format!(
                "message {} may be delivered again: {message}",
                shown(id)
            ))
        });
    }

    /// Reports an event to a program that reads the JSON.
    fn json(&self, event: impl FnOnce() -> Value) {
        if self.printer.json {
            self.say(event(), || None);
        }
    }

    fn environment(&self, message: &Message) -> Vec<(String, String)> {
        let always = [
            ("PALISADE_QUEUE", self.work.name.clone()),
            ("PALISADE_MESSAGE", message.id().to_owned()),
            ("PALISADE_ATTEMPT", message.attempt().to_string()),
            ("PALISADE_TOKEN", message.token().to_string()),
            ("PALISADE_OWNER", self.client.owner().to_owned()),
            ("PALISADE_ENGINE", self.client.describe()),
        ];
        let key = message
            .key()
            .map(|key| ("PALISADE_MESSAGE_KEY", key.to_owned()));
        let all = always.into_iter().chain(key);
        all.map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// A file in memory.
fn in_memory(body: &[u8]) -> std::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("palisade message", MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(file);
    file.write_all(body)?;
    Ok(file.into())
}
