//! A store of its own for each test, and palisade processes that are ended with the test.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::contract;

/// Far more than anything here takes; a test that needs it has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// The built command, in an environment that names no engine.
pub(crate) fn palisade() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_palisade"));
    for name in [
        "PALISADE_URL",
        "PALISADE_TOKEN",
        "PALISADE_LOCK",
        "PALISADE_ANCESTORS",
        "PALISADE_CLAIMS",
        "PALISADE_GATEWAY_TOKEN",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "NO_COLOR",
    ] {
        command.env_remove(name);
    }
    // The environment of the test runner may set it.
    command.env("PALISADE_CONFIG", "/dev/null");
    command.stdin(Stdio::null());
    command
}

/// A directory with the locks of one test.
pub(crate) struct Store {
    /// Declared before the directory, so that it is dropped first.
    gateway: Option<Running>,
    dir: TempDir,
}

impl Store {
    pub(crate) fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let gateway = None;
        Self { gateway, dir }
    }

    /// A store that the command reaches only through the socket of a gateway.
    pub(crate) fn behind_a_gateway() -> Self {
        let mut store = Self::new();
        let mut command = store.palisade("serve --json --no-port --drain 100ms --socket");
        command.arg(store.path("run/gateway.sock"));
        let mut gateway = Running::start(command);
        let said = gateway.stderr_line();
        assert!(said.contains("serving"), "{said}");
        store.gateway = Some(gateway);
        store
    }

    /// A path beside the store.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn url(&self) -> String {
        match &self.gateway {
            None => self.direct_url(),
            Some(_) => format!("http+unix:{}", self.path("run/gateway.sock").display()),
        }
    }

    /// The URL of the store itself, past a gateway.
    pub(crate) fn direct_url(&self) -> String {
        format!("file:{}", self.path("store").display())
    }

    /// palisade with these arguments, on this store.
    pub(crate) fn palisade(&self, args: &(impl Words + ?Sized)) -> Command {
        let mut command = palisade();
        command.env("PALISADE_URL", self.url()).args(args.words());
        command
    }

    /// The same, run to its end.
    #[track_caller]
    pub(crate) fn ran(&self, args: &(impl Words + ?Sized)) -> Ran {
        finish(self.palisade(args))
    }

    /// The same, for commands that don't wait.
    #[track_caller]
    pub(crate) fn soon(&self, args: &(impl Words + ?Sized)) -> Ran {
        finish_soon(self.palisade(args))
    }

    /// The code that it ends with.
    #[track_caller]
    pub(crate) fn code(&self, args: &(impl Words + ?Sized)) -> Option<i32> {
        self.ran(args).status.code()
    }

    /// `palisade run NAME ARGS… -- sh -c SCRIPT`.
    pub(crate) fn run(&self, name: &str, args: &[&str], script: &str) -> Command {
        let mut command = self.palisade(&["run", name]);
        command.args(args).args(["--", "sh", "-c", script]);
        command
    }

    /// Starts a `run` whose script says `ready` when it holds the lock.
    pub(crate) fn start(&self, name: &str, args: &[&str], script: &str) -> Running {
        let mut running = Running::start(self.run(name, args, script));
        running.line();
        running
    }

    /// Holds `name` until the answer is dropped or told to end.
    pub(crate) fn hold(&self, name: &str, args: &[&str]) -> Running {
        self.start(name, args, "echo ready; cat >/dev/null")
    }

    /// What `ls --json` shows.
    pub(crate) fn lines(&self) -> Vec<Value> {
        let lines = self.ran("ls --json").is(0).json(contract::LINES);
        lines.as_array().unwrap().clone()
    }

    pub(crate) fn waiters(&self) -> usize {
        let waiters = |line: &Value| line["waiters"].as_array().unwrap().len();
        self.lines().iter().map(waiters).sum()
    }

    /// Makes the store hang until the answer is dropped: every lock in it is taken.
    pub(crate) fn hang(&self) -> Hang {
        if !self.path("store").exists() {
            assert_eq!(code(self.run("first", &[], "true")), Some(0));
        }
        let inside = |folder: &str| {
            let files = std::fs::read_dir(self.path("store").join(folder));
            let files = files.unwrap().map(|file| file.unwrap().path());
            files.filter(|file| file.extension().is_none())
        };
        let lock = |path| {
            // Files come and go.
            let file = File::options().read(true).write(true).open(path).ok()?;
            file.lock().ok().map(|()| file)
        };
        let mut hang = Hang::default();
        let others = std::iter::once(self.path("store/lock")).chain(inside("leases"));
        hang.others.extend(others.filter_map(lock));
        for line in inside("lines").filter_map(lock) {
            let mut first = [0];
            line.read_exact_at(&mut first, 0).unwrap();
            line.write_all_at(b"?", 0).unwrap();
            hang.lines.push((line, first));
        }
        hang
    }

    /// Fails unless the store shows no claim.
    #[track_caller]
    pub(crate) fn assert_empty(&self) {
        assert_eq!(self.lines(), Vec::<Value>::new());
    }
}

/// A store that hangs. Its lines are in the middle of a change: without the lock, which is taken,
/// they can't be read either.
#[derive(Default)]
pub(crate) struct Hang {
    /// Each with its first byte.
    lines: Vec<(File, [u8; 1])>,
    others: Vec<File>,
}

impl Drop for Hang {
    fn drop(&mut self) {
        for (line, first) in &self.lines {
            let _ = line.write_all_at(first, 0);
        }
    }
}

/// What a process writes, as it comes.
pub(crate) struct Pipe {
    chunks: Receiver<Vec<u8>>,
    seen: Vec<u8>,
}

impl Pipe {
    pub(crate) fn of(mut source: impl Read + Send + 'static) -> Self {
        let (sender, chunks) = channel();
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(length @ 1..) = source.read(&mut chunk) {
                if sender.send(chunk[..length].to_vec()).is_err() {
                    break;
                }
            }
        });
        let seen = Vec::new();
        Self { chunks, seen }
    }

    /// Waits for `text`, and returns everything up to and including it; at the end of the pipe,
    /// everything.
    #[track_caller]
    pub(crate) fn see(&mut self, text: &str) -> String {
        let at = |seen: &[u8]| {
            let found = seen
                .windows(text.len())
                .position(|part| part == text.as_bytes());
            found.map(|at| at + text.len())
        };
        let deadline = Instant::now() + LIMIT;
        let end = loop {
            if let Some(end) = at(&self.seen) {
                break end;
            }
            // Other output may arrive repeatedly.
            let left = deadline.saturating_duration_since(Instant::now());
            match self.chunks.recv_timeout(left) {
                Ok(chunk) => self.seen.extend(chunk),
                Err(RecvTimeoutError::Disconnected) => break self.seen.len(),
                Err(RecvTimeoutError::Timeout) => {
                    let seen = String::from_utf8_lossy(&self.seen);
                    panic!("waited in vain for {text:?} after {seen:?}");
                }
            }
        };
        let rest = self.seen.split_off(end);
        let seen = std::mem::replace(&mut self.seen, rest);
        String::from_utf8_lossy(&seen).into_owned()
    }

    /// The output since then, if any.
    pub(crate) fn more(&mut self) -> Vec<u8> {
        if let Ok(chunk) = self.chunks.recv_timeout(Duration::from_millis(20)) {
            self.seen.extend(chunk);
        }
        std::mem::take(&mut self.seen)
    }

    /// Everything up to the end of the pipe.
    #[track_caller]
    fn rest(mut self) -> Vec<u8> {
        loop {
            match self.chunks.recv_timeout(LIMIT) {
                Ok(chunk) => self.seen.extend(chunk),
                Err(RecvTimeoutError::Disconnected) => return self.seen,
                Err(RecvTimeoutError::Timeout) => panic!("the pipe stays open"),
            }
        }
    }
}

/// A palisade in the background.
pub(crate) struct Running {
    pub(crate) process: Child,
    stdin: Option<ChildStdin>,
    stdout: Option<Pipe>,
    pub(crate) stderr: Option<Pipe>,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            stdin: process.stdin.take(),
            stdout: process.stdout.take().map(Pipe::of),
            stderr: process.stderr.take().map(Pipe::of),
            process,
        }
    }

    /// The next line of its stdout; empty at the end of it.
    #[track_caller]
    pub(crate) fn line(&mut self) -> String {
        self.stdout
            .as_mut()
            .unwrap()
            .see("\n")
            .trim_end()
            .to_owned()
    }

    /// The next line of its stderr.
    #[track_caller]
    pub(crate) fn stderr_line(&mut self) -> String {
        self.stderr
            .as_mut()
            .unwrap()
            .see("\n")
            .trim_end()
            .to_owned()
    }

    /// Writes to its stdin.
    pub(crate) fn write(&mut self, text: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        stdin.write_all(text.as_bytes()).unwrap();
    }

    pub(crate) fn signal(&self, signal: &str) {
        kill(self.process.id(), signal);
    }

    /// Closes its stdin.
    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn end(mut self) -> Ran {
        self.close_stdin();
        Ran(Output {
            status: wait(&mut self.process),
            stdout: self.stdout.take().unwrap().rest(),
            stderr: self.stderr.take().unwrap().rest(),
        })
    }

    /// Waits for its end, and answers with its code.
    #[track_caller]
    pub(crate) fn code(mut self) -> Option<i32> {
        self.close_stdin();
        wait(&mut self.process).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Not KILL: palisade ends its child first.
        if matches!(self.process.try_wait(), Ok(None)) {
            kill(self.process.id(), "CONT");
            kill(self.process.id(), "TERM");
            self.stdin = None;
            let _ = self.process.wait();
        }
    }
}

/// Waits for the end of a process.
pub(crate) fn wait(process: &mut Child) -> std::process::ExitStatus {
    let mut status = None;
    until("the process ends", || {
        status = process.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

/// The number of rounds; `PALISADE_TEST_FULL=1` runs more.
pub(crate) fn rounds() -> usize {
    match std::env::var_os("PALISADE_TEST_FULL") {
        Some(full) if full == "1" => 50,
        _ => 5,
    }
}

/// Runs a command to its end.
#[track_caller]
pub(crate) fn finish(command: Command) -> Ran {
    Running::start(command).end()
}

/// Runs a command that does not wait, and so must end soon. A busy machine needs seconds for what
/// takes milliseconds.
#[track_caller]
pub(crate) fn finish_soon(command: Command) -> Ran {
    let began = Instant::now();
    let output = finish(command);
    assert!(began.elapsed() < Duration::from_secs(15), "{output:?}");
    output
}

/// A command of palisade, run by a shell after `before`.
pub(crate) fn in_shell(before: &str, palisade: &Command) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{before}; exec \"$@\""), "sh"]);
    command
        .arg(palisade.get_program())
        .args(palisade.get_args());
    for (name, value) in palisade.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

pub(crate) fn code(command: Command) -> Option<i32> {
    finish(command).status.code()
}

/// How a process ended, and all that it wrote.
#[derive(Debug)]
pub(crate) struct Ran(pub(crate) Output);

impl std::ops::Deref for Ran {
    type Target = Output;

    fn deref(&self) -> &Output {
        &self.0
    }
}

impl Ran {
    pub(crate) fn out(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }

    pub(crate) fn err(&self) -> String {
        String::from_utf8(self.stderr.clone()).unwrap()
    }

    /// It ended with this code.
    #[track_caller]
    pub(crate) fn is(&self, code: i32) -> &Self {
        assert_eq!(self.status.code(), Some(code), "{self:?}");
        self
    }

    /// It wrote this to stderr.
    #[track_caller]
    pub(crate) fn says(&self, text: &str) -> &Self {
        assert!(self.err().contains(text), "{text:?} in {self:?}");
        self
    }

    /// It wrote nothing to stderr.
    #[track_caller]
    pub(crate) fn silent(&self) -> &Self {
        assert_eq!(self.err(), "", "{self:?}");
        self
    }

    /// It wrote exactly this to stdout.
    #[track_caller]
    pub(crate) fn wrote(&self, text: &str) -> &Self {
        assert_eq!(self.out(), text, "{self:?}");
        self
    }

    /// The JSON document on its stdout.
    #[track_caller]
    pub(crate) fn json(&self, is: contract::Is) -> Value {
        contract::read(&self.out(), is)
    }

    /// The error that palisade reports as JSON, on the last line of stderr.
    #[track_caller]
    pub(crate) fn error(&self) -> Value {
        let text = self.err();
        contract::read(text.lines().last().unwrap(), contract::ERROR)["error"].clone()
    }
}

/// Arguments: words between spaces, or a list.
pub(crate) trait Words {
    fn words(&self) -> Vec<OsString>;
}

impl Words for str {
    fn words(&self) -> Vec<OsString> {
        self.split_whitespace().map(OsString::from).collect()
    }
}

impl Words for String {
    fn words(&self) -> Vec<OsString> {
        self.as_str().words()
    }
}

impl<S: AsRef<OsStr>> Words for [S] {
    fn words(&self) -> Vec<OsString> {
        self.iter().map(|word| word.as_ref().to_owned()).collect()
    }
}

impl<S: AsRef<OsStr>, const N: usize> Words for [S; N] {
    fn words(&self) -> Vec<OsString> {
        self.as_slice().words()
    }
}

impl<S: AsRef<OsStr>> Words for Vec<S> {
    fn words(&self) -> Vec<OsString> {
        self.as_slice().words()
    }
}

/// Polls for `event`; fails if it does not come.
#[track_caller]
pub(crate) fn until(what: &str, mut event: impl FnMut() -> bool) {
    let began = Instant::now();
    while !event() {
        assert!(began.elapsed() < LIMIT, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The processes that `pid` has started and not reaped.
pub(crate) fn children(pid: impl std::fmt::Display) -> Vec<String> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    children.split_whitespace().map(str::to_owned).collect()
}

pub(crate) fn kill(pid: u32, signal: &str) {
    let pid = pid.to_string();
    let sent = Command::new("kill").args(["-s", signal, &pid]).status();
    assert!(sent.is_ok());
}

/// Whether a process runs: neither gone nor a zombie.
#[track_caller]
pub(crate) fn runs(pid: &str) -> bool {
    assert!(!pid.is_empty(), "it has ended before it told its pid");
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat"));
    let state = |stat: &str| {
        stat.rsplit(") ")
            .next()
            .and_then(|rest| rest.chars().next())
    };
    stat.is_ok_and(|stat| !matches!(state(&stat), Some('Z' | 'X') | None))
}

/// Runs a command whose stdout is a closed pipe.
pub(crate) fn into_closed_pipe(mut command: Command) -> Ran {
    let mut head = Command::new("true").stdin(Stdio::piped()).spawn().unwrap();
    let closed = head.stdin.take().unwrap();
    head.wait().unwrap();
    let command = command.stdout(closed).stderr(Stdio::piped());
    Ran(command.output().unwrap())
}
