//! A writer that is stopped between its check and its write, on every kind of fenced store.
//!
//! Two holders add a line to one [`Ledger`]: read it, add, write it back. The first, a separate
//! process ([`writer`]), stops itself (SIGSTOP) after it has read and checked its lock. Then
//! [`rounds`] takes its lock away, and lets a second holder work.
//!
//! - The first is continued when the second has written: with the fence its write must be refused;
//!   without it, the second holder's line must be lost.
//! - The first is continued *between* the second's read and its write: if the second took, the
//!   first must be refused; if it only read, the first's line is accepted, and must be lost.

pub mod ledger;
pub mod writer;

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use palisade::{Client, Eviction, Which};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

pub use ledger::{Kind, Ledger, Wrote};
pub use writer::Spec;

/// The results of all rounds.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Score {
    /// Late writes that were refused.
    pub refused: usize,
    /// Lines that were accepted, and lost.
    pub lost: usize,
}

/// The writer process, driven by the harness.
struct Writer {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Writer {
    fn start(program: &Path, spec: &Spec) -> Result<Self, String> {
        let words = |error: std::io::Error| error.to_string();
        let spec = serde_json::to_string(spec).map_err(|error| error.to_string())?;
        let mut child = Command::new(program)
            .args(["fence-writer", &spec])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(words)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("the writer has no pipes".into());
        };
        let lines = BufReader::new(stdout).lines();
        Ok(Self {
            child,
            stdin,
            lines,
        })
    }

    fn pid(&self) -> Result<Pid, String> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        pid.ok_or_else(|| "no process id".to_owned())
    }

    fn tell(&mut self, word: &str) -> Result<(), String> {
        let told = writeln!(self.stdin, "{word}").and_then(|()| self.stdin.flush());
        told.map_err(|error| error.to_string())
    }

    fn hear(&mut self) -> Result<String, String> {
        match self.lines.next() {
            Some(line) => line.map_err(|error| error.to_string()),
            None => Err("the writer has ended; see its stderr".into()),
        }
    }

    /// Waits until it has stopped itself.
    fn stopped(&self) -> Result<(), String> {
        let status = waitpid(Some(self.pid()?), WaitOptions::UNTRACED);
        match status.map_err(|error| error.to_string())? {
            Some((_, status)) if status.stopped() => Ok(()),
            other => Err(format!("the writer did not stop: {other:?}")),
        }
    }

    /// Continues it. Fails if something else has continued it before, because then it was not
    /// stopped while the second holder wrote.
    fn go_on(&self) -> Result<(), String> {
        let options = WaitOptions::CONTINUED | WaitOptions::NOHANG;
        let early = waitpid(Some(self.pid()?), options).map_err(|error| error.to_string())?;
        if let Some((_, status)) = early {
            return Err(format!("somebody else continued the writer: {status:?}"));
        }
        kill_process(self.pid()?, Signal::CONT).map_err(|error| error.to_string())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `rounds` rounds. `program` is the testkit's command.
///
/// # Errors
/// A message if a round could not be run, or ended in an impossible way.
pub async fn rounds(program: &Path, spec: &Spec, rounds: usize) -> Result<Score, String> {
    let words = |error: palisade::Error| format!("{error:?}");
    let client = palisade::connect(&spec.url).await.map_err(words)?;
    let mut ledger = Ledger::open(spec, true).await?;
    let mut writer = Writer::start(program, spec)?;
    let mut score = Score::default();
    for round in 0..rounds {
        writer.tell("go")?;
        // It has read, and its lock is valid.
        writer.stopped()?;
        let line = format!("second-{round}");
        let mut said = None;
        let between = async || {
            if spec.between {
                writer.go_on()?;
                said = Some(writer.hear()?);
            }
            Ok(())
        };
        let token = second(&client, spec, &mut ledger, &line, between).await?;
        let said = match said {
            Some(said) => said,
            None => {
                writer.go_on()?;
                writer.hear()?
            }
        };
        let kept = ledger.read().await?;
        let has = |line: &str| kept.lines().any(|kept| kept == line);
        let is_there = has(&line);
        let (said, late) = said.split_once(' ').unwrap_or((&said, ""));
        if spec.between {
            let first = format!("first-{round}");
            if !is_there || said == "refused" && has(&first) {
                return Err(format!("round {round}: {said}, and kept are {kept:?}"));
            }
            score.refused += usize::from(said == "refused");
            score.lost += usize::from(said == "written" && !has(&first));
            continue;
        }
        match said {
            "refused" => score.refused += 1,
            "written" if spec.fenced => {
                let last: Vec<&str> = kept.lines().rev().take(4).collect();
                return Err(format!(
                    "round {round}: the late write was accepted with token {late} after {token}; the \
                     last lines are {last:?}"
                ));
            }
            "written" => {}
            other => return Err(format!("round {round}: the writer said {other:?}")),
        }
        if said == "refused" && !is_there {
            return Err(format!(
                "round {round}: refused, and yet the data is changed"
            ));
        }
        score.lost += usize::from(!is_there);
    }
    Ok(score)
}

/// The second holder: takes the lock away from the stopped one, and writes.
async fn second(
    client: &Client,
    spec: &Spec,
    ledger: &mut Ledger,
    line: &str,
    between: impl AsyncFnOnce() -> Result<(), String>,
) -> Result<u64, String> {
    let words = |error: palisade::Error| format!("{error:?}");
    let evicted = client.evict(&spec.name, Which::Holders, Eviction::Remove);
    evicted.await.map_err(words)?;
    let hold = client.mutex(&spec.name).lock().await.map_err(words)?;
    let written = ledger.add(&hold, line, between).await?;
    if written != Wrote::Done {
        return Err("the second holder's write was refused".into());
    }
    let token = hold.token().0;
    hold.release().await.map_err(words)?;
    Ok(token)
}
