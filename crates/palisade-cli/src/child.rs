//! `Child`: the command that runs while the lock is held, in a process group of its own, as
//! palisade sees it. The guardian is its parent and ends it on loss; palisade passes signals on,
//! and lends it the terminal.
//!
//! What the command left in its group runs on after a normal end; after a loss all that it started
//! has been killed.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use palisade::BootTime;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use rustix::time::Timespec;

use crate::exit::{self, Failure};
use crate::guardian::{Guardian, Report};
use crate::proc::Process;
use crate::terminal::{Stop, Terminal, stop};

/// A started command.
pub(crate) struct Child<'a> {
    guardian: &'a mut Guardian,
    group: Pid,
    terminal: Terminal,
    /// Whether the child gets the terminal when it goes on: it wants it, or had it before all of
    /// us were stopped.
    gets_terminal: bool,
    /// How often the child was told to go on.
    resumed: u32,
    /// Tells whether the child has ended; `None` when it had before we asked.
    pidfd: Option<OwnedFd>,
    /// Whether it is one of several: then it has no part in the terminal, and its stop is not ours.
    one_of_several: bool,
}

/// How the start of a command went.
pub(crate) enum Start<'a> {
    /// It runs.
    Runs(Child<'a>),
    /// It was too late for it: the lock is lost, or will be in a moment.
    TooLate,
}

/// What became of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// It is stopped.
    Stopped {
        /// Because it used the terminal without having it.
        wants_terminal: bool,
    },
    /// It has ended by itself, and its exit code is this.
    Ended(u8),
    /// The guardian has ended it, and all that it started.
    Killed,
    /// The guardian is gone. The child may still run.
    Unguarded,
}

impl<'a> Child<'a> {
    /// Has `guardian` start its command, called `program`, with `environment` added to ours. One
    /// with a file as its stdin is one of several.
    pub(crate) async fn start(
        guardian: &'a mut Guardian,
        program: &OsStr,
        environment: Vec<(String, String)>,
        stdin: Option<String>,
        deadline: BootTime,
        grace: Duration,
    ) -> Result<Start<'a>, Failure> {
        let mut terminal = Terminal::default();
        let one_of_several = stdin.is_some();
        let foreground = !one_of_several && terminal.offer();
        guardian.start(environment, stdin, foreground, deadline, grace)?;
        let report = guardian.report().await;
        if let Some(Report::Started(pid)) = report
            && let Some(group) = Pid::from_raw(pid)
        {
            return Ok(Start::Runs(Self {
                guardian,
                group,
                terminal,
                gets_terminal: false,
                resumed: 0,
                pidfd: pidfd_open(group, PidfdFlags::empty()).ok(),
                one_of_several,
            }));
        }
        // It may have been taken before the start failed.
        terminal.take_back();
        match report {
            Some(Report::NotStarted(errno)) => Err(not_started(program, errno)),
            Some(Report::Lost) => Ok(Start::TooLate),
            _ => {
                guardian.replace(None);
                Err(unguarded())
            }
        }
    }

    /// Says until when the lock is held.
    pub(crate) fn renewed(&self, deadline: BootTime) {
        self.guardian.renewed(deadline);
    }

    /// Says that the lock is lost: all that the child started must have ended before `by`.
    pub(crate) fn end_by(&self, by: BootTime) {
        self.guardian.end_by(by);
    }

    /// Sends a signal to the whole group. Not by the guardian: a terminal's next key must not
    /// overtake it.
    pub(crate) fn signal(&self, signal: Signal) {
        // Its guardian reaps it when it has ended, and then its number may become anyone's.
        if self.runs() {
            let _ = kill_process_group(self.group, signal);
        }
    }

    fn runs(&self) -> bool {
        self.pidfd.as_ref().is_some_and(|pidfd| {
            let mut ended = [PollFd::new(pidfd, PollFlags::IN)];
            poll(&mut ended, Some(&Timespec::default())) == Ok(0)
        })
    }

    fn is_stopped(&self) -> bool {
        Process::read(self.group.as_raw_pid()).is_some_and(|process| process.is_stopped())
    }

    /// What becomes of the child next.
    ///
    /// # Cancellation
    /// No change is missed.
    pub(crate) async fn change(&self) -> Change {
        loop {
            return match self.guardian.report().await {
                // It was told to go on since. What comes after that has a report of its own.
                Some(Report::Stopped { resumed, .. })
                    if resumed != self.resumed || !self.is_stopped() =>
                {
                    continue;
                }
                Some(Report::Stopped { signal, .. }) => Change::Stopped {
                    wants_terminal: matches!(signal, libc::SIGTTIN | libc::SIGTTOU),
                },
                Some(Report::Ended(status)) => Change::Ended(code_of(status)),
                Some(Report::Lost) => Change::Killed,
                Some(Report::Started(_) | Report::NotStarted(_)) => continue,
                None => Change::Unguarded,
            };
        }
    }

    /// Follows a child that was stopped: if it only wants the terminal and can have it, it may go
    /// on; else all of us stop, and go on when the shell says so. Answers whether the child is to
    /// be resumed, if the lock still allows it: without a terminal its stop is not our business.
    pub(crate) fn follow_stop(&mut self, wants_terminal: bool) -> bool {
        if self.one_of_several {
            return false;
        }
        if wants_terminal && self.terminal.is_ours() {
            self.gets_terminal = true;
            return true;
        }
        if !self.terminal.exists() {
            return false;
        }
        self.gets_terminal = self.terminal.take_back();
        stop(Stop::OurGroup);
        true
    }

    /// Stops the child and us, as the terminal asks.
    pub(crate) fn stop_with_us(&mut self) {
        self.signal(Signal::TSTP);
        self.gets_terminal = self.terminal.take_back();
        stop(Stop::Us);
    }

    /// Lets the child go on.
    pub(crate) fn resume(&mut self) {
        // First, so that a stop that follows is known for a new one.
        self.resumed += 1;
        self.guardian.resumed(self.resumed);
        if std::mem::take(&mut self.gets_terminal) {
            self.terminal.give(self.group);
        }
        // Nothing in between: this undoes a Ctrl-Z that comes before it.
        self.signal(Signal::CONT);
    }

    /// Takes leave of a child that has ended by itself.
    pub(crate) fn dismiss(mut self) {
        self.terminal.take_back();
    }

    /// Takes leave of a child that was killed and could not tidy up.
    pub(crate) fn bury(mut self) {
        self.terminal.take_back_and_tidy();
    }

    /// Kills all that the child started, and its guardian, which is gone or does not answer.
    pub(crate) fn kill(&mut self) {
        self.guardian.replace(Some(self.group));
    }
}

/// The failure when a guardian is gone that nobody told to go.
pub(crate) fn unguarded() -> Failure {
    let why = "the guardian of the command was killed, so the command was ended";
    Failure::Defect(why.into())
}

fn code_of(status: i32) -> u8 {
    let status = ExitStatus::from_raw(status);
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, Some(signal)) => exit::of_signal(signal),
        (None, None) => u8::MAX,
    }
}

fn not_started(program: &OsStr, errno: i32) -> Failure {
    let error = io::Error::from_raw_os_error(errno);
    let missing = error.kind() == io::ErrorKind::NotFound;
    let shown = program.to_string_lossy();
    let why = if missing {
        "command not found".to_owned()
    } else {
        format!("can't be executed: {error}")
    };
    Failure::Command {
        message: format!("{}: {why}", shown.escape_debug()),
        missing,
    }
}
