//! `palisade demo`: the zombie, with nothing to set up.
//!
//! Two workers, real processes, deposit into one account under one lock. The first is stopped
//! (SIGSTOP) between its read and its write, past its ttl; the second gets the lock and deposits;
//! the first is resumed and writes what it had worked out. A plain file loses the second deposit;
//! a fenced file refuses the first one's old token. Each step waits for the one before it, so
//! the end is the same in every run, however slow the machine.

mod story;
mod worker;

use std::time::Duration;

use palisade::{Kind, Name, Scope};
use rustix::process::Signal;
use serde::Serialize;

use self::story::{Moment, Story};
use self::worker::Worker;
use crate::args::Global;
use crate::exit::{Failure, Outcome, Verdict};
use crate::signals::Endings;

const START: u64 = 100;
const FIRST: u64 = 10;
const SECOND: u64 = 50;

/// Short enough to watch, long enough to read what happened meanwhile.
const TTL: Duration = Duration::from_secs(3);
const FAST_TTL: Duration = Duration::from_millis(300);

/// Watch a paused lock holder come back as a zombie, and a fencing token stop it
///
/// Needs nothing: two workers on the embedded engine, in a temporary folder that is removed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade demo\n  palisade demo --fast --json")]
pub(crate) struct Demo {
    /// With a ttl of 0.3 s instead of 3 s
    #[arg(long)]
    fast: bool,
    /// What a worker of another demo is told; not for people
    #[arg(long, hide = true, value_name = "AMOUNT,DIR")]
    worker_of: Option<String>,
}

/// How it ended.
#[derive(Debug, Serialize)]
struct End {
    ttl_ms: u64,
    first_token: String,
    second_token: String,
    unfenced: Account,
    fenced: Account,
    timeline: Vec<Moment>,
}

#[derive(Debug, Serialize)]
struct Account {
    expected: u64,
    found: Option<u64>,
    intact: bool,
}

impl Account {
    fn of(data: &[u8]) -> Self {
        let expected = START + SECOND;
        let found = std::str::from_utf8(data)
            .ok()
            .and_then(|text| text.trim().parse().ok());
        Self {
            expected,
            found,
            intact: found == Some(expected),
        }
    }
}

impl Demo {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        if let Some(told) = &self.worker_of {
            return worker::serve(told).await;
        }
        let ttl = if self.fast { FAST_TTL } else { TTL };
        let mut endings = Endings::listen()?;
        let story = Story::new(global.printer());
        let end = tokio::select! {
            biased;
            // What is dropped here kills the workers and removes the folder.
            signal = endings.next() => return Ok(Outcome::Interrupted(signal.as_raw())),
            end = play(ttl, story) => end?,
        };
        let wrong = !end.fenced.intact;
        global.printer().answer(&end, End::text)?;
        match wrong {
            true => Err(Failure::Defect("the fenced file is wrong".into())),
            false => Ok(Outcome::Done),
        }
    }
}

async fn play(ttl: Duration, mut story: Story) -> Result<End, Failure> {
    let folder = tempfile::tempdir().map_err(failed("can't make a temporary folder"))?;
    let stage = worker::Stage::new(folder.path(), ttl);
    stage.set(START).await?;
    let client = palisade::connect(&stage.url()).await?;
    story.tell(
        None,
        &format!("an account of {START}, in a plain file and in a fenced file"),
    )?;

    let mut first = Worker::start(&stage, FIRST)?;
    let first_token = first.hears("granted").await?;
    let text = format!(
        "has the lock with token {first_token}; reads {START}, is about to write {}",
        START + FIRST
    );
    story.tell(Some("first"), &text)?;

    // A process that is stopped inside the store would keep everyone out: not what this is
    // about, so it gets another moment.
    let name = Name::new(worker::LOCK)?;
    loop {
        first.signal(Signal::STOP)?;
        match client.survey(Scope::Line(name.clone())).await {
            Ok(_) => break,
            Err(error) if error.kind() == Kind::Unreachable => {
                first.signal(Signal::CONT)?;
                tokio::time::sleep(ttl / 10).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let shown = humantime::format_duration(ttl);
    story.tell(
        Some("first"),
        &format!("is paused, as by a long garbage collection; its lease of {shown} runs out"),
    )?;

    let mut second = Worker::start(&stage, SECOND)?;
    let second_token = second.hears("granted").await?;
    story.tell(
        Some("second"),
        &format!("gets the lock with the greater token {second_token}; reads {START}"),
    )?;
    second.says("write").await?;
    second.hears("plain").await?;
    let verdict = second.hears("fenced").await?;
    story.tell(
        Some("second"),
        &format!(
            "writes {} to the plain file; the fenced file says {verdict}",
            START + SECOND
        ),
    )?;
    second.ends().await?;

    first.signal(Signal::CONT)?;
    story.tell(
        Some("first"),
        "is resumed, and does not know that it slept: a zombie",
    )?;
    first.says("write").await?;
    first.hears("plain").await?;
    story.tell(
        Some("first"),
        &format!(
            "writes {} to the plain file: the deposit of {SECOND} is gone",
            START + FIRST
        ),
    )?;
    let verdict = first.hears("fenced").await?;
    story.tell(
        Some("first"),
        &format!(
            "offers {} with token {first_token} to the fenced file, which says {verdict}",
            START + FIRST
        ),
    )?;
    first.hears("valid false").await?;
    story.tell(Some("first"), "looks at its hold, and sees that it is lost")?;
    first.ends().await?;
    let _ = tokio::time::timeout(Duration::from_secs(2), client.close()).await;

    let (unfenced, fenced) = stage.read().await?;
    Ok(End {
        ttl_ms: ttl.as_millis() as u64,
        first_token,
        second_token,
        unfenced: Account::of(&unfenced),
        fenced: Account::of(&fenced),
        timeline: story.moments,
    })
}

impl End {
    fn text(&self) -> String {
        let line = |what: &str, account: &Account| {
            let found = account
                .found
                .map_or_else(|| "nothing".to_owned(), |found| found.to_string());
            let verdict = match account.intact {
                true => "right",
                false => "wrong: a deposit was lost",
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

/// What the system refused.
fn failed(what: &'static str) -> impl Fn(std::io::Error) -> Failure {
    move |error| Failure::Start(format!("{what}: {error}"))
}
