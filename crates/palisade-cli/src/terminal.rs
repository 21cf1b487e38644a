//! `Terminal`: which process group the terminal listens to while a child runs.
//!
//! The child has a process group of its own, so that a signal reaches all of it; a group in the
//! background is stopped when it reads the terminal. So the child gets the terminal at the start
//! when both ends of it are the terminal, and otherwise (another part of a pipeline, a pager say,
//! may need it) as soon as it is stopped for want of it. Whoever gives it takes it back.

use std::fs::{File, OpenOptions};
use std::io::IsTerminal;
use std::os::unix::fs::OpenOptionsExt;

use rustix::process::{Pid, Signal, getpgrp, getpid, kill_current_process_group, kill_process};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp};

use crate::sys;

/// The terminal that controls this process, if there is one.
#[derive(Default)]
pub(crate) struct Terminal {
    tty: Option<File>,
    /// Whether the child's group has it from us.
    given: bool,
    /// Its modes from before.
    modes: Option<Termios>,
}

impl Terminal {
    /// Gives the terminal to a child that was just started, if nobody else can need it.
    pub(crate) fn give_at_start(&mut self, group: Pid) {
        if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
            self.give(group);
        }
    }

    /// Gives the terminal to `group` if it is ours to give.
    pub(crate) fn give(&mut self, group: Pid) -> bool {
        if !self.exists() {
            return false;
        }
        let Some(tty) = &self.tty else { return false };
        if tcgetpgrp(tty).ok() != Some(getpgrp()) {
            return false;
        }
        self.modes = tcgetattr(tty).ok();
        self.given = sys::without_ttou(|| tcsetpgrp(tty, group)).is_ok();
        self.given
    }

    /// Whether we gave the terminal to `group`, and it has it now.
    pub(crate) fn is_with(&self, group: Pid) -> bool {
        let tty = self.tty.as_ref().filter(|_| self.given);
        tty.is_some_and(|tty| tcgetpgrp(tty).ok() == Some(group))
    }

    /// Whether a terminal controls this process.
    pub(crate) fn exists(&mut self) -> bool {
        if self.tty.is_none() {
            let mut how = OpenOptions::new();
            how.read(true).write(true).custom_flags(libc::O_NOCTTY);
            self.tty = how.open("/dev/tty").ok();
        }
        self.tty.is_some()
    }

    /// Takes the terminal back if we gave it.
    pub(crate) fn take_back(&mut self) -> bool {
        if !std::mem::take(&mut self.given) {
            return false;
        }
        if let Some(tty) = &self.tty {
            // Fails only if the terminal is gone, and then there is nothing to take.
            let _ = sys::without_ttou(|| tcsetpgrp(tty, getpgrp()));
        }
        true
    }

    /// Takes the terminal back from a child that was killed and could not tidy up.
    pub(crate) fn take_back_and_tidy(&mut self) {
        if let (true, Some(tty), Some(modes)) = (self.take_back(), &self.tty, &self.modes) {
            let _ = sys::without_ttou(|| tcsetattr(tty, OptionalActions::Now, modes));
        }
    }
}

/// Whom to stop.
pub(crate) enum Stop {
    /// This process: the others of its group were told as we were.
    Us,
    /// All of our process group, as the terminal would have done.
    OurGroup,
}

/// Stops as a shell expects it, and returns when resumed, or at once when there is no shell that
/// could resume us.
pub(crate) fn stop(whom: Stop) {
    sys::with_default_tstp(|| {
        // A signal to oneself is delivered before the call returns.
        let _ = match whom {
            Stop::Us => kill_process(getpid(), Signal::TSTP),
            Stop::OurGroup => kill_current_process_group(Signal::TSTP),
        };
    });
}
