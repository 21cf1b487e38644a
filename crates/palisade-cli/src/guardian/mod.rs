//! The guardian: a process beside palisade that ends the command when palisade can't.
//!
//! palisade may be stopped, hang, or be killed, and the command must not go on without its lock.
//! So the command is not palisade's child but that of a small process, forked while palisade had
//! no thread and no store. It knows the deadline of the lock, and ends everything that the command
//! started before it passes, or at once when palisade is gone.
//!
//! `protocol` is what the two say to each other, `escalation` decides when to ask and when to kill,
//! `process` is the guardian's life, `descendants` finds and ends what the command started. This
//! file is palisade's side. A guardian that is killed is replaced by palisade itself, which has become the
//! subreaper next in line.

mod descendants;
mod escalation;
mod process;
mod protocol;

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::time::Duration;

use palisade::BootTime;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, kill_process, kill_process_group,
    set_child_subreaper, waitid, waitpid,
};
use tokio::io::unix::AsyncFd;

pub(crate) use self::descendants::signal_tree;
pub(crate) use self::escalation::{KILL_LEAD, grace};
use self::protocol::Order;
pub(crate) use self::protocol::{Report, link, receive, send};
use crate::exit::{Failure, refused};
use crate::sys::{self, Mask};

/// How often a guardian may have to start its command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Terms {
    /// Once.
    One,
    /// Again after each loss, or for each message.
    Many,
}

/// palisade's hand on its guardian. Dropped, it waits for the guardian's end, which ends a command
/// that still runs.
pub(crate) struct Guardian {
    pid: Pid,
    /// Closed first when it is dropped.
    link: Option<AsyncFd<OwnedFd>>,
    /// Not watched by a runtime yet.
    fresh: Option<OwnedFd>,
    /// Whether the guardian's orphans would become our children, and all our children are such.
    adopts: bool,
}

impl Guardian {
    /// Forks the guardian of `command`, which is started later, with the signals of `mask`
    /// blocked. There must be no other thread.
    pub(crate) fn fork(command: &[OsString], mask: Mask, terms: Terms) -> Result<Self, Failure> {
        let adopts = adopt();
        let mut guardian = Self::fork_beside(&mut [], command, mask, terms)?;
        guardian.adopts = adopts;
        Ok(guardian)
    }

    /// Forks so many guardians of `command`, each of which starts it again and again. Orphans of
    /// one that is killed are ended by the answer's other part, when none of them is left.
    pub(crate) fn fork_many(
        count: usize,
        command: &[OsString],
        mask: Mask,
    ) -> Result<(Vec<Self>, Orphans), Failure> {
        let orphans = Orphans(adopt());
        let mut all = Vec::with_capacity(count);
        for _ in 0..count {
            let one = Self::fork_beside(&mut all, command, mask, Terms::Many)?;
            all.push(one);
        }
        Ok((all, orphans))
    }

    fn fork_beside(
        others: &mut [Self],
        command: &[OsString],
        mask: Mask,
        terms: Terms,
    ) -> Result<Self, Failure> {
        let failed = refused("can't start a guardian");
        sys::default_child_signal();
        let mut ends = Some(link().map_err(&failed)?);
        let pid = sys::fork(|| {
            // Kept open here, they would hide palisade's end from the others.
            others.iter_mut().for_each(|other| other.fresh = None);
            if let Some((ours, its)) = ends.take() {
                drop(ours);
                // palisade hears of a failure by the end of the link.
                let _ = process::guard(command, mask, terms, its);
            }
        })
        .map_err(failed)?;
        Ok(Self {
            pid,
            link: None,
            fresh: ends.map(|(ours, _)| ours),
            adopts: false,
        })
    }

    /// Has the command started, with `environment` added to ours, with a file as its stdin or with
    /// ours, and with the terminal if it is to be in the foreground, on a lock that is held until
    /// `deadline`. The answer is the first report.
    pub(crate) fn start(
        &mut self,
        environment: Vec<(String, String)>,
        stdin: Option<String>,
        foreground: bool,
        deadline: BootTime,
        grace: Duration,
    ) -> Result<(), Failure> {
        if let Some(fresh) = self.fresh.take() {
            let link = sys::watch(fresh).map_err(refused("can't listen to the guardian"))?;
            self.link = Some(link);
        }
        self.tell(&Order::Start {
            environment,
            deadline: deadline.as_nanos(),
            grace: u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX),
            foreground,
            stdin,
        });
        Ok(())
    }

    /// Says until when the lock is held.
    pub(crate) fn renewed(&self, deadline: BootTime) {
        self.tell(&Order::Renewed(deadline.as_nanos()));
    }

    /// Says that the lock is lost, and when another may have it.
    pub(crate) fn end_by(&self, by: BootTime) {
        self.tell(&Order::EndBy(by.as_nanos()));
    }

    /// Says how often the command was told to go on, to tell new stops from old ones.
    pub(crate) fn resumed(&self, times: u32) {
        self.tell(&Order::Resumed(times));
    }

    fn tell(&self, order: &Order) {
        if let Some(link) = &self.link {
            send(link.get_ref(), order);
        }
    }

    /// The next report; `None` when the guardian is gone.
    ///
    /// # Cancellation
    /// No report is lost.
    pub(crate) async fn report(&self) -> Option<Report> {
        let link = self.link.as_ref()?;
        loop {
            let mut ready = link.readable().await.ok()?;
            if let Ok(received) = ready.try_io(|link| receive(link.get_ref())) {
                return received.ok().flatten();
            }
        }
    }

    /// Does the work of a guardian that is gone or does not answer: ends it, and all that the
    /// command with the process group `group` has started. Returns when that is done; the keeper
    /// keeps the lock up meanwhile.
    pub(crate) fn replace(&mut self, group: Option<Pid>) {
        if self.lives() {
            // It may be stopped, which nothing else ends.
            let _ = kill_process(self.pid, Signal::KILL);
            self.wait();
        }
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        if self.adopts {
            descendants::end_all();
        }
    }

    /// Whether it is there to start a command: nobody has replaced it.
    pub(crate) fn lives(&self) -> bool {
        self.link.is_some() || self.fresh.is_some()
    }

    /// Waits until the guardian is gone, once.
    fn wait(&mut self) {
        self.link = None;
        self.fresh = None;
        while let Err(rustix::io::Errno::INTR) = waitpid(Some(self.pid), WaitOptions::empty()) {}
    }
}

/// Has the kernel hand us the orphans of guardians that are killed; says whether all our children
/// will be guardians and such. Children that an earlier program left to this process by `exec` are
/// not ours to end.
fn adopt() -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let childless = waitid(WaitId::All, options).is_err();
    childless && set_child_subreaper(Some(getpid())).is_ok()
}

/// What guardians that were killed have left, if it can be told.
pub(crate) struct Orphans(bool);

impl Orphans {
    /// Ends them. No guardian may be left, since it would be ended, too.
    pub(crate) fn end(&self) {
        if self.0 {
            descendants::end_all();
        }
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        // Its pid is not its own any more after a wait.
        if self.lives() {
            // Somebody may have stopped it.
            let _ = kill_process(self.pid, Signal::CONT);
            self.wait();
        }
    }
}
