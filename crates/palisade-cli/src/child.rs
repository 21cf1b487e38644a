//! `Child`: palisade's view of the command that runs while the lock is held, in its own process
//! group. The guardian is its parent and ends it on loss; palisade passes signals on, and lends it
//! the terminal.
//!
//! Processes that the command left in its group keep running after its normal end; after a loss
//! everything that it started has been killed.

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
    /// Whether the child gets the terminal when it is resumed: it was stopped for want of it, or
    /// had it before the whole job was stopped.
    gets_terminal: bool,
    /// How often the child was resumed.
    resumed: u32,
    /// A pidfd that shows whether the child has ended; `None` if it had ended before.
    pidfd: Option<OwnedFd>,
    /// Whether it is one of several: then it gets no terminal, and a stop of it does not stop us.
    one_of_several: bool,
}

/// How the start of a command went.
pub(crate) enum Start<'a> {
    /// It runs.
    Runs(Child<'a>),
    /// It was not started: the lock is lost, or is about to be.
    TooLate,
}

/// What became of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// It is stopped.
    Stopped {
        /// Because it used the terminal from the background.
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
    /// Has `guardian` start its command `program`, with `environment` added to ours. A child with a
    /// file as its stdin is one of several.
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
        // The child may have taken the terminal before its start failed.
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

    /// Tells the guardian until when the lock is held.
    pub(crate) fn renewed(&self, deadline: BootTime) {
        self.guardian.renewed(deadline);
    }

    /// Tells the guardian that the lock is lost: all that the child started must end before `by`.
    pub(crate) fn end_by(&self, by: BootTime) {
        self.guardian.end_by(by);
    }

    /// Sends a signal to the whole group. It does not go through the guardian, where a signal from
    /// the terminal's next key could overtake it.
    pub(crate) fn signal(&self, signal: Signal) {
        // The guardian reaps it when it has ended; after that its pid may be reused.
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

    /// The next change of the child.
    ///
    /// # Cancellation
    /// No change is missed.
    pub(crate) async fn change(&self) -> Change {
        loop {
            return match self.guardian.report().await {
                // An old stop: it was resumed since. A later stop has its own report.
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

    /// Handles a stop of the child. If it only needs the terminal and can have it, it may continue.
    /// Otherwise we stop too, until the shell resumes us; without a controlling terminal its stop
    /// is ignored. Returns whether to resume the child, if the lock still allows it.
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

    /// Resumes the child.
    pub(crate) fn resume(&mut self) {
        // Counted first, so that a stop that follows is recognised as a new one.
        self.resumed += 1;
        self.guardian.resumed(self.resumed);
        if std::mem::take(&mut self.gets_terminal) {
            self.terminal.give(self.group);
        }
        // At once: a later CONT would undo a Ctrl-Z that came in between.
        self.signal(Signal::CONT);
    }

    /// Cleans up after a child that has ended by itself.
    pub(crate) fn dismiss(mut self) {
        self.terminal.take_back();
    }

    /// Cleans up after a child that was killed and could not restore the terminal.
    pub(crate) fn bury(mut self) {
        self.terminal.take_back_and_tidy();
    }

    /// Kills all that the child started, and its guardian if it still runs but does not answer.
    pub(crate) fn kill(&mut self) {
        self.guardian.replace(Some(self.group));
    }
}

/// The failure when a guardian has ended unexpectedly.
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
        message: if program.is_empty() {
            "the command is empty".to_owned()
        } else {
            format!("{}: {why}", shown.escape_debug())
        },
        missing,
    }
}
