//! The descendants of this process: what a command started, in whichever group or session.
//!
//! A subreaper inherits orphans as children, so that a chain of parents leads from each descendant
//! to us. Invariant: only descendants are signalled. A child's pid can't be reused until we reap
//! it. Any other process is opened as a pidfd, and checked again to be the same process, before it
//! is signalled.

use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, pidfd_send_signal, wait,
};

use crate::proc::{Process, descendants_of};

/// The polling interval while processes are left: a killed process is gone within a millisecond or
/// so, and one that hangs in the kernel can take for ever.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Kills and reaps all descendants of this process, until none is left that it may kill.
pub(super) fn end_all() {
    let mut pause = SHORTEST_PAUSE;
    while !reap_all() {
        let found = descendants();
        let killed = signal_all(&found, Signal::KILL);
        // If some were found and none could be killed, they belong to another user. If none were
        // found although a child is left, the listing missed it: processes can be born while it
        // runs. Each death may hand us further children.
        if killed == 0 && !found.as_ref().is_ok_and(Vec::is_empty) {
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Reaps the children that have ended; returns whether no child is left.
fn reap_all() -> bool {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) => return false,
            Err(_) => return true,
        }
    }
}

/// Signals the descendants outside of the process group `group`.
pub(super) fn signal_outside(group: Option<Pid>, signal: Signal) {
    let group = Pid::as_raw(group);
    let mut found = descendants();
    if let Ok(found) = &mut found {
        found.retain(|process| process.group != group);
    }
    signal_all(&found, signal);
}

/// Signals the process `root` and then its descendants, except this process.
pub(crate) fn signal_tree(root: Pid, signal: Signal) {
    let us = getpid().as_raw_pid();
    let root = root.as_raw_pid();
    let mut found: Vec<_> = Process::read(root).into_iter().collect();
    // All are listed before one is signalled: a shell starts its next command when one ends.
    found.extend(descendants_of(root).unwrap_or_default());
    found.retain(|process| process.pid != us);
    signal_all(&Ok(found), signal);
}

/// Signals the processes found; returns how many could be signalled.
fn signal_all(found: &io::Result<Vec<Process>>, signal: Signal) -> usize {
    let found = found.iter().flatten();
    found.filter(|process| signal_one(process, signal)).count()
}

/// Returns whether the process could be signalled.
fn signal_one(process: &Process, signal: Signal) -> bool {
    let Some(pid) = Pid::from_raw(process.pid) else {
        return false;
    };
    if process.parent == getpid().as_raw_pid() {
        return kill_process(pid, signal).is_ok();
    }
    let Ok(held) = pidfd_open(pid, PidfdFlags::empty()) else {
        return false;
    };
    let same = Process::read(process.pid).is_some_and(|now| now.born == process.born);
    same && pidfd_send_signal(held, signal).is_ok()
}

fn descendants() -> io::Result<Vec<Process>> {
    descendants_of(getpid().as_raw_pid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_and_grandchildren_are_found() {
        use std::io::Read;
        use std::process::{Command, Stdio};
        let script = "sleep 60 & echo; wait";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0];
        child.stdout.take().unwrap().read_exact(&mut line).unwrap();
        let me = getpid().as_raw_pid();
        let found = descendants().unwrap();
        let pid = child.id() as i32;
        assert!(found.iter().any(|p| p.pid == pid && p.parent == me));
        let grandchild = found.iter().find(|p| p.parent == pid).unwrap();
        assert!(signal_one(grandchild, Signal::KILL));
        child.wait().unwrap();
        assert!(!descendants().unwrap().iter().any(|p| p.pid == pid));
    }
}
