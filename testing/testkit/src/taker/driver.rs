//! `Taker`: drives a second process, which is killed and reaped on drop.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use palisade::engine::{Ask, READERS};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::mpsc;

use super::{Event, TakerArgs, What, process};
use crate::conformance::within;

/// How second processes are started: the program, and the engine that it connects to.
#[derive(Debug, Clone)]
pub struct Second {
    /// The testkit's command, or a conformance binary.
    pub program: PathBuf,
    /// The engine under test whose `connect` the program uses, if it knows that name.
    pub engine: &'static str,
}

impl Second {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env(process::ENGINE, self.engine);
        command
    }

    /// Starts `taker URL NAME …`.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn taker(&self, url: &str, name: &str, args: &TakerArgs) -> io::Result<Taker> {
        let mut command = self.command();
        command.args(["taker", url, name]);
        if let Some(ttl) = args.ttl {
            command.args(["--ttl", &format!("{}ms", ttl.as_millis())]);
        }
        match args.ask {
            Ask::Whole => {}
            Ask::Part {
                capacity: READERS, ..
            } => {
                command.args(["--mode", "shared"]);
            }
            Ask::Part { weight, capacity } => {
                command.args(["--mode", "permits", &format!("{weight}/{capacity}")]);
            }
        }
        if args.no_release {
            command.arg("--no-release");
        }
        Taker::start(command)
    }

    /// Starts `counter URL NAME FILE TIMES`, without the lock if `unlocked`.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn counter(
        &self,
        (url, name): (&str, &str),
        file: &Path,
        times: u32,
        unlocked: bool,
    ) -> io::Result<Taker> {
        let mut command = self.command();
        command
            .args(["counter", url, name])
            .arg(file)
            .arg(times.to_string());
        if unlocked {
            command.arg("--unlocked");
        }
        Taker::start(command)
    }
}

/// A second process.
#[derive(Debug)]
pub struct Taker {
    child: Child,
    stdin: Option<ChildStdin>,
    events: mpsc::UnboundedReceiver<Event>,
    seen: Vec<Event>,
}

impl Taker {
    fn start(mut command: Command) -> io::Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()?;
        let (sender, events) = mpsc::unbounded_channel();
        let stdin = child.stdin.take();
        if let Some(stdout) = child.stdout.take() {
            // Ends with the process, which closes its stdout.
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    let Ok(event) = serde_json::from_str(&line) else {
                        return;
                    };
                    if sender.send(event).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Self {
            child,
            stdin,
            events,
            seen: Vec::new(),
        })
    }

    /// Waits for the next event of this kind, ignoring others.
    ///
    /// # Panics
    /// If it does not come in time, or the process fails or ends without it.
    #[track_caller]
    pub fn until(&mut self, what: What, limit: Duration) -> impl Future<Output = Event> {
        within(
            limit,
            &format!("{what:?} of a second process"),
            async move {
                while let Some(event) = self.events.recv().await {
                    self.seen.push(event.clone());
                    if event.event == what {
                        return event;
                    }
                    let failed = event.event == What::Failed;
                    assert!(!failed, "the second process failed: {event:?}");
                }
                panic!("the second process ended without {what:?}")
            },
        )
    }

    /// The events of this kind so far.
    pub fn seen(&self, what: What) -> impl Iterator<Item = &Event> {
        self.seen.iter().filter(move |event| event.event == what)
    }

    /// Writes a line to its stdin: `release`, `check` or `exit`.
    ///
    /// # Panics
    /// If the process has ended.
    pub fn tell(&mut self, command: &str) {
        let stdin = self.stdin.as_mut().expect("its stdin is a pipe");
        let told = writeln!(stdin, "{command}").and_then(|()| stdin.flush());
        told.expect("a second process that reads");
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Stops it with SIGSTOP.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// Continues it.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it with SIGKILL.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    // Only `drop` reaps the child, so its id can't have been reused.
    fn signal(&self, signal: Signal) {
        let sent = kill_process(Pid::from_child(&self.child), signal);
        sent.expect("a second process that lives");
    }
}

impl Drop for Taker {
    fn drop(&mut self) {
        // This also kills a stopped process. Both calls fail only if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Increments the number in `file` by a separate read and write with `pause` in between, so that
/// two concurrent calls lose an update. Each write replaces the digits in place, so the file always
/// contains a number.
///
/// # Errors
/// Those of the file.
pub fn increment(file: &Path, pause: Duration) -> io::Result<u64> {
    let mut file = File::options().read(true).write(true).open(file)?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let seen: u64 = text
        .trim()
        .parse()
        .map_err(|_| io::ErrorKind::InvalidData)?;
    std::thread::sleep(pause);
    file.rewind()?;
    file.write_all(format!("{:020}\n", seen + 1).as_bytes())?;
    Ok(seen + 1)
}
