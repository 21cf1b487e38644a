//! A process as `/proc/PID/stat` shows it, and the descendants of one.

use std::collections::HashMap;
use std::fmt::Display;
use std::io;

/// What distinguishes a process from others that had or will have its pid, and from its forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    state: char,
    pub(crate) parent: i32,
    pub(crate) group: i32,
    /// When it was started, in ticks since the boot.
    pub(crate) born: u64,
    /// The start of its stack, which differs for each `exec`.
    pub(crate) stack: u64,
}

impl Process {
    pub(crate) fn read(pid: i32) -> Option<Self> {
        Self::parse(pid, &stat(pid)?)
    }

    fn parse(pid: i32, fields: &[String]) -> Option<Self> {
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        Some(Self {
            pid,
            state: fields.first()?.chars().next()?,
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            born: number(19)?,
            stack: number(25)?,
        })
    }

    /// Whether it is a zombie.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.state == 'T'
    }
}

/// The fields after the name, which is in parentheses and may contain anything. The first of them
/// is the state, the third field of proc(5).
pub(crate) fn stat(pid: impl Display) -> Option<Vec<String>> {
    fields(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
}

fn fields(stat: &[u8]) -> Option<Vec<String>> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    Some(rest.split_ascii_whitespace().map(str::to_owned).collect())
}

/// All descendants of the process `root`, zombies included.
///
/// # Errors
/// Where there is no `/proc`.
pub(crate) fn descendants_of(root: i32) -> io::Result<Vec<Process>> {
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
        let line = b"7 (a) R 1 (b) S 3 4 5 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 987 1 2 3 4 5 77 8\n";
        let process = Process::parse(7, &fields(line).unwrap()).unwrap();
        let Process {
            parent,
            group,
            born,
            stack,
            ..
        } = process;
        assert_eq!((parent, group, born, stack), (3, 4, 987, 77));
        assert!(!process.has_ended() && !process.is_stopped());
        assert!(Process::parse(7, &fields(b"7 (a) R 1").unwrap()).is_none());
    }
}
