//! The descendants of this process: what a command started, in whichever group or session.
//!
//! Whoever is a subreaper gets the orphans among them as children, so that a chain of parents
//! leads from each one to us. Invariant: nobody but a descendant is signalled. A child's pid is
//! its own until we reap it; any other process is held by a pidfd, and seen again to be the same,
//! before it is signalled.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, pidfd_send_signal, wait,
};

/// Between two looks at what is left: a killed process is gone within a millisecond or so, and one
/// that hangs in the kernel can take for ever.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Kills and reaps all descendants of this process, until there is none that it may kill.
pub(super) fn end_all() {
    let mut pause = SHORTEST_PAUSE;
    while !reap_all() {
        let found = descendants();
        let killed = signal_all(&found, Signal::KILL);
        // What is left is another user's, or hidden from us. None at all were missed: they can
        // be born behind the back of whoever lists them. Each death may hand us children.
        if killed == 0 && !found.as_ref().is_ok_and(Vec::is_empty) {
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Reaps the children that have ended; says whether no child is left.
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

/// Signals the process `root` and then its descendants; we are not among them.
pub(crate) fn signal_tree(root: Pid, signal: Signal) {
    let us = getpid().as_raw_pid();
    let root = root.as_raw_pid();
    let mut found: Vec<_> = Process::read(root).into_iter().collect();
    // All are found before one is signalled: a shell starts the next command when this one ends.
    found.extend(descendants_of(root).unwrap_or_default());
    found.retain(|process| process.pid != us);
    signal_all(&Ok(found), signal);
}

/// Signals those that were found; answers how many could be signalled.
fn signal_all(found: &io::Result<Vec<Process>>, signal: Signal) -> usize {
    let found = found.iter().flatten();
    found.filter(|process| process.signal(signal)).count()
}

/// A line of `/proc/PID/stat`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Process {
    pid: i32,
    parent: i32,
    group: i32,
    /// Tells it from an earlier process with the same pid.
    born: u64,
}

impl Process {
    fn read(pid: i32) -> Option<Self> {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        Self::parse(pid, &stat)
    }

    fn parse(pid: i32, stat: &[u8]) -> Option<Self> {
        // The second field is a name in parentheses, with anything in it.
        let end = stat.iter().rposition(|byte| *byte == b')')?;
        let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
        let mut fields = rest.split_ascii_whitespace().skip(1);
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let born = fields.nth(16)?.parse().ok()?;
        Some(Self {
            pid,
            parent,
            group,
            born,
        })
    }

    /// Says whether it could be signalled.
    fn signal(&self, signal: Signal) -> bool {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return false;
        };
        if self.parent == getpid().as_raw_pid() {
            return kill_process(pid, signal).is_ok();
        }
        let Ok(held) = pidfd_open(pid, PidfdFlags::empty()) else {
            return false;
        };
        let same = Self::read(self.pid).is_some_and(|now| now.born == self.born);
        same && pidfd_send_signal(held, signal).is_ok()
    }
}

/// All descendants of this process, zombies included.
///
/// # Errors
/// Where there is no `/proc`.
fn descendants() -> io::Result<Vec<Process>> {
    descendants_of(getpid().as_raw_pid())
}

fn descendants_of(root: i32) -> io::Result<Vec<Process>> {
    let mut by_parent: HashMap<i32, Vec<Process>> = HashMap::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let pid = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        if let Some(process) = pid.and_then(Process::read) {
            by_parent.entry(process.parent).or_default().push(process);
        }
    }
    let mut found = Vec::new();
    let mut parents = vec![root];
    while let Some(parent) = parents.pop() {
        let children = by_parent.remove(&parent).unwrap_or_default();
        parents.extend(children.iter().map(|child| child.pid));
        found.extend(children);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_can_look_like_the_rest_of_the_line() {
        let stat = b"7 (a) R 1 (b) S 3 4 5 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 987 0 0\n";
        let process = Process::parse(7, stat).unwrap();
        let born = 987;
        assert_eq!(
            process,
            Process {
                pid: 7,
                parent: 3,
                group: 4,
                born
            }
        );
    }

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
        assert!(grandchild.signal(Signal::KILL));
        child.wait().unwrap();
        assert!(!descendants().unwrap().iter().any(|p| p.pid == pid));
    }
}
