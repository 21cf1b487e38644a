//! `Shell`: the process whose end releases a lock of `palisade acquire`.
//!
//! It is the shell that calls palisade, the process that `$$` names, also from a subshell. A
//! subshell (`$(…)`, `(…)`, a part of a pipeline) is a fork of its shell, and ends long before the
//! script does. A program that only runs palisade (`timeout 10s palisade acquire …`) is skipped,
//! too.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, getpid, getppid, pidfd_open};

use crate::args::arguments;
use crate::exit::Failure;
use crate::proc::Process;

/// A process, distinguished from a later one with the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shell {
    pub(crate) pid: Pid,
    /// When it was started, in ticks since the boot.
    pub(crate) born: u64,
}

impl Shell {
    /// The process with this pid, or else the shell that calls palisade.
    pub(crate) fn find(pid: Option<i32>) -> Result<Self, Failure> {
        let found = match pid {
            Some(pid) => Process::read(pid),
            None => calling(),
        };
        let shell = found
            .filter(|process| !process.has_ended())
            .and_then(Self::of);
        shell.ok_or_else(|| match pid {
            Some(pid) => Failure::Usage(format!("there is no process {pid}")),
            None => Failure::Start("can't find the calling shell in /proc; pass --pid $$".into()),
        })
    }

    fn of(process: Process) -> Option<Self> {
        let (pid, born) = (Pid::from_raw(process.pid)?, process.born);
        Some(Self { pid, born })
    }

    /// This process, which may have been the shell: a shell may `exec` its last command.
    pub(crate) fn own() -> Option<Self> {
        Process::read(getpid().as_raw_pid()).and_then(Self::of)
    }

    /// The parent of this process, its parent, and so on.
    pub(crate) fn above() -> Vec<Self> {
        let next = |process: &Process| Process::read(process.parent);
        let us = Process::read(getpid().as_raw_pid());
        let above = std::iter::successors(us.as_ref().and_then(next), next);
        above.filter_map(Self::of).collect()
    }

    /// A file that is readable when the process has ended; `None` if it has already ended.
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
        now.is_some_and(|now| now.born == self.born && !now.has_ended())
    }
}

fn arguments_of(process: &Process) -> Option<Vec<u8>> {
    std::fs::read(format!("/proc/{}/cmdline", process.pid)).ok()
}

/// Whether `one` is a subshell of `other`: a shell's fork that still runs the same program. Forks
/// of other programs count as separate processes.
fn is_subshell(one: &Process, other: &Process) -> bool {
    let program = |process: &Process| std::fs::read_link(format!("/proc/{}/exe", process.pid));
    let same_shell = match (program(one), program(other)) {
        (Ok(one), Ok(two)) => one == two && is_shell(&one),
        _ => false,
    };
    same_shell && one.stack == other.stack && arguments_of(one) == arguments_of(other)
}

/// Whether it was started only to run the program with these arguments.
fn runs(process: &Process, arguments: &[u8]) -> bool {
    let its = arguments_of(process).unwrap_or_default();
    its.strip_suffix(arguments)
        .is_some_and(|before| before.last() == Some(&0))
}

/// Whether a program is a shell, by its name: `dash`, `bash-5.2`, `ksh93`, `busybox`.
fn is_shell(program: &Path) -> bool {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    // The kernel appends this to a program whose file was replaced.
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
        if !runs(&found, &ours) && !is_subshell(&found, &above) {
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
    fn shells_are_known_by_their_names() {
        for shell in ["sh", "bash-5.2", "ksh93", "zsh (deleted)", "busybox"] {
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
