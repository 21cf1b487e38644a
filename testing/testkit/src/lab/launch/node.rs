//! `Node`: one server of an engine, and what can be done to it.
//!
//! A method returns when the kernel or the server confirms its effect: a killed node is dead, a
//! stopped one has all its processes stopped, a restarted one answers. Ports never change.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::Signal;

use super::folder::{RECORD, SHELL};
use super::proc::{self, State};
use super::until;

/// How long a server may take to answer after its start, on a busy machine.
pub(super) const START: Duration = Duration::from_secs(30);

/// How long the kernel may take to stop or end processes.
const SIGNAL: Duration = Duration::from_secs(20);

/// A user and group to run as.
pub(super) type User = (u32, u32);

/// A check; the error says what is wrong.
pub(super) type Check = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Creates files in a node's directory.
pub(super) type Prepare = Box<dyn Fn(&Path) -> Result<(), String> + Send + Sync>;

/// Informs a cluster before a wiped member starts.
pub(super) type Rejoin = Box<dyn Fn() -> Result<Vec<String>, String> + Send + Sync>;

/// How to run a node.
pub(super) struct Spec {
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
    /// The user to run as instead of our own.
    pub(super) user: Option<User>,
    /// Fills the node's empty directory, before the first start and after a wipe.
    pub(super) prepare: Prepare,
    /// Whether the server answers, with or without the rest of the engine.
    pub(super) answers: Check,
    /// Tells the others that it comes back without data; returns further arguments.
    pub(super) rejoin: Option<Rejoin>,
    /// The signal that ends it for good; KILL unless that leaves something behind.
    pub(super) end: &'static str,
    /// Cleans up what a killed server leaves outside its directory.
    pub(super) after_kill: Option<fn(&Path)>,
    /// Its TLS port, in addition to its plain port.
    pub(super) tls_port: Option<u16>,
}

impl Spec {
    /// A server that runs as our own user and needs nothing in its directory.
    pub(super) fn new(program: &Path, answers: Check) -> Self {
        Self {
            program: program.to_owned(),
            arguments: Vec::new(),
            user: None,
            prepare: Box::new(|_| Ok(())),
            answers,
            rejoin: None,
            end: "KILL",
            after_kill: None,
            tls_port: None,
        }
    }
}

/// One server.
pub struct Node {
    name: String,
    port: u16,
    folder: PathBuf,
    spec: Spec,
    child: Mutex<Option<Child>>,
}

impl Node {
    /// A node called `name` (`n0`) in the engine's directory, not yet started.
    pub(super) fn new(engine: &Path, name: &str, port: u16, spec: Spec) -> Result<Self, String> {
        let node = Self {
            name: name.to_owned(),
            port,
            folder: engine.join(name),
            spec,
            child: Mutex::new(None),
        };
        node.fill()?;
        Ok(node)
    }

    /// The same, started.
    pub(super) fn started(
        engine: &Path,
        name: &str,
        port: u16,
        spec: Spec,
    ) -> Result<Self, String> {
        let node = Self::new(engine, name, port, spec)?;
        node.spawn()?;
        Ok(node)
    }

    /// The port that clients connect to, on 127.0.0.1; without TLS.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The address for clients: `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.spec.tls_port.unwrap_or(self.port))
    }

    /// Its TLS port, if it has one.
    pub fn tls_port(&self) -> Option<u16> {
        self.spec.tls_port
    }

    /// Its name in its engine's directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its data directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The log of its output, across all its starts.
    pub fn log(&self) -> PathBuf {
        self.folder.with_extension("log")
    }

    /// The pid of its main process, unless it was killed.
    pub fn pid(&self) -> Option<u32> {
        self.child.lock().as_ref().map(Child::id)
    }

    /// The state of its main process.
    pub fn state(&self) -> State {
        self.pid().map_or(State::Dead, proc::state)
    }

    /// Kills all its processes with KILL, like a crash. Its data stays.
    ///
    /// # Errors
    /// If they do not die.
    pub fn kill(&self) -> Result<(), String> {
        let Some(mut child) = self.child.lock().take() else {
            return Ok(());
        };
        let tree = proc::tree(child.id());
        for pid in &tree {
            proc::signal(*pid, Signal::KILL);
        }
        let _ = child.wait();
        let dead = |pid: &u32| proc::state(*pid) == State::Dead;
        until(SIGNAL, || {
            if tree.iter().all(dead) {
                Ok(())
            } else {
                Err(format!("{} does not die", self.name))
            }
        })?;
        if let Some(after) = self.spec.after_kill {
            after(&self.folder);
        }
        Ok(())
    }

    /// Stops all its processes with SIGSTOP. Connections stay open, and nothing is answered.
    ///
    /// # Errors
    /// If it is not running, or does not stop.
    pub fn stop(&self) -> Result<(), String> {
        let root = self.running()?;
        // Parents first: a stopped parent creates no further children.
        until(SIGNAL, || {
            let moving: Vec<u32> = proc::tree(root)
                .into_iter()
                .filter(|pid| proc::state(*pid) == State::Running)
                .collect();
            for pid in &moving {
                proc::signal(*pid, Signal::STOP);
                // A stopped child does not notice the death of its parent.
                if *pid != root {
                    self.record(*pid)?;
                }
            }
            if moving.is_empty() {
                Ok(())
            } else {
                Err(format!("{} does not stop", self.name))
            }
        })
    }

    /// Continues its processes.
    ///
    /// # Errors
    /// If it is not running, or does not continue.
    pub fn cont(&self) -> Result<(), String> {
        let root = self.running()?;
        for pid in proc::tree(root).into_iter().rev() {
            proc::signal(pid, Signal::CONT);
        }
        until(SIGNAL, || match proc::state(root) {
            State::Running => Ok(()),
            state => Err(format!("{} is {state:?}", self.name)),
        })
    }

    /// Kills it, if it is running, and restarts it with its data. Returns when it answers; without
    /// a majority of the others it may do no more than that.
    ///
    /// # Errors
    /// If it does not come back.
    pub fn restart(&self) -> Result<(), String> {
        self.kill()?;
        self.spawn()?;
        self.answers()
    }

    /// Kills it, removes its data, and starts it again empty. Where members are registered (etcd,
    /// Redis Cluster) the others are told that it is a new one. `Running::ready` waits until it has
    /// joined them.
    ///
    /// # Errors
    /// If it does not come back.
    pub fn wipe(&self) -> Result<(), String> {
        self.kill()?;
        self.forget()?;
        let further = self
            .spec
            .rejoin
            .as_ref()
            .map_or(Ok(Vec::new()), |rejoin| rejoin())?;
        self.spawn_with(&further)?;
        self.answers()
    }

    /// Removes its data. It must not be running.
    pub(super) fn forget(&self) -> Result<(), String> {
        std::fs::remove_dir_all(&self.folder)
            .map_err(|error| format!("{}: {error}", self.folder.display()))?;
        self.fill()
    }

    fn fill(&self) -> Result<(), String> {
        let owner = self.spec.user;
        std::fs::create_dir_all(&self.folder)
            .and_then(|()| match owner {
                Some((user, group)) => {
                    std::os::unix::fs::chown(&self.folder, Some(user), Some(group))
                }
                None => Ok(()),
            })
            .map_err(|error| format!("{}: {error}", self.folder.display()))?;
        (self.spec.prepare)(&self.folder)
    }

    fn running(&self) -> Result<u32, String> {
        let pid = self.pid().filter(|pid| proc::state(*pid) != State::Dead);
        pid.ok_or_else(|| format!("{} does not run", self.name))
    }

    /// Starts the process without waiting for it.
    pub(super) fn spawn(&self) -> Result<(), String> {
        self.spawn_with(&[])
    }

    fn spawn_with(&self, further: &[String]) -> Result<(), String> {
        let mut child = self.child.lock();
        let failed = |error| format!("{}: {error}", self.name);
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log());
        let log = log.map_err(failed)?;
        let errors: File = log.try_clone().map_err(failed)?;
        let mut command = Command::new(SHELL);
        command
            .args(["-c", RECORD])
            .arg(self.pids())
            .arg(self.spec.end)
            .arg(&self.spec.program)
            .args(&self.spec.arguments)
            .args(further)
            .current_dir(&self.folder)
            .env("LC_ALL", "C")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors);
        if let Some((user, group)) = self.spec.user {
            command.uid(user).gid(group);
        }
        *child = Some(command.spawn().map_err(failed)?);
        Ok(())
    }

    /// Waits until it answers.
    pub(super) fn answers(&self) -> Result<(), String> {
        until(START, || match self.state() {
            State::Dead => Err(format!("{} has ended", self.name)),
            _ => (self.spec.answers)(),
        })
    }

    fn pids(&self) -> PathBuf {
        self.folder.with_file_name("pids")
    }

    /// Registers with the janitor a process that was not started through [`RECORD`].
    fn record(&self, pid: u32) -> Result<(), String> {
        let Some(started) = proc::started(pid) else {
            return Ok(());
        };
        let list = OpenOptions::new().append(true).open(self.pids());
        list.and_then(|mut list| list.write_all(format!("{pid} {started} KILL\n").as_bytes()))
            .map_err(|error| format!("pids: {error}"))
    }

    /// Ends it for good: with its preferred signal, within two seconds.
    fn end(&self) {
        if self.spec.end != "KILL"
            && let Ok(root) = self.running()
        {
            proc::signal(root, Signal::QUIT);
            let _ = self.cont();
            let _ = until(Duration::from_secs(2), || match self.state() {
                State::Dead => Ok(()),
                _ => Err(String::new()),
            });
        }
        let _ = self.kill();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, port, .. } = self;
        write!(f, "{name} on {port}, {:?}", self.state())
    }
}
