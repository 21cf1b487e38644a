//! `palisade demo`: a paused holder that writes late (a zombie), with nothing to set up.
//!
//! Two workers, real processes, deposit into one account under one lock. The first is stopped
//! (SIGSTOP) between its read and its write, past its ttl; the second gets the lock and deposits;
//! the first is resumed and writes the balance that it had computed. A plain file loses the second
//! deposit; a fenced file refuses the first worker's old token. Each step waits for the one before
//! it, so the result is the same in every run, however slow the machine.

mod account;

use std::time::{Duration, Instant};

use palisade::report::Scope;
use palisade::{ErrorKind, Name};
use rustix::process::Signal;
use serde::Serialize;

use self::account::{Account, LOCK};
use crate::args::Global;
use crate::exit::{Failure, Outcome, Verdict, refused};
use crate::print::{self, Printer};
use crate::signals::Endings;
use crate::worker::Worker;

const START: u64 = 100;
const FIRST: u64 = 10;
const SECOND: u64 = 50;

/// Short enough to watch, long enough to read what happened meanwhile.
const TTL: Duration = Duration::from_secs(3);
const FAST_TTL: Duration = Duration::from_millis(300);

/// A worker that has not ended by then has failed.
const LONGEST: Duration = Duration::from_secs(60);

/// An engine that does not answer must not keep palisade from ending.
const FAREWELL: Duration = Duration::from_secs(2);

/// Watch a paused lock holder come back as a zombie, and a fencing token stop it
///
/// Needs no setup: two workers use the embedded engine, in a temporary folder that is removed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade demo\n  palisade demo --fast --json")]
pub(crate) struct Demo {
    /// Use a ttl of 0.3 s instead of 3 s
    #[arg(long)]
    fast: bool,
    /// Arguments for a worker of another demo; not for people
    #[arg(long, hide = true, value_name = "AMOUNT,DIR")]
    worker_of: Option<String>,
}

/// How it ended.
#[derive(Debug, Serialize)]
struct End {
    ttl_ms: u64,
    first_token: String,
    second_token: String,
    unfenced: Balance,
    fenced: Balance,
    timeline: Vec<Moment>,
}

#[derive(Debug, Serialize)]
struct Balance {
    expected: u64,
    found: Option<u64>,
    intact: bool,
}

impl Balance {
    fn of(found: Option<u64>) -> Self {
        let expected = START + SECOND;
        let intact = found == Some(expected);
        Self {
            expected,
            found,
            intact,
        }
    }
}

/// One moment of the timeline.
#[derive(Debug, Serialize)]
struct Moment {
    at_ms: u64,
    /// The first or the second depositor.
    who: Option<&'static str>,
    what: String,
}

/// The timeline: printed as it happens, and kept for the JSON document.
struct Story {
    began: Instant,
    printer: Printer,
    moments: Vec<Moment>,
}

impl Story {
    fn tell(&mut self, who: Option<&'static str>, what: String) -> Result<(), Failure> {
        let at = self.began.elapsed();
        if !self.printer.json {
            let (seconds, name) = (at.as_secs_f64(), who.unwrap_or_default());
            print::text(&format!("{seconds:>5.1} s  {name:<7} {what}\n"))?;
        }
        let at_ms = at.as_millis() as u64;
        self.moments.push(Moment { at_ms, who, what });
        Ok(())
    }

    fn first(&mut self, what: String) -> Result<(), Failure> {
        self.tell(Some("first"), what)
    }

    fn second(&mut self, what: String) -> Result<(), Failure> {
        self.tell(Some("second"), what)
    }
}

impl Demo {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        if let Some(told) = &self.worker_of {
            return account::deposit(told).await;
        }
        if global.url.is_some() {
            let message = "the demo has an engine of its own, in a temporary folder; omit --url";
            return Err(Failure::Usage(message.into()));
        }
        let ttl = if self.fast { FAST_TTL } else { TTL };
        let mut endings = Endings::listen()?;
        let story = Story {
            began: Instant::now(),
            printer: global.printer(),
            moments: Vec::new(),
        };
        let end = tokio::select! {
            biased;
            // Dropping the future kills the workers and removes the folder.
            signal = endings.next() => return Err(Failure::Interrupted(signal.as_raw())),
            end = play(ttl, story) => end?,
        };
        global.printer().answer(&end, End::text)?;
        if end.fenced.intact {
            Ok(Outcome::Done)
        } else {
            Err(Failure::Defect("the fenced file is wrong".into()))
        }
    }
}

async fn play(ttl: Duration, mut story: Story) -> Result<End, Failure> {
    let folder = tempfile::tempdir().map_err(refused("can't make a temporary folder"))?;
    let account = Account(folder.path());
    account.open(START).await?;
    // Characters that have a meaning in a URL are percent-encoded.
    let store = folder.path().join("store").display().to_string();
    let store = store
        .replace('%', "%25")
        .replace('?', "%3F")
        .replace('#', "%23");
    let url = format!("file:{store}?ttl={}ms", ttl.as_millis());
    let client = palisade::connect(&url).await?;
    let start = |amount: u64| {
        let told = format!("--worker-of={amount},{}", folder.path().display());
        Worker::start(&["demo", &told], &url)
    };
    story.tell(
        None,
        format!("an account of {START}, in a plain file and in a fenced file"),
    )?;

    let mut first = start(FIRST)?;
    let first_token = hears(&mut first, "granted").await?;
    let after = START + FIRST;
    story.first(format!(
        "has the lock with token {first_token}; reads {START}, is about to write {after}"
    ))?;

    // A process that is stopped inside the store would block everyone, which is not the subject
    // here: it is resumed for another moment.
    let name = Name::new(LOCK)?;
    loop {
        first.signal(Signal::STOP)?;
        match client.survey(Scope::Line(name.clone())).await {
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::Unreachable => {
                first.signal(Signal::CONT)?;
                tokio::time::sleep(ttl / 10).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let lease = humantime::format_duration(ttl);
    story.first(format!(
        "is paused, as by a long garbage collection; its lease of {lease} runs out"
    ))?;

    let mut second = start(SECOND)?;
    let second_token = hears(&mut second, "granted").await?;
    story.second(format!(
        "gets the lock with the greater token {second_token}; reads {START}"
    ))?;
    second.tell("write").await?;
    hears(&mut second, "plain").await?;
    let verdict = hears(&mut second, "fenced").await?;
    let sum = START + SECOND;
    story.second(format!(
        "writes {sum} to the plain file; the fenced file says {verdict}"
    ))?;
    ends(second).await?;

    first.signal(Signal::CONT)?;
    story.first("is resumed, and does not know that it was paused: a zombie".into())?;
    first.tell("write").await?;
    hears(&mut first, "plain").await?;
    story.first(format!(
        "writes {after} to the plain file: the deposit of {SECOND} is gone"
    ))?;
    let verdict = hears(&mut first, "fenced").await?;
    story.first(format!(
        "offers {after} with token {first_token} to the fenced file, which says {verdict}"
    ))?;
    hears(&mut first, "valid false").await?;
    story.first("checks its hold, and finds that it is lost".into())?;
    ends(first).await?;
    let _ = tokio::time::timeout(FAREWELL, client.close()).await;

    let (unfenced, fenced) = account.read().await?;
    Ok(End {
        ttl_ms: ttl.as_millis() as u64,
        first_token,
        second_token,
        unfenced: Balance::of(unfenced),
        fenced: Balance::of(fenced),
        timeline: story.moments,
    })
}

/// The rest of the next line, which must start with `beginning`.
async fn hears(worker: &mut Worker, beginning: &str) -> Result<String, Failure> {
    let line = worker.line().await.unwrap_or_default();
    let rest = line
        .strip_prefix(beginning)
        .map(|rest| rest.trim().to_owned());
    rest.ok_or_else(|| {
        Failure::Defect(format!(
            "expected {beginning:?} from a worker, got {line:?} (bug)"
        ))
    })
}

async fn ends(worker: Worker) -> Result<(), Failure> {
    if worker.end(LONGEST).await {
        Ok(())
    } else {
        Err(Failure::Defect("a worker did not end as it should".into()))
    }
}

impl End {
    fn text(&self) -> String {
        let line = |what: &str, account: &Balance| {
            let found = account
                .found
                .map_or_else(|| "nothing".to_owned(), |found| found.to_string());
            let verdict = if account.intact {
                "right"
            } else {
                "wrong: a deposit was lost"
            };
            format!("{what:<12} {found:>4}   {verdict}\n")
        };
        format!(
            "\n{}{}\nThe lock did its part in both: one holder at a time, and the first was told. But no lock\n\
             can stop a process that is paused between its last look and its write; only the storage\n\
             can. Give it the token with every write ($PALISADE_TOKEN, hold.token()), and let it refuse\n\
             lower ones: palisade::fence, or `palisade fence check`.\n",
            line("plain file", &self.unfenced),
            line("fenced file", &self.fenced),
        )
    }
}
