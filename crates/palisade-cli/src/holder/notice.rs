//! Where a holder reports the loss of its lock: the stderr of the shell that it holds it for.
//!
//! A holder outlives the `acquire` that made it, in the background. If the stderr of `acquire` is
//! the shell's, the holder keeps it: a terminal, a log, a pipe to a mailer of cron, a socket of a
//! service manager. Nobody who reads it until its end waits for the holder, because the shell has
//! it open as well, and the holder closes it when the shell ends. Any other stderr, such as that of
//! `$(palisade acquire x 2>&1)`, is closed at once, and the shell's is opened anew when there is
//! something to report, through `/proc`.
//!
//! Invariant: a terminal or a pipe that takes nothing delays neither signals nor the release.

use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags, fstat, open, stat};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use rustix::time::Timespec;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use crate::exit::Failure;
use crate::print::Printer;

/// What people see first is the reason, then what their shell says about its end; but a signal that
/// is due does not wait for a file system that hangs. A busy machine needs a part of this.
const FIRST: Duration = Duration::from_millis(250);

/// A reader that takes nothing must not keep a holder from ending.
const LAST: Duration = Duration::from_secs(1);

/// When the holder looks again whose its stderr is. While `acquire 2>log` runs, some shells have the
/// log as their own stderr, and take theirs back once `acquire` has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// The stderr of a shell, which is ours if it can be.
pub(super) struct Notice {
    shell: Pid,
    printer: Printer,
    /// Ends when all is written.
    written: Option<oneshot::Receiver<()>>,
    /// When to look again whose our stderr is.
    look_again: Option<Instant>,
}

impl Notice {
    /// Keeps our stderr if it is the shell's, and closes all other files that we inherited.
    pub(super) fn keep(shell: Pid, printer: Printer) -> Self {
        let notice = Self {
            shell,
            printer,
            written: None,
            look_again: Some(Instant::now() + LOOK_AGAIN),
        };
        crate::sys::let_go_of_inherited_files(notice.is_ours());
        notice
    }

    /// Closes our stderr if it turns out not to be the shell's; returns when that was looked at, and
    /// never again.
    pub(super) async fn settled(&mut self) {
        match self.look_again {
            Some(then) => tokio::time::sleep_until(then).await,
            None => std::future::pending().await,
        }
        self.look_again = None;
        if !self.is_ours() {
            crate::sys::let_go_of_inherited_files(false);
        }
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/2", self.shell.as_raw_pid()).into()
    }

    /// Whether our stderr is the file that the shell has as its own.
    fn is_ours(&self) -> bool {
        let (ours, its) = (fstat(rustix::stdio::stderr()), stat(self.path()));
        let file = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino, stat.st_rdev);
        matches!((ours, its), (Ok(ours), Ok(its)) if file(ours) == file(its))
    }

    /// Makes the shell's stderr ours, if it has another by now. It must still run.
    pub(super) fn find(&self) {
        if self.is_ours() {
            return;
        }
        // The very same open file, if we may trace the shell.
        let none = PidfdFlags::empty();
        let same = pidfd_open(self.shell, none)
            .and_then(|shell| pidfd_getfd(shell, 2, PidfdGetfdFlags::empty()));
        // Else appended, because the shell has its own position in a file. Not the controlling
        // terminal of our session, and no wait for the reader of a FIFO.
        let how = OFlags::WRONLY | OFlags::APPEND | OFlags::NOCTTY | OFlags::NONBLOCK;
        let its = same.or_else(|_| open(self.path(), how | OFlags::CLOEXEC, Mode::empty()));
        if let Ok(its) = its {
            let _ = rustix::stdio::dup2_stderr(&its);
        }
    }

    /// How long a signal waits for the report: not at all if nobody takes it.
    fn first(&self) -> Duration {
        let mut stderr = [PollFd::from_borrowed_fd(
            rustix::stdio::stderr(),
            PollFlags::OUT,
        )];
        match poll(&mut stderr, Some(&Timespec::default())) {
            Ok(1..) => FIRST,
            _ => Duration::ZERO,
        }
    }

    /// Reports a failure there, after an event for programs, on a thread of its own, and waits a
    /// moment for it.
    pub(super) async fn tell(&mut self, event: Option<Value>, failure: Failure) {
        let (done, mut written) = oneshot::channel();
        let (printer, first) = (self.printer, self.first());
        let tell = move || {
            if let Some(event) = event {
                printer.event(event, || None);
            }
            printer.failure(&failure);
            let _ = done.send(());
        };
        // Without a thread there is no report; `release` tells of the loss.
        if std::thread::Builder::new().spawn(tell).is_ok()
            && timeout(first, &mut written).await.is_err()
        {
            self.written = Some(written);
        }
    }

    /// Waits until all is written, if somebody reads it, and closes it: the shell has ended.
    pub(super) async fn close(&mut self) {
        if let Some(written) = self.written.take() {
            let _ = timeout(LAST, written).await;
        }
        crate::sys::let_go_of_inherited_files(false);
    }
}
