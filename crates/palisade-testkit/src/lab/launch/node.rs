//! `Node`: one server of an engine, and what can be done to it.
//!
//! A verb returns when the kernel or the server shows that it has happened: a node that was
//! killed is dead, one that was stopped stands still with all its processes, one that was
//! restarted answers. Ports stay the same for its whole life.

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

/// How long a server may take to answer after its start, on a machine that is busy with others.
pub(super) const START: Duration = Duration::from_secs(30);

/// How long the kernel may take to stop or end processes.
const SIGNAL: Duration = Duration::from_secs(5);

/// A user and group to run as.
pub(super) type User = (u32, u32);

/// A check, and what is wrong if it fails.
pub(super) type Check = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Makes files in a node's folder.
pub(super) type Prepare = Box<dyn Fn(&Path) -> Result<(), String> + Send + Sync>;

/// What a cluster must be told before a wiped member starts.
pub(super) type Rejoin = Box<dyn Fn() -> Result<Vec<String>, String> + Send + Sync>;

/// What a node runs.
pub(super) struct Spec {
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
    /// Runs as this user instead of ours.
    pub(super) user: Option<User>,
    /// Fills the node's empty folder, before the first start and after a wipe.
    pub(super) prepare: Prepare,
    /// Whether the server answers, with or without the rest of the engine.
    pub(super) answers: Check,
    /// Tells the others that it comes back empty and they do not; gives further arguments.
    pub(super) rejoin: Option<Rejoin>,
    /// The signal that ends it for good; KILL unless it leaves something behind then.
    pub(super) end: &'static str,
    /// Cleans up what a killed server leaves outside its folder.
    pub(super) after_kill: Option<fn(&Path)>,
    /// Where it speaks TLS, beside its port.
    pub(super) tls_port: Option<u16>,
}

impl Spec {
    /// A server that runs as ourselves and needs nothing in its folder.
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
    /// A node called `name` (`n0`) in the engine's folder, not yet started.
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

    /// Where clients connect to: `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.spec.tls_port.unwrap_or(self.port))
    }

    /// The port on which it speaks TLS, where it does.
    pub fn tls_port(&self) -> Option<u16> {
        self.spec.tls_port
    }

    /// What it is called in its engine's folder.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it keeps its data.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it has written to its output, over all its starts.
    pub fn log(&self) -> PathBuf {
        self.folder.with_extension("log")
    }

    /// Its main process, unless it was killed.
    pub fn pid(&self) -> Option<u32> {
        self.child.lock().as_ref().map(Child::id)
    }

    /// What its main process does.
    pub fn state(&self) -> State {
        self.pid().map_or(State::Dead, proc::state)
    }

    /// Kills all its processes with KILL, as a crash does. Its data stays.
    ///
    /// # Errors
    /// When they do not die.
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

    /// Stops all its processes where they are. Connections stay open, and nothing is answered.
    ///
    /// # Errors
    /// When it does not run, or does not stop.
    pub fn stop(&self) -> Result<(), String> {
        let root = self.running()?;
        // Parents first: a stopped parent has no further children.
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

    /// Lets its processes go on.
    ///
    /// # Errors
    /// When it does not run, or does not go on.
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

    /// Kills it, if it runs, and starts it again on its data. Returns when it answers: without a
    /// majority of the others that may be all it does.
    ///
    /// # Errors
    /// When it does not come back.
    pub fn restart(&self) -> Result<(), String> {
        self.kill()?;
        self.spawn()?;
        self.answers()
    }

    /// Kills it, removes its data, and starts it again empty. Where members are counted (etcd,
    /// Redis Cluster) the others are told that it is a new one. `Running::ready` waits until it
    /// has joined them.
    ///
    /// # Errors
    /// When it does not come back.
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

    /// Removes its data. It must not run.
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

    /// Starts the process, and does not wait for it.
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

    /// Tells the janitor of a process that did not start through [`RECORD`].
    fn record(&self, pid: u32) -> Result<(), String> {
        let Some(started) = proc::started(pid) else {
            return Ok(());
        };
        let list = OpenOptions::new().append(true).open(self.pids());
        list.and_then(|mut list| list.write_all(format!("{pid} {started} KILL\n").as_bytes()))
            .map_err(|error| format!("pids: {error}"))
    }

    /// Ends it for good: as it likes best, and within two seconds.
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
