//! The two workers of the demo: this command again, told what to do by lines on stdin.
//!
//! A worker gets the lock, reads the accounts, says `granted TOKEN`, and waits for `write`. Then
//! it writes what it worked out, first to the plain file, then to the fenced one with its token,
//! and looks at its hold only afterwards: that is the mistake that every program can make.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use palisade::fence::{Fence, FileFence, Verdict as Judged};
use palisade::{Kind, Name, Token};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::failed;
use crate::exit::{Failure, Outcome, Verdict};

pub(super) const LOCK: &str = "account";

/// No step takes this long; one that does has failed.
const LONGEST: Duration = Duration::from_secs(60);

/// Where it plays: the locks, a plain file and a fenced one.
pub(super) struct Stage {
    dir: PathBuf,
    ttl: Duration,
}

impl Stage {
    pub(super) fn new(dir: &Path, ttl: Duration) -> Self {
        let dir = dir.to_owned();
        Self { dir, ttl }
    }

    pub(super) fn url(&self) -> String {
        // What means something in a URL is written out.
        let store = self.dir.join("store").display().to_string();
        let store = store
            .replace('%', "%25")
            .replace('?', "%3F")
            .replace('#', "%23");
        format!("file:{store}?ttl={}ms", self.ttl.as_millis())
    }

    fn plain(&self) -> PathBuf {
        self.dir.join("plain")
    }

    fn fence(&self) -> Result<FileFence, Failure> {
        Ok(FileFence::open(self.dir.join("fenced"))?)
    }

    /// Opens the account.
    pub(super) async fn set(&self, balance: u64) -> Result<(), Failure> {
        let balance = balance.to_string().into_bytes();
        std::fs::write(self.plain(), &balance).map_err(failed("can't write the plain file"))?;
        self.fence()?
            .write(&Name::new(LOCK)?, Token(0), balance)
            .await?;
        Ok(())
    }

    /// What is in the plain and in the fenced file.
    pub(super) async fn read(&self) -> Result<(Vec<u8>, Vec<u8>), Failure> {
        let plain = std::fs::read(self.plain()).map_err(failed("can't read the plain file"))?;
        let fenced = self.fence()?.read(&Name::new(LOCK)?).await?;
        Ok((plain, fenced.map(|fenced| fenced.data).unwrap_or_default()))
    }
}

/// A worker, as its director sees it. Killed when it is dropped, also while it is stopped.
pub(super) struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    pub(super) fn start(stage: &Stage, amount: u64) -> Result<Self, Failure> {
        let mut child = Command::new("/proc/self/exe")
            .arg("demo")
            .arg(format!("--worker-of={amount},{}", stage.dir.display()))
            .env("PALISADE_URL", stage.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed("can't start a worker"))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::Defect("a worker without pipes".into()));
        };
        Ok(Self {
            child,
            stdin,
            lines: BufReader::new(stdout).lines(),
        })
    }

    /// Waits for its next line, which begins so, and answers with the rest of it.
    pub(super) async fn hears(&mut self, beginning: &str) -> Result<String, Failure> {
        let line = tokio::time::timeout(LONGEST, self.lines.next_line()).await;
        let line = line.ok().and_then(Result::ok).flatten();
        let rest = line
            .as_deref()
            .and_then(|line| line.strip_prefix(beginning));
        rest.map(|rest| rest.trim().to_owned()).ok_or_else(|| {
            let line = line.as_deref().unwrap_or("nothing");
            Failure::Defect(format!(
                "a worker was to say {beginning:?} and said {line:?}"
            ))
        })
    }

    pub(super) async fn says(&mut self, line: &str) -> Result<(), Failure> {
        let said = self.stdin.write_all(format!("{line}\n").as_bytes()).await;
        said.map_err(failed("a worker ended early"))
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<(), Failure> {
        let pid = self
            .child
            .id()
            .and_then(|pid| Pid::from_raw(pid.cast_signed()));
        let sent = pid
            .ok_or(rustix::io::Errno::SRCH)
            .and_then(|pid| kill_process(pid, signal));
        sent.map_err(|error| failed("can't pause a worker")(error.into()))
    }

    pub(super) async fn ends(mut self) -> Result<(), Failure> {
        drop(self.stdin);
        let ended = tokio::time::timeout(LONGEST, self.child.wait()).await;
        match ended {
            Ok(Ok(status)) if status.success() => Ok(()),
            _ => Err(Failure::Defect("a worker did not end as it should".into())),
        }
    }
}

/// What a worker does.
pub(super) async fn serve(told: &str) -> Verdict {
    // A worker that is stopped would outlive a demo that is killed.
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| failed("can't tie a worker to the demo")(error.into()))?;
    let wrong = || Failure::Usage("--worker-of is for palisade itself".into());
    let (amount, dir) = told.split_once(',').ok_or_else(wrong)?;
    let amount: u64 = amount.parse().map_err(|_| wrong())?;
    let stage = Stage::new(Path::new(dir), Duration::ZERO);
    let url = crate::config::url(None)?;
    let client = palisade::connect(&url).await?;
    let hold = client.mutex(LOCK).lock().await?;
    let (plain, fenced) = stage.read().await?;
    say(&format!("granted {}", hold.token()))?;

    // Blocking is fine: the keeper has a thread of its own.
    let mut line = String::new();
    std::io::stdin()
        .read_line(&mut line)
        .map_err(failed("can't hear the demo"))?;
    if line.trim() != "write" {
        return Ok(Outcome::Done);
    }
    let deposit = |data: &[u8]| {
        let balance = std::str::from_utf8(data)
            .ok()
            .and_then(|text| text.parse::<u64>().ok());
        let balance = balance.ok_or_else(|| Failure::Defect("the account is damaged".into()));
        balance.map(|balance| (balance + amount).to_string().into_bytes())
    };
    std::fs::write(stage.plain(), deposit(&plain)?)
        .map_err(failed("can't write the plain file"))?;
    say("plain")?;
    let fence = stage.fence()?;
    let judged = fence
        .write(&Name::new(LOCK)?, hold.token(), deposit(&fenced)?)
        .await?;
    say(&match judged {
        Judged::Accepted => "fenced accepted".to_owned(),
        Judged::Stale { highest } => format!("fenced stale: it has seen {highest}"),
    })?;
    if !hold.is_valid() {
        say("valid false")?;
    }
    match hold.release().await {
        Err(error) if error.kind() != Kind::Lost => Err(error.into()),
        _ => Ok(Outcome::Done),
    }
}

fn say(line: &str) -> Result<(), Failure> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
