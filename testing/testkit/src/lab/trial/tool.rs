//! Another tool's process, which ends when it is dropped: a `Tool`, whose lines are read as they
//! come, or a `Servant`, which answers each line with one of its own.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::SOON;

/// Runs a command to its end without output.
///
/// # Errors
/// The last line of its output if it fails, or why it can't be started.
pub fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(said.lines().last().unwrap_or("it failed").to_owned())
}

/// Python with a package, in a virtual environment below `folder`.
///
/// # Errors
/// Why it is not available.
pub fn python(folder: &Path, package: &str) -> Result<Command, String> {
    let venv = folder.join("venv");
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    let python = || Command::new(venv.join("bin/python"));
    let quiet = ["install", "--quiet", "--disable-pip-version-check"];
    run(python().args(["-m", "pip"]).args(quiet).arg(package))?;
    Ok(python())
}

/// A running process.
pub struct Tool {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Tool {
    /// Starts it, without input, and reads its output.
    ///
    /// # Panics
    /// If it can't be started.
    pub fn start(command: &mut Command) -> Self {
        let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = started.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (told, lines) = mpsc::channel();
        if let Some(out) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    if told.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        Self { child, lines }
    }

    /// The next line that it prints.
    ///
    /// # Panics
    /// If none comes in time.
    pub fn line(&self) -> String {
        match self.lines.recv_timeout(SOON) {
            Ok(line) => line,
            Err(_) => panic!("the other tool prints nothing"),
        }
    }

    /// Whether it has printed nothing since the last call.
    pub fn is_silent(&self) -> bool {
        self.lines.try_recv().is_err()
    }

    /// Waits for its end; returns whether it succeeded.
    ///
    /// # Panics
    /// If it does not end.
    pub fn ended(mut self) -> bool {
        let end = Instant::now() + SOON;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.success(),
                Ok(None) => assert!(Instant::now() < end, "the other tool does not end"),
                Err(error) => panic!("{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Interrupts it, as Ctrl-C does, and waits for its end.
    ///
    /// # Panics
    /// As [`Tool::ended`].
    pub fn interrupt(self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        // If it has ended, it needs no signal.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        self.ended();
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process that answers each line that it is told with one of its own.
pub struct Servant {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Servant {
    /// Starts it.
    ///
    /// # Panics
    /// If it can't be started.
    pub fn start(command: &mut Command) -> Self {
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = started.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        match (child.stdin.take(), child.stdout.take()) {
            (Some(orders), Some(answers)) => Self {
                child,
                orders,
                answers: BufReader::new(answers),
            },
            _ => panic!("{command:?} has no pipes"),
        }
    }

    /// Sends it a line.
    ///
    /// # Panics
    /// If it does not read.
    pub fn tell(&mut self, order: &str) {
        let told = writeln!(self.orders, "{order}");
        told.unwrap_or_else(|error| panic!("{order}: {error}"));
    }

    /// Its next line.
    ///
    /// # Panics
    /// If there is none.
    pub fn answer(&mut self) -> String {
        let mut answer = String::new();
        let read = self.answers.read_line(&mut answer);
        read.unwrap_or_else(|error| panic!("no answer: {error}"));
        answer.trim().to_owned()
    }

    /// Whether it answers yes, and not no.
    ///
    /// # Panics
    /// If it answers something else.
    pub fn says_yes(&mut self) -> bool {
        match self.answer().as_str() {
            "yes" => true,
            "no" => false,
            other => panic!("the other tool says {other:?}"),
        }
    }
}

impl Drop for Servant {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
