//! `Job`: what `run` and `elect` have in common: a command, or nothing but a name, under a lock.
//!
//! prepare, and fork the guardian → connect → acquire, or leave the line → start the command and
//! supervise it → release. The verbs put these steps together; each says its own part of what
//! happens. Nothing is left behind in the engine when [`Job::start`] returns.

use std::ffi::OsString;
use std::time::Duration;

use palisade::{Ask, Client, Error, Hold, Kind, LossReason, Name, Patience, Request};
use serde_json::json;
use tokio::time::Instant;

use crate::child::{Child, Start};
use crate::connect::{Place, Tries};
use crate::exit::{Failure, Outcome, Verdict, told};
use crate::guardian::{Guardian, Terms, grace};
use crate::holder::owners_above;
use crate::on_runtime;
use crate::print::Printer;
use crate::signals::{Endings, Signals, endings};
use crate::supervise::{End, supervise};
use crate::sys::Withheld;
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
    pub(crate) name: Name,
    pub(crate) ask: Ask,
    /// What a candidate stands for.
    pub(crate) value: Option<String>,
    pub(crate) ttl: Option<Duration>,
    /// Empty when there is nothing to run.
    pub(crate) command: Vec<OsString>,
    /// The exit code that `-E` asks for.
    pub(crate) conflict_code: Option<u8>,
    pub(crate) quiet: bool,
    pub(crate) printer: Printer,
}

/// What a job has when it begins.
pub(crate) struct Ready {
    /// There is one if there is a command.
    pub(crate) guardian: Option<Guardian>,
    /// What is left of it.
    pub(crate) patience: Patience,
    pub(crate) endings: Endings,
}

impl Job {
    /// Forks the guardian, starts the runtime, connects, and does `work`.
    pub(crate) fn start(
        &self,
        place: &Place,
        patience: Patience,
        terms: Terms,
        work: impl AsyncFnOnce(&Client, Ready) -> Verdict,
    ) -> Verdict {
        if let Some(why) = too_short("--ttl", self.ttl) {
            return Err(Failure::Usage(why));
        }
        if let Some(why) = too_short("the ttl of the URL or the config file", place.ttl()?) {
            return Err(Error::new(Kind::Config, "connect", why).into());
        }
        if place.is_private()? {
            let why = "memory: keeps its locks inside one process, so that a command under one \
                       would exclude nobody; use file: for the processes of this machine, or a \
                       server (see `palisade guide`)";
            return Err(Error::new(Kind::Unsupported, "connect", why).into());
        }
        let mut tries = Tries::new(patience, |error: &Error| self.complain(error));
        // Until there is a runtime to hear of them.
        let withheld = Withheld::these(endings());
        let prepared = loop {
            let pause = match place.prepare() {
                Ok(prepared) => break prepared,
                Err(error) => tries.pause(error)?,
            };
            if let Some(signal) = withheld.next(pause) {
                return Ok(Outcome::Interrupted(signal.as_raw()));
            }
        };
        let guardian = match self.command.is_empty() {
            true => None,
            false => Some(Guardian::fork(&self.command, withheld.before(), terms)?),
        };
        on_runtime(async {
            let mut endings = Endings::listen()?;
            drop(withheld);
            let connect = async {
                let client = tries.connect(&prepared).await?;
                Ok::<_, Failure>(match place.for_correctness() {
                    true => client.for_correctness().await?,
                    false => client,
                })
            };
            let client = tokio::select! {
                biased;
                signal = endings.next() => return Ok(Outcome::Interrupted(signal.as_raw())),
                connected = connect => connected?,
            };
            if let Some(ttl) = self.ttl.or(place.ttl()?) {
                self.say_rounded(&client, ttl)?;
            }
            let ready = Ready {
                guardian,
                patience: tries.left(),
                endings,
            };
            let verdict = work(&client, ready).await;
            // What was left to the background is done, and nothing stays behind in the engine.
            let _ = tokio::time::timeout(FAREWELL, client.close()).await;
            verdict
        })
    }

    /// Waits for the lock, and says so if it takes long; `None` when patience ended first.
    pub(crate) async fn acquire(
        &self,
        client: &Client,
        patience: Patience,
    ) -> Result<Option<Hold>, Failure> {
        let request = self.request(client)?;
        let asked = Instant::now();
        let acquired = tokio::select! {
            biased;
            acquired = request.acquire(patience) => acquired,
            // Dropping the acquire leaves the line.
            futile = self.watch_the_wait(client, patience) => return Err(futile),
        };
        match acquired {
            Ok(Some(hold)) => {
                self.say_acquired(client, &hold, asked);
                Ok(Some(hold))
            }
            Ok(None) => Ok(None),
            // Evicted from the line: nothing was ever held.
            Err(error) if error.kind() == Kind::Lost => Err(Failure::NotAcquired {
                message: error.message().to_owned(),
                code: self.conflict_code,
                quiet: false,
            }),
            Err(error) => Err(error.into()),
        }
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
            if let Some(line) = &line
                && let Some(ancestor) = self.ancestor_in_the_way(line, &ancestors)
            {
                let name = shown(self.name.as_str());
                return Failure::Nested(format!(
                    "{name} is held for what runs this palisade ({ancestor}): it would wait for \
                     its own end. Use another name, or take the lock once"
                ));
            }
            if !std::mem::replace(&mut told, true) {
                self.say_waiting(line.map_or_else(Vec::new, |line| line.holders));
            }
            if found {
                break;
            }
            tokio::time::sleep(NOTICE_AGAIN).await;
        }
        std::future::pending().await
    }

    /// The holder that waits for our own end, if the lock can't be ours before.
    fn ancestor_in_the_way<'a>(
        &self,
        line: &'a LineView,
        ancestors: &[String],
    ) -> Option<&'a ClaimView> {
        let is_ancestor = |claim: &&ClaimView| {
            let owner = claim.owner.as_ref();
            owner.is_some_and(|owner| ancestors.contains(owner))
        };
        let theirs = line.holders.iter().filter(is_ancestor);
        let taken: u32 = theirs.clone().map(|claim| claim.weight).sum();
        // Of permits there may be enough once the others have given theirs back.
        let enough = line.kind == "permits"
            && self.ask.weight_in(line.capacity).saturating_add(taken) <= line.capacity;
        theirs.clone().next().filter(|_| !enough)
    }

    fn request(&self, client: &Client) -> Result<Request, Failure> {
        let mut request = client.line(self.name.as_str(), self.ask);
        if let Some(ttl) = self.ttl {
            request = request.ttl(ttl);
        }
        Ok(match &self.value {
            Some(value) => request.value(value.clone()),
            None => request,
        })
    }

    /// Runs the command under the lock, until one of the two ends.
    pub(crate) async fn command(
        &self,
        client: &Client,
        hold: &Hold,
        guardian: &mut Guardian,
        signals: &mut Signals,
    ) -> Result<End, Failure> {
        let Some(program) = self.command.first() else {
            return Err(Failure::Usage("there is no command to run".into()));
        };
        let mut environment = vec![
            ("PALISADE_LOCK".to_owned(), self.name.as_str().to_owned()),
            ("PALISADE_TOKEN".to_owned(), hold.token().to_string()),
            ("PALISADE_OWNER".to_owned(), client.owner().to_owned()),
            ("PALISADE_ENGINE".to_owned(), client.describe()),
            (ANCESTORS.to_owned(), lineage(client.owner())),
        ];
        if let Some(key) = client.engine().key(hold.ticket()) {
            environment.push(("PALISADE_KEY".to_owned(), key));
        }
        let ttl = self.ttl.unwrap_or_else(|| client.ttl());
        let start = Child::start(guardian, program, environment, hold.deadline(), grace(ttl));
        match start.await? {
            Start::Runs(child) => Ok(supervise(child, hold, ttl, signals).await),
            Start::TooLate => Ok(End::Lost(LossReason::Expired)),
        }
    }

    /// Releases the lock after a command that ended with `code`.
    pub(crate) async fn release(&self, hold: Hold, code: u8) -> Verdict {
        match hold.release().await {
            Ok(()) => {}
            Err(error) if error.kind() == Kind::Lost => return Err(error.into()),
            Err(error) => self.say_not_released(&error),
        }
        self.event(|| json!({"event": "released", "name": self.name.as_str(), "code": code}));
        Ok(Outcome::Child(code))
    }

    /// What was behind a loss, as far as it can be told.
    pub(crate) async fn why(
        &self,
        client: &Client,
        hold: &Hold,
        reason: LossReason,
    ) -> Option<String> {
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
        let asked = tokio::time::timeout(FAREWELL, look(client, &self.name)).await;
        match asked {
            Ok(Ok(_)) => None,
            Ok(Err(failure)) => Some(failure.to_string()),
            Err(_) => Some("the engine does not answer".to_owned()),
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
        let then = match self.command.is_empty() {
            true => "",
            false => "; the command was ended",
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

    fn say_waiting(&self, holders: Vec<ClaimView>) {
        let event = json!({"event": "waiting", "name": self.name.as_str(), "holders": holders});
        self.printer.event(event, || {
            let mut text = format!("waiting for {}", shown(self.name.as_str()));
            if let Some(first) = holders.first() {
                text.push_str(&format!(", held by {first}"));
            }
            if holders.len() > 1 {
                text.push_str(&format!(" and {} more", holders.len() - 1));
            }
            Some(text)
        });
    }

    /// Says that the engine keeps another ttl than was asked for.
    fn say_rounded(&self, client: &Client, asked: Duration) -> Result<(), Failure> {
        let kept = client.capability().explicit_ttl(asked)?;
        if kept == asked || self.quiet {
            return Ok(());
        }
        let millis = |time: Duration| time.as_nanos() as f64 / 1e6;
        self.printer.event(
            json!({
                "event": "ttl_rounded",
                "name": self.name.as_str(),
                "asked_ms": millis(asked),
                "ttl_ms": kept.as_millis() as u64,
            }),
            || {
                let step = client.capability().ttl.step;
                Some(format!(
                    "the ttl is {kept:?} and not {asked:?}: this engine counts in steps of {step:?}"
                ))
            },
        );
        Ok(())
    }

    fn say_acquired(&self, client: &Client, hold: &Hold, asked: Instant) {
        self.event(|| {
            json!({
                "event": "acquired",
                "name": self.name.as_str(),
                "token": hold.token().to_string(),
                "owner": client.owner(),
                "engine": client.describe(),
                "waited_ms": asked.elapsed().as_millis() as u64,
            })
        });
    }

    /// Reports a release that failed.
    pub(crate) fn say_not_released(&self, error: &Error) {
        let message = told(error);
        self.printer.event(
            json!({"event": "not_released", "name": self.name.as_str(), "message": message}),
            || Some(format!("not released, it ends with its ttl: {message}")),
        );
    }

    /// Reports an event to a program that reads the JSON; people hear of waiting and failing only.
    pub(crate) fn event(&self, event: impl FnOnce() -> serde_json::Value) {
        if self.printer.json && !self.quiet {
            self.printer.event(event(), || None);
        }
    }
}

fn too_short(what: &str, ttl: Option<Duration>) -> Option<String> {
    ttl.filter(|ttl| *ttl < SHORTEST_TTL).map(|_| {
        format!(
            "{what} is too short: a command needs at least 1s to be ended in when its lock is lost"
        )
    })
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
