//! The guardian's main loop, in the process that was forked for it: starts the command, reports its
//! changes, and ends everything when the lease runs out or palisade is gone.
//!
//! Invariant: it ends only when the command has ended by itself, or when nothing that the command
//! started is left. It is the command's parent and the subreaper of its orphans. All signals are
//! blocked here, so that only KILL ends it. Its timer uses the clock that leases are measured with.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use palisade::BootTime;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process_group, set_child_subreaper, setpgid,
    wait as wait_child,
};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::escalation::{Escalation, Step};
use super::protocol::{Order, Report, receive, send};
use super::{Terms, descendants};
use crate::sys::{self, Mask};
use crate::terminal;

/// The process name in `ps` and `pkill`: a `pkill -9 palisade` does not kill the guardian.
const NAME: &std::ffi::CStr = c"guardian";

/// A secret of ours that the command does not need. `PALISADE_URL` may hold a password, too, but a
/// palisade in the command that did not get it would silently lock on another engine.
const WITHHELD: &str = "PALISADE_GATEWAY_TOKEN";

/// How to start the command.
struct Start {
    /// Added to its environment.
    environment: Vec<(String, String)>,
    /// Whether it gets the terminal.
    foreground: bool,
    /// The file for its stdin, if it does not inherit ours.
    stdin: Option<String>,
}

/// Guards `command` from before its start until its end, each time that it is started. It starts
/// with the signals of `mask` blocked.
pub(super) fn guard(
    command: &[OsString],
    mask: Mask,
    terms: Terms,
    link: OwnedFd,
) -> io::Result<()> {
    // Signals to palisade's group, as from a terminal or a shell, must not reach the guardian. For
    // a process that has just been forked this fails only if it already leads its own group.
    let _ = setpgid(None, None);
    set_child_subreaper(Some(getpid()))?;
    rustix::thread::set_name(NAME)?;
    let sources = Sources {
        alarm: timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC)?,
        children: sys::signal_fd(Signal::CHILD)?,
        link,
    };
    while let Some((order, escalation)) = sources.start_order()? {
        // palisade may have been stopped since the lock was granted.
        if escalation.clone().step(BootTime::now()) != Step::Wait {
            send(&sources.link, &Report::Lost);
        } else {
            match order.start(command, mask) {
                Ok(pid) => {
                    send(&sources.link, &Report::Started(pid.as_raw_pid()));
                    // A command that may be started again needs them again.
                    if terms == Terms::One {
                        sys::let_go_of_inherited_files(false);
                    }
                    Guarded::new(&sources, pid, escalation).guard()?;
                }
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
                    send(&sources.link, &Report::NotStarted(errno));
                    return Ok(());
                }
            }
        }
        if terms == Terms::One {
            return Ok(());
        }
    }
    Ok(())
}

impl Start {
    fn start(self, command: &[OsString], mask: Mask) -> io::Result<Pid> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            // Variables of an outer lock or message that the inner one may not set.
            .env_remove("PALISADE_KEY")
            .env_remove("PALISADE_MESSAGE_KEY")
            .env_remove(WITHHELD)
            .envs(self.environment)
            .process_group(0);
        if let Some(stdin) = self.stdin {
            command.stdin(File::open(stdin)?);
        }
        let terminal = self.foreground.then(terminal::open).flatten();
        sys::prepare(&mut command, mask, terminal);
        // Reaped by pid, like the orphans.
        command.spawn().map(|child| Pid::from_child(&child))
    }
}

/// The guardian's event sources.
struct Sources {
    link: OwnedFd,
    /// Fires when something is due.
    alarm: OwnedFd,
    /// Readable when a child changed.
    children: OwnedFd,
}

impl Sources {
    /// Waits for the order to start; `None` when palisade ends without one.
    fn start_order(&self) -> io::Result<Option<(Start, Escalation)>> {
        loop {
            match receive(&self.link) {
                Ok(Some(Order::Start {
                    environment,
                    deadline,
                    grace,
                    foreground,
                    stdin,
                })) => {
                    let deadline = BootTime::from_nanos(deadline);
                    let escalation = Escalation::new(deadline, Duration::from_nanos(grace));
                    let start = Start {
                        environment,
                        foreground,
                        stdin,
                    };
                    return Ok(Some((start, escalation)));
                }
                Ok(Some(_)) => {}
                Ok(None) => return Ok(None),
                Err(_) => wait(&mut [PollFd::new(&self.link, PollFlags::IN)])?,
            }
        }
    }

    /// Sleeps until an event, or until `due`.
    fn sleep(&self, due: BootTime) -> io::Result<()> {
        let nanos = due.as_nanos();
        let at = Timespec {
            // Zero would disarm it.
            tv_sec: i64::try_from(nanos / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (nanos % 1_000_000_000).max(1) as _,
        };
        let none = Timespec::default();
        let when = Itimerspec {
            it_interval: none,
            it_value: at,
        };
        timerfd_settime(&self.alarm, TimerfdTimerFlags::ABSTIME, &when)?;
        wait(&mut [
            PollFd::new(&self.link, PollFlags::IN),
            PollFd::new(&self.alarm, PollFlags::IN),
            PollFd::new(&self.children, PollFlags::IN),
        ])?;
        // This only resets the descriptor; `wait` says what has changed.
        let _ = rustix::io::read(&self.children, &mut [0; 512]);
        Ok(())
    }
}

fn wait(what: &mut [PollFd<'_>]) -> io::Result<()> {
    match poll(what, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// A command that runs.
struct Guarded<'a> {
    sources: &'a Sources,
    command: Pid,
    escalation: Escalation,
    /// How often it was resumed.
    resumed: u32,
    /// How the command ended. After that it is reaped, and its pid may be reused.
    ended: Option<WaitStatus>,
}

/// Who is left.
#[derive(PartialEq, Eq)]
enum Left {
    Somebody,
    Nobody,
}

impl<'a> Guarded<'a> {
    fn new(sources: &'a Sources, command: Pid, escalation: Escalation) -> Self {
        Self {
            sources,
            command,
            escalation,
            resumed: 0,
            ended: None,
        }
    }

    fn guard(mut self) -> io::Result<()> {
        let guarded = self.until_over();
        if !matches!(guarded, Ok(Some(_))) {
            self.signal(Signal::KILL);
            descendants::end_all();
        }
        // Without a last report palisade knows that the guardian failed.
        let last = guarded?.unwrap_or(Report::Lost);
        send(&self.sources.link, &last);
        Ok(())
    }

    /// Guards until the command has ended; returns `None` if everything must be ended.
    fn until_over(&mut self) -> io::Result<Option<Report>> {
        loop {
            if !self.obey() {
                return Ok(None);
            }
            let left = self.look();
            match (self.ended, self.escalation.is_ending()) {
                (Some(status), false) => return Ok(Some(Report::Ended(status.as_raw()))),
                (_, true) if left == Left::Nobody => return Ok(Some(Report::Lost)),
                // Another process has taken its status, such as a debugger.
                (None, false) if left == Left::Nobody => return Err(Errno::CHILD.into()),
                _ => {}
            }
            match self.escalation.step(BootTime::now()) {
                Step::Wait => self.sources.sleep(self.escalation.next())?,
                Step::Ask => self.ask(),
                Step::Kill => return Ok(None),
            }
        }
    }

    /// Carries out palisade's orders; `false` when palisade is gone.
    fn obey(&mut self) -> bool {
        loop {
            match receive(&self.sources.link) {
                Ok(Some(Order::Renewed(deadline))) => {
                    self.escalation.renewed(BootTime::from_nanos(deadline));
                }
                Ok(Some(Order::Resumed(times))) => self.resumed = times,
                Ok(Some(Order::EndBy(by))) => self.escalation.end_by(BootTime::from_nanos(by)),
                Ok(Some(Order::Start { .. })) => {}
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    /// Reaps processes that have ended, and reports a stop of the command.
    fn look(&mut self) -> Left {
        loop {
            match wait_child(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Ok(Some((pid, status))) if pid == self.command => match status.stopping_signal() {
                    Some(signal) => {
                        // An order that arrived since the last check may precede this stop.
                        self.obey();
                        let resumed = self.resumed;
                        send(&self.sources.link, &Report::Stopped { signal, resumed });
                    }
                    None => self.ended = Some(status),
                },
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return Left::Somebody,
                Err(_) => return Left::Nobody,
            }
        }
    }

    /// Asks all processes to end.
    fn ask(&self) {
        // A stopped process reacts only to KILL until it is resumed.
        for signal in [Signal::TERM, Signal::CONT] {
            self.signal(signal);
            descendants::signal_outside(self.group(), signal);
        }
    }

    /// Signals the command's group.
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group() {
            // It fails only if the group has no process but its zombie leader.
            let _ = kill_process_group(group, signal);
        }
    }

    /// The command's group, as long as its id can't be reused.
    fn group(&self) -> Option<Pid> {
        self.ended.is_none().then_some(self.command)
    }
}
