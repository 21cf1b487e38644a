//! `Tool`: another tool's process, whose lines are read as they come. Ends when it is dropped.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::SOON;

/// A process that is under way.
pub struct Tool {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Tool {
    /// Starts it, without input, and reads what it prints.
    ///
    /// # Panics
    /// When it can't be started.
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
    /// When none comes in time.
    pub fn line(&self) -> String {
        match self.lines.recv_timeout(SOON) {
            Ok(line) => line,
            Err(_) => panic!("the other tool prints nothing"),
        }
    }

    /// Whether it has printed nothing since it was asked last.
    pub fn is_silent(&self) -> bool {
        self.lines.try_recv().is_err()
    }

    /// Waits for its end: whether it succeeded.
    ///
    /// # Panics
    /// When it does not end.
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

    /// Asks it to end, as Ctrl-C does, and waits for that.
    ///
    /// # Panics
    /// As [`Tool::ended`].
    pub fn interrupt(self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        // One that has ended needs no signal.
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
