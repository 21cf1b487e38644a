//! The guardian: a second process that ends the command when palisade can't.
//!
//! palisade may be stopped, hang, or be killed, and the command must not continue without its lock.
//! Therefore the command is not palisade's child but that of a small process, forked while palisade
//! had no other thread and no store. It knows the deadline of the lock. It ends everything that the
//! command started before the deadline passes, or at once when palisade is gone.
//!
//! `protocol` has the messages between the two, `escalation` decides when to send TERM and KILL,
//! `process` is the guardian's main loop, `descendants` finds and ends what the command started.
//! This file is palisade's side. If a guardian is killed, palisade itself does its work: it is the
//! next subreaper, so the orphans become its children.

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

/// How often a guardian starts its command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Terms {
    /// Once.
    One,
    /// Again after each loss, or for each message.
    Many,
}

/// palisade's handle of its guardian. Dropping it ends the guardian, which ends a command that
/// still runs, and waits for that.
pub(crate) struct Guardian {
    pid: Pid,
    /// Closed first when it is dropped.
    link: Option<AsyncFd<OwnedFd>>,
    /// The link before it is registered with a runtime.
    fresh: Option<OwnedFd>,
    /// Whether orphans of the guardian would become our children, and we have no other children.
    adopts: bool,
}

impl Guardian {
    /// Forks the guardian of `command`. The command is started later, with the signals of `mask`
    /// blocked. There must be no other thread.
    pub(crate) fn fork(command: &[OsString], mask: Mask, terms: Terms) -> Result<Self, Failure> {
        let adopts = adopt();
        let mut guardian = Self::fork_beside(&mut [], command, mask, terms)?;
        guardian.adopts = adopts;
        Ok(guardian)
    }

    /// Forks several guardians of `command`, each of which starts it repeatedly. The second value
    /// ends the orphans of guardians that were killed, when no guardian is left.
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
            // An inherited copy of these would hide palisade's end from the other guardians.
            others.iter_mut().for_each(|other| other.fresh = None);
            if let Some((ours, its)) = ends.take() {
                drop(ours);
                // palisade learns of a failure when the link closes.
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

    /// Has the command started under a lock that is held until `deadline`: with `environment` added
    /// to ours, with a file or our own stdin as its stdin, and with the terminal if it is to be in
    /// the foreground. Returns the first report.
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

    /// Tells it until when the lock is held.
    pub(crate) fn renewed(&self, deadline: BootTime) {
        self.tell(&Order::Renewed(deadline.as_nanos()));
    }

    /// Tells it that the lock is lost, and when another may have it.
    pub(crate) fn end_by(&self, by: BootTime) {
        self.tell(&Order::EndBy(by.as_nanos()));
    }

    /// Tells it how often the command was resumed, to distinguish new stops from old ones.
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
    /// renews the lock meanwhile.
    pub(crate) fn replace(&mut self, group: Option<Pid>) {
        if self.lives() {
            // It may be stopped: only KILL ends it then.
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

    /// Whether it can start a command: it was not replaced.
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

/// Makes us the subreaper for orphans of guardians that are killed. Returns whether all our
/// children will be guardians and such orphans: children that this process had before an `exec`
/// must not be ended.
fn adopt() -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let childless = waitid(WaitId::All, options).is_err();
    childless && set_child_subreaper(Some(getpid())).is_ok()
}

/// The orphans of guardians that were killed, if they can be identified.
pub(crate) struct Orphans(bool);

impl Orphans {
    /// Ends them. No guardian may be left, because it would be ended, too.
    pub(crate) fn end(&self) {
        if self.0 {
            descendants::end_all();
        }
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        // After a wait the pid may be reused.
        if self.lives() {
            // Somebody may have stopped it.
            let _ = kill_process(self.pid, Signal::CONT);
            self.wait();
        }
    }
}
