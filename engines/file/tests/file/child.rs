//! A second process: this test binary again, told by its environment what to do.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;

use palisade::engine::{Ask, Engine, Lease, Left, Place, Renewal, SharedEngine};

use super::*;

/// A process that is killed when it is dropped.
pub(crate) struct Second {
    child: Child,
    /// Closing it lets a child end by itself.
    stdin: Option<ChildStdin>,
    said: mpsc::Receiver<String>,
}

impl Second {
    pub(crate) fn start(dir: &Path, role: &str) -> Self {
        Self::start_as(dir, role, None, "")
    }

    /// Starts it as another user, with options in its URL.
    pub(crate) fn start_as(dir: &Path, role: &str, user: Option<u32>, options: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        if let Some(user) = user {
            use std::os::unix::process::CommandExt;
            command.uid(user).gid(user);
        }
        Self::spawn(command, dir, role, options)
    }

    /// Starts it by a command that ends by executing its arguments.
    pub(crate) fn spawn(mut command: Command, dir: &Path, role: &str, options: &str) -> Self {
        let mut child = command
            .args(["--exact", "child::act", "--ignored", "--nocapture"])
            .env("PALISADE_TEST_ROLE", role)
            .env("PALISADE_TEST_DIR", dir)
            .env("PALISADE_TEST_OPTIONS", options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (say, said) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(std::result::Result::ok) {
                // The harness's own line comes before, without its end.
                if let Some((_, line)) = line.split_once("say: ") {
                    let _ = say.send(line.to_owned());
                }
            }
        });
        Self {
            stdin: child.stdin.take(),
            child,
            said,
        }
    }

    /// Starts it with a limit on its file descriptors.
    pub(crate) fn start_with_files(dir: &Path, role: &str, limit: u64) -> Self {
        let mut command = Command::new("sh");
        let script = format!("ulimit -n {limit}; exec \"$0\" \"$@\"");
        command
            .args(["-c", &script])
            .arg(std::env::current_exe().unwrap());
        Self::spawn(command, dir, role, "")
    }

    /// What it has said meanwhile and was not asked for.
    pub(crate) fn has_said(&self) -> Vec<String> {
        self.said.try_iter().collect()
    }

    /// What it says until it ends by itself.
    pub(crate) fn says_all(mut self) -> String {
        drop(self.stdin.take());
        let said: Vec<String> = self.said.iter().collect();
        said.join("; ")
    }

    /// The next thing it says.
    pub(crate) fn says(&self) -> String {
        self.said.recv_timeout(PATIENCE).expect("it says something")
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    /// Waits until the kernel says that it is stopped.
    pub(crate) fn wait_stopped(&self) {
        let stat = format!("/proc/{}/stat", self.child.id());
        let until = BootTime::now() + PATIENCE;
        while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
            assert!(!until.has_passed(), "it stops");
            std::thread::yield_now();
        }
    }

    /// Lets it end by itself, and waits for that.
    pub(crate) fn end(mut self) {
        drop(self.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(what: &str) {
    println!("say: {what}");
}

fn wait_for_end() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// What the second process does. Not a test by itself.
#[tokio::test]
#[ignore = "run as a second process by other tests"]
async fn act() {
    let Some(dir) = std::env::var_os("PALISADE_TEST_DIR") else {
        return;
    };
    let dir = Path::new(&dir);
    match std::env::var("PALISADE_TEST_ROLE").unwrap().as_str() {
        "hold" => {
            let options = std::env::var("PALISADE_TEST_OPTIONS").unwrap();
            let engine = match try_open(dir, &options).await {
                Ok(engine) => engine,
                Err(error) => return say(&format!("{:?}: {error}", error.kind())),
            };
            say(&hold(&engine, "door").await.sequence.to_string());
            wait_for_end();
        }
        "hold by lease" => {
            let engine = try_open(dir, "ends_with=lease").await.unwrap();
            let held = Claim {
                ttl: processes::SHORT,
                ..claim("door", Ask::Whole)
            };
            say(&enter(&engine, held).await.0.sequence.to_string());
            wait_for_end();
        }
        "read" => {
            let engine = open(dir).await;
            let (_, sequence) = enter(&engine, claim("door", Ask::READ)).await;
            say(&format!("{}", sequence.unwrap()));
            wait_for_end();
        }
        "wait" => wait(dir).await,
        "wait without I/O" => {
            let wait = || {
                let mut builder = tokio::runtime::Builder::new_current_thread();
                let runtime = builder.enable_time().build().unwrap();
                runtime.block_on(wait(dir));
            };
            std::thread::scope(|scope| scope.spawn(wait).join().unwrap());
        }
        "victim" => {
            use futures_util::StreamExt;
            let engine = open(dir).await;
            let mut alarms = engine.alarms();
            let ticket = hold(&engine, "door").await;
            say(&ticket.claim.to_string());
            alarms.next().await.unwrap();
            let lease = Lease::in_a_test(&ticket);
            match &engine.renew(vec![lease], Duration::from_secs(2)).await[..] {
                [Renewal::Evicted] => say("evicted"),
                other => say(&format!("{other:?}")),
            }
            wait_for_end();
        }
        "churn" => {
            let engine = open(dir).await;
            let mut held = std::collections::VecDeque::new();
            for at in 0usize.. {
                let value = "v".repeat(at * 7919 % 20_000);
                let name = format!("{}{}", "n".repeat(at % 60), at * 31 % 97);
                let entered = Claim {
                    value: Some(value),
                    ..claim(&name, Ask::READ)
                };
                held.push_back(enter(&engine, entered).await.0);
                if held.len() > 200 - at % 150 {
                    engine
                        .leave(held.remove(at % held.len()).unwrap())
                        .await
                        .unwrap();
                }
                if at == 300 {
                    say("busy");
                }
            }
        }
        "guarded" => guarded(dir).await,
        // What the command does, but for the guardian.
        "run" => {
            let prepared = match palisade::command::prepare(&format!("file:{}", dir.display())) {
                Ok(prepared) => prepared,
                Err(error) => return say(&error.to_string()),
            };
            let run = async {
                let client = prepared.connect().await?;
                let name = format!("name-{}", std::process::id() % 3);
                let held = client.mutex(name).lock().await?;
                held.release().await?;
                drop(prepared);
                client.close().await;
                Ok::<(), palisade::Error>(())
            };
            match run.await {
                Ok(()) => say("ran"),
                Err(error) => say(&error.to_string()),
            }
        }
        "try mine and after" => {
            let engine = open(dir).await;
            let mut said = Vec::new();
            for name in ["mine", "after"] {
                let impatient = Claim {
                    queue: false,
                    ..claim(name, Ask::Whole)
                };
                let entered = engine.enter(Arc::new(impatient)).await.unwrap();
                said.push(match entered {
                    Entered::Busy => "busy",
                    Entered::In { .. } => "in",
                });
            }
            say(&said.join(" "));
        }
        "hold shortly" => {
            let engine = open(dir).await;
            let ttl = Duration::from_secs(1);
            let short = Claim {
                ttl,
                ..claim("door", Ask::Whole)
            };
            let (ticket, _) = enter(&engine, short).await;
            say("held");
            let lease = || Lease::in_a_test(&ticket);
            loop {
                tokio::time::sleep(ttl / 3).await;
                match engine.renew(vec![lease()], ttl).await.remove(0) {
                    Renewal::Held(_) => {}
                    Renewal::Revoked(error) => break say(&error.to_string()),
                    other => break say(&format!("{other:?}")),
                }
            }
            wait_for_end();
        }
        "try" => {
            let tried = async {
                let engine = try_open(dir, "connect_timeout=1s&timeout=1s").await?;
                let impatient = Claim {
                    queue: false,
                    ..claim("door", Ask::Whole)
                };
                engine.enter(Arc::new(impatient)).await
            };
            say(&match tried.await {
                Ok(Entered::Busy) => "busy".to_owned(),
                Ok(Entered::In { .. }) => "in".to_owned(),
                Err(error) => format!("{:?}: {error}", error.kind()),
            });
        }
        "look for a store" => {
            let url = format!("file:{}", dir.display());
            say(&match palisade::connect_existing(&url).await {
                Ok(found) => format!("found: {}", found.is_some()),
                Err(error) => format!("{:?}: {error}", error.kind()),
            });
        }
        "wait and tell" => {
            let engine = open(dir).await;
            let (ticket, _) = enter(&engine, claim("door", Ask::Whole)).await;
            say("waiting");
            loop {
                let until = BootTime::now() + Duration::from_millis(200);
                match engine.wait(ticket.clone(), until).await {
                    Ok(Place::Waiting) => {}
                    Ok(Place::Held { .. }) => break say("held"),
                    Ok(Place::Gone) => break say("gone"),
                    Err(error) => {
                        say(&format!("{:?}: {error}", error.kind()));
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                }
            }
            wait_for_end();
        }
        "count" => count(&open(dir).await, dir).await,
        "stop in the lock" => stop_in(&dir.join("lock")),
        "read the leases and stop" => {
            let leases = std::fs::read_dir(dir.join("leases")).unwrap();
            let plain = |file: &std::path::PathBuf| file.is_file();
            let files = leases.map(|file| file.unwrap().path()).filter(plain);
            let files: Vec<_> = files.map(|f| std::fs::File::open(f).unwrap()).collect();
            files.iter().for_each(|file| file.lock_shared().unwrap());
            stop();
        }
        "stop in the line" => stop_in(&dir.join("lines/palisade,door")),
        other => panic!("no such role: {other}"),
    }
}

fn stop_in(file: &Path) {
    let lock = std::fs::File::open(file).unwrap();
    lock.lock().unwrap();
    stop();
}

fn stop() {
    say("locked");
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)
        .unwrap();
    wait_for_end();
}

async fn wait(dir: &Path) {
    let engine = open(dir).await;
    let (ticket, sequence) = enter(&engine, claim("door", Ask::Whole)).await;
    assert_eq!(sequence, None);
    say("waiting");
    let Place::Held { sequence } = pushed(&engine, &ticket).await else {
        panic!("granted");
    };
    say(&sequence.to_string());
    wait_for_end();
}

/// Holds with a sign of life that another process shares, as a fork would.
async fn guarded(dir: &Path) {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let prepared = palisade::command::prepare(&format!("file:{}", dir.display())).unwrap();
    let procs = dir.canonicalize().unwrap().join("procs");
    let is_fifo = |fd: &i32| {
        let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
        link.is_ok_and(|path| path.parent() == Some(&procs))
    };
    let fifo = (0..100).find(is_fifo).unwrap();
    let me = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let shared = pidfd_getfd(&me, fifo, PidfdGetfdFlags::empty()).unwrap();
    let mut guard = Command::new("sleep")
        .arg("60")
        .stdin(shared)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let client = prepared.connect().await.unwrap();
    hold(client.engine(), "door").await;
    say(&guard.id().to_string());
    wait_for_end();
    let _ = guard.wait();
}

/// Adds to a file under the lock, not atomically: two at once would lose updates. Also proves
/// that counts rise from grant to grant.
async fn count(engine: &SharedEngine, dir: &Path) {
    let file = dir.join("count");
    for _ in 0..ROUNDS {
        let (mut ticket, sequence) = enter(engine, claim("count", Ask::Whole)).await;
        let sequence = match sequence {
            Some(sequence) => sequence,
            None => match pushed_or_looked(engine, &ticket).await {
                Place::Held { sequence } => sequence,
                other => panic!("{other:?}"),
            },
        };
        ticket.sequence = sequence;
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let (sum, last) = text.split_once(' ').unwrap_or(("0", "0"));
        assert!(sequence > last.parse::<u64>().unwrap());
        let sum = sum.parse::<u64>().unwrap() + 1;
        std::fs::write(&file, format!("{sum} {sequence}")).unwrap();
        assert_eq!(engine.leave(ticket).await.unwrap(), Left::Done);
    }
    say("done");
}

async fn pushed_or_looked(engine: &SharedEngine, ticket: &Ticket) -> Place {
    let until = BootTime::now() + PATIENCE;
    engine.wait(ticket.clone(), until).await.unwrap()
}

/// How often each counting process counts.
pub(crate) const ROUNDS: u64 = 300;
