//! `Crew`: the worker processes of a run, as the harness observes and disturbs them.
//!
//! A process is reaped only after its last signal, so that its id can't have been reused. Stops and
//! kills are recorded with intervals that include them completely.

use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use palisade::BootTime;
use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::StdRng;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::Notify;

use super::worker::Spec;
use crate::lab::history::{Recorder, What};
use crate::taker::process::ENGINE;

/// What a worker reports that it is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Phase {
    #[default]
    Free,
    Waiting,
    Held,
    Gate,
    Gone,
}

#[derive(Debug, Default)]
struct Seen {
    phase: Phase,
    wrote: u64,
}

/// One worker process.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) client: String,
    slot: usize,
    child: Child,
    stdin: Option<ChildStdin>,
    seen: Arc<Mutex<Seen>>,
    stopped: bool,
}

impl Member {
    pub(super) fn phase(&self) -> Phase {
        self.seen.lock().phase
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        Ok(kill_process(pid.ok_or(io::ErrorKind::NotFound)?, signal)?)
    }

    pub(super) fn tell(&mut self, word: &str) {
        // This fails if the process has ended, which its phase shows.
        if let Some(stdin) = &mut self.stdin {
            let _ = writeln!(stdin, "{word}").and_then(|()| stdin.flush());
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // This also kills a stopped process. Both calls fail only if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All workers of a run.
#[derive(Debug)]
pub(super) struct Crew {
    pub(super) members: Vec<Member>,
    pub(super) rng: StdRng,
    pub(super) record: Recorder,
    program: PathBuf,
    engine: &'static str,
    spec: Spec,
    started: usize,
    changed: Arc<Notify>,
}

impl Crew {
    /// A crew without workers. `spec` has what all workers share.
    pub(super) fn new(
        program: PathBuf,
        engine: &'static str,
        spec: Spec,
        rng: StdRng,
        record: Recorder,
    ) -> Self {
        Self {
            members: Vec::new(),
            rng,
            record,
            program,
            engine,
            spec,
            started: 0,
            changed: Arc::default(),
        }
    }

    /// Starts a worker in its own lane.
    pub(super) fn hire(&mut self) -> io::Result<()> {
        let slot = self.members.len();
        let member = self.start(slot, format!("w{}", slot + 1))?;
        self.members.push(member);
        Ok(())
    }

    fn start(&mut self, slot: usize, client: String) -> io::Result<Member> {
        let folder = self.spec.history.clone();
        let spec = Spec {
            history: folder.join(format!("{client}.jsonl")),
            seed: self.rng.random(),
            client: client.clone(),
            ..self.spec.clone()
        };
        let mut child = Command::new(&self.program)
            .env(ENGINE, self.engine)
            .arg("worker")
            .arg(serde_json::to_string(&spec)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()?;
        self.started += 1;
        let seen = Arc::new(Mutex::new(Seen::default()));
        let stdin = child.stdin.take();
        if let Some(stdout) = child.stdout.take() {
            let (seen, changed) = (Arc::clone(&seen), Arc::clone(&self.changed));
            // Ends with the process, which closes its stdout.
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    let mut seen = seen.lock();
                    match line.as_str() {
                        "waiting" => seen.phase = Phase::Waiting,
                        "held" => seen.phase = Phase::Held,
                        "gate" => seen.phase = Phase::Gate,
                        "free" => seen.phase = Phase::Free,
                        _ => seen.wrote += 1,
                    }
                    drop(seen);
                    changed.notify_waiters();
                }
                seen.lock().phase = Phase::Gone;
                changed.notify_waiters();
            });
        }
        Ok(Member {
            client,
            slot,
            child,
            stdin,
            seen,
            stopped: false,
        })
    }

    /// Waits until `find` returns something, at most until `deadline`.
    pub(super) async fn until<T>(
        &mut self,
        deadline: BootTime,
        mut find: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<T> {
        let changed = Arc::clone(&self.changed);
        loop {
            let change = changed.notified();
            let mut change = std::pin::pin!(change);
            change.as_mut().enable();
            if let Some(found) = find(self) {
                return Some(found);
            }
            if tokio::time::timeout(deadline.remaining(), change)
                .await
                .is_err()
            {
                return find(self);
            }
        }
    }

    /// A worker that is in `phase` now or before `deadline`.
    pub(super) async fn one(&mut self, phase: Phase, deadline: BootTime) -> Option<usize> {
        self.until(deadline, |crew| {
            let members = crew.members.iter().enumerate();
            let all: Vec<usize> = members
                .filter(|(_, member)| member.phase() == phase && !member.stopped)
                .map(|(at, _)| at)
                .collect();
            match all.len() {
                0 => None,
                many => Some(all[crew.rng.random_range(0..many)]),
            }
        })
        .await
    }

    /// Stops a worker.
    pub(super) fn stop(&mut self, at: usize) -> io::Result<()> {
        let before = BootTime::now();
        self.members[at].signal(Signal::STOP)?;
        self.members[at].stopped = true;
        let client = &self.members[at].client;
        self.record.record_at(before, client, What::PauseBegin);
        Ok(())
    }

    /// Continues a stopped worker.
    pub(super) fn go_on(&mut self, at: usize) -> io::Result<()> {
        if !self.members[at].stopped {
            return Ok(());
        }
        self.members[at].signal(Signal::CONT)?;
        self.members[at].stopped = false;
        let client = &self.members[at].client;
        self.record
            .record_at(BootTime::now(), client, What::PauseEnd);
        Ok(())
    }

    /// Kills a worker and starts another in its lane.
    pub(super) fn replace(&mut self, at: usize) -> io::Result<()> {
        let before = BootTime::now();
        self.members[at].signal(Signal::KILL)?;
        let client = &self.members[at].client;
        self.record.record_at(before, client, What::Kill);
        let slot = self.members[at].slot;
        let next = format!("w{}.{}", slot + 1, self.started);
        let next = self.start(slot, next)?;
        // Dropping the old one reaps it.
        self.members[at] = next;
        Ok(())
    }

    /// How many writes of the other workers were acknowledged.
    pub(super) fn wrote_beside(&self, at: usize) -> u64 {
        let others = self.members.iter().enumerate().filter(|(o, _)| *o != at);
        others.map(|(_, member)| member.seen.lock().wrote).sum()
    }

    /// Tells all workers to finish, and waits for them. Those that don't are killed, and named in
    /// the result.
    pub(super) async fn dismiss(&mut self, limit: Duration) -> io::Result<Vec<String>> {
        for at in 0..self.members.len() {
            self.go_on(at)?;
            self.members[at].tell("stop");
        }
        let gone = |member: &Member| member.phase() == Phase::Gone;
        let deadline = BootTime::now() + limit;
        self.until(deadline, |crew| crew.members.iter().all(gone).then_some(()))
            .await;
        let mut hung = Vec::new();
        for member in self.members.drain(..) {
            if !gone(&member) {
                let text = "did not end when it was told to".to_owned();
                let note = What::Note { text };
                self.record.record_at(BootTime::now(), &member.client, note);
                hung.push(member.client.clone());
            }
        }
        Ok(hung)
    }
}
