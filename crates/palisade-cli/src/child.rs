//! `Child`: the command that runs while the lock is held, in a process group of its own.
//!
//! Invariant: the child is reaped last. As long as it is not, its pid, which is also the number
//! of its group, can't be given to anyone else, so that a signal to the group never hits
//! strangers. What the child left in its group runs on after a normal end; after a loss all of
//! the group is killed.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::exit::{self, Failure};
use crate::terminal::{Stop, Terminal, stop};

/// A started command.
pub(crate) struct Child {
    process: std::process::Child,
    group: Pid,
    terminal: Terminal,
    /// Whether the terminal was the child's when all of us were stopped.
    had_terminal: bool,
}

/// What became of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing new.
    Runs,
    /// It is stopped.
    Stopped {
        /// Because it used the terminal without having it.
        wants_terminal: bool,
    },
    /// It has ended, and waits to be reaped.
    Ended,
}

impl Child {
    /// Starts `command` with `environment` added to ours.
    pub(crate) fn start(
        command: &[OsString],
        environment: &[(&str, String)],
    ) -> Result<Self, Failure> {
        let Some((program, arguments)) = command.split_first() else {
            return Err(Failure::Usage("there is no command to run".into()));
        };
        let process = Command::new(program)
            .args(arguments)
            .envs(environment.iter().map(|(key, value)| (key, value)))
            .process_group(0)
            .spawn()
            .map_err(|error| not_started(program, &error))?;
        let mut child = Self {
            group: Pid::from_child(&process),
            process,
            terminal: Terminal::default(),
            had_terminal: false,
        };
        child.terminal.give_at_start(child.group);
        if child.terminal.is_given() {
            // It may have been stopped for want of the terminal before it got it.
            child.signal(Signal::CONT);
        }
        Ok(child)
    }

    /// Sends a signal to the whole group.
    pub(crate) fn signal(&self, signal: Signal) {
        // It fails only when the group is empty but for its ended, unreaped leader.
        let _ = kill_process_group(self.group, signal);
    }

    /// What became of the child since the last time.
    pub(crate) fn change(&self) -> Change {
        let look = |what: WaitIdOptions| {
            let found = waitid(WaitId::Pid(self.group), what | WaitIdOptions::NOHANG);
            found.ok().flatten()
        };
        if look(WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).is_some() {
            return Change::Ended;
        }
        match look(WaitIdOptions::STOPPED) {
            None => Change::Runs,
            Some(status) => Change::Stopped {
                wants_terminal: matches!(
                    status.stopping_signal(),
                    Some(libc::SIGTTIN | libc::SIGTTOU)
                ),
            },
        }
    }

    /// Follows a child that was stopped: if it only wants the terminal and can have it, it may go
    /// on; else all of us stop, and go on when the shell says so. Answers whether the child is to
    /// be resumed, if the lock still allows it: without a terminal its stop is not our business.
    pub(crate) fn follow_stop(&mut self, wants_terminal: bool) -> bool {
        if wants_terminal && self.terminal.give(self.group) {
            return true;
        }
        if !self.terminal.exists() {
            return false;
        }
        self.had_terminal = self.terminal.take_back();
        stop(Stop::OurGroup);
        true
    }

    /// Stops the child and us, as the terminal asks.
    pub(crate) fn stop_with_us(&mut self) {
        self.signal(Signal::TSTP);
        self.had_terminal = self.terminal.take_back();
        stop(Stop::Us);
    }

    /// Lets the child go on.
    pub(crate) fn resume(&mut self) {
        if std::mem::take(&mut self.had_terminal) {
            self.terminal.give(self.group);
        }
        self.signal(Signal::CONT);
    }

    /// Takes leave of a child that has ended, and answers with its code.
    pub(crate) fn reap(mut self) -> u8 {
        self.terminal.take_back();
        self.process.wait().map_or(u8::MAX, code_of)
    }

    /// Ends all of the group at once.
    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.terminal.take_back_and_tidy();
    }
}

fn code_of(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, Some(signal)) => exit::of_signal(signal),
        (None, None) => u8::MAX,
    }
}

fn not_started(program: &OsString, error: &io::Error) -> Failure {
    let missing = error.kind() == io::ErrorKind::NotFound;
    let shown = program.to_string_lossy();
    let why = match missing {
        true => "command not found".to_owned(),
        false => format!("can't be executed: {error}"),
    };
    Failure::Command {
        message: format!("{}: {why}", shown.escape_debug()),
        missing,
    }
}
