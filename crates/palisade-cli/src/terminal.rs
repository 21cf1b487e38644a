//! `Terminal`: which process group is in the foreground of the terminal while a child runs.
//!
//! The child has its own process group, so that a signal reaches all of it. A background group is
//! stopped when it reads the terminal. If stdin and stdout are the terminal, the child therefore
//! takes it at its start. Otherwise another part of a pipeline, such as a pager, may need it, and
//! the child gets it only when it is stopped for want of it. palisade takes the terminal back.

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
    /// Whether we gave it to the child's group.
    given: bool,
    /// Its modes before that.
    modes: Option<Termios>,
}

impl Terminal {
    /// Whether a child that is about to start is to take the terminal, because it is ours and no
    /// other process can need it. It then counts as given.
    pub(crate) fn offer(&mut self) -> bool {
        if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
            self.given = self.is_ours();
        }
        self.given
    }

    /// Gives the terminal to `group` if it is ours to give.
    pub(crate) fn give(&mut self, group: Pid) -> bool {
        if self.is_ours()
            && let Some(tty) = &self.tty
        {
            self.given = sys::without_ttou(|| tcsetpgrp(tty, group)).is_ok();
            return self.given;
        }
        false
    }

    /// Whether it is ours to give. If so, its modes are saved.
    pub(crate) fn is_ours(&mut self) -> bool {
        self.exists();
        let tty = self.tty.as_ref();
        let ours = tty.filter(|tty| tcgetpgrp(tty).ok() == Some(getpgrp()));
        if let Some(tty) = ours {
            self.modes = tcgetattr(tty).ok();
        }
        ours.is_some()
    }

    /// Whether a terminal controls this process.
    pub(crate) fn exists(&mut self) -> bool {
        if self.tty.is_none() {
            self.tty = open();
        }
        self.tty.is_some()
    }

    /// Takes the terminal back if we gave it.
    pub(crate) fn take_back(&mut self) -> bool {
        if !std::mem::take(&mut self.given) {
            return false;
        }
        if let Some(tty) = &self.tty {
            // Fails only if the terminal is gone.
            let _ = sys::without_ttou(|| tcsetpgrp(tty, getpgrp()));
        }
        true
    }

    /// Takes the terminal back from a child that was killed and could not restore its modes.
    pub(crate) fn take_back_and_tidy(&mut self) {
        if let (true, Some(tty), Some(modes)) = (self.take_back(), &self.tty, &self.modes) {
            let _ = sys::without_ttou(|| tcsetattr(tty, OptionalActions::Now, modes));
        }
    }
}

/// Opens the terminal that controls this process.
pub(crate) fn open() -> Option<File> {
    let mut how = OpenOptions::new();
    how.read(true).write(true).custom_flags(libc::O_NOCTTY);
    how.open("/dev/tty").ok()
}

/// Whom to stop.
pub(crate) enum Stop {
    /// This process only: the others of its group got the same signal.
    Us,
    /// All of our process group, as the terminal would have done.
    OurGroup,
}

/// Stops as a shell expects, and returns when resumed, or at once if no shell could resume us.
pub(crate) fn stop(whom: Stop) {
    sys::with_default_tstp(|| {
        // A signal to oneself is delivered before the call returns.
        let _ = match whom {
            Stop::Us => kill_process(getpid(), Signal::TSTP),
            Stop::OurGroup => kill_current_process_group(Signal::TSTP),
        };
    });
}
