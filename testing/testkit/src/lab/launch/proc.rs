//! Processes as the kernel sees them, by `/proc/PID/stat`.
//!
//! `kill -0` reports a zombie as alive where PID 1 reaps slowly; the state letter does not. A pid
//! alone may have been reused; together with the start time it is unique.

use std::collections::HashMap;

use rustix::process::{Pid, Signal, kill_process};

/// The state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It runs or sleeps.
    Running,
    /// It was stopped by a signal.
    Stopped,
    /// It is gone, or a zombie that was not reaped yet.
    Dead,
}

struct Stat {
    state: char,
    parent: u32,
    started: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name is in parentheses and may contain anything.
    let (_, rest) = text.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    Some(Stat {
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        started: fields.get(19)?.parse().ok()?,
    })
}

/// The state of a process.
pub fn state(pid: u32) -> State {
    match stat(pid).map(|stat| stat.state) {
        None | Some('Z' | 'X' | 'x') => State::Dead,
        Some('T' | 't') => State::Stopped,
        Some(_) => State::Running,
    }
}

/// When a process started, in clock ticks since boot.
pub(super) fn started(pid: u32) -> Option<u64> {
    stat(pid).map(|stat| stat.started)
}

/// The process and all its descendants, ancestors first.
pub fn tree(root: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        if let Some(stat) = stat(pid) {
            children.entry(stat.parent).or_default().push(pid);
        }
    }
    let mut tree = vec![root];
    let mut next = 0;
    while let Some(pid) = tree.get(next) {
        tree.extend(children.remove(pid).unwrap_or_default());
        next += 1;
    }
    tree
}

/// Sends a signal; ignores a process that is gone.
pub(super) fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// How many connections clients of this machine have to a port of it (IPv4).
pub fn connections_to(port: u16) -> usize {
    const ESTABLISHED: &str = "01";
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let to = format!(":{port:04X}");
    let lines = table.lines().skip(1).filter(|line| {
        let mut words = line.split_ascii_whitespace().skip(2);
        let remote = words.next().is_some_and(|remote| remote.ends_with(&to));
        remote && words.next() == Some(ESTABLISHED)
    });
    lines.count()
}
