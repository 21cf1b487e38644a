//! `Worker`: this command as a child process that gets orders as lines on its stdin and answers
//! with lines on its stdout: a waiter of `bench`, a depositor of `demo`.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::exit::{Failure, refused};

/// No answer takes this long: a worker that is silent for this time has failed.
const LONGEST: Duration = Duration::from_secs(60);

/// A worker. It is killed when this is dropped, even if it is stopped.
pub(crate) struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    /// The URL, which may hold a secret, is in its environment and not among its arguments.
    pub(crate) fn start(args: &[&str], url: &str) -> Result<Self, Failure> {
        let mut child = Command::new("/proc/self/exe")
            .args(args)
            .env("PALISADE_URL", url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(refused("can't start a worker"))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::Defect("a worker without pipes".into()));
        };
        let lines = BufReader::new(stdout).lines();
        Ok(Self {
            child,
            stdin,
            lines,
        })
    }

    pub(crate) async fn tell(&mut self, line: &str) -> Result<(), Failure> {
        let told = self.stdin.write_all(format!("{line}\n").as_bytes()).await;
        told.map_err(refused("a worker ended early"))
    }

    /// Its next line; `None` when it has ended or does not answer.
    pub(crate) async fn line(&mut self) -> Option<String> {
        let line = tokio::time::timeout(LONGEST, self.lines.next_line()).await;
        line.ok()?.ok()?
    }

    pub(crate) fn signal(&self, signal: Signal) -> Result<(), Failure> {
        let pid = self
            .child
            .id()
            .and_then(|pid| Pid::from_raw(pid.cast_signed()));
        let sent = pid.ok_or(rustix::io::Errno::SRCH);
        let sent = sent.and_then(|pid| kill_process(pid, signal));
        sent.map_err(|error| refused("can't signal a worker")(error.into()))
    }

    /// Closes its stdin; returns whether it ended successfully within this time.
    pub(crate) async fn end(mut self, within: Duration) -> bool {
        drop(self.stdin);
        let ended = tokio::time::timeout(within, self.child.wait()).await;
        matches!(ended, Ok(Ok(status)) if status.success())
    }
}

/// Makes the kernel kill this worker when its parent ends: a stopped or busy worker would outlive
/// it.
pub(crate) fn tie_to_parent() -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| refused("can't tie a worker to its parent")(error.into()))
}
