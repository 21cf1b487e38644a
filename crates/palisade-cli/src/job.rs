//! `Job`: a command, or nothing but a name, under a lock; what `run`, `elect` and `acquire` share.
//!
//! A job goes from *prepared* (checked, and its guardian forked) to *connected*, *acquired*,
//! *ended* and released. Each of these is a value, and its one method makes the next. A step that
//! fails leaves nothing held; [`Connected::close`] leaves nothing behind in the engine.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use palisade::engine::Ask;
use palisade::events;
use palisade::report::Ancestor;
use palisade::{Client, Error, ErrorKind, Hold, LossReason, Name, Patience, Request};
use rustix::process::Signal;
use serde_json::json;
use tokio::time::Instant;

use crate::child::{Child, Start};
use crate::connect::{Target, Tries};
use crate::exit::{self, Failure, Outcome, Verdict, told};
use crate::guardian::{Guardian, Terms, grace};
use crate::holder::owners_above;
use crate::print::{self, Printer};
use crate::signals::{Event, Signals, endings};
use crate::spans::{Open, Spans};
use crate::supervise::{End, supervise};
use crate::sys::Withheld;
use crate::terminal;
use crate::verbs::look;
use crate::view::{ClaimView, LineView, shown};

/// Below this there is no time to end a child between a missed renewal and the end of the lease.
const SHORTEST_TTL: Duration = Duration::from_secs(1);

/// Shorter waits are not worth a line on stderr.
const NOTICE_AFTER: Duration = Duration::from_millis(100);

/// Between two looks at who is in the way, when the engine did not answer the first.
const NOTICE_AGAIN: Duration = Duration::from_secs(1);

/// A hold is lost this soon after the guardian has killed a command, and then it is known why.
const KNOWN_SOON: Duration = Duration::from_millis(250);

/// An engine that does not answer must not keep an interrupted palisade from ending; the ttl
/// removes what it could not.
pub(crate) const FAREWELL: Duration = Duration::from_secs(2);

/// A lock to get, and what to do under it.
pub(crate) struct Job {
    pub(crate) target: Target,
    pub(crate) name: Name,
    pub(crate) ask: Ask,
    /// What a candidate stands for.
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
    /// Whether it gives way also in those that are only likely.
    pub(crate) nested: bool,
}

/// A job that can be done, with the guardian of its command, and no thread yet.
pub(crate) struct Prepared {
    job: Job,
    engine: palisade::command::Prepared,
    tries: Tries,
    guardian: Option<Guardian>,
    /// Until there is a runtime to hear of them.
    withheld: Withheld,
}

/// A job on its engine.
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
}

/// A job that has its lock.
pub(crate) struct Acquired<'a> {
    connected: &'a mut Connected,
    pub(crate) hold: Hold,
    pub(crate) since: Instant,
    span: Open,
}

/// A job that is over, but for the release of its lock.
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

    /// The client as this job uses it: an agent's says so, and tells of deadlocks.
    fn on(&self, client: Client) -> Client {
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
        let client = client.agent_within(name, outer_claims(), agent.nested);
        client.observed_by(warns)
    }

    /// The ttl of its hold.
    pub(crate) fn ttl_on(&self, client: &Client) -> Duration {
        self.ttl.unwrap_or_else(|| client.ttl())
    }

    /// Says what a wait is for, if it takes long; returns when it would never end.
    async fn watch_the_wait(&self, client: &Client, patience: Patience) -> Failure {
        let mut told = self.quiet;
        tokio::time::sleep(NOTICE_AFTER).await;
        let mut ancestors = ancestors();
        ancestors.extend(owners_above().await);
        if patience == Patience::NoWait {
            ancestors.clear();
        }
        while !told || !ancestors.is_empty() {
            let line = look(client, &self.name).await;
            let found = line.is_ok();
            let line = line.ok().flatten();
            let futile = line
                .as_ref()
                .and_then(|line| self.futile(line, &ancestors, true));
            if let Some(futile) = futile {
                return futile;
            }
            if !std::mem::replace(&mut told, true) {
                self.say_waiting(&line.map_or_else(Vec::new, |line| line.holders));
            }
            if found {
                break;
            }
            tokio::time::sleep(NOTICE_AGAIN).await;
        }
        std::future::pending().await
    }

    /// Acquires, unless it would wait for the end of what runs it. Where the names of the locks
    /// above say so already, that is seen before it enters the line.
    async fn acquire(
        &self,
        client: &Client,
        patience: Patience,
    ) -> Result<palisade::Result<Option<Hold>>, Failure> {
        let mut above = outer_claims().into_iter();
        if patience != Patience::NoWait && above.any(|above| above.name == self.name.as_str()) {
            // An engine that is slow is looked at again while this waits.
            let line = tokio::time::timeout(NOTICE_AFTER, look(client, &self.name)).await;
            let line = line.ok().and_then(Result::ok).flatten();
            if let Some(futile) = line.and_then(|line| self.futile(&line, &ancestors(), false)) {
                return Err(futile);
            }
        }
        Ok(self.request(client).acquire(patience).await)
    }

    /// Why waiting would never end, if somebody above this process holds the lock.
    fn futile(&self, line: &LineView, ancestors: &[String], waits: bool) -> Option<Failure> {
        let ancestor = self.ancestor_in_the_way(line, ancestors, waits)?;
        let name = shown(self.name.as_str());
        Some(Failure::Nested(format!(
            "{name} is held for an ancestor of this process ({ancestor}), so waiting for it would \
             never end; use another name, or take the lock only once"
        )))
    }

    /// The holder that waits for our own end, if the lock can't be ours before. `waits` says that
    /// we are in the line already.
    fn ancestor_in_the_way<'a>(
        &self,
        line: &'a LineView,
        ancestors: &[String],
        waits: bool,
    ) -> Option<&'a ClaimView> {
        let is_ancestor = |claim: &&ClaimView| {
            let owner = claim.owner.as_ref();
            owner.is_some_and(|owner| ancestors.contains(owner))
        };
        let theirs = line.holders.iter().filter(is_ancestor);
        let taken: u32 = theirs.clone().map(|claim| claim.weight).sum();
        // Of permits there may be enough once the others have given theirs back. A reader waits only
        // behind a writer, who waits for our ancestor.
        let enough = self.ask.weight_in(line.capacity).saturating_add(taken) <= line.capacity
            && (line.kind == "permits" || !waits);
        theirs.clone().next().filter(|_| !enough)
    }

    /// The lock that was not acquired, as a failure.
    pub(crate) fn not_acquired(&self, message: String) -> Failure {
        Failure::NotAcquired {
            message,
            code: self.conflict_code,
            quiet: self.quiet,
        }
    }

    /// Lets go of what is lost: an eviction is over when its victim has left. Answers with what to
    /// say about it.
    pub(crate) fn lost(&self, hold: Hold, reason: LossReason, behind: Option<String>) -> String {
        let token = hold.token();
        drop(hold);
        self.event(
            || json!({"event": "lost", "name": self.name.as_str(), "reason": reason.code()}),
        );
        let why = match reason {
            LossReason::Expired => "its lease was not renewed in time",
            LossReason::Evicted => "an operator evicted it",
            _ => "it was taken away",
        };
        let behind = behind.map_or_else(String::new, |behind| format!(" ({behind})"));
        let then = if self.command.is_empty() {
            ""
        } else {
            "; the command was ended"
        };
        let name = shown(self.name.as_str());
        format!("lost {name} (token {token}): {why}{behind}{then}")
    }

    fn complain(&self, error: &Error) {
        if self.quiet {
            return;
        }
        let message = told(error);
        self.printer.event(
            json!({"event": "unreachable", "name": self.name.as_str(), "message": message}),
            || Some(format!("waiting for the engine: {message}")),
        );
    }

    fn say_waiting(&self, holders: &[ClaimView]) {
        let event = json!({"event": "waiting", "name": self.name.as_str(), "holders": holders});
        self.printer.event(event, || {
            let held = holders.first().map(|first| format!(", held by {first}"));
            let more = Some(holders.len()).filter(|count| *count > 1);
            let more = more.map(|count| format!(" and {} more", count - 1));
            let (held, more) = (held.unwrap_or_default(), more.unwrap_or_default());
            Some(format!(
                "waiting for {}{held}{more}",
                shown(self.name.as_str())
            ))
        });
    }

    /// Says that the engine keeps another ttl than was asked for.
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
                "the ttl is {kept:?} and not {asked:?}: this engine counts in steps of {step:?}"
            ))
        });
        Ok(())
    }

    /// Reports an event to a program that reads the JSON; people hear of waiting and failing only.
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
        let client = job.on(client);
        Ok(Connected {
            job,
            client,
            signals,
            guardian: self.guardian,
            left: self.tries.left(),
            spans,
            waiting: Some(waiting),
        })
    }
}

impl Connected {
    /// Waits for the lock, and says so if it takes long.
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
            futile = job.watch_the_wait(client, self.left) => return Err(futile),
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
                Err(job.not_acquired(match job.patience {
                    Patience::For(wait) => {
                        let wait = humantime::format_duration(wait);
                        format!("{name} was not free within {wait}")
                    }
                    _ => format!("{name} is held by someone else"),
                }))
            }
            Err(error) if error.kind() == ErrorKind::Deadlock => Err(Failure::Deadlock {
                message: error.message().to_owned(),
                code: job.conflict_code,
                quiet: job.quiet,
            }),
            // Evicted from the line: nothing was ever held.
            Err(error) if error.kind() == ErrorKind::Lost => Err(Failure::NotAcquired {
                message: error.message().to_owned(),
                code: job.conflict_code,
                quiet: false,
            }),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a command can be started again: a guardian that did not answer was replaced, and
    /// starts nothing any more.
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
            (ANCESTORS.to_owned(), lineage(client.owner())),
            (OUTER_CLAIMS.to_owned(), claims_within(hold)),
        ];
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

    /// What was behind a loss, as far as it can be told.
    async fn why(&self, hold: &Hold, reason: LossReason) -> Option<String> {
        // The guardian acts before the hold is lost: it may be a moment too early to know.
        let soon = match reason {
            LossReason::Expired => KNOWN_SOON,
            _ => Duration::ZERO,
        };
        let loss = tokio::time::timeout(soon, hold.lost()).await.ok();
        if let Some(why) = loss.as_ref().and_then(|loss| loss.why()) {
            return Some(told(why));
        }
        // A command that ended when it was asked to has not used all of the time: the engine that
        // did not renew is asked what is wrong with it.
        if reason != LossReason::Expired || loss.is_some() {
            return None;
        }
        let asked = tokio::time::timeout(FAREWELL, look(&self.client, &self.job.name)).await;
        match asked {
            Ok(Ok(_)) => None,
            Ok(Err(failure)) => Some(failure.to_string()),
            Err(_) => Some("the engine does not answer".to_owned()),
        }
    }

    /// Keeps the lock until then. A signal cuts it short.
    async fn keep_until(&mut self, until: Instant, code: u8, hold: &Hold) -> End {
        while Instant::now() < until {
            tokio::select! {
                biased;
                loss = hold.lost() => return End::Lost(loss.reason),
                () = tokio::time::sleep_until(until) => {}
                event = self.signals.next() => match event {
                    // It was meant for the command, which has ended.
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

    /// Leaves nothing behind in the engine: what was left to the background is done.
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
                let until = since + connected.job.at_least;
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

/// Names the owners of the locks that were taken by the palisades that run this one, the outermost
/// first.
const ANCESTORS: &str = "PALISADE_ANCESTORS";

fn ancestors() -> Vec<String> {
    let names = std::env::var(ANCESTORS).unwrap_or_default();
    names.split_whitespace().map(str::to_owned).collect()
}

/// The owners above a command of `owner`.
fn lineage(owner: &str) -> String {
    let mut lineage = ancestors();
    lineage.push(owner.to_owned());
    lineage.join(" ")
}

/// The claims of the palisades that run this one, the outermost first, as JSON: it ends before
/// they do.
const OUTER_CLAIMS: &str = "PALISADE_CLAIMS";

/// How many of them are told, the innermost: more are in no script that anyone reads.
const DEPTH: usize = 16;

fn outer_claims() -> Vec<Ancestor> {
    let claims = std::env::var(OUTER_CLAIMS).unwrap_or_default();
    let mut claims: Vec<Ancestor> = serde_json::from_str(&claims).unwrap_or_default();
    // Somebody may have set it to anything, and it goes into every record.
    let is_sound = |claim: &Ancestor| claim.claim.len() <= 32 && Name::new(&claim.name).is_ok();
    claims.retain(is_sound);
    claims.drain(..claims.len().saturating_sub(DEPTH));
    claims
}

/// The claims above a command under `hold`.
fn claims_within(hold: &Hold) -> String {
    let mut claims = outer_claims();
    claims.push(Ancestor {
        claim: hold.claim().to_string(),
        name: hold.name().as_str().to_owned(),
    });
    claims.drain(..claims.len().saturating_sub(DEPTH));
    json!(claims).to_string()
}

/// Warns of the first deadlock that it hears of.
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
