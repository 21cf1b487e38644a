//! `Job`: a lock, and the command to run under it, if any. `run`, `elect` and `acquire` share it.
//!
//! A job goes from *prepared* (checked, and its guardian forked) to *connected*, *acquired*,
//! *ended* and released. Each of these is a value, and its one method makes the next. A step that
//! fails leaves nothing held; [`Connected::close`] leaves nothing behind in the engine.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use palisade::command::rounded;
use palisade::engine::Ask;
use palisade::events;
use palisade::{Client, Error, ErrorKind, Hold, LossReason, Name, Patience, Request, Token};
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::child::{Child, Start};
use crate::connect::{Target, Tries};
use crate::exit::{self, Failure, Outcome, Verdict, told};
use crate::guardian::{Guardian, Terms, grace};
use crate::lineage;
use crate::print::{self, Printer};
use crate::signals::{Event, Signals, endings};
use crate::spans::{Open, Spans};
use crate::supervise::{End, supervise};
use crate::sys::Withheld;
use crate::terminal;
use crate::verbs::look;
use crate::view::{ClaimView, LineView, shown};
use crate::waiting::{NOTICE_AFTER, Stalls};

/// A shorter ttl leaves no time to end a child between a missed renewal and the end of the lease.
const SHORTEST_TTL: Duration = Duration::from_secs(1);

/// Within this time after the guardian has killed a command, the hold is lost and its reason known.
const KNOWN_SOON: Duration = Duration::from_millis(250);

/// Longer than any job lasts: no time that is this far away overflows.
const AGES: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// How long a message waits for the name of a holder.
const GLANCE: Duration = Duration::from_millis(500);

/// An engine that does not answer must not keep an interrupted palisade from ending; what could not
/// be released ends with its ttl.
pub(crate) const FAREWELL: Duration = Duration::from_secs(2);

/// A lock to get, and what to do under it.
pub(crate) struct Job {
    pub(crate) target: Target,
    pub(crate) name: Name,
    pub(crate) ask: Ask,
    /// The value of a candidate in an election.
    pub(crate) value: Option<String>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) patience: Patience,
    /// How long the lock is kept at least.
    pub(crate) at_least: Duration,
    /// How it looks for deadlocks, if it is an agent.
    pub(crate) agent: Option<Agent>,
    /// Empty when there is nothing to run.
    pub(crate) command: Vec<OsString>,
    /// The exit code that `-E` asks for.
    pub(crate) conflict_code: Option<u8>,
    pub(crate) quiet: bool,
    pub(crate) printer: Printer,
}

/// How an agent looks for deadlocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Agent {
    pub(crate) deadlock_after: Option<Duration>,
    /// Whether it gives way in likely deadlocks, too.
    pub(crate) nested: bool,
}

/// A job that was checked, with the guardian of its command; there is no other thread yet.
pub(crate) struct Prepared {
    job: Job,
    engine: palisade::command::Prepared,
    tries: Tries,
    guardian: Option<Guardian>,
    /// Signals are blocked until a runtime handles them.
    withheld: Withheld,
}

/// A job that is connected to its engine.
pub(crate) struct Connected {
    pub(crate) job: Job,
    pub(crate) client: Client,
    pub(crate) signals: Signals,
    guardian: Option<Guardian>,
    /// What is left of the patience.
    left: Patience,
    spans: Spans,
    /// The span of the first wait, which began before it was connected.
    waiting: Option<Open>,
    /// What it waits for besides its turn.
    stalled: watch::Receiver<Option<Error>>,
}

/// A job that has its lock.
pub(crate) struct Acquired<'a> {
    connected: &'a mut Connected,
    pub(crate) hold: Hold,
    pub(crate) since: Instant,
    span: Open,
}

/// A job that has ended and whose lock is still to be released.
pub(crate) struct Ended<'a> {
    acquired: Acquired<'a>,
    end: End,
}

impl Job {
    /// Checks it, prepares the engine, and forks the guardian. There must be no other thread.
    pub(crate) fn prepare(self, terms: Terms) -> Result<Prepared, Failure> {
        check_ttl(self.ttl, &self.target)?;
        if self.target.is_private()? {
            let why = "memory: keeps its locks inside one process, so a command under one would \
                       exclude nobody; use file: for the processes of this machine, or a server \
                       (see `palisade guide`)";
            return Err(Error::new(ErrorKind::Unsupported, "connect", why).into());
        }
        let mut tries = Tries::new(self.patience);
        let withheld = Withheld::these(endings());
        let target = &self.target;
        let engine = target.prepare(&mut tries, &withheld, |error| self.complain(error))?;
        let guardian = if self.command.is_empty() {
            None
        } else {
            Some(Guardian::fork(&self.command, withheld.before(), terms)?)
        };
        Ok(Prepared {
            job: self,
            engine,
            tries,
            guardian,
            withheld,
        })
    }

    /// Where people hear of what does not change how it ends, if they want to.
    pub(crate) fn notes(&self) -> Option<Printer> {
        (!self.quiet).then_some(self.printer)
    }

    fn request(&self, client: &Client) -> Request {
        let mut request = client.line(self.name.as_str(), self.ask);
        if let Some(ttl) = self.ttl {
            request = request.ttl(ttl);
        }
        if let Some(agent) = self.agent {
            request = request.deadlock_after(agent.deadlock_after);
        }
        match &self.value {
            Some(value) => request.value(value.clone()),
            None => request,
        }
    }

    /// The client for this job: it tells `stalls` what the job waits for besides its turn. If the job
    /// is an agent, the client says so and reports deadlocks.
    fn on(&self, client: Client, stalls: Stalls) -> Client {
        let client = client.observed_by(stalls);
        let Some(agent) = self.agent else {
            return client;
        };
        let name = format!("run {}", self.name);
        let warns = Warns {
            name: self.name.clone(),
            printer: self.printer,
            nested: agent.nested,
            told: AtomicBool::new(self.quiet),
        };
        let client = client.agent_within(name, lineage::claims(), agent.nested);
        client.observed_by(warns)
    }

    /// The ttl of its hold.
    pub(crate) fn ttl_on(&self, client: &Client) -> Duration {
        self.ttl.unwrap_or_else(|| client.ttl())
    }

    /// Acquires, unless an ancestor of this process holds the lock: that wait would never end. If
    /// `PALISADE_CLAIMS` names the lock, this is checked before the claim enters the line.
    async fn acquire(
        &self,
        client: &Client,
        patience: Patience,
    ) -> Result<palisade::Result<Option<Hold>>, Failure> {
        let mut above = lineage::claims().into_iter();
        if patience != Patience::NoWait && above.any(|above| above.name == self.name.as_str()) {
            // If the engine is slow, the check is repeated during the wait.
            let line = tokio::time::timeout(NOTICE_AFTER, look(client, &self.name)).await;
            let line = line.ok().and_then(Result::ok).flatten();
            if let Some(futile) =
                line.and_then(|line| self.futile(&line, &lineage::owners(), false))
            {
                return Err(futile);
            }
        }
        Ok(self.request(client).acquire(patience).await)
    }

    /// The failure if an ancestor of this process holds the lock, so that waiting would never end.
    pub(crate) fn futile(
        &self,
        line: &LineView,
        ancestors: &[String],
        waits: bool,
    ) -> Option<Failure> {
        let ancestor = lineage::in_the_way(line, self.ask, ancestors, waits)?;
        let name = shown(self.name.as_str());
        Some(Failure::Nested(format!(
            "{name} is held for an ancestor of this process ({ancestor}), so waiting for it would \
             never end; use another name, or take the lock only once"
        )))
    }

    /// The lock that was not acquired, as a failure.
    pub(crate) fn not_acquired(&self, message: String) -> Failure {
        Failure::NotAcquired {
            message,
            code: self.conflict_code,
            quiet: self.quiet,
        }
    }

    /// Leaves the line after a loss: an eviction completes when the evicted claim has left. Returns
    /// the message about the loss.
    pub(crate) fn lost(&self, hold: Hold, reason: LossReason, behind: Option<String>) -> String {
        let token = hold.token();
        drop(hold);
        if let Some(event) = self.lost_event(reason) {
            self.printer.event(event, || None);
        }
        let mut lost = self.loss(token, reason, behind);
        if !self.command.is_empty() {
            lost.push_str("; the command was ended");
        }
        lost
    }

    /// A loss as an event, for programs; people read the message of the failure.
    pub(crate) fn lost_event(&self, reason: LossReason) -> Option<serde_json::Value> {
        let event =
            || json!({"event": "lost", "name": self.name.as_str(), "reason": reason.code()});
        (self.printer.json && !self.quiet).then(event)
    }

    /// A loss, as people read it.
    pub(crate) fn loss(&self, token: Token, reason: LossReason, behind: Option<String>) -> String {
        let why = match reason {
            LossReason::Expired => "its lease was not renewed in time",
            LossReason::Evicted => "an operator evicted it",
            _ => "it was taken away",
        };
        let behind = behind.map_or_else(String::new, |behind| format!(" ({behind})"));
        let name = shown(self.name.as_str());
        format!("lost {name} (token {token}): {why}{behind}")
    }

    /// Who holds the lock now, as far as the engine tells soon.
    async fn held_now(&self, client: &Client) -> Option<String> {
        if self.quiet {
            return None;
        }
        let line = tokio::time::timeout(GLANCE, look(client, &self.name)).await;
        held_by(&line.ok()?.ok()??.holders)
    }

    /// What is wrong with the engine, as a request to it shows within this time.
    pub(crate) async fn trouble(&self, client: &Client, within: Duration) -> Option<String> {
        match tokio::time::timeout(within, look(client, &self.name)).await {
            Ok(Ok(_)) => None,
            Ok(Err(failure)) => Some(failure.to_string()),
            Err(_) => Some("the engine does not answer".to_owned()),
        }
    }

    /// When a lock that was acquired then may be released.
    pub(crate) fn not_before(&self, since: Instant) -> Instant {
        since + self.at_least.min(AGES)
    }

    /// Reports that the engine uses another ttl than requested.
    fn say_rounded(&self, client: &Client) -> Result<(), Failure> {
        let Some(asked) = self.ttl.or(self.target.ttl()?) else {
            return Ok(());
        };
        let kept = client.capability().explicit_ttl(asked)?;
        if kept == asked || self.quiet {
            return Ok(());
        }
        let event = json!({
            "event": "ttl_rounded",
            "name": self.name.as_str(),
            "asked_ms": asked.as_nanos() as f64 / 1e6,
            "ttl_ms": kept.as_millis() as u64,
        });
        let step = client.capability().ttl.step;
        self.printer.event(event, || {
            Some(format!(
                "the ttl is {kept:?} and not {asked:?}: this engine counts in steps of {}",
                rounded(step)
            ))
        });
        Ok(())
    }

    /// Reports an event with `--json`; the text output only has waiting and failures.
    fn event(&self, event: impl FnOnce() -> serde_json::Value) {
        if self.printer.json && !self.quiet {
            self.printer.event(event(), || None);
        }
    }
}

impl Prepared {
    /// Connects, as patiently as the job waits for its lock.
    pub(crate) async fn connect(mut self, spans: Spans) -> Result<Connected, Failure> {
        let mut signals = Signals::listen()?;
        drop(self.withheld);
        let job = self.job;
        let waiting = spans.wait(&job.name);
        let tell = |error: &Error| job.complain(error);
        let connect = job.target.connect(&self.engine, &mut self.tries, tell);
        let connected = tokio::select! {
            biased;
            signal = signals.ending() => Err(Failure::Interrupted(signal.as_raw())),
            connected = connect => connected,
        };
        let client = match connected {
            Ok(client) => client,
            Err(failure) => {
                waiting.waited(Some(&failure));
                return Err(failure);
            }
        };
        job.say_rounded(&client)?;
        let (stalls, stalled) = Stalls::of(&job.name);
        let client = job.on(client, stalls);
        Ok(Connected {
            job,
            client,
            signals,
            guardian: self.guardian,
            left: self.tries.left(),
            spans,
            waiting: Some(waiting),
            stalled,
        })
    }
}

impl Connected {
    /// Waits for the lock, and reports the wait if it takes long.
    ///
    /// # Cancellation
    /// Dropping it leaves the line.
    pub(crate) async fn acquire(&mut self) -> Result<Acquired<'_>, Failure> {
        let wait = self.waiting.take();
        let wait = wait.unwrap_or_else(|| self.spans.wait(&self.job.name));
        let granted = self.granted(wait.traceparent()).await;
        let span = granted.as_ref().ok();
        let span = span.map(|hold| self.spans.hold(&wait, hold, &self.client));
        wait.waited(granted.as_ref().err());
        Ok(Acquired {
            hold: granted?,
            since: Instant::now(),
            span: span.unwrap_or_default(),
            connected: self,
        })
    }

    /// The hold, once it is granted, in the trace that is waited in.
    async fn granted(&mut self, trace: Option<String>) -> Result<Hold, Failure> {
        let (job, client) = (&self.job, &self.client);
        let client = &client.in_trace(trace);
        let asked = Instant::now();
        let acquired = tokio::select! {
            biased;
            signal = self.signals.ending() => return Err(Failure::Interrupted(signal.as_raw())),
            acquired = job.acquire(client, self.left) => acquired?,
            futile = job.watch_the_wait(client, self.left, self.stalled.clone()) => return Err(futile),
        };
        match acquired {
            Ok(Some(hold)) => {
                job.event(|| {
                    json!({
                        "event": "acquired",
                        "name": job.name.as_str(),
                        "token": hold.token().to_string(),
                        "owner": client.owner(),
                        "engine": client.describe(),
                        "waited_ms": asked.elapsed().as_millis() as u64,
                    })
                });
                Ok(hold)
            }
            Ok(None) => {
                let name = shown(job.name.as_str());
                let held = job.held_now(client).await;
                Err(job.not_acquired(match (job.patience, held) {
                    (Patience::For(wait), held) => {
                        let wait = humantime::format_duration(wait);
                        let held = held.map_or_else(String::new, |held| format!("; it is {held}"));
                        format!("{name} was not free within {wait}{held}")
                    }
                    (_, Some(held)) => format!("{name} is {held}"),
                    (_, None) => format!("{name} is held by someone else"),
                }))
            }
            Err(error) if error.kind() == ErrorKind::Deadlock => Err(Failure::Deadlock {
                message: error.message().to_owned(),
                code: job.conflict_code,
                quiet: job.quiet,
            }),
            // Evicted while waiting: nothing was ever held.
            Err(error) if error.kind() == ErrorKind::Lost => Err(Failure::NotAcquired {
                message: error.message().to_owned(),
                code: job.conflict_code,
                quiet: false,
            }),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a command can be started again: a guardian that did not answer was killed, and
    /// starts nothing.
    pub(crate) fn can_run_again(&self) -> bool {
        self.guardian.as_ref().is_none_or(Guardian::lives)
    }

    /// Runs the command under the lock until one of the two ends; without a command, until a
    /// signal comes.
    async fn run(&mut self, hold: &Hold, span: &Open) -> Result<End, Failure> {
        let (job, client) = (&self.job, &self.client);
        let (Some(guardian), Some(program)) = (&mut self.guardian, job.command.first()) else {
            if !job.printer.json {
                let (name, token) = (shown(job.name.as_str()), hold.token());
                print::text(&format!("leading {name} (token {token})\n"))?;
            }
            return Ok(tokio::select! {
                biased;
                loss = hold.lost() => End::Lost(loss.reason),
                signal = self.signals.ending() => End::Interrupted(signal),
            });
        };
        let mut environment = vec![
            ("PALISADE_LOCK".to_owned(), job.name.as_str().to_owned()),
            ("PALISADE_TOKEN".to_owned(), hold.token().to_string()),
            ("PALISADE_OWNER".to_owned(), client.owner().to_owned()),
            ("PALISADE_ENGINE".to_owned(), client.describe()),
        ];
        environment.extend(lineage::environment(client.owner(), hold));
        if let Some(key) = client.engine().key(hold.ticket()) {
            environment.push(("PALISADE_KEY".to_owned(), key));
        }
        environment.extend(self.spans.environment(span));
        let grace = grace(job.ttl_on(client));
        let (stdin, deadline) = (None, hold.deadline());
        match Child::start(guardian, program, environment, stdin, deadline, grace).await? {
            Start::Runs(child) => supervise(child, hold, grace, &mut self.signals).await,
            Start::TooLate => Ok(End::Lost(LossReason::Expired)),
        }
    }

    /// The cause of a loss, if it is known.
    async fn why(&self, hold: &Hold, reason: LossReason) -> Option<String> {
        // The guardian acts before the hold is lost, so the reason may not be known yet.
        let soon = match reason {
            LossReason::Expired => KNOWN_SOON,
            _ => Duration::ZERO,
        };
        let loss = tokio::time::timeout(soon, hold.lost()).await.ok();
        if let Some(why) = loss.as_ref().and_then(|loss| loss.why()) {
            return Some(told(why));
        }
        // The command ended on TERM before the hold was lost, so no reason is recorded. A request
        // to the engine shows what is wrong with it.
        if reason != LossReason::Expired || loss.is_some() {
            return None;
        }
        self.job.trouble(&self.client, FAREWELL).await
    }

    /// Keeps the lock until then. A signal cuts it short.
    async fn keep_until(&mut self, until: Instant, code: u8, hold: &Hold) -> End {
        while Instant::now() < until {
            tokio::select! {
                biased;
                loss = hold.lost() => return End::Lost(loss.reason),
                () = tokio::time::sleep_until(until) => {}
                event = self.signals.next() => match event {
                    // Meant for the command, which has ended.
                    Event::Ending(Signal::USR1 | Signal::USR2) => {}
                    Event::Ending(_) => break,
                    Event::Stop => terminal::stop(terminal::Stop::Us),
                    Event::Resumed | Event::Resized => {}
                }
            }
        }
        if hold.is_valid() {
            End::Ended(code)
        } else {
            End::Lost(LossReason::Expired)
        }
    }

    /// Waits for releases in the background, so that nothing is left behind in the engine.
    pub(crate) async fn close(self) {
        drop(self.guardian);
        let _ = tokio::time::timeout(FAREWELL, self.client.close()).await;
    }
}

impl<'a> Acquired<'a> {
    /// Runs the command, if there is one, until it or the lock ends.
    pub(crate) async fn run(self) -> Result<Ended<'a>, Failure> {
        match self.connected.run(&self.hold, &self.span).await {
            Ok(end) => Ok(Ended {
                acquired: self,
                end,
            }),
            Err(failure) => {
                self.connected.guardian = None;
                let _ = tokio::time::timeout(FAREWELL, self.hold.release()).await;
                self.span.fail("released", failure.word());
                Err(failure)
            }
        }
    }
}

impl Ended<'_> {
    /// Releases the lock, or says that it was lost.
    pub(crate) async fn release(self) -> Verdict {
        let Acquired {
            connected,
            hold,
            since,
            mut span,
        } = self.acquired;
        let end = match self.end {
            End::Ended(code) => {
                span.exited(code);
                // Gone, with its command, before the lock is.
                connected.guardian = None;
                let until = connected.job.not_before(since);
                connected.keep_until(until, code, &hold).await
            }
            end => end,
        };
        let job = &connected.job;
        let (code, verdict) = match end {
            End::Ended(code) => (code, Ok(Outcome::Child(code))),
            End::Interrupted(signal) => {
                let signal = signal.as_raw();
                (exit::of_signal(signal), Err(Failure::Interrupted(signal)))
            }
            End::Lost(reason) => {
                span.lost(Some(reason));
                let why = connected.why(&hold, reason).await;
                return Err(Failure::Lost(job.lost(hold, reason, why)));
            }
        };
        match hold.release().await {
            Ok(()) => span.end("released"),
            Err(error) if error.kind() == ErrorKind::Lost => {
                span.lost(None);
                return Err(error.into());
            }
            Err(error) => {
                span.fail("not_released", error.kind().code());
                let message = told(&error);
                job.printer.event(
                    json!({"event": "not_released", "name": job.name.as_str(), "message": message}),
                    || Some(format!("not released; it ends with its ttl: {message}")),
                );
            }
        }
        job.event(|| json!({"event": "released", "name": job.name.as_str(), "code": code}));
        verdict
    }
}

/// `held by OWNER … and 2 more`.
pub(crate) fn held_by(holders: &[ClaimView]) -> Option<String> {
    let first = holders.first()?;
    let more = Some(holders.len() - 1).filter(|more| *more > 0);
    let more = more.map_or_else(String::new, |more| format!(" and {more} more"));
    Some(format!("held by {first}{more}"))
}

/// Refuses a ttl that leaves no time to end a command.
pub(crate) fn check_ttl(asked: Option<Duration>, target: &Target) -> Result<(), Failure> {
    let too_short = |what: &str, ttl: Option<Duration>| {
        ttl.filter(|ttl| *ttl < SHORTEST_TTL).map(|_| {
            format!("{what} is too short: at least 1s is needed to end a command after a loss")
        })
    };
    if let Some(why) = too_short("--ttl", asked) {
        return Err(Failure::Usage(why));
    }
    match too_short("the ttl of the URL or the config file", target.ttl()?) {
        Some(why) => Err(Error::new(ErrorKind::Config, "connect", why).into()),
        None => Ok(()),
    }
}

/// Warns of the first deadlock that is observed.
struct Warns {
    name: Name,
    printer: Printer,
    nested: bool,
    told: AtomicBool,
}

impl events::Observer for Warns {
    fn see(&self, event: &events::Event<'_>) {
        let events::Event::Deadlocked { deadlock, .. } = event else {
            return;
        };
        if self.told.swap(true, Ordering::Relaxed) {
            return;
        }
        let circle = deadlock.to_string();
        let event = json!({
            "event": "deadlock",
            "name": self.name.as_str(),
            "likely": deadlock.likely,
            "circle": circle,
        });
        self.printer.event(event, || {
            let likely = if deadlock.likely { "likely " } else { "" };
            let then = match (deadlock.gives_way.is_some(), self.nested) {
                (true, _) => "one of them gives way",
                (false, false) => "with --nested one of them would give way",
                (false, true) => "none of the others has --nested",
            };
            Some(format!("{likely}deadlock: {circle}; {then}"))
        });
    }
}
