//! `palisade run`: runs a command while holding a lock.
//!
//! check the arguments → prepare, and fork the guardian → connect → acquire, or leave the line →
//! start the child → supervise it → keep the lock as long as `--at-least` says → release → the
//! child's code. Whatever goes wrong on the way, the lock is released before palisade returns.

use std::ffi::OsString;
use std::time::Duration;

use palisade::{
    Ask, Client, Error, Hold, Kind, LossReason, Name, Patience, Prepared, Request, parse_duration,
};
use serde_json::json;
use tokio::time::Instant;

use super::permits::parse_permits;
use super::show::look;
use crate::args::Global;
use crate::child::{Child, Start, unguarded};
use crate::connect::{Place, Tries};
use crate::exit::{Failure, Outcome, Verdict};
use crate::guardian::{Guardian, grace};
use crate::on_runtime;
use crate::print::Printer;
use crate::signals::{Endings, Event, Signals, endings};
use crate::supervise::{End, supervise};
use crate::sys::Withheld;
use crate::view::shown;

/// Below this there is no time to end a child between a missed renewal and the end of the lease.
const SHORTEST_TTL: Duration = Duration::from_secs(1);

/// Shorter waits are not worth a line on stderr.
const NOTICE_AFTER: Duration = Duration::from_millis(100);

/// An engine that does not answer must not keep an interrupted palisade from ending; the ttl
/// removes what it could not.
const FAREWELL: Duration = Duration::from_secs(2);

/// Run a command while holding a lock
///
/// Waits for the lock, runs the command, releases the lock, and ends with the command's exit
/// code. If the lock is lost the command is ended before anyone else can get it.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "palisade run [OPTIONS] <NAME> -- <CMD>...",
    after_help = "Examples:\n  \
        palisade run nightly-report -- ./report.sh\n  \
        palisade run deploy --wait 10s -- make deploy\n  \
        palisade run downloads --permits 1/4 -- curl -O https://example.org/big\n\n\
        Exit codes: the command's own (128+n for signal n, 126 not executable, 127 not found),\n\
        2 usage, 69 engine unreachable, 70 engine unusable, 75 not acquired, 76 lost while held,\n\
        77 refused, 78 bad URL or configuration."
)]
pub(crate) struct Run {
    /// The name of the lock
    name: String,
    /// How long the lock outlives a palisade that is cut off, at least 1s [default: the URL's, or 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    ttl: Option<Duration>,
    /// Wait at most this long for the lock [default: for ever]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    wait: Option<Duration>,
    /// Don't wait for the lock
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    /// Share the lock with others that share it: a read lock
    #[arg(long)]
    shared: bool,
    /// Take K of N permits: a semaphore
    #[arg(long, value_name = "K/N", value_parser = parse_permits, conflicts_with = "shared")]
    permits: Option<Ask>,
    /// Keep the lock, and don't return, before this much time has passed
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    at_least: Option<Duration>,
    /// The exit code when the lock was not acquired, instead of 75
    #[arg(short = 'E', long, value_name = "N")]
    conflict_exit_code: Option<u8>,
    /// Say nothing about waiting, nor about a lock that was not acquired
    #[arg(short, long)]
    quiet: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Run {
    /// Forks before it starts the runtime.
    pub(crate) fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        refuse_short("--ttl", self.ttl)?;
        let place = Place::find(global)?;
        refuse_short("the URL's ttl", place.ttl()?)?;

        let printer = global.printer();
        let mut tries = Tries::new(self.patience(), |error: &Error| {
            self.complain(error, printer);
        });
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
        let guardian = Guardian::fork(&self.command, withheld.before())?;
        on_runtime(async {
            let endings = Endings::listen()?;
            drop(withheld);
            self.guarded(guardian, &name, prepared, tries, endings, printer)
                .await
        })
    }

    /// Gets the lock, and runs the command under it.
    async fn guarded(
        &self,
        guardian: Guardian,
        name: &Name,
        prepared: Prepared,
        mut tries: Tries<impl FnOnce(&Error)>,
        mut endings: Endings,
        printer: Printer,
    ) -> Verdict {
        let client = tokio::select! {
            biased;
            signal = endings.next() => return Ok(Outcome::Interrupted(signal.as_raw())),
            connected = tries.connect(&prepared) => connected?,
        };
        let verdict = self
            .locked(guardian, name, &client, tries.left(), endings, printer)
            .await;
        // What was left to the background is done, and nothing stays behind in the engine.
        let _ = tokio::time::timeout(FAREWELL, client.end()).await;
        verdict
    }

    /// Waits for the lock, and runs the command under it.
    async fn locked(
        &self,
        guardian: Guardian,
        name: &Name,
        client: &Client,
        patience: Patience,
        mut endings: Endings,
        printer: Printer,
    ) -> Verdict {
        let mut request = client.line(name.as_str(), self.ask())?;
        if let Some(ttl) = self.ttl {
            request = request.ttl(ttl)?;
        }
        let asked = Instant::now();
        let acquired = tokio::select! {
            biased;
            signal = endings.next() => Err(signal),
            acquired = self.acquire(client, name, &request, patience, printer) => Ok(acquired),
        };
        let hold = match acquired {
            Ok(acquired) => acquired?,
            // Dropping the acquire left the line.
            Err(signal) => return Ok(Outcome::Interrupted(signal.as_raw())),
        };
        self.event(printer, || {
            json!({
                "event": "acquired",
                "name": self.name,
                "token": hold.token().to_string(),
                "owner": client.owner(),
                "engine": client.describe(),
                "waited_ms": asked.elapsed().as_millis() as u64,
            })
        });
        self.under_lock(guardian, client, hold, Signals::listen(endings), printer)
            .await
    }

    fn patience(&self) -> Patience {
        match self.wait {
            _ if self.no_wait => Patience::NoWait,
            Some(Duration::ZERO) => Patience::NoWait,
            Some(wait) => Patience::For(wait),
            None => Patience::Forever,
        }
    }

    fn ask(&self) -> Ask {
        match self.permits {
            Some(permits) => permits,
            None if self.shared => Ask::READ,
            None => Ask::Whole,
        }
    }

    /// Waits for the lock, and says so if it takes long.
    async fn acquire(
        &self,
        client: &Client,
        name: &Name,
        request: &Request,
        patience: Patience,
        printer: Printer,
    ) -> Result<Hold, Failure> {
        let notice = async {
            if !self.quiet {
                tokio::time::sleep(NOTICE_AFTER).await;
                self.say_waiting(client, name, printer).await;
            }
            std::future::pending().await
        };
        let acquired = tokio::select! {
            biased;
            acquired = request.acquire(patience) => acquired,
            never = notice => never,
        };
        let (message, quiet) = match acquired {
            Ok(Some(hold)) => return Ok(hold),
            Ok(None) => (self.too_late(), self.quiet),
            // Evicted from the line: nothing was ever held.
            Err(error) if error.kind() == Kind::Lost => (error.message().to_owned(), false),
            Err(error) => return Err(error.into()),
        };
        Err(Failure::NotAcquired {
            message,
            code: self.conflict_exit_code,
            quiet,
        })
    }

    fn too_late(&self) -> String {
        let name = shown(&self.name);
        match self.wait.filter(|wait| !wait.is_zero()) {
            None => format!("{name} is held by someone else"),
            Some(wait) => {
                let wait = humantime::format_duration(wait);
                format!("{name} was not free within {wait}")
            }
        }
    }

    fn complain(&self, error: &Error, printer: Printer) {
        if self.quiet {
            return;
        }
        let message = error.message();
        printer.event(
            json!({"event": "unreachable", "name": self.name, "message": message}),
            || Some(format!("waiting for the engine: {message}")),
        );
    }

    async fn say_waiting(&self, client: &Client, name: &Name, printer: Printer) {
        let line = look(client, name).await.ok().flatten();
        let holders = line.map_or_else(Vec::new, |line| line.holders);
        let event = json!({"event": "waiting", "name": self.name, "holders": holders});
        printer.event(event, || {
            let mut text = format!("waiting for {}", shown(&self.name));
            if let Some(first) = holders.first() {
                text.push_str(&format!(", held by {first}"));
            }
            if holders.len() > 1 {
                text.push_str(&format!(" and {} more", holders.len() - 1));
            }
            Some(text)
        });
    }

    /// Runs the command under the lock, and releases it.
    async fn under_lock(
        &self,
        guardian: Guardian,
        client: &Client,
        hold: Hold,
        signals: Result<Signals, Failure>,
        printer: Printer,
    ) -> Verdict {
        let until = Instant::now() + self.at_least.unwrap_or_default();
        let ttl = self.ttl.unwrap_or_else(|| client.ttl());
        let environment = [
            ("PALISADE_LOCK", self.name.clone()),
            ("PALISADE_TOKEN", hold.token().to_string()),
            ("PALISADE_OWNER", client.owner().to_owned()),
            ("PALISADE_ENGINE", client.describe()),
        ];
        let run = async {
            let mut signals = signals?;
            let end = self
                .run_child(guardian, &environment, &hold, ttl, &mut signals)
                .await?;
            Ok(match end {
                End::Ended(code) => keep_until(until, code, &hold, &mut signals).await,
                other => other,
            })
        };
        let code = match run.await {
            Ok(End::Ended(code)) => code,
            Ok(End::Lost(reason)) => return self.lost(hold, reason, printer),
            ended => {
                let _ = tokio::time::timeout(FAREWELL, hold.release()).await;
                return Err(ended.err().unwrap_or_else(unguarded));
            }
        };
        match hold.release().await {
            Ok(()) => {}
            Err(error) if error.kind() == Kind::Lost => return Err(error.into()),
            Err(error) => printer.event(
                json!({"event": "not_released", "name": self.name, "message": error.message()}),
                || {
                    Some(format!(
                        "not released, it ends with its ttl: {}",
                        error.message()
                    ))
                },
            ),
        }
        self.event(
            printer,
            || json!({"event": "released", "name": self.name, "code": code}),
        );
        Ok(Outcome::Child(code))
    }

    async fn run_child(
        &self,
        guardian: Guardian,
        environment: &[(&str, String)],
        hold: &Hold,
        ttl: Duration,
        signals: &mut Signals,
    ) -> Result<End, Failure> {
        let Some(program) = self.command.first() else {
            return Err(Failure::Usage("there is no command to run".into()));
        };
        let environment = environment.iter();
        let environment = environment.map(|(key, value)| ((*key).to_owned(), value.clone()));
        let start = Child::start(
            guardian,
            program,
            environment.collect(),
            hold.deadline(),
            grace(ttl),
        );
        match start.await? {
            Start::Runs(child) => Ok(supervise(child, hold, ttl, signals).await),
            Start::TooLate => Ok(End::Lost(LossReason::Expired)),
        }
    }

    /// Lets go of what is lost: an eviction is over when its victim has left.
    fn lost(&self, hold: Hold, reason: LossReason, printer: Printer) -> Verdict {
        let token = hold.token();
        drop(hold);
        self.event(
            printer,
            || json!({"event": "lost", "name": self.name, "reason": reason.code()}),
        );
        let why = match reason {
            LossReason::Expired => "its lease was not renewed in time",
            LossReason::Evicted => "an operator evicted it",
            _ => "it was taken away",
        };
        let name = shown(&self.name);
        let message = format!("lost {name} (token {token}): {why}; the command was ended");
        Err(Failure::Lost(message))
    }

    /// Reports an event to a program that reads the JSON; people hear of waiting and failing only.
    fn event(&self, printer: Printer, event: impl FnOnce() -> serde_json::Value) {
        if printer.json && !self.quiet {
            printer.event(event(), || None);
        }
    }
}

/// Keeps the lock until then. A signal cuts it short.
async fn keep_until(until: Instant, code: u8, hold: &Hold, signals: &mut Signals) -> End {
    while Instant::now() < until {
        tokio::select! {
            biased;
            loss = hold.lost() => return End::Lost(loss.reason),
            () = tokio::time::sleep_until(until) => {}
            event = signals.next() => match event {
                Event::Ending(_) => break,
                Event::Stop => crate::terminal::stop(crate::terminal::Stop::Us),
                Event::Resumed => {}
            }
        }
    }
    match hold.is_valid() {
        true => End::Ended(code),
        false => End::Lost(LossReason::Expired),
    }
}

fn refuse_short(what: &str, ttl: Option<Duration>) -> Result<(), Failure> {
    match ttl {
        Some(ttl) if ttl < SHORTEST_TTL => Err(Failure::Usage(format!(
            "{what} is too short: a command needs at least 1s to be ended in when its lock is lost"
        ))),
        _ => Ok(()),
    }
}
