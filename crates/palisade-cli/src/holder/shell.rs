//! `Shell`: the process that a lock of `palisade acquire` lives as long as.
//!
//! It is the shell that calls palisade, the one that `$$` names, also from a subshell. A subshell
//! (`$(…)`, `(…)`, a part of a pipeline) is a fork of its shell, and ends long before the script
//! does. What runs palisade and nothing else (`timeout 10s palisade acquire …`) is passed over too.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, getpid, getppid, pidfd_open};

use crate::args::arguments;
use crate::exit::Failure;

/// A process, and no later one with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shell {
    pub(crate) pid: Pid,
    /// When it was started, in ticks since the boot.
    pub(crate) born: u64,
}

impl Shell {
    /// The process with this number, or else the shell that calls palisade.
    pub(crate) fn find(pid: Option<i32>) -> Result<Self, Failure> {
        let found = match pid {
            Some(pid) => Process::read(pid),
            None => calling(),
        };
        let shell = found.and_then(|process| {
            let pid = Pid::from_raw(process.pid)?;
            let born = process.born;
            (!process.ended).then_some(Self { pid, born })
        });
        shell.ok_or_else(|| match pid {
            Some(pid) => Failure::Usage(format!("there is no process {pid}")),
            None => Failure::Start("can't find the calling shell in /proc; give --pid $$".into()),
        })
    }

    /// This process, which may have been the shell: a shell runs its last command in its own
    /// process, if it is the last thing to do.
    pub(crate) fn own() -> Option<Self> {
        let pid = getpid();
        let born = Process::read(pid.as_raw_pid())?.born;
        Some(Self { pid, born })
    }

    /// The parent of this process, its parent, and so on.
    pub(crate) fn above() -> Vec<Self> {
        let next = |process: &Process| Process::read(process.parent);
        let us = Process::read(getpid().as_raw_pid());
        let above = std::iter::successors(us.as_ref().and_then(next), next);
        let shells = above.filter_map(|Process { pid, born, .. }| {
            let pid = Pid::from_raw(pid)?;
            Some(Self { pid, born })
        });
        shells.collect()
    }

    /// A file that is readable when the process has ended; `None` when it has already.
    pub(crate) fn follow(&self) -> Result<Option<OwnedFd>, Failure> {
        let pidfd = match pidfd_open(self.pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH) => return Ok(None),
            Err(errno) => {
                let pid = self.pid.as_raw_pid();
                let why = format!("can't watch the process {pid}: {errno}");
                return Err(Failure::Start(why));
            }
        };
        Ok(self.lives().then_some(pidfd))
    }

    /// Whether it has not ended.
    pub(crate) fn lives(&self) -> bool {
        let now = Process::read(self.pid.as_raw_pid());
        now.is_some_and(|now| now.born == self.born && !now.ended)
    }
}

/// What tells the fork of a process from another one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Process {
    pid: i32,
    ended: bool,
    parent: i32,
    born: u64,
    /// Where its stack starts: somewhere else for each program that is executed.
    stack: u64,
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
        let fields: Vec<_> = rest.split_ascii_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        Some(Self {
            pid,
            ended: matches!(*fields.first()?, "Z" | "X"),
            parent: fields.get(1)?.parse().ok()?,
            born: number(19)?,
            stack: number(25)?,
        })
    }

    fn arguments(&self) -> Option<Vec<u8>> {
        std::fs::read(format!("/proc/{}/cmdline", self.pid)).ok()
    }

    /// Whether it is a subshell of `other`: a shell's fork that still runs the same program. The
    /// forks of other programs are processes of their own to their users.
    fn is_subshell_of(&self, other: &Self) -> bool {
        let program = |process: &Self| std::fs::read_link(format!("/proc/{}/exe", process.pid));
        let same_shell = match (program(self), program(other)) {
            (Ok(one), Ok(two)) => one == two && is_shell(&one),
            _ => false,
        };
        same_shell && self.stack == other.stack && self.arguments() == other.arguments()
    }

    /// Whether it was started to run the program with these arguments.
    fn runs(&self, arguments: &[u8]) -> bool {
        let its = self.arguments().unwrap_or_default();
        its.strip_suffix(arguments)
            .is_some_and(|before| before.last() == Some(&0))
    }
}

/// Whether a program is a shell, by its name: `dash`, `bash-5.2`, `ksh93`, `busybox`.
fn is_shell(program: &Path) -> bool {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    // As the kernel shows one that was replaced by a newer version.
    let name = name.trim_end_matches(" (deleted)");
    let name = name.trim_end_matches(|c: char| c.is_ascii_digit() || matches!(c, '.' | '-'));
    name.ends_with("sh") || matches!(name, "busybox" | "toybox")
}

fn calling() -> Option<Process> {
    use std::os::unix::ffi::OsStrExt;
    let mut ours = Vec::new();
    for argument in arguments() {
        ours.extend_from_slice(argument.as_bytes());
        ours.push(0);
    }
    let mut found = Process::read(getppid()?.as_raw_pid())?;
    while let Some(above) = Process::read(found.parent) {
        if !found.runs(&ours) && !found.is_subshell_of(&above) {
            break;
        }
        found = above;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_proc_is_read_behind_the_name() {
        let stat = b"7 (a) R 1 (b) S 3 4 5 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 987 1 2 3 4 5 77 8\n";
        let process = Process::parse(7, stat).unwrap();
        assert_eq!((process.parent, process.born, process.stack), (3, 987, 77));
        assert!(!process.ended);
        assert!(Process::parse(7, b"7 (a) R 1").is_none());
    }

    #[test]
    fn shells_are_known_by_their_names() {
        for shell in [
            "sh",
            "bash",
            "bash-5.2",
            "ksh93",
            "zsh (deleted)",
            "busybox",
        ] {
            assert!(is_shell(&Path::new("/bin").join(shell)), "{shell}");
        }
        for other in ["perl", "python3.12", "make", "palisade", ""] {
            assert!(!is_shell(&Path::new("/bin").join(other)), "{other}");
        }
    }

    #[test]
    fn the_end_of_a_process_is_seen_and_a_later_one_is_another() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let shell = Shell::find(Some(child.id() as i32)).unwrap();
        assert!(shell.lives() && shell.follow().unwrap().is_some());
        let born = shell.born + 1;
        assert!(Shell { born, ..shell }.follow().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!shell.lives() && shell.follow().unwrap().is_none());
        assert!(Shell::find(Some(child.id() as i32)).is_err());
    }
}
